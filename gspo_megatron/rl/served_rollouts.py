"""The RolloutSource for vLLM servers. It runs on the training ranks and talks to the rollout
service.

    weights     see rollout/vllm/weight_sync.py
    responses   servers -> service -> store -> each rank reads its own share
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gspo_megatron.checkpoint.run_state import fingerprints
from gspo_megatron.config import Config
from gspo_megatron.config.resume import decides_rollouts
from gspo_megatron.data.inputs import Inputs
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.collectives import all_gather_objects, any_rank, on_main
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.platform.stop import StopSignals
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.rollout.engine import RolloutRequest, RolloutShare
from gspo_megatron.rollout.episodes import GroupScorer
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.rollout.store import FOLDER, SUFFIX, forget, read_groups, step_of
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.rollout.vllm.service_client import ServiceClient, service_settings
from gspo_megatron.rollout.vllm.weight_sync import WeightSync
from gspo_megatron.rollout.vllm.weights_folder import make_weights_folder
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import Prompt


@dataclass
class KeptServers:
    """The rollout service and its servers, which keep running when the next phase begins."""

    sync: WeightSync  # sync.version is the version of the servers' weights
    service: ServiceClient | None  # only on rank 0

    def close(self) -> None:
        """End the service and its servers. The call does nothing if they have already ended."""
        if self.service is not None:
            self.service.close()


class ServedRollouts:
    """Implements RolloutSource: responses and rewards come from the rollout service."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        policy: Policy,
        device: torch.device,
        hf_config: Any = None,
        kept: KeptServers | None = None,
        stop: StopSignals | None = None,
    ) -> None:
        """hf_config: config.json of the model that the weights come from; kept: the servers of the
        previous phase, which are used again if they fit this phase; stop: tells whether the run
        must stop."""
        self.config, self.device = config, device
        # Without end-of-sequence tokens, no response of the weight check ends early.
        self.engine = MegatronEngine(policy, pad_id=inputs.tokenizer.pad_id, eos_id=())
        self.data_group = data_parallel_group()
        self.report: Callable[[str], None] = lambda text: None
        self.policy, self.hf_config = policy, hf_config
        self.folder = Path(str(config.logging.dir)) / FOLDER
        self.layers: Sequence[int] | None = None  # this rank's MoE layers, from 1; None: r3 is off
        if "r3" in config.routing.modes:
            self.layers = attach_hooks(policy.models)
        self.service: ServiceClient | None = None  # only on rank 0
        self.sync: WeightSync | None = None  # None until the service starts
        self.stop = stop or StopSignals(enabled=False)
        self.kept = kept  # None after the first call of take_weights
        self.version = 0  # the newest weights version
        self.counted: dict[str, float] = defaultdict(float)  # sums since the last weights update
        self.updated = time.perf_counter()  # time of the last weights update
        self.last_figures: dict[str, float] = {}  # the service's figures at the last weights update

    # Weights and the service

    def take_weights(self, version: int) -> dict[str, float]:
        """Send the weights to the servers. The first call starts the service, or takes over the
        service of the previous phase. See RolloutSource.

        Raises RolloutError on all ranks if no server passes the check of its weights within
        rollout.vllm.weight_update_timeout_seconds.
        """
        self.version = version
        if self.sync is None and self._take_over_servers():
            assert self.sync is not None
            metrics = self.sync.go_on(self.config, self.policy, self.engine)
        else:
            self.sync = self.sync or self._new_sync()
            metrics = self.sync.send_weights(version)
        figures = on_main(lambda: self._service().figures())
        counted, self.counted = self.counted, defaultdict(float)
        # With staleness, responses may have been generated at any time since the last update.
        before, self.updated = self.updated, time.perf_counter()
        ahead = self.config.rollout.staleness > 0
        seconds = self.updated - before if ahead else counted["seconds"]
        metrics |= {
            "engine/tokens_per_second": counted["tokens"] / max(seconds, 1e-9),
            "engine/kv_usage": figures["kv_usage"],
            "engine/restarts": figures["restarts"],
            "rollout/resubmitted": figures["resubmitted"],
            **shares_of_work(self.last_figures, figures),
        }
        self.last_figures = figures
        if counted["routes"]:
            metrics["replay/missing_rows"] = counted["missing_routes"] / counted["routes"]
        return metrics

    def after_checkpoint(self, step: int) -> None:
        """Delete the requests of steps up to `step`. See RolloutSource."""
        on_main(lambda: self._service().forget(step))

    def hand_over(self) -> KeptServers | None:
        """Return the service and its servers, with the newest weights. See RolloutSource."""
        if self.sync is None:
            return None
        kept, self.service = KeptServers(self.sync, self.service), None
        return kept

    def close(self) -> None:
        """End the service and its servers, on rank 0. See RolloutSource."""
        if self.service is not None:
            self.service.close()

    def _service(self) -> ServiceClient:
        assert self.service is not None, "only rank 0 talks to the service"
        return self.service

    def _take_over_servers(self) -> bool:
        """Take over the servers of the previous phase. Returns False if there are none, or if they
        do not fit this phase."""
        kept, self.kept = self.kept, None
        if kept is None or kept.sync.version != self.version:
            return False
        if not on_main(lambda: self._begin_phase(kept)):
            return False
        self.service, self.sync = kept.service, kept.sync
        return True

    def _begin_phase(self, kept: KeptServers) -> bool:
        """Tell the service, on rank 0, that this phase begins. If the phase needs other servers,
        end the service and return False."""
        assert kept.service is not None, "rank 0 has it"
        if fits := kept.service.begin_phase(self._settings(kept.sync.folder), self.config):
            return fits
        kept.close()
        return False

    def _new_sync(self) -> WeightSync:
        folder, parts = Path(on_main(self._start)), (self.config, self.policy, self.engine)
        return WeightSync(*parts, self.device, self.hf_config, self.service, folder, self.stop)

    def _settings(self, folder: Path) -> dict[str, Any]:
        """Return the settings of the service, on rank 0. folder: for new weights."""
        origin, on_cpu = origin_of_rollouts(self.config), self.device.type != "cuda"
        return service_settings(self.config, self.policy, origin, folder, on_cpu=on_cpu)

    def _start(self) -> str:
        """Start the service, on rank 0. Returns the folder for new weights."""
        folder = make_weights_folder(self.config)
        # Responses that an earlier start of the run generated for later steps are kept. Evaluations
        # of later steps are deleted, because these steps will be trained again, with other weights.
        forget(self.folder, lambda name: name.startswith("step_") or step_of(name) <= self.version)
        self.service = ServiceClient(self._settings(folder), self.config.rollout.vllm.restarts)
        return str(folder)

    # Responses

    def begin(self, request: RolloutRequest) -> None:
        """Make the servers generate while the policy trains. See RolloutSource."""
        on_main(lambda: self._service().begin_request(request))

    def take(
        self,
        request: RolloutRequest,
        prompts: Mapping[int, Prompt],
        scorer: GroupScorer,
        *,
        router_noise: bool,
    ) -> RolloutShare:
        """Wait for the responses and read this rank's share. See RolloutSource.

        The service has the prompts and scores the responses itself.
        """
        start = time.perf_counter()
        self.begin(request)
        before = None

        def next_status() -> dict[str, Any]:
            nonlocal before
            status = self._service().request_status(request.name)
            done, scoring = status["finished"], status["scoring"]
            state = status["drawn"], status["tokens"], done, status["heartbeats"]
            if state != before or status["is_restarting"]:
                heartbeat()
            before = state
            scored = f", {scoring} being scored" if scoring else ""
            self.report(f"groups {done}/{len(request.rows)}{scored}")
            return status

        assert self.sync is not None, "the service has not started"
        tokens = self.sync.wait_for(next_status)["tokens"]
        self.report("")
        # With staleness, the time since the last update counts, and evaluations are part of it.
        if request.is_learnt or self.config.rollout.staleness > 0:
            self.counted["tokens"] += tokens
            self.counted["seconds"] += time.perf_counter() - start
        share = self.read(request, [*prompts])
        group = share.group
        part_names = [names for names in all_gather_objects(group.part_names) if names is not None]
        if part_names:  # `part_names` is empty if all calls failed
            group.parts, group.part_names = group.parts_of(part_names[0]), part_names[0]
            scorer.adopt(part_names[0])
        return share

    def read(self, request: RolloutRequest, numbers: Sequence[int]) -> RolloutShare:
        """Read the responses to the prompts with these numbers in a finished request."""
        path = self.folder / f"{request.name}{SUFFIX}"
        group = self._read(path, numbers, request.first)
        if group.routes is not None and self.layers is not None:
            if request.is_learnt:  # the trainer needs no experts for the tokens of a suite
                self._count_missing(group)
            group = group.of_layers(self.layers)
        else:
            group.routes = None
        assert group.versions is not None, "the service writes them"
        staleness = self.version - group.versions
        allowed = f"versions {request.version} to {self.version}"
        assert ((staleness >= 0) & (staleness <= self.version - request.version)).all(), (
            f"{request.name}: tokens of weights outside of {allowed}"
        )
        bound, sampled = self.config.objective.max_token_staleness, group.sampled
        if bound is not None:
            is_fresh = staleness <= bound
            group.mask = is_fresh if sampled is None else sampled & is_fresh
        # Each group has the part of the service's time that was spent on it.
        busy = [group.teacher_seconds, group.model_seconds]
        spent = [0.0 if each is None else float(each.sum()) for each in busy]
        values = [*spent, *group.failed, group.seconds]
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums, group=self.data_group)
        teacher, model, *failed, seconds = sums.tolist()
        if group.teacher_seconds is not None:
            group.teacher_seconds = np.array([teacher])
        if group.model_seconds is not None:
            group.model_seconds = np.array([model])
        ages = staleness if sampled is None else staleness[sampled]
        return RolloutShare(group, FailedCalls(*map(int, failed)), seconds, ages)

    @staticmethod
    def _read(path: Path, numbers: Sequence[int], first: int) -> RolloutGroup:
        """Read the groups with these numbers and join them.

        All ranks read the first group, so that a rank without groups knows the columns. Raises
        DataError on all ranks if any rank cannot read its groups.
        """
        joined, problem = None, ""
        try:
            groups = read_groups(path, {first, *numbers})
            joined = RolloutGroup.join([groups[first].nothing(), *(groups[n] for n in numbers)])
        except DataError as error:
            text = str(error)
            named = text.startswith(f"{path}: ")
            problem = text if named else f"{path}: damaged since it was written: {text}"
        if any_rank([bool(problem)])[0] or joined is None:
            raise DataError(problem or f"{path}: another rank cannot read its groups")
        return joined

    def _count_missing(self, group: RolloutGroup) -> None:
        """Count the tokens whose experts the servers did not report, and the tokens whose experts
        they should report.

        The servers should report the experts of all tokens except the last token of each branch.
        """
        branches = len(group.truncated)
        if (in_response := group.in_response) is not None:
            # Each branch is a prompt, then a response.
            branches = int(np.count_nonzero(in_response[1:] > in_response[:-1]))
        routes = group.routes
        assert routes is not None
        counts = torch.tensor(
            [missing_rows(routes, branches), len(routes) - branches], device=self.device
        )
        dist.all_reduce(counts, group=self.data_group)
        self.counted["missing_routes"] += int(counts[0])
        self.counted["routes"] += int(counts[1])


def origin_of_rollouts(config: Config) -> str:
    """Return a fingerprint of everything that decides responses and rewards, except the first
    weights.

    The fingerprint covers settings, prompts, suites, tokenizer and the code of rewards and
    objectives. Raises DataError.
    """
    suites = config.evaluation.model_dump(mode="json")["suites"]
    values = [decides_rollouts(config), fingerprints(config), suites]
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def shares_of_work(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return metrics that say how busy the servers were between two reports of the service's
    figures.

    If the service was restarted in between, the period begins with this restart.
    """
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
    """Count tokens without experts in [tokens, layers, k].

    The last token of each sequence, which never has experts, does not count.
    """
    return int((~routes.any((1, 2))).sum()) - num_sequences
