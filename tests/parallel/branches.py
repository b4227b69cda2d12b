"""Episodes in which the history was rewritten. So the sequence of such an episode has several
branches."""

from __future__ import annotations

from dataclasses import replace

import torch

from gspo_megatron.verify.synthetic import SyntheticBatch
from tests.parallel.models import VOCAB_SIZE

# The numbers of prompt and response tokens of each branch. The token budget is 20 tokens for each
# rank and 40 in total, and some episodes exceed it.
BRANCHES: tuple[list[tuple[int, int]], ...] = (
    [(5, 3), (9, 1), (2, 6)],
    [(4, 9)],
    [(1, 1), (1, 1), (3, 1), (1, 1)],
    [(6, 2), (7, 30)],
    [(3, 12)],
    [(11, 4), (12, 5), (13, 6), (2, 1), (5, 5)],
    [(8, 2)],
)


def branched_batch(turn_rewards: bool = False) -> SyntheticBatch:
    """Episodes of one to five branches. The policy does not learn from some of their tokens."""
    generator = torch.Generator().manual_seed(11)
    batch = SyntheticBatch([], [], [], [], masks=[], branches=list(BRANCHES))
    batch = replace(batch, token_advantages=[] if turn_rewards else None)
    for number, pieces in enumerate(BRANCHES):
        total, response = sum(map(sum, pieces)), sum(own for _, own in pieces)
        batch.tokens.append(torch.randint(VOCAB_SIZE, (total,), generator=generator))
        batch.response_lengths.append(response)
        mask = torch.rand(response, generator=generator) < 0.8
        mask[0] = True
        batch.masks.append(mask)
        # The ratio of a branch differs much from the ratio of its episode.
        noise = torch.randn(len(pieces), generator=generator)
        noise = noise.repeat_interleave(torch.tensor([own for _, own in pieces])) * 0.1
        shift = (-0.6, -2e-4, 2e-4, 0.6)[number % 4]
        ratios = shift + noise - noise[mask].mean()
        batch.log_ratios.append(ratios.where(mask, torch.nan))
        batch.advantages.append((1.5, -0.8)[number // 2 % 2])
        if turn_rewards:
            batch.token_advantages.append(torch.randn(response, generator=generator))
    return batch
