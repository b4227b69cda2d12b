"""Names of the Hub, the files that are downloaded, and the messages to the user; with the real
client."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo_megatron import hub
from gspo_megatron.errors import DataError
from gspo_megatron.hub import HubName, parse_name
from gspo_megatron.hub_splits import header_of, splits_of
from tests.hub import TOKEN, SmallHub
from tests.programs import ROOT, command_environment

MODEL = "org/model"
SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 5000 for n in (1, 2)}
INDEX = json.dumps({"weight_map": {f"t{n}": name for n, name in enumerate(SHARDS)}}).encode()
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors.index.json": INDEX,
    **SHARDS,
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"raise SystemExit('code of a stranger')",
    "README.md": b"# a model",
    "training_args.bin": b"a pickle",
}


def get(text: str, *, weights: bool = False, kind: hub.Kind = "model") -> Path:
    named = parse_name(text, kind)
    assert named is not None
    return hub.fetch(hub.resolved(named, text), text, weights=weights)


def refusal(text: str, *, weights: bool = False, kind: hub.Kind = "model") -> str:
    with pytest.raises(DataError) as raised:
        get(text, weights=weights, kind=kind)
    line = str(raised.value)
    assert "\n" not in line and line.startswith(f"{text}: ")
    return line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubName("model", "Qwen/Qwen3-0.6B")),
        ("org/m@v1.0", HubName("model", "org/m", "v1.0")),
        ("org/m@refs/pr/3", HubName("model", "org/m", "refs/pr/3")),
        *((path, None) for path in ("model", "/a/b", "./a", "../a", "a/b/c", "~/m", "a/b:c")),
        *((path, None) for path in ("a/b.model", "task/rows.jsonl", "models/Qwen3", "runs/start")),
        *((path, None) for path in ("there/other", "a/b\0", "a/b--c", "a/../b", "a/b\n", "")),
    ],
)
def test_what_is_a_name(
    text: str, expected: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are not names of the Hub: a path of several folders, a path with the ending of a file,
    and a path in an existing folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert parse_name(text, "model") == expected


def test_a_file_or_folder_here_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_name("org/m:test@v1", "dataset") == HubName("dataset", "org/m", "v1", "test")
    (tmp_path / "org").mkdir()
    assert parse_name("org/m@v1", "model") == HubName("model", "org/m", "v1")
    (tmp_path / "org/m@v1").mkdir()
    assert parse_name("org/m@v1", "model") is None


def test_only_what_is_needed_is_downloaded(server: SmallHub) -> None:
    commit = server.add(MODEL, FILES)
    folder = get(MODEL)
    light = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert {path.name for path in folder.iterdir()} == light and folder.name == commit
    assert hub.lacks_weights(str(folder)) == []  # a local folder, not a name
    hub.register(folder, HubName("model", MODEL, commit))
    assert hub.lacks_weights(str(folder)) == [5000, 5000]
    assert get(MODEL, weights=True) == folder
    assert {path.name for path in folder.iterdir()} == light | set(SHARDS)
    assert all((folder / name).read_bytes() == text for name, text in SHARDS.items())
    assert len(server.downloads()) == len(set(server.downloads())) == 5


def test_what_is_whole_needs_no_network(server: SmallHub) -> None:
    server.add(MODEL, FILES)
    get(MODEL, weights=True)
    server.requests.clear()
    get(MODEL, weights=True)  # puts the commit into the environment of this process
    assert server.requests == []


def test_without_a_network_the_newest_commit_of_the_cache_serves(
    server: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = server.add(MODEL, FILES)
    get(MODEL, weights=True)
    monkeypatch.setenv(hub.COMMITS, "")  # as in another process
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get(MODEL, weights=True).name == commit
    assert "HF_HUB_OFFLINE is set" in refusal("org/other")


def test_a_cache_that_another_program_filled_serves_if_it_is_whole(
    server: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import hf_hub_download

    commit = server.add(MODEL, FILES)
    for path in ("config.json", "model.safetensors.index.json", next(iter(SHARDS))):
        hf_hub_download(MODEL, path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get(MODEL).name == commit
    assert "is not complete in the cache" in refusal(MODEL, weights=True)
    (tmp_path / "home/gspo-megatron").rename(tmp_path / "records")
    # a file in place of the folder, so nothing can be written
    (tmp_path / "home/gspo-megatron").touch()
    assert get(MODEL).name == commit


def test_an_endpoint_may_tell_no_sizes(server: SmallHub) -> None:
    server.add(MODEL, FILES)
    server.has_sizes = False
    folder = get(MODEL, weights=True)
    shard = folder / next(iter(SHARDS))
    shard.resolve().unlink()
    assert get(MODEL, weights=True) == folder and shard.read_bytes() == SHARDS[shard.name]


def test_a_moved_branch_is_another_commit_and_a_commit_stays(server: SmallHub) -> None:
    first = server.add(MODEL, FILES)
    second = server.repositories[f"models/{MODEL}"].commit({**FILES, "config.json": b"{  }"})
    assert get(f"{MODEL}@{first}").name == first
    named = HubName("model", MODEL)
    # the commit that a resumed run has recorded
    assert hub.resolved(named, "", {named.asked: first}).commit == first
    os.environ[hub.COMMITS] = ""
    assert hub.resolved(named, "").commit == second


@pytest.mark.parametrize("spoil", ["short", "empty", "gone"])
def test_a_file_of_another_size_is_never_taken_for_whole(server: SmallHub, spoil: str) -> None:
    server.add(MODEL, FILES)
    folder = get(MODEL, weights=True)
    shard = folder / next(iter(SHARDS))
    if spoil == "gone":
        shard.resolve().unlink()
    else:
        shard.resolve().write_bytes(b"\1" * (4999 if spoil == "short" else 0))
    assert get(MODEL, weights=True) == folder
    assert shard.read_bytes() == SHARDS[shard.name]


def test_half_a_download_is_not_taken_for_whole(
    server: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats the download. The pauses between its tries are left out."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    server.add(MODEL, FILES)
    shard = next(iter(SHARDS))
    server.cut.add(shard)
    line = refusal(MODEL, weights=True)
    assert "the download was cut short, and is not used; start it again" in line
    assert not (get(MODEL) / shard).exists()
    server.cut.clear()
    assert (get(MODEL, weights=True) / shard).read_bytes() == SHARDS[shard]


def test_each_mistake_is_one_line_with_advice(
    server: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(MODEL, FILES)
    server.add("org/gated", FILES, gated=True)
    server.add("org/private", FILES, private=True)
    server.add("org/pickles", {name: FILES[name] for name in ("config.json", "pytorch_model.bin")})
    server.add("org/empty", {"README.md": b""})
    short = {name: text for name, text in FILES.items() if name != next(iter(SHARDS))}
    server.add("org/short", short)
    evil = json.dumps({"weight_map": {"t": "../../evil.safetensors"}}).encode()
    server.add("org/evil", {**FILES, "model.safetensors.index.json": evil})
    assert "no such model" in refusal("org/nothing") and "HF_TOKEN" in refusal("org/private")
    assert f"{MODEL} has no revision v2; name a branch" in refusal(f"{MODEL}@v2")
    assert f"gated: accept its terms at {server.url}/org/gated, and" in refusal("org/gated")
    assert "pickles only" in refusal("org/pickles", weights=True)
    assert "neither config.json nor a tokenizer" in refusal("org/empty")
    assert f"{next(iter(SHARDS))} is missing" in refusal("org/short", weights=True)
    assert "is not a safetensors file beside it" in refusal("org/evil", weights=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "hf_wrong" not in refusal("org/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert get("org/gated").is_dir() and get("org/private").is_dir()


def test_a_file_outside_of_the_repository_is_left_alone(server: SmallHub, tmp_path: Path) -> None:
    outside = "../" * 5 + "train.jsonl"
    server.add("org/rows", {outside: b"of the endpoint"}, "dataset")
    (tmp_path / "train.jsonl").write_text("mine")
    assert "no .parquet and no .jsonl files" in refusal("org/rows", kind="dataset")
    assert (tmp_path / "train.jsonl").read_text() == "mine"


def test_a_record_with_a_file_outside_of_the_repository_is_not_used(
    server: SmallHub, tmp_path: Path
) -> None:
    """In a shared cache, another user may have written the record."""
    server.add("org/rows", {"train.jsonl": b"{}"}, "dataset")
    get("org/rows", kind="dataset")
    (record,) = tmp_path.rglob("datasets--org--rows*/*.json")
    listing = json.loads(record.read_bytes())
    listing["files"] = {"../" * 8 + str(tmp_path)[1:] + "/train.jsonl": 1}
    record.write_text(json.dumps(listing))
    (tmp_path / "train.jsonl").write_text("mine")
    assert get("org/rows", kind="dataset").is_dir()
    assert (tmp_path / "train.jsonl").read_text() == "mine"


def test_an_endpoint_that_does_not_answer_is_told(
    server: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with socket.socket() as held:  # the port is in use, but no server listens on it
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        line = refusal(MODEL)
    assert f"{url} cannot be reached" in line and "check the network" in line


def test_a_full_disk_is_told(server: SmallHub, tmp_path: Path) -> None:
    """A limit on the size of files has the effect of a full disk."""
    server.add(MODEL, {**FILES, "model-00001-of-00002.safetensors": b"\1" * 3_000_000})
    program = (
        "import resource, signal, sys\n"
        "from gspo_megatron import hub\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        f"hub.folder_of({MODEL!r}, weights=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=command_environment() | server.environ(tmp_path / "home") | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"no space left for it in {tmp_path / 'home/hub'}" in done.stderr.splitlines()[-1]


def _fetch_all(start: float) -> None:
    time.sleep(max(0.0, start - time.time()))
    hub.folder_of(MODEL, weights=True)


def test_processes_of_a_node_download_once(server: SmallHub) -> None:
    server.add(MODEL, {**FILES, **{name: text * 400 for name, text in SHARDS.items()}})
    context, start = multiprocessing.get_context("fork"), time.time() + 0.3
    ranks = [context.Process(target=_fetch_all, args=(start,)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert len(server.downloads()) == len(set(server.downloads())) == 5


def test_a_process_that_waits_gives_up_if_nothing_arrives(
    server: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(MODEL, FILES)
    monkeypatch.setattr(hub, "WAIT_SECONDS", 0.5)
    with hub._one_process(HubName("model", MODEL), "other"):
        assert "no data for 0.5 seconds" in refusal(MODEL)


ROWS = {f"{name}-00000-of-00001.parquet": name.encode() for name in ("train", "test")}
CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/a-*
  - split: held_out
    path: [main/b.jsonl]
- config_name: other
  data_files: other/**
---
# text
"""


@pytest.mark.parametrize(
    ("split", "files", "card", "expected"),
    [
        (None, ["data/train-0.parquet", "data/test-0.parquet"], None, ["data/train-0.parquet"]),
        ("test", ["data/train-0.parquet", "data/test-0.parquet"], None, ["data/test-0.parquet"]),
        ("validation", ["dev.jsonl", "train.jsonl"], None, ["dev.jsonl"]),
        (None, ["b.jsonl", "a.jsonl", "x.csv"], None, ["a.jsonl", "b.jsonl"]),
        (None, ["train.jsonl", "train.parquet"], None, ["train.parquet"]),
        ("main/train", ["main/train.jsonl", "socratic/train.jsonl"], None, ["main/train.jsonl"]),
        ("default/train", ["default/train/0000.parquet"], None, ["default/train/0000.parquet"]),
        ("main/train", ["main/a-1.jsonl", "main/b.jsonl"], CARD, ["main/a-1.jsonl"]),
        ("held_out", ["main/a-1.jsonl", "main/b.jsonl"], CARD, ["main/b.jsonl"]),
        ("other/train", ["main/a-1.jsonl", "other/x/y.jsonl"], CARD, ["other/x/y.jsonl"]),
    ],
)
def test_files_of_a_split(
    split: str | None, files: list[str], card: bytes | None, expected: list[str]
) -> None:
    assert splits_of(split, files, None if card is None else card.decode()) == expected


def test_a_card_that_wants_to_waste_time_does_not() -> None:
    """The card has nested lists in few bytes, and patterns for which a regular expression would
    take years."""
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    merged = [f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 9)}]}}" for n in range(1, 12)]
    assert header_of("\n".join(["---", "b0: &b0 {x: y}", *merged, "---"])) == {}
    split = "split: train, path: ["
    wild = "/".join(["**"] * 60) + "/" + "*a" * 60
    configs = f"configs: [{{config_name: *a11, data_files: [{{{split}*a11, '{wild}b']}}]}}]"
    card = "\n".join(["---", "a0: &a0 [x]", *levels, configs, "---"])
    name = "/".join(["a" * 200] * 5) + "/train.jsonl"
    start = time.monotonic()
    assert splits_of(None, [name], card) == [name]
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("split", "files", "told"),
    [
        (None, ["a.csv", "b.arrow"], "no .parquet and no .jsonl files"),
        ("dev", ["train.jsonl", "test.jsonl"], "no split dev; allowed: :test, :train"),
        (None, ["main/train.jsonl", "x/train.jsonl"], "allowed: :main/train, :x/train"),
    ],
)
def test_a_split_that_is_not_there(split: str | None, files: list[str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        splits_of(split, files, None)


def test_a_split_is_a_folder_with_its_files(server: SmallHub) -> None:
    parts = {f"data/train-0000{n}-of-00002.parquet": bytes([n]) for n in (0, 1)}
    server.add("org/rows", {**parts, "data/test.parquet": b"t", "load.py": b""}, "dataset")
    folder = get("org/rows", kind="dataset")
    assert [path.read_bytes() for path in sorted(folder.glob("*.parquet"))] == [b"\0", b"\1"]
    assert len(server.downloads()) == 2
    assert [p.read_bytes() for p in get("org/rows:test", kind="dataset").glob("0*")] == [b"t"]
    assert "no split dev" in refusal("org/rows:dev", kind="dataset")
    assert "no such dataset" in refusal("org/model", kind="dataset")
    digest = hashlib.sha256(b"\0").hexdigest()
    assert digest in str((folder / "00000-train-00000-of-00002.parquet").resolve())


def test_a_split_is_whole_at_another_place_and_only_with_its_files(server: SmallHub) -> None:
    server.add("org/rows", {"data/train.parquet": b"r"}, "dataset")
    folder = get("org/rows", kind="dataset")
    [row] = folder.glob("0*")
    assert folder.name == "train" and not row.readlink().is_absolute()
    row.unlink()
    assert [p.read_bytes() for p in get("org/rows", kind="dataset").glob("0*")] == [b"r"]


def test_two_nodes_may_link_a_split_at_once(
    server: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some shared file systems have no locks. Here another node makes each link first."""
    server.add("org/rows", {"data/train.parquet": b"r"}, "dataset")
    make_link = Path.symlink_to

    def late(self: Path, target: Path) -> None:
        link = self.parent / "00000-train.parquet"
        if self.parent.name == "train" and not os.path.lexists(link):
            make_link(link, target)
        make_link(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "symlink_to", late)
        folder = get("org/rows", kind="dataset")
    assert [path.name for path in folder.iterdir() if path.name != ".files"] == [
        "00000-train.parquet"
    ]
    assert (folder / "00000-train.parquet").read_bytes() == b"r"
