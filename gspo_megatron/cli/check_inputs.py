"""What `check` looks at: the rules for a configuration of its stage, the files that it names, and
the weights that the run would begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config
    from gspo_megatron.config.stages import AnyConfig
    from gspo_megatron.data.inputs import FineTuningInputs, Inputs, PretrainingInputs

    AnyInputs = Inputs | FineTuningInputs | PretrainingInputs


@dataclass(frozen=True)
class Checked:
    """A sound configuration."""

    config: AnyConfig  # with the number of its steps, where that is known
    inputs: AnyInputs | None = None  # what its files hold; None without them
    checkpoint: Path | None = None  # what the run resumes from


def check_any(
    config: AnyConfig, world_size: int, *, with_files: bool = True, fresh: bool = False
) -> Checked:
    """Check a loaded configuration of any stage as the command of that stage would, together with
    the run folder; with `fresh` that folder must be empty. Without files the run is for another
    machine, and what is installed on this one is not checked either.

    Raises ConfigError with the problems of all parts.
    """
    from gspo_megatron.config.stages import StageConfig

    problems: list[str] = []
    inputs = checkpoint = None
    with gathered_in(problems):
        if isinstance(config, StageConfig):
            config, inputs = check_stage(config, world_size, with_files=with_files, fresh=fresh)
        else:
            inputs = check_all(config, world_size, with_files=with_files, fresh=fresh)
    if with_files and inputs is not None:
        with gathered_in(problems):
            checkpoint = _check_beginning(config, inputs, fresh)
    _raise(problems)
    return Checked(config, inputs, checkpoint)


def check_all(
    config: Config, world_size: int, *, with_files: bool = True, fresh: bool = False
) -> Inputs | None:
    """Check a loaded RL configuration with everything it names; None without the files.

    Raises ConfigError with the problems of all parts: what keys must satisfy together, reward,
    a custom objective, tokenizer, prompt files and their lengths, answers that the reward cannot
    use, and keys that may not differ from those of the run in the run folder.
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
        _check_custom_objective(config)
    if with_files:
        with gathered_in(problems):
            inputs = read_inputs(config)
        with gathered_in(problems):
            if inputs is not None and reward is not None:
                check_answers(reward, [*inputs.train, *inputs.evaluation])
        if problems:
            problems += _refused_beginning(config, fresh)
    _raise(problems)
    return inputs


def _check_custom_objective(config: Config) -> None:
    """Load the user's own functions, which are written with torch; nothing else here needs it."""
    section = config.objective
    if section.import_path is None and section.advantage_import_path is None:
        return
    from gspo_megatron.objectives import build_objective

    build_objective(section, config.rollout.max_response_tokens)


def check_stage(
    config: Any, world_size: int, *, with_files: bool = True, fresh: bool = False
) -> tuple[Any, Any]:
    """The same for a configuration of pre-training or fine-tuning. Returns it with the number of
    its steps, and what its files hold: None without them, or where none is named.

    The rules are checked again once the number of steps is known. Raises ConfigError.
    """
    from gspo_megatron.config import check_config
    from gspo_megatron.config.stages import FineTuningConfig
    from gspo_megatron.data.inputs import read_fine_tuning, read_pretraining

    problems: list[str] = []
    inputs = None
    with gathered_in(problems):
        check_config(config, world_size, here=with_files)
    named = with_files and {"data.examples", "data.train"} & config.input_files().keys()
    with gathered_in(problems):
        if not isinstance(config, FineTuningConfig):
            config = config.with_steps()
            inputs = read_pretraining(config) if named else None
        elif named:
            inputs = read_fine_tuning(config)
            config = config.with_steps(len(inputs.train))
    with gathered_in(problems):
        check_config(config, world_size, here=with_files)
    if problems and with_files:
        problems += _refused_beginning(config, fresh)
    _raise(problems)
    return config, inputs


def _refused_beginning(config: AnyConfig, fresh: bool) -> list[str]:
    """What can be known about the run folder and model.checkpoint_path beside other problems."""
    from gspo_megatron.checkpoint.resume import given_checkpoint, preview

    problems: list[str] = []
    with gathered_in(problems):
        try:
            start = preview(config, fresh=fresh)  # type: ignore[arg-type]
        except DataError:
            return []  # an input file cannot be read, which is reported already
        if start.state is None and config.model.checkpoint_path is not None:
            given_checkpoint(config.model.checkpoint_path)
    return problems


def _check_beginning(config: AnyConfig, inputs: AnyInputs, fresh: bool) -> Path | None:
    """The run in the run folder, whose newest checkpoint is returned, or else the weights that a
    new run begins with; and where the export goes."""
    from gspo_megatron.checkpoint.resume import check_given, preview
    from gspo_megatron.config.stages import StageConfig
    from gspo_megatron.data.inputs import model_vocab_size

    model = config.model
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
    _raise(problems)
    return start.checkpoint


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


@contextlib.contextmanager
def gathered_in(problems: list[str]) -> Iterator[None]:
    """Add what is wrong inside to the list, line by line."""
    try:
        yield
    except UserError as error:
        problems.extend(str(error).splitlines())
