"""Responses that vLLM servers draw: the ranks' end of the rollout service.

weights   all ranks -> a Hugging Face folder -> servers, which prove that they have them
responses servers -> service -> store -> each rank reads its own share
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist

from gspo_megatron.addresses import is_loopback, own_address_for_servers, route_to
from gspo_megatron.checkpoint.run_state import fingerprints
from gspo_megatron.config import Config
from gspo_megatron.config.resume import decides_rollouts
from gspo_megatron.config.rollout_nodes import rollout_nodes
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.errors import DataError, RolloutError
from gspo_megatron.families import family_of
from gspo_megatron.families.model_shape import experts_in_layers
from gspo_megatron.hf.export import export_hf, stream_hf, stream_specs
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.collectives import all_gather_objects, any_rank, on_main
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rollout.engine import Draw, Requests, Sampling
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.rollout.source import Drawn, share_of_rank
from gspo_megatron.rollout.store import FOLDER, SUFFIX, forget, read_groups, step_of
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.rollout.vllm.episodes import draw_to_json
from gspo_megatron.rollout.vllm.handle import Handle
from gspo_megatron.rollout.vllm.proof import Probe
from gspo_megatron.rollout.vllm.weight_stream import WeightStream, exhaust
from gspo_megatron.rollout.vllm.weights_folder import MEMORY, is_private, make_weights_folder
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import Prompt

# The probe: greedy responses to fixed prompts, of which one in eight may differ. Three are longer
# than a block of vLLM's prefix cache (16 tokens on GPUs, 128 on CPUs), so that a cache of old
# weights is noticed; all but their last tokens are the same, because tokens cost time. The others
# are short, and many: experts of the last layer move nothing but the next token. A second token is
# decoded with kernels, and on GPUs CUDA graphs, of its own.
PROBE = ((20, 8, 1), (3, 136, 2))  # prompts, tokens of each, tokens of a response
_OWN_TOKENS = 8  # at the end of a prompt
# Largest difference of a log-prob from the trainer's, and of a response's on average. In fp32 vLLM
# and Megatron-Core agree to 1e-5, unless two experts are as likely as each other; a single expert
# that is left behind moves them by 1e-3 and more. In bf16 rounding alone moves them by 0.04 on
# average (measured on a model of random weights).
TOLERANCES = {"fp32": (0.3, 3e-5)}
_COARSE = (1.0, 0.15)
_SPARE = "spare"  # a folder of old weights there, to be overwritten


class ServedRollouts:
    """See RolloutSource: responses and rewards come from the rollout service."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        policy: Policy,
        device: torch.device,
        hf_config: Any = None,
    ) -> None:
        """hf_config: config.json of the model that the weights come from."""
        self.config, self.device = config, device
        # no token ends a response to the probe: all have the same length
        self.engine = MegatronEngine(policy, pad_id=inputs.tokenizer.pad_id, eos_id=())
        self.data_group = data_parallel_group()
        self.report: Callable[[str], None] = lambda text: None
        self.policy, self.hf_config = policy, hf_config
        self.folder = Path(str(config.logging.dir)) / FOLDER
        self.layers: Sequence[int] | None = None  # with experts, on this rank, from 1; None: no r3
        if "r3" in config.routing.modes:
            self.layers = attach_hooks(policy.models)
        self.handle: Handle | None = None  # on rank 0
        self.has_started = False
        self.weights: Path | None = None  # the folder for new ones
        self.version = 0  # of the newest weights
        self.streams = False  # the servers take weights from rank 0, without a folder
        self.sender: WeightStream | None = None  # on rank 0, as the next two
        self.plan: dict[str, Any] = {}  # of the weights that it sends
        self.receivers: dict[str, int] = {}  # of these weights
        self.drawn: dict[str, float] = defaultdict(float)  # since the last weights
        self.updated = time.perf_counter()  # when the servers had them
        self.told: dict[str, float] = {}  # figures of the service then

    # Weights

    def take_weights(self, version: int) -> dict[str, float]:
        """See RolloutSource. Raises RolloutError, on all ranks, where no server has proven them
        within rollout.vllm.update_seconds."""
        start = time.perf_counter()
        self.version = version
        if not self.has_started:
            self.weights = Path(on_main(self._start))
            self.has_started = True
        weights: dict[str, Any] = {"version": version}
        weights |= {"folder": None, "probe": None, "stream": None}
        if self.streams:
            num_bytes = self._send(weights)
        else:
            weights["folder"], num_bytes = self._write()
            on_main(lambda: self._service().take_weights(weights))
        probe = dataclasses.asdict(self._probe())  # while the servers load
        on_main(lambda: self._service().offer(probe=probe))
        arrived = self._wait(self._weights_status)
        on_main(self._drop_older)
        wanted = self.config.rollout.vllm.weight_transport
        self.streams = arrived["can_stream"] and (
            wanted == "nccl" or (wanted == "auto" and self.device.type == "cuda")
        )
        figures = on_main(lambda: self._service().figures())
        drawn, self.drawn = self.drawn, defaultdict(float)
        # responses of steps ahead were drawn at any time since
        before, self.updated = self.updated, time.perf_counter()
        ahead = self.config.rollout.staleness > 0
        seconds = self.updated - before if ahead else drawn["seconds"]
        metrics = {
            "sync/seconds": self.updated - start,
            "sync/bytes": float(num_bytes),
            "sync/version": float(version),
            "engine/tokens_per_second": drawn["tokens"] / max(seconds, 1e-9),
            "engine/kv_usage": figures["kv_usage"],
            "engine/restarts": figures["restarts"],
            "rollout/resubmitted": figures["resubmitted"],
            **shares_of_work(self.told, figures),
        }
        self.told = figures
        if drawn["routes"]:
            metrics["replay/missing_rows"] = drawn["missing_routes"] / drawn["routes"]
        return metrics

    def _weights_status(self) -> dict[str, Any]:
        """On rank 0. The service itself gives up in time: see rollout.vllm.update_seconds."""
        heartbeat()
        return self._service().weights_status()

    def _folder(self) -> Path:
        """Of the newest weights."""
        assert self.weights is not None, "the service has not started"
        return self.weights / f"version_{self.version:08d}"

    def _write(self) -> tuple[str, int]:
        """The newest weights as a folder; returns it, and its bytes. All ranks call it."""
        folder, tokenizer = self._folder(), self.config.data.tokenizer
        export_hf(
            self.policy,
            folder,
            hf_config=self.hf_config,
            tokenizer=tokenizer,
            durable=False,  # what a killed machine leaves is never read: the next start writes anew
            reuse=folder.with_name(_SPARE),
            private=is_private(self.config),
        )
        count = on_main(lambda: sum(f.stat().st_size for f in folder.glob("*.safetensors")))
        return str(folder), count

    def _drop_older(self) -> None:
        """Remove the weights that no server needs any more. In memory the last ones become the
        next folder: it costs less to overwrite them than to get memory from the system."""
        newest = self._folder()
        older = sorted(folder for folder in newest.parent.iterdir() if folder != newest)
        kept = older.pop() if older and newest.exists() and newest.is_relative_to(MEMORY) else None
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)
        if kept is not None:
            kept.rename(newest.with_name(_SPARE))

    def _offer_folder(self) -> None:
        """The newest weights for a server that starts again."""
        folder, _ = self._write()
        on_main(lambda: self._service().offer(folder=folder))

    def _send(self, weights: dict[str, Any]) -> int:
        """The newest weights to all servers that can take them; returns their bytes. All ranks call
        it."""
        family = None if self.hf_config is None else family_of(self.hf_config)
        specs = stream_specs(self.policy, family=family)
        tensors = stream_hf(self.policy, family=family)

        def begin() -> None:
            if self.sender is None:
                self.sender = _sender(self.config, self.device)
            self.plan = self.sender.plan(specs)
            self.receivers = self._service().take_weights({**weights, "stream": self.plan})

        on_main(begin)
        if self.sender is None:
            exhaust(tensors)
        else:
            self.sender.send(self.plan, self.receivers, tensors, self._receivers)
        return sum(spec.nbytes for spec in specs.values())

    def _receivers(self) -> list[str]:
        """On rank 0, while the other ranks give their tensors. They learn at the next question to
        the service that it is gone, all together."""
        try:
            return self._service().receivers()
        except RolloutError:
            return []

    def after_checkpoint(self, step: int) -> None:
        """See RolloutSource: the draws of these steps may go."""
        on_main(lambda: self._service().forget(step))

    def close(self) -> None:
        """See RolloutSource: ends the service and its servers; on rank 0."""
        if self.handle is not None:
            self.handle.close()

    def _service(self) -> Handle:
        assert self.handle is not None, "only rank 0 talks to the service"
        return self.handle

    def _wait(self, status: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Ask rank 0 for a status until that is done, and return it. `status` waits for some
        seconds itself. A server that starts again meanwhile gets the newest weights."""
        while True:
            found, wants = on_main(lambda: (status(), self._service().wants_folder))
            if wants:
                self._offer_folder()
            if found["done"]:
                return found

    def _start(self) -> str:
        """Start the service; on rank 0. Returns the folder for new weights."""
        shape, folder = self.config.resolved_model(), make_weights_folder(self.config)
        layers = [n for n, count in enumerate(experts_in_layers(shape)) if count]
        facts = {
            "vocab_size": self.policy.vocab_size,
            "num_layers": self.policy.config.num_layers,
            "num_experts": shape.num_moe_experts or 0,
            "experts_per_token": self.policy.config.moe_router_topk,
            "moe_layers": layers,
        }
        # What an earlier start of the run drew for later steps is trained on. But an evaluation of
        # weights that are made anew measures these.
        forget(self.folder, lambda name: name.startswith("step_") or step_of(name) <= self.version)
        self.handle = Handle(
            {
                "config": self.config.model_dump(mode="json"),
                "facts": facts,
                "origin": origin_of_rollouts(self.config),
                "dtype": str(self.policy.config.params_dtype).removeprefix("torch."),
                "devices": self._devices(),
                "on_cpu": self.device.type != "cuda",
                "nodes": rollout_nodes(),
                "weights_folder": str(folder),
            },
            self.config.rollout.vllm.restarts,
        )
        return str(folder)

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
        longest = self.config.resolved_model().max_sequence_length
        asked: list[list[int]] = []
        tokens: list[list[int]] = []
        logprobs: list[list[float]] = []
        for prompts, count in probe_prompts(self.policy.vocab_size, longest):
            requests = Requests(prompts, range(len(prompts)))
            batch = self.engine.generate(requests, Sampling(count, temperature=0.0), seed=0)
            asked += prompts
            tokens += batch.tokens.view(len(prompts), -1)[:, -count:].tolist()
            logprobs += batch.rollout_logprobs.view(-1, count).tolist()
        largest, mean = TOLERANCES.get(self.config.training.precision, _COARSE)
        return Probe(asked, tokens, logprobs, largest, mean)

    # Responses

    def begin(self, draw: Draw) -> None:
        """See RolloutSource: the servers draw while the policy trains."""
        on_main(lambda: self._service().begin_draw(draw_to_json(draw)))

    def take(
        self, draw: Draw, prompts: Sequence[Prompt], scorer: GroupScorer, *, router_noise: bool
    ) -> Drawn:
        """See RolloutSource. The service knows the prompts and scores them itself."""
        start = time.perf_counter()
        self.begin(draw)
        before = None

        def look() -> dict[str, Any]:
            nonlocal before
            status = self._service().draw_status(draw.name)
            done, scoring = status["finished"], status["scoring"]
            moved = status["drawn"], status["tokens"], done
            if moved != before:
                heartbeat()
            before = moved
            scored = f", {scoring} being scored" if scoring else ""
            self.report(f"groups {done}/{len(draw.rows)}{scored}")
            return status

        self.drawn["tokens"] += self._wait(look)["tokens"]
        self.report("")
        self.drawn["seconds"] += time.perf_counter() - start
        drawn = self.read(draw)
        group = drawn.group
        known = [names for names in all_gather_objects(group.part_names) if names is not None]
        if known:  # not where all calls failed
            group.parts, group.part_names = group.parts_of(known[0]), known[0]
            scorer.adopt(known[0])
        return drawn

    def read(self, draw: Draw) -> Drawn:
        """This rank's share of a finished draw, in the order of the prompts."""
        path = self.folder / f"{draw.name}{SUFFIX}"
        group = self._read(path, share_of_rank(draw), draw.first)
        if group.routes is not None and self.layers is not None:
            self._count_missing(group)
            group = group.of_layers(self.layers)
        else:
            group.routes = None
        assert group.versions is not None, "the service writes them"
        staleness = self.version - group.versions
        assert ((staleness >= 0) & (staleness <= self.version - draw.version)).all(), (
            f"{draw.name}: tokens of weights outside of versions {draw.version} to {self.version}"
        )
        bound, sampled = self.config.objective.max_token_staleness, group.sampled
        if bound is not None:
            young = staleness <= bound
            group.mask = young if sampled is None else sampled & young
        sums = torch.tensor([*group.failed, group.seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(sums, group=self.data_group)
        *failed, seconds = sums.tolist()
        ages = staleness if sampled is None else staleness[sampled]
        return Drawn(group, FailedCalls(*map(int, failed)), seconds, ages)

    @staticmethod
    def _read(path: Path, numbers: Sequence[int], first: int) -> RolloutGroup:
        """These groups, end to end. All ranks read the first group: its columns tell those without
        a group of their own what they lack. Raises DataError, on all ranks, where one of them does
        not find what it needs."""
        joined, problem = None, ""
        try:
            found = read_groups(path, {first, *numbers})
            joined = RolloutGroup.join([found[first].nothing(), *(found[n] for n in numbers)])
        except DataError as error:
            text = str(error)
            named = text.startswith(f"{path}: ")
            problem = text if named else f"{path}: damaged since it was written: {text}"
        if any_rank([bool(problem)])[0] or joined is None:
            raise DataError(problem or f"{path}: another rank cannot read its groups")
        return joined

    def _count_missing(self, group: RolloutGroup) -> None:
        """Tokens whose experts the servers did not report, of those that they should report: all
        but the last one of each branch."""
        branches = len(group.truncated)
        if (kinds := group.in_response) is not None:  # a prompt and a response each
            branches = int(np.count_nonzero(kinds[1:] > kinds[:-1]))
        routes = group.routes
        assert routes is not None
        counts = torch.tensor(
            [missing_rows(routes, branches), len(routes) - branches], device=self.device
        )
        dist.all_reduce(counts, group=self.data_group)
        self.drawn["missing_routes"] += int(counts[0])
        self.drawn["routes"] += int(counts[1])


def probe_prompts(vocab_size: int, longest: int) -> Iterator[tuple[list[list[int]], int]]:
    """The prompts of each length, as token ids, and the number of tokens that answer each. With it
    no sequence has more than `longest` tokens."""
    random = np.random.default_rng(0)
    for number, length, count in PROBE:
        size = (number, min(length, longest - count))
        ids = random.integers(0, vocab_size, size)
        ids[:, :-_OWN_TOKENS] = ids[0, :-_OWN_TOKENS]
        yield ids.tolist(), count


def origin_of_rollouts(config: Config) -> str:
    """A fingerprint of what decides responses and rewards, beside the policy: settings, prompts,
    suites, tokenizer, the rewards' code. Raises DataError."""
    files = {k: v for k, v in fingerprints(config).items() if not k.startswith("objective.")}
    suites = config.evaluation.model_dump(mode="json")["suites"]
    text = json.dumps([decides_rollouts(config), files, suites], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def shares_of_work(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Metrics of how much servers worked between two tellings of the service's figures. A service
    that was started in between counts from its own start."""
    if before.get("began") != now["began"]:
        before = {"time": now["began"], "busy_seconds": 0.0, "working_seconds": 0.0}
    seconds = max(now["time"] - before["time"], 1e-9)
    busy = (now["busy_seconds"] - before["busy_seconds"]) / seconds
    working = (now["working_seconds"] - before["working_seconds"]) / seconds
    return {
        "engine/busy_share": min(busy, 1.0),
        "perf/engines_idle_share": max(1.0 - working, 0.0),
    }


def missing_rows(routes: np.ndarray, num_sequences: int) -> int:
    """Tokens without experts in [tokens, layers, k], beside the last one of each sequence, which
    never has any."""
    return int((~routes.any((1, 2))).sum()) - num_sequences


def _sender(config: Config, device: torch.device) -> WeightStream:
    """Listens where the servers find this machine: on loopback, unless some are on others. Raises
    RolloutError where it cannot, and UserError where nothing tells the way to the others."""
    hosts = [urlsplit(url).hostname or "" for url in config.rollout.vllm.urls]
    ways = [way for way in map(route_to, hosts) if way is not None and not is_loopback(way)]
    address = next(iter(ways), "127.0.0.1")
    if rollout_nodes():
        address = own_address_for_servers()
    try:
        return WeightStream(address, device, config.rollout.vllm.update_seconds)
    except OSError as error:
        raise RolloutError(
            f"{address}: cannot listen for servers there: {error.strerror or error}; legal: "
            "MASTER_ADDR is a name of rank 0's machine, or rollout.vllm.weight_transport: disk"
        ) from error
