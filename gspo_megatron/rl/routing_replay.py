"""Routing Replay and volatility over the passes of a step: who records, who replays, who compares.

| pass | replay off | r2 | r3 |
| --- | --- | --- | --- |
| old log-probs | as the routers like | recorded | the rollout's |
| first mini-batch | as they like | as they like: the policy is still the old one | the rollout's |
| further mini-batches | as they like | the recorded ones | the rollout's |

The reference policy has a mode of its own: its pass goes as its routers like, by what the old
policy's routers chose (r2), or by the rollout's experts (r3), whatever the policy replays. Where it
wants r2, the old policy's pass covers all mini-batches and records what the routers would choose,
also while it replays the rollout's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch
from gspo_megatron.batching.redistribute import Sequences
from gspo_megatron.config.schema import RoutingSection
from gspo_megatron.models.build import Policy
from gspo_megatron.routing.expert_ids import expert_dtype
from gspo_megatron.routing.hooks import Routes, attach_hooks
from gspo_megatron.routing.replay import Recording, Replaying
from gspo_megatron.routing.store import RouteTable
from gspo_megatron.routing.volatility import Observing, RoutingMetrics


@dataclass
class _Kept:
    """Routes of a micro-batch that passes have yet to use."""

    table: RouteTable
    passes: set[str]  # "reference", "training"


class RoutingReplay:
    """The routes of one step's micro-batches, from the rollout or from the old policy's pass."""

    def __init__(self, policy: Policy, section: RoutingSection, device: torch.device) -> None:
        self.section, self.device, self.config = section, device, policy.config
        self.layers = attach_hooks(policy.models)
        drops = policy.config.moe_expert_capacity_factor is not None
        assert not (drops and section.modes), "full experts would drop tokens that are replayed"
        # by the micro-batch's id():
        self._tables: dict[tuple[str, int], _Kept] = {}  # to be replayed; by r2 or r3 too
        self._natural: dict[int, tuple[RouteTable, dict[int, Tensor]]] = {}  # with the scores
        self._first: set[int] = set()  # of the first mini-batch, which is its own old pass
        self._bytes = 0
        self._figures = self._new_figures()

    @property
    def records(self) -> bool:
        """Whether the old policy's pass has to remember its routes."""
        return "r2" in self.section.modes or self.section.volatility

    @property
    def records_all(self) -> bool:
        """Whether it has to cover the first mini-batch too: there the reference replays routes that
        the policy's own training pass does without."""
        return self.section.reference_replay == "r2"

    def start(self, batches: Sequence[Sequence[MicroBatch]], sequences: Sequences) -> None:
        """A new step: take over the rollout's routes where they are to be replayed."""
        assert not self._tables, "routes of the step before were never used"
        self._bytes, self._figures = 0, self._new_figures()
        self._first = {id(micro_batch) for micro_batch in batches[0]}
        if "r3" not in self.section.modes:
            return
        sound = []
        for micro_batch in _all(batches):
            table, is_sound = self._of_rollout(micro_batch, sequences)
            self._keep("r3", micro_batch, table)
            sound.append(is_sound)
        assert bool(torch.stack(sound).all()), (
            "the rollout's routes name an expert twice for one token, or one that does not exist"
        )
        sequences.routes = None  # the tables have them, where they are wanted

    def set_old_pass(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Before the forward pass of the old policy over `micro_batches`."""
        for micro_batch in micro_batches:
            routes: Routes | None = None
            if self.section.replay == "r3":
                routes = self._replaying("r3", micro_batch)
            observed = self._is_observed(micro_batch)
            if observed or "r2" in self.section.modes:
                routes = Recording(routes, keep_scores=observed)
            micro_batch.routes = routes

    def take_old_pass(self, micro_batches: Sequence[MicroBatch]) -> None:
        """After it: keep what was recorded, and let the routers be."""
        for micro_batch in micro_batches:
            routes, micro_batch.routes = micro_batch.routes, None
            inner = routes.inner if isinstance(routes, Recording) else routes
            if isinstance(inner, Replaying):
                inner.assert_used(training=False)
            if not isinstance(routes, Recording):
                continue
            layers = tuple(sorted(routes.experts))
            assert layers == self.layers, f"layers {layers} recorded of {self.layers}"
            table = self._recorded(routes, micro_batch)
            if "r2" in self.section.modes:
                self._keep("r2", micro_batch, table)
            if self._is_observed(micro_batch):
                self._natural[id(micro_batch)] = (table, routes.scores)

    def set_reference_pass(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Before the reference policy's pass."""
        mode = self.section.reference_replay
        if mode != "off":
            for micro_batch in micro_batches:
                micro_batch.routes = self._replaying(mode, micro_batch)

    def finish_reference_pass(self, micro_batches: Sequence[MicroBatch]) -> None:
        """After it: its routes were used, and those are given up that nobody else wants."""
        for micro_batch in micro_batches:
            routes, micro_batch.routes = micro_batch.routes, None
            if isinstance(routes, Replaying):
                routes.assert_used(training=False)
                self._give_up(self.section.reference_replay, micro_batch, "reference")

    def set_training_pass(self, batch: Sequence[MicroBatch]) -> None:
        """Before the training pass of a mini-batch."""
        mode = self.section.replay
        for micro_batch in batch:
            routes: Routes | None = None
            unrecorded = (mode, id(micro_batch)) not in self._tables
            spared = mode == "r2" and unrecorded and id(micro_batch) in self._first
            if mode != "off" and not spared:
                routes = self._replaying(mode, micro_batch)
            if id(micro_batch) in self._natural:
                padding = self._local(micro_batch.packed.padding_mask)
                real = None if padding is None else ~padding
                old, scores = self._natural[id(micro_batch)]
                routes = Observing(old, scores, real, self._figures, routes)
            micro_batch.routes = routes

    def finish_training_pass(self, batch: Sequence[MicroBatch]) -> None:
        """After it: every route was used, and is given up."""
        for micro_batch in batch:
            routes, micro_batch.routes = micro_batch.routes, None
            self._natural.pop(id(micro_batch), None)
            inner = routes.inner if isinstance(routes, Observing) else routes
            if isinstance(inner, Replaying):
                inner.assert_used(training=True)
                self._give_up(self.section.replay, micro_batch, "training")

    def figures(self) -> dict[str, float]:
        """The step's metrics, the same on every rank. Every rank calls it."""
        assert not self._tables, "recorded routes were never used"
        metrics = {}
        if self.section.modes:
            stored = torch.tensor(float(self._bytes), dtype=torch.float64, device=self.device)
            dist.all_reduce(stored)
            metrics["replay/bytes"] = float(stored)
        if self.section.volatility:
            group = parallel_state.get_pipeline_model_parallel_group()
            metrics |= self._figures.reduce(group)
        return metrics

    def _new_figures(self) -> RoutingMetrics:
        config, replayed = self.config, self.section.replay != "off"
        return RoutingMetrics(
            config.num_layers, config.num_moe_experts, self.device, replayed=replayed
        )

    def _is_observed(self, micro_batch: MicroBatch) -> bool:
        """No router has moved before the first mini-batch is trained on: it would only dilute the
        others' volatility."""
        return self.section.volatility and id(micro_batch) not in self._first

    def _recorded(self, recording: Recording, micro_batch: MicroBatch) -> RouteTable:
        if self.layers:
            return recording.table(on_host=self.section.store_on_host)
        # A stage of dense layers takes part in what the stages count together.
        index = self._local(micro_batch.packed.token_index)
        assert index is not None
        return RouteTable((), self._no_routes(len(index)).transpose(0, 1), None)

    def _no_routes(self, tokens: int) -> Tensor:
        """[tokens, layers, k] of no meaning."""
        size = (tokens, len(self.layers), self.config.moe_router_topk)
        dtype = expert_dtype(self.config.num_moe_experts)
        return torch.zeros(size, dtype=dtype, device=self.device)

    def _keep(self, mode: str, micro_batch: MicroBatch, table: RouteTable) -> None:
        wanted = {"training": self.section.replay, "reference": self.section.reference_replay}
        passes = {name for name, wants in wanted.items() if wants == mode}
        self._tables[mode, id(micro_batch)] = _Kept(table, passes)
        self._bytes += table.num_bytes

    def _replaying(self, mode: str, micro_batch: MicroBatch) -> Replaying:
        kept = self._tables.get((mode, id(micro_batch)))
        assert kept is not None, "no routes to replay"
        return Replaying(kept.table)

    def _give_up(self, mode: str, micro_batch: MicroBatch, name: str) -> None:
        """The pass `name` is over; the last one frees the routes."""
        kept = self._tables[mode, id(micro_batch)]
        kept.passes.remove(name)
        if not kept.passes:
            del self._tables[mode, id(micro_batch)]

    def _of_rollout(
        self, micro_batch: MicroBatch, sequences: Sequences
    ) -> tuple[RouteTable, Tensor]:
        """Each local token's row of the rollout's routes. A response's last token was never fed to
        the rollout engine: it has none, and no log-prob depends on its experts. Also a bool: every
        token has k experts of the model's."""
        assert sequences.routes is not None, "the rollout engine did not record its routes"
        packed = micro_batch.packed
        pieces = [sequences.routes[number] for number in packed.members]
        nothing = self._no_routes(1)
        flat = torch.cat([*pieces, nothing])  # [tokens of the members + 1, layers, k]
        index = self._local(packed.token_index)
        assert index is not None
        last = torch.zeros(len(flat), dtype=torch.bool, device=self.device)
        ends = torch.tensor([len(p) for p in pieces], dtype=torch.long).cumsum(0) - 1
        last[ends.to(self.device)] = True
        last[-1] = True  # padding points here
        known = ~last[index]
        experts = flat[index]
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
    weight with itself, and a token of zeros, an engine's way to leave one out, go to one expert."""
    ranked = experts.sort(dim=-1).values
    differ = (ranked[..., 1:] != ranked[..., :-1]).all()
    return differ & ((experts >= 0) & (experts < num_experts)).all()


def _all(batches: Sequence[Sequence[MicroBatch]]) -> Iterator[MicroBatch]:
    return (micro_batch for batch in batches for micro_batch in batch)
