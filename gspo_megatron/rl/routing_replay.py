"""Routing Replay and volatility in the passes of a step: a pass records routes, replays them or
compares them.

| pass | replay off | r2 | r3 |
| --- | --- | --- | --- |
| old log-probs | the routers choose | the routers choose, recorded | the rollout's experts |
| first mini-batch | the routers choose | the routers choose | the rollout's experts |
| further mini-batches | the routers choose | the recorded experts | the rollout's experts |

In the first mini-batch of r2 the routers have not been updated yet, so they choose as the old
policy does.

The reference policy has its own mode, independent of the policy's mode. The pass of the reference
policy uses its own routers (off), the choice of the old policy's routers (r2), or the rollout's
experts (r3). If the mode of the reference policy is r2, the pass of the old policy covers all
mini-batches. That pass then records the choice of the old policy's routers, even if the pass itself
replays the rollout's experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch
from gspo_megatron.config.schema import RoutingSection
from gspo_megatron.models.build import Policy
from gspo_megatron.routing.hooks import Routes, attach_hooks
from gspo_megatron.routing.replay import Recording, Replaying, RouteTable, no_routes
from gspo_megatron.routing.volatility import Observing, RoutingMetrics

MicroBatches = Sequence[MicroBatch]


class RoutingReplayOff:
    """No replay: in every pass the routers choose, and nothing is recorded."""

    records = False  # whether the old policy's pass must record its routes
    records_all = False  # whether this pass must also cover the first mini-batch

    def start(self, mini_batches: Sequence[MicroBatches]) -> None:
        """Begin a new step."""

    def old_pass(self, micro_batches: MicroBatches) -> AbstractContextManager[None]:
        """Return the context for the forward pass of the old policy."""
        return nullcontext()

    def reference_pass(self, micro_batches: MicroBatches) -> AbstractContextManager[None]:
        """Return the context for the forward pass of the reference policy."""
        return nullcontext()

    def training_pass(self, micro_batches: MicroBatches) -> AbstractContextManager[None]:
        """Return the context for the forward and backward pass of one mini-batch."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics, the same on every rank. Every rank calls it."""
        return {}


@dataclass
class RecordedRoutes:
    """The routes of one micro-batch, for later passes of the step."""

    # Whether the micro-batch is in the first mini-batch, which needs no pass for old log-probs.
    in_first: bool
    tables: dict[str, RouteTable] = field(default_factory=dict)  # by mode: r2, r3
    # by mode: passes that still need the table
    waiting: dict[str, set[str]] = field(default_factory=dict)
    # The choice of the old policy's routers, and their scores by layer, for volatility.
    natural: tuple[RouteTable, dict[int, Tensor]] | None = None


class RoutingReplay(RoutingReplayOff):
    """Records and replays routes. Each micro-batch of the step holds its own routes."""

    def __init__(self, policy: Policy, section: RoutingSection, device: torch.device) -> None:
        self.section, self.device, self.config = section, device, policy.config
        self.layers = attach_hooks(policy.models)
        drops = policy.config.moe_expert_capacity_factor is not None
        assert not (drops and section.modes), "full experts would drop tokens that are replayed"
        self.records = "r2" in section.modes or section.volatility
        # The reference pass also needs routes of the first mini-batch; the training pass does not.
        self.records_all = section.reference_replay == "r2"
        self._micro_batches: list[MicroBatch] = []  # of the current step

    def start(self, mini_batches: Sequence[MicroBatches]) -> None:
        """Begin a new step. If a mode is r3, take the rollout's routes from the micro-batches."""
        self._assert_all_used()
        self._micro_batches = list(chain.from_iterable(mini_batches))
        self._bytes, config = 0, self.config
        self._metrics = RoutingMetrics(
            config.num_layers,
            config.num_moe_experts,
            self.device,
            replayed=self.section.replay != "off",
        )
        for number, micro_batches in enumerate(mini_batches):
            for micro_batch in micro_batches:
                micro_batch.recorded_routes = RecordedRoutes(in_first=number == 0)
        if "r3" not in self.section.modes:
            return
        sound = []
        for micro_batch in self._micro_batches:
            table, is_sound = self._of_rollout(micro_batch)
            self._keep("r3", micro_batch, table)
            micro_batch.rollout_routes = None
            sound.append(is_sound)
        assert bool(torch.stack(sound).all()), (
            "the rollout's routes name an expert twice for one token, or one that does not exist"
        )

    @contextlib.contextmanager
    def old_pass(self, micro_batches: MicroBatches) -> Generator[None]:
        """Replay the rollout's routes (r3), and record (r2, volatility). See RoutingReplayOff."""
        for micro_batch in micro_batches:
            routes: Routes | None = None
            if self.section.replay == "r3":
                routes = self._replaying("r3", micro_batch)
            observed = self._is_observed(micro_batch)
            if observed or "r2" in self.section.modes:
                routes = Recording(
                    routes,
                    keep_scores=observed,
                    num_layers=len(self.layers),
                    on_host=self.section.store_on_host,
                )
            micro_batch.routes = routes
        yield
        for micro_batch in micro_batches:
            routes = self._end_of_pass(micro_batch, "old", self.section.replay)
            if isinstance(routes, Recording):
                self._take(routes, micro_batch)

    @contextlib.contextmanager
    def reference_pass(self, micro_batches: MicroBatches) -> Generator[None]:
        """See RoutingReplayOff."""
        mode = self.section.reference_replay
        if mode != "off":
            for micro_batch in micro_batches:
                micro_batch.routes = self._replaying(mode, micro_batch)
        yield
        for micro_batch in micro_batches:
            self._end_of_pass(micro_batch, "reference", mode)

    @contextlib.contextmanager
    def training_pass(self, micro_batches: MicroBatches) -> Generator[None]:
        """Replay the routes of each micro-batch, then release them. See RoutingReplayOff."""
        mode = self.section.replay
        for micro_batch in micro_batches:
            kept = micro_batch.recorded_routes
            routes: Routes | None = None
            spared = mode == "r2" and kept.in_first and mode not in kept.tables
            if mode != "off" and not spared:
                routes = self._replaying(mode, micro_batch)
            if kept.natural is not None:
                padding = self._local(micro_batch.packed.padding_mask)
                real = None if padding is None else ~padding
                routes = Observing(*kept.natural, real, self._metrics, routes)
            micro_batch.routes = routes
        yield
        for micro_batch in micro_batches:
            self._end_of_pass(micro_batch, "training", mode)
            micro_batch.recorded_routes.natural = None

    def metrics(self) -> dict[str, float]:
        """See RoutingReplayOff."""
        self._assert_all_used()
        self._micro_batches = []
        metrics = {}
        if self.section.modes:
            stored = torch.tensor(self._bytes, dtype=torch.float64, device=self.device)
            dist.all_reduce(stored)
            metrics["replay/bytes"] = float(stored)
        if self.section.volatility:
            group = parallel_state.get_pipeline_model_parallel_group()
            metrics |= self._metrics.reduce(group)
        return metrics

    def _assert_all_used(self) -> None:
        unused = any(m.recorded_routes.tables for m in self._micro_batches)
        assert not unused, "recorded routes were never used"

    def _is_observed(self, micro_batch: MicroBatch) -> bool:
        """Return whether a micro-batch counts for volatility.

        Micro-batches of the first mini-batch do not count. No router has been updated before them,
        so their volatility is 0 and would only lower the mean.
        """
        return self.section.volatility and not micro_batch.recorded_routes.in_first

    def _take(self, recording: Recording, micro_batch: MicroBatch) -> None:
        """Store what the old policy's pass recorded."""
        if self.layers:
            layers = recording.layers
            assert layers == self.layers, f"layers {layers} recorded of {self.layers}"
            table = recording.table()
        else:  # a pipeline stage without MoE layers must also join the sums over all stages
            index = self._local(micro_batch.packed.token_index)
            assert index is not None
            nothing = no_routes(self.config, 0, len(index), device=self.device)
            table = RouteTable((), nothing, None)
        if "r2" in self.section.modes:
            self._keep("r2", micro_batch, table)
        if self._is_observed(micro_batch):
            micro_batch.recorded_routes.natural = (table, recording.scores)

    def _keep(self, mode: str, micro_batch: MicroBatch, table: RouteTable) -> None:
        modes = {"training": self.section.replay, "reference": self.section.reference_replay}
        kept = micro_batch.recorded_routes
        kept.tables[mode] = table
        kept.waiting[mode] = {name for name, wanted in modes.items() if wanted == mode}
        self._bytes += table.num_bytes

    def _replaying(self, mode: str, micro_batch: MicroBatch) -> Replaying:
        table = micro_batch.recorded_routes.tables.get(mode)
        assert table is not None, "no routes to replay"
        return Replaying(table)

    def _end_of_pass(self, micro_batch: MicroBatch, name: str, mode: str) -> Routes | None:
        """Remove and return the routes of a pass. If they were replayed, check that the pass used
        them."""
        routes, micro_batch.routes = micro_batch.routes, None
        inner = routes.inner if isinstance(routes, (Recording, Observing)) else routes
        if isinstance(inner, Replaying):
            inner.assert_used(training=name == "training")
            if name != "old":
                self._release(mode, micro_batch, name)
        return routes

    def _release(self, mode: str, micro_batch: MicroBatch, name: str) -> None:
        """Mark the pass `name` as finished; the last pass that uses the routes frees them."""
        kept = micro_batch.recorded_routes
        kept.waiting[mode].remove(name)
        if not kept.waiting[mode]:
            del kept.tables[mode]

    def _of_rollout(self, micro_batch: MicroBatch) -> tuple[RouteTable, Tensor]:
        """Return the rollout's routes of the local tokens, and a scalar bool that says whether they
        are sound.

        Sound means that every token with routes has k different existing experts. The rollout
        engine never computes the last token of a branch: this token has no routes, and no log-prob
        depends on its experts. If a token has zeros in all layers, a server did not report its
        routes. For tokens without routes the routers choose the experts.
        """
        assert micro_batch.rollout_routes is not None, "the rollout engine recorded no routes"
        pieces = micro_batch.rollout_routes
        nothing = no_routes(self.config, 1, len(self.layers), device=self.device)
        flat = torch.cat([*pieces, nothing])  # [tokens of the sequences + 1, layers, k]
        index = self._local(micro_batch.packed.token_index)
        assert index is not None
        last = torch.zeros(len(flat), dtype=torch.bool, device=self.device)
        ends = torch.tensor([len(p) for p in pieces], dtype=torch.long).cumsum(0) - 1
        last[ends.to(self.device)] = True
        last[-1] = True  # the index of padding is -1
        experts = flat[index]
        known = ~last[index]
        if experts.shape[-1] > 1 and experts.shape[-2]:  # k > 1 different experts cannot all be 0
            known &= (experts != 0).flatten(1).any(1)
        sound = _are_sound(experts[known], self.config.num_moe_experts)
        experts = experts.permute(1, 0, 2).to(nothing.dtype).contiguous()
        table = RouteTable(self.layers, experts, known)
        return table.moved(on_host=self.section.store_on_host), sound

    def _local(self, values: Tensor | None) -> Tensor | None:
        """Reorder [rows, tokens / CP] of a micro-batch to [tokens] in the order of this rank's
        routers.

        In that order, the first tokens of all rows come first, then the second ones, and so on.
        With sequence parallelism, each tensor-parallel rank has an equal part.
        """
        if values is None:
            return None
        values = values.t()
        if self.config.sequence_parallel:
            size = self.config.tensor_model_parallel_size
            values = values.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return values.flatten()


def _are_sound(experts: Tensor, num_experts: int) -> Tensor:
    """Return a scalar bool: every row [..., k] has k different existing experts.

    The check detects engines that leave tokens out and fill the rows of these tokens with zeros. It
    also detects an expert that occurs twice for one token, whose replay would give wrong weights.
    """
    ranked = experts.sort(dim=-1).values
    differ = (ranked[..., 1:] != ranked[..., :-1]).all()
    return differ & ((experts >= 0) & (experts < num_experts)).all()
