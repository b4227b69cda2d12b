"""Joining and leaving torch.distributed with a single process; devices and seeds."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.config import resolve_parallel
from gspo_megatron.errors import UserError
from gspo_megatron.platform import devices
from gspo_megatron.platform.groups import (
    model_replica,
    patience_minutes,
    set_up_model_parallel,
    start_processes,
    stop_processes,
    tear_down_model_parallel,
)
from gspo_megatron.process import ranks
from tests.unit.models.one_rank import one_rank_groups, tiny_config, tiny_policy


@pytest.mark.parametrize("given", [None, "MASTER_ADDR", "MASTER_PORT"])
def test_alone_without_a_rendezvous(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster may set one of the variables in every shell."""
    if given is not None:
        monkeypatch.setenv(given, "node1")
    before = dict(os.environ)
    with one_rank_groups():
        ranks = start_processes()  # a second call changes nothing
        assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
        group, source = model_replica()
        assert (group.size(), source) == (1, 0)
        assert ranks.device == devices.select_device()
    assert not dist.is_initialized() and not parallel_state.is_initialized()
    assert dict(os.environ) == before
    stop_processes()  # harmless without running processes


def test_a_collective_waits_longer_than_the_heartbeat() -> None:
    assert patience_minutes(1200) == 30  # torch's default, because it is longer than the heartbeat
    assert patience_minutes(7200) == 180
    assert patience_minutes(0) > 7 * 24 * 60  # a heartbeat of 0 means no limit


def test_another_model_may_have_more_layers() -> None:
    """Megatron-Core keeps the routers' losses in an array with one entry for each layer. A new
    model must not get the old array."""
    for layers in (2, 3):
        with one_rank_groups():
            options = {"num_layers": layers, "moe_aux_loss_coeff": 0.01}
            policy = tiny_policy(model={"megatron": options})
            policy.train()
            [tokens] = torch.randint(0, 8, (1, 1, 6))
            with torch.enable_grad():
                policy.models[0](
                    input_ids=tokens, position_ids=torch.arange(6)[None], attention_mask=None
                )


def test_groups_of_another_layout_wait_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    make = dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda *a, **k: waits.append(k["timeout"]) or make(*a, **k)
    )
    with one_rank_groups():
        for minutes in (77, 78):
            tear_down_model_parallel()
            assert not parallel_state.is_initialized()
            set_up_model_parallel(resolve_parallel(tiny_config(), 1), 0, timeout_minutes=minutes)
            assert parallel_state.get_tensor_model_parallel_world_size() == 1
            assert set(waits[-3:]) == {datetime.timedelta(minutes=minutes)}


def test_an_error_on_its_way_out_waits_for_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank_groups():
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(dist, "get_backend", lambda: "nccl")
            patch.setattr(dist, "get_world_size", lambda: 2)
            try:
                raise KeyError
            finally:
                stop_processes()
        assert dist.is_initialized() and not parallel_state.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "3"}, 3),
        ({"SLURM_LOCALID": "5"}, 5),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "5"}, 3),
    ],
)
def test_local_rank(
    variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert devices.local_rank() == expected


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that pretends that this process is local rank `rank` and sees `count` GPUs."""

    def pretend(rank: int, count: int, hidden_to: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if hidden_to is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden_to)

    return pretend


@pytest.mark.parametrize(
    ("rank", "count", "hidden_to", "expected"),
    [(0, 1, None, 0), (7, 8, None, 7), (1, 2, "4,5", 1), (5, 1, "0", 0), (5, 1, "GPU-8f4e", 0)],
)
def test_each_rank_of_a_host_takes_its_own_gpu(
    visible: Callable[..., None], rank: int, count: int, hidden_to: str | None, expected: int
) -> None:
    visible(rank, count, hidden_to)
    assert devices.select_device() == torch.device("cuda", expected)


def test_servers_do_not_get_the_variable_that_only_ranks_need(
    visible: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(ranks, "_own_variables", set())
    visible(0, 1)
    monkeypatch.setenv(name, "8")  # by the user
    devices.select_device()
    assert ranks.environment_of_children()[name] == "8"
    monkeypatch.delenv(name)
    devices.select_device()
    assert os.environ[name] == "1"
    assert name not in ranks.environment_of_children()


@pytest.mark.parametrize(
    ("rank", "count", "hidden_to"), [(1, 1, None), (1, 1, ""), (8, 8, None), (2, 2, "0,1")]
)
def test_two_ranks_do_not_share_a_gpu(
    visible: Callable[..., None], rank: int, count: int, hidden_to: str | None
) -> None:
    visible(rank, count, hidden_to)
    told = f"local rank {rank} .*sees {count} GPU.*CUDA_VISIBLE_DEVICES"
    with pytest.raises(UserError, match=told):
        devices.select_device()


def test_backends() -> None:
    assert devices.collective_backend(torch.device("cpu")) == "gloo"
    assert devices.collective_backend(torch.device("cuda", 1)) == "nccl"


def test_seeds_reach_every_generator() -> None:
    seed = (3 << 32) + 17  # larger than any seed of numpy
    drawn = []
    for _ in range(2):
        devices.set_seeds(seed)
        drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]
