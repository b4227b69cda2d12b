"""What `check` looks at: the rules of a configuration's stage, the files that it names, and the
weights that the run would begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config
    from gspo_megatron.config.any_stage import AnyConfig
    from gspo_megatron.data.inputs import FineTuningInputs, Inputs, PretrainingInputs

    AnyInputs = Inputs | FineTuningInputs | PretrainingInputs


@dataclass(frozen=True)
class Checked:
    """A sound configuration."""

    config: AnyConfig  # with the number of its steps, where that is known
    inputs: AnyInputs | None = None  # what its files hold; None without them
    checkpoint: Path | None = None  # what the run goes on from


def check_any(
    config: AnyConfig, world_size: int, *, with_files: bool = True, fresh: bool = False
) -> Checked:
    """Check a loaded configuration of any stage as the stage's own command would, with what it
    finds in the run folder; with `fresh` that folder must be empty. Without the files it is a run
    of another machine, and what is installed on this one is left out too.

    Raises ConfigError with the problems of all parts.
    """
    from gspo_megatron.config.stages import StageConfig

    problems: list[str] = []
    inputs = checkpoint = None
    with gathered_in(problems):
        if isinstance(config, StageConfig):
            config, inputs = _check_stage(config, world_size, with_files)
        else:
            inputs = check_all(config, world_size, with_files=with_files)
    if with_files:
        with gathered_in(problems):
            checkpoint = _check_beginning(config, inputs, fresh)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Checked(config, inputs, checkpoint)


def check_all(config: Config, world_size: int, *, with_files: bool = True) -> Inputs | None:
    """Check a loaded RL configuration with everything it names; None without the files.

    Raises ConfigError with the problems of all parts: what keys must satisfy together, reward,
    an objective of the user's own, tokenizer, prompt files and their lengths, answers that the
    reward has no use for.
    """
    from gspo_megatron.config import check_config
    from gspo_megatron.data.inputs import read_inputs
    from gspo_megatron.rewards.registry import check_answers, get_reward

    problems: list[str] = []
    inputs = reward = None
    with gathered_in(problems):
        check_config(config, world_size, for_training=True, here=with_files)
    with gathered_in(problems):
        reward = get_reward(config.reward.name, config.reward.import_path, config.reward.options)
    with gathered_in(problems):
        _check_own_objective(config)
    if with_files:
        with gathered_in(problems):
            inputs = read_inputs(config)
        with gathered_in(problems):
            if inputs is not None and reward is not None:
                check_answers(reward, [*inputs.train, *inputs.evaluation])
    if problems:
        raise ConfigError(problems)
    return inputs


def _check_own_objective(config: Config) -> None:
    """Load the user's own functions, which are written with torch; nothing else here needs it."""
    section = config.objective
    if section.import_path is None and section.advantage_import_path is None:
        return
    from gspo_megatron.objectives import build_objective

    build_objective(section, config.rollout.max_response_tokens)


def _check_stage(config: Any, world_size: int, with_files: bool) -> tuple[Any, Any]:
    """The rules, and the files where something is named to learn from; then the rules once more,
    with the number of steps that these make."""
    from gspo_megatron.cli.stages import read_stage
    from gspo_megatron.config.stages import PretrainingConfig
    from gspo_megatron.config.stages_rules import check_stage

    problems: list[str] = []
    inputs = None
    with gathered_in(problems):
        check_stage(config, world_size, here=with_files)
    if with_files and {"data.examples", "data.train"} & config.input_files().keys():
        with gathered_in(problems):
            config, inputs = read_stage(config)
    elif isinstance(config, PretrainingConfig):
        config = config.with_steps()
    with gathered_in(problems):
        check_stage(config, world_size, here=with_files)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config, inputs


def _check_beginning(config: AnyConfig, inputs: AnyInputs | None, fresh: bool) -> Path | None:
    """The run in the run folder, of which the newest checkpoint is returned, or else the weights
    that a new one begins with; and where the export goes. Without inputs, whose problems are told
    already, no more than that the weights are there."""
    from gspo_megatron.checkpoint.resume import check_given, given_checkpoint, preview
    from gspo_megatron.config.stages import StageConfig
    from gspo_megatron.data.inputs import model_vocab_size

    model = config.model
    if inputs is None:
        if model.checkpoint_path is not None:
            given_checkpoint(model.checkpoint_path)
        return None
    start = preview(config, fresh=fresh)  # type: ignore[arg-type]
    problems: list[str] = []
    if start.state is None:
        vocab_size = model_vocab_size(config, inputs.tokenizer)  # type: ignore[arg-type]
        if model.checkpoint_path is not None:
            with gathered_in(problems):
                check_given(config, vocab_size)  # type: ignore[arg-type]
        if model.hf_path is not None:
            from gspo_megatron.checkpoint.hf.files import checked_folder

            with gathered_in(problems):
                checked_folder(model.hf_path, config.resolved_model(), vocab_size)
    if isinstance(config, StageConfig) and config.export.hf_path is not None:
        from gspo_megatron.checkpoint.hf.writer import check_destination

        path = Path(config.export.hf_path)
        with gathered_in(problems):
            if not (start.is_finished and (path / "config.json").exists()):
                check_destination(path)
    if problems:
        raise ConfigError(problems)
    return start.checkpoint


@contextlib.contextmanager
def gathered_in(problems: list[str]) -> Iterator[None]:
    """What is wrong inside is added to the list, line by line."""
    try:
        yield
    except UserError as error:
        problems.extend(str(error).splitlines())
