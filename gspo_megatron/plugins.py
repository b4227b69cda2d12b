"""Custom functions, named in the configuration as "package.module:function", and the copies of
records that they are given."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gspo_megatron.errors import UserError
from gspo_megatron.types import Prompt, Sample

MODULES_VARIABLE = "GSPO_MODULE_FOLDERS"  # processes of a run inherit it
_T = TypeVar("_T")
_Record = TypeVar("_Record", Prompt, Sample)

_Kind = inspect.Parameter
_TAKES_A_NAME = (_Kind.POSITIONAL_OR_KEYWORD, _Kind.KEYWORD_ONLY)
_TAKES_AN_INPUT = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD, _Kind.VAR_POSITIONAL)
_INPUTS = {"reward": "sample", "objective": "inputs", "advantage": "rewards"}


def load_function(
    key: str, import_path: str, error_class: type[UserError] = UserError, kind: str = "function"
) -> Callable[..., Any]:
    """The function, or with kind "class" the class, at `import_path`, "package.module:name", that
    the configuration names under `key`. The current directory, and those of MODULES_VARIABLE, are
    searched for the module after the installed packages.

    Raises `error_class` with the cause, and its place in the code, if it cannot be loaded.
    """
    key = f"{key} = {import_path}"
    module_name, colon, function_name = import_path.partition(":")
    if not (colon and module_name.strip(".") == module_name != "" and function_name):
        raise error_class(f"{key}: write it as package.module:{kind}")
    # Console scripts do not search them. They go to the end, so that they hide no installed
    # package, and stay there, because the module may import its neighbours when it is called.
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
    except Exception as error:
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
        nearest = difflib.get_close_matches(function_name, found, n=3) or found
        raise error_class(
            f"{key}: {module_name} has no {kind} {function_name}; it has: "
            f"{', '.join(nearest) or f'no {kind} of its own'}"
        )
    return function


def module_folders() -> list[str]:
    """Where the user's modules are looked for beside the installed packages, absolute paths."""
    named = os.environ.get(MODULES_VARIABLE, "").split(os.pathsep)
    return list(dict.fromkeys([os.getcwd(), *filter(None, named)]))


def option_problems(
    kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> list[str]:
    """What is wrong with `options` as keyword arguments of a `kind` ("reward", "objective",
    "environment"), one line each. The first argument of a function is its input and no option; an
    environment is a class, which has none."""
    try:
        # Annotations are strings in most modules; they are evaluated to compare types below.
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # a name imported for type checkers only
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C: nothing to check against
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
            # The very type, because Python counts booleans among the integers. Other annotations
            # are not checked.
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


def own_copy(value: _T) -> _T:
    """A copy that the user's code may change: nobody else sees it."""
    return copy.deepcopy(value)


def own_record(record: _Record) -> _Record:
    """The same for a Prompt or Sample. Numbers and texts, the tokens among them, cannot be changed,
    and are not copied."""
    names = {field.name for field in dataclasses.fields(record)} - {"token_ids"}
    changes: dict[str, Any] = {name: own_copy(getattr(record, name)) for name in names}
    return dataclasses.replace(record, **changes)


def origin(error: BaseException) -> str:
    """Where the error came from, "file:line": a UserError is shown without its traceback."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"
