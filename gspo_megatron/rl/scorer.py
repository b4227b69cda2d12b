"""A frozen preference model from a Hugging Face folder, sharded like the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gspo_megatron.batching.scores import sequence_scores
from gspo_megatron.config import ResolvedParallel
from gspo_megatron.config.model_rules import sharing_obstacle
from gspo_megatron.config.scorer import config_of_scorer
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import build_frozen


class FrozenScorer:
    """Scores sequences on the training ranks, between passes of the trained model.

    It is a second model with its own shape, vocabulary and weights, on the layout of the run. Each
    rank holds its share of the weights, but no gradients or optimizer state."""

    def __init__(self, folder: str, config: AnyConfig, parallel: ResolvedParallel) -> None:
        """Load the *ForSequenceClassification folder. All ranks call it, after
        set_up_model_parallel.

        config: the run's configuration; the scorer gets a section `model` of its own.
        `scorer_problems` has checked that the run's layout fits this model. Raises UserError if the
        folder is damaged or holds no preference model."""
        own: Any = config_of_scorer(config, folder)
        vocab_size = own.resolved_model().vocab_size
        self.token_budget: int = own.training.micro_batch_tokens
        self.padded: bool = not own.training.packing
        obstacle = sharing_obstacle(own, own.resolved_model(), own.layout())
        self.share_prompts = own.training.share_prompts is not False and obstacle is None
        self.policy = build_frozen(own, parallel, vocab_size)
        load_hf(folder, self.policy, ignore_custom_code=own.model.ignore_custom_code)

    def __call__(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the scores of sequences, [num_sequences] float32.

        tokens: [sum(lengths)] int64, the sequences of this data-parallel rank, one after another.
        All ranks call it together, even a rank without sequences. The score of a sequence is the
        score of its last token.
        """
        return sequence_scores(
            self.policy,
            tokens,
            lengths,
            token_budget=self.token_budget,
            padded=self.padded,
            share_prompts=self.share_prompts,
        )
