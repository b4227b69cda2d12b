"""Experiment trackers behind one small interface: TensorBoard, Weights & Biases, MLflow.

Trackers hold copies of metrics.jsonl. One that fails during a run is dropped with a warning. Steps
that a resumed run repeats are not sent again: a tracker keeps their first metrics.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from gspo_megatron.errors import UserError, gathered_in
from gspo_megatron.files import write_atomically
from gspo_megatron.observe.metrics_files import (
    RL,
    Record,
    jsonable,
    phase_of,
    position_of,
    read_json_lines,
    read_metrics,
)

SENT_FILE = "trackers.json"  # in the run folder: phase and step of the last record that was sent

_logger = logging.getLogger(__name__)


class Tracker(NamedTuple):
    """How a service or file that shows the metrics of a run is sent a step, and closed."""

    log: Callable[[int, Mapping[str, Any]], object]
    close: Callable[[], object]


def _open_tensorboard(run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """Event files under RUN/tensorboard."""
    module = _require("torch.utils.tensorboard", "tensorboard")
    writer = module.SummaryWriter(log_dir=str(run_dir / "tensorboard"))

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in tracked_numbers(metrics).items():
            writer.add_scalar(name, value, global_step=step)
        writer.flush()

    return Tracker(log, writer.close)


def _open_wandb(run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """A Weights & Biases run; a resumed run goes on in the same one."""
    wandb = _require("wandb", "wandb")
    remembered = run_dir / "wandb_run_id"
    run_id = remembered.read_text().strip() if remembered.exists() else None
    run = wandb.init(
        dir=str(run_dir), name=run_dir.name, id=run_id, resume="allow", config=dict(config)
    )
    remembered.write_text(f"{run.id}\n")
    # wandb's internal step must grow with every call; "step" is the step of the run.
    run.define_metric("*", step_metric="step")

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        run.log(tracked_numbers({**metrics, "step": step}))

    return Tracker(log, run.finish)


def _open_mlflow(run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """An MLflow run; a resumed run goes on in the same one."""
    mlflow = _require("mlflow", "mlflow")
    remembered = run_dir / "mlflow_run_id"
    client = mlflow.tracking.MlflowClient()
    if remembered.exists():
        run_id = remembered.read_text().strip()
    else:
        run_id = mlflow.start_run(run_name=run_dir.name).info.run_id
        mlflow.end_run()  # logging goes through the client, so no global run needs to stay open
        remembered.write_text(f"{run_id}\n")
        for section, values in config.items():
            client.log_param(run_id, section, str(values)[:500])  # MLflow's limit

    def log(step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in tracked_numbers(metrics).items():
            client.log_metric(run_id, name, value, step=step)

    return Tracker(log, partial(client.set_terminated, run_id))


_TRACKERS = {"tensorboard": _open_tensorboard, "wandb": _open_wandb, "mlflow": _open_mlflow}


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


def open_trackers(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any] | None = None
) -> TrackerSet:
    """Open the named trackers ("tensorboard", "wandb", "mlflow"), which go on after the last step
    of metrics.jsonl; to be called before a resumed run truncates that file.

    `config` is the run's configuration as plain data. Raises UserError for an unknown name and for
    one whose package is not installed, DataError where metrics.jsonl is damaged.
    """
    unknown = [name for name in names if name not in _TRACKERS]
    if unknown:
        raise UserError(
            f"logging.trackers = {', '.join(unknown)}: unknown; choose from {', '.join(_TRACKERS)}"
        )
    trackers = {name: _TRACKERS[name](run_dir, config or {}) for name in names}
    return TrackerSet(trackers, _last_sent(run_dir) if names else None)


def require_packages(names: Sequence[str]) -> None:
    """Raise UserError, with a line for each, where packages of trackers cannot be imported."""
    problems: list[str] = []
    for name in names:
        with gathered_in(problems):
            _require(name, name)
    if problems:
        raise UserError("\n".join(problems))


def _last_sent(run_dir: Path) -> Record | None:
    """The last record that earlier starts have sent; SENT_FILE remembers it for the next start."""
    path = run_dir / SENT_FILE
    earlier = read_json_lines(path) if path.exists() else []
    last = max([*read_metrics(run_dir), *earlier], key=position_of, default=None)
    if last is not None:
        content = json.dumps({"phase": phase_of(last), "step": last["step"]}) + "\n"
        write_atomically(path, content.encode())
    return last


def tracked_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record; outside RL their names begin with the phase."""
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
