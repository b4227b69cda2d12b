"""Helpers that make configurations of an RL run, and list their problems."""

from __future__ import annotations

from gspo_megatron.config import Config, check_config, parse_config
from gspo_megatron.errors import ConfigError


def config_with(*overrides: str) -> Config:
    return parse_config({"data": {"tokenizer": "t", "prompts": "p.jsonl"}}, overrides)


def problems_of(world_size: int, *overrides: str, for_training: bool = False) -> list[str]:
    try:
        check_config(config_with(*overrides), world_size, for_training)
    except ConfigError as error:
        return error.problems
    return []
