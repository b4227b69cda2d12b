"""A checkpoint gets its name when it is complete. Old checkpoints are removed, never the newest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gspo_megatron.checkpoint.folder import (
    Position,
    Publication,
    free_bytes,
    hide,
    owned_by,
    positions,
    remove_leftovers,
    set_latest,
    surplus,
)
from gspo_megatron.checkpoint.manifest import files_below, find_damage, record_of


def publish(parent: Path, name: str, content: str = "x") -> Path:
    publication = Publication(parent, name)
    publication.begin()
    (publication.folder / "model").mkdir()
    (publication.folder / "model" / "a").write_text(content)
    files = {n: record_of(publication.folder / n) for n in files_below(publication.folder)}
    return publication.publish(files)


def test_names_and_positions_are_each_others_inverse() -> None:
    for position in (Position("sft", 40), Position("rl", 0, True), Position("rl", 10**9)):
        assert Position.of_name(position.name) == position
    assert Position("rl", 120).name == "rl_00000120"
    for name in ("latest", "reference", ".partial-rl_00000001-ab", "rl_1", "rl_00000001x", "sft_1"):
        assert Position.of_name(name) is None


def test_positions_are_sorted_as_a_run_passes_them(tmp_path: Path) -> None:
    ordered = ["sft_00000040", "rl_00000000_rollouts", "rl_00000002",
               "rl_00000002_rollouts", "rl_00000010", "rl_123456789"]  # fmt: skip
    names = ordered + ["reference", ".partial-rl_00000099-00"]
    random.Random(3).shuffle(names)
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "rl_00000050").write_text("a file is no checkpoint")
    assert [position.name for position in positions(tmp_path)] == ordered[::-1]
    assert positions(tmp_path / "absent") == []


def test_a_checkpoint_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    publication = Publication(tmp_path / "checkpoints", "rl_00000001")
    publication.begin()
    (publication.folder / "a").write_text("half of it")
    assert positions(publication.parent) == []
    path = publication.publish({"a": record_of(publication.folder / "a")})
    assert path == tmp_path / "checkpoints" / "rl_00000001"
    assert find_damage(path) == []
    assert [p.name for p in path.parent.iterdir()] == ["rl_00000001"]


def test_a_damaged_checkpoint_is_replaced(tmp_path: Path) -> None:
    path = publish(tmp_path, "rl_00000001", "before")
    (path / "model" / "foreign").touch()
    assert publish(tmp_path, "rl_00000001", "after") == path
    assert find_damage(path) == []
    assert (path / "model" / "a").read_text() == "after"
    assert [p.name for p in tmp_path.iterdir()] == ["rl_00000001"]


def test_a_checkpoint_that_cannot_be_replaced_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename = publish(tmp_path, "rl_00000001", "before"), Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if self.name.startswith(".partial-"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    publication = Publication(tmp_path, path.name)
    publication.begin()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(Path, "rename", refuse_new)
        publication.publish({})
    publication.abandon()
    assert (path / "model" / "a").read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    whole, going = publish(tmp_path, "rl_00000001"), publish(tmp_path, "rl_00000002")
    hide(going)
    Publication(tmp_path, "rl_00000003").begin()
    (tmp_path / ".partial-latest").touch()
    set_latest(tmp_path, "rl_00000001")
    Publication(tmp_path, "rl_00000004").begin()
    assert len(remove_leftovers(tmp_path)) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "rl_00000001"]
    assert (tmp_path / "latest").read_text() == "rl_00000001\n"
    assert find_damage(whole) == []
    assert remove_leftovers(tmp_path / "absent") == []


def metrics_of(steps: range, best: dict[int, float]) -> dict[Position, float | None]:
    return {Position("rl", step): best.get(step) for step in steps}


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ((1, 0, 0), [12]),
        ((3, 0, 0), [10, 11, 12]),
        ((None, 0, 0), list(range(1, 13))),
        ((1, 0, 5), [5, 10, 12]),
        ((1, 2, 0), [4, 6, 12]),
        ((2, 1, 6), [4, 6, 11, 12]),
        ((1, 99, 0), [2, 4, 6, 8, 12]),
    ],
)
def test_what_stays(keep: tuple[int | None, int, int], left: list[int]) -> None:
    nan = float("nan")
    metrics = metrics_of(range(1, 13), {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.5 - 1e-9, 10: nan})
    assert [p.step for p in metrics if p not in surplus(metrics, *keep)] == left


def test_the_newest_stays_whatever_else_does() -> None:
    chance = random.Random(11)
    for _ in range(200):
        count = chance.randrange(1, 9)
        metrics = metrics_of(range(count), {n: chance.random() for n in range(0, count, 2)})
        keep = (chance.randrange(1, 4), chance.randrange(3), chance.randrange(4))
        assert Position("rl", count - 1) not in surplus(metrics, *keep)


def test_a_half_done_step_is_worth_keeping_only_while_it_is_new() -> None:
    half, done = Position("rl", 5, True), Position("rl", 6)
    metrics: dict[Position, float | None] = {Position("rl", 5): 0.2, half: 0.9, done: 0.1}
    assert surplus(metrics, 1, 1, 5) == [half]
    assert half not in surplus({Position("rl", 5): None, half: None}, 1, 0, 0)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_every_file_has_one_rank_that_checks_it(size: int) -> None:
    written = [
        [
            f"model/__{rank}_0.distcp",
            f"model/__{rank}_1.distcp",
            f"rng/rank_{rank:05d}.safetensors",
            f"rollouts/rank_{rank:05d}_data_00000_stage_000.safetensors",
        ]
        for rank in range(size)
    ]
    written[0] += ["config.yaml", "model/.metadata", "model/common.pt"]
    names = [name for of_rank in written for name in of_rank]
    for rank in range(size):
        assert sorted(owned_by(names, rank, size)) == sorted(written[rank])


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "runs" / "a" / "checkpoints") > 0
