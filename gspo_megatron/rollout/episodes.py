"""Responses to prompts, whatever engine generates them: played, assembled, scored.

    engine -> turns -> episodes -> `assemble` -> RolloutGroup -> `GroupScorer` -> the same, scored

A single turn is an episode of one turn. In process the leader of a model replica runs these lines
(rollout/megatron/barrier.py), with servers the rollout service does (rollout/vllm/episodes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from gspo_megatron.config import Config
from gspo_megatron.config.objectives import ObjectiveSection, learns_from_parts
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.environments.episode import (
    Asked,
    Episode,
    EpisodeRunner,
    Written,
    joined_routes,
)
from gspo_megatron.environments.single_turn import SingleTurn
from gspo_megatron.environments.transcript import records_of
from gspo_megatron.errors import RewardError
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import (
    FailedCalls,
    PartNames,
    Scorer,
    describe,
    reward_columns,
)
from gspo_megatron.rewards.shaping import Shaping, sum_of_normalized_parts
from gspo_megatron.rewards.values import Score
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt, Sample

if TYPE_CHECKING:
    from gspo_megatron.data.tokenizers import Tokenizer


class Response(Protocol):
    """One turn as an engine generated it."""

    token_ids: np.ndarray  # [tokens] int32, with the token that ended it
    logprobs: np.ndarray  # [tokens] float32, at the sampling temperature
    truncated: bool  # cut off by the limit of tokens
    # [prompt + response tokens, layers, k], where the engine reports the experts here
    routes: np.ndarray | None
    versions: np.ndarray | None  # [tokens] int32, of the weights, where the engine tells them


# The engine: a turn of each of these samples, which have the same tokens before it.
Generate = Callable[[Asked, Sequence[int]], Coroutine[Any, Any, Sequence[Response]]]


@dataclass(frozen=True)
class Played:
    """One response, whole: of an episode all its turns, and what stands between them."""

    tokens: np.ndarray  # [tokens] int32, of each branch its prompt and its part of the response
    in_response: np.ndarray  # [tokens] bool
    logprobs: np.ndarray  # [response tokens] float32
    sampled: np.ndarray  # [response tokens] bool: what the policy wrote, and is learnt from
    truncated: bool
    routes: np.ndarray | None  # [tokens, layers, k]
    versions: np.ndarray | None  # [response tokens] int32
    turns: Sequence[Sequence[Any]]  # of each branch, as the engine gave them
    episode: Episode | None = None  # None: a single turn


def players(
    prompt: Prompt,
    samples: Sequence[int],
    max_tokens: int,
    episodes: EpisodeRunner | None,
    generate: Generate,
    no_turn: Callable[[int], Response],
) -> dict[int, Coroutine[Any, Any, list[Played]]]:
    """What has to run, at the same time, for the responses to a prompt, by the number of the first
    sample of each; together they give a response for each sample, in their order. Each waits for
    one call of `generate` at a time.

    episodes: None for single turns; no_turn: stands for the turn that an episode has failed to
    have, after so many tokens of the prompt.
    """
    if episodes is None:
        return {samples[0]: _single_turns(prompt, samples, max_tokens, generate)}
    return {n: _episode(prompt, n, episodes, generate, no_turn) for n in samples}


async def _single_turns(
    prompt: Prompt, samples: Sequence[int], max_tokens: int, generate: Generate
) -> list[Played]:
    responses = await generate(Asked(prompt.token_ids, 0, max_tokens), samples)
    ids = np.asarray(prompt.token_ids, np.int32)
    return [played_turn(ids, response) for response in responses]


async def _episode(
    prompt: Prompt,
    sample: int,
    episodes: EpisodeRunner,
    generate: Generate,
    no_turn: Callable[[int], Response],
) -> list[Played]:
    async def write(asked: Asked) -> Written:
        [response] = await generate(asked, [sample])
        return Written(response.token_ids.tolist(), response.truncated, source=response)

    return [played_episode(await episodes.run(prompt, write), no_turn)]


def played_turn(prompt: np.ndarray, response: Response) -> Played:
    """A single turn. prompt: [tokens] int32."""
    count = len(response.token_ids)
    return Played(
        np.concatenate([prompt, response.token_ids]),
        np.arange(len(prompt) + count) >= len(prompt),
        response.logprobs,
        np.ones(count, bool),
        response.truncated,
        response.routes,
        response.versions,
        [[response]],
    )


def played_episode(episode: Episode, no_turn: Callable[[int], Response]) -> Played:
    """An episode that has ended. Of a failed one nothing is learnt."""
    client = episode.client
    has_failed = client.turns[0].source is None  # before its first turn
    nothing = no_turn(len(client.prompt_ids)) if has_failed else None

    def response(turn: Written) -> Any:
        return nothing or turn.source

    turns = [
        [response(client.turns[number]) for number in branch.turns] for branch in client.branches()
    ]
    routes = [piece for branch in turns for piece in _routes_of(branch)]
    has_versions = turns[0][0].versions is not None
    tokens, in_response = episode.sequence
    return Played(
        tokens,
        in_response,
        episode.column(lambda turn: response(turn).logprobs, filler=0.0),
        episode.mask,
        has_failed or client.is_cut,
        np.concatenate(routes) if routes else None,
        episode.column(lambda turn: response(turn).versions) if has_versions else None,
        turns,
        episode,
    )


def _routes_of(turns: Sequence[Response]) -> list[np.ndarray]:
    """The experts of a branch's tokens, in pieces; none where the engine does not report them."""
    routes = [turn.routes for turn in turns if turn.routes is not None]
    assert len(routes) in (0, len(turns)), "routes of some turns only"
    return joined_routes(routes) if routes else []


def assemble(
    played: Sequence[Played], samples: Sequence[int], per_prompt: int, *, has_episodes: bool
) -> RolloutGroup:
    """The responses as one group, without rewards: these are NaN. samples: the number of each in
    the step; has_episodes: they are episodes of several turns."""
    count, numbers = len(played), np.array(samples, np.int64)
    group = RolloutGroup(
        tokens=_joined([each.tokens for each in played], np.int32),
        prompt_lengths=np.array([int((~each.in_response).sum()) for each in played], np.int64),
        response_lengths=np.array([len(each.sampled) for each in played], np.int64),
        rollout_logprobs=_joined([each.logprobs for each in played], np.float32),
        truncated=np.array([each.truncated for each in played], np.bool_),
        sample_index=numbers,
        group_index=numbers // per_prompt,
        rewards=np.full(count, np.nan),
        shaped=np.full(count, np.nan),
        turns=np.zeros(count, np.int64),
        turn_rewards=np.zeros(0),
        turn_tokens=np.zeros(0, np.int64),
    )
    if has_episodes:
        group.in_response = _joined([each.in_response for each in played], np.bool_)
        group.sampled = _joined([each.sampled for each in played], np.bool_)
    routes = [each.routes for each in played if each.routes is not None]
    group.routes = np.concatenate(routes) if routes else None
    versions = [each.versions for each in played if each.versions is not None]
    group.versions = np.concatenate(versions) if versions else None
    return group.checked()


def _joined(values: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *values]).astype(dtype, copy=False)


class GroupScorer:
    """Scores groups by one reward: that of a run, or of an evaluation suite."""

    def __init__(
        self,
        scorer: Scorer,
        shaping: Shaping,
        texts: SingleTurn,
        by_part: ObjectiveSection | None = None,
    ) -> None:
        """by_part: an objective whose advantage is that of the reward's parts (gdpo)."""
        self.scorer, self.shaping, self.texts, self.by_part = scorer, shaping, texts, by_part
        # names of the reward's parts that all ranks know; None: nothing has been scored yet
        self.part_names: PartNames | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        tokenizer: Tokenizer,
        reward: Reward,
        section: RewardSection,
        *,
        is_learnt: bool = False,
    ) -> GroupScorer:
        """section: how the reward is called; is_learnt: it is that of the run, not of a suite.
        Rewards of suites are shaped as those of the run."""
        shaping = Shaping(config.reward, config.rollout.max_response_tokens)
        by_part = config.objective if is_learnt and learns_from_parts(config.objective) else None
        scorer = Scorer(reward, section, needs_parts=by_part is not None)
        return cls(scorer, shaping, SingleTurn(tokenizer), by_part)

    @property
    def reward(self) -> Reward:
        return self.scorer.reward

    def samples(self, group: RolloutGroup, prompts: Sequence[Prompt], first: int) -> list[Sample]:
        """The responses as text. first: number of the first of the prompts in the step."""
        return self.texts.samples(
            group.tokens,
            group.prompt_lengths,
            group.response_lengths,
            group.truncated,
            group.group_index,
            prompts,
            first,
            group.sampled,
            group.in_response,
        )

    def fill_in(
        self,
        group: RolloutGroup,
        samples: Sequence[Sample],
        scores: Sequence[Score | None],
        failed: FailedCalls,
        seconds: float,
        episodes: Sequence[Episode] = (),
    ) -> None:
        """Write the scores, in the order of the responses, into the columns of the group. episodes:
        of the responses, where there are several turns."""
        names, numbers = self.scorer.part_names, group.group_index.tolist()
        columns, turns = reward_columns(scores, samples, numbers, len(names or ()), self.shaping)
        group.rewards, group.shaped = columns[0].copy(), columns[1].copy()
        group.turns = columns[2].astype(np.int64)
        group.parts, group.part_names = columns[3:].T.copy(), names
        if self.by_part is not None and names:
            group.shaped = self._of_parts(group, names, self.by_part.advantage_std)
        group.turn_rewards, group.turn_tokens = turns[0].copy(), turns[1].astype(np.int64)
        group.reasons = [score.reason if score else "" for score in scores]
        if episodes:
            group.records = records_of(episodes, scores)
        group.failed_calls = np.array(failed, np.int64)
        group.reward_seconds = np.array([seconds])

    def _of_parts(
        self, group: RolloutGroup, names: PartNames, std: Literal["sample", "population"]
    ) -> np.ndarray:
        """What takes the place of the shaped rewards. The penalty of an overlong response is one
        more part."""
        assert group.parts is not None, "its names are there"
        weights = self.scorer.section.weights
        weighted = group.parts * [weights.get(name, 1.0) for name in names]
        columns = np.stack([*weighted.T, group.shaped - group.rewards])
        return sum_of_normalized_parts(columns, group.group_index, std)

    def adopt(self, names: PartNames) -> None:
        """The parts of the rewards of a group. Raises RewardError where they change in a run."""
        if self.part_names not in (None, names):
            raise RewardError(
                f"reward {self.reward.name!r} returned {describe(names)}, and "
                f"{describe(self.part_names)} in an earlier step; the same names are wanted in "
                "every call"
            )
        self.part_names = names

    def close(self) -> None:
        """End the reward's workers."""
        self.scorer.close()
