"""Finds reward functions by name or in a user's module, and checks their options before training.

A reward is a function `reward(sample: Sample, **options)`. If its first parameter is called
`samples`, the function gets a batch: `reward(samples: list[Sample], **options) -> list`. If this
parameter is called `group`, the function gets all responses to one prompt:
`reward(group: list[Sample], **options) -> list`. All kinds may be `async def`. A reward returns a
number, `Reasoned` (a number with a reason, which evaluations record, and figures, which become
metrics), `TurnRewards`, or named parts, `{"correct": 1.0, "format": 0.2}`. The function may have an
attribute `read_answer(sample, **options) -> str | None`, which evaluations use for votes, and an
attribute `figures`, the names of the figures that it returns.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_megatron.config.schema import RewardSection, SuiteSection, suite_key
from gspo_megatron.errors import ConfigError, RewardError, gathered_in, problem
from gspo_megatron.plugins import load_function, option_problems, origin, own_copy, own_record
from gspo_megatron.rewards.values import is_free_name, shorten
from gspo_megatron.types import Prompt, Sample

RewardFunction = Callable[..., Any]

DEFAULT_MODE = "score"  # the value of the option `mode` that chooses a reward's usual form
# The most problems to show, because a file of the wrong kind has a problem in every line.
SHOWN_ANSWERS = 5


@dataclass(frozen=True)
class Reward:
    """A reward function with its options.

    It is called with one sample, the samples of one prompt, or all samples of a rank.
    """

    name: str
    function: RewardFunction
    options: Mapping[str, Any] = field(default_factory=dict)
    # The types of answers that the reward accepts; None if it takes any answer or needs no answer.
    answers: tuple[type, ...] | None = None
    requires: str | None = None  # pip name of an optional package that the function imports
    positive: tuple[str, ...] = ()  # names of options that must be above 0
    # Each of the next five functions returns a problem as text, or None. The first says why the
    # reward cannot use an answer, the second why it cannot judge responses to a prompt.
    answer_fault: Callable[[str], str | None] = lambda answer: None
    row_fault: Callable[[Prompt], str | None] = lambda prompt: None
    # Says why the reward does not work on this machine with these options, and what to do.
    machine_fault: Callable[[Mapping[str, Any]], str | None] = lambda options: None
    # Says why the reward does not work with these settings, and what to do.
    section_fault: Callable[[RewardSection], str | None] = lambda section: None
    # Says why the reward cannot score groups of this size. It also gets the options.
    size_fault: Callable[..., str | None] = lambda size, **options: None
    workers: int = 0  # used if `reward.workers` is null
    # Extracts the answer from a sample, for votes of an evaluation. Equal answers must give equal
    # text. None: the reward cannot extract answers.
    read_answer: Callable[..., str | None] | None = None
    figures: tuple[str, ...] = ()  # names of the figures in `Reasoned`, which become metrics
    # Other forms of this reward, by the value of the option `mode`. Without this option the usual
    # form is used.
    modes: Mapping[str, Reward] = field(default_factory=dict)

    def __call__(self, given: Sample | list[Sample]) -> Any:
        """Call the function with copies, because it may change its arguments.

        Samples share the objects of their prompt's row, and a row is used several times."""
        mine = [*map(own_record, given)] if isinstance(given, list) else own_record(given)
        return self.function(mine, **own_copy(dict(self.options)))

    def answer_in(self, sample: Sample) -> str | None:
        """Return the answer that `read_answer` finds, or None if the sample has no answer or the
        reward has no `read_answer`.

        Raises RewardError if the function fails or returns anything but text or None."""
        if self.read_answer is None:
            return None
        try:
            answer = self.read_answer(own_record(sample), **own_copy(dict(self.options)))
        except (Exception, SystemExit) as error:
            what = f"raised {type(error).__name__}: {error} ({origin(error)})"
            raise RewardError(f"read_answer of reward {self.name!r} {what}") from error
        if answer is not None and not isinstance(answer, str):
            what = f"returned {shorten(answer)}; a text or None is wanted"
            raise RewardError(f"read_answer of reward {self.name!r} {what}")
        return answer

    @functools.cached_property
    def of_batch(self) -> bool:
        """Whether the function takes a batch: its first parameter is called `samples`."""
        return getattr(_first_parameter(self.function), "name", "") == "samples"

    @functools.cached_property
    def of_group(self) -> bool:
        """Whether the function takes the responses to one prompt: its first parameter is called
        `group`."""
        return getattr(_first_parameter(self.function), "name", "") == "group"

    @functools.cached_property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 (for callable objects)
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)


_REGISTRY: dict[str, Reward] = {}


def register(name: str, **facts: Any) -> Callable[[RewardFunction], RewardFunction]:
    """Return a decorator that registers a function as the reward `name`.

    `facts` are fields of `Reward`: `answers` (default: strings), `requires`, `workers`,
    `positive`, `read_answer`, and the fault functions."""

    def decorate(function: RewardFunction) -> RewardFunction:
        assert name not in _REGISTRY, f"two rewards named {name!r}"
        settings: dict[str, Any] = {"answers": (str,), **facts}
        _REGISTRY[name] = Reward(name, function, **settings)
        return function

    return decorate


def get_reward(
    name: str,
    import_path: str | None = None,
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
) -> Reward:
    """Return the reward `name`, or the user's function at `import_path`, "package.module:function".

    The module is searched for in the installed packages, then in the current directory. `options`
    become keyword arguments; `workers` is the number of processes that will call the function.

    Raises RewardError if there is no such reward, its module cannot be imported, or a package that
    it needs is missing. If options or `workers` do not fit, one RewardError names all of these
    problems.
    """
    options = dict(options or {})
    if import_path:
        function = load_function("reward.import_path", import_path, RewardError)
        figures = getattr(function, "figures", ())
        if not isinstance(figures, (tuple, list)):  # ("name") without a comma is a text
            raise RewardError(
                f"reward {import_path}: its attribute figures is {shorten(figures)}; allowed: a "
                "tuple of names, as ('name',)"
            )
        read_answer = getattr(function, "read_answer", None)
        reward = Reward(import_path, function, read_answer=read_answer, figures=tuple(figures))
    elif name in _REGISTRY:
        reward = _of_mode(_REGISTRY[name], options)
        needed = reward.requires
        if needed and importlib.util.find_spec(needed.replace("-", "_")) is None:
            raise RewardError(
                f"reward.name = {name}: needs the package {needed}: pip install {needed}"
            )
        if (fault := reward.machine_fault(options)) is not None:
            raise RewardError(f"reward.name = {name}: {fault}")
    else:
        raise RewardError(
            f"reward.name = {name}: no such reward; allowed: {', '.join(sorted(_REGISTRY))}, or "
            "give "
            "your own with reward.import_path"
        )
    problems = option_problems("reward", reward.name, reward.function, options)
    if not problems:
        numbers = {key: options[key] for key in reward.positive if key in options}
        problems = [
            f"reward.options.{key} = {value!r}: allowed: a finite number above 0"
            for key, value in numbers.items()
            if not 0 < value < math.inf
        ]
    problems += _problems_of_form(reward, workers)
    if problems:
        raise RewardError("\n".join(problems))
    return replace(reward, options=options)


def reward_of(section: RewardSection) -> Reward:
    """Return the reward function of a section `reward`. Raises the errors of `get_reward`."""
    return get_reward(section.name, section.import_path, section.options, section.workers)


def _of_mode(reward: Reward, options: dict[str, Any]) -> Reward:
    """Return the form of a reward that the option `mode` names, and remove it from `options`."""
    if not reward.modes or "mode" not in options:
        return reward
    if (mode := options.pop("mode")) == DEFAULT_MODE:
        return reward
    if not isinstance(mode, str) or mode not in reward.modes:
        allowed = ", ".join([DEFAULT_MODE, *reward.modes])
        raise RewardError(f"reward.options.mode = {mode!r}: no such mode; allowed: {allowed}")
    return reward.modes[mode]


def check_section(
    reward: Reward,
    section: RewardSection,
    size: int,
    place: str = "",
    *,
    has_teachers: bool = False,
) -> None:
    """Check the settings of a reward other than its options, and the number of responses to each
    prompt. place: the beginning of each line of the error; has_teachers: whether teachers behind a
    URL have the time limit of the section, too. Raises RewardError with all problems."""
    faults = [reward.section_fault(section), reward.size_fault(size, **reward.options)]
    workers = reward.workers if section.workers is None else section.workers
    if not (workers or has_teachers or section.model.is_on):
        why = "nothing reads it without reward.workers"
        faults += [
            problem(f"reward.{name}", getattr(section, name), wrong)
            for name, wrong in section.unread(("timeout_seconds", "memory_mb"), why)
        ]
    if lines := [f"{place}{fault}" for fault in faults if fault is not None]:
        raise RewardError("\n".join(lines))


def suite_rewards(suites: Mapping[str, SuiteSection]) -> dict[str, Reward]:
    """Return the reward of each evaluation suite, by the suite's name. Raises ConfigError with all
    problems."""
    rewards, problems = {}, []
    for name, suite in suites.items():
        section, wrong = suite.reward, []
        with gathered_in(wrong):
            reward = reward_of(section)
            if reward.answers is not None and suite.format is None and suite.answer_field is None:
                wrong.append(
                    f"reward.name = {section.name}: compares with answers: give answer_field"
                )
            rewards[name] = reward
        problems += [f"{suite_key(name)}: {line}" for line in wrong]
    if problems:
        raise ConfigError(problems)
    return rewards


def check_answers(reward: Reward, prompts: Iterable[Prompt]) -> None:
    """Check that the answers and other fields of the prompts fit the reward.

    Raises RewardError with file and line of the first bad prompts, and the number of further bad
    prompts.
    """
    text_fault = functools.cache(reward.answer_fault)
    names = ["string" if t is str else "number" for t in reward.answers or ()]

    def fault_of(prompt: Prompt) -> str | None:
        if (fault := reward.row_fault(prompt)) is not None:
            return f"the row {fault}"
        if reward.answers is None:
            return None
        is_type = type(prompt.answer) in reward.answers
        wrong = f"is not a {' or '.join(dict.fromkeys(names))}"
        fault = text_fault(str(prompt.answer)) if is_type else wrong
        return None if fault is None else f"the answer {shorten(prompt.answer)} {fault}"

    faults = ((prompt.source, fault_of(prompt)) for prompt in prompts)
    bad = [f"{where}: {fault} (reward {reward.name!r})" for where, fault in faults if fault]
    lines = bad[:SHOWN_ANSWERS]
    if len(bad) > len(lines):
        what = "answers" if reward.answers is not None else "rows"
        lines.append(f"… and {len(bad) - len(lines)} more {what}")
    if lines:
        raise RewardError("\n".join(lines))


def _first_parameter(function: RewardFunction) -> inspect.Parameter | None:
    """Return a function's first parameter; None if it has no parameter or is a C function without a
    signature."""
    try:
        return next(iter(inspect.signature(function).parameters.values()), None)
    except (ValueError, TypeError):
        return None


def _problems_of_form(reward: Reward, workers: int | None) -> list[str]:
    """Return problems with the form of a function: a type hint of the first parameter that
    contradicts its name, figures with invalid names, several workers for a batch function."""
    problems, first = [], _first_parameter(reward.function)
    hint = "" if first is None or first.annotation is first.empty else first.annotation
    hint = (hint if isinstance(hint, str) else str(hint)).replace(" ", "")
    takes_list = reward.of_batch or reward.of_group
    if first is not None and hint.endswith("Sample]") and not takes_list:
        problems.append(
            f"reward {reward.name}: its first parameter {first.name!r} is a list of samples; "
            "allowed: the name `samples` for a reward of a batch, `group` for one of a group"
        )
    if first is not None and takes_list and re.search(r"\bSample(['\"]>)?$", hint):
        problems.append(
            f"reward {reward.name}: its first parameter {first.name!r} is one sample; allowed: "
            "another name, such as `sample`, or list[Sample]"
        )
    problems += [
        f"reward {reward.name}: its figure {name!r} is no name of a metric; allowed: letters, "
        "digits and _ . -, and no name of another metric of rewards"
        for name in reward.figures
        if not is_free_name(name)
    ]
    if reward.of_batch and (workers or 0) > 1:
        problems.append(
            f"reward.workers = {workers}: {reward.name}: a function of a batch is called once; "
            "allowed: 0, 1"
        )
    return problems
