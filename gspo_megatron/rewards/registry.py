"""Rewards by name, or from a user's own module, with options checked before any training.

A reward is a function `reward(sample: Sample, **options) -> float`, or `-> TurnRewards` where the
turns of a response, or its tokens, have rewards of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NoReturn

import numpy as np

from gspo_megatron.errors import RewardError, UserError
from gspo_megatron.plugins import load_function, option_problems, origin
from gspo_megatron.types import Prompt, Sample, TurnRewards

RewardFunction = Callable[..., float | TurnRewards]

AnswerFault = Callable[[str], "str | None"]

SHOWN_CHARACTERS = 200  # of a prompt or response in an error message
SHOWN_ANSWERS = 5  # a file of the wrong kind is wrong on every line


@dataclass(frozen=True)
class Reward:
    """A reward function with its options bound, callable with a sample."""

    name: str
    function: RewardFunction
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, sample: Sample) -> float | TurnRewards:
        return self.function(sample, **self.options)


@dataclass(frozen=True)
class _Entry:
    function: RewardFunction
    requires: str | None
    answer_fault: AnswerFault | None


_REGISTRY: dict[str, _Entry] = {}


def register(
    name: str, requires: str | None = None, answer_fault: AnswerFault | None = None
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that makes a function the reward `name`.

    `requires` is an optional package it imports, by the name one installs it under. `answer_fault`
    says what keeps it from holding any response against an answer; None: nothing.
    """

    def decorate(function: RewardFunction) -> RewardFunction:
        assert name not in _REGISTRY, f"two rewards named {name!r}"
        _REGISTRY[name] = _Entry(function, requires, answer_fault)
        return function

    return decorate


def reward_names() -> list[str]:
    """The names of all registered rewards, sorted."""
    return sorted(_REGISTRY)


def get_reward(
    name: str, import_path: str | None = None, options: Mapping[str, Any] | None = None
) -> Reward:
    """The reward `name`, or the user's own at `import_path`, "package.module:function".

    The current directory is searched for the module after the installed packages. `options` become
    keyword arguments.

    Raises RewardError where there is no such reward, its module cannot be imported, a package that
    it needs is missing, or the options do not fit the function's signature (all of them at once).
    """
    if import_path:
        name = import_path
        function = load_function("reward.import_path", import_path, RewardError)
    else:
        function = _find_reward(name)
    options = dict(options or {})
    problems = option_problems("reward", name, function, options)
    if problems:
        raise RewardError("\n".join(problems))
    return Reward(name, function, options)


def check_answers(reward: Reward, prompts: Iterable[Prompt]) -> None:
    """Hold the prompts' answers against the reward, before it is to score a response to one.

    Raises RewardError that names the prompts, by file and line, whose answers it has no use for:
    the first few, and how many more.
    """
    entry = _REGISTRY.get(reward.name)
    if entry is None or entry.answer_fault is None:
        return
    known: dict[str, str | None] = {}
    lines, count = [], 0
    for prompt in prompts:
        if prompt.answer not in known:
            known[prompt.answer] = entry.answer_fault(prompt.answer)
        fault = known[prompt.answer]
        if fault is not None:
            count += 1
            if count <= SHOWN_ANSWERS:
                shown = _shorten(prompt.answer)
                lines.append(
                    f"{prompt.source}: the answer {shown} {fault} (reward {reward.name!r})"
                )
    if count > len(lines):
        lines.append(f"… and {count - len(lines)} more answers")
    if lines:
        raise RewardError("\n".join(lines))


def score(reward: Callable[[Sample], Any], sample: Sample) -> float | TurnRewards:
    """The reward of one sample as a float, where a boolean counts as 0 or 1; or, checked, the
    rewards of its turns, with arrays [turns] of float64 and int64.

    Raises RewardError, with the reward's name, the prompt and the response, where the function
    raises, or returns anything but a finite number or turns that fit the response. A UserError from
    the function passes unchanged.
    """
    try:
        value = reward(sample)
    except UserError:
        raise
    except Exception as error:
        raise RewardError(
            f"reward {name_of(reward)!r} raised {type(error).__name__}: {error} "
            f"({origin(error)}); {_show(sample)}"
        ) from error

    def refuse(returned: str) -> NoReturn:
        raise RewardError(f"reward {name_of(reward)!r} returned {returned}; {_show(sample)}")

    if isinstance(value, TurnRewards):
        return _checked_turns(value, sample.num_tokens, refuse)
    if not isinstance(value, (Real, np.bool_)):
        refuse(f"{_shorten(value)} of type {type(value).__name__}; a number is wanted")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a float
        number = math.inf
    if not math.isfinite(number):
        refuse(f"{_shorten(value)}; a finite number is wanted")
    return number


def name_of(reward: Callable[[Sample], Any]) -> str:
    """What messages call it."""
    for attribute in ("name", "__qualname__"):
        if isinstance(name := getattr(reward, attribute, None), str):
            return name
    return type(reward).__name__


def _checked_turns(
    turns: TurnRewards, num_tokens: int, refuse: Callable[[str], NoReturn]
) -> TurnRewards:
    rewards = _numbers("rewards", turns.rewards, "biuf", refuse).astype(np.float64)
    ends = _numbers("ends", turns.ends, "iu", refuse).astype(np.int64)
    if len(rewards) != len(ends):
        refuse(f"turns with {len(rewards)} rewards and {len(ends)} ends; one of each is wanted")
    bad = ~np.isfinite(rewards)
    if bad.any():
        place = int(bad.argmax())
        refuse(f"{rewards[place]} for turn {place}; finite numbers are wanted")
    with np.errstate(over="ignore"):
        total = rewards.sum()
    if not math.isfinite(total):
        refuse(f"turns whose rewards add up to {total}; a finite sum is wanted")
    rises = np.diff(ends, prepend=0)
    if (rises <= 0).any():
        place = int((rises <= 0).argmax())
        before = ends[place - 1] if place else 0
        refuse(f"end {ends[place]} for turn {place}; above {before}, where it starts, is wanted")
    if len(ends) == 0 or ends[-1] != num_tokens:
        last = f"{ends[-1]} as the last end" if len(ends) else "no turns"
        refuse(f"{last}; turns up to the end of the response's {num_tokens} tokens are wanted")
    return TurnRewards(rewards, ends)


def _numbers(
    field: str, values: object, kinds: str, refuse: Callable[[str], NoReturn]
) -> np.ndarray:
    """[turns]; `kinds` are those of numpy's types."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # a ragged list, a tensor with a gradient
        array = np.empty((), dtype=object)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        wanted = "integers" if kinds == "iu" else "numbers"
        refuse(f"{_shorten(values)} as {field} of turns; a list of {wanted} is wanted")
    return array


def _find_reward(name: str) -> RewardFunction:
    if name not in _REGISTRY:
        raise RewardError(
            f"reward.name = {name}: no such reward; legal: {', '.join(reward_names())}, or give "
            "your own with reward.import_path"
        )
    entry = _REGISTRY[name]
    if entry.requires and importlib.util.find_spec(entry.requires.replace("-", "_")) is None:
        raise RewardError(
            f"reward.name = {name}: needs the package {entry.requires}: "
            f"pip install {entry.requires}"
        )
    return entry.function


def _show(sample: Sample) -> str:
    return f"prompt {_shorten(sample.prompt)}, response {_shorten(sample.response)}"


def _shorten(value: object) -> str:
    text = repr(value)  # keeps line breaks of the text out of the message
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
