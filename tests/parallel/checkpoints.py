"""Training that is saved and resumed on ranks, and its state as whole tensors on rank 0.

The state is put together without the code under test: the optimizer's ranges are summed over its
data-parallel ranks into tensors of the parameters' shapes, and those by models.shards.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.batching.plan import data_ranks, plan_step
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.checkpoint import tensors
from gspo_megatron.checkpoint.optimizer import load_trainer_state, trainer_state
from gspo_megatron.checkpoint.tensors import load_model, load_optimizer, save_tensors
from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer
from gspo_megatron.models.shards import Shard, parameter_shards
from gspo_megatron.objectives import build_objective
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.types import RolloutBatch
from gspo_megatron.verify.synthetic import synthetic_batch
from tests.parallel.models import VOCAB_SIZE, odd_moe

# warm-up and decay: the learning rate of a resumed run is right only if its position is
SCHEDULE = Schedule(peak=2e-3, floor=1e-4, warmup=2, total=9, decay="cosine")
STATES = ("param", "exp_avg", "exp_avg_sq")


@dataclass
class State:
    """A run's tensors, whole and on the cpu, vocabulary padding cut off; empty but on rank 0."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)  # and fp32 parameters, by STATES
    steps: int = 0
    rate: float = 0.0  # learning rate of the next update


@dataclass
class Outcome:
    """What a run was when it was saved or resumed, and after one more update."""

    state: State
    later: State


def run_config(layout: str, precision: str = "fp32", ddp: dict | None = None, **more) -> Config:
    """Large enough an epsilon that an update is a smooth function of the gradient: what is compared
    over layouts is the resumed state, not the rounding of gradients that vanish."""
    config = odd_moe(
        layout,
        training={"precision": precision},
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        **more,
    )
    section = config.optimizer.model_copy(update={"epsilon": 1e-4, "weight_decay": 0.1})
    parallel = config.parallel.model_copy(update={"ddp": ddp or {}})
    return config.model_copy(update={"optimizer": section, "parallel": parallel})


def start(config: Config) -> tuple[Policy, Trainer]:
    parallel = resolve_parallel(config, dist.get_world_size())
    set_up_model_parallel(parallel, config.training.seed)
    policy = build_policy(config, parallel, VOCAB_SIZE)
    return policy, build_trainer(policy, config.optimizer, SCHEDULE)


def update(config: Config, policy: Policy, trainer: Trainer, seed: int) -> None:
    """A policy update on random sequences, by the code of a training step."""
    parallel = resolve_parallel(config, dist.get_world_size())
    batch = synthetic_batch(config.objective, VOCAB_SIZE, seed=seed)
    lengths = torch.tensor([len(tokens) for tokens in batch.tokens])
    responses = torch.tensor(batch.response_lengths)
    vpp = parallel.virtual_pipeline_model_parallel_size
    plans = plan_step(
        lengths.tolist(),
        responses.tolist(),
        mini_batches=1,
        data_parallel_size=parallel.data_parallel_size,
        token_budget=60,
        micro_batch_multiple=parallel.pipeline_model_parallel_size if vpp else 1,
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mine = torch.arange(len(lengths))[group.rank() :: group.size()]  # as if sampled here
    rollout = RolloutBatch(
        tokens=torch.cat([batch.tokens[0][:0], *(batch.tokens[n] for n in mine)]),
        prompt_lengths=(lengths - responses)[mine],
        response_lengths=responses[mine],
        rollout_logprobs=torch.zeros(int(responses[mine].sum())),
        truncated=torch.zeros(len(mine), dtype=torch.bool),
        sample_index=mine,
        group_index=mine // 2,
    )
    advantages = torch.tensor(batch.advantages, dtype=torch.float64)[mine]
    index = gather_index(rollout, advantages, group)
    sequences = redistribute(
        rollout,
        index,
        data_ranks(plans, len(lengths)),
        group,
        context_parallel_size=policy.config.context_parallel_size,
    )
    builder = MicroBatchBuilder(policy, 0, config.rollout.temperature, padded=False)
    objective = build_objective(config.objective, config.rollout.max_response_tokens)
    updater = PolicyUpdater(policy, trainer, builder, objective, config.objective, config.routing)
    update_policy(updater, sequences, index, plans, index.rewards.float())


def train_and_save(
    config: Config,
    folder: Path,
    *,
    updates: int = 3,
    asynchronous: bool = False,
    held: bool = False,
) -> Outcome:
    """`updates` updates, a save, and one more update: during the save where it is asynchronous, and
    before its first byte is written where it is `held`."""
    policy, trainer = start(config)
    for number in range(updates):
        update(config, policy, trainer, seed=number)
    position = json.dumps(trainer_state(trainer))
    with _writing_held(held) as release:
        # right after an update: gathered parameters may still be on their way
        save = save_tensors(folder, policy, trainer, asynchronous=asynchronous)
        state = gather_state(policy, trainer)
        if asynchronous:
            update(config, policy, trainer, seed=updates)
            assert not (held and save.done())
        release()
        save.result()
    assert save.done()
    if not asynchronous:
        update(config, policy, trainer, seed=updates)
    if dist.get_rank() == 0:
        (folder / "trainer.json").write_text(position)
    return Outcome(state, gather_state(policy, trainer))


@contextlib.contextmanager
def _writing_held(held: bool) -> Iterator[Callable[[], None]]:
    """The writer waits for a call of what this yields."""
    native, released = tensors.write_pieces, threading.Event()

    def write_pieces(*arguments: Any) -> None:
        assert not held or released.wait(60)
        native(*arguments)

    tensors.write_pieces = write_pieces
    try:
        yield released.set
    finally:
        tensors.write_pieces = native


def save_errors(config: Config, folder: Path, *, asynchronous: bool) -> list[str]:
    """Every rank's error of a save that fails."""
    policy, trainer = start(config)

    def save() -> None:
        save_tensors(folder, policy, trainer, asynchronous=asynchronous).result()

    return _everyones_errors(save)


def load_errors(config: Config, folder: Path) -> list[str]:
    """Every rank's error of a load that fails."""
    policy, trainer = start(config)

    def load() -> None:
        load_model(folder, policy)
        load_optimizer(folder, policy, trainer)

    return _everyones_errors(load)


def _everyones_errors(action: Callable[[], None]) -> list[str]:
    error = ""
    try:
        action()
    except DataError as found:
        error = str(found)
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return errors


def stock_load(config: Config, folder: Path) -> dict[str, Tensor]:
    """The weights as Megatron-Core's own load reads them, whole on rank 0."""
    policy, _ = start(config)
    with torch.no_grad():
        for model in policy.models:
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.zero_()
            entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
            stored = {  # without the extra state, which is of FP8 scales alone
                k: v for k, v in entries.items() if not isinstance(v, ShardedObject)
            }
            dist_checkpointing.load(stored, str(folder / "model"))
    shards = [s for model in policy.models for s in parameter_shards(model)]
    return _assemble(shards, lambda shard: shard.data, VOCAB_SIZE)


def gathered(value: Any) -> list:
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def resume(config: Config, folder: Path, *, updates: int = 3) -> Outcome:
    """Load, and make the update that train_and_save made last."""
    policy, trainer = start(config)
    update(config, policy, trainer, seed=1000)  # nothing of this may be left
    load_all(folder, policy, trainer)
    state = gather_state(policy, trainer)
    update(config, policy, trainer, seed=updates)
    return Outcome(state, gather_state(policy, trainer))


def move(config: Config, source: Path, destination: Path) -> Outcome:
    """Load and save again, without an update between."""
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
    """The run's State on rank 0. Also: weights are the rounded fp32 parameters, and replicas of a
    weight, of its moments and of a buffer are equal on all ranks."""
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


def _flat_states(trainer: Trainer) -> dict[torch.nn.Parameter, dict[str, Tensor]]:
    """Each parameter's states, whole, in the parameter's shape."""
    chained = isinstance(trainer.optimizer, ChainedOptimizer)
    whole = {}
    for part in trainer.optimizer.chained_optimizers if chained else [trainer.optimizer]:
        for chunk in part.model_chunks:
            for parameter in chunk.parameters():
                experts = not getattr(parameter, "allreduce", True)
                if experts != _is_for_experts(part):
                    continue
                places = part.model_param_gbuf_map
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


def _is_for_experts(part) -> bool:
    owned = list(part.model_param_gbuf_map)
    return bool(owned) and not getattr(owned[0], "allreduce", True)


def _steps(trainer: Trainer) -> int:
    chained = isinstance(trainer.optimizer, ChainedOptimizer)
    parts = trainer.optimizer.chained_optimizers if chained else [trainer.optimizer]
    found = {int(s["step"]) for part in parts for s in part.optimizer.state.values()}
    assert len(found) == 1
    return found.pop()


def _assemble(
    shards: list[Shard], data: Callable[[Shard], Tensor], vocab_size: int
) -> dict[str, Tensor]:
    mine = [(s.name, s.global_shape, s.slices, data(s).detach().clone()) for s in shards]
    everyones: list = [None] * dist.get_world_size()
    dist.gather_object(mine, everyones if dist.get_rank() == 0 else None, dst=0)
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, shape, slices, piece in (p for pieces in everyones if pieces for p in pieces):
        if name not in whole:
            whole[name] = torch.zeros(shape, dtype=piece.dtype)
            seen[name] = torch.zeros(shape, dtype=torch.bool)
        known = seen[name][slices]
        assert torch.equal(whole[name][slices][known], piece[known]), f"copies of {name} differ"
        whole[name][slices] = piece
        seen[name][slices] = True
    for name in whole:
        assert seen[name].all(), name
        if "word_embeddings" in name or "output_layer" in name:
            assert not whole[name][vocab_size:].any(), f"padding of {name}"
            whole[name] = whole[name][:vocab_size]
    return whole


def save_expert_biases(config: Config, folder: Path) -> dict[str, Tensor]:
    """Random ones, as training would leave them; they are buffers, and no optimizer has them."""
    policy, _ = start(config)
    for name, bias in sorted(_expert_biases(policy).items()):
        generator = torch.Generator().manual_seed(len(name) + int(name.split(".")[2]))
        bias.copy_(torch.randn(bias.shape, generator=generator))
    save_tensors(folder, policy, None, asynchronous=False).result()
    return _union(_expert_biases(policy))


def load_expert_biases(config: Config, folder: Path) -> dict[str, Tensor]:
    policy, _ = start(config)
    load_model(folder, policy)
    return _union(_expert_biases(policy))


def _expert_biases(policy: Policy) -> dict[str, Tensor]:
    return {
        entry.key: entry.data
        for model in policy.models
        for entry in model.sharded_state_dict(metadata={"non_homogeneous_layers": True}).values()
        if entry.key.endswith("expert_bias")
    }


def _union(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all ranks; what two have is equal."""
    whole: dict[str, Tensor] = {}
    for found in gathered(named):
        for name, value in found.items():
            assert torch.equal(whole.setdefault(name, value), value), f"copies of {name} differ"
    return whole
