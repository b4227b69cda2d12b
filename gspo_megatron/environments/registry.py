"""Environments by name, or from a user's module; their options are checked before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gspo_megatron.config import Config
from gspo_megatron.config.schema import SINGLE_TURN
from gspo_megatron.environments.episode import Environment, EpisodeRunner, Limits
from gspo_megatron.environments.verifiers import Verifiers
from gspo_megatron.errors import EpisodeError
from gspo_megatron.plugins import load_function, option_problems, own_copy

if TYPE_CHECKING:
    from gspo_megatron.data.tokenizers import Tokenizer

_Class = TypeVar("_Class", bound=Callable[..., Any])

_REGISTRY: dict[str, Callable[..., Environment]] = {}


def register(name: str) -> Callable[[_Class], _Class]:
    """Decorator that makes a class the environment `name`."""

    def decorate(made: _Class) -> _Class:
        assert name not in _REGISTRY, f"two environments named {name!r}"
        _REGISTRY[name] = made
        return made

    return decorate


def get_environment(
    name: str, import_path: str | None = None, options: Mapping[str, Any] | None = None
) -> Environment | None:
    """The environment `name`, or the user's class at `import_path`, made with `options`; None for
    single turns.

    Raises EpisodeError if there is no such environment, its module cannot be imported, or the
    options do not fit it.
    """
    if import_path:
        name, make = (
            import_path,
            load_function("environment.import_path", import_path, EpisodeError),
        )
    elif name in _REGISTRY:
        make = _REGISTRY[name]
    elif name == SINGLE_TURN:
        make = _single_turn
    else:
        legal = ", ".join(sorted([SINGLE_TURN, *_REGISTRY]))
        raise EpisodeError(
            f"environment.name = {name}: no such environment; legal: {legal}, or give your own "
            "with environment.import_path"
        )
    return _made(name, make, options or {})


def _made(
    name: str, make: Callable[..., Environment | None], options: Mapping[str, Any]
) -> Environment | None:
    problems = option_problems("environment", name, make, options)
    if problems:
        raise EpisodeError("\n".join(problems))
    try:
        environment = make(**options)
    except ValueError as error:
        raise EpisodeError(f"environment {name}: {error}") from error
    if environment is not None and not callable(getattr(environment, "rollout", None)):
        raise EpisodeError(f"environment.import_path = {name}: has no method rollout(client, task)")
    return environment


def episodes_of(config: Config, tokenizer: Tokenizer) -> EpisodeRunner | None:
    """What runs the episodes of a run; None for single turns. Raises EpisodeError as
    `get_environment`."""
    environment = environment_of(config)
    if environment is None:
        return None
    limits = Limits(
        config.environment.max_turns,
        config.rollout.max_response_tokens,
        config.max_prompt_tokens(),
    )
    return EpisodeRunner(environment, tokenizer, limits)


def environment_of(config: Config) -> Environment | None:
    """The environment of a run, as `get_environment` makes it."""
    section = config.environment
    if section.verifiers is not None:
        make = partial(Verifiers, section.verifiers, section.python)
        return _made(section.verifiers, make, section.options)
    return get_environment(section.name, section.import_path, section.options)


def tools_of(config: Config) -> list[dict[str, Any]]:
    """What the chat template is to describe in the prompts. Raises EpisodeError as
    `get_environment`."""
    return own_copy([*getattr(environment_of(config), "tools", ())])


def _single_turn() -> None:
    return None
