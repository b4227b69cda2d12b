"""Replaces names of the Hub in a configuration by folders of this machine.

A loaded configuration holds the folders. A written configuration holds the names again, with their
commits, as ORG/NAME@COMMIT, so that the configuration means the same on any machine and on any day.
The file hub.json in the run folder holds the commit of each name that is given without a commit. So
a resumed run, and the ranks of all nodes, use the same commits.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_megatron import hub
from gspo_megatron.config.beside import places
from gspo_megatron.errors import DataError, gathered_in, problem
from gspo_megatron.files import object_in, write_atomically

HUB_FILE = "hub.json"
RANK_SECONDS = 300.0  # time for rank 0 to write hub.json, which all nodes of a run can read

# Keys whose values may be names of the Hub, by the kind of repository.
_KEYS: dict[hub.Kind, tuple[str, ...]] = {
    "model": ("model.hf_path", "model.lora.checkpoint", "data.tokenizer")
    + ("objective.distillation.teacher", "objective.distillation.teachers.*.teacher")
    + ("reward.model.folder", "reward.model.tokenizer")
    + ("evaluation.suites.*.reward.model.tokenizer",),
    "dataset": ("data.prompts", "data.eval_prompts", "data.examples", "data.eval_examples")
    + ("data.preferences", "data.eval_preferences", "evaluation.suites.*.prompts"),
}
# Beginnings of the keys that name models whose weights a run loads.
_OF_WEIGHTS = ("model.hf_path", "model.lora.checkpoint", "objective.", "reward.model.folder")


def with_folders(values: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """Replace names of the Hub in the values of a configuration by the folders of this machine.

    Settings, tokenizers and data are downloaded here; `fetch_weights` downloads weights. name: the
    name of the default run folder. Returns the values, and the problems.
    """
    result = copy.deepcopy(dict(values))
    named_places = [
        (place, named)
        for kind, keys in _KEYS.items()
        for place in places(result, keys)
        if (named := hub.parse_name(place[1][place[2]], kind)) is not None
    ]
    if not named_places:
        return result, []
    folder = folder_in(result, f"runs/{name}")
    commits, problems = read_commits(folder), list[str]()
    rank = os.environ.get("RANK")
    asked = {each.asked for _, each in named_places if each.commit is None}
    if rank not in (None, "0") and asked - {*commits, *hub.known_commits()}:
        commits = _wait_for_commits(folder, asked)
    resolved = []
    for (key, holder, at), named in named_places:
        where = problem(key, holder[at], "").removesuffix(": ")
        with gathered_in(problems):
            resolved.append((key, holder, at, where, hub.resolved(named, where, commits)))
    if rank == "0":  # before the downloads, because the other ranks wait for the commits
        write_commits(folder)
    for key, holder, at, where, named in resolved:
        with gathered_in(problems):
            path = hub.fetch(named, where)
            path = hub.tokenizer_in(path) if key == "data.tokenizer" else path
            hub.register(path, named)
            holder[at] = str(path)
    return result, problems


def folder_in(values: Mapping[str, Any], default: str) -> Path:
    """Return the run folder that the values of a configuration name, or else the default."""
    section = values.get("logging")
    path = section.get("dir") if isinstance(section, Mapping) else None
    return Path(path if isinstance(path, str) and path else default)


def fetch_weights(config: Any) -> None:
    """Download the weights of the models of the Hub that a run loads. Raises DataError."""
    for key, path in model_paths(config):
        name = hub.name_of(path)
        if name is not None:
            hub.fetch(name, problem(key, str(name), "").removesuffix(": "), weights=True)


def model_paths(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys and paths of a loaded configuration that name models to load."""
    for key, holder, at in places(config, _KEYS["model"]):
        if key.startswith(_OF_WEIGHTS):
            yield key, holder[at]


def hold_commits(config: Any) -> None:
    """Write hub.json into the folder of a run that is going to begin. Raises DataError."""
    if hub.known_commits():
        write_commits(Path(str(config.logging.dir)))


def read_commits(folder: Path) -> dict[str, str]:
    """Return the commits in the hub.json of a run folder, by `HubName.asked`."""
    commits = object_in(folder / HUB_FILE)
    return {key: value for key, value in commits.items() if isinstance(value, str)}


def write_commits(folder: Path) -> None:
    """Add the commits that this process knows to the hub.json of a run folder. Raises DataError."""
    before = read_commits(folder)
    now = {**hub.known_commits(), **before}
    if not now or now == before:
        return
    write_atomically(folder / HUB_FILE, (json.dumps(now, indent=2) + "\n").encode())


def _wait_for_commits(folder: Path, asked: set[str]) -> dict[str, str]:
    """Wait until rank 0 has found the commits, so that all nodes use the same commits.

    Raises DataError."""
    deadline = time.monotonic() + RANK_SECONDS
    while time.monotonic() < deadline:
        commits = read_commits(folder)
        if asked <= commits.keys():
            return commits
        time.sleep(0.2)
    raise DataError(
        f"{folder / HUB_FILE}: rank 0 has not written the commits of {', '.join(sorted(asked))} "
        f"in {RANK_SECONDS:g} seconds; is logging.dir shared by the nodes? A name with a commit, "
        "as in ORG/NAME@0123…, needs no such file"
    )
