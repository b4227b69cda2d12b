"""Experiment trackers behind one small interface: TensorBoard, Weights & Biases, MLflow.

Trackers hold copies of metrics.jsonl. A tracker that fails during a run is dropped with a warning.
If a resumed run repeats a step, its metrics are not sent again: a tracker keeps the first metrics
of a step. After a rollback, and if values of the configuration changed, repeated steps have other
metrics, so they are sent again. When a run is resumed, each tracker gets the records that it has
not got yet. A tracker that is new to the run gets all records.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from gspo_megatron.errors import DataError, UserError, gathered_in
from gspo_megatron.files import write_atomically
from gspo_megatron.observe.metrics_files import (
    METRICS_FILE,
    NOTHING,
    RL,
    jsonable,
    phase_of,
    position_of,
    read_json_lines,
    read_metrics,
)

# A file in the run folder. It has one line for each tracker: phase and step of the last record that
# was sent to it.
SENT_FILE = "trackers.json"
_AT_ONCE = 100  # MLflow's limit of parameters in one request
_LONGEST_PARAMETER = 500  # characters; MLflow's limit in all supported versions

_logger = logging.getLogger(__name__)


class RunEnd(Enum):
    """How one start of a run has ended. The names are those of MLflow."""

    FINISHED = auto()
    KILLED = auto()  # stopped and saved, or at the border of a phase
    FAILED = auto()


class Tracker(NamedTuple):
    """The functions that send a step to one tracker and close it."""

    log: Callable[[int, Mapping[str, Any]], object]
    close: Callable[[RunEnd], object]


def _open_tensorboard(run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """Open event files under RUN/tensorboard."""
    module = _require("torch.utils.tensorboard", "tensorboard")
    writer = module.SummaryWriter(log_dir=str(run_dir / "tensorboard"))

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in tracked_numbers(metrics).items():
            writer.add_scalar(name, value, global_step=step)
        writer.flush()

    return Tracker(log, lambda _: writer.close())


def _open_wandb(run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """Open a Weights & Biases run. If our run is resumed, the same Weights & Biases run
    continues."""
    wandb = _require("wandb", "wandb")
    remembered = run_dir / "wandb_run_id"
    run_id = _remembered_in(remembered)
    run = wandb.init(
        dir=str(run_dir), name=run_dir.name, id=run_id, resume="allow", config=dict(config)
    )
    if run.id != run_id:  # a full disk must not lose an id that is known
        remembered.write_text(f"{run.id}\n")
    # wandb's own step must grow with every call. So the step of our run is sent as a metric called
    # "step".
    run.define_metric("*", step_metric="step")

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        run.log({**tracked_numbers(metrics), "step": step})

    return Tracker(log, lambda end: run.finish(exit_code=int(end is RunEnd.FAILED)))


def _open_mlflow(run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """Open an MLflow run. If our run is resumed, the same MLflow run continues."""
    mlflow = _require("mlflow", "mlflow")
    entities = importlib.import_module("mlflow.entities")
    remembered = run_dir / "mlflow_run_id"
    client = mlflow.tracking.MlflowClient()
    if (run_id := _remembered_in(remembered)) is not None:
        client.update_run(run_id, status="RUNNING")
    else:
        run_id = mlflow.start_run(run_name=run_dir.name).info.run_id
        mlflow.end_run("RUNNING")  # close the global run, because we log by the client
        # written first, so that after a failure below no second run is begun
        remembered.write_text(f"{run_id}\n")
        pairs = flattened(config).items()
        params = [entities.Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in pairs]
        for start in range(0, len(params), _AT_ONCE):
            client.log_batch(run_id, params=params[start : start + _AT_ONCE])

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        now = int(time.time() * 1000)
        numbers = tracked_numbers(metrics).items()
        client.log_batch(run_id, [entities.Metric(key, value, now, step) for key, value in numbers])

    return Tracker(log, lambda end: client.set_terminated(run_id, status=end.name))


def _remembered_in(path: Path) -> str | None:
    """Return the id in a file, or None if there is no file. A file on a full disk, or of a process
    that was killed while it wrote the file, is empty."""
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None


def flattened(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return a configuration as a flat dict, with keys such as "rollout.group_size"."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


_TRACKERS = {"tensorboard": _open_tensorboard, "wandb": _open_wandb, "mlflow": _open_mlflow}
_ADVICE = {
    "tensorboard": "see that the run folder can be written",
    "wandb": "log in with `wandb login`, or keep the run on this machine with WANDB_MODE=offline",
    "mlflow": "set MLFLOW_TRACKING_URI to the server, or to a database, as sqlite:////path/mlflow.db",
}


class TrackerSet:
    """Several trackers as one. A tracker that raises an error is dropped; the other trackers go
    on."""

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        run_dir: Path | None = None,
        sent: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Take open trackers. `sent` has phase and step of the last record that each tracker got in
        earlier starts of the run. SENT_FILE in `run_dir` stores `sent` for the next start."""
        self._trackers = dict(trackers)
        self._run_dir = run_dir
        self._sent = {name: dict(record) for name, record in (sent or {}).items()}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send one step's metrics to every tracker that does not have the step yet."""
        self._send({**metrics, "step": step})
        self._note()

    def catch_up(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Send each tracker the records of earlier starts that it has not got yet."""
        for record in sorted(records, key=position_of):
            self._send(record)
        self._note()

    def forget_after(self, phase: str, step: int) -> None:
        """Send the records of later steps again, because these steps are repeated with other
        prompts or values."""
        last = {"phase": phase, "step": step}
        self._sent = {name: min(sent, last, key=position_of) for name, sent in self._sent.items()}
        self._note()

    def close(self, end: RunEnd) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close(end)
            except Exception:
                _logger.warning("tracker %s could not be closed", name, exc_info=True)
        self._trackers.clear()

    def _send(self, record: Mapping[str, Any]) -> None:
        position, metrics = position_of(record), jsonable(record)
        step = metrics.pop("step")
        for name, tracker in list(self._trackers.items()):
            if name in self._sent and position <= position_of(self._sent[name]):
                continue
            try:
                tracker.log(step, metrics)
            except Exception:
                del self._trackers[name]
                _logger.warning("tracker %s failed and is no longer used", name, exc_info=True)
            else:
                self._sent[name] = {"phase": phase_of(record), "step": step}

    def _note(self) -> None:
        """Write SENT_FILE for the next start.

        Call it after sending a record. If the run is killed before this call, the record is sent
        twice. If this call came first, a kill could leave a record unsent."""
        if self._run_dir is None or not self._sent:
            return
        lines = [json.dumps({"tracker": name, **last}) for name, last in self._sent.items()]
        try:
            write_atomically(self._run_dir / SENT_FILE, "".join(f"{x}\n" for x in lines).encode())
        except DataError:
            self._run_dir = None
            _logger.warning(
                "the record of what each tracker was sent is no longer written", exc_info=True
            )


def open_trackers(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any] | None = None
) -> TrackerSet:
    """Open the named trackers ("tensorboard", "wandb", "mlflow").

    Call this before a resumed run truncates metrics.jsonl; afterwards `catch_up` sends the records
    that are left. `config` is the run's configuration as plain data. Raises UserError for a
    missing package. If a tracker cannot be opened, a new run raises UserError; a resumed run warns
    and goes on without it. Raises DataError if metrics.jsonl is damaged.
    """
    sent = _sent_before(names, run_dir) if names else {}
    opened: dict[str, Tracker] = {}
    try:
        for name in dict.fromkeys(names):
            if (tracker := _open(name, run_dir, config or {})) is not None:
                opened[name] = tracker
    except UserError:
        TrackerSet(opened).close(RunEnd.FAILED)
        raise
    return TrackerSet(opened, run_dir, sent)


def require_packages(names: Sequence[str]) -> None:
    """Raise UserError with a line for each tracker whose package cannot be imported."""
    problems: list[str] = []
    for name in names:
        with gathered_in(problems):
            _require(name, name)
    if problems:
        raise UserError("\n".join(problems))


def _open(name: str, run_dir: Path, config: Mapping[str, Any]) -> Tracker | None:
    try:
        return _TRACKERS[name](run_dir, config)
    except UserError:  # the tracker's package is missing
        raise
    except Exception as error:
        if (run_dir / METRICS_FILE).exists():
            _logger.warning("tracker %s cannot be opened and is not used", name, exc_info=True)
            return None
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"logging.trackers = {name}: cannot be opened: {what}; {_ADVICE[name]}, or take {name} "
            "off the list"
        ) from error


def _sent_before(names: Sequence[str], run_dir: Path) -> dict[str, Mapping[str, Any]]:
    """Return the last record that each tracker got in earlier starts. If SENT_FILE is damaged, all
    of metrics.jsonl counts as sent. Raises DataError if metrics.jsonl is needed and damaged."""
    path = run_dir / SENT_FILE
    if not path.exists():
        return dict.fromkeys(names, NOTHING)
    with contextlib.suppress(DataError, KeyError, ValueError, TypeError):
        lines = read_json_lines(path)
        for line in lines:
            if not isinstance(line["step"], int):
                raise ValueError(line["step"])
            position_of(line)  # raises DataError if the phase is unknown
        if lines:
            return dict.fromkeys(names, NOTHING) | {line["tracker"]: line for line in lines}
    last = max(read_metrics(run_dir), key=position_of, default=NOTHING)
    return {name: {"phase": phase_of(last), "step": last["step"]} for name in names}


def tracked_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record; outside RL their names begin with the phase."""
    phase = phase_of(metrics)
    prefix = "" if phase == RL else f"{phase}/"
    return {
        prefix + name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _require(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"logging.trackers = {package}: the package `{package}` cannot be imported ({error}); "
            f"install it with `pip install {package}` or take {package} off the list"
        ) from error
