"""Finds environments by name or in a user's module, and checks their options before training."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gspo_megatron.config import Config
from gspo_megatron.config.schema import NEEDS_PYTHON, SINGLE_TURN
from gspo_megatron.environments.episode import Environment, EpisodeLimits, EpisodeRunner
from gspo_megatron.environments.verifiers import Verifiers
from gspo_megatron.errors import EpisodeError, problem
from gspo_megatron.plugins import load_function, option_problems, origin, own_copy
from gspo_megatron.types import Prompt

if TYPE_CHECKING:
    from gspo_megatron.data.tokenizers import Tokenizer

_Class = TypeVar("_Class", bound=Callable[..., Any])

_PATH = "environment.import_path"
_ROLLOUT = "async def rollout(self, client, task)"
HELP_TEMPLATE = "allowed: the folder of a chat model, or a chat_template.jinja beside the tokenizer"

_REGISTRY: dict[str, Callable[..., Environment]] = {}


def register(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a class as the environment `name`."""

    def decorate(made: _Class) -> _Class:
        assert name not in _REGISTRY, f"two environments named {name!r}"
        _REGISTRY[name] = made
        return made

    return decorate


def get_environment(
    name: str, import_path: str | None = None, options: Mapping[str, Any] | None = None
) -> Environment | None:
    """Make an environment with `options`: the registered environment `name`, or the user's class at
    `import_path`.

    Returns None if both are None: then every response is a single turn. Raises EpisodeError if
    there is no such environment, if its module cannot be imported, or if the options do not fit it.
    """
    if import_path:
        name, make = import_path, load_function(_PATH, import_path, EpisodeError, "class")
        if not inspect.isclass(make):
            kind = "function" if inspect.isfunction(make) else type(make).__name__
            raise EpisodeError(f"{_PATH} = {name}: is a {kind}; allowed: a class with {_ROLLOUT}")
    elif name in _REGISTRY:
        make = _REGISTRY[name]
    elif name == SINGLE_TURN:
        make = _single_turn
    else:
        allowed = ", ".join(sorted([SINGLE_TURN, *_REGISTRY]))
        raise EpisodeError(
            f"environment.name = {name}: no such environment; allowed: {allowed}, or give your own "
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
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error} ({origin(error)})"
        raise EpisodeError(f"environment {name}: making it failed: {what}") from error
    if environment is not None and (fault := _rollout_fault(environment)) is not None:
        raise EpisodeError(f"environment {name}: {fault}; allowed: {_ROLLOUT}")
    return environment


def _rollout_fault(environment: Environment) -> str | None:
    """Return what is wrong with the environment's method `rollout`, or None."""
    rollout = getattr(environment, "rollout", None)
    if not callable(rollout):
        return "has no method rollout"
    if not inspect.iscoroutinefunction(inspect.unwrap(rollout)):
        return "its method rollout is no coroutine"
    try:
        inspect.signature(rollout).bind(None, None)
    except TypeError:
        return f"its method is rollout{inspect.signature(rollout)}"
    return None


def check_environment(
    environment: Environment, tokenizer: Tokenizer, prompts: Sequence[Prompt]
) -> None:
    """Check that an environment can run on this machine and can answer these prompts.

    Raises EpisodeError with all problems."""
    problems, name = [], type(environment).__name__
    fault = getattr(environment, "machine_fault", lambda: None)()
    if fault is not None:
        problems.append(fault)
    if getattr(environment, "needs_template", False) and tokenizer.chat_template is None:
        problems.append(
            f"data.tokenizer = {tokenizer.name}: has no chat template, which environment {name} "
            f"needs; {HELP_TEMPLATE}"
        )
    needs = getattr(environment, "needs_messages", None)
    bare = [prompt.source for prompt in prompts if not prompt.messages]
    if bare and (_says_messages(environment) if needs is None else needs):
        own = "" if needs else f", or needs_messages = False of {name}"
        problems.append(
            f"environment {name}: it answers turns with messages, and {len(bare)} prompts are no "
            f"messages; the first is {bare[0]}; allowed: data.chat_template = true{own}"
        )
    if problems:
        raise EpisodeError("\n".join(problems))


def _says_messages(environment: Environment) -> bool:
    """Whether the environment's code passes messages to `generate`, but no `text`, and does not
    call `begin`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(environment))))
    # no source: the class was generated, or is not written in Python
    except (OSError, TypeError, SyntaxError):
        return False
    calls = [
        (node, node.func.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    # Only calls on the client count, because another object of the environment, such as a second
    # model, may also have a method `generate`.
    client = next(iter(inspect.signature(environment.rollout).parameters))
    turns = [call for call, method in calls if method == "generate"]
    says = any(
        call.args or any(keyword.arg == "messages" for keyword in call.keywords)
        for call in turns
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == client
    )
    named = {keyword.arg for call in turns for keyword in call.keywords}
    return says and "text" not in named and all(method != "begin" for _, method in calls)


def episodes_of(config: Config, tokenizer: Tokenizer) -> EpisodeRunner | None:
    """Return the runner of a run's episodes; None if the run has no environment.

    Raises EpisodeError like `get_environment`."""
    environment = environment_of(config)
    if environment is None:
        return None
    limits = EpisodeLimits(
        config.environment.max_turns,
        config.rollout.max_response_tokens,
        config.max_prompt_tokens(),
    )
    return EpisodeRunner(environment, tokenizer, limits)


def environment_of(config: Config) -> Environment | None:
    """Make the environment of a run; None if the run has none. See `get_environment`."""
    section = config.environment
    if section.verifiers is not None:
        if section.python is None:
            raise EpisodeError(problem("environment.python", None, NEEDS_PYTHON))
        make = partial(Verifiers, section.verifiers, section.python)
        return _made(section.verifiers, make, section.options)
    return get_environment(section.name, section.import_path, section.options)


def tools_of(config: Config) -> list[dict[str, Any]]:
    """Return the descriptions of the environment's tools, which the chat template writes into the
    prompts.

    Raises EpisodeError like `get_environment`."""
    return own_copy([*getattr(environment_of(config), "tools", ())])


def _single_turn() -> None:
    return None
