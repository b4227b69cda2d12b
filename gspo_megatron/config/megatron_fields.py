"""The fields of the installed Megatron-Core's configuration classes that may be set."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union

from gspo_megatron.config.parallel import LAYOUT_KEYS
from gspo_megatron.errors import did_you_mean, nearest, problem
from gspo_megatron.families.model_shape import WHOLE_MODEL_KEYS

# Section key -> the class whose fields it sets, and the class's module in megatron.core.
MEGATRON_CLASSES = {
    "model.megatron": ("TransformerConfig", "transformer.transformer_config"),
    "optimizer.megatron": ("OptimizerConfig", "optimizer.optimizer_config"),
    "parallel.ddp": (
        "DistributedDataParallelConfig",
        "distributed.distributed_data_parallel_config",
    ),
}

_PRECISION = dict.fromkeys(
    ("fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype", "enable_autocast")
    + ("fp8", "fp8_recipe"),
    "training.precision",
)

# Fields that have a configuration key of their own. Only this key is accepted, not the field's
# name.
_OWN_KEYS: dict[str, dict[str, str]] = {
    "model.megatron": {
        **{key: f"parallel.{key}" for short, key in LAYOUT_KEYS.items() if short != "dp"},
        "sequence_parallel": "parallel.sequence_parallel",
        "recompute_granularity": "training.recompute",
        "moe_enable_routing_replay": "routing.replay",
        "transformer_impl": "model.backend",
        **{name: f"model.{name}" for name in WHOLE_MODEL_KEYS},
        **_PRECISION,
    },
    "optimizer.megatron": {
        "lr": "optimizer.learning_rate",
        "min_lr": "optimizer.min_learning_rate",
        "weight_decay": "optimizer.weight_decay",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "adam_eps": "optimizer.epsilon",
        "clip_grad": "optimizer.clip_grad",
        # OptimizerConfig and DistributedDataParallelConfig both have these two fields, and their
        # values must agree.
        "use_distributed_optimizer": "parallel.ddp.use_distributed_optimizer",
        "overlap_param_gather": "parallel.ddp.overlap_param_gather",
        **_PRECISION,
    },
    "parallel.ddp": {},
}

# Fields that are refused, and why.
_BF16_WEIGHTS = "weights are initialised, saved and exported in bf16; leave this field out"
_REFUSED = {
    # another value would make the gradient wrong
    **dict.fromkeys(
        ("calculate_per_token_loss", "variable_seq_lengths"),
        "is set by the training step; leave it out",
    ),
    **dict.fromkeys(
        ("fp8_param", "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"), _BF16_WEIGHTS
    ),
    "fp8_output_proj": "the log-prob head multiplies in bf16; leave it out",
    **dict.fromkeys(
        ("fp4", "fp4_recipe", "fp4_param", "fp4_param_gather", "fp4_quantizer_factory"),
        "FP4 is not supported; leave it out",
    ),
    "fp32_residual_connection": "pipeline stages exchange activations in training.precision; "
    "leave it out",
    "mtp_num_layers": "layers that predict further tokens are not trained; leave it out",
    "overlap_moe_expert_parallel_comm": "alternates the layers of two micro-batches, which the "
    "training step does not support; leave it out",
    "fp8_quantizer_factory": "custom recipes are not supported; leave it out",
}

# Fields whose Python value is not a scalar. A configuration gives one of these names, and the model
# builder translates the name.
_NAMED_VALUES: dict[str, tuple[str, ...]] = {
    "activation_func": ("silu", "gelu", "relu", "quick_gelu"),
    "attention_backend": ("auto", "flash", "fused", "unfused", "local"),
}

# Sizes that ModelShape computes with. null is allowed if TransformerConfig has a default.
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "moe_router_topk")
_NULLABLE_SIZES = ("num_query_groups", "kv_channels", "ffn_hidden_size", "num_moe_experts") + (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)

# Fields that say which layers have experts, linear attention or a window. An integer n means every
# n-th layer; a list has 0 or 1 for each layer.
LAYER_PATTERNS = ("moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq")


@functools.cache
def installed_fields(section_key: str) -> Mapping[str, Any]:
    """Return fields and types of the class for `section_key`. Raises ImportError without
    megatron-core.

    Importing Megatron-Core imports torch and takes seconds, so it is imported only for a
    configuration that sets fields of Megatron-Core. The package `gspo_megatron.platform` must be
    imported before, because it prepares a machine without a GPU. This package belongs to a higher
    layer, so this function does not use an import statement for it.
    """
    class_name, module = MEGATRON_CLASSES[section_key]
    if importlib.util.find_spec("megatron") is None:
        raise ImportError("megatron-core is not installed")
    importlib.import_module("gspo_megatron.platform")
    return fields_of(getattr(importlib.import_module(f"megatron.core.{module}"), class_name))


def fields_of(cls: Any) -> dict[str, Any]:
    """Return the public fields of a dataclass and their types.

    A type allows None if None is the default, even if the annotation does not allow it.
    """
    hints = typing.get_type_hints(cls)
    return {
        field.name: hints[field.name] | None if field.default is None else hints[field.name]
        for field in dataclasses.fields(cls)
        if not field.name.startswith("_")
    }


def megatron_problems(section_key: str, values: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the problems of the fields that are set under `section_key`, a key of the schema."""
    if not values:
        return
    try:
        fields = installed_fields(section_key)
    except ImportError as error:
        names = ", ".join(map(str, values))
        yield f"{section_key}: cannot check {names}: {error}; install it, or leave this section out"
        return
    for name, value in values.items():
        wrong = _name_problem(section_key, name, fields)
        if wrong is None:
            wrong = _value_problem(name, fields[name], value)
        if wrong is not None:
            yield problem(f"{section_key}.{name}", value, wrong)


def _name_problem(section_key: str, name: Any, fields: Mapping[str, Any]) -> str | None:
    own_keys = _OWN_KEYS[section_key]
    if name in own_keys:
        return f"has a key of its own; use {own_keys[name]}"
    if name in fields or name in _REFUSED:
        return _REFUSED.get(name)
    allowed = fields.keys() - own_keys.keys() - _REFUSED.keys()
    close = nearest(str(name), allowed)  # several hundred names are too many to list
    hint = f"; {did_you_mean(close)}" if close else ""
    return f"the installed {MEGATRON_CLASSES[section_key][0]} has no such field{hint}"


def _value_problem(name: str, hint: Any, value: Any) -> str | None:
    nullable = name not in _SIZES
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if name in _NAMED_VALUES:
        named = _NAMED_VALUES[name]
        return None if value in named else "must be one of " + ", ".join(named)
    if value is None and nullable and type(None) in typing.get_args(hint):
        return None
    if not nullable or name in _NULLABLE_SIZES:
        fits = type(value) is int and value >= 1
        return None if fits else "must be an integer from 1" + (", or null" if nullable else "")
    if name in LAYER_PATTERNS:
        fits = type(value) is int and value >= 1
        fits = fits or (isinstance(value, list) and all(each in (0, 1) for each in value))
        return None if fits else "must be an integer from 1, or a list with 0 or 1 for each layer"
    if any(word in str(hint) for word in ("Callable", "torch.dtype", "ContextManager")):
        return f"takes {_words(hint)}, which a configuration file cannot hold; leave it out"
    return None if _fits(hint, value) else f"must be {_words(hint)}"


def _fits(hint: Any, value: Any) -> bool:
    """Return whether a value has a type. Types other than scalars, None, Literal and unions pass,
    because megatron-core checks them."""
    if hint is type(None):
        return value is None
    if hint in (int, float, bool, str):
        # a float field also takes `1`
        return type(value) is hint or (hint is float and type(value) is int)
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return any(_fits(each, value) for each in typing.get_args(hint))
    return True


def _words(hint: Any) -> str:
    """Describe a type for the user."""
    if hint is type(None):
        return "null"
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if not isinstance(hint, type):
        return str(hint)
    scalar = hint in (int, float, bool, str)
    return hint.__name__ if scalar else f"{hint.__module__}.{hint.__name__}"
