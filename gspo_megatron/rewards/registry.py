"""Reward functions by name or from a user's module; their options are checked before training.

A reward is a function `reward(sample: Sample, **options) -> float`. If the turns or tokens of a
response have different rewards, it returns `TurnRewards`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NoReturn

import numpy as np

from gspo_megatron.errors import RewardError, UserError
from gspo_megatron.plugins import load_function, option_problems, origin
from gspo_megatron.types import Prompt, Sample, TurnRewards

RewardFunction = Callable[..., float | TurnRewards]

SHOWN_CHARACTERS = 200  # of a prompt or response in an error message
SHOWN_ANSWERS = 5  # a file of the wrong kind is wrong on every line


@dataclass(frozen=True)
class Reward:
    """A reward function with its options, called with a sample."""

    name: str
    function: RewardFunction
    options: Mapping[str, Any] = field(default_factory=dict)
    requires: str | None = None  # an optional package that the function imports, as pip names it
    # Why the reward cannot compare any response with an answer; None: it can.
    answer_fault: Callable[[str], str | None] = lambda answer: None

    def __call__(self, sample: Sample) -> float | TurnRewards:
        return self.function(sample, **self.options)


_REGISTRY: dict[str, Reward] = {}


def register(name: str, **facts: Any) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that makes a function the reward `name`. `facts`: `requires` and `answer_fault` of
    the `Reward`."""

    def decorate(function: RewardFunction) -> RewardFunction:
        assert name not in _REGISTRY, f"two rewards named {name!r}"
        _REGISTRY[name] = Reward(name, function, **facts)
        return function

    return decorate


def get_reward(
    name: str, import_path: str | None = None, options: Mapping[str, Any] | None = None
) -> Reward:
    """The reward `name`, or the user's function at `import_path`, "package.module:function".

    The current directory is searched for the module after the installed packages. `options` become
    keyword arguments.

    Raises RewardError if there is no such reward, its module cannot be imported, a package that it
    needs is missing, or options do not fit the function's signature (all of them at once).
    """
    if import_path:
        function = load_function("reward.import_path", import_path, RewardError)
        reward = Reward(import_path, function)
    elif name in _REGISTRY:
        reward = _REGISTRY[name]
        needed = reward.requires
        if needed and importlib.util.find_spec(needed.replace("-", "_")) is None:
            raise RewardError(
                f"reward.name = {name}: needs the package {needed}: pip install {needed}"
            )
    else:
        raise RewardError(
            f"reward.name = {name}: no such reward; legal: {', '.join(sorted(_REGISTRY))}, or give "
            "your own with reward.import_path"
        )
    options = dict(options or {})
    problems = option_problems("reward", reward.name, reward.function, options)
    if problems:
        raise RewardError("\n".join(problems))
    return replace(reward, options=options)


def check_answers(reward: Reward, prompts: Iterable[Prompt]) -> None:
    """Checks that the reward can compare responses with the prompts' answers.

    Raises RewardError that names the first prompts, by file and line, with answers that it cannot
    use, and says how many more there are.
    """
    fault_of = functools.cache(reward.answer_fault)
    bad = [prompt for prompt in prompts if fault_of(prompt.answer) is not None]
    lines = [
        f"{prompt.source}: the answer {_shorten(prompt.answer)} {fault_of(prompt.answer)} "
        f"(reward {reward.name!r})"
        for prompt in bad[:SHOWN_ANSWERS]
    ]
    if len(bad) > len(lines):
        lines.append(f"… and {len(bad) - len(lines)} more answers")
    if lines:
        raise RewardError("\n".join(lines))


def score(reward: Callable[[Sample], Any], sample: Sample) -> float | TurnRewards:
    """The reward of one sample: a float (of a boolean, 0 or 1), or the rewards of its turns, as
    arrays [turns] of float64 and int64.

    Raises RewardError, with the reward's name, the prompt and the response, if the function raises
    an error, or returns anything but a finite number or turns that fit the response. A UserError
    of the function is raised unchanged.
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
    """The name of a reward in messages."""
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
        refuse(f"{len(rewards)} rewards and {len(ends)} ends of turns; each turn has one of both")
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
        refuse(f"end {ends[place]} for turn {place}; it must be above its start, {before}")
    if len(ends) == 0 or ends[-1] != num_tokens:
        last = f"{ends[-1]} as the last end" if len(ends) else "no turns"
        refuse(f"{last}; the last turn must end at the response's {num_tokens} tokens")
    return TurnRewards(rewards, ends)


def _numbers(
    field: str, values: object, kinds: str, refuse: Callable[[str], NoReturn]
) -> np.ndarray:
    """An array [turns]; `kinds`: the kinds of numpy types that are legal."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # a ragged list, a tensor with a gradient
        array = np.empty((), dtype=object)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        wanted = "integers" if kinds == "iu" else "numbers"
        refuse(f"{_shorten(values)} as {field} of turns; a list of {wanted} is wanted")
    return array


def _show(sample: Sample) -> str:
    return f"prompt {_shorten(sample.prompt)}, response {_shorten(sample.response)}"


def _shorten(value: object) -> str:
    text = repr(value)  # keeps line breaks of the text out of the message
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
