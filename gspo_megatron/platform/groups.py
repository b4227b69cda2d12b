"""Process groups: torch.distributed and Megatron's parallel_state, set up and taken down."""

from __future__ import annotations

import datetime
import gc
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from gspo_megatron.config.parallel import ResolvedParallel
from gspo_megatron.platform.devices import collective_backend, select_device, set_seeds
from gspo_megatron.platform.megatron_fixes import forget_router_losses
from gspo_megatron.platform.rendezvous import join_store


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and the device of this process."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def model_replica() -> tuple[dist.ProcessGroup, int]:
    """Return the ranks that share one copy of the model and one batch (TP x PP), and the rank that
    decides for them: the first TP rank of the last pipeline stage."""
    group = parallel_state.get_model_parallel_group()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return group, dist.get_process_group_ranks(group)[-tp]


def data_parallel_group() -> dist.ProcessGroup:
    """Return the group of data and context parallelism together. Its ranks hold the same part of
    the model and different sequences, or different parts of the same sequences."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


_PATIENCE_MINUTES = 30.0  # the time-out of a collective, as in torch and Megatron-Core
_FOR_EVER_MINUTES = 30.0 * 24 * 60


def patience_minutes(hang_timeout_seconds: float) -> float:
    """Return the time-out of collectives in minutes. It is longer than the time-out of the
    heartbeat (process.heartbeat), because the heartbeat names the rank that hangs. If
    `hang_timeout_seconds` is 0, neither collectives nor heartbeat end a run that hangs."""
    if not hang_timeout_seconds:
        return _FOR_EVER_MINUTES
    return max(_PATIENCE_MINUTES, 1.5 * hang_timeout_seconds / 60)


def start_processes(timeout_minutes: float = _PATIENCE_MINUTES) -> Ranks:
    """Join torch.distributed by the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which
    torchrun and our launcher set. Without them this process is the only rank."""
    device = select_device()
    if not dist.is_initialized():
        # These variables are not set here: then the programs that this process starts, and a later
        # run in this process, would take themselves for ranks.
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        # A single process needs no port, so two runs on one machine cannot collide. A cluster's
        # settings may name an address alone.
        is_alone = world_size == 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        patience = datetime.timedelta(minutes=timeout_minutes)
        dist.init_process_group(
            backend=collective_backend(device),
            store=dist.HashStore() if is_alone else join_store(patience),
            rank=int(os.environ.get("RANK", "0")),
            world_size=world_size,
            timeout=patience,
        )
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def set_up_model_parallel(
    parallel: ResolvedParallel, seed: int, timeout_minutes: float = _PATIENCE_MINUTES
) -> None:
    """Build Megatron's process groups for a checked layout, and seed its RNG tracker."""
    parallel_state.initialize_model_parallel(
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_minutes,
        **parallel.group_sizes(),
    )
    set_seeds(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def tear_down_model_parallel() -> None:
    """Destroy Megatron's groups, so that the same processes can build another layout."""
    parallel_state.destroy_model_parallel()
    # Megatron-Core's cache of rotary angles has the module as its key. It would keep up to 32 old
    # models in memory, with their process groups and the threads of these groups.
    RotaryEmbedding.forward.cache_clear()
    forget_router_losses()
    gc.collect()


def stop_processes() -> None:
    """Leave torch.distributed. Does nothing if it never started.

    While an error is being raised, NCCL's groups of several ranks are not destroyed. Destroying a
    group needs all of its ranks, but some may wait for this rank in another collective. Then the
    error would never be printed. The end of the process aborts the groups.
    """
    if parallel_state.is_initialized():
        tear_down_model_parallel()
    if not dist.is_initialized():
        return
    is_failing = sys.exc_info()[0] is not None
    if is_failing and dist.get_backend() == "nccl" and dist.get_world_size() > 1:
        return
    dist.destroy_process_group()
