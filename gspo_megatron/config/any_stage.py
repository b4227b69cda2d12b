"""Which stage a configuration is of, told by what it holds; and its rules, whichever it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gspo_megatron.config.load import apply_overrides, parse_config, read_mapping
from gspo_megatron.config.rules import check_config
from gspo_megatron.config.schema import Config
from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig, StageConfig
from gspo_megatron.config.stages_rules import check_stage
from gspo_megatron.errors import ConfigError

AnyConfig = Config | FineTuningConfig | PretrainingConfig

STAGES: dict[str, type[AnyConfig]] = {
    "rl": Config,
    "sft": FineTuningConfig,
    "pretrain": PretrainingConfig,
}
# What is learned from: each stage has a key of its own for it, which it cannot train without.
_INPUTS = {"rl": "prompts", "sft": "examples", "pretrain": "train"}


def load_any_config(
    path: str | Path, overrides: Sequence[str] = (), stage: str | None = None
) -> AnyConfig:
    """As `load_config`, for a file of any stage: of `stage`, or else of that which its keys tell.

    Raises ConfigError, also where they tell of none or of two.
    """
    path = Path(path)
    values, problems = read_mapping(path)
    if values is None:
        raise ConfigError(problems + apply_overrides({}, overrides)[1])
    if stage is None:
        given, problems = apply_overrides(values, overrides)
        try:
            stage = stage_of(given)
        except ConfigError as error:
            lines = [f"{path}: {line}" for line in error.problems]
            raise ConfigError(problems + lines) from None
    return parse_config(values, overrides, path.stem, STAGES[stage])  # type: ignore[type-var]


def stage_of(values: Mapping[str, Any]) -> str:
    """rl, sft or pretrain: whose input these values name, else whose keys they have. Raises
    ConfigError where that is none or several."""
    data = values.get("data")
    named = {
        stage: f"data.{key}"
        for stage, key in _INPUTS.items()
        if isinstance(data, Mapping) and data.get(key)
    }
    if len(named) > 1:
        keys = ", ".join(f"{key} ({stage})" for stage, key in named.items())
        raise ConfigError([f"names what several stages learn from: {keys}; leave one of them"])
    if named:
        return next(iter(named))
    telling = {
        key: stages for key, stages in _places(values) if stages and len(stages) < len(STAGES)
    }
    left = [stage for stage in STAGES if all(stage in stages for stages in telling.values())]
    if len(left) == 1:
        return left[0]
    if not left:
        keys = ", ".join(f"{key} ({' or '.join(stages)})" for key, stages in telling.items())
        raise ConfigError([f"has keys of different stages: {keys}; leave those of one"])
    keys = ", ".join(f"data.{_INPUTS[stage]} ({stage})" for stage in left)
    raise ConfigError(
        [f"may be a configuration of {' or '.join(left)}: legal: one of {keys}, or say --stage"]
    )


def _places(values: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Sections and their keys, and the stages that have each of them."""
    for name, section in values.items():
        schemas = {stage: _section(schema, name) for stage, schema in STAGES.items()}
        yield str(name), [stage for stage, schema in schemas.items() if schema is not None]
        for key in section if isinstance(section, Mapping) else ():
            holders = [stage for stage, s in schemas.items() if s and key in s.model_fields]
            yield f"{name}.{key}", holders


def _section(schema: type[BaseModel], name: str) -> type[BaseModel] | None:
    field = schema.model_fields.get(name)
    found = None if field is None else field.annotation
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def check_any_config(config: AnyConfig, world_size: int, *, for_training: bool = False) -> None:
    """Raise ConfigError with every problem the configuration has on `world_size` ranks. Without
    `for_training`, an RL configuration need not name what only a training run needs."""
    if isinstance(config, StageConfig):
        check_stage(config, world_size)
    else:
        check_config(config, world_size, for_training)
