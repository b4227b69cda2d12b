"""Finds the files of a dataset's split: by the card of the dataset, else by the names of the files.

These are the rules of the library `datasets`, for .parquet and .jsonl files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import yaml

from gspo_megatron.errors import DataError

ENDINGS = (".parquet", ".jsonl")
# Other names of a split in the names of files.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_COVERS = ("data", "")  # names of folders that are not names of configurations


def splits_of(wanted: str | None, files: Sequence[str], card: str | None) -> list[str]:
    """Return the files of the split [CONFIG/]SPLIT, in order. wanted: None for the split train.

    card: the text of the dataset's README.md, whose header may name files of splits.

    Raises DataError.
    """
    files = sorted(each for each in files if each.endswith(ENDINGS))
    if not files:
        raise DataError(
            "the dataset has no .parquet and no .jsonl files; many have them in the revision "
            "refs/convert/parquet, as in ORG/NAME:default/train@refs/convert/parquet"
        )
    found = _of_card(card, files) or _of_names(files)
    config, _, split = (wanted or "train").rpartition("/")
    of_split = {key: value for key, value in found.items() if key[1] == split}
    if config:
        of_split = {key: value for key, value in of_split.items() if key[0] == config}
    elif len(of_split) > 1 and ("default", split) in of_split:
        of_split = {("default", split): of_split["default", split]}
    if len(of_split) == 1:
        return _of_one_kind(next(iter(of_split.values())))
    legal = ", ".join(sorted(_shown(key, found) for key in found)[:20])
    if of_split:
        raise DataError(f"the dataset has several splits {split}; allowed: {legal}")
    raise DataError(f"the dataset has no split {wanted or 'train'}; allowed: {legal}")


def _shown(key: tuple[str, str], found: Mapping[tuple[str, str], Any]) -> str:
    config, split = key
    only = len({each for each, _ in found}) == 1
    return f":{split}" if only else f":{config}/{split}"


def _of_one_kind(files: Sequence[str]) -> list[str]:
    parquet = [each for each in files if each.endswith(".parquet")]
    return parquet or [*files]


class _CardLoader(yaml.SafeLoader):
    """Reads YAML without merge keys (<<), which a card does not need: nested ones can make a list
    of billions of keys."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("a merge key")


def header_of(card: str) -> Mapping[str, Any]:
    """Return the keys in the YAML header of a card; empty if the header is missing or damaged."""
    header = re.match(r"---\s*\n(.*?)\n---", card, re.DOTALL)
    try:
        given = yaml.load(header[1], _CardLoader) if header else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return given if isinstance(given, Mapping) else {}


def _of_card(card: str | None, files: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return files by configuration and split, as the card's header names them."""
    configs = header_of(card or "").get("configs")
    found: dict[tuple[str, str], list[str]] = {}
    for config in configs if isinstance(configs, list) else ():
        if not isinstance(config, Mapping):
            continue
        name, top = _text(config.get("config_name"), "default"), _text(config.get("data_dir"), "")
        for split, patterns in _data_files(config.get("data_files")):
            wanted = [str(PurePosixPath(top) / each) for each in patterns]
            named = [each for each in files if any(_fits(each, pattern) for pattern in wanted)]
            if named:
                found[name, split] = named
    return found


def _text(given: Any, other: str) -> str:
    """Return a value of the header if it is text, else `other`. The header may hold anything."""
    return given if isinstance(given, str) else other


def _data_files(given: Any) -> Iterable[tuple[str, list[str]]]:
    """Yield split and patterns of the header's data_files, in each of its forms."""
    if isinstance(given, str):
        yield "train", [given]
    elif isinstance(given, list) and all(isinstance(each, str) for each in given):
        yield "train", given
    elif isinstance(given, list):
        for each in given:
            if isinstance(each, Mapping):
                path = each.get("path")
                patterns = path if isinstance(path, list) else [path]
                split = _text(each.get("split"), "train")
                yield split, [one for one in patterns if isinstance(one, str)]


def _fits(path: str, pattern: str) -> bool:
    """Whether a path fits a pattern of the header, in which ** stands for any folders."""
    # reached: how many parts of the path the pattern's parts so far can match
    have, reached = path.split("/"), {0}
    for part in pattern.split("/"):
        if part == "**":
            reached = set(range(min(reached), len(have) + 1))
        else:
            reached = {n + 1 for n in reached if n < len(have) and fnmatchcase(have[n], part)}
        if not reached:
            return False
    return len(have) in reached


def _of_names(files: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return files by configuration and split. Words in a file's path tell its split."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in files:
        split = next((name for name, words in _WORDS.items() if _has_word(file, words)), None)
        if split is None:
            continue
        top = file.partition("/")[0] if "/" in file else ""
        is_config = top not in _COVERS and not _has_word(top, sum(_WORDS.values(), ()))
        found.setdefault((top if is_config else "default", split), []).append(file)
    # Without such words all files are the split train.
    return found or {("default", "train"): [*files]}


def _has_word(path: str, words: Sequence[str]) -> bool:
    return re.search(rf"(?:^|[/._ -])(?:{'|'.join(words)})(?:[/._ -]|\d|$)", path) is not None
