"""Routing Replay and volatility over the passes of a step: which pass records, replays or compares.

| pass | replay off | r2 | r3 |
| --- | --- | --- | --- |
| old log-probs | the routers choose | recorded | the rollout's experts |
| first mini-batch | the routers choose | the routers choose, not yet updated | the rollout's |
| further mini-batches | the routers choose | the recorded experts | the rollout's |

The reference policy has a mode of its own: its pass follows its own routers, the choice of the old
policy's routers (r2), or the rollout (r3), whatever the policy replays. With r2 there, the old
policy's pass covers all mini-batches and records what its routers would choose, even while it
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
    """Every pass follows its routers, and nothing is recorded."""

    records = False  # whether the old policy's pass has to remember its routes
    records_all = False  # whether it has to cover the first mini-batch too

    def start(self, mini_batches: Sequence[MicroBatches]) -> None:
        """A new step begins."""

    def old_pass(self, micro_batches: MicroBatches) -> AbstractContextManager[None]:
        """The forward pass of the old policy runs inside."""
        return nullcontext()

    def reference_pass(self, micro_batches: MicroBatches) -> AbstractContextManager[None]:
        """The forward pass of the reference policy runs inside."""
        return nullcontext()

    def training_pass(self, micro_batches: MicroBatches) -> AbstractContextManager[None]:
        """Forward and backward pass of one mini-batch run inside."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        """The step's metrics, the same on every rank. Every rank calls it."""
        return {}


@dataclass
class RecordedRoutes:
    """The routes of one micro-batch that later passes of the step use."""

    in_first: bool  # in the first mini-batch, whose training pass stands for its old pass
    tables: dict[str, RouteTable] = field(default_factory=dict)  # by mode: r2, r3
    waiting: dict[str, set[str]] = field(default_factory=dict)  # by mode: passes still to come
    # The old policy's own choice and its scores by layer, for volatility.
    natural: tuple[RouteTable, dict[int, Tensor]] | None = None


class RoutingReplay(RoutingReplayOff):
    """Records and replays the routes of one step's micro-batches, which carry them."""

    def __init__(self, policy: Policy, section: RoutingSection, device: torch.device) -> None:
        self.section, self.device, self.config = section, device, policy.config
        self.layers = attach_hooks(policy.models)
        drops = policy.config.moe_expert_capacity_factor is not None
        assert not (drops and section.modes), "full experts would drop tokens that are replayed"
        self.records = "r2" in section.modes or section.volatility
        # There the reference replays routes that the policy's own training pass does without.
        self.records_all = section.reference_replay == "r2"
        self._micro_batches: list[MicroBatch] = []  # of the present step

    def start(self, mini_batches: Sequence[MicroBatches]) -> None:
        """A new step begins: take over the rollout's routes where they are to be replayed."""
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
        """See RoutingReplayOff: r3 replays the rollout's routes; r2 and volatility record."""
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
        """See RoutingReplayOff: every route is used once, and released."""
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
        """No router has moved before the first mini-batch is trained on: its zeros would only
        lower the volatility of the others."""
        return self.section.volatility and not micro_batch.recorded_routes.in_first

    def _take(self, recording: Recording, micro_batch: MicroBatch) -> None:
        """Keep what the old policy's pass recorded."""
        if self.layers:
            layers = recording.layers
            assert layers == self.layers, f"layers {layers} recorded of {self.layers}"
            table = recording.table()
        else:  # a stage of dense layers takes part in what the stages count together
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
        """Take away what the pass did at the routers, and check that it used its routes."""
        routes, micro_batch.routes = micro_batch.routes, None
        inner = routes.inner if isinstance(routes, (Recording, Observing)) else routes
        if isinstance(inner, Replaying):
            inner.assert_used(training=name == "training")
            if name != "old":
                self._release(mode, micro_batch, name)
        return routes

    def _release(self, mode: str, micro_batch: MicroBatch, name: str) -> None:
        """The pass `name` is over; the last pass that uses the routes frees them."""
        kept = micro_batch.recorded_routes
        kept.waiting[mode].remove(name)
        if not kept.waiting[mode]:
            del kept.tables[mode]

    def _of_rollout(self, micro_batch: MicroBatch) -> tuple[RouteTable, Tensor]:
        """The rollout's routes of each local token, and a bool: every token has k different experts
        that exist. A response's last token was never fed to the rollout engine: it has no routes,
        and no log-prob depends on its experts. Zeros in all layers are no routes either: a server
        did not report them, and the routers choose for that token."""
        assert micro_batch.rollout_routes is not None, "the rollout engine recorded no routes"
        pieces = micro_batch.rollout_routes
        nothing = no_routes(self.config, 1, len(self.layers), device=self.device)
        flat = torch.cat([*pieces, nothing])  # [tokens of the sequences + 1, layers, k]
        index = self._local(micro_batch.packed.token_index)
        assert index is not None
        last = torch.zeros(len(flat), dtype=torch.bool, device=self.device)
        ends = torch.tensor([len(p) for p in pieces], dtype=torch.long).cumsum(0) - 1
        last[ends.to(self.device)] = True
        last[-1] = True  # padding points here
        experts = flat[index]
        known = ~last[index]
        if experts.shape[-1] > 1 and experts.shape[-2]:  # k different experts are not all 0
            known &= (experts != 0).flatten(1).any(1)
        sound = _are_sound(experts[known], self.config.num_moe_experts)
        experts = experts.permute(1, 0, 2).to(nothing.dtype).contiguous()
        table = RouteTable(self.layers, experts, known)
        return table.moved(on_host=self.section.store_on_host), sound

    def _local(self, values: Tensor | None) -> Tensor | None:
        """[rows, tokens / CP] of a micro-batch -> [tokens] as this rank's routers see them: token
        by token over the rows, cut for sequence parallelism."""
        if values is None:
            return None
        values = values.t()
        if self.config.sequence_parallel:
            size = self.config.tensor_model_parallel_size
            values = values.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return values.flatten()


def _are_sound(experts: Tensor, num_experts: int) -> Tensor:
    """Scalar bool: all rows [..., k] are k different experts. An expert named twice would share its
    weight with itself. Engines that leave a token out may fill its row with zeros."""
    ranked = experts.sort(dim=-1).values
    differ = (ranked[..., 1:] != ranked[..., :-1]).all()
    return differ & ((experts >= 0) & (experts < num_experts)).all()
