"""Builds one rank's weights, gradients and optimizer on the meta device, with the training code."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gspo_megatron.config import Config, ResolvedParallel
from gspo_megatron.config.precision import FP8, base_precision
from gspo_megatron.config.scorer import config_of_scorer
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.errors import UserError
from gspo_megatron.families.adapter_map import is_adapter
from gspo_megatron.families.weight_map import is_vocabulary
from gspo_megatron.models import build
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.platform.megatron_meta import Trace, pretended_rank

EXPERTS, EMBEDDING, DENSE = "experts", "embedding", "dense"


@dataclass
class RankModel:
    """A rank's policy and trainer; valid only inside the context `rank_model`."""

    config: AnyConfig
    parallel: ResolvedParallel
    rank: int
    policy: Policy
    trainer: Trainer
    trace: Trace
    fp8_copies: int  # bytes of weight copies for FP8 matrix products

    @property
    def stage(self) -> int:
        """The rank's pipeline stage. In Megatron-Core's order of ranks, the stage changes
        slowest."""
        return self.rank * self.parallel.pipeline_model_parallel_size // self.parallel.world_size


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a rank holds during the whole run, by kind of parameter."""

    parameters: dict[str, int]
    gradients: dict[str, int]
    optimizer: dict[str, int]  # fp32 weights and Adam's moments

    @property
    def total(self) -> int:
        return sum(sum(kinds.values()) for kinds in vars(self).values())


@contextlib.contextmanager
def rank_model(
    config: AnyConfig, parallel: ResolvedParallel, rank: int, vocab_size: int
) -> Generator[RankModel]:
    """Build the model of `rank` with its optimizer, always with the layers of torch_native.

    Raises UserError with the reason if Megatron-Core refuses the configuration."""
    in_fp8 = config.training.precision in FP8
    config = without_kernels(config)
    with pretended_rank(rank, parallel.world_size) as trace:
        try:
            policy, trainer = _build(config, parallel, vocab_size)
        # Megatron-Core refuses a configuration with these errors.
        except (AssertionError, ValueError, NotImplementedError, ImportError) as error:
            raise UserError(f"rank {rank} of {parallel} cannot be built: {error}") from error
        copies = fp8_copy_bytes(policy) if in_fp8 else 0
        yield RankModel(config, parallel, rank, policy, trainer, trace, copies)


def _build(config: Any, parallel: ResolvedParallel, vocab_size: int) -> tuple[Policy, Trainer]:
    set_up_model_parallel(parallel, seed=0)
    # Only shapes matter here, and warnings are relevant only in training.
    with (
        warnings.catch_warnings(),
        patch.object(build, "initialize_weights", lambda *_args, **_kwargs: None),
    ):
        warnings.simplefilter("ignore")
        policy = build.build_policy(config, parallel, vocab_size)
    rate = config.optimizer.learning_rate
    schedule = Schedule(rate, rate, 0, 1, "constant")
    return policy, build_trainer(policy, config.optimizer, schedule)


def with_values(config: AnyConfig, section: str, **values: Any) -> AnyConfig:
    """Return the configuration with some values of one section replaced."""
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})


def without_kernels(config: AnyConfig) -> AnyConfig:
    """Return the configuration without parts that need GPU kernels: without Transformer Engine's
    layers, and with bf16 instead of FP8."""
    low = ("fp8", "moe_router_padding_for")
    megatron = {k: v for k, v in config.model.megatron.items() if not k.startswith(low)}
    config = with_values(config, "model", backend="torch_native", megatron=megatron)
    return with_values(config, "training", precision=base_precision(config.training.precision))


def fp8_copy_bytes(policy: Policy) -> int:
    """Return the bytes of the FP8 copies of the weights.

    Transformer Engine holds two FP8 copies of every weight in a matrix product, one of them
    transposed, across micro-batches."""
    if getattr(policy.config, "disable_parameter_transpose_cache", False):
        return 0
    return 2 * sum(
        parameter.numel()
        for name, parameter in _parameters(policy)
        if parameter.dim() > 1
        and not ("router" in name or is_adapter(name))
        and kind_of(name, parameter) != EMBEDDING
    )


def state_bytes(model: RankModel) -> StateBytes:
    """Count the bytes of weights and gradients in DDP's buffers (with padding), and of the
    optimizer."""
    parameters, gradients = _zeros(), _zeros()
    for chunk in model.policy.chunks:
        for buffers, kind in ((chunk.buffers, DENSE), (chunk.expert_parallel_buffers, EXPERTS)):
            for buffer in buffers:
                # Add only the padding here: the bytes of the buffer minus those of its parameters,
                # which are added below.
                gradients[kind] += buffer.grad_data.nbytes
                gradients[kind] -= sum(p.main_grad.nbytes for p in buffer.params)
                if buffer.param_data is not None:
                    parameters[kind] += buffer.param_data.nbytes
                    parameters[kind] -= sum(p.nbytes for p in buffer.params)
    for name, parameter in _parameters(model.policy):
        kind = kind_of(name, parameter)
        owner: Any = parameter  # Megatron-Core adds the attribute main_grad
        gradients[kind] += owner.main_grad.nbytes if parameter.requires_grad else 0
        parameters[kind] += parameter.nbytes
    return StateBytes(parameters, gradients, _optimizer_bytes(model))


def _optimizer_bytes(model: RankModel) -> dict[str, int]:
    """Count the bytes of the optimizer's own copies of the weights, and of its moments."""
    result, pairs = _zeros(), _parameters(model.policy)
    weights = {p.untyped_storage()._cdata for _, p in pairs}
    kinds = {id(getattr(p, "main_param", None)): kind_of(name, p) for name, p in pairs}
    optimizer = model.trainer.optimizer
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        part.init_state_fn(inner, part.config)
        for group in inner.param_groups:
            for shard in group["params"]:
                fallback = EXPERTS if group.get("is_expert_parallel") else DENSE
                kind = kinds.get(id(shard), fallback)
                if shard.untyped_storage()._cdata not in weights:
                    result[kind] += shard.nbytes
                states = inner.state[shard].values()
                result[kind] += sum(s.nbytes for s in states if isinstance(s, Tensor))
    return result


def scorer_bytes(model: RankModel) -> int:
    """Count the bytes of this rank's weights of reward.model.folder, or 0 without such a folder.

    Call it inside the context `rank_model`."""
    config = model.config
    if not isinstance(config, Config) or config.reward.model.folder is None:
        return 0
    own: Any = config_of_scorer(config, config.reward.model.folder)
    vocab_size = own.resolved_model().vocab_size
    scorer = build.build_frozen(own, model.parallel, vocab_size)
    return sum(parameter.nbytes for _, parameter in _parameters(scorer))


def frozen_bytes(policy: Policy) -> dict[str, int]:
    """Count the bytes of the weights that are not trained, by kind. Only a model with adapters has
    such weights."""
    counts = _zeros()
    for name, parameter in _parameters(policy):
        counts[kind_of(name, parameter)] += 0 if parameter.requires_grad else parameter.nbytes
    return counts


def _parameters(policy: Policy) -> list[tuple[str, torch.nn.Parameter]]:
    return [pair for model in policy.models for pair in model.named_parameters()]


def kind_of(name: str, parameter: torch.nn.Parameter) -> str:
    """Return the kind of a parameter: experts, embedding (input or output) or dense."""
    if ".experts." in name and "shared_experts" not in name:
        return EXPERTS
    return EMBEDDING if "word_embeddings" in name or "output_layer" in name else DENSE


def global_parameters(model: RankModel) -> dict[str, int]:
    """Count the parameters of this rank's pipeline stage over all ranks of the stage.

    Each parameter counts once; the padding of the vocabulary does not count."""
    counts, parallel = _zeros(), model.parallel
    for name, parameter in _parameters(model.policy):
        kind, count = kind_of(name, parameter), parameter.numel()
        cut = getattr(parameter, "tensor_model_parallel", False)
        cut = cut and not hasattr(parameter, "sum_over_expert_tp")  # adapters that ETP does not cut
        if kind == EXPERTS:
            count *= parallel.expert_model_parallel_size
            count *= parallel.expert_tensor_parallel_size if cut else 1
        elif kind == EMBEDDING and is_vocabulary(name):
            if getattr(parameter, "shared", False):
                continue  # the last stage's copy of a tied embedding does not count
            count = model.policy.vocab_size * parameter.shape[1]
        elif cut:
            count *= parallel.tensor_model_parallel_size
        counts[kind] += count
    return counts


def _zeros() -> dict[str, int]:
    return dict.fromkeys((DENSE, EXPERTS, EMBEDDING), 0)
