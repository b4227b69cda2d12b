"""Metrics of how much the routers' choices and scores have changed since the step began, and of how
evenly routers spread the tokens over the experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.platform.devices import count_values

_SUMS = ("volatility", "tokens", "shift", "scored tokens")


class RoutingMetrics:
    """Sums over a step's compared tokens, by layer. `reduce` turns them into global metrics."""

    def __init__(
        self, num_layers: int, num_experts: int, device: torch.device, *, replayed: bool
    ) -> None:
        """replayed: the used experts may differ from the router's own choice."""
        self.num_experts, self.device, self.replayed = num_experts, device, replayed
        size = (num_layers, len(_SUMS) + 2 * num_experts)
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)

    def add(self, layer: int, lost: Tensor, shift: Tensor, natural: Tensor, used: Tensor) -> None:
        """Add a layer's compared tokens.

        lost: [tokens], the share of old experts that the router no longer chooses; shift:
        [scored tokens], the mean absolute change of the scores; natural, used: [tokens, k] experts
        that the router chose, and that the pass used.
        """
        row = self._sums[layer - 1]
        row[0] += lost.sum()
        row[1] += len(lost)
        row[2] += shift.sum()
        row[3] += len(shift)
        start = len(_SUMS)
        for experts in (natural, used)[: 1 + self.replayed]:
            load = count_values(experts.flatten(), self.num_experts)
            row[start : start + self.num_experts] += load
            start += self.num_experts

    def reduce(
        self, changed_of: Sequence[Tensor], pipeline_group: dist.ProcessGroup
    ) -> dict[str, float]:
        """Combine the sums of all ranks, which hold different tokens or different layers.

        changed_of: [tokens] bool for each micro-batch: the experts of the token have changed in a
        layer of this rank. First the pipeline stages combine these flags.
        """
        changed = torch.cat([self._sums.new_zeros(0), *changed_of]).to(torch.uint8)
        if pipeline_group.size() > 1:
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=pipeline_group)
        counts = self._sums.new_tensor([float(changed.sum()), float(len(changed))])
        if pipeline_group.rank() > 0:  # this stage holds the same tokens as the first
            counts.zero_()
        packed = torch.cat([self._sums.flatten(), counts])
        dist.all_reduce(packed)
        sums = packed[:-2].view_as(self._sums).cpu()
        metrics: dict[str, float] = {}
        layers = [row for row in range(len(sums)) if sums[row, 1] > 0]
        for row in layers:
            metrics |= self._of_layer(f"routing/layer_{row + 1:02d}", sums[row])
        if layers:
            names = [name.rsplit("/", 1)[-1] for name in metrics if "/layer_" in name]
            for name in dict.fromkeys(names):
                values = [metrics[f"routing/layer_{row + 1:02d}/{name}"] for row in layers]
                total = sum(values)
                metrics[f"routing/{name}"] = total if "dead" in name else total / len(values)
            metrics["routing/tokens_changed"] = float(packed[-2] / packed[-1])
        return metrics

    def _of_layer(self, prefix: str, row: Tensor) -> dict[str, float]:
        count = float(row[1])
        metrics = {
            f"{prefix}/volatility": float(row[0]) / count,
            f"{prefix}/logit_shift": float(row[2]) / max(float(row[3]), 1.0),
        }
        loads = row[len(_SUMS) :].view(2, self.num_experts)
        for label, load in zip(("", "replayed_")[: 1 + self.replayed], loads, strict=False):
            mean = float(load.mean())
            metrics[f"{prefix}/{label}max_violation"] = (float(load.max()) - mean) / mean
            metrics[f"{prefix}/{label}dead_experts"] = float((load == 0).sum())
        return metrics
