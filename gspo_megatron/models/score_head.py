"""A preference model: GPTModel whose last stage ends in one score for each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gspo_megatron.models.policy import PolicyModel


@dataclass
class ScoreInputs:
    """Input of the score head: for each sequence, the row of the hidden states of its last token.
    Megatron-Core passes this object to the head as `labels`."""

    rows: Tensor  # [sequences here] int64: indices into this rank's flattened [sequence, batch]


class WholeStates(torch.nn.Module):
    """GPTModel's output layer, which returns the hidden states of the whole sequence.

    Each tensor-parallel rank computes all scores. So each rank has the whole gradient of the hidden
    states, and gradients are not summed over the ranks."""

    def __init__(self, config: TransformerConfig, group: Any) -> None:
        super().__init__()
        self.sequence_parallel, self.group = config.sequence_parallel, group

    def forward(self, input_: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[sequence / TP under sequence parallelism, batch, hidden] -> whole sequence."""
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=False, group=self.group
            )
        return input_, None


class ScoreHead(torch.nn.Module):
    """One linear score without a bias, the same on all tensor-parallel ranks."""

    def __init__(self, hidden_size: int, like: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_zeros(1, hidden_size))

    def forward(self, states: Tensor) -> Tensor:
        """[rows, hidden] -> [rows], in float32 or better."""
        kind = torch.promote_types(self.weight.dtype, torch.float32)
        return (states.to(kind) @ self.weight.to(kind).t())[:, 0]


class ScoreModel(PolicyModel):
    """Stock GPTModel; with `labels=ScoreInputs` its last stage returns the scores [1, sequences].
    The module `score` takes the place of the output layer, whose matrix does not exist."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            like = self.output_layer.weight
            self.output_layer = WholeStates(self.config, self.pg_collection.tp)
            self.score = ScoreHead(self.config.hidden_size, like)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the state of the submodules. The method of LanguageModule is skipped, because that
        method needs the weight of an output layer."""
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)

    def compute_language_model_loss(self, labels: ScoreInputs, logits: Tensor) -> Tensor:  # ty: ignore[incompatible-method-override]
        """Return the scores. GPTModel passes the result of its output layer as `logits`; here these
        are hidden states [s, b, hidden]."""
        return self.score(logits.flatten(0, 1).index_select(0, labels.rows))[None]
