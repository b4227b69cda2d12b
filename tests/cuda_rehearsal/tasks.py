"""Functions that ranks run in these tests, on devices and on CPUs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gspo_megatron.config import Config
from gspo_megatron.config.stages import StageConfig
from gspo_megatron.platform.collectives import all_gather_objects, on_main
from gspo_megatron.rl.policy_update import PolicyUpdater
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.rollout.vllm import weight_stream
from gspo_megatron.rollout.vllm.process import WORKER_FOLDER
from tests.cuda_rehearsal import runtime


def train(config: Config) -> list[dict[str, float]]:
    """Run the code of `gspo-megatron train`. Returns the metrics of its steps."""
    from gspo_megatron.config import check_config
    from gspo_megatron.rl.run import run_training

    check_config(config, dist.get_world_size(), for_training=True)
    done = run_training(config, fresh=False)
    assert done, "the run was stopped"
    return metrics_of(config)


def train_stage(config: StageConfig) -> list[dict[str, float]]:
    """Run the code of `gspo-megatron pretrain` or `sft`. Returns the metrics of its steps."""
    from gspo_megatron.cli.check_inputs import check_all
    from gspo_megatron.supervised.run import run_stage

    assert run_stage(*check_all(config, dist.get_world_size()))
    return metrics_of(config)


def metrics_of(config: Config | StageConfig) -> list[dict[str, float]]:
    lines = Path(config.logging.dir, "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not is_timing(name)}
        for line in lines
    ]


def is_timing(name: str) -> bool:
    return name.startswith("perf/") or name.endswith("seconds")


@dataclass
class Figures:
    """The measurements of one part of a run on a device."""

    # for generation, the token limit of a response; else the number of sequences, micro-batches or
    # steps
    size: int = 0
    doubles: int = 0  # the number of float64 elements that operations have made
    # The number of times that the host waited for the device, by place.
    waits: Counter[str] = field(default_factory=Counter)

    def ours(self) -> float:
        """The waits in the package's own lines, divided by the size."""
        places = (n for place, n in self.waits.items() if " at gspo_megatron/" in place)
        return sum(places) / self.size

    def all(self) -> float:
        return self.waits.total() / self.size

    def __str__(self) -> str:
        lines = [f"{n / self.size:.2f} x {place}" for place, n in self.waits.most_common()]
        return "\n".join([f"{self.ours():.2f} of {self.all():.2f}", *lines])


def measure(config: Config) -> dict[str, Figures]:
    """Run some steps. Returns the measurements of each part."""
    found: defaultdict[str, Figures] = defaultdict(Figures)

    def counted(owner: Any, name: str, part: str, size: Callable[..., int]) -> Any:
        native = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            made = runtime.doubles()
            with runtime.counted_waits() as waits:
                result = native(*args, **kwargs)
            found[part].doubles += runtime.doubles() - made
            found[part].size += size(*args)
            found[part].waits.update(waits)
            return result

        return mock.patch.object(owner, name, run)

    with contextlib.ExitStack() as stack:
        for patch in (
            counted(MegatronEngine, "generate", "generation", lambda *a: a[2].max_tokens),
            counted(PolicyUpdater, "build_micro_batches", "packing", lambda *a: len(a[2].tokens)),
            counted(PolicyUpdater, "compute_old_logprobs", "scoring", _count_scored),
            counted(PolicyUpdater, "train", "training", lambda *a: len(a[2])),
            counted(PolicyUpdater, "reduce_metrics", "metrics", lambda *a: 1),
        ):
            stack.enter_context(patch)
        train(config)
    return dict(found)


def _count_scored(updater: Any, mini_batches: Any) -> int:
    return sum(map(len, mini_batches))


def save(config: Config) -> dict[str, float]:
    """Save in the background, and wait for the end at once. Returns the sums of the tensors that
    are read back."""
    from gspo_megatron.checkpoint.tensors import load_model, save_tensors
    from tests.parallel.checkpoints import start

    policy, trainer = start(config)
    with tempfile.TemporaryDirectory() as own:
        folder = all_gather_objects(own)[0]
        save_tensors(Path(folder), policy, trainer, asynchronous=True).result()
        parameters = dict(policy.models[0].named_parameters())
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
        load_model(Path(folder), policy)
        all_gather_objects(None)  # rank 0 removes its folder after all ranks have read it
    return {
        name: float(parameter.detach().double().sum()) for name, parameter in parameters.items()
    }


# The worker of a server, without vLLM. If there are devices, the worker has a device of its own. It
# prints the tensors that it has loaded.
_WORKER = """
import json, sys, torch
from gspo_vllm_worker import GspoWorker
class Worker(GspoWorker):
    rank, device = 0, torch.device(sys.argv[1])
    def reload_weights(self, weights_iterator):
        for name, tensor in weights_iterator:
            self.loaded[name] = str(tensor.dtype), tensor.double().sum().item()
if Worker.device.type == "cuda":
    torch.cuda.set_device(Worker.device)
worker = Worker()
for line in sys.stdin:
    worker.loaded = {}
    assert worker.receive_weights(json.loads(line), "server", 2) == len(worker.loaded)
    print(json.dumps(worker.loaded), flush=True)
"""


def stream_weights(config: Config) -> list[dict[str, tuple[str, float]]]:
    """Send two versions of the weights to the worker of a server. Returns, by name, the dtype and
    the sum of each tensor that the worker has loaded."""
    from gspo_megatron.hf.export import stream_hf, stream_specs
    from tests.parallel.models import build_on_ranks

    policy = build_on_ranks(config)
    device = next(policy.models[0].parameters()).device
    away = torch.device("cuda", dist.get_world_size()) if device.type == "cuda" else device
    is_main, found = dist.get_rank() == 0, []
    if is_main:
        stream = weight_stream.WeightStream("127.0.0.1", device, seconds=60)
        worker = _start_worker(away)
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for model in policy.models:
                for parameter in model.parameters():
                    parameter.mul_(factor)
        tensors = stream_hf(policy)
        if is_main:
            with mock.patch.object(weight_stream, "BUCKET_BYTES", 10_000):
                plan = stream.plan(stream_specs(policy))
            assert len(plan["buckets"]) > 3 and worker.stdin and worker.stdout
            worker.stdin.write(json.dumps(plan) + "\n")
            worker.stdin.flush()
            stream.send(plan, {"server": 1}, tensors, lambda: ["server"])
            found.append(json.loads(worker.stdout.readline()))
        else:
            for _ in tensors:
                pass
    if is_main:
        worker.communicate()
    on_main(lambda: None)
    return found


def _start_worker(device: torch.device) -> subprocess.Popen[str]:
    paths = [str(WORKER_FOLDER), os.environ.get("PYTHONPATH", "")]
    environ = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(device)],
        env=environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
