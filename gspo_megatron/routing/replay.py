"""Routing Replay: a forward pass uses the experts of an earlier pass (arXiv 2507.18071, 5.3).

It replays only the choice of experts. Their weights come from the scores of the router in the
current pass, and gradients flow through them. A pass can also record its experts, or compare the
routers' own choice with that of an earlier pass, for the metrics of volatility.

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
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gspo_megatron.config.schema import RoutingSection
from gspo_megatron.routing.hooks import Choice, Routes, attach_hooks, routed
from gspo_megatron.routing.volatility import RoutingMetrics

if TYPE_CHECKING:
    from gspo_megatron.batching.micro_batches import MicroBatch
    from gspo_megatron.models.build import Policy

    MicroBatches = Sequence[MicroBatch]

# The passes of a step with the old policy, the reference policy and the trained policy.
Pass = Literal["old", "reference", "training"]

# The most tokens of a micro-batch whose scores are recorded; they are evenly spaced. All scores
# would take 12 KB a token with 48 layers of 128 experts. The routes take 1/32 of that.
MAX_SCORED_TOKENS = 512


def expert_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype for expert numbers: one byte for up to 256 experts, else two."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def no_routes(config: TransformerConfig, *sizes: int, device: torch.device) -> Tensor:
    """Return a table of zeros, [*sizes, k], for ranks without tokens or without layers."""
    dtype = expert_dtype(config.num_moe_experts)
    return torch.zeros((*sizes, config.moe_router_topk), dtype=dtype, device=device)


@dataclass
class RouteTable:
    """The experts of a micro-batch's tokens on this rank.

    It covers the layers of this rank, and its shard of the tokens under context and sequence
    parallelism.
    """

    layers: tuple[int, ...]
    experts: Tensor  # [layers, tokens, k] uint8 or int16
    known: Tensor | None  # [tokens] bool; None: all. For unknown tokens the router chooses.

    def moved(self, *, on_host: bool) -> RouteTable:
        """Copy the experts to pinned host memory if `on_host` is true."""
        if on_host:
            self.experts = to_host(self.experts)
        return self

    @property
    def num_bytes(self) -> int:
        return self.experts.numel() * self.experts.element_size()

    def of_layer(self, layer: int, device: torch.device) -> Tensor:
        """Return the experts of one layer, [tokens, k] int64, on `device`.

        Copies only this layer. So with tables on the host, a pass over many micro-batches needs
        device memory for one layer of one micro-batch.
        """
        experts = self.experts[self.layers.index(layer)]
        return experts.to(device, non_blocking=True).long()


def to_host(values: Tensor) -> Tensor:
    """Copy a tensor to pinned host memory, from which copies to the device are asynchronous."""
    if not values.is_cuda:
        return values
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    return host.copy_(values, non_blocking=True)


def scored_tokens(num_tokens: int) -> slice:
    """Return the rows of a micro-batch whose scores are recorded."""
    return slice(None, None, max(1, -(-num_tokens // MAX_SCORED_TOKENS)))


class Recording:
    """Records the routers' own choice, even if `inner` makes another choice, which is then used."""

    def __init__(
        self,
        inner: Routes | None = None,
        *,
        keep_scores: bool = False,
        num_layers: int | None = None,
        on_host: bool = False,
    ) -> None:
        """`num_layers` is the number of routers on this rank. After the last router, the recording
        joins the routes into one table. With `on_host` it moves the table to the host, so that
        tables do not fill the device memory during a pass.
        """
        self.experts: dict[int, Tensor] = {}  # by layer, [tokens, k]
        self.scores: dict[int, Tensor] = {}  # by layer, [scored tokens, experts], if keep_scores
        self.inner, self._keep_scores = inner, keep_scores
        self._num_layers, self._on_host = num_layers, on_host
        self._table: RouteTable | None = None

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        chosen = native()
        is_known = layer in self.experts or self._table is not None
        assert not is_known, f"layer {layer} is recorded already"
        self.experts[layer] = chosen[1].detach().to(expert_dtype(scores.shape[-1]))
        if self._keep_scores:
            # a copy, because a view would keep the scores of all tokens
            scored = scores.detach()[scored_tokens(len(scores))].to(torch.bfloat16, copy=True)
            self.scores[layer] = to_host(scored) if self._on_host else scored
        if len(self.experts) == self._num_layers:
            self._table = self.table()
            self.experts = {}
        return chosen if self.inner is None else self.inner.choose(layer, scores, lambda: chosen)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers recorded so far."""
        return tuple(sorted(self.experts)) if self._table is None else self._table.layers

    def table(self) -> RouteTable:
        """Return the routes of all layers in one table."""
        if self._table is not None:
            return self._table
        experts = torch.stack([self.experts[layer] for layer in self.layers])
        return RouteTable(self.layers, experts, None).moved(on_host=self._on_host)


@contextlib.contextmanager
def recorded() -> Generator[dict[int, Tensor]]:
    """Record the experts of forward passes in this context; yields [tokens, k] by layer."""
    recording = Recording()
    with routed(recording):
        yield recording.experts


class Replaying:
    """Sends tokens to the experts of a table."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._uses: Counter[tuple[int, bool]] = Counter()  # by (layer, with gradients)

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        experts = self._table.of_layer(layer, scores.device)
        assert len(experts) == len(scores), (
            f"layer {layer}: routes of {len(experts)} tokens for {len(scores)}"
        )
        self._uses[layer, torch.is_grad_enabled()] += 1
        known = self._table.known
        if known is not None:
            experts = torch.where(known[:, None].to(scores.device), experts, native()[1])
        return scores.gather(1, experts), experts

    def assert_used(self, *, training: bool) -> None:
        """Assert that every layer used its routes exactly once.

        In training, this counts the pass with gradients (recomputation first runs one without
        gradients). Otherwise it counts the pass without gradients.
        """
        uses = {layer: self._uses[layer, training] for layer in self._table.layers}
        missing = sorted(layer for layer, count in uses.items() if count == 0)
        assert not missing, f"the routers of layers {missing} never asked for their routes"
        again = sorted(layer for layer, count in uses.items() if count > 1)
        assert not again, f"the routers of layers {again} asked for their routes more than once"
        stray = not training and any(with_gradients for _, with_gradients in self._uses)
        assert not stray, "routes of a pass without gradients were used in one with gradients"


class Observing:
    """Compares the routers' own choice with a table of old routes, whichever experts are used."""

    def __init__(
        self,
        old: RouteTable,
        old_scores: dict[int, Tensor],
        real: Tensor,
        figures: RoutingMetrics,
        inner: Routes | None,
    ) -> None:
        """real: [tokens] bool, False on padding; inner: chooses the experts; None: the router
        chooses."""
        self._old, self._old_scores = old, old_scores
        self._figures, self.inner = figures, inner
        # The rows of real tokens, and of those whose scores are recorded. As numbers, so that the
        # host does not wait for a GPU in every layer.
        self._real = real.nonzero().squeeze(1)
        self._scored = real[scored_tokens(len(real))].nonzero().squeeze(1)
        # [real tokens] bool: whether the experts of a token have changed in any layer
        self.changed = torch.zeros(len(self._real), dtype=torch.bool, device=real.device)
        self._seen: set[int] = set()

    def choose(self, layer: int, scores: Tensor, native: Callable[[], Choice]) -> Choice:
        """See Routes.choose."""
        natural, inner = native(), self.inner
        used = natural if inner is None else inner.choose(layer, scores, lambda: natural)
        if layer not in self._seen:  # recomputation calls this again in the backward pass
            self._seen.add(layer)
            self._compare(layer, scores.detach(), natural[1], used[1])
        return used

    @torch.no_grad()
    def _compare(self, layer: int, scores: Tensor, natural: Tensor, used: Tensor) -> None:
        old = self._old.of_layer(layer, scores.device)
        scored = scored_tokens(len(scores))
        # Round the new scores like the old ones. Otherwise the rounding error of the old scores
        # (2^-9 relative) would count as a shift, and the true shift of a step is often smaller than
        # this error.
        new_scores = scores[scored].to(torch.bfloat16).float()
        old_scores = self._old_scores[layer].to(scores.device, non_blocking=True).float()
        shift = (new_scores - old_scores).abs().mean(dim=-1)
        old, natural, used = (each.index_select(0, self._real) for each in (old, natural, used))
        shift = shift.index_select(0, self._scored)
        still_chosen = (old[:, :, None] == natural[:, None, :]).any(dim=-1).sum(dim=-1)
        lost = 1.0 - still_chosen / old.shape[1]
        self.changed |= lost > 0
        self._figures.add(layer, lost, shift, natural, used)


class MicroBatchRoutes:
    """The routes of a micro-batch, from the pass of a step that records them to the last pass that
    replays them."""

    def __init__(
        self,
        section: RoutingSection,
        layers: tuple[int, ...],
        metrics: RoutingMetrics,
        real: Tensor,
        *,
        is_first: bool,
    ) -> None:
        """layers: those of this rank; real: [tokens] bool, False on padding; is_first: the
        micro-batch is in the first mini-batch, which may have no pass of the old policy."""
        self._section, self._layers, self._metrics = section, layers, metrics
        self._real, self._is_first = real, is_first
        # Micro-batches of the first mini-batch do not count for volatility. No router has been
        # updated before them, so their volatility is 0 and would only lower the mean.
        self._is_observed = section.volatility and not is_first
        self.tables: dict[str, RouteTable] = {}  # by mode: r2, r3
        self._waiting: dict[str, set[Pass]] = {}  # by mode: passes that still need the table
        # The choice of the old policy's routers, and their scores by layer, for volatility.
        self.natural: tuple[RouteTable, dict[int, Tensor]] | None = None
        self.changed: Tensor | None = None  # see Observing; None: the micro-batch does not count
        self.num_bytes = 0  # of all tables so far

    def keep_rollout(
        self, pieces: Sequence[Tensor] | None, index: Tensor, config: TransformerConfig
    ) -> Tensor:
        """Store the rollout's routes. Returns a scalar bool that says whether they are sound: every
        token with routes has k different existing experts.

        pieces: [tokens, layers, k] for each branch; index: [tokens of this rank], the place of each
        token in the joined pieces, or -1 for padding. The rollout engine never computes the last
        token of a branch: this token has no routes, and no log-prob depends on its experts. If a
        token has zeros in all layers, a server did not report its routes. For tokens without routes
        the routers choose the experts.
        """
        assert pieces is not None, "the rollout engine recorded no routes"
        nothing = no_routes(config, 1, len(self._layers), device=index.device)
        flat = torch.cat([*pieces, nothing])  # [tokens of the sequences + 1, layers, k]
        last = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
        ends = torch.tensor([len(p) for p in pieces], dtype=torch.long).cumsum(0) - 1
        last[ends.to(flat.device)] = True
        last[-1] = True  # the index of padding is -1
        experts = flat[index]
        known = ~last[index]
        if experts.shape[-1] > 1 and experts.shape[-2]:  # k > 1 different experts cannot all be 0
            known &= (experts != 0).flatten(1).any(1)
        sound = _are_sound(experts[known], config.num_moe_experts)
        experts = experts.permute(1, 0, 2).to(nothing.dtype).contiguous()
        table = RouteTable(self._layers, experts, known)
        self._keep("r3", table.moved(on_host=self._section.store_on_host))
        return sound

    def _keep(self, mode: str, table: RouteTable) -> None:
        """Store a table for the passes of the step that replay this mode."""
        mode_of_pass: dict[Pass, str] = {
            "training": self._section.replay,
            "reference": self._section.reference_replay,
        }
        self.tables[mode] = table
        self._waiting[mode] = {name for name, replayed in mode_of_pass.items() if replayed == mode}
        self.num_bytes += table.num_bytes

    def begin_pass(self, name: Pass) -> Routes | None:
        """Return what chooses the experts in a pass; None: the routers choose."""
        mode, routes = self._mode(name), None
        if mode != "off":
            assert mode in self.tables, "no routes to replay"
            routes = Replaying(self.tables[mode])
        if name == "old" and (self._is_observed or "r2" in self._section.modes):
            return Recording(
                routes,
                keep_scores=self._is_observed,
                num_layers=len(self._layers),
                on_host=self._section.store_on_host,
            )
        if name == "training" and self.natural is not None:
            routes = Observing(*self.natural, self._real, self._metrics, routes)
            self.changed = routes.changed
        return routes

    def end_pass(self, name: Pass, routes: Routes | None) -> None:
        """Check that a pass has used its routes, store what it has recorded, and free tables that
        no later pass needs."""
        inner = routes.inner if isinstance(routes, (Recording, Observing)) else routes
        if isinstance(inner, Replaying):
            inner.assert_used(training=name == "training")
            if name != "old":
                self._release(self._mode(name), name)
        if isinstance(routes, Recording):
            self._take(routes)
        if name == "training":
            self.natural = None

    def _mode(self, name: Pass) -> str:
        """Return the mode that a pass replays, or off."""
        if name == "reference":
            return self._section.reference_replay
        mode = self._section.replay
        # In r2, the old policy's pass records. The first mini-batch may have no such pass, and its
        # routers choose as the old policy's do.
        records = name == "old" or (self._is_first and mode not in self.tables)
        return "off" if mode == "r2" and records else mode

    def _take(self, recording: Recording) -> None:
        """Store what the old policy's pass recorded."""
        if self._layers:
            layers = recording.layers
            assert layers == self._layers, f"layers {layers} recorded of {self._layers}"
            table = recording.table()
        else:  # a pipeline stage without MoE layers must also join the sums over all stages
            table = RouteTable((), self._real.new_zeros((0, 0, 0), dtype=torch.uint8), None)
        if "r2" in self._section.modes:
            self._keep("r2", table)
        if self._is_observed:
            self.natural = (table, recording.scores)

    def _release(self, mode: str, name: Pass) -> None:
        """Mark a pass as finished; the last pass that uses the routes frees them."""
        self._waiting[mode].remove(name)
        if not self._waiting[mode]:
            del self.tables[mode]


class RoutingReplayOff:
    """No replay: in every pass the routers choose, and nothing is recorded."""

    records = False  # whether the old policy's pass must record its routes
    records_all = False  # whether this pass must also cover the first mini-batch

    def start(self, mini_batches: Sequence[MicroBatches]) -> None:
        """Begin a new step."""

    def during(self, name: Pass, micro_batches: MicroBatches) -> AbstractContextManager[None]:
        """Return the context for a pass over these micro-batches."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics, the same on every rank. Every rank calls it."""
        return {}


class RoutingReplay(RoutingReplayOff):
    """Records and replays routes. Each micro-batch of the step holds its own routes.

    A shared prompt (see batching.packing) gets the rollout's routes of the first response to it."""

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
        config, sound = self.config, []
        self._metrics = RoutingMetrics(
            config.num_layers,
            config.num_moe_experts,
            self.device,
            replayed=self.section.replay != "off",
        )
        for number, micro_batches in enumerate(mini_batches):
            for micro_batch in micro_batches:
                index = self._local(micro_batch.packed.token_index)
                routes = MicroBatchRoutes(
                    self.section, self.layers, self._metrics, index >= 0, is_first=number == 0
                )
                if "r3" in self.section.modes:
                    pieces, micro_batch.rollout_routes = micro_batch.rollout_routes, None
                    sound.append(routes.keep_rollout(pieces, index, config))
                micro_batch.recorded_routes = routes
        assert not sound or bool(torch.stack(sound).all()), (
            "the rollout's routes name an expert twice for one token, or one that does not exist"
        )

    @contextlib.contextmanager
    def during(self, name: Pass, micro_batches: MicroBatches) -> Generator[None]:
        """Replay, record and compare routes. See RoutingReplayOff."""
        for micro_batch in micro_batches:
            micro_batch.routes = micro_batch.recorded_routes.begin_pass(name)
        yield
        for micro_batch in micro_batches:
            routes, micro_batch.routes = micro_batch.routes, None
            micro_batch.recorded_routes.end_pass(name, routes)

    def metrics(self) -> dict[str, float]:
        """See RoutingReplayOff."""
        self._assert_all_used()
        routes = [each.recorded_routes for each in self._micro_batches]
        self._micro_batches = []
        metrics = {}
        if self.section.modes:
            num_bytes = sum(each.num_bytes for each in routes)
            stored = torch.tensor(num_bytes, dtype=torch.float64, device=self.device)
            dist.all_reduce(stored)
            metrics["replay/bytes"] = float(stored)
        if self.section.volatility:
            group = parallel_state.get_pipeline_model_parallel_group()
            changed = [each.changed for each in routes if each.changed is not None]
            metrics |= self._metrics.reduce(changed, group)
        return metrics

    def _assert_all_used(self) -> None:
        unused = any(m.recorded_routes.tables for m in self._micro_batches)
        assert not unused, "recorded routes were never used"

    def _local(self, values: Tensor) -> Tensor:
        """Reorder [rows, tokens / CP] of a micro-batch to [tokens] in the order of this rank's
        routers.

        In that order, the first tokens of all rows come first, then the second ones, and so on.
        With sequence parallelism, each tensor-parallel rank has an equal part.
        """
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
