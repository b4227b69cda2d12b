"""Configuration: YAML and overrides in, a typed and checked Config out. Imports no torch."""

from gspo_megatron.config.load import load_config, parse_config, to_yaml
from gspo_megatron.config.parallel import Layout, ResolvedParallel, apply_layout, resolve_parallel
from gspo_megatron.config.presets import PRESETS, ModelPreset
from gspo_megatron.config.rules import check_config
from gspo_megatron.config.schema import Config
from gspo_megatron.config.shape import ModelShape

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
    "resolve_parallel",
    "to_yaml",
]
