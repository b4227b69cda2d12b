"""Loads custom functions, which the configuration names as "package.module:function", checks their
options and copies the records that they get."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from gspo_megatron.errors import UserError, nearest
from gspo_megatron.types import Prompt, Sample

MODULES_VARIABLE = "GSPO_MODULE_FOLDERS"  # environment variable, for all processes of a run
_T = TypeVar("_T")
_Record = TypeVar("_Record", Prompt, Sample)

_Kind = inspect.Parameter
_TAKES_A_NAME = (_Kind.POSITIONAL_OR_KEYWORD, _Kind.KEYWORD_ONLY)
_TAKES_AN_INPUT = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD, _Kind.VAR_POSITIONAL)
_INPUTS = {"reward": "sample", "objective": "inputs", "advantage": "rewards"}


def load_function(
    key: str, import_path: str, error_class: type[UserError] = UserError, kind: str = "function"
) -> Callable[..., Any]:
    """Import a function from `import_path`, "package.module:name", or a class if `kind` is "class".

    key: the configuration key with this path. The module is searched for in the installed packages,
    then in the current directory and the folders of MODULES_VARIABLE. Raises `error_class` with the
    cause and its place in the code if the import fails.
    """
    key = f"{key} = {import_path}"
    module_name, colon, function_name = import_path.partition(":")
    if not (colon and module_name.strip(".") == module_name != "" and function_name):
        raise error_class(f"{key}: write it as package.module:{kind}")
    # Console scripts do not search these folders. The folders come last, so that they cannot hide
    # an installed package. They stay in the path, because the module may later import other modules
    # of its folder.
    sys.path += [folder for folder in module_folders() if folder not in sys.path]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise error_class(
                f"{key}: no module named {error.name}, neither installed nor in "
                + " nor in ".join(module_folders())
            ) from error
        raise error_class(f"{key}: importing {module_name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise error_class(
            f"{key}: importing {module_name} failed: {type(error).__name__}: {error} "
            f"({origin(error)})"
        ) from error
    function = getattr(module, function_name, None)
    is_kind = inspect.isclass if kind == "class" else inspect.isfunction
    if not callable(function):
        found = [
            name
            for name, value in vars(module).items()
            if is_kind(value) and getattr(value, "__module__", None) == module.__name__
        ]
        shown = nearest(function_name, found) or found
        raise error_class(
            f"{key}: {module_name} has no {kind} {function_name}; it has: "
            f"{', '.join(shown) or f'no {kind} of its own'}"
        )
    return function


def module_folders() -> list[str]:
    """Return the folders, as absolute paths, that are searched after the installed packages."""
    named = os.environ.get(MODULES_VARIABLE, "").split(os.pathsep)
    return list(dict.fromkeys([os.getcwd(), *filter(None, named)]))


def option_problems(
    kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> list[str]:
    """Return the problems of `options` as keyword arguments of a function or class, one line each.

    kind: "reward", "objective" or "environment", for example. The first argument of a function is
    its input, not an option. An environment is a class, which has no input.
    """
    try:
        # In most modules annotations are strings; evaluate them to compare types below.
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # a name that is imported only for type checkers
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a function in C without a signature
        return []
    parameters = list(signature.parameters.values())
    given, others = "", parameters
    if kind in _INPUTS:
        if not parameters or parameters[0].kind not in _TAKES_AN_INPUT:
            return [f"{kind} {name}: the function takes no {_INPUTS[kind]} as its first argument"]
        given, others = parameters[0].name, parameters[1:]
    named = {each.name: each for each in others if each.kind in _TAKES_A_NAME}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in others)
    problems = []
    for key, value in options.items():
        if key in named:
            wanted = named[key].annotation
            # Compare the exact type, because a bool is also an int. Other annotations are not
            # checked.
            fits = type(value) is wanted or (wanted is float and type(value) is int)
            if wanted in (bool, int, float, str) and not fits:
                wrong = f"wrong type; {wanted.__name__} is wanted"
                problems.append(f"{kind}.options.{key} = {value!r}: {wrong}")
        elif key == given:
            problems.append(f"{kind}.options.{key}: not an option of {name} but its input")
        elif not takes_any:
            legal = f"allowed: {', '.join(named)}" if named else "it takes none"
            problems.append(f"{kind}.options.{key} = {value!r}: {name} has no such option; {legal}")
    for each in named.values():
        if each.default is each.empty and each.name not in options:
            problems.append(f"{kind}.options.{each.name}: missing; {name} needs it")
    return problems


@contextlib.contextmanager
def without_exit(name: str) -> Generator[None]:
    """Raise a UserError in place of SystemExit, which would end the run with the exit code of the
    user's function `name`."""
    try:
        yield
    except SystemExit as end:
        raise UserError(f"{name}: ended with {end!r} ({origin(end)})") from end


def own_copy(value: _T) -> _T:
    """Return a deep copy that the user's code may change."""
    return copy.deepcopy(value)


def own_record(record: _Record) -> _Record:
    """Return a deep copy of a Prompt or Sample that the user's code may change. The token ids are
    immutable and not copied."""
    names = {field.name for field in dataclasses.fields(record)} - {"token_ids"}
    changes: dict[str, Any] = {name: own_copy(getattr(record, name)) for name in names}
    return dataclasses.replace(record, **changes)


def origin(error: BaseException) -> str:
    """Return "file:line" of an error, because a UserError is shown without a traceback."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"
