"""The store. Finished groups survive any kill, and an incomplete record is ignored."""

from __future__ import annotations

import json
import resource
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from gspo_megatron.errors import DataError
from gspo_megatron.rollout.store import RequestFile, forget, read_groups, step_of
from gspo_megatron.rollout.types import COLUMNS, RolloutGroup

REQUEST = {"name": "step_00000001_0", "rows": [3, 1, 2]}


def a_group(number: int) -> RolloutGroup:
    """A group of three responses to one prompt."""
    draws = np.random.default_rng(number)
    prompts, responses = np.full(3, number + 1), draws.integers(1, 6, 3)
    tokens = int(responses.sum()) + 3 * (number + 1)
    return RolloutGroup(
        tokens=draws.integers(0, 99, tokens),
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=draws.random(int(responses.sum())).astype(np.float32),
        truncated=draws.random(3) < 0.5,
        sample_index=3 * number + np.arange(3),
        group_index=np.full(3, number),
        rewards=draws.random(3),
        shaped=draws.random(3),
        turns=np.zeros(3, np.int64),
        turn_rewards=np.zeros(0),
        turn_tokens=np.zeros(0, np.int64),
        versions=np.ones(int(responses.sum()), np.int32),
        parts=draws.random((3, 2)),
        part_names=("a", "b"),
        failed_calls=np.arange(3),
        reward_seconds=np.ones(1),
    ).checked()


def written(path: Path, *numbers: int) -> list[int]:
    """Append groups in one process. Returns the size of the file after each group."""
    file, sizes = RequestFile(path, REQUEST), []
    for number in numbers:
        file.append(a_group(number))
        sizes.append(path.stat().st_size)
    file.close()
    return sizes


def assert_holds(path: Path, *numbers: int) -> None:
    found = read_groups(path)
    assert found.keys() == set(numbers)
    for number in numbers:
        assert_holds_columns(found[number], a_group(number))


def assert_holds_columns(found: RolloutGroup, expected: RolloutGroup) -> None:
    for name in COLUMNS:
        np.testing.assert_equal(getattr(found, name), getattr(expected, name), name)


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
    file = RequestFile(path, REQUEST)
    assert file.finished == {0} and path.stat().st_size == first
    file.append(a_group(1))
    file.close()
    assert_holds(path, 0, 1)


def test_a_full_disk_is_one_error_and_the_group_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.groups"
    file = RequestFile(path, REQUEST)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 99, limits[1]))
    try:
        with pytest.raises(DataError, match=r"a\.groups: cannot be written"):
            file.append(a_group(0))
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not file.finished
    written(path, 0)
    assert_holds(path, 0)


def assert_only_group_1_is_drawn_again(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_holds(path, 0, 2)
    file = RequestFile(path, REQUEST)
    assert file.finished == {0, 2}
    assert capsys.readouterr().out == f"{path}: damaged groups, which are drawn again: 1\n"
    file.append(a_group(1))
    file.close()
    assert_holds(path, 0, 1, 2)


def test_a_damaged_record_is_named_and_those_behind_it_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.groups"
    first, _, _ = written(path, 0, 1, 2)
    content = bytearray(path.read_bytes())
    content[first + 60] ^= 1
    path.write_bytes(content)
    assert_only_group_1_is_drawn_again(path, capsys)
    RequestFile(path, REQUEST).close()
    assert capsys.readouterr().out == ""  # the file exists already and is undamaged


def test_with_its_request_damaged_all_of_a_draw_is_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.groups"
    written(path, 0, 1)
    content = bytearray(path.read_bytes())
    content[content.index(b"step_00000001_0")] ^= 1
    path.write_bytes(content)
    written(path, 1)
    told = f"{path}: the record of its request is damaged: all its groups are drawn again\n"
    assert capsys.readouterr().out == told
    assert_holds(path, 1)


def test_groups_of_another_request_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.groups"
    written(path, 0, 1)
    file = RequestFile(path, {**REQUEST, "rows": [3, 1, 4]})
    file.close()
    assert file.finished == set() and read_groups(path) == {}


def test_groups_of_an_older_form_are_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "a.groups"
    written(path, 0, 1)
    path.write_bytes(path.read_bytes().replace(b"GSP2", b"GSPO"))
    RequestFile(path, REQUEST).close()
    written(path, 1)
    assert_holds(path, 1)


def test_groups_of_the_version_before_are_used(tmp_path: Path) -> None:
    """The record consists of the bytes that the earlier format version wrote: header, names, shapes
    and types."""
    path, group = tmp_path / "a.groups", a_group(0)
    columns = {
        "tokens": group.tokens.astype(np.int32),
        **{name: getattr(group, name) for name in ("prompt_lengths", "response_lengths")},
        **{name: getattr(group, name) for name in ("rollout_logprobs", "versions", "truncated")},
        **{name: getattr(group, name) for name in ("sample_index", "group_index", "rewards")},
        **{name: getattr(group, name) for name in ("shaped", "turns", "turn_rewards")},
        **{name: getattr(group, name) for name in ("turn_tokens", "failed_calls")},
        "reward_seconds": np.ones(1),
        "parts": np.ascontiguousarray(group.parts.T),  # [parts, num_sequences]
        "part_names": np.frombuffer(b'["a", "b"]', np.uint8),
    }
    contents = [(-1, json.dumps(REQUEST, sort_keys=True).encode()), (0, save(columns))]
    path.write_bytes(
        b"".join(
            struct.pack("<4sqQI", b"GSP2", number, len(content), zlib.crc32(content)) + content
            for number, content in contents
        )
    )
    file = RequestFile(path, REQUEST)
    assert file.finished == {0}
    file.append(replace(a_group(1), reasons=["é\nof", "", "b"], records=[{"turns": []}] * 3))
    file.close()
    found = read_groups(path)
    assert_holds_columns(found[0], group)
    assert (found[1].reasons, found[1].records) == (["é\nof", "", "b"], [{"turns": []}] * 3)
    for order in ([0, 1], [1, 0]):
        joined = RolloutGroup.join([found[n] for n in order])
        assert joined.reasons is None and joined.records is None
        assert joined.sample_index.tolist() == [3 * n + k for n in order for k in range(3)]


def test_a_group_without_a_column_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, whole = tmp_path / "a.groups", RolloutGroup.save

    def without_tokens(group: RolloutGroup) -> bytes:
        columns = load(whole(group))
        del columns["tokens"], columns["turns"]
        return save(columns)

    file = RequestFile(path, REQUEST)
    with monkeypatch.context() as patched:
        patched.setattr(RolloutGroup, "save", without_tokens)
        file.append(a_group(0))
    file.append(a_group(1))
    file.close()
    assert read_groups(path).keys() == {1}
    with pytest.raises(DataError, match="since it was written: group 0 lacks tokens, turns"):
        read_groups(path, {0, 1})
    assert RequestFile(path, REQUEST).finished == {1}
    assert capsys.readouterr().out == f"{path}: damaged groups, which are drawn again: 0\n"
    written(path, 0)  # drawn again
    assert_holds_columns(read_groups(path, {0, 1})[0], a_group(0))


@pytest.mark.parametrize("lost", [("shaped", "rewards"), ("model_scores",)])
def test_a_group_whose_calls_failed_is_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: tuple[str, ...]
) -> None:
    """A judge that did not answer may answer now. Otherwise the run could never continue if all
    groups of a step had failed. A call that failed and was repeated has a reward."""
    path = tmp_path / "a.groups"
    columns = {"failed_calls": np.array([2, 0, 0]), "model_scores": np.zeros(3)}
    repeated = replace(a_group(0), **columns)
    columns |= dict.fromkeys(lost, np.array([0.5, np.nan, 0.0]))
    failed = replace(a_group(1), **columns)
    for _ in range(2):
        file = RequestFile(path, REQUEST)
        for group in (repeated, failed, a_group(2)):
            if group.number not in file.finished:
                file.append(group)
        file.close()
        assert read_groups(path).keys() == {0, 1, 2}  # the run leaves out group 1
    file = RequestFile(path, REQUEST)
    assert file.finished == {0, 2} and capsys.readouterr().out == ""
    file.append(a_group(1))
    file.close()
    assert RequestFile(path, REQUEST).finished == {0, 1, 2}
    assert_holds_columns(read_groups(path, {1})[1], a_group(1))


def test_only_needed_draws_are_kept(tmp_path: Path) -> None:
    for name in ("step_00000001_0", "step_00000002_0"):
        written(tmp_path / f"{name}.groups", 0)
    foreign = {tmp_path / name for name in ("notes.groups", "my_copy.groups", "step_2b.groups")}
    for path in foreign:
        path.touch()
    forget(tmp_path, lambda name: step_of(name) == 2)
    assert {*tmp_path.iterdir()} == {*foreign, tmp_path / "step_00000002_0.groups"}


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
    file = RequestFile(path, REQUEST)
    file.append(a_group(0))
    with monkeypatch.context() as patched:
        patched.setattr(RolloutGroup, "save", lambda _: content)
        file.append(a_group(1))
    file.append(a_group(2))
    file.close()
    with pytest.raises(
        DataError,
        match="damaged since it was written: group(s \\[1\\] are missing| 1 (holds|lacks))",
    ):
        read_groups(path, {1, 2})
    assert_only_group_1_is_drawn_again(path, capsys)
