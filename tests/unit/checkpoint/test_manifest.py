"""A manifest, and what it shows about the files of a checkpoint."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import pytest

from gspo_megatron.checkpoint import manifest
from gspo_megatron.checkpoint.manifest import (
    MANIFEST,
    dump_manifest,
    files_below,
    find_damage,
    read_manifest,
    record_of,
)
from gspo_megatron.errors import DataError
from gspo_megatron.process.heartbeat import heard_by

NAMES = ["run.json", "model/.metadata", "model/__0_0.distcp", "model/__1_0.distcp", "rng/a"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Files of random bytes, one of them empty, and their manifest."""
    chance = random.Random(7)
    folder = tmp_path / "rl_00000003"
    for number, name in enumerate(NAMES):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(chance.randrange(1, 5000) if number else 0))
    files = {name: record_of(folder / name) for name in files_below(folder)}
    (folder / MANIFEST).write_bytes(dump_manifest(files))
    return folder


def test_each_block_that_is_read_is_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_BLOCK", 10)
    (tmp_path / "file").write_bytes(bytes(35))
    signs: list[str] = []
    with heard_by(lambda: signs.append("")):
        record_of(tmp_path / "file")
    assert len(signs) == 4
    record_of(tmp_path / "file")  # outside of the `with` there is no listener
    assert len(signs) == 4


def test_a_whole_checkpoint_has_no_damage(checkpoint: Path) -> None:
    assert find_damage(checkpoint) == []
    assert sorted(read_manifest(checkpoint)) == sorted(NAMES)


def test_checksum_and_size_are_those_of_the_bytes(checkpoint: Path) -> None:
    path = checkpoint / "model/__1_0.distcp"
    content = path.read_bytes()
    record = read_manifest(checkpoint)["model/__1_0.distcp"]
    assert (record.bytes, int(record.crc32, 16)) == (len(content), zlib.crc32(content))


def test_every_kind_of_damage_is_named(checkpoint: Path) -> None:
    model = checkpoint / "model"
    (model / "__0_0.distcp").write_bytes((model / "__0_0.distcp").read_bytes()[:-1])
    flipped = bytearray((model / "__1_0.distcp").read_bytes())
    flipped[-1] ^= 1
    (model / "__1_0.distcp").write_bytes(flipped)
    (model / ".metadata").unlink()
    (checkpoint / "run.json").write_bytes(b"longer")
    (model / "__2_0.distcp").touch()
    found = dict(line.split(": ", 1) for line in find_damage(checkpoint))
    assert sorted(found) == sorted(
        [*("model/__0_0.distcp", "model/__1_0.distcp", "model/.metadata"),
         *("run.json", "model/__2_0.distcp")]
    )  # fmt: skip
    assert found["model/__0_0.distcp"].startswith("cut short")
    assert found["model/__1_0.distcp"].startswith("altered")
    assert found["model/.metadata"] == "missing"
    assert found["run.json"].startswith("too long")
    assert found["model/__2_0.distcp"].startswith("foreign")
    sizes_alone = find_damage(checkpoint, contents=False)
    assert len(sizes_alone) == 4 and not any("altered" in line for line in sizes_alone)
    weights = find_damage(checkpoint, only=lambda name: name.startswith("model/"))
    assert len(weights) == 4 and not any("run.json" in line for line in weights)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_find_together_what_one_finds_alone(checkpoint: Path, size: int) -> None:
    for name in NAMES[1:]:
        (checkpoint / name).write_bytes(b"")
    (checkpoint / "foreign").touch()
    shares = [find_damage(checkpoint, share=(rank, size)) for rank in range(size)]
    together = [line for share in shares for line in share]
    assert sorted(together) == sorted(find_damage(checkpoint))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "missing"),
        (b"", "not JSON"),
        (b'{"format": ', "not JSON"),
        (b"[]", "not the manifest of"),
        (b'{"format": "another"}', "not the manifest of"),
        ({"version": 2}, "version 2"),
        ({"files": {"a": {"bytes": 3}}}, "malformed"),
        ({"files": ["a"]}, "malformed"),
        ({"files": {"a": {"bytes": float("inf"), "crc32": ""}}}, "malformed"),
        ({"files": {"a\0b": {"bytes": 3, "crc32": ""}}}, "damaged, 'a.x00b' holds a NUL"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_damaged_manifest_is_named(
    checkpoint: Path, content: bytes | dict[str, object] | None, said: str
) -> None:
    path = checkpoint / MANIFEST
    whole = json.loads(path.read_bytes())
    if content is None:
        path.unlink()
    else:
        changed = json.dumps(whole | content).encode() if isinstance(content, dict) else content
        path.write_bytes(changed)
    with pytest.raises(DataError, match=f"{MANIFEST}: .*{said}"):
        read_manifest(checkpoint)
    assert len(find_damage(checkpoint)) == 1
    assert find_damage(checkpoint, share=(1, 2)) == []
