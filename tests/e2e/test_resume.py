"""A run is continued by the same command: on another layout, after damage to files, and after a
request to stop. The command refuses changes that would make it a different run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gspo_megatron.checkpoint.manifest import find_damage
from gspo_megatron.checkpoint.run_lock import LOCK_FILE, RunLock
from gspo_megatron.verify.results import compare
from tests.e2e.conftest import write_config
from tests.e2e.resuming import (
    assert_same_run,
    checkpoint_names,
    command,
    copied,
    environment,
    flip_a_bit,
    make_small,
    records,
    train,
)
from tests.programs import run_program

STEPS = 6
LAST = f"rl_{STEPS:08d}"


@pytest.fixture(scope="module")
def base(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration. The folder `run` beside it has a finished run on one rank, with all
    checkpoints of the run."""
    folder = tmp_path_factory.mktemp("base")
    path = make_small(
        write_config(toy, folder),
        objective={"kl": "k3", "kl_coefficient": 0.05},
        routing={"replay": "r3"},
        training={"steps": STEPS},
        checkpoint={"interval": 1, "keep_last": None},
    )
    train(path)
    return path


@pytest.fixture
def again(base: Path, tmp_path: Path) -> Path:
    """A copy of the configuration `base` and of its run. A test may damage the copy."""
    return copied(base.parent, tmp_path, with_run=True)


@pytest.fixture
def run(again: Path) -> Path:
    """The folder of the copied run."""
    return again.parent / "run"


def sampled(config: Path) -> int:
    """The number of responses that the reward function has got so far."""
    return (config.parent / "calls").stat().st_size


def stop_in_call(config: Path, number: int) -> None:
    """Let a rank get SIGTERM in the call of the reward with this number."""
    (config.parent / "signal_at").write_text(str(number))


def test_a_run_goes_on_over_many_layouts_and_does_not_sample_twice(
    base: Path, again: Path, run: Path
) -> None:
    """On 4 ranks, the run is stopped during the rollouts of step 2. It continues on one rank, and
    trains on the responses that it already has.

    Loss and gradient differ by fp32 rounding, which learning magnifies, so the tolerance is 1e-4.
    The loss is near 0 but is a sum of terms of size 1, so its tolerance is absolute. After any
    sequence of layouts, each checkpoint has the same optimizer moments as the run on one rank.
    """
    shutil.rmtree(run)
    evaluated, responses = 8, 16
    # The reward is called for the evaluation, for step 1, and for some responses of step 2.
    stop_in_call(again, evaluated + responses + 5)
    train(again, "parallel.layout=tp=2,pp=2,ep=2", expect=75)
    names = checkpoint_names(run)
    assert "rl_00000001_rollouts" in names and not [n for n in names if n.startswith(".")]
    assert (run / "checkpoints" / "latest").read_text() == "rl_00000001_rollouts\n"
    assert sampled(again) == evaluated + 2 * responses

    result = train(again, "training.steps=3")
    assert "resuming from" in result.stderr and "parallel.layout" in result.stderr
    train(again, "training.steps=4", "parallel.layout=dp=2,ep=2")
    train(again, "parallel.layout=cp=2")

    # Each response was rewarded once. There are more calls for evaluations, because each shorter
    # run had one at its end.
    assert sampled(again) == evaluated + STEPS * responses + 3 * evaluated
    mine = {(r["phase"], r["step"]): r for r in records(run)}
    theirs = {(r["phase"], r["step"]): r for r in records(base.parent / "run")}
    assert list(mine) == list(theirs)
    for key, record in theirs.items():
        for figure in ("loss", "grad_norm", "reward/mean", "policy/entropy", "kl/reference_k3"):
            if figure in record:
                assert mine[key][figure] == pytest.approx(record[figure], rel=1e-4, abs=1e-6), key
    for step in range(1, STEPS + 1):
        mine, theirs = (
            assembled(path.parent / "run" / "checkpoints" / f"rl_{step:08d}" / "optimizer")
            for path in (again, base)
        )
        (worst, error), *_ = compare(theirs, mine)
        assert error < 1e-4, (step, worst, error)


def assembled(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint, read by torch's own code for the format."""
    reader = FileSystemReader(folder)
    kinds = reader.read_metadata().state_dict_metadata.items()
    found = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in kinds
        if isinstance(kind, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    assert any("exp_avg_sq" in name for name in found)
    return found


def test_damaged_checkpoints_are_named_and_the_newest_whole_one_is_used(
    base: Path, again: Path, run: Path
) -> None:
    damage: list[tuple[int, str, Callable[[Path], object], str]] = [
        (6, "model/__0_0.distcp", lambda p: os.truncate(p, p.stat().st_size - 7), "cut short"),
        (5, "optimizer/__0_0.distcp", flip_a_bit, "altered"),
        (4, "rng/rank_00000.safetensors", Path.unlink, "missing"),
        (3, "model/__0_0.distcp", lambda p: shutil.copy(p, p.with_name("__9_0.distcp")), "foreign"),
    ]
    for step, name, spoil, _ in damage:
        spoil(run / "checkpoints" / f"rl_{step:08d}" / name)
    (run / "checkpoints" / ".partial-rl_00000007-0badcafe").mkdir()  # as a killed run leaves it
    result = train(again)
    lines = result.stderr.splitlines()
    for step, name, _, what in damage:
        found = "model/__9_0.distcp" if what == "foreign" else name
        start_of_line = f"checkpoint rl_{step:08d} is damaged and not used: {found}: {what}"
        assert [line for line in lines if line.startswith(start_of_line)], start_of_line
    used = run / "checkpoints" / "rl_00000002"
    assert f"resuming from {used}, the newest undamaged checkpoint, at step 3 of {STEPS}" in lines
    assert_same_run(run, base.parent / "run", LAST)
    assert not [name for name in checkpoint_names(run) if name.startswith(".")]


def test_a_damaged_reference_is_named(again: Path, run: Path) -> None:
    flip_a_bit(run / "checkpoints" / "reference" / "model" / "__0_0.distcp")
    result = train(again, "training.steps=7", expect=2)
    assert "reference: model/__0_0.distcp: altered" in result.stderr


def test_a_finished_run_says_so_and_stays_as_it_is(again: Path, run: Path) -> None:
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = train(again, "parallel.layout=dp=2")
    assert f"{run}: finished" in result.stdout and "raise training.steps" in result.stdout
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_a_second_run_in_the_folder_of_one_at_work_is_refused(again: Path, run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    with RunLock() as lock:
        lock.hold(run)
        told = train(again, "training.steps=9", "--nproc=2", "parallel.layout=dp=2", expect=2)
    assert f"{run}: another run is at work here" in told.stderr
    assert (run / "metrics.jsonl").read_bytes() == before
    assert f"--fresh: {run} is not empty" in train(again, "--fresh", expect=2).stderr
    for path in [*run.iterdir()]:
        if path.name != LOCK_FILE:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    train(again, "--fresh", "training.steps=1")  # a folder with only the lock file counts as empty


def test_keys_that_shape_the_run_are_refused_all_at_once(again: Path, toy: Path) -> None:
    other = again.parent / "other.jsonl"
    other.write_text("".join((toy / "train.jsonl").read_text().splitlines(keepends=True)[1:]))
    same = again.parent / "same.model"
    shutil.copy(toy / "tokenizer.model", same)
    result = train(
        again,
        "training.steps=7",
        "objective.clip_low=1e-3",
        "training.seed=9",
        "model.megatron.num_layers=4",
        f"data.prompts={other}",
        f"data.tokenizer={same}",
        expect=2,
    )
    lines = result.stderr.splitlines()
    named = " ".join(line.split(" = ")[0] for line in lines[:-1])
    assert named == "data.prompts model.megatron.num_layers objective.clip_low training.seed"
    assert "was 1" in lines[3]
    # The advice leaves out the weights, because they do not fit a model of four layers.
    assert lines[-1].endswith(f"logging.dir={again.parent}/run-2")
    assert "on its weights" not in lines[-1]


@pytest.mark.parametrize("asynchronous", ["false", pytest.param("true", marks=pytest.mark.full)])
def test_one_rank_that_cannot_write_costs_a_checkpoint_and_not_the_run(
    again: Path, run: Path, asynchronous: str
) -> None:
    """Rank 1 cannot write. All ranks learn of this, so no rank waits for rank 1, and no rank uses
    the checkpoint. With an asynchronous save, the previous checkpoint may not be complete at this
    time."""
    shutil.rmtree(run)
    evaluated, responses = 4, 8  # numbers of calls on one of two ranks
    second = evaluated + responses + 1
    (again.parent / "full_disk").write_text(f"{second} {second + responses - 1}")
    how = ("parallel.layout=dp=2", f"checkpoint.asynchronous={asynchronous}", "training.steps=4")
    result = train(again, *how)
    warnings = [line for line in result.stderr.splitlines() if "problem with a checkpoint" in line]
    assert all("rank 1 cannot write: File too large" in line for line in warnings)
    kept = [name for name in checkpoint_names(run) if name.startswith("rl_")]
    lost = sorted({f"rl_0000000{step}" for step in (1, 2, 3, 4)} - set(kept))
    assert lost == ["rl_00000002"] or (asynchronous == "true" and len(lost) <= 2)
    assert len(warnings) == len(lost) and kept[-1] == "rl_00000004"
    assert checkpoint_names(run) == ["latest", "reference", *kept]  # no partial folder is left
    assert not [line for name in kept for line in find_damage(run / "checkpoints" / name)]
    assert records(run)[-1]["step"] == 4


def test_a_disk_that_is_full_does_not_end_training_and_leaves_nothing_half_written(
    again: Path, run: Path
) -> None:
    """The run is on a small tmpfs, if the user may mount one. The first three checkpoints fit on
    it. The fourth does not, and training continues with a warning. The last checkpoint must be
    saved, so without space for it the run ends with an error."""
    small = again.parent / "small"
    small.mkdir()
    files = filter(Path.is_file, (run / "checkpoints" / LAST).rglob("*"))
    one = sum(path.stat().st_size for path in files)
    mount = f"mount -t tmpfs -o size={int(one * 3.5)} tmpfs {small}"
    apart = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    if subprocess.run([*apart, mount], check=False).returncode:
        pytest.skip("no tmpfs may be mounted here")
    program = f'{mount}; "$@"; echo exit $?; cd {small}/run/checkpoints && ls -A'
    words = (f"logging.dir={small}/run", "objective.kl=none", "objective.kl_coefficient=null")
    train_there = command(again, *words)
    result = run_program(*apart, program, "sh", *train_there, environ=environment(again))
    assert "warning: problem with a checkpoint: it takes" in result.stderr
    assert "the run ends here, because of a problem with saving it: it takes" in result.stderr
    lines = result.stdout.splitlines()
    assert lines[lines.index("exit 2") + 1 :] == ["latest", *(f"rl_0000000{n}" for n in (1, 2, 3))]


# When the file `full_disk` exists and a step has been recorded, rank 0 can no longer write files
# that are larger than its file of metrics at that time.
REWARD_ON_A_FULL_DISK = """
import os, resource, zlib
from pathlib import Path
folder = Path(__file__).parent
metrics = folder / "run" / "metrics.jsonl"
def reward(sample):
    if os.environ.get("RANK") == "0" and (folder / "full_disk").exists():
        if metrics.exists() and metrics.stat().st_size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 10, -1))
    return zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 97 / 96
"""


def test_a_step_that_cannot_be_written_down(toy: Path, tmp_path: Path) -> None:
    steps = {"steps": 3}
    config = make_small(write_config(toy, tmp_path), training=steps, data={"eval_prompts": None})
    (tmp_path / "resuming_reward.py").write_text(REWARD_ON_A_FULL_DISK)
    (tmp_path / "full_disk").touch()
    run = tmp_path / "run"
    result = train(config, "parallel.layout=dp=2", "logging.samples_per_step=0", expect=2)
    (told,) = [line for line in result.stderr.splitlines() if "cannot be written" in line]
    assert f"{run}/metrics.jsonl: cannot be written: File too large; " in told
    assert checkpoint_names(run)[-1] == "rl_00000001"

    (tmp_path / "full_disk").unlink()
    result = train(config, "parallel.layout=dp=2", "logging.samples_per_step=0")
    assert "resuming from" in result.stderr
    assert [record["step"] for record in records(run)] == [1, 2, 3]
