"""Configuration: turns YAML and overrides into a typed and checked Config.

It imports torch only to check fields of Megatron-Core's classes, if the configuration sets such
fields.
"""

from gspo_megatron.config.load import load_config, parse_config, to_shown_yaml, to_yaml
from gspo_megatron.config.parallel import Layout, ResolvedParallel, apply_layout, resolve_parallel
from gspo_megatron.config.rules import check_config, recomputes_old_logprobs
from gspo_megatron.config.schema import Config
from gspo_megatron.families import PRESETS
from gspo_megatron.families.model_shape import ModelPreset, ModelShape

__all__ = [
    "PRESETS",
    "Config",
    "Layout",
    "ModelPreset",
    "ModelShape",
    "ResolvedParallel",
    "apply_layout",
    "check_config",
    "load_config",
    "parse_config",
    "recomputes_old_logprobs",
    "resolve_parallel",
    "to_shown_yaml",
    "to_yaml",
]
