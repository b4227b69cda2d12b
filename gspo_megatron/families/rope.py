"""Rotary positions in config.json: the base, the part of a head that is rotated, and the scaling
that extends the context.

transformers 5 writes all settings to `rope_parameters`; older versions wrote `rope_scaling` and
`rope_theta`. transformers reads all these keys, and so does this file. If two keys give different
values for one setting, that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo_megatron.errors import format_value, problem
from gspo_megatron.families.model_shape import ModelShape

DEFAULT, LLAMA3, YARN = "default", "llama3", "yarn"
# For latent attention, YaRN's settings are fields of MLATransformerConfig. For other attention,
# GPTModel reads attributes of TransformerConfig, whose names have this prefix.
YARN_PREFIX = "yarn_"
_ROUNDED = "correction_range_round_to_int"

# In Megatron-Core's llama3 scaling, these settings are constants.
_LLAMA3_CONSTANTS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Fields of MLATransformerConfig by the keys of config.json, with transformers' defaults.
_YARN_FIELDS: dict[str, tuple[str, Any]] = {
    "factor": ("rotary_scaling_factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
}
_KEYS = (
    *("rope_theta", "rope_type", "type", "partial_rotary_factor", "attention_factor", "truncate"),
    *("low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", *_YARN_FIELDS),
)
# also allowed at the top level
_KEYS_OUTSIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Rope:
    """The rotary positions of a model."""

    base: float
    # the share of a head's channels that are rotated, beginning with the first channel
    percent: float = 1.0
    llama3_factor: float | None = None  # None: no llama3 scaling
    # fields of TransformerConfig for YaRN
    megatron: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RopeKinds:
    """The kinds of rotary positions that a family's models may have, with their defaults."""

    types: tuple[str, ...] = (DEFAULT,)
    base: float = 10_000.0  # the base if config.json has none
    # the default share of rotated channels; None: the share is always 1
    percent: float | None = None
    # The key of config.json with the number of rotated channels of a head. None: config.json has
    # the share instead of the number.
    width_key: str | None = None
    writes_width: bool = True  # False: `width_key` is only read
    # the settings if config.json has neither rope_parameters nor rope_scaling
    unnamed: Mapping[str, Any] = field(default_factory=dict)
    latent: bool = True  # True: layers of latent attention compute the angles; False: GPTModel does


@dataclass
class _Settings:
    """The settings of a config.json, and what is wrong with them."""

    values: dict[str, Any]
    names: dict[str, str]  # the name that each setting has in config.json
    problems: list[str]

    def refuse(self, key: str, wrong: str) -> None:
        """Add a problem of a setting."""
        name = self.names.get(key, f"rope_scaling.{key}")
        self.problems.append(problem(name, self.values.get(key), wrong))


def read_rope(hf: Mapping[str, Any], kinds: RopeKinds) -> tuple[Rope, list[str]]:
    """The rotary positions of a config.json, and a line for each setting that is not supported."""
    settings = _settings(hf)
    values, problems = settings.values, settings.problems
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        values |= {key: each for key, each in kinds.unnamed.items() if key not in values}
    if kinds.width_key is not None:
        problems += _add_percent(hf, kinds.width_key, settings)
    kind = values.get("rope_type", DEFAULT)
    if kind not in kinds.types:
        settings.refuse("rope_type", f"not supported; allowed: {' or '.join(kinds.types)}")
    percent = values.get("partial_rotary_factor", 1.0 if kinds.percent is None else kinds.percent)
    if percent != 1 and kinds.percent is None:
        settings.refuse("partial_rotary_factor", "not supported; allowed: 1")
    elif not is_number(percent) or not 0 < percent <= 1:
        settings.refuse("partial_rotary_factor", "must be a number above 0, and at most 1")
    base = values.get("rope_theta", kinds.base)
    if not is_number(base) or base <= 0:
        settings.refuse("rope_theta", "must be a number above 0")
    if problems or kind == DEFAULT:
        return Rope(base, percent), problems
    factor: Any = values.get("factor")
    if not is_number(factor) or factor < 1:
        settings.refuse("factor", "must be a number of at least 1")
        return Rope(base), problems
    if kind == LLAMA3:
        for key, constant in _LLAMA3_CONSTANTS.items():
            if values.get(key) != constant:
                settings.refuse(key, f"not supported; allowed: {constant:g}")
        return Rope(base, percent, factor), problems
    return Rope(base, percent, megatron=_yarn(settings, kinds)), problems


def write_rope(shape: ModelShape, kinds: RopeKinds) -> dict[str, Any]:
    """The keys of config.json for a model's rotary positions, in the form of published files."""
    scaling: dict[str, Any] | None = None
    if shape.rotary_llama3_factor is not None:
        scaling = {"rope_type": LLAMA3, "factor": shape.rotary_llama3_factor, **_LLAMA3_CONSTANTS}
    elif shape.megatron.get("rope_type") == YARN or f"{YARN_PREFIX}mscale" in shape.megatron:
        names = {key: ours for key, (ours, _) in _YARN_FIELDS.items()}
        names |= {"mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
        prefix = "" if kinds.latent else YARN_PREFIX
        values = {key: shape.megatron.get(f"{prefix}{ours}") for key, ours in names.items()}
        scaling = {"type": YARN} | values
        if not shape.megatron.get(f"{prefix}{_ROUNDED}", True):
            scaling["truncate"] = False
    elif kinds.unnamed:
        scaling = {"rope_type": DEFAULT}
    keys = {"rope_theta": shape.rotary_base, "rope_scaling": scaling}
    if kinds.width_key is not None and kinds.writes_width:
        return keys | {kinds.width_key: round(shape.rotary_percent * shape.kv_channels)}
    if kinds.percent is not None:
        keys["partial_rotary_factor"] = shape.rotary_percent
    return keys


def two_values(key: str, value: Any, other: str, its: Any) -> str:
    """The message about two keys for one setting that have different values."""
    values = f"{key} = {format_value(value)}, but {other} = {format_value(its)}"
    return f"{values}: two spellings of one setting; keep the right one"


def in_one_spelling(
    hf: Mapping[str, Any], spellings: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """The keys of a config.json under their usual names, and a line for each setting that has two
    keys with different values."""
    config, problems = dict(hf), []
    for other, usual in spellings.items():
        if other not in config:
            continue
        value = config.pop(other)
        if usual in config and config[usual] != value:
            problems.append(two_values(other, value, usual, config[usual]))
        config.setdefault(usual, value)
    return config, problems


def _settings(hf: Mapping[str, Any]) -> _Settings:
    """All settings, and a problem for each that has several values or a wrong type."""
    problems: list[str] = []
    sections: dict[str, dict[str, Any]] = {"": {}, "rope_scaling.": {}, "rope_parameters.": {}}
    for prefix, section in sections.items():
        content = hf.get(prefix[:-1]) if prefix else hf
        if content is not None and not isinstance(content, Mapping):
            problems.append(problem(prefix[:-1], content, "must be a mapping"))
            continue
        for key, value in (content or {}).items():
            # the settings are for the layers of one type only
            if prefix and isinstance(value, Mapping):
                wrong = "not supported; allowed: one set of values for all layers"
                problems.append(problem(f"{prefix}{key}", value, wrong))
            elif key in _KEYS and (prefix or key in _KEYS_OUTSIDE) and value is not None:
                section[key] = value
    settings: dict[str, Any] = {}
    names: dict[str, str] = {}
    for prefix, section in sections.items():
        values, conflicts = in_one_spelling(section, {"type": "rope_type"})
        problems += [line.replace("type = ", f"{prefix}type = ", 1) for line in conflicts]
        for key, value in values.items():
            if key in settings and settings[key] != value:
                problems.append(two_values(f"{prefix}{key}", value, names[key], settings[key]))
            settings[key], names[key] = value, f"{prefix}{key}"
    return _Settings(settings, names, problems)


def _add_percent(hf: Mapping[str, Any], key: str, settings: _Settings) -> list[str]:
    """Compute the share of rotated channels from their number, which is the value of `key`, and add
    the share to the settings. Returns the problems of the number."""
    channels, width = hf.get(key), hf.get("head_dim")
    if channels is None:
        return []
    if type(channels) is not int or type(width) is not int or not 0 < channels <= width:
        wrong = f"must be an integer from 1 to head_dim ({format_value(width)})"
        return [problem(key, channels, wrong)]
    percent = channels / width
    # config.json may have the share, too
    value = settings.values.setdefault("partial_rotary_factor", percent)
    name = settings.names.setdefault("partial_rotary_factor", key)
    return [] if value == percent else [two_values(key, channels, name, value)]


def _yarn(settings: _Settings, kinds: RopeKinds) -> dict[str, Any]:
    """Return the fields for YaRN. The fields have the names of MLATransformerConfig (latent
    attention), or the names that GPTModel reads."""
    values = settings.values
    megatron: dict[str, Any] = {"rope_type": YARN}
    for key, (ours, default) in _YARN_FIELDS.items():
        megatron[ours] = value = values.get(key, default)
        if not is_number(value) or value <= 0:
            settings.refuse(key, "must be a number above 0")
    constants = {"attention_factor": None} | ({"truncate": True} if kinds.latent else {})
    for key, constant in constants.items():
        if values.get(key, constant) != constant:
            settings.refuse(key, f"not supported; allowed: {format_value(constant)}")
    scale, all_dims = values.get("mscale", 0), values.get("mscale_all_dim", 0)
    # in this case transformers scales the two parts of attention differently
    if all_dims and not scale:
        settings.refuse("mscale_all_dim", "not supported without mscale; allowed: both, or none")
    # If only one of mscale and mscale_all_dim is set, transformers uses mscale = 1 for the angles.
    megatron |= {
        "mscale": float(scale) if scale and all_dims else 1.0,
        "mscale_all_dim": float(all_dims),
    }
    if not kinds.latent:
        del megatron["rope_type"]
        megatron[_ROUNDED] = truncates = values.get("truncate", True)
        if not isinstance(truncates, bool):
            settings.refuse("truncate", "must be true or false")
        megatron = {f"{YARN_PREFIX}{name}": value for name, value in megatron.items()}
    return megatron


def is_number(value: Any) -> bool:
    """Whether a value of config.json is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
