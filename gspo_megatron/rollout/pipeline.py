"""One forward pass of the sharded policy outside Megatron's training schedules.

Decoding sends one small message a stage and token; the training schedules, made for many
micro-batches with gradients, have nothing to offer here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.models.build import Policy


class PipelineForward:
    """Runs tokens through all pipeline stages (and virtual stages) and returns, on the last stage,
    the final hidden states."""

    def __init__(self, policy: Policy) -> None:
        self.models = policy.models
        self.dtype = policy.config.params_dtype
        self.hidden_size = policy.config.hidden_size
        self.group = parallel_state.get_pipeline_model_parallel_group()
        self.size, self.rank = self.group.size(), self.group.rank()
        ranks = dist.get_process_group_ranks(self.group)
        self.previous = ranks[(self.rank - 1) % self.size]
        self.following = ranks[(self.rank + 1) % self.size]
        self.is_last = self.rank == self.size - 1

    def __call__(self, input_ids: Tensor, position_ids: Tensor) -> Tensor | None:
        """input_ids [sequences, length] -> hidden [sequences, length, hidden], None elsewhere."""
        output = None
        for chunk, model in enumerate(self.models):
            starts = chunk == 0 and self.rank == 0
            ends = chunk == len(self.models) - 1 and self.is_last
            if not starts:
                model.set_input_tensor(self._receive(input_ids))
            output = model(input_ids=input_ids, position_ids=position_ids, attention_mask=None)
            if not ends:
                self._send(output)
                output = None
        return output

    def _receive(self, input_ids: Tensor) -> Tensor:
        if self.size == 1:
            return self._passed
        sequences, length = input_ids.shape
        buffer = torch.empty(
            (length, sequences, self.hidden_size), dtype=self.dtype, device=input_ids.device
        )
        dist.recv(buffer, src=self.previous, group=self.group)
        return buffer

    def _send(self, output: Tensor) -> None:
        if self.size == 1:
            self._passed = output  # virtual stages of a single rank
        else:
            dist.send(output.contiguous(), dst=self.following, group=self.group)
