"""Models and datasets of the Hugging Face Hub, by name, as folders of this machine.

A model's name is ORG/NAME[@REVISION], and a dataset's name is ORG/NAME[:[CONFIG/]SPLIT][@REVISION].
If this machine has a file or folder of the same name, the file or folder is used. Only what a run
reads is downloaded: settings, tokenizer and safetensors of a model, the files of one split of a
dataset. Code and pickles are never fetched. The files lie in the cache of huggingface_hub; one
process of a node downloads and the others wait.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from gspo_megatron.errors import DataError
from gspo_megatron.files import (
    SIDE_FILES,
    SINGLE_FILE,
    WEIGHT_INDEX,
    WRONG_VALUES,
    fault_of_name,
    make_folder,
    parse_json,
    write_atomically,
)
from gspo_megatron.hub_splits import splits_of

Kind = Literal["model", "dataset"]

COMMITS = "GSPO_HUB_COMMITS"  # environment variable for child processes: names and their commits
WAIT_SECONDS = 600.0  # a waiting process gives up after this time without a new byte

_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?::(?P<split>[\w.-]+(?:/[\w.-]+)?))?(?:@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# A name with one of these endings or folders is a path, even if the path does not exist.
_ENDINGS = (
    *(".jsonl", ".json", ".parquet", ".csv", ".txt", ".model", ".yaml", ".yml"),
    *(".safetensors", ".bin", ".idx", ".py", ".sh"),
)
_FOLDERS = ("checkpoints", "data", "datasets", "examples", "models", "runs")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_LIGHT = (*SIDE_FILES, WEIGHT_INDEX, _ADAPTER_FILES[0])
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Parts of the messages by which the HTTP clients report a connection that ended too early.
_CUT = ("consistency check", "incomplete", "complete message body")
_LONGEST_CARD = 1 << 20  # largest number of characters
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class HubName:
    """A model or a dataset of the Hub. `revision`: a branch, a tag or a commit; None: main."""

    kind: Kind
    repo: str
    revision: str | None = None
    split: str | None = None  # [CONFIG/]SPLIT of a dataset

    @property
    def commit(self) -> str | None:
        """The revision, if it is a full commit hash; else None."""
        given = self.revision
        return given if given is not None and _COMMIT.fullmatch(given) else None

    @property
    def asked(self) -> str:
        """The repository with its revision, as `GSPO_HUB_COMMITS` and hub.json name it."""
        return f"{self.kind}s/{self.repo}@{self.revision or 'main'}"

    @property
    def folder(self) -> str:
        """The name of the repository's folder in the cache of huggingface_hub."""
        return f"{self.kind}s--{self.repo.replace('/', '--')}"

    def __str__(self) -> str:
        split = "" if self.split is None else f":{self.split}"
        return f"{self.repo}{split}" + ("" if self.revision is None else f"@{self.revision}")


def parse_name(text: str, kind: Kind) -> HubName | None:
    """Read a value as a name of the Hub. Returns None if the value is a path on this machine."""
    match = _NAME.fullmatch(text)
    if match is None or "--" in match["repo"] or ".." in text or _is_there(text):
        return None
    if match["split"] is not None and kind == "model":
        return None
    top = text.partition("/")[0]
    is_bare = match["revision"] is None and match["split"] is None
    if is_bare and (text.lower().endswith(_ENDINGS) or top in _FOLDERS or Path(top).is_dir()):
        return None
    return HubName(kind, match["repo"], match["revision"], match["split"])


def _is_there(text: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.path.lexists(text)
    return False


def resolved(name: HubName, where: str, commits: Mapping[str, str] | None = None) -> HubName:
    """Return the name with a commit as its revision.

    The commit is looked for in this order: in `commits`, the commits of a run that is resumed; in
    the commits that a parent process has found; in the Hub; and if the Hub cannot be reached, in
    the cache. `where` is the beginning of an error's line.

    Raises DataError.
    """
    if name.commit is not None:
        return name
    found = (commits or {}).get(name.asked) or known_commits().get(name.asked)
    if found is None:
        try:
            found = _listing(name)["commit"]
            _write_reference(name, found)
        except failures() as error:
            found = _cached_commit(name) if _is_unreachable(error) else None
            if found is None:
                _refuse(where, name, error)
            _tell(f"{name}: the Hub cannot be reached; commit {found} of the cache is used")
    os.environ[COMMITS] = json.dumps(known_commits() | {name.asked: found})
    return replace(name, revision=found)


def folder_of(
    text: str | Path, where: str = "", *, kind: Kind = "model", weights: bool = False
) -> Path:
    """Return a path as it is. For a name of the Hub, fetch its files and return their folder.
    `where` is the beginning of an error's line, before the name. Raises DataError."""
    named = parse_name(str(text), kind)
    if named is None:
        return Path(text)
    where = f"{where} {text}".strip()
    named = resolved(named, where)
    path = fetch(named, where, weights=weights)
    register(path, named)
    return path


def tokenizer_in(folder: Path) -> Path:
    """Return the folder of a tokenizer, or its sentencepiece file if the folder holds no other
    tokenizer."""
    inside = folder / "tokenizer.model"
    names = ("tokenizer.json", "tokenizer_config.json")
    is_other = any((folder / each).is_file() for each in names)
    return folder if is_other or not inside.is_file() else inside


def known_commits() -> dict[str, str]:
    """Return the commits that this process and its parents have found, by `HubName.asked`."""
    with contextlib.suppress(ValueError):
        found = json.loads(os.environ.get(COMMITS) or "{}")
        if isinstance(found, dict):
            return {key: value for key, value in found.items() if isinstance(value, str)}
    return {}


def fetch(name: HubName, where: str, *, weights: bool = False) -> Path:
    """Return the folder of a resolved name. Downloads the needed files that are missing.

    A model needs its settings, its tokenizer and the index of its weights, and with `weights` also
    its safetensors. A dataset needs the files of the split. `where` is the beginning of an error's
    line. Raises DataError.
    """
    assert name.commit is not None, f"{name}: not resolved"
    whole = _whole(name, weights)
    if whole is None and _is_offline():  # the cache may be read-only, without our records
        whole = _cached_elsewhere(name, weights)
    if whole is None:
        try:
            with _one_process(name, where):
                whole = _whole(name, weights)  # another process may have finished the download
                if whole is None:
                    whole = _download(name, weights)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        except failures() as error:
            _refuse(where, name, error)
    return whole


def lacks_weights(path: str) -> list[int]:
    """Return the sizes of the weight files that the cached folder of a model of the Hub lacks.
    Returns [] for a folder that is not from the Hub."""
    name = name_of(path)
    listing = None if name is None else _read_listing(name)
    if name is None or listing is None:
        return []
    try:
        needed = _needed(name, listing["files"], weights=True)
    except DataError:  # `fetch` reports it
        return [0]
    sizes = listing["files"]
    return [sizes[each] or 0 for each in needed if not _is_here(name, each, sizes)]


# The cache


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _own() -> Path:
    """The folder of this project's records: lists of files, locks, and the splits of datasets."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "gspo-megatron"


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def _snapshot(name: HubName) -> Path:
    return _cache() / name.folder / "snapshots" / str(name.commit)


def _split_folder(name: HubName) -> Path:
    return _own() / name.folder / str(name.commit) / (name.split or "train").replace("/", "--")


def _size(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return None


def _is_here(name: HubName, file: str, sizes: Mapping[str, int | None]) -> bool:
    """Whether a file is in the cache with the reported size. Some endpoints report no size."""
    there, told = _size(_snapshot(name) / file), sizes.get(file, -1)
    return there is not None and told in (there, None)


def _listing_file(name: HubName) -> Path:
    return _own() / name.folder / f"{name.commit}.json"


def _read_listing(name: HubName) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, *WRONG_VALUES):
        found = parse_json(_listing_file(name).read_bytes())
        sizes = found["files"].values()  # in a shared cache, another user may have written them
        if not any(map(fault_of_name, found["files"])) and {*map(type, sizes)} <= {int, type(None)}:
            return found
    return None


def _write_reference(name: HubName, commit: str) -> None:
    """Write the commit of a branch into the cache, as huggingface_hub does."""
    with contextlib.suppress(OSError, DataError):  # the cache may be read-only
        file = _cache() / name.folder / "refs" / (name.revision or "main")
        make_folder(file.parent)
        write_atomically(file, commit.encode())


def _cached_commit(name: HubName) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        file = _cache() / name.folder / "refs" / (name.revision or "main")
        found = file.read_text(encoding="utf-8").strip()
        if _COMMIT.fullmatch(found):
            return found
    return None


def _whole(name: HubName, weights: bool) -> Path | None:
    """Return the folder if it has all needed files, with the sizes that the Hub has reported; else
    None."""
    listing = _read_listing(name)
    if listing is None:  # another program may have downloaded only a part, so the Hub must be asked
        return None
    try:
        if name.kind == "dataset":
            folder = _split_folder(name)
            files = (folder / ".files").read_text(encoding="utf-8").splitlines()
            if not all(link.exists() for link in _links(folder, files)):
                return None
        else:
            folder = _snapshot(name)
            files = _needed(name, listing["files"], weights)
    except (OSError, ValueError):  # ValueError: DataError, or a damaged record
        return None
    is_whole = files and all(_is_here(name, each, listing["files"]) for each in files)
    return folder if is_whole else None


def _cached_elsewhere(name: HubName, weights: bool) -> Path | None:
    """Return the folder of a model that another program has put into the cache, if it has all
    needed files; else None. This function does not ask the Hub."""
    folder = _snapshot(name)
    if name.kind == "dataset" or not folder.is_dir():
        return None
    found = (path for path in folder.iterdir() if path.is_file())
    files: dict[str, int | None] = {path.name: path.stat().st_size for path in found}
    try:
        _needed(name, files, weights)
    except DataError:
        return None
    return folder


def _needed(name: HubName, files: Mapping[str, int | None], weights: bool) -> list[str]:
    """Return the needed files of a model. Raises DataError if the model has no safetensors."""
    found = [each for each in _LIGHT if each in files]
    if not found:
        raise DataError(
            "the model has neither config.json nor a tokenizer; name the repository of a "
            "transformers model"
        )
    if not weights:
        return found
    if _ADAPTER_FILES[0] in files:
        return [*found, *_shards_there(_ADAPTER_FILES[1:], files)]
    if SINGLE_FILE in files:
        return [*found, SINGLE_FILE]
    if WEIGHT_INDEX in files:
        return [*found, *_shards_there(_shards(_snapshot(name) / WEIGHT_INDEX), files)]
    if any(each.endswith(_PICKLES) for each in files):
        raise DataError(
            "the model has its weights as pickles only, which can run code when read; name a "
            "revision or a copy with safetensors"
        )
    raise DataError(f"the model has neither {SINGLE_FILE} nor {WEIGHT_INDEX}")


def _shards(index: Path) -> list[str]:
    """Return the files that an index names. Raises DataError."""
    try:
        named = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
    except (OSError, *WRONG_VALUES) as error:
        raise DataError(f"{WEIGHT_INDEX}: cannot be read: {error}") from None
    for each in named:
        is_plain = Path(each).name == each and each.endswith(".safetensors")
        if not is_plain or fault_of_name(each) is not None:
            raise DataError(f"{WEIGHT_INDEX}: {each!r:.80} is not a safetensors file beside it")
    return named


def _shards_there(shards: Any, files: Mapping[str, int | None]) -> list[str]:
    missing = [each for each in shards if each not in files]
    if missing:
        raise DataError(f"{missing[0]} is missing, of {len(shards)} files of weights")
    return [*shards]


# The network


def _listing(name: HubName) -> dict[str, Any]:
    """Return the commit and the files of a repository, as the Hub reports them."""
    from huggingface_hub import HfApi

    info: Any = HfApi().repo_info(
        name.repo, repo_type=name.kind, revision=name.revision, files_metadata=True, timeout=30
    )
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise DataError("the endpoint names no commit; is HF_ENDPOINT that of a Hub?")
    sizes = {each.rfilename: each.size for each in info.siblings or ()}
    return {"commit": info.sha, "files": {n: s for n, s in sizes.items() if not fault_of_name(n)}}


def _download(name: HubName, weights: bool) -> Path:
    try:
        listing = _read_listing(name) or _listing(name)
    except failures() as error:
        found = _cached_elsewhere(name, weights) if _is_unreachable(error) else None
        if found is None:
            raise
        return found
    files = listing["files"]
    file = _listing_file(name)
    make_folder(file.parent)
    write_atomically(file, json.dumps(listing).encode())
    if name.kind == "model":
        _get(name, _needed(name, files, weights=False), files)
        if weights:
            _get(name, _needed(name, files, weights=True), files)
        return _snapshot(name)
    card = None
    if "README.md" in files:
        _get(name, ["README.md"], files)
        with (_snapshot(name) / "README.md").open(encoding="utf-8", errors="replace") as file:
            card = file.read(_LONGEST_CARD)
    wanted = splits_of(name.split, list(files), card)
    _get(name, wanted, files)
    return _link_split(name, wanted)


def _get(name: HubName, wanted: list[str], sizes: Mapping[str, int | None]) -> None:
    """Download the files that are missing, or whose size differs from the size that the Hub
    reports."""
    from huggingface_hub import hf_hub_download

    snapshot = _snapshot(name)
    missing = [each for each in wanted if not _is_here(name, each, sizes)]
    total, done = sum(sizes[each] or 0 for each in missing), 0
    if missing:
        _tell(f"{name}: downloading {len(missing)} files, {total / 1e6:,.1f} MB, to {_cache()}")
    for number, each in enumerate(missing, start=1):
        for cut in {snapshot / each, (snapshot / each).resolve()}:
            cut.unlink(missing_ok=True)  # the file may have been cut short
        hf_hub_download(name.repo, each, repo_type=name.kind, revision=name.commit)
        if not _is_here(name, each, sizes):
            raise DataError(
                f"{each} has {_size(snapshot / each)} bytes, but the Hub says {sizes[each]}: the "
                "download was cut short; start it again"
            )
        done += sizes[each] or 0
        if total > 1e8 and number < len(missing):
            _tell(f"{name}: {number} of {len(missing)} files, {done / 1e9:,.1f} GB")


def _link_split(name: HubName, files: list[str]) -> Path:
    """Make a folder with the files of a split, in their order."""
    folder = _split_folder(name)
    make_folder(folder)
    # relative links, because a container may mount the cache at another place
    snapshot = os.path.relpath(os.path.realpath(_snapshot(name)), os.path.realpath(folder))
    for link, each in zip(_links(folder, files), files, strict=True):
        own = folder / f".{os.urandom(8).hex()}"  # another node may make the same link now
        own.symlink_to(Path(snapshot) / each)
        own.replace(link)
    write_atomically(folder / ".files", "\n".join(files).encode())
    return folder


def _links(folder: Path, files: list[str]) -> list[Path]:
    return [folder / f"{number:05d}-{Path(each).name}" for number, each in enumerate(files)]


@contextlib.contextmanager
def _one_process(name: HubName, where: str) -> Generator[None]:
    """Hold the lock of a repository on this machine. The lock ends with the process.

    Raises DataError if another process holds the lock and has not received a byte for WAIT_SECONDS.
    """
    path = _own() / name.folder / "lock"
    try:
        make_folder(path.parent)
        file = path.open("a")
    except OSError as error:
        raise DataError(
            f"{path.parent} cannot be written ({error.strerror}); set HF_HOME to another folder"
        ) from None
    with file:
        seen, since, told = -1, time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError:  # the file system has no locks; huggingface_hub has its own
                break
            if not told:
                _tell(f"{name}: another process of this machine downloads it; waiting")
                told = True
            if (arrived := _bytes_in(_cache() / name.folder / "blobs")) != seen:
                seen, since = arrived, time.monotonic()
            if time.monotonic() - since > WAIT_SECONDS:
                raise DataError(
                    f"another process of this machine downloads it, and has received no data for "
                    f"{WAIT_SECONDS:g} seconds; end that process, or start again"
                )
            time.sleep(0.2)
        yield


def _bytes_in(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(_size(file) or 0 for file in folder.iterdir())
    return 0


# Errors


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of huggingface_hub and of its HTTP client."""
    from huggingface_hub import errors

    # These are classes of httpx or of requests, depending on huggingface_hub's version.
    of_client: Any = errors.HfHubHTTPError.__bases__
    return (*of_client, errors.EntryNotFoundError, OSError, ValueError, RuntimeError)


def _is_unreachable(error: Exception) -> bool:
    """Whether the error means that the Hub did not answer, so that the cache may be used
    instead."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    if isinstance(error, OSError) and error.errno in (*_NO_SPACE, errno.EACCES):
        return False
    return not isinstance(error, DataError)


def _refuse(where: str, name: HubName, error: Exception) -> NoReturn:
    """Raise a DataError with one line about a failure of the Hub."""
    raise DataError(f"{where}: {reason_of(error, name)}") from None


def reason_of(error: Exception, name: HubName) -> str:
    """Return in one line why a request to the Hub failed, with advice. The line contains no
    token."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the {name.kind} is gated: accept its terms at {endpoint}/{_page(name)}, and set "
            "HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no such {name.kind} at {endpoint}, or a private one that needs another HF_TOKEN, and "
            f"no such file or folder here"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision}; name a branch, a tag or a commit"
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.is_offline_mode():
        return (
            f"HF_HUB_OFFLINE is set, the {name.kind} is not complete in the cache {_cache()}, and "
            "there is no such file or folder here; download it first, or name a folder"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status == 401:
            return f"{endpoint} refuses the token in HF_TOKEN; set a valid one, or none"
        if status == 403:
            return f"{endpoint} does not allow this with the token in HF_TOKEN; change its rights"
        return f"{endpoint} answers with status {status}; try again later"
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return f"no space left for it in {_cache()}; set HF_HOME to a folder on a larger disk"
    if isinstance(error, PermissionError):
        return f"{_cache()} cannot be written; set HF_HOME to another folder"
    if isinstance(error, DataError):
        return str(error)
    cause = _without_token(" ".join(str(error).split()) or type(error).__name__)
    if any(each in cause.lower() for each in _CUT):
        again = "the download was cut short, and is not used; start it again"
        return f"{again} ({cause:.200})"
    return (
        f"{endpoint} cannot be reached, and the {name.kind} is not complete in the cache "
        f"{_cache()}; check the network and HF_ENDPOINT, or name a folder ({cause:.200})"
    )


def _page(name: HubName) -> str:
    return name.repo if name.kind == "model" else f"datasets/{name.repo}"


def _without_token(text: str) -> str:
    from huggingface_hub import get_token

    return text.replace(token, "***") if (token := get_token()) else text


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Names beside paths


_fetched: dict[str, HubName] = {}  # path -> the name by which this process fetched it


def register(path: Path, name: HubName) -> None:
    """Note which name of the Hub a path stands for; `name` has its commit."""
    _fetched[str(path)] = name


def name_of(path: str | None) -> HubName | None:
    """Return the name of the Hub that a path stands for in this process, with its commit."""
    return None if path is None else _fetched.get(path)


def written(path: str) -> str:
    """Return a path as files show it: as its name of the Hub with the commit, if it has one."""
    return str(_fetched.get(path, path))
