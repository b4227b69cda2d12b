"""The policy: GPTModel whose last stage ends in log-probabilities instead of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor

from gspo_megatron.models.logprob_head import logprob_and_entropy, multiply
from gspo_megatron.models.shared_prompts import RotaryAngles
from gspo_megatron.models.top_k_head import bucket_logprobs, most_probable
from gspo_megatron.platform.cpu import products


@dataclass
class HeadInputs:
    """Inputs of the log-prob head: the rows of the hidden states that predict a response token, and
    these tokens. Megatron-Core passes this object to the head as `labels`."""

    # [rows] int64, index into this rank's hidden states, flattened from [sequence, batch]
    rows: Tensor
    targets: Tensor  # [rows] int64, ids in the whole vocabulary
    temperature: float = 1.0
    entropy_gradient: bool = False
    # [rows, k] int64: candidate tokens. The head also computes their log-probs, and one log-prob
    # for all tokens that are not candidates.
    candidates: Tensor | None = None
    top_k: int = 0  # if above 0, the head sets `candidates` to the top_k most probable tokens


class HiddenStates(ColumnParallelLinear):
    """GPTModel's output layer, which returns the hidden states unchanged. The head multiplies only
    the rows that predict a response token, so logits never exist for a whole micro-batch."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Gather [sequence / TP under sequence parallelism, batch, hidden] to [sequence, batch,
        hidden]."""
        if self.sequence_parallel:
            # Each TP rank has only the gradient from its part of the vocabulary, so the backward
            # pass is a reduce-scatter.
            return gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=True, group=self.tp_group
            ), None
        if self.tp_group.size() > 1:
            return copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None
        return input_, None


class PolicyModel(GPTModel):
    """Megatron-Core's GPTModel, whose last stage is replaced.

    With `labels=HeadInputs` the last stage returns [2, rows]: the targets' log-probs and the
    entropies. With candidates, the output has k + 2 more rows. The first of these is a flag: 1 if
    the first candidate is the most probable token. The next k are the log-probs of the candidates.
    The last one is the log-prob of all other tokens together. Without labels the last stage returns
    hidden states [batch, sequence, hidden].
    """

    def __init__(self, *, true_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.true_vocab_size = true_vocab_size
        self.padding_token: int | None = None  # see Policy.set_padding_token
        if hasattr(self, "rotary_pos_emb"):  # layers of latent attention have their own
            self.rotary_pos_emb = RotaryAngles(self.rotary_pos_emb)
        if self.pre_process:
            self.embedding.word_embeddings.register_forward_hook(self._freeze_padding_token)
        if self.post_process:
            # Only `forward` changes. Parameters and checkpoint keys stay the same.
            assert type(self.output_layer) is ColumnParallelLinear
            self.output_layer.__class__ = HiddenStates

    def _freeze_padding_token(
        self, embedding: VocabParallelEmbedding, inputs: tuple[Tensor], output: Tensor
    ) -> None:
        """Set the gradient of the embedding's output to 0 at padding tokens. `output` is [batch,
        sequence, hidden], or [sequence / TP, batch, hidden] under sequence parallelism."""
        if self.padding_token is None or not output.requires_grad:
            return
        is_padding = inputs[0] == self.padding_token  # [batch, sequence]
        if embedding.reduce_scatter_embeddings:
            group = embedding.tp_group
            is_padding = is_padding.t().chunk(group.size())[group.rank()]
        is_padding = is_padding.unsqueeze(-1)
        output.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0.0))

    @property
    def head_weight(self) -> Tensor:
        """The output layer's weight, [padded vocabulary / TP, hidden]. If the weights are tied,
        this is the embedding's weight."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def head_product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return two matrices, [rows, columns] and [padded vocabulary / TP, columns], whose product
        is this rank's logits of hidden [rows, hidden]. The matrices include the output layer's
        adapter, if the layer has one and adapters are on."""
        weight, adapter = self.head_weight, self._head_adapter()
        hidden = hidden.to(weight.dtype)
        return (hidden, weight) if adapter is None else adapter.extended(hidden, weight)

    def _head_adapter(self) -> Any:
        adapter = vars(self.output_layer).get("lora")
        return adapter if adapter is not None and adapter.lora.enabled else None

    def compute_language_model_loss(self, labels: HeadInputs, logits: Tensor) -> Tensor:
        """Return the outputs of the last stage. GPTModel passes the result of its output layer as
        `logits`; in this class these are hidden states [s, b, hidden]."""
        group = self.pg_collection.tp
        hidden, weight = self.head_product(logits.flatten(0, 1).index_select(0, labels.rows))
        shard: Any = {
            "process_group": group if group.size() > 1 else None,
            "vocab_start": group.rank() * weight.shape[0],
            "vocab_size": self.true_vocab_size,
        }
        outputs = torch.stack(
            logprob_and_entropy(
                hidden,
                weight,
                labels.targets,
                temperature=labels.temperature,
                entropy_gradient=labels.entropy_gradient,
                **shard,
            )
        )
        if labels.top_k:
            labels.candidates = most_probable(hidden, weight, labels.top_k, **shard)
        if labels.candidates is None:
            return outputs
        buckets, is_greedy = bucket_logprobs(
            hidden, weight, labels.candidates, temperature=labels.temperature, **shard
        )
        return torch.cat([outputs, is_greedy[None].to(outputs.dtype), buckets.t()])

    @torch.no_grad()
    def next_token_logits(self, hidden: Tensor) -> Tensor:
        """The logits [sequences, vocabulary] of hidden [sequences, hidden], in fp32 and gathered
        over TP. These logits take little memory, because decoding needs one position per sequence.
        Neither these logits nor the logits in the log-prob head are rounded to the dtype of the
        weight."""
        group = self.pg_collection.tp
        weight = self.head_weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        hidden = hidden.to(weight.dtype)
        if weight.dtype == dtype:
            logits = products.linear(hidden, weight)
        else:
            memory = hidden.new_empty((len(hidden), len(weight)), dtype=dtype)
            logits = multiply(hidden, weight, memory)
        if (adapter := self._head_adapter()) is not None:  # avoids a copy of the weight
            up = adapter.part.b.to(weight.dtype)
            logits += multiply(adapter.down(hidden), up, torch.empty_like(logits))
        if group.size() > 1:  # for one rank, the call would only make an object at each token
            logits = gather_from_tensor_model_parallel_region(logits, group=group)
        return logits[:, : self.true_vocab_size].float()
