"""Estimates a rank's memory by component, and its peak in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo_megatron.config import Config
from gspo_megatron.estimate.activations import ChunkPass
from gspo_megatron.estimate.model import (
    DENSE,
    EMBEDDING,
    EXPERTS,
    RankModel,
    StateBytes,
    frozen_bytes,
    scorer_bytes,
)
from gspo_megatron.estimate.workload import Workload, in_flight
from gspo_megatron.models.core_attention import window_of
from gspo_megatron.models.delta_net import CachedDeltaNet
from gspo_megatron.objectives.losses import needs_reference
from gspo_megatron.routing.replay import expert_dtype

_CANDIDATE_BYTES = 8 + 4  # a teacher's token (int64) and its log-prob (fp32)


@dataclass(frozen=True)
class RankMemory:
    """Device bytes of one rank. Training and rollout do not run at the same time, so the peak is
    the larger of the two."""

    rank: int
    stage: int
    layers: int
    state: StateBytes
    reference: int  # weights of the reference policy and the teacher, if the objective needs them
    scorer: int  # weights of a reward model that the ranks compute
    activations: int  # activations of all micro-batches in flight
    in_flight: tuple[int, ...]  # number of micro-batches in flight, for each chunk
    workspace: int  # memory of the running forward or backward pass
    head: int  # part of the workspace: tiles and gradients of the log-prob head
    replay: int  # routes of the step's tokens
    kv_cache: int  # KV cache and the states of delta nets
    rollout: int  # activations of the prompts, routes of the responses
    host: int  # bytes that are offloaded to host memory
    fp8_copies: int  # FP8 copies of the weights, in addition to the weights

    @property
    def training(self) -> int:
        """Bytes of training, without weights, gradients and optimizer (`state`)."""
        return self.activations + self.workspace + self.replay

    @property
    def sampling(self) -> int:
        """Bytes of a rollout, without weights, gradients and optimizer (`state`)."""
        return self.kv_cache + self.rollout

    @property
    def while_training(self) -> int:
        return self.state.total + self.fp8_copies + self.reference + self.scorer + self.training

    @property
    def while_sampling(self) -> int:
        return self.while_training - self.training + self.sampling

    @property
    def total(self) -> int:
        return max(self.while_training, self.while_sampling)


def rank_memory(
    model: RankModel, state: StateBytes, passes: list[ChunkPass], work: Workload
) -> RankMemory:
    """Estimate the memory of a rank. `passes` has one entry for each chunk of the rank."""
    stages = model.parallel.pipeline_model_parallel_size
    num_in_flight = in_flight(stages, model.stage, len(passes), work.micro_batches)
    chunk_bytes = [each.saved_bytes + each.output_bytes for each in passes]  # of one micro-batch
    routes, rollout_routes, routes_on_host = _routes(model, work)
    reference, reference_on_host = _reference_bytes(model, state, work)
    # Each rank runs its own prompts; context parallelism does not split them.
    share = work.prefill_tokens * model.policy.config.context_parallel_size / work.tokens
    prefill = max(each.forward_peak_bytes for each in passes) * share
    return RankMemory(
        rank=model.rank,
        stage=model.stage,
        layers=sum(len(m.decoder.layers) for m in model.policy.models),
        state=state,
        reference=reference,
        scorer=scorer_bytes(model),
        activations=sum(n * size for n, size in zip(num_in_flight, chunk_bytes, strict=True)),
        in_flight=num_in_flight,
        workspace=max(each.workspace_bytes for each in passes),
        head=max(each.head_bytes for each in passes),
        replay=routes,
        # When half of the sequences have ended, a smaller cache is made. Then the old and the new
        # cache exist together.
        kv_cache=max(work.rollout_rows, work.evaluation_rows) * _cache_bytes(model, work) * 3 // 2,
        rollout=round(prefill) + rollout_routes,
        host=routes_on_host + reference_on_host,
        fp8_copies=model.fp8_copies,
    )


def _cache_bytes(model: RankModel, work: Workload) -> int:
    """Return the bytes of keys, values and states of delta nets that the longest sequence needs."""
    config: Any = model.policy.config
    layers = [layer for m in model.policy.models for layer in m.decoder.layers]
    delta_nets, tokens = 0, 0  # bytes of all states; tokens in the KV cache, over all layers
    for layer in layers:
        if isinstance(layer.self_attention, CachedDeltaNet):
            delta_nets += layer.self_attention.state_bytes
        else:
            window = window_of(config, layer.layer_number)
            tokens += min(work.longest, window or work.longest)
    heads = max(1, config.num_query_groups // config.tensor_model_parallel_size)
    # Latent attention also caches keys and values of all heads.
    channels = sum(model.config.resolved_model().head_channels)
    return heads * channels * config.params_dtype.itemsize * tokens + delta_nets


def _reference_bytes(model: RankModel, state: StateBytes, work: Workload) -> tuple[int, int]:
    """Return the bytes of the reference policy and the teacher: on the device, and on the host."""
    if not isinstance(model.config, Config):
        return 0, 0
    objective, lora = model.config.objective, model.policy.lora
    whole = sum(state.parameters.values())
    weights = whole * len(objective.distillation.folders)
    # If the adapters' B was zero at the start, the policy without adapters is the reference policy,
    # and no copy of the weights is needed.
    if needs_reference(objective) and not (lora is not None and lora.starts_as_base):
        weights += whole - sum(frozen_bytes(model.policy).values())
    candidates = 0
    if model.stage == model.parallel.pipeline_model_parallel_size - 1:
        # the teacher's tokens and probabilities, for all response tokens of the step
        responses = work.of_rank * work.mini_batches * work.lengths[0][1]
        responses //= model.policy.config.context_parallel_size
        candidates = responses * _CANDIDATE_BYTES * objective.distillation.candidates
    return (candidates, weights) if objective.reference_offload else (weights + candidates, 0)


def _routes(model: RankModel, work: Workload) -> tuple[int, int, int]:
    """Return the bytes of the replay store on the device, of the running rollout's routes, and of
    the replay store on the host."""
    config = model.policy.config
    routing = model.config.routing if isinstance(model.config, Config) else None
    if routing is None or not config.num_moe_experts or not routing.modes:
        return 0, 0, 0
    layers = sum(
        any(name.endswith("router") for name, _ in layer.named_modules())
        for m in model.policy.models
        for layer in m.decoder.layers
    )
    token_bytes = layers * config.moe_router_topk * expert_dtype(config.num_moe_experts).itemsize
    shards = config.context_parallel_size
    if config.sequence_parallel:
        shards *= config.tensor_model_parallel_size
    store = token_bytes * work.tokens * work.micro_batches_per_step // shards
    rollout = token_bytes * work.rollout_responses * work.longest if "r3" in routing.modes else 0
    return (0, rollout, store) if routing.store_on_host else (store, rollout, 0)


_STATE_NAMES = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}


def by_component(memory: RankMemory) -> dict[str, int]:
    """Return the rows of the table in order. An indented row is part of the row above it."""
    rows = {
        f"{_STATE_NAMES[part]}: {kind}": table[kind]
        for part, table in vars(memory.state).items()
        for kind in (DENSE, EXPERTS, EMBEDDING)
    }
    return rows | {
        "FP8 copies of weights": memory.fp8_copies,
        "reference policy, teacher": memory.reference,
        "reward model": memory.scorer,
        "training: kept activations": memory.activations,
        "training: temporary, in one pass": memory.workspace,
        "  of it the log-prob head": memory.head,
        "training: routes to replay": memory.replay,
        "sampling: key-value cache": memory.kv_cache,
        "sampling: prompts in the forward pass": memory.rollout,
    }
