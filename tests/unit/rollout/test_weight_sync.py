"""How long the ranks wait for the servers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gspo_megatron.errors import RolloutError, ServersEndError
from gspo_megatron.platform.stop import StopSignals
from gspo_megatron.rollout.vllm.weight_sync import WeightSync
from tests.unit.models.one_rank import one_rank_groups, tiny_config


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    with one_rank_groups():
        yield


def status(tokens: int, *, done: bool = False) -> dict[str, Any]:
    return {"done": done, "tokens": tokens}


@contextlib.contextmanager
def weight_sync(folder: Path, *, stops: bool, servers_end: bool) -> Iterator[WeightSync]:
    """The part of a run that waits for servers. stops: the run was told to stop; servers_end: the
    servers were told to end."""
    service = SimpleNamespace(needs_folder=False, told_to_end=servers_end)
    config = tiny_config(rollout={"engine": "vllm", "vllm": {"servers": 1}})
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
