"""Batches made of what goes wrong elsewhere."""

from __future__ import annotations

import torch

from gspo_megatron.verify.synthetic import SyntheticBatch
from tests.parallel.models import VOCAB_SIZE

# (prompt tokens, response tokens, advantage). The matrix's token budget is 40, or 20 tokens a rank
# and more for CP2; a packed micro-batch of 40 has 8 chunks under CP4.
EDGES = (
    (7, 0, 1.5),  # no response token counts: it is one of the sequences of the mean, and adds none
    (5, 1, -0.8),  # a response of one token
    (4, 9, 0.0),  # a group without spread
    (6, 3, 0.0),
    (1, 95, 1.1),  # beyond the budget, so alone; all of its CP boundaries lie in the response
    (62, 1, -1.3),  # alone too, and all CP ranks but one have no response token
    (1, 1, 0.9),  # shorter than the number of CP chunks
)


def edge_batch(seed: int = 5) -> SyntheticBatch:
    """The sequences of EDGES with ratios on both sides of GSPO's and GRPO's clip bounds."""
    generator = torch.Generator().manual_seed(seed)
    batch = SyntheticBatch([], [], [], [])
    for number, (prompt, response, advantage) in enumerate(EDGES):
        tokens = torch.randint(VOCAB_SIZE, (prompt + response,), generator=generator)
        shift = (-0.6, -2e-4, 2e-4, 0.6)[number % 4]
        noise = 0.02 * torch.randn(response, generator=generator)
        batch.tokens.append(tokens)
        batch.response_lengths.append(response)
        batch.log_ratios.append(shift + noise - noise.mean() if response else noise)
        batch.advantages.append(advantage)
    return batch
