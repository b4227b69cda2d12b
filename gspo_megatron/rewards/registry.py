"""Rewards by name, or from a user's own module, with options checked before any training.

A reward is a function `reward(sample: Sample, **options) -> float`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from gspo_megatron.errors import RewardError, UserError
from gspo_megatron.types import Sample

RewardFunction = Callable[..., float]

SHOWN_CHARACTERS = 200  # of a prompt or response in an error message
_TAKES_A_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TAKES_A_SAMPLE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


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
        name, function = import_path, _import_reward(import_path)
    else:
        function = _find_reward(name)
    options = dict(options or {})
    problems = _option_problems(name, function, options)
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
            f"({_origin(error)}); {_show(sample)}"
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


def _import_reward(import_path: str) -> RewardFunction:
    key = f"reward.import_path = {import_path}"
    module_name, colon, function_name = import_path.partition(":")
    if not (colon and module_name.strip(".") == module_name != "" and function_name):
        raise RewardError(f"{key}: write it as package.module:function")
    if os.getcwd() not in sys.path:
        # Console scripts do not search it. At the end, so that nothing installed is hidden, and
        # for good, because the module may import its neighbours when it is called.
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise RewardError(
                f"{key}: no module named {error.name}, neither installed nor in {os.getcwd()}"
            ) from error
        raise RewardError(f"{key}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise RewardError(
            f"{key}: importing {module_name} failed: {type(error).__name__}: {error} "
            f"({_origin(error)})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        nearest = difflib.get_close_matches(function_name, functions, n=3) or functions
        raise RewardError(
            f"{key}: {module_name} has no function {function_name}; it has: "
            f"{', '.join(nearest) or 'none'}"
        )
    return function


def _option_problems(name: str, function: RewardFunction, options: Mapping[str, Any]) -> list[str]:
    try:
        # Annotations are strings in most modules; they are evaluated to compare types below.
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # a name imported for type checkers only
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C: nothing to check against
        return []
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in _TAKES_A_SAMPLE:
        return [f"reward {name}: the function takes no sample as its first argument"]
    first, *others = parameters
    named = {each.name: each for each in others if each.kind in _TAKES_A_NAME}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in others)
    problems = []
    for key, value in options.items():
        if key in named:
            problems += _type_problem(key, value, named[key].annotation)
        elif key == first.name:
            problems.append(f"reward.options.{key}: not an option of {name} but what it judges")
        elif not takes_any:
            legal = f"legal: {', '.join(named)}" if named else "it takes none"
            problems.append(f"reward.options.{key} = {value!r}: {name} has no such option; {legal}")
    for each in named.values():
        if each.default is each.empty and each.name not in options:
            problems.append(f"reward.options.{each.name}: missing; {name} needs it")
    return problems


def _type_problem(key: str, value: object, annotation: object) -> list[str]:
    """Compares with plain bool, int, float and str only; whatever else a user wrote is theirs."""
    if annotation not in (bool, int, float, str):
        return []
    accepted: type | tuple[type, ...] = (int, float) if annotation is float else annotation
    good = isinstance(value, accepted)
    if isinstance(value, bool) and annotation is not bool:
        good = False  # Python counts booleans among the integers
    wanted = annotation.__name__
    return [] if good else [f"reward.options.{key} = {value!r}: wrong type; {wanted} is wanted"]


def _name(reward: Callable[[Sample], float]) -> str:
    for attribute in ("name", "__qualname__"):
        if isinstance(name := getattr(reward, attribute, None), str):
            return name
    return type(reward).__name__


def _origin(error: BaseException) -> str:
    """Where the error came from, "file:line": a UserError is shown without its traceback."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _show(sample: Sample) -> str:
    return f"prompt {_shorten(sample.prompt)}, response {_shorten(sample.response)}"


def _shorten(value: object) -> str:
    text = repr(value)  # keeps line breaks of the text out of the message
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
