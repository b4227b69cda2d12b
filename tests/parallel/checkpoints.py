"""Training that is saved and resumed on several ranks. The state of the run is joined to whole
tensors on rank 0.

The state is assembled without the code under test. The optimizer's ranges are summed over the
data-parallel ranks into tensors of the parameters' shapes. models.shards then joins these tensors.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.checkpoint import tensors
from gspo_megatron.checkpoint import writer as checkpoint_writer
from gspo_megatron.checkpoint.optimizer import load_trainer_state, trainer_state
from gspo_megatron.checkpoint.rng import load_rng, save_rng
from gspo_megatron.checkpoint.tensors import load_model, load_optimizer, save_tensors
from gspo_megatron.config import Config
from gspo_megatron.errors import DataError
from gspo_megatron.families.weight_map import is_vocabulary
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer
from gspo_megatron.models.shards import Shard, parameter_shards
from gspo_megatron.objectives import build_objective
from gspo_megatron.platform.collectives import all_gather_objects, gather_objects
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.verify import parity
from gspo_megatron.verify.synthetic import synthetic_batch
from tests.parallel.models import NO_ROUTER_LOSSES, VOCAB_SIZE, build_on_ranks, odd_moe

# With warm-up and decay, a resumed run has the right learning rate only if its position in the
# schedule was saved.
SCHEDULE = Schedule(peak=2e-3, floor=1e-4, warmup=2, total=9, decay="cosine")
STATES = ("param", "exp_avg", "exp_avg_sq")


@dataclass
class State:
    """The whole tensors of a run, on the CPU and without the vocabulary's padding. Only rank 0 has
    them."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    # The optimizer's moments and the fp32 parameters, with names of STATES as keys.
    moments: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    rate: float = 0.0  # the learning rate of the next update


@dataclass
class Outcome:
    """The state of a run when it was saved or resumed, and its state after one more update."""

    state: State
    later: State


def run_config(layout: str, precision: str = "fp32", ddp: dict | None = None, **more) -> Config:
    """A configuration with a large epsilon, so that an update is a smooth function of the gradient.
    Otherwise the rounding of gradients near 0 would dominate a comparison of layouts."""
    training = {"precision": precision}
    config = odd_moe(layout, training=training, ddp=ddp, **NO_ROUTER_LOSSES, **more)
    section = config.optimizer.model_copy(update={"epsilon": 1e-4, "weight_decay": 0.1})
    return config.model_copy(update={"optimizer": section})


def start(config: Config) -> tuple[Policy, Trainer]:
    policy = build_on_ranks(config)
    return policy, build_trainer(policy, config.optimizer, SCHEDULE)


def update(config: Config, policy: Policy, trainer: Trainer, seed: int) -> None:
    """Update the policy on random sequences, with the code of a training step."""
    batch = synthetic_batch(config.objective, VOCAB_SIZE, seed=seed)
    lengths, cut = [len(tokens) for tokens in batch.tokens], parity.Cut(4, 60, multiple=2)
    plans = parity.plan_alike(config, lengths, batch.response_lengths, cut, 1)
    sequences, index = parity.distribute(batch, plans, policy)
    builder = MicroBatchBuilder(policy, 0, config.rollout.temperature)
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    updater = PolicyUpdater(policy, trainer, builder, objective, config.objective, config.routing)
    update_policy(updater, sequences, index, plans, index.rewards.float())


def train_and_save(
    config: Config,
    folder: Path,
    *,
    updates: int = 3,
    asynchronous: bool = False,
) -> Outcome:
    """Make `updates` updates, save, and make one more update. With an asynchronous save, the last
    update happens before the first byte is written."""
    policy, trainer = start(config)
    for number in range(updates):
        update(config, policy, trainer, seed=number)
    position = json.dumps(trainer_state(trainer))
    native, released = tensors.write_pieces, threading.Event()

    def write_pieces(*arguments: Any) -> None:
        assert not asynchronous or released.wait(60)
        native(*arguments)

    with mock.patch.object(tensors, "write_pieces", write_pieces):
        # Right after an update, an asynchronous gather of the parameters may still be in progress.
        save = save_tensors(folder, policy, trainer, asynchronous=asynchronous)
        state = gather_state(policy, trainer)
        if asynchronous:
            update(config, policy, trainer, seed=updates)
            assert not save.done()
        released.set()
        save.result()
    assert save.done()
    if not asynchronous:
        update(config, policy, trainer, seed=updates)
    if dist.get_rank() == 0:
        (folder / "trainer.json").write_text(position)
    return Outcome(state, gather_state(policy, trainer))


def error_of(config: Config, folder: Path, *, asynchronous: bool | None = None) -> str:
    """The error of this rank when a load fails, or when a save fails if `asynchronous` is given."""
    policy, trainer = start(config)
    try:
        if asynchronous is not None:
            save_tensors(folder, policy, trainer, asynchronous=asynchronous).result()
        else:
            load_model(folder, policy)
            load_optimizer(folder, policy, trainer)
    except DataError as error:
        return str(error)
    return ""


def stock_load(config: Config, folder: Path) -> dict[str, Tensor]:
    """The whole weights on rank 0, as Megatron-Core's own code loads them."""
    policy, _ = start(config)
    with torch.no_grad():
        for model in policy.models:
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.zero_()
            entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
            stored = {  # the extra state is left out, because it has only FP8 scales
                k: v for k, v in entries.items() if not isinstance(v, ShardedObject)
            }
            dist_checkpointing.load(stored, str(folder / "model"))
    shards = [s for model in policy.models for s in parameter_shards(model)]
    return _assemble(shards, lambda shard: shard.data, VOCAB_SIZE)


def resume(config: Config, folder: Path, *, updates: int = 3) -> Outcome:
    """Load a checkpoint, and make the same update as the last update of train_and_save."""
    policy, trainer = start(config)
    update(config, policy, trainer, seed=1000)  # the load must undo every effect of this update
    load_all(folder, policy, trainer)
    state = gather_state(policy, trainer)
    update(config, policy, trainer, seed=updates)
    return Outcome(state, gather_state(policy, trainer))


def move(config: Config, source: Path, destination: Path) -> Outcome:
    """Load and save again, without an update in between."""
    policy, trainer = start(config)
    load_all(source, policy, trainer)
    state = gather_state(policy, trainer)
    save_tensors(destination, policy, trainer, asynchronous=False).result()
    if dist.get_rank() == 0:
        position = (source / "trainer.json").read_text()
        (destination / "trainer.json").write_text(position)
    return Outcome(state, state)


def load_all(folder: Path, policy: Policy, trainer: Trainer) -> None:
    load_model(folder, policy)
    load_optimizer(folder, policy, trainer)
    load_trainer_state(trainer, json.loads((folder / "trainer.json").read_text()))


def gather_state(policy: Policy, trainer: Trainer) -> State:
    """The state of the run on rank 0. Also checks that weights are the rounded fp32 parameters, and
    that all copies of a weight, of its moments and of a buffer are equal."""
    for chunk in policy.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    flat = _flat_states(trainer)
    shards = [s for model in policy.models for s in parameter_shards(model)]
    state = State(rate=trainer.optimizer.param_groups[0]["lr"], steps=_steps(trainer))
    state.weights = _assemble(shards, lambda shard: shard.data, policy.vocab_size)
    for name in STATES:
        found = _assemble(
            shards, lambda shard, name=name: shard.view(flat[shard.parameter][name]), VOCAB_SIZE
        )
        state.moments |= {f"{name} of {key}": value for key, value in found.items()}
    for parameter, states in flat.items():
        assert torch.equal(states["param"].to(parameter.dtype), parameter)
    return state if dist.get_rank() == 0 else State()


def _parts(trainer: Trainer) -> list:
    return getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def _flat_states(trainer: Trainer) -> dict[torch.nn.Parameter, dict[str, Tensor]]:
    """The optimizer's states of each parameter, as whole tensors in the parameter's shape."""
    whole = {}
    for part in _parts(trainer):
        places = part.model_param_gbuf_map
        of_experts = any(map(_is_expert, places))
        for parameter in (p for chunk in part.model_chunks for p in chunk.parameters()):
            if _is_expert(parameter) != of_experts:
                continue
            states = {n: torch.zeros(parameter.numel()) for n in STATES}
            if parameter in places:
                own = part._get_model_param_range_map(parameter)["param"]
                found = part._get_main_param_and_optimizer_states(parameter)
                for name in STATES:
                    states[name][own.start : own.end] = found[name].detach()
            for tensor in states.values():
                dist.all_reduce(tensor, group=part.data_parallel_group)
            whole[parameter] = {n: t.view(parameter.shape) for n, t in states.items()}
    return whole


def _steps(trainer: Trainer) -> int:
    states = (s for part in _parts(trainer) for s in part.optimizer.state.values())
    (found,) = {int(state["step"]) for state in states}
    return found


def _assemble(
    shards: list[Shard], data: Callable[[Shard], Tensor], vocab_size: int
) -> dict[str, Tensor]:
    mine = [(s.name, s.global_shape, s.slices, data(s).detach().clone()) for s in shards]
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, shape, slices, piece in (p for each in gather_objects(mine) or () for p in each):
        if name not in whole:
            whole[name] = torch.zeros(shape, dtype=piece.dtype)
            seen[name] = torch.zeros(shape, dtype=torch.bool)
        known = seen[name][slices]
        assert torch.equal(whole[name][slices][known], piece[known]), f"copies of {name} differ"
        whole[name][slices] = piece
        seen[name][slices] = True
    for name in whole:
        assert seen[name].all(), name
        if is_vocabulary(name):
            assert not whole[name][vocab_size:].any(), f"padding of {name}"
            whole[name] = whole[name][:vocab_size]
    return whole


def expert_biases(config: Config, folder: Path, *, save: bool) -> dict[str, Tensor]:
    """Return the expert biases of all ranks, after a check that copies are equal. With `save`, the
    biases get random values and a checkpoint is saved; otherwise a checkpoint is loaded. The biases
    are buffers, so the optimizer does not contain them."""
    policy, _ = start(config)
    if not save:
        load_model(folder, policy)
    states = (
        m.sharded_state_dict(metadata={"non_homogeneous_layers": True}) for m in policy.models
    )
    entries = [entry for state in states for entry in state.values()]
    biases = {entry.key: entry.data for entry in entries if entry.key.endswith("expert_bias")}
    if save:
        for name, bias in biases.items():
            generator = torch.Generator().manual_seed(len(name) + int(name.split(".")[2]))
            bias.copy_(torch.randn(bias.shape, generator=generator))
        save_tensors(folder, policy, None, asynchronous=False).result()
    whole: dict[str, Tensor] = {}
    for found in all_gather_objects(biases):
        for name, value in found.items():
            assert torch.equal(whole.setdefault(name, value), value), f"copies of {name} differ"
    return whole


def save_generators(config: Config, folder: Path) -> None:
    start(config)
    save_rng(folder)


def rng_after_resume(config: Config, folder: Path, other: Path) -> tuple[str, list[str]]:
    """The random numbers that follow save_rng, and how the numbers that follow load_rng differ from
    them."""
    save_generators(config, folder)
    first = _draw()
    problems = []
    if _draw() == first:
        problems.append("the generators stand still")
    if load_rng(other):
        problems.append("took the state of another layout")
    if not load_rng(folder) or _draw() != first:
        problems.append("other numbers")
    return first, problems


def _draw() -> str:
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(3).tolist()
    with get_cuda_rng_tracker().fork("expert-parallel-rng"):
        experts = torch.rand(3).tolist()
    drawn = [torch.rand(3).tolist(), tracked, experts, np.random.randn(3).tolist()]
    return repr([*drawn, random.gauss(0, 1), random.random()])


@dataclass
class Published:
    """The actions of a rank while a checkpoint was published."""

    problem: str | None
    looks: int  # the number of times that the rank listed the folder
    over_writers: bool  # whether all messages between ranks went over the group of writers


def publish(config: Config, folder: Path, *, asynchronous: bool) -> Published:
    """Publish a checkpoint to which each rank adds a small file. Ranks with higher numbers write
    later."""
    policy, trainer = start(config)
    rank, groups, native = dist.get_rank(), [], tensors.write_pieces

    def write_pieces(below: Path, pieces: Any, group: Any = None, *rest: Any) -> None:
        groups.append(group)
        native(below, pieces, group, *rest)

    def write_small(below: Path) -> None:
        time.sleep(0.2 * rank)
        (below / f"rank_{rank:05d}.txt").write_text("small")

    look = mock.patch.object(
        checkpoint_writer, "files_below", side_effect=checkpoint_writer.files_below
    )
    with look as looks, mock.patch.object(tensors, "write_pieces", write_pieces):
        writer = checkpoint_writer.CheckpointWriter(folder, policy)
        begun = writer.begin("new", trainer, write_small, asynchronous=asynchronous)
        problem = begun or writer.finish()
    over_writers = all(group is tensors.writers() for group in groups)
    return Published(problem, looks.call_count, over_writers)
