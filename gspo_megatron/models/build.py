"""Builds this rank's part of the policy, wrapped in Megatron's DDP, and frozen models beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from gspo_megatron.config import ModelShape, ResolvedParallel
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.families import language_model
from gspo_megatron.families.adapter_map import adapted_weights
from gspo_megatron.families.model_shape import experts_in_layers
from gspo_megatron.families.weight_map import weight_map
from gspo_megatron.models.initialize import initialize_weights
from gspo_megatron.models.lora import COPIED, Lora, attach_adapters, kind_of_layer
from gspo_megatron.models.policy import PolicyModel
from gspo_megatron.models.score_head import ScoreModel
from gspo_megatron.models.specs import block_spec, choose_backend
from gspo_megatron.models.transformer_config import (
    has_yarn,
    refuse_impossible,
    transformer_config,
)

# The vocabulary is padded to a multiple of this times TP: matrix units are fast at multiples of 16.
VOCAB_MULTIPLE = 16


@dataclass
class Policy:
    """The trained model on this rank: one chunk per virtual pipeline stage."""

    chunks: list[DistributedDataParallel]
    config: TransformerConfig
    vocab_size: int
    shape: ModelShape
    lora: Lora | None = None  # the adapters, if only these are trained
    is_frozen: bool = False  # never trained: the chunks have no DDP, and stay in evaluation mode

    @property
    def models(self) -> list[PolicyModel]:
        """The chunks without their wrappers."""
        return [unwrap(chunk) for chunk in self.chunks]

    def set_padding_token(self, hf: Mapping[str, Any] | None) -> None:
        """Give the embedding of the padding token no gradient, as nn.Embedding(padding_idx=...)
        does. The token is the pad_token_id of `hf`, a Hugging Face config; a negative id
        counts from the end of the vocabulary. A tied output layer still trains the token's row.

        Published models have zeros in this row, and RMSNorm turns a row of zeros into very large
        gradients.
        """
        token = language_model(hf or {}).get("pad_token_id")
        if isinstance(token, int):
            token = token if token >= 0 else self.vocab_size + token
            for model in self.models:
                model.padding_token = token

    def finish_parameter_gather(self) -> None:
        """Gather the weights that the last update changed on other ranks. With overlap_param_gather
        they would otherwise arrive in the next forward pass."""
        for chunk in () if self.is_frozen else self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def train(self, mode: bool = True) -> None:
        for chunk in self.chunks:
            chunk.train(mode and not self.is_frozen)

    def eval(self) -> None:
        self.train(False)


def unwrap(module: torch.nn.Module) -> PolicyModel:
    """The PolicyModel inside DDP and Float16Module."""
    return next(inner for inner in module.modules() if isinstance(inner, PolicyModel))


def build_policy(config: AnyConfig, parallel: ResolvedParallel, vocab_size: int) -> Policy:
    """Build and initialise the rank's chunks. `vocab_size` is the tokenizer's. It is padded here to
    a multiple that TP needs; the softmax leaves the padding out.

    Raises UserError if the layers or the device do not support the configuration.
    """
    shape = config.resolved_model()
    precision = config.training.precision
    packing = getattr(config.training, "packing", True)  # pre-training always packs
    backend = choose_backend(config.model.backend, precision, shape.megatron, packing=packing)
    refuse_impossible(precision, backend)
    megatron = transformer_config(config, parallel)
    ddp = ddp_config(config)
    weights, lora = None, None
    if config.model.lora.rank:
        weights = weight_map(config.model.family(shape), shape, vocab_size)
        section = config.model.lora
        adapted = adapted_weights(weights, section.targets)
        lora = Lora(section.rank, section.scale, adapted, section.checkpoint is None)
    chunks = []
    for stage, model in _build_chunks(megatron, backend, shape, parallel, vocab_size):
        if lora is not None and weights is not None:
            attach_adapters(model, lora, weights)
        _aux_losses_count_micro_batches(model)
        _reduce_experts_over_their_replicas(model, megatron)
        _count_copies_once(model)
        initialize_weights(model, megatron, vocab_size, config.training.seed)
        model.to(torch.cuda.current_device())
        wrapped = Float16Module(megatron, model) if megatron.bf16 else model
        chunks.append(
            DistributedDataParallel(
                config=get_model_config(wrapped),
                ddp_config=ddp,
                module=wrapped,
                # Only the first chunk uses buckets, as in Megatron-LM: the all-reduce of the other
                # chunks overlaps with the backward passes of the chunks before them anyway.
                disable_bucketing=stage > 0,
            )
        )
    return Policy(chunks, megatron, vocab_size, shape, lora)


def build_frozen(config: AnyConfig, parallel: ResolvedParallel, vocab_size: int) -> Policy:
    """Build a second model that is never trained, on the layout of the trained model. The second
    model has no gradients, optimizer or DDP. Its weights are not initialised; load them.

    If the model has no experts, expert parallelism is off (EP = ETP = 1).
    """
    shape = config.resolved_model()
    precision = config.training.precision
    packing = getattr(config.training, "packing", True)  # pre-training always packs
    backend = choose_backend(config.model.backend, precision, shape.megatron, packing=packing)
    refuse_impossible(precision, backend)
    if shape.num_moe_experts is None:
        sizes = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
        parallel = replace(parallel, **sizes)
    megatron = transformer_config(config, parallel)
    chunks: list[Any] = []
    for _, model in _build_chunks(megatron, backend, shape, parallel, vocab_size):
        model.to(torch.cuda.current_device()).requires_grad_(False)
        chunks.append(Float16Module(megatron, model) if megatron.bf16 else model)
    policy = Policy(chunks, megatron, vocab_size, shape, is_frozen=True)
    policy.eval()
    return policy


def _build_chunks(
    megatron: TransformerConfig,
    backend: str,
    shape: ModelShape,
    parallel: ResolvedParallel,
    vocab_size: int,
) -> Iterator[tuple[int, PolicyModel]]:
    """Yield the number and the model of each of the rank's chunks, without a wrapper."""
    experts = experts_in_layers(shape)
    step = VOCAB_MULTIPLE * parallel.tensor_model_parallel_size
    stages = parallel.virtual_pipeline_model_parallel_size
    for stage in range(stages or 1):
        vp_stage = stage if stages else None
        yield (
            stage,
            (ScoreModel if shape.scores else PolicyModel)(
                true_vocab_size=vocab_size,
                config=megatron,
                transformer_layer_spec=block_spec(
                    megatron, backend, experts, vp_stage, joint_qk_norm=shape.joint_qk_norm
                ),
                vocab_size=-(-vocab_size // step) * step,
                max_sequence_length=shape.max_sequence_length,
                pre_process=parallel_state.is_pipeline_first_stage(
                    ignore_virtual=False, vp_stage=vp_stage
                ),
                post_process=parallel_state.is_pipeline_last_stage(
                    ignore_virtual=False, vp_stage=vp_stage
                ),
                share_embeddings_and_output_weights=shape.tie_embeddings,
                position_embedding_type="yarn" if has_yarn(megatron) else "rope",
                rotary_base=shape.rotary_base,
                rotary_percent=shape.rotary_percent,
                rope_scaling=shape.rotary_llama3_factor is not None,
                rope_scaling_factor=shape.rotary_llama3_factor or 1.0,
                vp_stage=vp_stage,
            ),
        )


def ddp_config(config: AnyConfig) -> DistributedDataParallelConfig:
    """Megatron's DDP settings: fp32 gradients in the distributed optimizer's buffers. With fp64,
    which that optimizer refuses, DDP has plain buffers."""
    trains = config.training.precision != "fp64"
    return DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": trains,
            "use_distributed_optimizer": trains,
            **config.parallel.ddp,
        }
    )


def _aux_losses_count_micro_batches(model: PolicyModel) -> None:
    """Make the routers' aux and z losses a plain mean over micro-batches.

    Under `calculate_per_token_loss` a router multiplies its aux loss by the number of tokens of its
    own TP and CP shard. Megatron-Core later divides by the number of all tokens, which makes the
    loss TP x CP times too small. Here the loss is scaled by the number of micro-batches instead
    (batching.micro_batches). So the router must not multiply, and the aux gradient is the same on
    every layout.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.calculate_per_token_loss = False


def _reduce_experts_over_their_replicas(model: PolicyModel, config: TransformerConfig) -> None:
    """Mark the experts' parameters, so that DDP reduces their gradients over the right group.

    If EP or ETP differ from the dense layout, the copies of an expert are on other ranks than the
    copies of a dense weight. DDP must then use the expert data-parallel group. Stock layers,
    including Transformer Engine's, decide by EP alone. With EP = 1 and TP above ETP, each TP rank
    would then keep the gradient of its own tokens.
    """
    tp, etp = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    replicated_alike = config.expert_model_parallel_size == 1 and etp == tp
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = replicated_alike  # type: ignore[attr-defined]


def _count_copies_once(model: PolicyModel) -> None:
    """Correct the marks by which the gradient norm counts each parameter once over TP.

    Transformer Engine marks the weight of every linear layer as a shard, even the down projections
    of latent attention, which all TP ranks hold whole. The norm would count these on each rank, and
    clipping would be too strong. Attention sinks and the experts' biases are not marked as shards,
    although each rank has its own part. The norm would count them on one rank only.
    """
    for module in model.modules():
        if hasattr(module, "parallel_mode") and kind_of_layer(module) == COPIED:
            module.weight.tensor_model_parallel = False
    for name, parameter in model.named_parameters():
        if "softmax_offset" in name or (".mlp.experts." in name and ".bias" in name):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
