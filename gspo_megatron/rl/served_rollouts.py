"""Responses that vLLM servers draw: the ranks' end of the rollout service.

weights   all ranks -> a Hugging Face folder -> servers, which prove that they have them
responses servers -> service -> bank -> each rank reads its own share
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gspo_megatron.checkpoint.hf.export import export_hf
from gspo_megatron.config import Config
from gspo_megatron.config.model_shape import experts_in_layers
from gspo_megatron.config.rollout_nodes import rollout_nodes
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.errors import RewardError, RolloutError
from gspo_megatron.models.build import Policy
from gspo_megatron.observe.heartbeat import heartbeat
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import describe
from gspo_megatron.rl.rollouts import Collector, Experience, Scores
from gspo_megatron.rollout.engine import Draw, Requests, Sampling
from gspo_megatron.rollout.megatron import MegatronEngine
from gspo_megatron.rollout.service.bank import FOLDER, SUFFIX, read_groups
from gspo_megatron.rollout.service.episodes import draw_to_json
from gspo_megatron.rollout.service.handle import Handle
from gspo_megatron.rollout.service.pool import Probe
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import RolloutBatch

# The probe: greedy responses to fixed prompts. One is longer than two blocks of vLLM's prefix cache
# (16 tokens on GPUs, 128 on CPUs), so that a cache of old weights is noticed.
PROBE_PROMPTS, PROBE_TOKENS = (40,) * 7 + (272,), 8  # tokens of each prompt, and of a response
# Largest and mean difference of a log-prob from the trainer's. In fp32 vLLM and Megatron-Core agree
# to 1e-5; a single expert that is left behind moves them by 1e-3 and more. In bf16 rounding alone
# moves them by 0.04 on average (measured on a model of random weights).
_TOLERANCES = {"fp32": (1e-4, 3e-5)}
_COARSE = (1.0, 0.15)
_MEMORY = Path("/dev/shm")  # a file system in memory


class ServedCollector(Collector):
    """See Collector: responses and rewards come from the rollout service."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        policy: Policy,
        reward: Reward,
        device: torch.device,
        hf_config: Any = None,
    ) -> None:
        """hf_config: config.json of the model that the weights come from."""
        environment = SingleTurn(inputs.tokenizer)
        # no token ends a response to the probe: all have the same length
        engine = MegatronEngine(policy, pad_id=inputs.tokenizer.pad_id, eos_id=())
        super().__init__(config, inputs.files, engine, environment, reward, device)
        self.policy, self.hf_config = policy, hf_config
        self.folder = Path(str(config.logging.dir)) / FOLDER
        self.layers: list[int] | None = None  # with experts, on this rank, from 0; None: no r3
        if "r3" in config.routing.modes:
            self.layers = [number - 1 for number in attach_hooks(policy.models)]
        self.handle: Handle | None = None  # on rank 0
        self.has_started = False
        self.drawn: dict[str, float] = defaultdict(float)  # since the last weights

    # Weights

    def take_weights(self, version: int) -> dict[str, float]:
        """See Collector. Raises RolloutError, on all ranks, where no server has proven them within
        rollout.vllm.update_seconds."""
        start = time.perf_counter()
        if not self.has_started:
            on_main(self._start)
            self.has_started = True
        folder = weights_folder(self.config) / f"version_{version:08d}"
        tokenizer = self.config.data.tokenizer
        export_hf(self.policy, folder, hf_config=self.hf_config, tokenizer=tokenizer)
        probe = dataclasses.asdict(self._probe())
        weights = {"version": version, "folder": str(folder), "probe": probe}
        on_main(lambda: self._service().take_weights(weights))
        self._wait(lambda: self._service().weights_arrived())
        num_bytes = on_main(lambda: _drop_older(folder))
        figures = on_main(lambda: self._service().figures())
        drawn, self.drawn = self.drawn, defaultdict(float)
        metrics = {
            "sync/seconds": time.perf_counter() - start,
            "sync/bytes": float(num_bytes),
            "sync/version": float(version),
            "engine/tokens_per_second": drawn["tokens"] / max(drawn["seconds"], 1e-9),
            "engine/kv_usage": figures["kv_usage"],
            "engine/restarts": figures["restarts"],
            "rollout/resubmitted": figures["resubmitted"],
        }
        if drawn["routes"]:
            metrics["replay/missing_rows"] = drawn["missing_routes"] / drawn["routes"]
        return metrics

    def after_checkpoint(self, step: int) -> None:
        """See Collector: the draws of these steps may go."""
        on_main(lambda: self._service().forget(step))

    def close(self) -> None:
        """See Collector: ends the service and its servers; on rank 0."""
        if self.handle is not None:
            self.handle.close()
            shutil.rmtree(weights_folder(self.config), ignore_errors=True)

    def _service(self) -> Handle:
        assert self.handle is not None, "only rank 0 talks to the service"
        return self.handle

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Until rank 0 finds that it is done. `is_done` waits for some seconds itself."""
        while not on_main(is_done):
            pass

    def _start(self) -> None:
        """Start the service; on rank 0."""
        shape, folder = self.config.resolved_model(), weights_folder(self.config)
        layers = [n for n, count in enumerate(experts_in_layers(shape)) if count]
        facts = {
            "vocab_size": self.policy.vocab_size,
            "num_layers": self.policy.config.num_layers,
            "num_experts": shape.num_moe_experts or 0,
            "experts_per_token": self.policy.config.moe_router_topk,
            "moe_layers": layers,
        }
        # what a killed start of this run has left: the lock of the run keeps others out
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.handle = Handle(
            {
                "config": self.config.model_dump(mode="json"),
                "facts": facts,
                "dtype": str(self.policy.config.params_dtype).removeprefix("torch."),
                "devices": self._devices(),
                "on_cpu": self.device.type != "cuda",
                "nodes": rollout_nodes(),
                "weights_folder": str(folder),
            },
            self.config.rollout.vllm.restarts,
        )

    def _devices(self) -> list[str]:
        """The GPUs of this machine that no rank uses. Raises RolloutError where they are too few
        for the servers."""
        section = self.config.rollout.vllm
        if self.device.type != "cuda" or not section.servers or rollout_nodes():
            return []
        used, wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), section.tensor_parallel_size
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
            map(str, range(torch.cuda.device_count()))
        )
        free = visible.split(",")[used:]
        if len(free) < section.servers * wanted:
            raise RolloutError(
                f"rollout.vllm.servers = {section.servers}: {section.servers * wanted} GPUs beside "
                f"the {used} of the ranks are needed on this machine, and {len(free)} are left"
            )
        return free

    def _probe(self) -> Probe:
        """What a server with the present weights answers; every rank calls it."""
        longest = self.config.resolved_model().max_sequence_length - PROBE_TOKENS
        lengths = [min(length, longest) for length in PROBE_PROMPTS]
        ids = np.random.default_rng(0).integers(0, self.policy.vocab_size, sum(lengths))
        prompts = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
        requests = Requests(prompts, range(len(prompts)))
        batch = self.engine.generate(requests, Sampling(PROBE_TOKENS, temperature=0.0), seed=0)
        of_each = batch.tokens.split([length + PROBE_TOKENS for length in lengths])
        tokens = [sequence[-PROBE_TOKENS:].tolist() for sequence in of_each]
        logprobs = batch.rollout_logprobs.view(-1, PROBE_TOKENS).tolist()
        largest, mean = _TOLERANCES.get(self.config.training.precision, _COARSE)
        return Probe(prompts, tokens, logprobs, largest, mean)

    # Responses

    def sample(self, draw: Draw) -> Experience:
        """See Collector. Raises RolloutError, on all ranks, where no server is left."""
        start = time.perf_counter()
        on_main(lambda: self._service().begin_draw(draw_to_json(draw)))
        status: dict[str, Any] = {}

        def is_done() -> bool:
            before = status.get("tokens")
            status.update(self._service().draw_status(draw.name))
            if status["tokens"] != before:
                heartbeat()
            return status["done"]

        self._wait(is_done)
        self.drawn["tokens"] += on_main(lambda: status["tokens"])
        self.drawn["seconds"] += time.perf_counter() - start
        return self._experience(draw)

    def _experience(self, draw: Draw) -> Experience:
        """This rank's share of a draw, in the order of the prompts."""
        # All ranks read the first group: its columns tell those without a group of their own what
        # they lack.
        path = self.folder / f"{draw.name}{SUFFIX}"
        found = read_groups(path, lambda number: number == draw.first or self.is_mine(number))
        first = found[draw.first]
        numbers = range(draw.first, draw.first + len(draw.rows))
        columns = join_groups(first, [found[n] for n in numbers if self.is_mine(n)])
        self._adopt_parts(json.loads(bytes(first["part_names"])))
        columns["tokens"] = columns["tokens"].astype(np.int64)
        routes = columns.pop("routes", None)
        if routes is not None and self.layers is not None:
            self._count_missing(routes, len(columns["truncated"]))
            columns["routes"] = routes[:, self.layers]
        tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
        errors = tensors.pop("reward_errors").sum().to(self.device)
        dist.all_reduce(errors, group=self.data_group)
        tensors = {name: values.to(self.device) for name, values in tensors.items()}
        parts, scores = tensors.pop("parts"), dataclasses.fields(Scores)
        of_scores = {each.name: tensors.pop(each.name) for each in scores}
        names = self.part_names or ()
        batch = RolloutBatch(**tensors)
        return Experience(
            batch,
            Scores(**of_scores),
            self.samples(batch, self.prompts_of(draw), draw.first),
            of_scores["rewards"].tolist(),
            [dict(zip(names, values)) for values in parts.t().tolist()] if names else [],
            parts,
            int(errors),
        )

    def _count_missing(self, routes: np.ndarray, num_sequences: int) -> None:
        """Tokens whose experts the servers did not report, of those that they should report: all
        but the last of each sequence."""
        missing = int((~routes.any((1, 2))).sum()) - num_sequences
        counts = torch.tensor([missing, len(routes) - num_sequences], device=self.device)
        dist.all_reduce(counts, group=self.data_group)
        self.drawn["missing_routes"] += int(counts[0])
        self.drawn["routes"] += int(counts[1])

    def _adopt_parts(self, given: list[str]) -> None:
        """The names of the reward's parts. Raises RewardError where they change within a run."""
        names = tuple(given)
        if self.part_names not in (None, names):
            raise RewardError(
                f"reward {self.scorer.reward.name!r} returned {describe(names)}, and "
                f"{describe(self.part_names)} in an earlier step; the same names are wanted in "
                "every call"
            )
        self.part_names = names


def join_groups(
    first: Mapping[str, np.ndarray], groups: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The columns of groups end to end, as arrays of their own; of no groups, empty columns of the
    form that `first` has. `part_names`, which all groups share, is left out."""
    joined = {}
    for name, values in first.items():
        if name != "part_names":
            axis = values.ndim - 1 if name == "parts" else 0  # parts: [parts, num_sequences]
            empty = values[..., :0] if name == "parts" else values[:0]
            joined[name] = np.concatenate([empty, *(group[name] for group in groups)], axis=axis)
    return joined


def weights_folder(config: Config) -> Path:
    """Where new weights wait for the servers: the same place in each start of a run."""
    section, run = config.rollout.vllm, os.path.realpath(str(config.logging.dir))
    parent = Path(section.weights_dir or run) / ("" if section.weights_dir else FOLDER)
    is_local = section.servers and not rollout_nodes()
    if section.weights_dir is None and is_local and os.access(_MEMORY, os.W_OK):
        parent = _MEMORY
    return parent / f"gspo-megatron-weights-{hashlib.sha256(run.encode()).hexdigest()[:12]}"


def _drop_older(newest: Path) -> int:
    """Remove the weights that no server needs any more; returns the bytes of the newest."""
    for folder in newest.parent.iterdir():
        if folder != newest:
            shutil.rmtree(folder, ignore_errors=True)
    return sum(file.stat().st_size for file in newest.glob("*.safetensors"))
