"""Functions that ranks run with the stand-in for Transformer Engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.models import transformer_config
from gspo_megatron.platform.groups import set_up_model_parallel, tear_down_model_parallel
from tests.cuda_rehearsal.engine import package
from tests.cuda_rehearsal.engine.precision import region
from tests.cuda_rehearsal.tasks import train
from tests.gpu import one_step

# The compute capability of the GPU that the device stands for, by precision; otherwise (9, 0).
CAPABILITIES = {"mxfp8": (10, 0)}
CUDA = (12, 9)  # torch is taken for a build for this version of CUDA


def with_calls(task: Callable[..., Any], **arguments: Any) -> tuple[Any, set[str]]:
    """Run a task. Returns its result, and the names of Transformer Engine that it has called."""
    package.reached.clear()
    region.reset()
    return task(**arguments), set(package.reached)


@contextlib.contextmanager
def _gpu_for(precision: str) -> Iterator[None]:
    """Let the device represent a GPU that supports the precision."""
    capability = CAPABILITIES.get(precision, (9, 0))
    with (
        mock.patch.object(transformer_config, "built_for_cuda", return_value=CUDA),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
    ):
        yield


def train_on_a_gpu(config: Config) -> list[dict[str, float]]:
    """Run tasks.train on a GPU that supports the precision of the configuration."""
    with _gpu_for(config.training.precision):
        return train(config)


def gpu_task(name: str, folder: Path, precision: str = "fp32", **arguments: Any) -> Any:
    """Run a task of tests/gpu in this rank's own process group."""
    alone = one_step.config_of("fp32", "torch_native")
    set_up_model_parallel(resolve_parallel(alone, 1), seed=1)
    if name != "make":
        arguments["precision"] = precision
    try:
        with _gpu_for(precision):
            return getattr(one_step, name)(folder, **arguments)
    finally:
        tear_down_model_parallel()
