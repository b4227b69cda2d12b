"""Scores of responses: one rank of a model replica calls the reward function for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.observe.heartbeat import heartbeat
from gspo_megatron.platform.groups import model_replica
from gspo_megatron.rewards.registry import Reward, score
from gspo_megatron.rewards.shaping import Shaping
from gspo_megatron.types import Sample, TurnRewards


@dataclass
class Scores:
    """The rewards of this rank's responses, in their order.

    `turn_rewards` and `turn_tokens` hold the turns of all responses, response after response.
    `turns` is 0 for a response whose turns were not rewarded.
    """

    rewards: Tensor  # [num_sequences] float64, as the reward function returned them, turns summed
    shaped: Tensor  # [num_sequences] float64, what is trained on
    turns: Tensor  # [num_sequences] int64
    turn_rewards: Tensor  # [turns] float64, shaped
    turn_tokens: Tensor  # [turns] int64, response tokens of each

    def select(self, rows: Tensor) -> Scores:
        """Those of the responses that `rows` [num_sequences] bool marks."""
        turns = rows.repeat_interleave(self.turns)
        return Scores(
            self.rewards[rows],
            self.shaped[rows],
            self.turns[rows],
            self.turn_rewards[turns],
            self.turn_tokens[turns],
        )


class Scorer:
    """Scores responses. One rank of each model replica calls the reward function, which may be slow
    or not deterministic, and sends the scores to the others."""

    def __init__(self, reward: Reward, shaping: Shaping, device: torch.device) -> None:
        self.reward, self.shaping, self.device = reward, shaping, device
        self.replica, _ = model_replica()
        self.source = dist.get_process_group_ranks(self.replica)[0]
        self.calls_reward = dist.get_rank() == self.source

    def __call__(self, samples: Sequence[Sample], count: int) -> Scores:
        """The scores of `count` responses; `samples` is read where `calls_reward` is true."""
        columns = torch.zeros((3, count), dtype=torch.float64, device=self.device)
        turns = torch.zeros((2, 0), dtype=torch.float64, device=self.device)
        if self.calls_reward:
            columns, turns = (
                torch.as_tensor(values, device=self.device) for values in self._score(samples)
            )
        if self.replica.size() > 1:
            dist.broadcast(columns, src=self.source, group=self.replica)
            number = int(columns[2].sum())
            if number:
                if not self.calls_reward:
                    turns = turns.new_empty((2, number))
                dist.broadcast(turns, src=self.source, group=self.replica)
        return Scores(columns[0], columns[1], columns[2].long(), turns[0], turns[1].long())

    def _score(self, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """[3, num_sequences]: reward, shaped reward, number of turns; [2, turns]: shaped reward and
        tokens of each turn. Counts are exact in float64."""
        columns = np.zeros((3, len(samples)))
        turns = [np.zeros((2, 0))]
        for row, sample in enumerate(samples):
            found = score(self.reward, sample)
            heartbeat()  # a reward may take long, and all ranks wait for the last
            of_turns = isinstance(found, TurnRewards)
            rewards = np.asarray(found.rewards) if of_turns else np.array([found])
            shaped = self.shaping(rewards, sample)
            columns[:, row] = rewards.sum(), shaped.sum(), len(rewards) if of_turns else 0
            if of_turns:
                turns.append(np.stack([shaped, np.diff(found.ends, prepend=0)]))
        return columns, np.concatenate(turns, axis=1)
