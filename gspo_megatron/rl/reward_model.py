"""Adds the scores of a reward model to the rewards of this rank's responses.

If a server holds the model, the scores came with the responses. If the model is a folder, the
training ranks compute the scores here, between rollout and update. Then the scores are normalized,
and added to the other parts of the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gspo_megatron.config import Config, resolve_parallel
from gspo_megatron.errors import RewardError
from gspo_megatron.platform.collectives import (
    all_gather_columns,
    raise_everywhere,
    raised_everywhere,
)
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.rewards.moments import RunningMoments
from gspo_megatron.rewards.scoring import repeated_share
from gspo_megatron.rl.scorer import FrozenScorer
from gspo_megatron.rollout.engine import ModelWork, RolloutShare
from gspo_megatron.rollout.episodes import GroupScorer, sum_of_normalized_parts
from gspo_megatron.rollout.reward_model import ModelScores, ModelTexts
from gspo_megatron.rollout.types import to_tensor
from gspo_megatron.types import Sample


class FolderScores:
    """Computes the scores of reward.model.folder on the training ranks."""

    def __init__(self, config: Config) -> None:
        """Load the model, after the policy. All ranks call this method."""
        assert config.reward.model.folder is not None
        parallel = resolve_parallel(config, dist.get_world_size())
        self.name = config.reward.model.source
        self.scorer = FrozenScorer(config.reward.model.folder, config, parallel)
        self.longest = self.scorer.policy.shape.max_sequence_length

    def __call__(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the scores of conversations, [conversations] float64.

        All ranks call this method. Tensor- and pipeline-parallel ranks give the same conversations.
        Raises DataError on all ranks if a score is not finite."""
        device = torch.device(torch.cuda.current_device())
        lengths = torch.tensor([*map(len, ids)], dtype=torch.long, device=device)
        tokens = torch.tensor([*chain.from_iterable(ids)], dtype=torch.long, device=device)
        # Each context-parallel rank has its own responses. The ranks exchange them, and together
        # score all of them.
        group = parallel_state.get_context_parallel_group()
        counts = all_gather_columns(lengths, group)
        tokens = torch.cat(all_gather_columns(tokens, group))
        scores = self.scorer(tokens, torch.cat(counts).tolist()).split([*map(len, counts)])
        mine = scores[group.rank()].double().cpu().numpy()
        wrong = "a score is not finite; give an undamaged folder"
        raise_everywhere(None if np.isfinite(mine).all() else f"{self.name}: {wrong}")
        return mine


class ModelRewards:
    """The reward model of a run. Every rank calls every method."""

    def __init__(
        self, config: Config, device: torch.device, score: FolderScores | None = None
    ) -> None:
        """score: computes the scores of reward.model.folder; None: a server computes the scores."""
        self.section, self.device, self.score = config.reward, device, score
        self.std = config.objective.advantage_std
        self.texts = None if score is None else ModelTexts(config.reward)
        if score is not None and self.texts is not None and self.texts.longest is None:
            self.texts.longest = score.longest
        self.moments = RunningMoments({})
        self.data_group = data_parallel_group()

    def add_to(
        self,
        share: RolloutShare,
        scorer: GroupScorer,
        samples: Sequence[Sample],
        *,
        learns: bool,
    ) -> None:
        """Add the scores to the rewards of a share of responses.

        samples: the responses as text; learns: whether the responses are for an update. If they are
        not, their scores are not normalized.
        """
        group, found = share.group, self._scores(share, samples)
        normalized = found.scores
        if learns and self.section.model.normalize == "running":
            self.moments.add(self._everyones(found.scores, group.sample_index))
            normalized = self.moments.normalize(found.scores)
        elif learns and self.section.model.normalize == "group":
            normalized = sum_of_normalized_parts(found.scores[None], group.group_index, self.std)
        scorer.add_model(group, samples, found.scores, normalized)
        words = self.section.repetition_words
        repeated = [repeated_share(sample.response, words) for sample in samples]
        running = None
        if self.section.model.normalize == "running":
            running = (self.moments.mean, self.moments.std)
        share.model = ModelWork(found, np.array(repeated, np.float64), running)

    def _scores(self, share: RolloutShare, samples: Sequence[Sample]) -> ModelScores:
        """Return the scores of the responses, which a server has computed or these ranks compute.
        A suite may have a server of its own in a run that scores with a folder."""
        group = share.group
        if group.model_scores is not None:
            assert group.model_tokens is not None
            assert group.model_cut is not None and group.model_seconds is not None
            seconds = float(group.model_seconds.sum())
            return ModelScores(group.model_scores, group.model_tokens, group.model_cut, seconds)
        assert self.score is not None and self.texts is not None, "the run has a folder"
        begin = perf_counter()
        with raised_everywhere(RewardError):
            given = self.texts.conversations(samples)
        scores = self.score(given.ids)
        return ModelScores(scores, given.tokens, given.cut, perf_counter() - begin)

    def _everyones(self, scores: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the scores of all ranks in the order of the samples, without failed calls."""
        mine = torch.stack(
            [to_tensor(numbers, self.device).double(), to_tensor(scores, self.device)]
        )
        numbers, scores = torch.cat(all_gather_columns(mine, self.data_group), 1).cpu().numpy()
        in_order = scores[numbers.argsort(kind="stable")]
        return in_order[~np.isnan(in_order)]
