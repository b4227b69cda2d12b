"""The shape of a model, from its preset and the configuration.

`megatron` holds keyword arguments of Megatron-Core's TransformerConfig, under their own names.
Properties of the whole model (vocabulary, positions, tied embeddings) have fields of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gspo_megatron.errors import ConfigError, problem
from gspo_megatron.files import REPLACED, WRONG_VALUES, parse_json

# Keys of the section `model` that are no fields of TransformerConfig.
WHOLE_MODEL_KEYS = ("vocab_size", "max_sequence_length", "rotary_base", "tie_embeddings")
MODEL_FILE = "model.json"  # describes the model in a checkpoint of gspo-megatron


@dataclass(frozen=True)
class ModelPreset:
    """The shape of a model before the configuration changes it. vocab_size: None if the tokenizer
    decides; joint_qk_norm: queries and keys are normalised over all heads together, not each head
    by itself."""

    vocab_size: int | None
    max_sequence_length: int
    rotary_base: float
    tie_embeddings: bool
    megatron: Mapping[str, Any]
    joint_qk_norm: bool = False
    rotary_percent: float = 1.0  # share of a head's channels, from the first on, that is rotated
    rotary_llama3_factor: float | None = None  # Llama 3's extension of the context
    # True for a preference model, whose head gives one score for a sequence instead of log-probs.
    scores: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape(ModelPreset):
    """The model that is built. In a model without experts every MoE size is None. `megatron` holds
    all keyword arguments of TransformerConfig that preset and configuration set, except layout and
    precision; `activation_func` and `attention_backend` are strings in `megatron`."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    num_moe_experts: int | None
    moe_router_topk: int | None
    moe_ffn_hidden_size: int | None
    moe_shared_expert_intermediate_size: int | None
    megatron: dict[str, Any]

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has an MLP of `ffn_hidden_size` instead of experts."""
        return self.num_moe_experts is None or self.megatron.get("moe_layer_freq", 1) != 1

    @property
    def has_latent_attention(self) -> bool:
        """Whether attention is multi-head latent attention, as in DeepSeek-V3."""
        return bool(self.megatron.get("multi_latent_attention"))

    @property
    def head_channels(self) -> tuple[int, int]:
        """The channels of one head: of a query or key, and of a value."""
        megatron = self.megatron
        if not self.has_latent_attention:
            return self.kv_channels, self.kv_channels
        keys = megatron.get("qk_head_dim", 128) + megatron.get("qk_pos_emb_head_dim", 64)
        return keys, megatron.get("v_head_dim", 128)  # Megatron-Core's defaults


def shape_of(
    preset: ModelPreset, overrides: Mapping[str, Any] = MappingProxyType({}), **own: Any
) -> ModelShape:
    """Return the model of a preset with changes. overrides: fields of TransformerConfig; own:
    fields of the preset, where None keeps the preset's value."""
    preset = replace(preset, **{name: value for name, value in own.items() if value is not None})
    megatron: dict[str, Any] = {**preset.megatron, **overrides}
    num_experts = megatron.get("num_moe_experts")
    if num_experts is None:
        # `num_moe_experts: null` on an MoE preset asks for the dense model of the same shape.
        # TransformerConfig refuses expert sizes for such a model, so the preset's expert sizes are
        # dropped. Expert sizes that the user has set are kept, and are refused later.
        megatron = {
            name: value
            for name, value in megatron.items()
            if not name.startswith("moe_") or name in overrides
        }
    heads = megatron["num_attention_heads"]
    sizes = {
        "num_query_groups": megatron.get("num_query_groups") or heads,
        "kv_channels": megatron.get("kv_channels") or megatron["hidden_size"] // heads,
        "ffn_hidden_size": megatron.get("ffn_hidden_size") or 4 * megatron["hidden_size"],
    }
    if num_experts is not None:
        width = megatron.get("moe_ffn_hidden_size") or sizes["ffn_hidden_size"]
        sizes["moe_ffn_hidden_size"] = width
        sizes["moe_router_topk"] = megatron.get("moe_router_topk", 2)
    megatron.update(sizes)
    shape_fields: dict[str, Any] = {name: megatron.get(name) for name in _MEGATRON_SIZES}
    if num_experts is None:
        shape_fields |= {"moe_router_topk": None, "moe_ffn_hidden_size": None}
    preset_fields = {field.name: getattr(preset, field.name) for field in fields(preset)}
    return ModelShape(**shape_fields, **(preset_fields | {"megatron": megatron}))


_MEGATRON_SIZES = tuple(
    name for name in ModelShape.__dataclass_fields__ if name not in ModelPreset.__dataclass_fields__
)


def experts_in_layers(shape: ModelShape) -> list[bool]:
    """A flag for each layer: whether it has experts."""
    return expert_pattern(shape.megatron, shape.num_layers)


def expert_pattern(megatron: Mapping[str, Any], num_layers: int) -> list[bool]:
    """A flag for each layer: whether it has experts. The flags come from fields of
    TransformerConfig: `moe_layer_freq` is a number n (every n-th layer, beginning with the first),
    or a list of flags."""
    if megatron.get("num_moe_experts") is None:
        return [False] * num_layers
    frequency = megatron.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(num_layers)]
    return [bool(flag) for flag in frequency]


def delta_net_layers(shape: ModelShape) -> list[int]:
    """1 for each layer with a gated delta net, 0 for each with attention."""
    return delta_net_pattern(shape.megatron.get("linear_attention_freq"), shape.num_layers)


def delta_net_pattern(frequency: int | Sequence[int] | None, num_layers: int) -> list[int]:
    """1 for each layer with a gated delta net, 0 for each with attention. frequency: the field
    `linear_attention_freq` of TransformerConfig, a number n (every n-th layer has attention) or a
    list of flags."""
    if frequency is None:
        return [0] * num_layers
    if isinstance(frequency, int):
        return [int((layer + 1) % frequency > 0) for layer in range(num_layers)]
    return list(frequency)


def delta_net_sizes(megatron: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of delta nets, with TransformerConfig's defaults."""
    return {name: megatron.get(name) or default for name, default in DELTA_NET_SIZES.items()}


DELTA_NET_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def windows_in_layers(megatron: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Return for each layer how many keys a query sees, its own key among them. None: the query
    sees all keys up to its own. `window_attn_skip_freq` is a number n (every n-th layer has no
    window), or a list of flags."""
    window, frequency = megatron.get("window_size"), megatron.get("window_attn_skip_freq")
    if window is None:
        return [None] * num_layers
    if frequency is None:
        flags = [True] * num_layers
    elif isinstance(frequency, int):
        flags = [layer % frequency != 0 for layer in range(1, num_layers + 1)]
    else:
        flags = [bool(flag) for flag in frequency]
    return [window[0] + 1 if flag else None for flag in flags]


def checkpoint_model_file(path: str) -> Path | None:
    """The model.json of a checkpoint; None if there is none. `path` may also be a run folder or its
    checkpoints folder, whose checkpoints all have the same model."""
    folder = Path(path)
    files = [folder / MODEL_FILE, folder.parent / f"{REPLACED}{folder.name}" / MODEL_FILE]
    # Folders whose names begin with a dot, but not with REPLACED, are unfinished checkpoints.
    for names in ("[!.]*", f"{REPLACED}*"):
        for place in ("checkpoints/", ""):
            files += sorted(folder.glob(f"{place}{names}/{MODEL_FILE}"), reverse=True)
    return next((file for file in files if file.is_file()), None)


def no_checkpoint(path: str) -> str:
    """Return the error line about a `model.checkpoint_path` that holds no checkpoint."""
    reason = "holds no checkpoint of gspo-megatron" if Path(path).is_dir() else no_folder(path)
    if Path(path, "config.json").is_file():
        reason = "is a Hugging Face folder; use model.hf_path for it"
    return problem("model.checkpoint_path", path, reason)


def no_folder(path: str | Path) -> str:
    """What is wrong with a path that should be a folder but is not."""
    return "is a file; allowed: its folder" if Path(path).is_file() else "no such folder"


def preset_of_checkpoint(path: str) -> ModelPreset:
    """The model of a checkpoint, as its model.json describes it. Raises ConfigError."""
    file = checkpoint_model_file(path)
    if file is None:
        raise ConfigError([no_checkpoint(path)])
    mtime = file.stat().st_mtime_ns
    return read_model("model.checkpoint_path", file, checkpoint_preset, mtime)


@functools.lru_cache(maxsize=8)
def read_model(
    key: str, file: Path, describe: Callable[[Mapping[str, Any]], ModelPreset], _version: object
) -> ModelPreset:
    """Return the model that a JSON file describes. Raises ConfigError. The result is cached,
    because a run asks for the model's shape many times. `_version`, such as the file's time, is
    part of the cache's key, so a changed file is read again. key: the config key of the path."""
    try:
        content = parse_json(file.read_bytes())
        if isinstance(content, dict):
            return describe(content)
        problems = ["not a JSON object"]
    except ConfigError as error:
        problems = error.problems
    except (OSError, *WRONG_VALUES) as error:
        problems = [f"cannot be read: {error}"]
    raise ConfigError([f"{key}: {file}: {line}" for line in problems])


def config_of_weights(hf_path: str | None, checkpoint_path: str | None) -> dict[str, Any] | None:
    """The config.json of the Hugging Face model that the weights come from, if it can be read."""
    if hf_path is not None:
        file = Path(hf_path) / "config.json"
        return parse_json(file.read_bytes()) if file.is_file() else None
    file = None if checkpoint_path is None else checkpoint_model_file(checkpoint_path)
    return None if file is None else parse_json(file.read_bytes()).get("hf")


def checkpoint_preset(model: Mapping[str, Any]) -> ModelPreset:
    """The model that the contents of model.json describe. Raises an error of WRONG_VALUES."""
    shape: dict[str, Any] = {**_ADDED_FIELDS, **model["shape"]}
    shape |= {"vocab_size": model["vocab_size"], "megatron": dict(shape["megatron"])}
    return ModelPreset(**{field.name: shape[field.name] for field in fields(ModelPreset)})


# Fields that model.json lacks if an earlier version wrote it.
_ADDED_FIELDS = {
    field.name: field.default for field in fields(ModelPreset) if field.default is not MISSING
}


def shape_conflicts(shape: ModelShape, preset: ModelPreset) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys of the section `model` that give `shape` other tensors than `preset`, with
    both values. If there is such a key, the weights of one model do not fit the other model."""
    theirs = shape_of(preset)
    outer = ("vocab_size", "tie_embeddings", "joint_qk_norm")
    values = [(key, getattr(shape, key), getattr(theirs, key)) for key in outer]
    for key in _TENSOR_FIELDS.split():
        values.append((f"megatron.{key}", shape.megatron.get(key), theirs.megatron.get(key)))
    yield from (each for each in values if (each[1] or None) != (each[2] or None))
    same_layers = shape.num_layers == theirs.num_layers
    if same_layers and experts_in_layers(shape) != experts_in_layers(theirs):
        frequencies = [each.megatron.get("moe_layer_freq", 1) for each in (shape, theirs)]
        yield "megatron.moe_layer_freq", *frequencies
    if same_layers and delta_net_layers(shape) != delta_net_layers(theirs):
        name = "linear_attention_freq"
        yield f"megatron.{name}", shape.megatron.get(name), theirs.megatron.get(name)


# Fields of TransformerConfig that decide which tensors there are, and their sizes.
_TENSOR_FIELDS = """
    num_layers hidden_size num_attention_heads num_query_groups kv_channels num_moe_experts
    moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_enable_expert_bias qk_layernorm add_qkv_bias add_bias_linear gated_linear_unit
    softmax_type
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    attention_output_gate linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads
"""
