"""Checks a run before it begins: the rules for its stage, the files that the configuration names,
the run folder, and the weights that the run begins with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.resume import (
    Start,
    check_given,
    given_adapters,
    given_checkpoint,
    preview,
)
from gspo_megatron.config import Config, check_config
from gspo_megatron.config.hub import fetch_weights, model_paths
from gspo_megatron.config.phases import phase_configs
from gspo_megatron.config.schema import RewardSection, suite_key
from gspo_megatron.config.scorer import preset_of_scorer
from gspo_megatron.config.stages import AnyConfig, PreferenceConfig, PretrainingConfig, StageConfig
from gspo_megatron.data.chat import check_template
from gspo_megatron.data.formats import field_map
from gspo_megatron.data.inputs import (
    ExampleInputs,
    Inputs,
    PretrainingInputs,
    model_vocab_size,
    read_fine_tuning,
    read_inputs,
    read_preferences,
    read_pretraining,
)
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.environments.episode import gives_rewards
from gspo_megatron.environments.registry import check_environment, environment_of, tools_of
from gspo_megatron.errors import ConfigError, DataError, UnknownValueError, gathered_in
from gspo_megatron.families.adapter_map import PEFT_CONFIG, adapted_weights
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.hub import lacks_weights, tokenizer_in
from gspo_megatron.observe.trackers import require_packages
from gspo_megatron.rewards.registry import (
    Reward,
    check_answers,
    check_section,
    reward_of,
    suite_rewards,
)
from gspo_megatron.rollout.reward_model import tokenizer_of
from gspo_megatron.rollout.teacher import check_teachers
from gspo_megatron.rollout.vllm.installed import unserved

AnyInputs = Inputs | ExampleInputs | PretrainingInputs
FindStart = Callable[[AnyConfig], Start]


@dataclass(frozen=True)
class Checked:
    """A sound configuration."""

    config: AnyConfig  # with the number of its steps, if that is known
    inputs: AnyInputs | None = None  # the contents of its files; None if no files are read
    start: Start | None = None  # what the run resumes from; None if that was not checked


@contextlib.contextmanager
def all_problems(
    world_size: int | None = None, check: Callable[..., Any] | None = None, **options: Any
) -> Generator[None]:
    """Report all problems of a configuration that is loaded inside this context. If some values are
    not allowed, `check` still checks all other values. The ConfigError then has all problems.

    world_size: by default as many ranks as the layout needs. check: by default `check_run`.
    options: further arguments of `check`.
    """
    try:
        yield
    except ConfigError as error:
        config, problems = error.known, error.problems
        if config is None:
            raise
        ranks = world_size
        # If the layout has a wrong value, the rules about the layout are not checked.
        with contextlib.suppress(UnknownValueError):
            ranks = world_size or config.world_size_hint()
        with gathered_in(problems):
            (check or check_run)(config, ranks or 1, value_problems=problems, **options)
        raise ConfigError(list(dict.fromkeys(problems))) from None


def check_run(
    config: AnyConfig,
    world_size: int,
    *,
    with_files: bool = True,
    find_start: FindStart = preview,
    value_problems: Sequence[str] = (),
    with_weights: bool = False,
) -> Checked:
    """Check a run: call `check_all`, and check the packages of the trackers, the run folder, the
    weights that a new run begins with, and the folder of its export. With `with_weights`, weights
    of the Hub are downloaded after the checks that need no weights. Without `with_weights`, weights
    that are not downloaded yet are not checked.

    Raises ConfigError with `value_problems`, the problems of values that are not allowed, and then
    the problems of all parts."""
    options: Any = {"find_start": find_start, "value_problems": value_problems}
    problems: list[str] = []
    with gathered_in(problems):
        config, inputs = check_all(config, world_size, with_files=with_files, **options)
    if with_files:
        with gathered_in(problems):
            require_packages(config.logging.trackers)
    _raise(problems)
    if with_weights:
        for phase in phase_configs(config):
            fetch_weights(phase)
    start = _check_start(config, inputs, find_start) if inputs is not None else None
    return Checked(config, inputs, start)


def check_all(
    config: Any,
    world_size: int,
    *,
    with_files: bool = True,
    find_start: FindStart = preview,
    value_problems: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Check a loaded configuration of any stage, and everything that it names. Returns the
    configuration with its number of steps, and the contents of its files (None if no files are read
    or named).

    `with_files`: False if the run is for another machine. Then neither files nor installed packages
    are checked. `find_start`: see `preview`.

    Raises ConfigError with `value_problems`, and then the problems of all parts. The error also has
    the problems of the run folder that can be found without the contents of the files.
    """
    problems: list[str] = [*value_problems]
    inputs = None
    options: Any = {"here": with_files, "for_training": isinstance(config, Config)}
    first, *later = phase_configs(config)
    with gathered_in(problems):
        check_config(first, world_size, **options)
    if isinstance(config, Config):
        inputs = _read_prompts(first, with_files, problems)
        for number, phase in enumerate(later, start=1):
            of_phase: list[str] = []
            with gathered_in(of_phase):
                check_config(phase, world_size, **options)
            inputs = _read_prompts(phase, with_files, of_phase) or inputs
            _add(problems, of_phase, number)
    else:
        with gathered_in(problems):
            learned = f"data.{config.inputs[0]}"
            named = with_files and learned in config.input_files()
            if isinstance(config, PretrainingConfig):
                config = config.with_steps()
                inputs = read_pretraining(config) if named else None
            elif named:
                is_preference = isinstance(config, PreferenceConfig)
                inputs = (read_preferences if is_preference else read_fine_tuning)(config)
                config = config.with_steps(len(inputs.train))
        with gathered_in(problems):  # a second time, because the number of steps is known now
            check_config(config, world_size, here=with_files)
    if problems and with_files:
        with gathered_in(problems):
            _check_start(config, None, find_start)
    _raise(problems)
    return config, inputs


def _read_prompts(config: Config, with_files: bool, problems: list[str]) -> Inputs | None:
    inputs = reward = environment = None
    tools: list[dict[str, Any]] = []
    with gathered_in(problems):
        environment, tools = environment_of(config), tools_of(config)
    suites: dict[str, Reward] = {}
    with gathered_in(problems):
        suites = suite_rewards(config.evaluation.suites)
    for name, of_suite in suites.items():
        with gathered_in(problems):
            suite = config.evaluation.suites[name]
            check_section(of_suite, suite.reward, suite.samples, f"{suite_key(name)}: ")
    with gathered_in(problems):
        section = config.reward
        is_read = config.data.prompts is not None or config.data.eval_prompts is not None
        reward = reward_of(section)
        if gives_rewards(environment):
            reward = None
        elif is_read and reward.answers is not None and field_map(config.data).answer is None:
            wrong = f"reward.name = {section.name} compares responses with answers"
            problems.append(
                f"data.answer_field = null: {wrong}; allowed: the field that holds them"
            )
            reward = None
        if reward is not None:
            trains = config.data.prompts is not None
            greedy = trains and config.data.eval_prompts is not None
            if greedy and reward.size_fault(1, **reward.options) is not None:
                problems.append(
                    f"data.eval_prompts: reward {section.name} cannot score a single response, and "
                    "each of these prompts gets only one; allowed: null; evaluation.suites have "
                    "rewards of their own"
                )
            size = config.rollout.group_size if trains else 1
            has_teachers = bool(config.objective.distillation.urls)
            check_section(reward, section, size, has_teachers=has_teachers)
    with gathered_in(problems):
        own = config.objective
        # The user's own functions are written with torch; nothing else here needs torch.
        if own.import_path is not None or own.advantage_import_path is not None:
            from gspo_megatron.objectives import build_objective

            build_objective(own, config.rollout.max_response_tokens)
    if with_files:
        with gathered_in(problems):
            problems += unserved(config)
        with gathered_in(problems):
            inputs = read_inputs(config, tools)
        if environment is not None and inputs is not None:
            with gathered_in(problems):
                prompts = [*itertools.chain(*inputs.files.values())]
                check_environment(environment, inputs.tokenizer, prompts)
        if reward is not None and inputs is not None:
            with gathered_in(problems):
                check_answers(reward, [*inputs.train, *inputs.evaluation])
        if inputs is not None:
            with gathered_in(problems):
                check_teachers(config.objective.distillation, inputs.train)
        for name, of_suite in suites.items() if inputs is not None else ():
            with gathered_in(problems):
                check_answers(of_suite, inputs.files[suite_key(name)])
    return inputs


def _check_start(config: Any, inputs: AnyInputs | None, find_start: FindStart) -> Start | None:
    """Return what the run resumes from. Without inputs, check only the parts that need no
    inputs."""
    missing = _missing(config)
    try:
        start = find_start(config)
    except DataError:
        if inputs is None:
            return None  # an input file cannot be read, which is reported already
        raise
    model = config.model
    if inputs is None:
        if start.state is None and model.checkpoint_path is not None:
            given_checkpoint(model.checkpoint_path)
        return start
    problems: list[str] = []
    if start.state is None:
        vocab_size = model_vocab_size(config, inputs.tokenizer)
        if model.checkpoint_path is not None:
            with gathered_in(problems):
                check_given(config, vocab_size)
        if model.lora.checkpoint is not None and model.lora.checkpoint not in missing:
            with gathered_in(problems):
                _check_adapters(config, vocab_size)
        if model.hf_path is not None and model.hf_path not in missing:
            from gspo_megatron.hf.files import checked_folder

            with gathered_in(problems):
                code = model.ignore_custom_code
                shape = config.resolved_model()
                checked_folder(model.hf_path, shape, vocab_size, ignore_custom_code=code)
    if isinstance(config, Config):
        for number, phase in enumerate(phase_configs(config)):
            _add(problems, _judge_problems(phase, inputs.tokenizer), number)
    if isinstance(config, StageConfig) and config.export.hf_path is not None:
        from gspo_megatron.hf.writer import check_destination

        path = Path(config.export.hf_path)
        with gathered_in(problems):
            if not (start.is_finished and (path / "config.json").exists()):
                check_destination(path)
    _raise(problems)
    return start


def _missing(config: Any) -> set[str]:
    """Return the named models of the Hub whose weights are not downloaded yet."""
    return {path for _, path in model_paths(config) if lacks_weights(path)}


def _judge_problems(config: Config, tokenizer: Tokenizer) -> list[str]:
    """Return what is wrong with the teachers and reward models of a run or phase."""
    problems: list[str] = []
    missing = _missing(config)
    for number, folder in config.objective.distillation.folders.items():
        if folder not in missing:
            with gathered_in(problems):
                check_teacher(config, number, tokenizer)
    with gathered_in(problems):
        check_reward_model(config, config.reward, "reward")
    for name, suite in config.evaluation.suites.items():
        with gathered_in(problems):
            check_reward_model(config, suite.reward, f"{suite_key(name)}.reward")
    return problems


_PROBE = "Ünïcode, 12 + 34 = 46;\n\tthe end, 終わり. <|x|> {}[]"


def check_teacher(config: Config, number: int, tokenizer: Tokenizer) -> None:
    """Raise DataError if the teacher of `objective.distillation` with this number cannot teach the
    policy: its folder is damaged, or its shape or tokenizer differs from the policy's."""
    from gspo_megatron.hf.files import checked_folder

    folder = config.objective.distillation.folders[number]
    vocab_size, code = model_vocab_size(config, tokenizer), config.model.ignore_custom_code
    checked_folder(folder, config.resolved_model(), vocab_size, ignore_custom_code=code)
    teachers = load_tokenizer(tokenizer_in(Path(folder)))
    if teachers.eos_id != tokenizer.eos_id or teachers.encode(_PROBE) != tokenizer.encode(_PROBE):
        key = config.objective.distillation.key_of(number, "teacher")
        raise DataError(
            f"{key} = {folder}: its tokenizer encodes a text differently from "
            f"data.tokenizer = {config.data.tokenizer}; give a teacher with the same tokenizer"
        )


def check_reward_model(config: Config, reward: RewardSection, key: str) -> None:
    """Raise DataError if the folder of a reward model is damaged or holds no reward model, or if
    its tokenizer is missing or damaged, or belongs to another model. key: the key of the section
    `reward`."""
    section = reward.model
    if not section.is_on:
        return
    name = "tokenizer" if section.tokenizer is not None else "folder"
    source = f"{key}.model.{name} = {section.tokenizer_folder}"
    try:
        theirs = tokenizer_of(section)
        if section.chat_template or (section.chat_template is None and theirs.chat_template):
            check_template(theirs)
    except DataError as error:
        text = str(error).replace("data.chat_template", f"{key}.model.chat_template")
        advice = f"{key}.model.tokenizer can name another tokenizer"
        raise DataError(f"{source}: {text}; {advice}") from None
    if section.folder is None:
        return
    from gspo_megatron.hf.files import checked_folder  # imports torch

    shape = shape_of(preset_of_scorer(section.folder))
    code = config.model.ignore_custom_code
    assert shape.vocab_size is not None, "config.json has it"
    checked_folder(section.folder, shape, shape.vocab_size, ignore_custom_code=code)
    if theirs.vocab_size > shape.vocab_size:
        raise DataError(
            f"{source}: its tokenizer has {theirs.vocab_size} tokens, but the model in "
            f"{section.folder} has {shape.vocab_size}; give the model's own tokenizer"
        )


def _check_adapters(config: AnyConfig, vocab_size: int) -> None:
    """Raise DataError if the run cannot begin with model.lora.checkpoint. No tensor is read."""
    from gspo_megatron.hf.adapters import fitting_adapters, peft_maps

    section, path, shape = config.model.lora, config.model.lora.checkpoint, config.resolved_model()
    assert path is not None
    if not Path(path, PEFT_CONFIG).exists():
        given_adapters(path, section, base=None)
        return
    maps = peft_maps(config.model.family(shape), shape, vocab_size)
    fitting_adapters(path, section, adapted_weights(maps[0], section.targets), maps)


def _add(problems: list[str], of_phase: list[str], number: int) -> None:
    """Add the problems of the phase with this number, if no earlier phase has the same ones."""
    place = f"training.phases[{number}]: " if number else ""
    problems += [f"{place}{line}" for line in of_phase if line not in problems]


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
