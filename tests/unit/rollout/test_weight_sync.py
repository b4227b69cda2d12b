"""How long the ranks wait for the servers, and the room for new weights."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gspo_megatron.errors import DataError, RolloutError, ServersEndError
from gspo_megatron.platform.stop import StopSignals
from gspo_megatron.rollout.vllm import weight_sync as weight_sync_module
from gspo_megatron.rollout.vllm.weight_sync import WeightSync
from tests.unit.models.one_rank import one_rank_groups, tiny_config


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    with one_rank_groups():
        yield


def status(tokens: int, *, done: bool = False) -> dict[str, Any]:
    return {"done": done, "tokens": tokens}


@contextlib.contextmanager
def weight_sync(
    folder: Path, *, stops: bool, servers_end: bool, transport: str = "auto"
) -> Iterator[WeightSync]:
    """The part of a run that sends weights to servers and waits for servers. stops: the run was
    told to stop; servers_end: the servers were told to end."""
    service = SimpleNamespace(needs_folder=False, told_to_end=servers_end)
    section = {"servers": 1, "weight_transport": transport}
    config = tiny_config(rollout={"engine": "vllm", "vllm": section}, training={"steps": 9})
    nothing, device = cast(Any, None), torch.device("cpu")
    rest = cast(Any, service), folder
    with StopSignals(enabled=True) as stop:
        if stops:
            signal.raise_signal(signal.SIGTERM)
        yield WeightSync(config, nothing, nothing, device, None, *rest, stop)


@pytest.mark.parametrize(
    ("stops", "servers_end", "tokens", "is_given_up"),
    [
        (True, True, [5, 5], True),
        (True, True, [5, 6, 7, 7], True),
        (True, True, [5, 6, 7, 8], False),  # the servers still generate
        (True, False, [5, 5, 5, 6], False),  # only the ranks were told to stop
        (False, True, [5, 5, 5, 6], False),  # only the service was told to end
    ],
)
def test_a_run_that_stops_waits_for_ending_servers_only_while_they_generate(
    tmp_path: Path, stops: bool, servers_end: bool, tokens: list[int], is_given_up: bool
) -> None:
    left = [*map(status, tokens), status(9, done=True)]
    with weight_sync(tmp_path, stops=stops, servers_end=servers_end) as sync:
        if is_given_up:
            with pytest.raises(ServersEndError):
                sync.wait_for(lambda: left.pop(0))
            assert len(left) == 1
        else:
            assert sync.wait_for(lambda: left.pop(0)) == status(9, done=True)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("servers_end", [False, True])
def test_servers_that_fail_because_they_were_told_to_end_are_no_failure_of_the_run(
    tmp_path: Path, stops: bool, servers_end: bool
) -> None:
    """For example, servers that get SIGTERM while they start."""

    def fail() -> dict[str, Any]:
        raise RolloutError("server 0: ended with exit code 1")

    expected = ServersEndError if stops and servers_end else RolloutError
    with weight_sync(tmp_path, stops=stops, servers_end=servers_end) as sync:
        with pytest.raises(RolloutError) as raised:
            sync.wait_for(fail)
        assert type(raised.value) is expected


@pytest.mark.parametrize(
    ("version", "transport", "free", "refusal"),
    [
        (0, "disk", 19, "two versions of the weights for the servers take 20 bytes, and 19 are"),
        (0, "disk", 20, None),
        (0, "nccl", 10, None),  # the next version is streamed
        (0, "nccl", 9, "the weights for the servers take 10 bytes, and 9 are free; free some, or "),
        (9, "disk", 10, None),  # there is no next version
        (1, "disk", 10, None),
        (1, "disk", 9, "or set rollout.vllm.weights_dir to a folder with more room"),
        (2, "disk", 0, None),  # overwrites the version before the last one
    ],
)
def test_weights_that_do_not_fit_are_refused_before_they_are_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    transport: str,
    free: int,
    refusal: str | None,
) -> None:
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(weight_sync_module.shutil, "disk_usage", lambda _: usage)
    exports: list[bool] = []
    monkeypatch.setattr(weight_sync_module, "export_hf", lambda *_, **__: exports.append(True))
    weights = {"w": torch.empty(10, dtype=torch.uint8, device="meta")}
    monkeypatch.setattr(weight_sync_module, "stream_specs", lambda *_, **__: weights)
    if version in (1, 2):
        (tmp_path / f"version_{version - 1:08d}").mkdir()
    if version == 2:
        (tmp_path / "spare").mkdir()
    with weight_sync(tmp_path, stops=False, servers_end=False, transport=transport) as sync:
        sync.version = version
        if refusal is None:
            sync._write_folder()
        else:
            with pytest.raises(DataError, match=re.escape(refusal)) as raised:
                sync._write_folder()
            assert str(raised.value).startswith(f"{tmp_path}: ")
    assert bool(exports) == (refusal is None)
