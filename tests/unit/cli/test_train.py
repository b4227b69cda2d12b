"""`train` decides whether its process is a rank, the only rank, or the launcher of ranks."""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

import gspo_megatron
from gspo_megatron.checkpoint.folder import Position
from gspo_megatron.config import Config, load_config
from gspo_megatron.errors import UserError
from gspo_megatron.process import launcher as launcher
from gspo_megatron.process.nodes import Node
from gspo_megatron.process.ranks import decide_world_size
from tests.unit.checkpoint.test_resume_start import add
from tests.unit.cli.conftest import Command, ConfigWriter

Calls = list[tuple[object, ...]]
# With this value of training.steps, the stand-in's run ends early, as after a signal to stop.
TOLD_TO_STOP = 77


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A record of the actions of `train`: ("train", config) in this process, or ("launch", command,
    world size)."""
    made: Calls = []
    run = types.ModuleType("gspo_megatron.rl.run")

    def run_training(config: Config, *, fresh: bool, change: bool) -> bool:
        given = [name for name, is_set in (("fresh", fresh), ("change", change)) if is_set]
        made.append(("train", config, *given))
        return config.training.steps != TOLD_TO_STOP

    run.run_training = run_training  # type: ignore[attr-defined]
    # The real package imports Megatron-Core, which these tests do not need.
    monkeypatch.setitem(sys.modules, "gspo_megatron.rl", types.ModuleType("gspo_megatron.rl"))
    monkeypatch.setitem(sys.modules, "gspo_megatron.rl.run", run)

    def launch(
        command: Sequence[str], world_size: int, *, saves_on_signals: bool, node: Node | None
    ) -> int:
        saves = ("saves",) if saves_on_signals else ()
        made.append(("launch", list(command), world_size, *saves, *([node] if node else [])))
        return 7

    monkeypatch.setattr(launcher, "launch", launch)
    return made


LAYOUT, STEPS = "parallel.layout=tp=2,pp=2", "training.steps=3"


@pytest.mark.parametrize(
    ("words", "code", "does", "world_size"),
    [
        ([STEPS], 0, ["train", STEPS], 1),
        ([f"training.steps={TOLD_TO_STOP}"], 75, ["train", f"training.steps={TOLD_TO_STOP}"], 1),
        (["--fresh"], 0, ["train", "--fresh"], 1),
        (["--change"], 0, ["train", "--change"], 1),
        (["--change", "--nproc=2"], 7, ["launch", "--change"], 2),
        ([LAYOUT, STEPS], 7, ["launch", LAYOUT, STEPS], 4),
        (["--nproc=2"], 7, ["launch"], 2),
        (["--fresh", "--nproc=2"], 7, ["launch", "--fresh"], 2),
        (["checkpoint.interval=5", "--nproc=2"], 7, ["launch", "checkpoint.interval=5"], 2),
    ],
)
def test_what_a_command_line_does(
    write_config: ConfigWriter,
    gspo: Command,
    calls: Calls,
    words: list[str],
    code: int,
    does: list[str],
    world_size: int,
) -> None:
    path = write_config()
    assert gspo("train", path, *words)[0] == code
    what, *given = does
    if what == "train":
        options = [word.removeprefix("--") for word in given if word.startswith("--")]
        overrides = [word for word in given if not word.startswith("--")]
        assert calls == [("train", load_config(path, overrides), *options)]
    else:
        # The launcher passes the same arguments to the ranks. The launcher also knows whether the
        # run saves checkpoints.
        command = [sys.executable, "-m", "gspo_megatron", "train", str(path), *given]
        saves = ("saves",) if "checkpoint.interval=5" in given else ()
        assert calls == [("launch", command, world_size, *saves)]


def test_a_change_that_a_phase_replaces_is_told(
    write_config: ConfigWriter, gspo: Command, calls: Calls, tmp_path: Path
) -> None:
    phases = "training.phases=[{until_step: 3}, {optimizer: {learning_rate: 1e-3}}]"
    words = [phases, "training.steps=9", "checkpoint.interval=1", f"logging.dir={tmp_path}/run"]
    path = write_config()
    add(load_config(path, words), Position("rl", 3))
    code, _, err = gspo("train", path, "--change", *words, "optimizer.learning_rate=0.5")
    told = "warning: optimizer.learning_rate: training.phases sets another value for step 4; change"
    assert code == 0 and told in err
    code, _, err = gspo("train", path, "--change", *words, "rollout.temperature=0.5")
    assert code == 0 and "training.phases sets" not in err
    assert [what for what, *_ in calls] == ["train", "train"]


def test_a_finished_run_gets_the_report_that_a_kill_prevented(
    write_config: ConfigWriter, gspo: Command, tmp_path: Path
) -> None:
    """A run was killed after its last checkpoint. The report is missing or, if the run had been
    continued with more steps, it is the report of the earlier end."""
    words = ["training.steps=3", "checkpoint.interval=1", f"logging.dir={tmp_path}/run"]
    path, report = write_config(), tmp_path / "run" / "report.html"
    add(load_config(path, words), Position("rl", 3))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text('{"step": 3, "reward/mean": 0.5}\n')
    assert gspo("train", path, *words)[0] == 0
    text = report.read_text()
    report.write_text("the earlier end")
    os.utime(report, ns=(0, metrics.stat().st_mtime_ns - 1))
    assert gspo("train", path, *words)[0] == 0
    assert report.read_text() == text
    before = report.stat()
    assert gspo("train", path, *words)[0] == 0
    assert report.stat() == before


def test_a_pod_launches_the_ranks_of_its_machine(
    write_config: ConfigWriter, gspo: Command, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "localhost"}
    for name, text in pod.items():
        monkeypatch.setenv(name, text)
    path = write_config()
    assert gspo("train", path, "--nproc=2", LAYOUT)[0] == 7
    command = [sys.executable, "-m", "gspo_megatron", "train", str(path), LAYOUT]
    node = Node(1, 2, None, "localhost", 29500, "PET_NNODES")
    assert calls == [("launch", command, 4, node)]


def test_a_rank_trains_and_launches_nothing(
    write_config: ConfigWriter, gspo: Command, calls: Calls
) -> None:
    os.environ |= {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    path = write_config()
    assert gspo("train", path, "parallel.layout=tp=2", "--nproc", 4)[0] == 0
    assert calls == [("train", load_config(path, ["parallel.layout=tp=2"]))]


def test_a_world_size_that_does_not_fit_is_refused_before_anything_starts(
    write_config: ConfigWriter, gspo: Command, calls: Calls
) -> None:
    words = ("train", write_config(), "parallel.layout=tp=2", "rollout.group_size=1")
    code, _, err = gspo(*words, "--nproc", 3)
    assert "world size = 3: not divisible" in err and "rollout.group_size = 1" in err
    assert (code, calls) == (2, [])


def test_the_entry_file_is_the_same_command(
    write_config: ConfigWriter, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(gspo_megatron.__file__).parents[1] / "pretrain_scripts" / "train_gspo.py"
    path = write_config()
    monkeypatch.setattr(sys, "argv", [str(script), str(path), "training.steps=3"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(script), run_name="__main__")
    assert caught.value.code == 0
    assert calls == [("train", load_config(path, ["training.steps=3"]))]


def test_the_layout_decides_unless_told_otherwise(
    write_config: ConfigWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(layout: str, nproc: int | None = None, env_size: int | None = None) -> int:
        config = load_config(write_config(), [f"parallel.layout={layout}"])
        return decide_world_size(config, nproc, env_size)

    assert decide("tp=1") == 1
    assert decide("tp=2,pp=2,dp=2") == 8
    assert decide("tp=2", 6) == decide("tp=2", None, 6) == decide("tp=1", 6, 6) == 6
    with pytest.raises(UserError, match="--nproc 2: this process is already one of 4 ranks"):
        decide("tp=1", 2, 4)
    # The layout of a cluster must not be started on one machine by mistake.
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with pytest.raises(UserError, match="takes 256 ranks.*--nproc 256"):
        decide("pp=4,ep=8,dp=64")
    assert decide("pp=4,ep=8,dp=64", 256) == 256
