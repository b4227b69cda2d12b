"""The bank: what was finished is there after any kill, and nothing half-written counts."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from gspo_megatron.errors import DataError
from gspo_megatron.rl.served_rollouts import join_groups
from gspo_megatron.rollout.store import DrawFile, Group, forget, read_groups

REQUEST = {"name": "step_00000001_0", "rows": [3, 1, 2]}


def group(number: int) -> Group:
    draws = np.random.default_rng(number)
    return Group(
        number, {"tokens": draws.integers(0, 99, 5 + number), "parts": draws.random((2, 3))}
    )


def written(path: Path, *numbers: int) -> list[int]:
    """Append groups as one process does; returns the size of the file after each."""
    file, sizes = DrawFile(path, REQUEST), []
    for number in numbers:
        file.append(group(number))
        sizes.append(path.stat().st_size)
    file.close()
    return sizes


def assert_holds(path: Path, *numbers: int) -> None:
    found = read_groups(path)
    assert found.keys() == set(numbers)
    for number in numbers:
        for name, values in group(number).columns.items():
            np.testing.assert_array_equal(found[number][name], values)


def test_groups_come_back_and_those_of_other_ranks_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "a.groups"
    written(path, 2, 0, 1)
    assert_holds(path, 0, 1, 2)
    assert read_groups(path, {1}).keys() == {1}
    with pytest.raises(DataError, match="No such file"):
        read_groups(tmp_path / "none.groups")


@pytest.mark.parametrize("kept", range(0, 40, 7))
def test_a_record_that_was_cut_short_is_dropped_and_written_again(
    tmp_path: Path, kept: int
) -> None:
    path = tmp_path / "a.groups"
    first, _ = written(path, 0, 1)
    with path.open("r+b") as file:
        file.truncate(first + kept)
    assert_holds(path, 0)
    file = DrawFile(path, REQUEST)
    assert file.finished == {0} and path.stat().st_size == first
    file.append(group(1))
    file.close()
    assert_holds(path, 0, 1)


def test_a_damaged_record_is_named_and_those_behind_it_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.groups"
    first, _, _ = written(path, 0, 1, 2)
    content = bytearray(path.read_bytes())
    content[first + 60] ^= 1
    path.write_bytes(content)
    assert_holds(path, 0, 2)
    file = DrawFile(path, REQUEST)
    assert file.finished == {0, 2}
    assert capsys.readouterr().out == f"{path}: damaged groups, which are drawn again: 1\n"
    file.append(group(1))
    file.close()
    assert_holds(path, 0, 1, 2)
    DrawFile(path, REQUEST).close()
    assert capsys.readouterr().out == ""  # it is there by now


def test_with_its_request_damaged_all_of_a_draw_is_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.groups"
    written(path, 0, 1)
    content = bytearray(path.read_bytes())
    content[content.index(b"step_00000001_0")] ^= 1
    path.write_bytes(content)
    written(path, 1)
    told = f"{path}: the record of its request is damaged: all of it is drawn again\n"
    assert capsys.readouterr().out == told
    assert_holds(path, 1)


def test_groups_of_another_request_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.groups"
    written(path, 0, 1)
    file = DrawFile(path, {**REQUEST, "rows": [3, 1, 4]})
    file.close()
    assert file.finished == set() and read_groups(path) == {}


def test_groups_of_an_older_form_are_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "a.groups"
    written(path, 0, 1)
    path.write_bytes(path.read_bytes().replace(b"GSP2", b"GSPO"))
    DrawFile(path, REQUEST).close()
    written(path, 1)
    assert_holds(path, 1)


def test_groups_without_the_columns_that_were_added_later_are_used(tmp_path: Path) -> None:
    """The bytes of a record's header are those that the versions before wrote."""
    path = tmp_path / "a.groups"
    contents = [(-1, json.dumps(REQUEST, sort_keys=True).encode()), (0, save(group(0).columns))]
    path.write_bytes(
        b"".join(
            struct.pack("<4sqQI", b"GSP2", number, len(content), zlib.crc32(content)) + content
            for number, content in contents
        )
    )
    file = DrawFile(path, REQUEST)
    assert file.finished == {0}
    added = {name: np.zeros(1, np.uint8) for name in ("reasons", "records", "record_lengths")}
    file.append(Group(1, group(1).columns | added))
    file.close()
    assert_holds(path, 0, 1)
    found = read_groups(path)
    for order in ([0, 1], [1, 0]):
        joined = join_groups(found[order[0]], [found[n] for n in order])
        assert joined.keys() == {"tokens", "parts"}
        assert len(joined["tokens"]) == 5 + 6


def test_only_needed_draws_are_kept(tmp_path: Path) -> None:
    for name in ("step_00000001_0", "step_00000002_0"):
        written(tmp_path / f"{name}.groups", 0)
    forget(tmp_path, lambda name: name == "step_00000002_0")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002_0.groups"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no tensors",
        b"\xff" * 8 + b"{}",
        b"\x02\0\0\0\0\0\0\0[]",
        b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'.ljust(72)
        + b"00",
    ],
)
def test_a_record_with_a_right_checksum_that_holds_no_group_is_drawn_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
) -> None:
    path = tmp_path / "a.groups"
    file = DrawFile(path, REQUEST)
    file.append(group(0))
    with monkeypatch.context() as patched:
        patched.setattr("gspo_megatron.rollout.store.save", lambda _: content)
        file.append(group(1))
    file.append(group(2))
    file.close()
    with pytest.raises(DataError, match=r"damaged since it was written: groups \[1\] are missing"):
        read_groups(path, {1, 2})
    assert_holds(path, 0, 2)
    file = DrawFile(path, REQUEST)
    assert file.finished == {0, 2}
    assert capsys.readouterr().out == f"{path}: damaged groups, which are drawn again: 1\n"
    file.append(group(1))
    file.close()
    assert_holds(path, 0, 1, 2)
