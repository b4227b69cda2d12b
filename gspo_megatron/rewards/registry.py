"""Rewards by name, or from a user's own module, with options checked before any training.

A reward is a function `reward(sample: Sample, **options) -> float`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from gspo_megatron.errors import RewardError, UserError
from gspo_megatron.plugins import load_function, option_problems, origin
from gspo_megatron.types import Sample

RewardFunction = Callable[..., float]

SHOWN_CHARACTERS = 200  # of a prompt or response in an error message


@dataclass(frozen=True)
class Reward:
    """A reward function with its options bound, callable with a sample."""

    name: str
    function: RewardFunction
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, sample: Sample) -> float:
        return self.function(sample, **self.options)


@dataclass(frozen=True)
class _Entry:
    function: RewardFunction
    requires: str | None


_REGISTRY: dict[str, _Entry] = {}


def register(name: str, requires: str | None = None) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that makes a function the reward `name`.

    `requires` is an optional package it imports, by the name one installs it under.
    """

    def decorate(function: RewardFunction) -> RewardFunction:
        assert name not in _REGISTRY, f"two rewards named {name!r}"
        _REGISTRY[name] = _Entry(function, requires)
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


def score(reward: Callable[[Sample], float], sample: Sample) -> float:
    """The reward of one sample as a float; a boolean counts as 0 or 1.

    Raises RewardError, with the reward's name, the prompt and the response, where the function
    raises or returns anything but a finite number. A UserError from the function passes unchanged.
    """
    try:
        value = reward(sample)
    except UserError:
        raise
    except Exception as error:
        raise RewardError(
            f"reward {_name(reward)!r} raised {type(error).__name__}: {error} "
            f"({origin(error)}); {_show(sample)}"
        ) from error
    if not isinstance(value, (Real, np.bool_)):
        raise RewardError(
            f"reward {_name(reward)!r} returned {_shorten(value)} of type "
            f"{type(value).__name__}; a number is wanted; {_show(sample)}"
        )
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a float
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"reward {_name(reward)!r} returned {_shorten(value)}; a finite number is wanted; "
            f"{_show(sample)}"
        )
    return number


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


def _name(reward: Callable[[Sample], float]) -> str:
    for attribute in ("name", "__qualname__"):
        if isinstance(name := getattr(reward, attribute, None), str):
            return name
    return type(reward).__name__


def _show(sample: Sample) -> str:
    return f"prompt {_shorten(sample.prompt)}, response {_shorten(sample.response)}"


def _shorten(value: object) -> str:
    text = repr(value)  # keeps line breaks of the text out of the message
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
