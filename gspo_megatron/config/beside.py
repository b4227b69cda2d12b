"""Finds paths of a configuration that do not exist in the current folder, but beside its file.

A relative path is relative to the current folder, as in a shell. If it does not exist there, it is
looked for in the folder of the configuration file, so that `check task/config.yaml` works from
anywhere. One message tells which paths were found in that folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_megatron.errors import problem
from gspo_megatron.plugins import MODULES_VARIABLE

# Keys of inputs. Outputs are always relative to the current folder.
_PATHS = {
    "data": ("tokenizer", "prompts", "eval_prompts", "examples", "eval_examples")
    + ("train", "evaluation"),
    "model": ("hf_path", "checkpoint_path"),
}
_OUTPUTS = {"logging": ("dir",), "export": ("hf_path",)}
_ENDINGS = ("", ".idx")  # a corpus is named by the prefix of its files


def with_paths_beside(values: Mapping[str, Any], file: Path, above: str = "") -> dict[str, Any]:
    """Return the sections of a configuration file. Paths that exist only beside the file get the
    file's folder in front. above: the key that the sections are part of, for messages."""
    found = dict(values)
    for section, given in values.items():
        if isinstance(given, Mapping):
            keys = _PATHS.get(str(section), ())
            found[section] = {
                key: _of_key(f"{above}{section}.{key}", value, file) if key in keys else value
                for key, value in given.items()
            }
            _find_modules(f"{above}{section}", given, file)
    objective = found.get("objective")
    inner = objective.get("distillation") if isinstance(objective, Mapping) else None
    if isinstance(inner, Mapping):
        inner = _teachers_beside(inner, file, f"{above}objective.distillation.")
        found["objective"] = {**found["objective"], "distillation": inner}
    if isinstance(found.get("reward"), Mapping):
        found["reward"] = _model_beside(found["reward"], file, "reward.")
    evaluation = found.get("evaluation")
    if isinstance(evaluation, Mapping) and isinstance(evaluation.get("suites"), Mapping):
        suites = suites_beside(evaluation["suites"], file, f"{above}evaluation.suites.")
        found["evaluation"] = {**evaluation, "suites": suites}
    training = found.get("training")
    if isinstance(training, Mapping) and isinstance(training.get("phases"), list):
        phases = [
            with_paths_beside(each, file, f"{above}training.phases[{number}].")
            if isinstance(each, Mapping)
            else each
            for number, each in enumerate(training["phases"])
        ]
        found["training"] = {**training, "phases": phases}
    return found


def _teachers_beside(inner: Mapping[str, Any], file: Path, above: str) -> dict[str, Any]:
    """Return the section `distillation`, with the file's folder in front of the paths of teachers
    that exist only there."""
    found = dict(inner)
    if "teacher" in inner:
        found["teacher"] = _of_key(f"{above}teacher", inner["teacher"], file)
    if isinstance(named := inner.get("teachers"), Mapping):
        found["teachers"] = {
            name: _teachers_beside(each, file, f"{above}teachers.{name}.")
            if isinstance(each, Mapping)
            else each
            for name, each in named.items()
        }
    return found


def _model_beside(reward: Mapping[str, Any], file: Path, above: str) -> dict[str, Any]:
    """Return the section `reward`, with the file's folder in front of the paths of a reward model
    that exist only there."""
    if not isinstance(model := reward.get("model"), Mapping):
        return dict(reward)
    paths = {
        key: _of_key(f"{above}model.{key}", model[key], file)
        for key in ("folder", "tokenizer")
        if key in model
    }
    return {**reward, "model": {**model, **paths}}


def suites_beside(suites: Mapping[Any, Any], file: Path, above: str = "") -> dict[Any, Any]:
    """Return suites by name, with their paths replaced as in `with_paths_beside`. A suite may also
    be the path of another file."""
    found: dict[Any, Any] = {}
    for name, suite in suites.items():
        found[name] = suite
        if isinstance(suite, str):
            path, colon, inner = suite.rpartition(":")
            if colon and not _is_there(Path(suite)) and not _is_there(file.parent / suite):
                found[name] = f"{_of_path(f'{above}{name}', path, file)}:{inner}"
            else:
                found[name] = _of_path(f"{above}{name}", suite, file)
        elif isinstance(suite, Mapping) and "prompts" in suite:
            prompts = _of_key(f"{above}{name}.prompts", suite["prompts"], file)
            found[name] = {**suite, "prompts": prompts}
            if isinstance(suite.get("reward"), Mapping):
                _find_modules(f"{above}{name}.reward", suite["reward"], file)
                reward = _model_beside(suite["reward"], file, f"{above}{name}.reward.")
                found[name]["reward"] = reward
    return found


def nul_problems(values: Mapping[str, Any]) -> list[str]:
    """Return a line for each path that holds a NUL character. The system's own error would not name
    the key."""
    found: list[tuple[str, Any]] = []
    for section, keys in {**_PATHS, **_OUTPUTS}.items():
        given = values.get(section)
        if isinstance(given, Mapping):
            found += [(f"{section}.{key}", given.get(key)) for key in keys]
    evaluation = values.get("evaluation")
    suites = evaluation.get("suites") if isinstance(evaluation, Mapping) else None
    for name, suite in suites.items() if isinstance(suites, Mapping) else ():
        if isinstance(suite, Mapping):
            found.append((f"evaluation.suites.{name}.prompts", suite.get("prompts")))
    return [
        problem(key, each, "a path cannot contain a NUL character")
        for key, value in found
        for each in (value if isinstance(value, list) else [value])
        if isinstance(each, str) and "\0" in each
    ]


def _of_key(key: str, value: Any, file: Path) -> Any:
    if isinstance(value, list):
        return [_of_path(key, each, file) for each in value]
    return _of_path(key, value, file)


def _of_path(key: str, value: Any, file: Path) -> Any:
    if not isinstance(value, str) or not value or Path(value).is_absolute():
        return value
    beside = file.parent / value
    if _is_there(Path(value)) or not _is_there(beside):
        return value
    tell_once(f"{key} = {value}: not in {os.getcwd()}; read beside {file}: {beside}")
    return str(beside)


def _find_modules(section: str, given: Mapping[str, Any], file: Path) -> None:
    """Let all processes of the run find the user's modules that are beside the file."""
    for key in ("import_path", "advantage_import_path"):
        value = given.get(key)
        top = re.match(r"\w+", value) if isinstance(value, str) else None
        if top is None or _has_module(Path(), top[0]) or not _has_module(file.parent, top[0]):
            continue
        if top[0] in sys.modules or importlib.util.find_spec(top[0]) is not None:
            continue  # installed, or added by an earlier call
        folder = str(file.parent.resolve())
        known = filter(None, os.environ.get(MODULES_VARIABLE, "").split(os.pathsep))
        os.environ[MODULES_VARIABLE] = os.pathsep.join(dict.fromkeys([*known, folder]))
        tell_once(
            f"{section}.{key} = {value}: {top[0]} is not in {os.getcwd()}; read beside {file}"
        )


def _has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def _is_there(path: Path) -> bool:
    try:
        names = [path.name + ending for ending in _ENDINGS if path.name]  # "." has no name
        return path.exists() or any(path.with_name(name).exists() for name in names)
    except (OSError, ValueError):  # an impossible name; the reader of the file reports it
        return False


def tell_once(text: str) -> None:
    """Print a message once in a run, by the first rank or by the process that starts the ranks.

    The ranks inherit the list of printed messages from that process.
    """
    told = os.environ.get(_TOLD, "").split("\n")
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if text not in told and rank == "0":
        os.environ[_TOLD] = "\n".join([*told, text])
        print(text, file=sys.stderr, flush=True)


_TOLD = "GSPO_TOLD_PATHS"
