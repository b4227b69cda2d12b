"""Reward functions by name or from a user's module; their options are checked before training.

A reward is a function `reward(sample: Sample, **options)`; or of a batch, `reward(samples:
list[Sample], **options) -> list`, which its first parameter's name tells; or `async def` of either.
It returns a number, `TurnRewards`, or named parts, `{"correct": 1.0, "format": 0.2}`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_megatron.errors import RewardError
from gspo_megatron.plugins import load_function, option_problems
from gspo_megatron.rewards.values import shorten
from gspo_megatron.types import Prompt, Sample

RewardFunction = Callable[..., Any]

SHOWN_ANSWERS = 5  # a file of the wrong kind is wrong on every line


@dataclass(frozen=True)
class Reward:
    """A reward function with its options, called with a sample, or with all samples of a rank."""

    name: str
    function: RewardFunction
    options: Mapping[str, Any] = field(default_factory=dict)
    # The types of answers that it compares with; None: it takes any, or does without.
    answers: tuple[type, ...] | None = None
    requires: str | None = None  # an optional package that the function imports, as pip names it
    # Why the reward cannot compare any response with an answer; None: it can.
    answer_fault: Callable[[str], str | None] = lambda answer: None
    threads: bool = True  # it may be called from several threads at a time

    def __call__(self, given: Sample | list[Sample]) -> Any:
        return self.function(given, **self.options)

    @functools.cached_property
    def of_batch(self) -> bool:
        """Whether it takes all samples at once: its first parameter is named `samples`."""
        first = _first_parameter(self.function)
        return first is not None and first.name == "samples"

    @functools.cached_property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 (of an object with the method)
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)


_REGISTRY: dict[str, Reward] = {}


def register(name: str, **facts: Any) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that makes a function the reward `name`. `facts`: `answers` (a string unless it is
    given), `requires`, `answer_fault` and `threads` of the `Reward`."""

    def decorate(function: RewardFunction) -> RewardFunction:
        assert name not in _REGISTRY, f"two rewards named {name!r}"
        _REGISTRY[name] = Reward(name, function, **{"answers": (str,), **facts})
        return function

    return decorate


def get_reward(
    name: str,
    import_path: str | None = None,
    options: Mapping[str, Any] | None = None,
    workers: int = 1,
) -> Reward:
    """The reward `name`, or the user's function at `import_path`, "package.module:function".

    The current directory is searched for the module after the installed packages. `options` become
    keyword arguments; `workers` threads are to call it.

    Raises RewardError if there is no such reward, its module cannot be imported, a package that it
    needs is missing, or options or `workers` do not fit the function (all of them at once).
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
    problems += _problems_of_form(reward, workers)
    if problems:
        raise RewardError("\n".join(problems))
    return replace(reward, options=options)


def check_answers(reward: Reward, prompts: Iterable[Prompt]) -> None:
    """Checks that the reward can compare responses with the prompts' answers.

    Raises RewardError that names the first prompts, by file and line, with answers that it cannot
    use, and says how many more there are.
    """
    if reward.answers is None:
        return
    text_fault = functools.cache(reward.answer_fault)
    wanted = " or ".join(dict.fromkeys("string" if t is str else "number" for t in reward.answers))

    def fault_of(answer: Any) -> str | None:
        if type(answer) in reward.answers:
            return text_fault(str(answer))
        return f"is not a {wanted}"

    bad = [prompt for prompt in prompts if fault_of(prompt.answer) is not None]
    lines = [
        f"{prompt.source}: the answer {shorten(prompt.answer)} {fault_of(prompt.answer)} "
        f"(reward {reward.name!r})"
        for prompt in bad[:SHOWN_ANSWERS]
    ]
    if len(bad) > len(lines):
        lines.append(f"… and {len(bad) - len(lines)} more answers")
    if lines:
        raise RewardError("\n".join(lines))


def _first_parameter(function: RewardFunction) -> inspect.Parameter | None:
    """None where there is none, or where Python does not know, as of a function written in C."""
    try:
        return next(iter(inspect.signature(function).parameters.values()), None)
    except (ValueError, TypeError):
        return None


def _problems_of_form(reward: Reward, workers: int) -> list[str]:
    """A hint of the first parameter that contradicts its name, and threads that nothing uses."""
    problems, first = [], _first_parameter(reward.function)
    hint = "" if first is None or first.annotation is first.empty else first.annotation
    hint = (hint if isinstance(hint, str) else str(hint)).replace(" ", "")
    if first is not None and hint.endswith("Sample]") and not reward.of_batch:
        problems.append(
            f"reward {reward.name}: its first parameter {first.name!r} is a list of samples; "
            "legal: the name `samples` for a reward of a batch"
        )
    if reward.of_batch and re.search(r"\bSample(['\"]>)?$", hint):
        problems.append(
            f"reward {reward.name}: its first parameter 'samples' is one sample; legal: another "
            "name, such as `sample`, or list[Sample] for a reward of a batch"
        )
    if workers > 1:
        reasons = {
            "an async function is called for many responses at a time anyway": reward.is_async,
            "a function of a batch is called once": reward.of_batch,
            "its time-outs work in the main thread only": not reward.threads,
        }
        why = next((why for why, holds in reasons.items() if holds), None)
        if why is not None:
            problems.append(f"reward.workers = {workers}: {reward.name}: {why}; legal: 1")
    return problems
