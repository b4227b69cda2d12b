"""The fields of the installed megatron-core's configuration classes, read without importing it.

Importing megatron.core imports torch and takes seconds; a typing slip should be reported at once,
also on a laptop. So the dataclasses are read from their source.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_megatron.config.problems import did_you_mean, nearest, problem

# Section key -> class and the files (below megatron/core) that define it and its bases.
_SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "model.megatron": (
        "TransformerConfig",
        ("transformer/transformer_config.py", "model_parallel_config.py"),
    ),
    "optimizer.megatron": ("OptimizerConfig", ("optimizer/optimizer_config.py",)),
    "parallel.ddp": (
        "DistributedDataParallelConfig",
        ("distributed/distributed_data_parallel_config.py",),
    ),
}

_PRECISION = dict.fromkeys(
    ("fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype", "enable_autocast"),
    "training.precision",
)
_FP8 = dict.fromkeys(("fp8", "fp8_recipe"), "training.precision")

# Fields with a key of their own: one thing has one name.
_OWN_KEYS: dict[str, dict[str, str]] = {
    "model.megatron": {
        "tensor_model_parallel_size": "parallel.tensor_model_parallel_size",
        "pipeline_model_parallel_size": "parallel.pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size": "parallel.expert_model_parallel_size",
        "expert_tensor_parallel_size": "parallel.expert_tensor_parallel_size",
        "context_parallel_size": "parallel.context_parallel_size",
        "sequence_parallel": "parallel.sequence_parallel",
        "recompute_granularity": "training.recompute",
        "moe_enable_routing_replay": "routing.replay",
        "transformer_impl": "model.backend",
        "vocab_size": "model.vocab_size",
        "max_sequence_length": "model.max_sequence_length",
        "rotary_base": "model.rotary_base",
        "tie_embeddings": "model.tie_embeddings",
        **_PRECISION,
        **_FP8,
    },
    "optimizer.megatron": {
        "lr": "optimizer.learning_rate",
        "min_lr": "optimizer.min_learning_rate",
        "weight_decay": "optimizer.weight_decay",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "adam_eps": "optimizer.epsilon",
        "clip_grad": "optimizer.clip_grad",
        # Both classes have these two and they must agree.
        "use_distributed_optimizer": "parallel.ddp.use_distributed_optimizer",
        "overlap_param_gather": "parallel.ddp.overlap_param_gather",
        **_PRECISION,
        **_FP8,
    },
    "parallel.ddp": {},
}

# Fields that the training step sets: another value makes the gradient wrong.
_OURS = ("calculate_per_token_loss", "variable_seq_lengths")

# Fields that are refused, and why.
_BF16_WEIGHTS = "the weights stay bf16: so they are initialised, saved and exported; leave it out"
_REFUSED = {
    "fp8_param": _BF16_WEIGHTS,
    "fp8_param_gather": _BF16_WEIGHTS,
    "reuse_grad_buf_for_mxfp8_param_ag": _BF16_WEIGHTS,
    "fp8_output_proj": "the log-prob head multiplies in bf16; leave it out",
    **dict.fromkeys(
        ("fp4", "fp4_recipe", "fp4_param", "fp4_param_gather", "fp4_quantizer_factory"),
        "FP4 is not supported; leave it out",
    ),
    "fp32_residual_connection": "stages send each other activations of training.precision; "
    "leave it out",
    "fp8_quantizer_factory": "no precision uses a recipe of one's own; leave it out",
}

# Fields whose Python value is no plain scalar; the model builder maps these names to it.
_NAMED_VALUES: dict[str, tuple[str, ...]] = {
    "activation_func": ("silu", "gelu", "relu"),
    "attention_backend": ("auto", "flash", "fused", "unfused", "local"),
}

# Sizes that ModelShape computes with; null is legal where TransformerConfig has a default.
_SIZES: dict[str, bool] = {
    "num_layers": False,
    "hidden_size": False,
    "num_attention_heads": False,
    "num_query_groups": True,
    "kv_channels": True,
    "ffn_hidden_size": True,
    "num_moe_experts": True,
    "moe_router_topk": False,
    "moe_ffn_hidden_size": True,
    "moe_shared_expert_intermediate_size": True,
}

_SCALARS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),  # `1` is a legal float, as everywhere in Python
    "bool": (bool,),
    "str": (str,),
}


def find_megatron_core() -> Path | None:
    """The folder of megatron.core, or None; imports nothing (`megatron` is a namespace package)."""
    spec = importlib.util.find_spec("megatron")
    if spec is None:
        return None
    for location in spec.submodule_search_locations or ():
        core = Path(location) / "core"
        if (core / "model_parallel_config.py").is_file():
            return core
    return None


@functools.lru_cache(maxsize=8)
def read_fields(core: Path, section_key: str) -> Mapping[str, ast.AnnAssign]:
    """The dataclass fields, inherited ones included, that `section_key` may set.

    Raises OSError or SyntaxError for a megatron-core whose files are elsewhere or unreadable.
    """
    class_name, files = _SOURCES[section_key]
    classes: dict[str, ast.ClassDef] = {}
    for file in files:
        tree = ast.parse((core / file).read_text(encoding="utf-8"))
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def collect(name: str) -> dict[str, ast.AnnAssign]:
        if name not in classes:
            return {}
        fields: dict[str, ast.AnnAssign] = {}
        for base in classes[name].bases:
            fields |= collect(ast.unparse(base))
        for node in classes[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = node
        return fields

    return {name: node for name, node in collect(class_name).items() if not name.startswith("_")}


def installed_literals(name: str) -> tuple[Any, ...] | None:
    """The values that a field of the installed TransformerConfig lists in a Literal; None where it
    cannot be told."""
    core = find_megatron_core()
    try:
        field = None if core is None else read_fields(core, "model.megatron").get(name)
    except (OSError, SyntaxError):
        return None  # told where fields are given
    for node in ast.walk(field.annotation) if field is not None else ():
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            return tuple(
                constant.value
                for constant in ast.walk(node.slice)
                if isinstance(constant, ast.Constant)
            )
    return None


def megatron_problems(
    section_key: str,
    values: Mapping[Any, Any],
    find_core: Callable[[], Path | None] = find_megatron_core,
) -> Iterator[str]:
    """What is wrong with the fields given under `section_key`, a key of the schema."""
    if not values:
        return
    class_name = _SOURCES[section_key][0]
    core = find_core()
    if core is None:
        names = ", ".join(map(str, values))
        yield (
            f"{section_key}: cannot check {names}: megatron-core is not installed; "
            "install it, or leave this section out"
        )
        return
    try:
        fields = read_fields(core, section_key)
    except (OSError, SyntaxError) as error:
        yield f"{section_key}: cannot read {class_name} of megatron-core in {core}: {error}"
        return
    for name, value in values.items():
        key = f"{section_key}.{name}"
        wrong = _name_problem(section_key, class_name, name, fields)
        if wrong is None:
            wrong = _size_problem(name, value) or _value_problem(fields[name], value)
        if wrong is not None:
            yield problem(key, value, wrong)


def _name_problem(
    section_key: str, class_name: str, name: Any, fields: Mapping[str, ast.AnnAssign]
) -> str | None:
    own_keys = _OWN_KEYS[section_key]
    if name in own_keys:
        return f"has a key of its own; use {own_keys[name]}"
    if name in _OURS:
        return "is set by the training step; leave it out"
    if name in _REFUSED and name in fields:
        return _REFUSED[name]
    if name not in fields:
        taken = {*own_keys, *_OURS, *_REFUSED}
        legal = [field for field in fields if field not in taken]
        close = nearest(str(name), legal)  # all legal names, several hundred, would help nobody
        hint = f"; {did_you_mean(close)}" if close else ""
        return f"the installed {class_name} has no such field{hint}"
    return None


def _size_problem(name: str, value: Any) -> str | None:
    if name not in _SIZES or (value is None and _SIZES[name]):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return None
    return "must be an integer from 1" + (", or null" if _SIZES[name] else "")


def _value_problem(field: ast.AnnAssign, value: Any) -> str | None:
    assert isinstance(field.target, ast.Name)
    named = _NAMED_VALUES.get(field.target.id)
    if named is not None:
        return None if value in named else "must be one of " + ", ".join(named)
    annotation = ast.unparse(field.annotation)
    if value is None and _default_is_none(field):
        return None
    if not _expressible(annotation):
        return f"takes {annotation}, which a configuration file cannot hold; leave it out"
    fits, legal = _fits(field.annotation, value)
    return None if fits else f"must be {legal}"


def _default_is_none(field: ast.AnnAssign) -> bool:
    # Some fields are annotated `int` and default to None.
    return isinstance(field.value, ast.Constant) and field.value.value is None


def _expressible(annotation: str) -> bool:
    return not any(word in annotation for word in ("Callable", "torch.dtype", "ContextManager"))


def _fits(annotation: ast.expr, value: Any) -> tuple[bool, str]:
    """Whether a value fits an annotation, and the annotation in words.

    Anything but scalars, None, Literal, Optional and Union passes: megatron-core checks it.
    """
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return value is None, "null"
    if isinstance(annotation, ast.Name) and annotation.id in _SCALARS:
        types = _SCALARS[annotation.id]
        fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        return fits, annotation.id
    if isinstance(annotation, ast.BinOp):  # X | Y
        return _any_fits((annotation.left, annotation.right), value)
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value)
        inner = annotation.slice
        members = tuple(inner.elts) if isinstance(inner, ast.Tuple) else (inner,)
        if outer == "Literal":
            legal = [ast.literal_eval(member) for member in members]
            return value in legal, "one of " + ", ".join(map(str, legal))
        if outer == "Optional":
            return _any_fits((*members, ast.Constant(None)), value)
        if outer == "Union":
            return _any_fits(members, value)
    return True, ast.unparse(annotation)


def _any_fits(members: tuple[ast.expr, ...], value: Any) -> tuple[bool, str]:
    answers = [_fits(member, value) for member in members]
    return any(fits for fits, _ in answers), " or ".join(legal for _, legal in answers)
