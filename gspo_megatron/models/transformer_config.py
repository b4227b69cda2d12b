"""Megatron-Core's TransformerConfig, made from our configuration, and rules about its precision."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from gspo_megatron.config import ResolvedParallel
from gspo_megatron.config.precision import (
    FP8,
    base_precision,
    device_lacks,
    engine_lacks,
    megatron_fields,
)
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.errors import UserError, problem
from gspo_megatron.families.rope import YARN_PREFIX
from gspo_megatron.platform.devices import built_for_cuda

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "quick_gelu": quick_gelu}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(config: AnyConfig, parallel: ResolvedParallel) -> TransformerConfig:
    """The TransformerConfig of a checked configuration on a resolved layout. Raises UserError if
    Megatron-Core refuses the values."""
    shape = config.resolved_model()
    precision = config.training.precision
    dtype = DTYPES[base_precision(precision)]
    recompute = config.training.recompute
    whole_layers = {"recompute_method": "uniform", "recompute_num_layers": 1}
    # The stages of an interleaved schedule send activations and gradients one by one, as in
    # Megatron-LM. Batched messages fail in two ways. First, at pp=2 activations and gradients go
    # between the same two ranks. Sends and receives are then matched by their order alone, and the
    # two ranks have different orders. Second, all micro-batches of the first stage may be in the
    # warm-up. Then the exchange of their lengths deadlocks over gloo, where a send ends only when
    # it is received.
    one_by_one = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    values: dict[str, Any] = {
        **parallel.group_sizes(),
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # The loss callback returns one term of a sum. Neither the pipeline schedule nor DDP may
        # divide it.
        "calculate_per_token_loss": True,
        # Weights come from models.initialize or a checkpoint. perform_initialization=False would be
        # wrong: Megatron-Core would then not mark the weights that are sharded over TP, and the
        # gradient norm would count them on one rank only.
        "init_method": leave_as_it_is,
        "output_layer_init_method": leave_as_it_is,
        "embedding_init_method": leave_as_it_is,
        # Micro-batches are filled to a token budget, so their lengths differ. The allgather
        # dispatcher needs micro-batches of equal length, so they are padded if it is used.
        "variable_seq_lengths": shape.megatron.get("moe_token_dispatcher_type") != "allgather",
        "moe_token_dispatcher_type": "alltoall",
        # These fusions need apex, Transformer Engine or torch.compile. The layers of Transformer
        # Engine have their own fusions.
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "moe_grouped_gemm": shape.num_moe_experts is not None,
        **({"recompute_granularity": recompute} if recompute != "none" else {}),
        **(whole_layers if recompute == "full" else {}),
        **(one_by_one if parallel.virtual_pipeline_model_parallel_size is not None else {}),
        **megatron_fields(precision),
        **shape.megatron,
        # With adapters the model is frozen, including the routers' biases.
        **({"moe_router_bias_update_rate": 0.0} if config.model.lora.rank else {}),
        **({"moe_router_dtype": "fp64"} if dtype is torch.float64 else {}),
    }
    values["activation_func"] = ACTIVATIONS[values.get("activation_func", "silu")]
    if isinstance(values.get("attention_backend"), str):
        values["attention_backend"] = AttnBackend[values["attention_backend"]]
    kind: type[TransformerConfig] = TransformerConfig
    if values.get("multi_latent_attention"):
        kind = MLATransformerConfig
        values["rotary_base"] = shape.rotary_base  # layers of latent attention compute the angles
    if values.get("window_size") is not None:
        values["window_size"] = tuple(values["window_size"])
    known = {field.name for field in dataclasses.fields(kind)}
    # Megatron-Core refuses a softmax router with a bias; models/router.py has such a router.
    score_function = values.get("moe_router_score_function", "softmax")
    if values.get("moe_router_enable_expert_bias"):
        values["moe_router_score_function"] = "sigmoid"
    with refusals_told("model.megatron"):
        made = kind(**{name: value for name, value in values.items() if name in known})
    made.moe_router_score_function = score_function
    for name, value in values.items():
        # These are attributes that GPTModel reads. TransformerConfig has no such fields.
        if name.startswith(YARN_PREFIX):
            setattr(made, name, value)
    return made


@contextlib.contextmanager
def refusals_told(key: str) -> Generator[None]:
    """Turn the error with which a class of Megatron-Core refuses its values into a UserError. Many
    of the values come from `key`, and only Megatron-Core knows which of them fit together."""
    try:
        yield
    except (AssertionError, RuntimeError, ValueError) as error:
        wrong = " ".join(str(error).split()) or "without a reason"
        raise UserError(f"{key}: Megatron-Core refuses these values: {wrong}") from error


def has_biased_softmax(config: TransformerConfig) -> bool:
    """Whether the routers are those of models/router.py."""
    return config.moe_router_enable_expert_bias and config.moe_router_score_function == "softmax"


def has_yarn(config: TransformerConfig) -> bool:
    """Whether GPTModel extends the context by YaRN. It is False for latent attention, whose layers
    extend the context themselves."""
    return hasattr(config, f"{YARN_PREFIX}rotary_scaling_factor")


def leave_as_it_is(weight: torch.Tensor) -> torch.Tensor:
    """An initialisation method that changes nothing."""
    return weight


def refuse_impossible(precision: str, backend: str) -> None:
    """Raise UserError, in one line, if FP8 is configured and the layers or the device lack it."""
    if precision not in FP8:
        return
    allowed, reason = "bf16", engine_lacks()
    if backend != "transformer_engine":
        allowed, reason = "fp32 or bf16", reason or "needs a CUDA device"
        if torch.cuda.is_available():
            reason = f"model.backend is {backend} here, which has no FP8: set transformer_engine"
    else:
        capability = torch.cuda.get_device_capability()
        reason = reason or device_lacks(precision, capability, built_for_cuda())
        if reason is None:
            return
        reason += (
            f"; this is a {torch.cuda.get_device_name()} ({'.'.join(map(str, capability))}) with "
            f"torch for CUDA {torch.version.cuda}"
        )
    raise UserError(problem("training.precision", precision, f"{reason}; allowed: {allowed}"))


@contextlib.contextmanager
def changed(changes: Sequence[tuple[Any, str, Any]]) -> Generator[None]:
    """Give attributes other values while the context lasts. changes: (owner, attribute, value)."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def without_fp8(models: Sequence[torch.nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the chunks of a policy compute in bf16.

    Decoding has one row for each sequence, but FP8 matrix products need multiples of 16 or 32 rows.
    For an export, the weights are converted to bf16 anyway. Transformer Engine's scales stay
    unchanged. It is enough to change the config, because Megatron-Core reads the fields for FP8 in
    every forward pass.
    """
    found = (m.config for model in models for m in model.modules() if hasattr(m, "config"))
    configs = {id(config): config for config in found if getattr(config, "fp8", None)}.values()
    changes = [(config, "fp8", None) for config in configs]
    padding = "moe_router_padding_for_quantization"
    changes += [(config, padding, False) for config in configs if hasattr(config, padding)]
    return changed(changes)
