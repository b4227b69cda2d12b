"""Experiment trackers behind one small interface: TensorBoard, Weights & Biases, MLflow.

Trackers hold copies; metrics.jsonl is the record. A tracker that fails during a run is dropped with
a logged warning, and the run goes on.

A resumed run repeats the steps after its checkpoint. A tracker cannot delete what it was sent, so
these steps are not sent again: it keeps their first metrics, while metrics.jsonl has the last.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from gspo_megatron.errors import UserError
from gspo_megatron.observe.metrics_files import (
    RL,
    jsonable,
    parse_record,
    phase_of,
    position_of,
    read_metrics,
)

SENT_FILE = "trackers.json"  # in the run folder: phase and step of the last record that was sent

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A service or file that shows the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files under RUN/tensorboard."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        module = _require("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in tracked_numbers(metrics).items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run; a resumed run goes on in the same one."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        wandb = _require("wandb", "wandb", "wandb")
        remembered = run_dir / "wandb_run_id"
        run_id = remembered.read_text().strip() if remembered.exists() else None
        self._run = wandb.init(
            dir=str(run_dir), name=run_dir.name, id=run_id, resume="allow", config=dict(config)
        )
        remembered.write_text(f"{self._run.id}\n")
        # wandb's internal step must grow with every call; "step" is the step of the run.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(tracked_numbers({**metrics, "step": step}, keep_step=True))

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """An MLflow run; a resumed run goes on in the same one."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        mlflow = _require("mlflow", "mlflow", "mlflow")
        remembered = run_dir / "mlflow_run_id"
        self._client = mlflow.tracking.MlflowClient()
        if remembered.exists():
            self._run_id = remembered.read_text().strip()
            return
        run = mlflow.start_run(run_name=run_dir.name)
        mlflow.end_run()  # logging goes through the client, so no global run needs to stay open
        self._run_id = run.info.run_id
        remembered.write_text(f"{self._run_id}\n")
        for section, values in config.items():
            self._client.log_param(self._run_id, section, str(values)[:500])  # MLflow's limit

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in tracked_numbers(metrics).items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class TrackerSet:
    """Several trackers as one; a tracker that raises is dropped and the others stay."""

    def __init__(
        self, trackers: Mapping[str, Tracker], sent: Mapping[str, Any] | None = None
    ) -> None:
        """`sent`: phase and step of the last record that an earlier start has sent."""
        self._trackers = dict(trackers)
        self._sent = None if sent is None else position_of(sent)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send one step's metrics to every tracker, unless an earlier start has sent them."""
        if self._sent is not None and position_of({**metrics, "step": step}) <= self._sent:
            return
        metrics = jsonable(metrics)
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, metrics)
            except Exception:
                del self._trackers[name]
                _logger.warning("tracker %s failed and is no longer used", name, exc_info=True)

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception:
                _logger.warning("tracker %s could not be closed", name, exc_info=True)
        self._trackers.clear()


_TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def note_sent(run_dir: str | Path) -> None:
    """Save the last step that the trackers of a run were sent: the last one of metrics.jsonl. To be
    called before a resumed run truncates that file.

    Raises UserError where this cannot be written, DataError where metrics.jsonl is damaged.
    """
    path = Path(run_dir) / SENT_FILE
    records = [*read_metrics(run_dir), *filter(None, [_sent(run_dir)])]
    if not records:
        return
    last = max(records, key=position_of)
    content = json.dumps({"phase": phase_of(last), "step": last["step"]}) + "\n"
    try:
        path.write_text(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def _sent(run_dir: Path | str) -> Mapping[str, Any] | None:
    """What `note_sent` wrote; None where it was killed while writing."""
    try:
        found = parse_record((Path(run_dir) / SENT_FILE).read_bytes())
    except OSError:
        return None
    return found if found and {"phase", "step"} <= found.keys() else None


def open_trackers(
    names: Sequence[str], run_dir: str | Path, config: Mapping[str, Any] | None = None
) -> TrackerSet:
    """Open the named trackers ("tensorboard", "wandb", "mlflow"); on resume, after `note_sent`.

    `config` is the run's configuration as plain data. Raises UserError for an unknown name and for
    one whose package is not installed.
    """
    unknown = [name for name in names if name not in _TRACKERS]
    if unknown:
        raise UserError(
            f"logging.trackers = {', '.join(unknown)}: unknown; choose from {', '.join(_TRACKERS)}"
        )
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    trackers = {name: _TRACKERS[name](run_dir, config or {}) for name in names}
    return TrackerSet(trackers, _sent(run_dir))


def tracked_numbers(metrics: Mapping[str, Any], keep_step: bool = False) -> dict[str, float]:
    """The finite numbers of a record; outside RL their names begin with the phase."""
    phase = phase_of(metrics)
    prefix = "" if phase == RL else f"{phase}/"
    numbers = {}
    for name, value in metrics.items():
        if name == "step" and not keep_step:
            continue
        if isinstance(value, (int, float)) and math.isfinite(value):
            numbers[prefix + name] = float(value)
    return numbers


def _require(module: str, package: str, tracker: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"logging.trackers = {tracker}: the package `{package}` cannot be imported ({error}); "
            f"install it with `pip install {package}` or take {tracker} off the list"
        ) from error
