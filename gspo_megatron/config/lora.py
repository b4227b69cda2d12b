"""The section model.lora."""

from __future__ import annotations

import math

from gspo_megatron.config.section import HubPath, NotNegative, Section, Texts, shapes
from gspo_megatron.errors import format_value


class LoraSection(Section):
    """Adapters beside the model's matrices (LoRA). If there are adapters, only they are trained."""

    rank: NotNegative = shapes(
        0, "rank of an adapter's two matrices; 0: no adapters, all weights are trained"
    )
    alpha: float | None = shapes(
        None,
        "the product of an adapter's matrices is scaled by alpha / rank; null: alpha = rank",
        gt=0,
    )
    targets: Texts = shapes(
        ["all"],
        "which matrices have an adapter: attention, mlp (of dense layers), experts (routed and "
        "shared), all (these three), or a list of these and of names such as q_proj, linear_qkv, "
        "router and head",
    )
    use_rslora: bool = shapes(False, "scale by alpha / sqrt(rank) instead of alpha / rank")
    checkpoint: HubPath | None = shapes(
        None,
        "adapters to start from: a PEFT folder, ORG/NAME[@REVISION] of the Hub, or a checkpoint or "
        "run folder of a run with adapters; null: new adapters, which do not change the model yet",
    )

    @property
    def scale(self) -> float:
        """The factor by which the output of the adapters is multiplied."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def differences(self, there: LoraSection) -> list[str]:
        """Return a line for each key that differs from the adapters in a file.

        `targets` are not compared, because such a difference shows in the tensors.
        """
        values = {
            "rank": (self.rank, there.rank),
            "alpha": (self.alpha or self.rank, there.alpha or there.rank),
            "use_rslora": (self.use_rslora, there.use_rslora),
        }
        return [
            f"model.lora.{key} = {format_value(ours)}: the adapters have {format_value(theirs)}"
            for key, (ours, theirs) in values.items()
            if ours != theirs
        ]
