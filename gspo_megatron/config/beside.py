"""Finds paths of a configuration that do not exist in the current folder, but beside its file.

A relative path is relative to the current folder, as in a shell. If it does not exist there, it is
looked for in the folder of the configuration file, so that `check task/config.yaml` works from
anywhere. One message tells which paths were found in that folder.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_megatron.config.section import Section
from gspo_megatron.errors import problem
from gspo_megatron.plugins import MODULES_VARIABLE

# Keys of inputs. Outputs are always relative to the current folder.
_DATA = ("tokenizer", "prompts", "eval_prompts", "examples", "eval_examples")
_DATA += ("preferences", "eval_preferences", "train", "evaluation")
_REWARD = ("reward.model.folder", "reward.model.tokenizer")
_INPUTS = (
    *(f"data.{name}" for name in _DATA),
    *("model.hf_path", "model.checkpoint_path", "model.lora.checkpoint"),
    *("objective.distillation.teacher", "objective.distillation.teachers.*.teacher"),
    *_REWARD,
)
_OF_SUITE = ("prompts", *_REWARD)
_OTHERS = ("logging.dir", "export.hf_path", "environment.python")
_OTHERS += ("rollout.vllm.python", "rollout.vllm.weights_dir", "evaluation.suites.*.prompts")
_ENDINGS = ("", ".idx")  # a corpus is named by the prefix of its files
_LONGEST_NAME = 255  # bytes of a file's or folder's name

Place = tuple[str, Any, Any]  # a key, the list or dict that holds the value, and its index there


def places(values: Any, keys: Iterable[str]) -> Iterator[Place]:
    """Yield the place of each text in the values of these keys, plain values or sections. `*`
    stands for any name."""
    for key in keys:
        yield from _below(values, key.split("."), "")


def _below(node: Any, parts: list[str], above: str) -> Iterator[Place]:
    node = vars(node) if isinstance(node, Section) else node
    if not isinstance(node, Mapping):
        return
    first, *rest = parts
    for name in [*node] if first == "*" else [first]:
        key = f"{above}{name}"
        if rest:
            yield from _below(node.get(name), rest, f"{key}.")
        elif isinstance(value := node.get(name), str):
            yield key, node, name
        elif isinstance(value, list):
            yield from ((key, value, n) for n, each in enumerate(value) if isinstance(each, str))


def with_paths_beside(values: Mapping[str, Any], file: Path, above: str = "") -> dict[str, Any]:
    """Return the sections of a configuration file. Paths that exist only beside the file get the
    file's folder in front. above: the key that the sections are part of, for messages."""
    sections = copy.deepcopy(dict(values))
    for key, holder, at in places(sections, _INPUTS):
        holder[at] = _of_path(f"{above}{key}", holder[at], file)
    for section, section_values in sections.items():
        if isinstance(section_values, Mapping):
            _find_modules(f"{above}{section}", section_values, file)
    evaluation, training = sections.get("evaluation"), sections.get("training")
    if isinstance(evaluation, dict) and isinstance(evaluation.get("suites"), Mapping):
        of_suites = f"{above}evaluation.suites."
        evaluation["suites"] = suites_beside(evaluation["suites"], file, of_suites)
    if isinstance(training, dict) and isinstance(training.get("phases"), list):
        training["phases"] = [
            with_paths_beside(each, file, f"{above}training.phases[{number}].")
            if isinstance(each, Mapping)
            else each
            for number, each in enumerate(training["phases"])
        ]
    return sections


def suites_beside(suites: Mapping[Any, Any], file: Path, above: str = "") -> dict[Any, Any]:
    """Return suites by name, with their paths replaced as in `with_paths_beside`. A suite may also
    be the path of another file."""
    result = copy.deepcopy(dict(suites))
    for name, suite in result.items():
        if isinstance(suite, str):
            path, colon, inner = suite.rpartition(":")
            if colon and not _is_there(Path(suite)) and not _is_there(file.parent / suite):
                result[name] = f"{_of_path(f'{above}{name}', path, file)}:{inner}"
            else:
                result[name] = _of_path(f"{above}{name}", suite, file)
            continue
        for key, holder, at in places(suite, _OF_SUITE):
            holder[at] = _of_path(f"{above}{name}.{key}", holder[at], file)
        if isinstance(suite, Mapping) and isinstance(suite.get("reward"), Mapping):
            _find_modules(f"{above}{name}.reward", suite["reward"], file)
    return result


def path_problems(values: Mapping[str, Any]) -> list[str]:
    """Return a line for each path that no file system can have, or that a shell would have to
    expand. Otherwise the system's error would not name the key, and a run would make a folder ~."""
    problems = []
    for key, holder, at in places(values, (*_INPUTS, *_OTHERS)):
        names = holder[at].encode(errors="surrogatepass").split(b"/")
        longest = max(map(len, names))
        if "\0" in holder[at]:
            problems.append(problem(key, holder[at], "a path cannot contain a NUL character"))
        elif longest > _LONGEST_NAME:
            wrong = f"a name in it has {longest} bytes; allowed: {_LONGEST_NAME} at most"
            problems.append(problem(key, holder[at], wrong))
        elif holder[at].startswith("~/"):
            wrong = f"no shell expands ~ here; allowed: {os.path.expanduser(holder[at])}"
            problems.append(problem(key, holder[at], wrong))
    return problems


def _of_path(key: str, value: str, file: Path) -> str:
    if not value or Path(value).is_absolute():
        return value
    beside = file.parent / value
    if _is_there(Path(value)) or not _is_there(beside):
        return value
    tell_once(f"{key} = {value}: not in {os.getcwd()}; read beside {file}: {beside}")
    return str(beside)


def _find_modules(section: str, given: Mapping[str, Any], file: Path) -> None:
    """Let all processes of the run find the user's modules that are beside the file."""
    options = given.get("options")
    named = {key: given.get(key) for key in ("import_path", "advantage_import_path")}
    if isinstance(options, Mapping):  # of the reward `code`
        named["options.runner"] = options.get("runner")
    for key, value in named.items():
        top = re.match(r"(\w+)[\w.]*:", value) if isinstance(value, str) else None
        if top is None or _has_module(Path(), top[1]) or not _has_module(file.parent, top[1]):
            continue
        if top[1] in sys.modules or importlib.util.find_spec(top[1]) is not None:
            continue  # installed, or added by an earlier call
        folder = str(file.parent.resolve())
        known = filter(None, os.environ.get(MODULES_VARIABLE, "").split(os.pathsep))
        os.environ[MODULES_VARIABLE] = os.pathsep.join(dict.fromkeys([*known, folder]))
        tell_once(
            f"{section}.{key} = {value}: {top[1]} is not in {os.getcwd()}; read beside {file}"
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
    printed = os.environ.get(_TOLD, "").split("\n")
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if text not in printed and rank == "0":
        os.environ[_TOLD] = "\n".join([*printed, text])
        print(text, file=sys.stderr, flush=True)


_TOLD = "GSPO_TOLD_PATHS"
