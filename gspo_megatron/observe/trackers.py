"""Experiment trackers behind one small interface: TensorBoard, Weights & Biases, MLflow.

They are copies for convenience; metrics.jsonl is the record. So a tracker that fails in the middle
of a run is dropped with a logged warning, and the run goes on.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from gspo_megatron.errors import UserError
from gspo_megatron.observe.records import RL, phase_of
from gspo_megatron.observe.sinks import jsonable

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where the figures of a run are shown besides its own folder."""

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
        # wandb's own step can only grow, while each phase counts from its own start.
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("warm_start/*", step_metric="warm_start/step")

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

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send one step's figures to every tracker."""
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


def open_trackers(
    names: Sequence[str], run_dir: str | Path, config: Mapping[str, Any] | None = None
) -> TrackerSet:
    """Open the named trackers ("tensorboard", "wandb", "mlflow") for a run.

    `config` is the run's configuration as plain data, shown by the trackers that show one.
    Raises UserError for an unknown name and for one whose package is not installed.
    """
    unknown = [name for name in names if name not in _TRACKERS]
    if unknown:
        raise UserError(
            f"logging.trackers = {', '.join(unknown)}: unknown; choose from {', '.join(_TRACKERS)}"
        )
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    return TrackerSet({name: _TRACKERS[name](run_dir, config or {}) for name in names})


def tracked_numbers(metrics: Mapping[str, Any], keep_step: bool = False) -> dict[str, float]:
    """The finite numbers of a record; names of another phase than RL begin with the phase."""
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
