from __future__ import annotations

import json
import logging
import resource
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_megatron.config import parse_config
from gspo_megatron.errors import UserError
from gspo_megatron.observe.history import kept_metrics
from gspo_megatron.observe.metrics_files import MetricsWriter
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.observe.trackers import (
    _TRACKERS,
    SENT_FILE,
    RunEnd,
    Tracker,
    TrackerSet,
    flattened,
    open_trackers,
    tracked_numbers,
)


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("tracker", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")],
)
def test_a_missing_package_is_named_with_its_remedy(
    tracker: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # the import of this module fails
    with pytest.raises(UserError, match=f"logging.trackers = {tracker}: .*pip install {tracker}"):
        open_trackers([tracker], tmp_path)


def test_a_tracker_that_fails_is_dropped_and_the_others_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged: list[Mapping[str, Any]] = []
    closed: list[str] = []

    def fail(step: int, metrics: Mapping[str, Any]) -> None:
        raise ConnectionError("gone")

    bad = Tracker(fail, lambda end: closed.append("bad"))
    good = Tracker(
        lambda step, metrics: logged.append(metrics), lambda end: closed.append(f"good {end.name}")
    )
    trackers = TrackerSet({"bad": bad, "good": good})
    with caplog.at_level(logging.WARNING):
        trackers.log(1, {"loss": np.float32(0.5)})
        trackers.log(2, {"loss": 0.25})
    trackers.close(RunEnd.FAILED)
    assert [metrics["loss"] for metrics in logged] == [0.5, 0.25]
    assert closed == ["good FAILED"]
    assert [record.getMessage() for record in caplog.records] == [
        "tracker bad failed and is no longer used"
    ]


def test_only_finite_numbers_are_tracked_and_those_of_another_phase_under_its_name() -> None:
    record = {"phase": "rl", "loss": 0.5, "lr": None, "x": float("nan")}
    assert tracked_numbers(record) == {"loss": 0.5}
    assert tracked_numbers({**record, "phase": "sft"}) == {"sft/loss": 0.5}


class Run:
    """A run that crashes and starts again. It collects everything that its tracker receives."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, []
        self.folders: set[str] = set()  # folders in which a tracker was opened
        self.closed = 0

    def go_on(self, after: tuple[str, int] | None, *records: tuple[str, int]) -> None:
        """Start, drop the records after `after`, and write `records`. Each is (phase, step)."""
        with MetricsWriter(self.folder) as writer:
            trackers = open_trackers(["tensorboard"], self.folder)
            if after is not None:
                writer.truncate_after(after[1], after[0])
            for phase, step in records:
                writer.write({"phase": phase, "step": step, "loss": 0.5})
                trackers.log(step, {"phase": phase, "loss": 0.5})
            trackers.close(RunEnd.FINISHED)


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(tmp_path)

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            run.folders.add(log_dir)

        def add_scalar(self, name: str, value: float, global_step: int) -> None:
            assert value == 0.5
            run.steps.append((name, global_step))

        def flush(self) -> None: ...

        def close(self) -> None:
            run.closed += 1

    fake_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    return run


def test_steps_that_a_resumed_run_repeats_are_sent_once(crashing: Run) -> None:
    """The run crashes twice, the second time at an earlier step than the first time. Each step is
    still sent once."""
    earlier = [("sft", step) for step in (1, 2, 3)]
    crashing.go_on(None, *earlier, *(("rl", step) for step in range(5)))
    crashing.go_on(("rl", 1), ("rl", 2))
    crashing.go_on(("rl", 1), *(("rl", step) for step in range(2, 7)))
    assert crashing.steps == [
        *(("sft/loss", step) for step in (1, 2, 3)),
        *(("loss", step) for step in range(7)),
    ]
    assert crashing.folders == {str(crashing.folder / "tensorboard")} and crashing.closed == 3


def test_a_run_that_goes_back_into_an_earlier_phase_sends_what_is_new(crashing: Run) -> None:
    crashing.go_on(None, ("sft", 1), ("sft", 2))
    crashing.go_on(("sft", 1), ("sft", 2), ("sft", 3), ("rl", 1))
    assert crashing.steps == [("sft/loss", n) for n in (1, 2, 3)] + [("loss", 1)]


def test_a_record_that_was_never_sent_is_sent_by_the_next_start(crashing: Run) -> None:
    """The next start sends the records that the resumed run keeps and that are missing in the
    tracker. The run repeats all other steps."""
    crashing.go_on(None, ("rl", 1))
    with MetricsWriter(crashing.folder) as writer:
        for step in (2, 3):
            writer.write({"phase": "rl", "step": step, "loss": 0.5})
    trackers = open_trackers(["tensorboard"], crashing.folder)
    trackers.catch_up([{"phase": "rl", "step": step, "loss": 0.5} for step in (1, 2)])
    trackers.log(3, {"phase": "rl", "loss": 0.5})
    assert crashing.steps == [("loss", step) for step in (1, 2, 3)]


def test_a_tracker_that_failed_gets_what_it_missed_at_the_next_start(tmp_path: Path) -> None:
    got: dict[str, list[int]] = {"good": [], "bad": []}

    def fail_at_2(step: int, metrics: Mapping[str, Any]) -> None:
        if step == 2:
            raise ConnectionError("gone")
        got["bad"].append(step)

    good = Tracker(lambda step, metrics: got["good"].append(step), lambda: None)
    records = [{"phase": "rl", "step": step} for step in range(4)]
    first = TrackerSet({"good": good, "bad": Tracker(fail_at_2, lambda: None)}, tmp_path)
    for record in records:
        first.log(record["step"], {"phase": "rl"})
    sent = {line["tracker"]: line for line in map(json.loads, (tmp_path / SENT_FILE).open())}
    assert {name: line["step"] for name, line in sent.items()} == {"good": 3, "bad": 1}
    mended = Tracker(lambda step, metrics: got["bad"].append(step), lambda: None)
    TrackerSet({"good": good, "bad": mended}, tmp_path, sent).catch_up(records)
    assert got == {"good": [0, 1, 2, 3], "bad": [0, 1, 2, 3]}


def write(
    run: Run, steps: list[int], after: int | None = None, has_changed: bool = False
) -> RunLogger:
    """Start the run with a logger, and write these steps."""
    logging = {"dir": str(run.folder), "trackers": ["tensorboard"]}
    config = parse_config({"data": {"tokenizer": "none.model"}, "logging": logging})
    resumed_at = None if after is None else ("rl", after)
    logger = RunLogger(config, True, resumed_at, has_changed=has_changed)
    for step in steps:
        logger.write("rl", step, {"loss": 0.5})
    return logger


@pytest.mark.parametrize(
    ("rolls_back", "has_changed", "again"),
    [(False, False, []), (True, False, [2, 3]), (False, True, [2, 3])],
    ids=["a plain resume", "a rollback", "a change"],
)
def test_repeated_steps_are_sent_again_only_if_their_metrics_are_others(
    crashing: Run, rolls_back: bool, has_changed: bool, again: list[int]
) -> None:
    """After a rollback the prompts are others, and after a change the values."""
    logger = write(crashing, [1, 2, 3])
    if rolls_back:
        logger.go_back(1, kept_metrics(1))
        kept = (crashing.folder / kept_metrics(1)).read_text().splitlines()
        assert [json.loads(line)["step"] for line in kept] == [1, 2, 3]
    logger.close()
    write(crashing, [2, 3, 4], after=1, has_changed=has_changed).close()
    sent = [step for _, step in crashing.steps]
    assert sent == [1, 2, 3, *again, 4]
    write(crashing, [4], after=3).close()  # the next start knows what is sent
    assert [step for _, step in crashing.steps] == sent


def test_a_tracker_that_cannot_be_opened_ends_a_new_run_and_not_a_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**arguments: Any) -> None:
        raise RuntimeError("no API key")

    fake_module(monkeypatch, "wandb", init=init)
    wrong = (
        r"logging.trackers = wandb: cannot be opened: RuntimeError: no API key; .*=offline, or take"
    )
    closed: list[str] = []
    writer = types.SimpleNamespace(close=lambda: closed.append("tensorboard"))
    fake_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=lambda log_dir: writer)
    with pytest.raises(UserError, match=wrong):
        open_trackers(["tensorboard", "wandb"], tmp_path)
    assert closed == ["tensorboard"]
    MetricsWriter(tmp_path).close()
    with caplog.at_level(logging.WARNING):
        trackers = open_trackers(["wandb"], tmp_path)
    trackers.log(1, {"loss": 0.5})
    assert caplog.messages == ["tracker wandb cannot be opened and is not used"]


def test_a_run_whose_folder_cannot_be_written_ends_in_its_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[RunEnd] = []
    tracker = Tracker(lambda step, metrics: None, ends.append)
    monkeypatch.setitem(_TRACKERS, "tensorboard", lambda run_dir, config: tracker)
    run = tmp_path / "run"
    (run / "samples.jsonl").mkdir(parents=True)
    logging = {"dir": str(run), "trackers": ["tensorboard"]}
    config = parse_config({"data": {"tokenizer": "none.model"}, "logging": logging})
    with pytest.raises(UserError, match="samples.jsonl"):
        RunLogger(config, is_main=True)
    assert ends == [RunEnd.FAILED]


def test_the_keys_of_a_configuration_are_flat_for_mlflow() -> None:
    config = {"rollout": {"group_size": 8, "vllm": {"options": {}}}, "a": 1}
    flat = {"rollout.group_size": 8, "rollout.vllm.options": {}, "a": 1}
    assert flattened(config) == flat


@pytest.mark.parametrize("step", ["null", '"3"', "[1]", "1.5", "1"])
def test_half_a_note_and_one_without_a_step_count_for_nothing(step: str, crashing: Run) -> None:
    crashing.go_on(None, ("rl", 1))
    line = f'{{"tracker": "tensorboard", "phase": "rl", "step": {step}}}\n'
    (crashing.folder / SENT_FILE).write_text(line[:-9] if step == "1" else line)
    crashing.go_on(("rl", 1), ("rl", 2))
    assert crashing.steps == [("loss", 1), ("loss", 2)]


def test_a_tracker_that_failed_before_its_first_record_gets_all_at_the_next_start(
    crashing: Run,
) -> None:
    """The tracker's folder exists, but no record was sent."""
    (crashing.folder / "tensorboard").mkdir()
    crashing.go_on(None)
    with MetricsWriter(crashing.folder) as writer:
        writer.write({"phase": "rl", "step": 1, "loss": 0.5})
    trackers = open_trackers(["tensorboard"], crashing.folder)
    trackers.catch_up([{"phase": "rl", "step": 1, "loss": 0.5}])
    assert crashing.steps == [("loss", 1)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_an_id_that_a_full_disk_did_not_take_is_written_by_the_next_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start of the run has left an empty file. A later start on a full disk does not lose
    the id."""
    begun: list[str | None] = []  # the id with which each start goes on; None: it begins a run
    run = types.SimpleNamespace(
        id="abc123", define_metric=lambda *_, **__: None, finish=lambda **_: None
    )
    client = types.SimpleNamespace(
        update_run=lambda run_id, status: begun.append(run_id),
        set_terminated=lambda run_id, status: None,
        log_batch=lambda run_id, **_: None,
    )

    def start_run(run_name: str) -> Any:
        begun.append(None)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run.id))

    def init(**arguments: Any) -> Any:
        begun.append(arguments["id"])
        return run

    fake_module(monkeypatch, "wandb", init=init)
    tracking = types.SimpleNamespace(MlflowClient=lambda: client)
    fake_module(
        monkeypatch, "mlflow", tracking=tracking, start_run=start_run, end_run=lambda status: None
    )
    fake_module(monkeypatch, "mlflow.entities")
    remembered = tmp_path / f"{name}_run_id"
    remembered.touch()
    MetricsWriter(tmp_path).close()
    open_trackers([name], tmp_path).close(RunEnd.FINISHED)
    assert remembered.read_text() == "abc123\n"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        open_trackers([name], tmp_path).close(RunEnd.FINISHED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert remembered.read_text() == "abc123\n"
    assert begun == [None, "abc123"] and not caplog.messages
