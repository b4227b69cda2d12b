"""The checkpoints that a run keeps for a rollback, and the record of rollbacks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gspo_megatron.checkpoint.folder import (
    Position,
    finish_rollback,
    positions,
    remove_leftovers,
    surplus,
    to_go_back_to,
)
from gspo_megatron.checkpoint.lineage import (
    ROLLBACKS_FILE,
    Rollbacks,
    RunBranch,
    read_branch,
    read_rollbacks,
)
from gspo_megatron.errors import DataError
from gspo_megatron.observe.collapse import WINDOW
from gspo_megatron.observe.history import history, kept_metrics


def a_record(**changed: object) -> Rollbacks:
    told = {"number": 1, "from_step": 9, "to_step": 2, "text": "reward 0.5 -> 0"}
    values = {
        "number": 1,
        "to": "rl_00000002",
        "loader": {"epoch": 0},
        "prompts": {"shuffle": True},
    }
    return Rollbacks(**{**values, "undone": ["rl_00000004"], "rollbacks": [told], **changed})


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 7, 20])
@pytest.mark.parametrize("keep_last", [1, 2, 5])
def test_a_healthy_checkpoint_follows_the_run_however_few_are_kept(
    interval: int, keep_last: int
) -> None:
    """The run is always healthy. At most two checkpoints are kept for a rollback. The newest surely
    healthy checkpoint is at most two intervals and two windows old."""
    kept: list[Position] = []
    for step in range(interval, 200, interval):
        kept.append(Position("rl", step))
        needed = to_go_back_to(kept, healthy_step=step - WINDOW, healthy=step)
        extra = surplus(dict.fromkeys(kept), keep_last, 0, 0)
        kept = [position for position in kept if position not in extra or position in needed]
        assert len(kept) <= keep_last + 2
        sure = [position.step for position in kept if position.step <= step - WINDOW]
        if step > 2 * (interval + WINDOW):
            assert sure and max(sure) >= step - 2 * (interval + WINDOW)


def test_a_healthy_checkpoint_stays_while_the_run_is_not() -> None:
    """The run is surely healthy up to step 20, and seems healthy up to step 25. Checkpoints after
    step 25 are useless for a rollback."""
    found = [Position("rl", step) for step in range(5, 200, 5)]
    random.Random(1).shuffle(found)
    needed = to_go_back_to(found, healthy_step=20, healthy=25)
    assert [position.step for position in needed] == [20, 25]
    others = [Position("sft", 20), Position("rl", 18, True), Position("rl", 0)]
    assert to_go_back_to(others, healthy_step=20, healthy=25) == [Position("rl", 0)]


def test_what_is_taken_back_is_no_checkpoint_at_once(tmp_path: Path) -> None:
    names = ["rl_00000002", "rl_00000004", "rl_00000006"]
    for name in names:
        (tmp_path / name).mkdir()
    a_record(undone=names[1:]).write(tmp_path)
    assert [position.name for position in positions(tmp_path)] == names[:1]
    finish_rollback(tmp_path)
    record = read_rollbacks(tmp_path)
    assert record is not None and record.undone == []
    # The run repeats these steps, and may save new checkpoints with the same names.
    (tmp_path / "rl_00000004").mkdir()
    finish_rollback(tmp_path)
    assert [position.name for position in positions(tmp_path)] == names[1::-1]
    assert len(remove_leftovers(tmp_path)) == 2


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_rollbacks(tmp_path) is None and read_rollbacks(tmp_path / "absent") is None
    a_record().write(tmp_path)
    assert read_rollbacks(tmp_path) == a_record()
    assert [path.name for path in tmp_path.iterdir()] == [ROLLBACKS_FILE]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"number": 1, "more": 2}'])
def test_a_damaged_record_is_an_error(tmp_path: Path, content: str) -> None:
    """Without the record of rollbacks, the run would resume from a checkpoint of the collapsed
    policy."""
    (tmp_path / "rl_00000002").mkdir()
    (tmp_path / ROLLBACKS_FILE).write_text(content)
    with pytest.raises(DataError, match="rollbacks.json: not the record of a run's rollbacks"):
        positions(tmp_path)
    (tmp_path / "branch.json").write_text(content)
    with pytest.raises(DataError, match="branch.json: not the record of a branch"):
        read_branch(tmp_path)


def test_the_history_of_a_run_has_its_branches_and_rollbacks(tmp_path: Path) -> None:
    assert history(tmp_path) == []
    (tmp_path / "checkpoints").mkdir()
    a_record().write(tmp_path / "checkpoints")
    above = [{"run": "/runs/a", "step": 40}]
    branch = RunBranch("/runs/b", 60, "rl_00000060", {"training": {}}, above)
    branch.write(tmp_path)
    assert read_branch(tmp_path) == branch
    assert history(tmp_path) == [
        "This run is a branch of /runs/b after step 60, itself a branch of /runs/a after step 40.",
        "Rollback 1: after step 9 the run went back to step 2, because of a collapse (reward 0.5 "
        f"-> 0). {kept_metrics(1)} has the metrics until then.",
    ]
