"""Metrics of a step as true global reductions: the same on every layout.

Micro-batches leave sums, counts and per-sequence values on the last pipeline stage. Once a step
they are reduced over the data-parallel (x context-parallel) group and sent, in one message, to
every stage.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.errors import UserError
from gspo_megatron.platform.collectives import all_gather_columns, all_reduce_by_name, from_rank
from gspo_megatron.platform.devices import count_values

QUANTILES = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}

# Bins of the log ratio: logarithmic from 1e-9 to 40 on both sides of 0, and one bin for values
# nearer to 0. With 64 bins a decade, the deviation of a quantile from 1 has an error below 3.7%.
# Counts add up exactly over ranks.
_SIZES = 10.0 ** torch.arange(-9.0, 1.602, 1 / 64, dtype=torch.float64)
_EDGES = torch.cat([-_SIZES.flip(0), _SIZES])
_MIDDLES = 10 ** (0.5 / 64) * torch.cat([-_SIZES.flip(0), _SIZES.new_zeros(1), _SIZES])


def mean_pair(values: Tensor) -> Tensor:
    """Return [sum, count] of values [count], in float64 because there may be millions of them."""
    total = values.detach().double().sum()
    return torch.stack([total, total.new_full((), len(values))])


class StepMetrics:
    """Collects a rank's contributions to a step's metrics."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._edges = _EDGES.to(device, non_blocking=True)
        self._means: dict[str, Tensor] = {}  # [2] float64: numerator, denominator
        self._maxima: dict[str, Tensor] = {}
        self._sequence_values: dict[str, list[Tensor]] = {}
        self._token_sketches: dict[str, Tensor] = {}
        self._token_extremes: dict[str, Tensor] = {}

    def add_means(self, means: Mapping[str, Tensor]) -> None:
        """Add pairs [numerator, denominator]. Contributions of one name add up."""
        for name, pair in means.items():
            known = self._means.get(name)
            self._means[name] = pair.double() if known is None else known + pair

    def add_maximum(self, name: str, value: Tensor) -> None:
        """Add a scalar. The metric is the largest of these scalars over the step and all ranks."""
        known = self._maxima.get(name)
        value = value.double()
        self._maxima[name] = value if known is None else torch.maximum(known, value)

    def add_values(self, values: Mapping[str, Tensor]) -> None:
        """Add one-dimensional values. Their metrics are quantiles. Values of `.../sequence` are
        stored one by one, without those that are NaN; all others (one value per token) are counted
        in a sketch."""
        for name, value in values.items():
            if name.endswith("/sequence"):
                self._sequence_values.setdefault(name, []).append(value)
            else:
                self._add_token_ratios(name, value)

    def _add_token_ratios(self, name: str, ratios: Tensor) -> None:
        sketch = self._token_sketches.setdefault(
            name, torch.zeros(len(_MIDDLES), dtype=torch.float64, device=self.device)
        )
        extremes = self._token_extremes.setdefault(
            name, torch.full((2,), -math.inf, dtype=torch.float64, device=self.device)
        )
        if ratios.numel() == 0:
            return
        # A NaN ends the run when the gradient norm is checked. Finding the bin must not raise an
        # error before that check.
        logs = ratios.double().log().nan_to_num(nan=0.0)
        bins = torch.bucketize(logs, self._edges)
        sketch += count_values(bins, len(sketch))
        torch.maximum(extremes, torch.stack([-logs.min(), logs.max()]), out=extremes)

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Combine the contributions over `group`. Raises UserError on all ranks of `group` if the
        ranks have collected different names. This can happen because the names of a custom
        objective may depend on its inputs."""
        self._check_names(group)
        sums = all_reduce_by_name(
            {("mean", name): pair for name, pair in self._means.items()}
            | {("sketch", name): counts for name, counts in self._token_sketches.items()},
            dist.ReduceOp.SUM,
            group,
        )
        largest = all_reduce_by_name(
            {("maximum", name): value for name, value in self._maxima.items()}
            | {("extremes", name): values for name, values in self._token_extremes.items()},
            dist.ReduceOp.MAX,
            group,
        )
        metrics: dict[str, float] = {}
        if self._means:
            names = sorted(self._means)
            pairs = torch.stack([sums["mean", name] for name in names]).tolist()
            for name, (numerator, denominator) in zip(names, pairs, strict=True):
                metrics[name] = numerator / denominator if denominator else math.nan
        for name in sorted(self._maxima):
            metrics[name] = float(largest["maximum", name])
        for name in sorted(self._sequence_values):
            local = torch.cat(self._sequence_values[name]).double()
            values = torch.cat(all_gather_columns(local, group)).cpu()
            values = values[~values.isnan()]
            if values.numel():
                points = torch.tensor(list(QUANTILES.values()), dtype=values.dtype)
                for label, value in zip(QUANTILES, values.quantile(points), strict=True):
                    metrics[f"{name}/{label}"] = float(value)
        for name in sorted(self._token_sketches):
            quantiles = _token_quantiles(sums["sketch", name], largest["extremes", name])
            metrics |= {f"{name}/{label}": value for label, value in quantiles.items()}
        return metrics

    def _check_names(self, group: dist.ProcessGroup) -> None:
        """Raise UserError if the ranks have different names. Otherwise numbers of different metrics
        would be added up, or a collective would hang."""
        if group.size() == 1:
            return
        values = {*self._sequence_values, *self._token_sketches}
        kinds = {"means": self._means, "maxima": self._maxima, "values": values}
        names = [f"{kind}[{name!r}]" for kind, of_kind in kinds.items() for name in sorted(of_kind)]
        digest = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:6], "big")
        bounds = torch.tensor([digest, -digest], device=self.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        highest, minus_lowest = bounds.tolist()
        if highest == -minus_lowest:
            return
        by_rank: list[list[str]] = [[]] * group.size()
        dist.all_gather_object(by_rank, names, group=group)
        ranks = dist.get_process_group_ranks(group)
        lines = []
        for name in sorted(set().union(*by_rank)):
            without = [str(rank) for rank, known in zip(ranks, by_rank) if name not in known]
            if without:
                lines.append(f"{name} is missing on rank {', '.join(without)}")
        raise UserError(
            "the objective's metrics differ between ranks: " + "; ".join(lines) + "; allowed: the "
            "same keys of LossOutputs.means and values for all inputs, with a pair of zeros or an "
            "empty tensor where there is nothing to report"
        )


def _token_quantiles(sketch: Tensor, extremes: Tensor) -> dict[str, float]:
    """Return the quantiles of a metric by label. Without tokens the result is empty."""
    total = float(sketch.sum())
    if total == 0:
        return {}
    lowest, highest = -float(extremes[0]), float(extremes[1])
    cumulative = sketch.cumsum(0)
    result = {}
    for label, share in QUANTILES.items():
        log = float(_MIDDLES[int(torch.searchsorted(cumulative, max(share * total, 0.5)))])
        log = {"min": lowest, "max": highest}.get(label, min(max(log, lowest), highest))
        result[label] = math.exp(log)
    return result


def mismatch_metrics(
    trained_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Measure the difference between the trainer's log-probs and those of the rollout engine, both
    [tokens], with the same weights.

    D = log pi_train - log pi_rollout over the tokens with mask 1. Returns pairs [sum, count] for
    mean |D|, k1 = mean(-D), k3 = mean(e^D - 1 - D) and the share with |D| > ln 2. Also returns the
    largest |D| (a scalar, 0 without tokens).
    """
    difference = (trained_logprobs.double() - rollout_logprobs.double())[mask > 0]
    size = difference.abs()
    means = {
        "mismatch/abs_mean": mean_pair(size),
        "mismatch/k1": mean_pair(-difference),
        "mismatch/k3": mean_pair(torch.expm1(difference.clamp(max=40.0)) - difference),
        "mismatch/over_ln2": mean_pair(size > math.log(2.0)),
    }
    return means, size.max() if len(size) else size.sum()


def from_last_stage(compute: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the metrics that `compute` returns on the last pipeline stage. They are sent to all
    other stages in one message."""
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    group = parallel_state.get_pipeline_model_parallel_group()
    last = dist.get_process_group_ranks(group)[-1]
    return from_rank(compute() if is_last else {}, last, group)
