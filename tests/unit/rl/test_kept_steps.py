"""The kept inputs of a run's last steps: which steps are kept, how they are read, and with which
weights they are used."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_megatron.checkpoint.folder import CHECKPOINTS, Position, Publication, reference_name
from gspo_megatron.checkpoint.manifest import MANIFEST, files_below, record_of
from gspo_megatron.checkpoint.run_state import STATE_FILE, RunState
from gspo_megatron.config import Config
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.observe.metrics_files import sample_row
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.rl import step_inputs
from gspo_megatron.rl.rollouts import Experience
from gspo_megatron.rl.step_inputs import (
    STEP_FILE,
    KeptSteps,
    StepInputs,
    find_weights,
    kept_steps,
    read_experience,
    write_rollouts,
)
from gspo_megatron.rollout.store import FOLDER
from gspo_megatron.rollout.types import COLUMNS
from gspo_megatron.types import Sample
from tests.unit.models.one_rank import VOCABULARY, tiny_config, tiny_policy
from tests.unit.rl.test_experience import group_of

pytestmark = pytest.mark.usefixtures("one_rank")


def rollouts(seed: int, *, routes: bool = True) -> Experience:
    group = group_of(seed)
    if not routes:
        group = dataclasses.replace(group, routes=None, layers=None)
    return Experience(
        group,
        torch.device("cpu"),
        metrics={"reward/mean": 0.25},
        num_tokens=len(group.rollout_logprobs),
        rollout_seconds=1.5,
        samples=[sample_row(Sample("1+1", "2", "3", truncated=False), 0.5)],
        draws=[{"prompt": "a", "spread": True}],
        reward_seconds=0.5,
        has_turns=True,
    )


@dataclasses.dataclass
class Run:
    """A run that keeps the inputs of its steps."""

    folder: Path
    keep: int = 2
    sections: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        training = {"keep_step_inputs": self.keep} | self.sections.pop("training", {})
        logging = {"dir": str(self.folder / "run")}
        self.config: Config = tiny_config(training=training, logging=logging, **self.sections)
        self.policy: Policy = tiny_policy()
        record = RunLogger(self.config, is_main=True)
        self.kept = KeptSteps(self.config, self.policy, record)
        record.close()

    def write(self, step: int, *, routes: bool = True) -> StepInputs:
        self.kept.write(step, rollouts(step, routes=routes))
        return StepInputs.read(self.folder / "run", step)

    def checkpoint(self, position: Position, *, state: bool = True) -> Path:
        """A checkpoint that is complete enough to be chosen."""
        publication = Publication(self.folder / "run" / CHECKPOINTS, position.name)
        publication.begin()
        if state:
            found = RunState(position.phase, position.step, {}, {}, {}, "tp=1", 1, {})
            (publication.folder / STATE_FILE).write_bytes(found.dump())
        (publication.folder / "weights").write_bytes(b"1234")
        names = files_below(publication.folder)
        return publication.publish({n: record_of(publication.folder / n) for n in names})


@pytest.mark.parametrize("routes", [True, False])
def test_what_is_read_is_what_was_written(tmp_path: Path, routes: bool) -> None:
    run = Run(tmp_path)
    kept = run.write(12, routes=routes)
    assert (kept.step, kept.precision, kept.vocab_size) == (12, "fp32", VOCABULARY)
    assert kept.has_routes == routes
    assert kept.run == tmp_path / "run"
    wanted = rollouts(12, routes=routes)
    found = read_experience(kept.folder, kept.rollouts, run.policy)
    for name in COLUMNS:
        values = getattr(wanted.group, name), getattr(found.group, name)
        np.testing.assert_equal(*values, name)
    for field in dataclasses.fields(Experience):
        if field.name != "group":
            assert getattr(found, field.name) == getattr(wanted, field.name), field.name


def test_rollouts_that_another_version_described_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    kept = run.write(3)
    described = {**kept.rollouts, "sample_rewards": [0.5]}
    with pytest.raises(DataError, match="/rollouts: cannot be read: another version of this"):
        read_experience(kept.folder, described, run.policy)


def test_the_last_steps_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=3)
    folder = tmp_path / "run" / FOLDER
    for step in range(1, 6):
        run.write(step)
        assert kept_steps(folder) == list(range(max(1, step - 2), step + 1))
    run.write(4)  # The run was resumed before step 4, so step 5 is no longer part of it.
    assert kept_steps(folder) == [3, 4]
    run.write(5)
    assert kept_steps(folder) == [3, 4, 5]
    assert sorted(p.name for p in folder.iterdir()) == [f"step_0000000{n}" for n in (3, 4, 5)]


def test_nothing_is_written_unless_asked(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=0)
    run.kept.write(1, rollouts(1))
    assert not (tmp_path / "run" / FOLDER).exists()


def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    half = tmp_path / "run" / FOLDER / ".partial-step_00000003-0123"
    half.mkdir(parents=True)
    (half / STEP_FILE).write_text("{")
    Run(tmp_path)
    assert not half.exists()


def test_a_disk_that_refuses_costs_the_inputs_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(experience: Experience, folder: Path) -> None:
        write_rollouts(experience, folder)
        raise OSError(28, "No space left on device", str(folder / "rollouts"))

    run = Run(tmp_path)
    full = rollouts(7)
    with monkeypatch.context() as patch:
        patch.setattr(step_inputs, "write_rollouts", refused)
        run.kept.write(7, full)
    assert list((tmp_path / "run" / FOLDER).iterdir()) == []
    assert "warning: the inputs of step 7 could not be kept" in (said := capsys.readouterr().err)
    assert "No space left on device" in said
    assert run.write(7).step == 7  # now there is room on the disk

    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other")
    (tmp_path / "other" / "run" / FOLDER).write_text("a file in the folder's place")
    other.kept.write(1, full)
    assert "warning: the inputs of step 1 could not be kept" in capsys.readouterr().err


def damaged(folder: Path, kind: str) -> str:
    """Damage a file. Returns the file."""
    [file, *_] = sorted((folder / "rollouts").iterdir())
    content = bytearray(file.read_bytes())
    if kind == "altered":
        flip_a_bit(file)
    elif kind == "cut short":
        file.write_bytes(content[:-1])
    elif kind == "missing":
        file.unlink()
    elif kind == "foreign":
        file = folder / "rollouts" / "rank_00009_data_00009_stage_000.safetensors"
        file.write_bytes(content)
    else:
        file = folder / MANIFEST
        file.unlink()
    return file.name


@pytest.mark.parametrize("kind", ["altered", "cut short", "missing", "foreign", "no manifest"])
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    folder = Run(tmp_path).write(3).folder
    file = damaged(folder, kind)
    said = "missing" if kind == "no manifest" else kind
    with pytest.raises(DataError, match=f"{folder}: (rollouts/)?{file}: .*{said}|{file}: {said}"):
        StepInputs.read(tmp_path / "run", 3)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"format": "another"}', b'{"step": 3, "precision": "fp32"}'],
)
def test_a_folder_of_something_else_is_no_step(tmp_path: Path, content: bytes) -> None:
    folder = Run(tmp_path).write(3).folder
    (folder / STEP_FILE).write_bytes(content)
    manifest = json.loads((folder / MANIFEST).read_text())
    record = record_of(folder / STEP_FILE)
    manifest["files"][STEP_FILE] = {"bytes": record.bytes, "crc32": record.crc32}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=f"{folder}: not the inputs of a step"):
        StepInputs.read(tmp_path / "run", 3)


def test_a_step_that_was_not_kept_is_told_with_those_that_were(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(3)
    run.write(4)
    told = "inputs of step 5 were not kept; the run has kept those of the steps: 3, 4"
    with pytest.raises(DataError, match=told):
        StepInputs.read(tmp_path / "run", 5)
    with pytest.raises(DataError, match="of the steps: none"):
        StepInputs.read(tmp_path / "nowhere", 5)


def test_a_configuration_that_cannot_compute_the_step_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with_routes, without = run.write(3), run.write(4, routes=False)
    kl = {"kl": "k3", "kl_coefficient": 0.1}
    r3 = tiny_config(routing={"replay": "r3", "reference_replay": "r3"}, objective=kl)
    assert with_routes.problems(r3, VOCABULARY) == []
    assert without.problems(run.config, VOCABULARY) == []
    policy, reference = without.problems(r3, VOCABULARY)
    assert policy.startswith("routing.replay = 'r3': ") and "has no routes" in policy
    assert reference.startswith("routing.reference_replay = 'r3': ")
    (vocabulary,) = with_routes.problems(r3, VOCABULARY + 1)
    assert f"vocabulary = {VOCABULARY + 1}: " in vocabulary


def test_the_logged_loss_is_the_last_one_of_the_step(tmp_path: Path) -> None:
    kept = Run(tmp_path).write(3)
    lines = [
        {"phase": "sft", "step": 3, "loss": 9.0},
        {"phase": "rl", "step": 3, "loss": 8.0},
        {"phase": "rl", "step": 3, "loss": 0.5},
        {"phase": "rl", "step": 4, "loss": 7.0},
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert kept.logged_loss() == 0.5
    assert dataclasses.replace(kept, step=5).logged_loss() is None
    assert dataclasses.replace(kept, run=tmp_path / "nowhere").logged_loss() is None


def test_the_weights_are_the_newest_that_are_not_later(tmp_path: Path) -> None:
    run = Run(tmp_path)
    kept = run.write(4)
    first = find_weights(kept, run.config, None)
    assert (first.checkpoint, first.is_start, first.optimizer) == (None, False, False)
    assert "first ones, not those that the step began with" in first.text
    assert find_weights(dataclasses.replace(kept, step=1), run.config, None).is_start

    older = run.checkpoint(Position("rl", 2))
    run.checkpoint(Position("rl", 4))  # a checkpoint after the step
    run.checkpoint(Position("rl", 4, rolled_out=True))
    found = find_weights(kept, run.config, None)
    assert (found.checkpoint, found.is_start, found.optimizer) == (older, False, False)
    exact = run.checkpoint(Position("rl", 3))
    found = find_weights(kept, run.config, None)
    assert (found.checkpoint, found.is_start, found.optimizer) == (exact, True, True)
    assert found.text == f"{exact}, with its optimizer"
    rolled = run.checkpoint(Position("rl", 3, rolled_out=True))
    assert find_weights(kept, run.config, None).checkpoint == rolled

    (rolled / "weights").write_bytes(b"123")
    found = find_weights(kept, run.config, None)
    assert found.checkpoint == exact
    assert found.notes == (
        f"{rolled} is damaged and not used: weights: cut short, it has 3 of 4 bytes",
    )

    flip_a_bit(exact / "weights")
    found = find_weights(kept, run.config, None)
    assert (found.checkpoint, found.is_start, found.optimizer) == (older, False, False)
    assert found.notes[1] == (
        f"{exact} is damaged and not used: weights: altered, its checksum differs from the "
        "manifest's"
    )


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_weights_that_are_given_are_checked(tmp_path: Path) -> None:
    run = Run(tmp_path)
    kept = run.write(4)
    given = run.checkpoint(Position("rl", 1))
    found = find_weights(kept, run.config, str(given))
    assert (found.checkpoint, found.is_start) == (given, False)
    alone = run.checkpoint(Position("rl", 3), state=False)
    assert not find_weights(kept, run.config, str(alone)).is_start
    (given / "weights").write_bytes(b"1235")
    with pytest.raises(DataError, match=f"{given}: weights: altered"):
        find_weights(kept, run.config, str(given))
    with pytest.raises(DataError, match="manifest.json: missing"):
        find_weights(kept, run.config, str(tmp_path))


def reference_beside(checkpoint: Path, since: int = 0) -> Path:
    """Write a reference of 4 bytes, the policy after step `since`, beside the checkpoint. Returns
    its file."""
    publication = Publication(checkpoint.parent, reference_name(since))
    publication.begin()
    (publication.folder / "weights").write_bytes(b"1234")
    files = {"weights": record_of(publication.folder / "weights")}
    return publication.publish(files) / "weights"


def test_a_damaged_reference_is_named_where_it_is_needed(tmp_path: Path) -> None:
    kl = {"kl": "k3", "kl_coefficient": 0.1}
    run = Run(tmp_path, sections={"objective": kl})
    kept = run.write(4)
    checkpoint = run.checkpoint(Position("rl", 3))
    file = reference_beside(checkpoint)
    flip_a_bit(file)
    for given in (None, str(checkpoint)):
        with pytest.raises(DataError, match=rf"{file.parent}: weights: altered(.|\n)*move it away"):
            find_weights(kept, run.config, given)
    assert find_weights(kept, tiny_config(), None).checkpoint == checkpoint


def test_a_renewed_reference_cannot_be_replaced_by_the_first_weights(tmp_path: Path) -> None:
    phases = [{"until_step": 2}, {"reference": "renew"}]
    sections: dict[str, Any] = {
        "objective": {"kl": "k3", "kl_coefficient": 0.1},
        "training": {"phases": phases},
        "checkpoint": {"interval": 1},
    }
    run = Run(tmp_path, sections=sections)
    kept = run.write(4)
    file = reference_beside(run.checkpoint(Position("rl", 3)), since=2)
    flip_a_bit(file)
    with pytest.raises(DataError, match=f"{file.parent}: weights: altered") as error:
        find_weights(kept, run.config, None)
    assert "replace it by an undamaged copy" in str(error.value)
    assert "move it away" not in str(error.value)
