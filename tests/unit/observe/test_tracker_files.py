"""The files that the packages of trackers wrote, read back. The runs are new or resumed, lose
steps, repeat steps, or share a project with another run."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import Config
from gspo_megatron.config.load import parse_config
from gspo_megatron.observe.run_logger import RunLogger
from gspo_megatron.observe.trackers import SENT_FILE, RunEnd
from tests.programs import wait_until

Points = list[tuple[int, float]]  # step and value, in the order of writing
Reader = Callable[[Path], Points]  # reads the points of the metric reward/mean of a run


def read_tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), purge_orphaned_data=False)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def read_wandb(run: Path) -> Points:
    run_id = (run / "wandb_run_id").read_text().strip()
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.parent.name)
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    found = []
    for path in files:
        # `finish` returns shortly before W&B's own process has written the last record.
        assert wait_until(
            lambda path=path: any(each.HasField("exit") for each in wandb_records(path))
        )
        for record in wandb_records(path):
            assert not record.run.run_id or record.run.display_name == run.name
            items = {(i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item}
            if "reward/mean" in items:
                found.append((json.loads(items["step"]), json.loads(items["reward/mean"])))
    return found


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, which is a LevelDB log with blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:  # the rest of the block is too short for a header
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of a record
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_mlflow(run: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client, run_id = MlflowClient(), (run / "mlflow_run_id").read_text().strip()
    found = client.get_run(run_id)
    assert (found.info.run_name, found.info.status) == (run.name, "FINISHED")
    assert found.data.params["objective.name"] == "gspo"
    return [(each.step, each.value) for each in client.get_metric_history(run_id, "reward/mean")]


READERS: dict[str, Reader] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}


@pytest.fixture(params=READERS)
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each tracker whose package is installed. Nothing is sent to its servers."""
    name = str(request.param)
    pytest.importorskip(name)
    folder = request.getfixturevalue("tmp_path")
    if name == "wandb":
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
    elif name == "mlflow":
        pytest.importorskip("sqlalchemy", reason="MLflow keeps runs on this machine with it")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    return name


def config_of(run: Path, tracker: str) -> Config:
    logging = {"dir": str(run), "trackers": [tracker], "plots": False}
    return parse_config({"data": {"tokenizer": "none.model"}, "logging": logging})


def reward(run: Path, step: int) -> float:
    """A value that float32 represents exactly."""
    return step + (0.5 if run.name == "one" else 0.25)


def write(run: Path, tracker: str, steps: Sequence[int], after: int | None = None) -> None:
    """Write these steps as one start of a run. A resumed run continues after step `after`."""
    logger = RunLogger(config_of(run, tracker), True, None if after is None else ("rl", after))
    for step in steps:
        logger.write("rl", step, {"reward/mean": reward(run, step), "grad_norm": float("nan")})
    logger.close(RunEnd.FINISHED)


def of_steps(run: Path, steps: Sequence[int]) -> Points:
    return [(step, reward(run, step)) for step in steps]


def test_what_a_tracker_has_of_runs_that_were_resumed(tracker: str, tmp_path: Path) -> None:
    one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    read = READERS[tracker]
    write(one, tracker, range(4))
    write(two, tracker, range(2))  # a second run in the same project
    assert read(one) == of_steps(one, range(4)) and read(two) == of_steps(two, range(2))

    # Steps 2 and 3 were not saved, so the resumed run repeats them.
    write(one, tracker, [2, 3, 4], after=1)
    assert read(one) == of_steps(one, range(5))

    # The note names the last step that the tracker got.
    write(one, tracker, [5, 6], after=4)
    note = json.loads((one / SENT_FILE).read_text())
    assert (note["tracker"], note["step"]) == (tracker, 6)
    write(two, tracker, [2], after=1)
    # The records of steps 3 and 4 are written but not sent, as if the run was killed before it sent
    # them. The next start sends step 3.
    with (two / "metrics.jsonl").open("a") as file:
        for step in (3, 4):
            file.write(json.dumps({"phase": "rl", "step": step, "reward/mean": reward(two, step)}))
            file.write("\n")
    write(two, tracker, [4, 5], after=3)
    assert read(one) == of_steps(one, range(7))
    assert read(two) == of_steps(two, range(6))


@pytest.mark.parametrize("tracker", ["tensorboard"], indirect=True)
def test_a_tracker_that_is_added_later_has_the_whole_run(tracker: str, tmp_path: Path) -> None:
    run = tmp_path / "one"
    config = config_of(run, tracker)
    logging = config.logging.model_copy(update={"trackers": []})
    logger = RunLogger(config.model_copy(update={"logging": logging}), True)
    for step in range(3):
        logger.write("rl", step, {"reward/mean": reward(run, step)})
    logger.close()
    assert not (run / SENT_FILE).exists()
    write(run, tracker, [2, 3], after=1)
    assert READERS[tracker](run) == of_steps(run, range(4))


@pytest.mark.parametrize("tracker", ["mlflow"], indirect=True)
def test_a_run_of_mlflow_ends_as_our_run_does(tracker: str, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    run, ends = tmp_path / "one", (RuntimeError("failed"), None)
    for after, error, status in zip((None, -1), ends, ("FAILED", "KILLED"), strict=True):
        logger = RunLogger(config_of(run, tracker), True, after and ("rl", after))
        with contextlib.suppress(RuntimeError), logger:
            run_id = (run / "mlflow_run_id").read_text().strip()
            assert MlflowClient().get_run(run_id).info.status == "RUNNING"
            if error is not None:
                raise error
        assert MlflowClient().get_run(run_id).info.status == status
