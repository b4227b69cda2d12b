"""Responses that vLLM servers draw: the ranks' end of the rollout service.

weights   see rollout/vllm/weight_sync.py
responses servers -> service -> bank -> each rank reads its own share
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gspo_megatron.checkpoint.run_state import fingerprints
from gspo_megatron.config import Config
from gspo_megatron.config.resume import decides_rollouts
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.errors import DataError, RewardError
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.collectives import any_rank, on_main
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import FailedCalls, describe
from gspo_megatron.rl.rollouts import Collector, Experience, Scores
from gspo_megatron.rollout.engine import Draw
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.rollout.store import FOLDER, SUFFIX, forget, read_groups, step_of
from gspo_megatron.rollout.vllm.episodes import REASONS, RECORDS, draw_to_json, read_records
from gspo_megatron.rollout.vllm.service_client import ServiceClient, service_settings
from gspo_megatron.rollout.vllm.weight_sync import WeightSync
from gspo_megatron.rollout.vllm.weights_folder import make_weights_folder
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import RolloutBatch

# What every group in the bank has.
_COLUMNS = {
    *(f.name for f in dataclasses.fields(RolloutBatch) if f.default is dataclasses.MISSING),
    *(f.name for f in dataclasses.fields(Scores)),
    *("versions", "parts", "part_names", "failed_calls", "reward_seconds"),
}
_ADDED = {REASONS, *RECORDS}  # columns that groups of earlier versions do not have


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
        # no token ends a response of the weight check: all have the same length
        engine = MegatronEngine(policy, pad_id=inputs.tokenizer.pad_id, eos_id=())
        super().__init__(config, inputs.files, engine, environment, reward, device)
        self.policy, self.hf_config = policy, hf_config
        self.folder = Path(str(config.logging.dir)) / FOLDER
        self.layers: list[int] | None = None  # with experts, on this rank, from 0; None: no r3
        if "r3" in config.routing.modes:
            self.layers = [number - 1 for number in attach_hooks(policy.models)]
        self.service: ServiceClient | None = None  # on rank 0
        self.sync: WeightSync | None = None  # from the start of the service on
        self.version = 0  # of the newest weights
        self.drawn: dict[str, float] = defaultdict(float)  # since the last weights
        self.updated = time.perf_counter()  # when the servers had them
        self.told: dict[str, float] = {}  # figures of the service then

    # Weights and the service

    def take_weights(self, version: int) -> dict[str, float]:
        """See Collector. Raises RolloutError, on all ranks, where no server has passed the check of
        its weights within rollout.vllm.update_seconds."""
        self.version = version
        if self.sync is None:
            folder = Path(on_main(self._start))
            self.sync = WeightSync(
                self.config,
                self.policy,
                self.engine,
                self.device,
                self.hf_config,
                self.service,
                folder,
            )
        metrics = self.sync.send_weights(version)
        figures = on_main(lambda: self._service().figures())
        drawn, self.drawn = self.drawn, defaultdict(float)
        # responses of steps ahead were drawn at any time since
        before, self.updated = self.updated, time.perf_counter()
        ahead = self.config.rollout.staleness > 0
        seconds = self.updated - before if ahead else drawn["seconds"]
        metrics |= {
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

    def after_checkpoint(self, step: int) -> None:
        """See Collector: the draws of these steps may go."""
        on_main(lambda: self._service().forget(step))

    def close(self) -> None:
        """See Collector: ends the service and its servers; on rank 0."""
        if self.service is not None:
            self.service.close()

    def _service(self) -> ServiceClient:
        assert self.service is not None, "only rank 0 talks to the service"
        return self.service

    def _start(self) -> str:
        """Start the service; on rank 0. Returns the folder for new weights."""
        folder = make_weights_folder(self.config)
        # What an earlier start of the run drew for later steps is trained on. But an evaluation of
        # weights that are made anew measures these.
        forget(self.folder, lambda name: name.startswith("step_") or step_of(name) <= self.version)
        origin, on_cpu = origin_of_rollouts(self.config), self.device.type != "cuda"
        settings = service_settings(self.config, self.policy, origin, folder, on_cpu=on_cpu)
        self.service = ServiceClient(settings, self.config.rollout.vllm.restarts)
        return str(folder)

    # Responses

    def begin(self, draw: Draw) -> None:
        """See Collector: the servers draw while the policy trains."""
        on_main(lambda: self._service().begin_draw(draw_to_json(draw)))

    def sample(self, draw: Draw) -> Experience:
        """See Collector. Raises RolloutError, on all ranks, where no server is left."""
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
            self.tell(f"groups {done}/{len(draw.rows)}{scored}")
            return status

        assert self.sync is not None, "the service has not started"
        self.drawn["tokens"] += self.sync.wait_for(look)["tokens"]
        self.tell("")
        self.drawn["seconds"] += time.perf_counter() - start
        return self.read_draw(draw)

    def read_draw(self, draw: Draw) -> Experience:
        """This rank's share of a draw, in the order of the prompts."""
        # All ranks read the first group: its columns tell those without a group of their own what
        # they lack.
        path = self.folder / f"{draw.name}{SUFFIX}"
        numbers = range(draw.first, draw.first + len(draw.rows))
        found = self._read(path, {n for n in numbers if n == draw.first or self.is_mine(n)})
        _refuse_lacks(path, found)
        first = found[draw.first]
        columns = join_groups(first, [found[n] for n in numbers if self.is_mine(n)])
        self._adopt_parts(json.loads(bytes(first["part_names"])))
        columns["tokens"] = columns["tokens"].astype(np.int64)
        reasons = bytes(columns.pop(REASONS, b"")).decode().splitlines()
        routes = columns.pop("routes", None)
        if routes is not None and self.layers is not None:
            count = len(columns["truncated"])
            if (kinds := columns.get("in_response")) is not None:  # a prompt and a response each
                count = int(np.count_nonzero(kinds[1:] > kinds[:-1]))
            self._count_missing(routes, count)
            columns["routes"] = routes[:, self.layers]
        records = [columns.pop(name, np.empty(0, np.uint8)) for name in RECORDS]
        tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
        failed = tensors.pop("failed_calls").view(-1, len(FailedCalls._fields)).sum(0)
        failed = failed.to(self.device)
        dist.all_reduce(failed, group=self.data_group)
        seconds = tensors.pop("reward_seconds").sum().to(self.device)
        dist.all_reduce(seconds, group=self.data_group)
        tensors = {name: values.to(self.device) for name, values in tensors.items()}
        staleness = self.version - tensors.pop("versions")
        assert ((staleness >= 0) & (staleness <= self.version - draw.version)).all(), (
            f"{draw.name}: tokens of weights outside of versions {draw.version} to {self.version}"
        )
        parts, scores = tensors.pop("parts"), dataclasses.fields(Scores)
        of_scores = {each.name: tensors.pop(each.name) for each in scores}
        names = self.part_names or ()
        bound = self.config.objective.max_token_staleness
        sampled = mask = tensors.pop("sampled", None)
        if bound is not None:
            mask = staleness <= bound if sampled is None else sampled & (staleness <= bound)
        batch = RolloutBatch(**tensors, mask=mask)
        return Experience(
            batch,
            Scores(**of_scores),
            self.samples(batch, self.prompts_of(draw), draw.first, sampled),
            of_scores["rewards"].tolist(),
            [dict(zip(names, values)) for values in parts.t().tolist()] if names else [],
            read_records(*records) if dist.get_rank() == self.reward_rank else [],
            parts,
            FailedCalls(*failed.tolist()),
            seconds.item(),
            sampled,
            staleness if sampled is None else staleness[sampled],
            sample_reasons=[*map(json.loads, reasons)],
        )

    @staticmethod
    def _read(path: Path, wanted: set[int]) -> dict[int, dict[str, np.ndarray]]:
        """These groups. Raises DataError, on all ranks, where one does not find all of its own."""
        found, problem = {}, ""
        try:
            found = read_groups(path, wanted)
        except DataError as error:
            problem = str(error)
        if any_rank([bool(problem)])[0]:
            raise DataError(problem or f"{path}: another rank cannot read its groups")
        return found

    def _count_missing(self, routes: np.ndarray, num_sequences: int) -> None:
        """Tokens whose experts the servers did not report, of those that they should report."""
        counts = torch.tensor(
            [missing_rows(routes, num_sequences), len(routes) - num_sequences], device=self.device
        )
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


def join_groups(
    first: Mapping[str, np.ndarray], groups: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The columns of groups end to end, as arrays of their own; of no groups, empty columns of the
    form that `first` has. `part_names`, which all groups share, is left out, and so is what the
    groups of an earlier version's start lack."""
    joined = {}
    for name, values in first.items():
        is_whole = name not in _ADDED or all(name in group for group in groups)
        if name != "part_names" and is_whole:
            axis = values.ndim - 1 if name == "parts" else 0  # parts: [parts, num_sequences]
            empty = values[..., :0] if name == "parts" else values[:0]
            joined[name] = np.concatenate([empty, *(group[name] for group in groups)], axis=axis)
    return joined


def _refuse_lacks(path: Path, groups: Mapping[int, Mapping[str, np.ndarray]]) -> None:
    """Raise DataError, on all ranks, where a group of one of them lacks columns."""
    # routes and turns: of all groups or of none
    known = _COLUMNS.union(*groups.values()) - _ADDED
    lacks = [
        f"{path}: damaged since it was written: group {number} lacks {', '.join(sorted(names))}"
        for number, columns in groups.items()
        if (names := known - columns.keys())
    ]
    if any_rank([bool(lacks)])[0]:
        raise DataError("\n".join(lacks) or f"{path}: another rank cannot read its groups")
