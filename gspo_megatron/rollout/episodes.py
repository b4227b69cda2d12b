"""Runs episodes, assembles them into groups and scores the groups, for any rollout engine.

    engine -> turns -> episodes -> `assemble` -> RolloutGroup -> `GroupScorer` -> scored group

A response without an environment is an episode of one turn. With the in-process engine, one rank
of each model replica runs this code (rollout/megatron/barrier.py). With vLLM servers, the rollout
service runs it (rollout/vllm/episodes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from gspo_megatron.config import Config
from gspo_megatron.config.objectives import ObjectiveSection, learns_from_parts
from gspo_megatron.config.reward_model import PART
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.environments.episode import Episode, EpisodeRunner, TurnRequest
from gspo_megatron.environments.records import records_of
from gspo_megatron.environments.transcript import Written, joined_routes
from gspo_megatron.errors import RewardError
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.scoring import FailedCalls, PartNames, Scorer, Shaping, describe
from gspo_megatron.rewards.values import Score
from gspo_megatron.rollout.reward_model import ModelServer
from gspo_megatron.rollout.teacher import Teachers
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt, Sample

if TYPE_CHECKING:
    from gspo_megatron.data.tokenizers import Tokenizer


class GeneratedTurn(Protocol):
    """One turn that an engine generated."""

    token_ids: np.ndarray  # [tokens] int32, including the token that ended the turn
    logprobs: np.ndarray  # [tokens] float32, at the sampling temperature
    truncated: bool  # True if the limit of tokens cut the turn off
    # [prompt + response tokens, layers, k]; None: the engine does not report the experts here
    routes: np.ndarray | None
    # [tokens] int32, weights versions; None: the engine reports no versions.
    versions: np.ndarray | None


# Makes the engine generate one turn for each sample number. All these turns follow the same tokens.
Generate = Callable[[TurnRequest, Sequence[int]], Coroutine[Any, Any, Sequence[GeneratedTurn]]]


@dataclass
class Played:
    """One whole response: all turns of an episode, and the tokens between them."""

    tokens: np.ndarray  # [tokens] int32: for each branch, its prompt and its part of the response
    logprobs: np.ndarray  # [response tokens] float32
    truncated: bool
    routes: np.ndarray | None  # [tokens, layers, k]
    versions: np.ndarray | None  # [response tokens] int32
    turns: Sequence[Sequence[Any]]  # [branch][turn]: what the engine returned
    # The next three fields are None if there is no environment. Then all tokens after the prompt
    # are one turn.
    in_response: np.ndarray | None = None  # [tokens] bool
    sampled: np.ndarray | None = None  # [response tokens] bool: the tokens to learn from
    episode: Episode | None = None


def players(
    prompt: Prompt,
    samples: Sequence[int],
    max_tokens: int,
    episodes: EpisodeRunner | None,
    generate: Generate,
    no_turn: Callable[[int], GeneratedTurn],
) -> dict[int, Coroutine[Any, Any, list[Played]]]:
    """Return the coroutines that produce the responses to a prompt. The key of a coroutine is the
    number of its first sample.

    The caller must run the coroutines concurrently. Their results, joined in order, are one
    response for each sample. Each coroutine has at most one call of `generate` in progress.

    episodes: None for single turns; no_turn: gets the number of prompt tokens, and makes the
    placeholder turn of an episode that failed before its first turn.
    """
    if episodes is None:
        return {samples[0]: _single_turns(prompt, samples, max_tokens, generate)}
    return {n: _episode(prompt, n, episodes, generate, no_turn) for n in samples}


async def _single_turns(
    prompt: Prompt, samples: Sequence[int], max_tokens: int, generate: Generate
) -> list[Played]:
    responses = await generate(TurnRequest(prompt.token_ids, 0, max_tokens), samples)
    ids = np.asarray(prompt.token_ids, np.int32)
    return [played_turn(ids, response) for response in responses]


async def _episode(
    prompt: Prompt,
    sample: int,
    episodes: EpisodeRunner,
    generate: Generate,
    no_turn: Callable[[int], GeneratedTurn],
) -> list[Played]:
    async def write(asked: TurnRequest) -> Written:
        [response] = await generate(asked, [sample])
        return Written(response.token_ids.tolist(), response.truncated, source=response)

    return [played_episode(await episodes.run(prompt, write), no_turn)]


def played_turn(prompt: np.ndarray, response: GeneratedTurn) -> Played:
    """Make the response of a single turn. prompt: [tokens] int32."""
    return Played(
        np.concatenate([prompt, response.token_ids]),
        response.logprobs,
        response.truncated,
        response.routes,
        response.versions,
        [[response]],
    )


def played_episode(episode: Episode, no_turn: Callable[[int], GeneratedTurn]) -> Played:
    """Make the response of an episode that has ended. A failed episode has no tokens to learn from.

    no_turn: see `players`.
    """
    transcript = episode.transcript
    # True: the episode failed before its first turn.
    has_failed = transcript.turns[0].source is None
    placeholder = no_turn(len(transcript.prompt)) if has_failed else None

    def response(turn: Written) -> Any:
        return placeholder or turn.source

    turns = [
        [response(transcript.turns[number]) for number in branch.turns]
        for branch in transcript.branches()
    ]
    routes = [piece for branch in turns for piece in _routes_of(branch)]
    has_versions = turns[0][0].versions is not None
    tokens, in_response = transcript.sequence
    return Played(
        tokens,
        transcript.column(lambda turn: response(turn).logprobs, filler=0.0),
        has_failed or episode.client.is_cut,
        np.concatenate(routes) if routes else None,
        transcript.column(lambda turn: response(turn).versions) if has_versions else None,
        turns,
        in_response,
        episode.mask,
        episode,
    )


def _routes_of(turns: Sequence[GeneratedTurn]) -> list[np.ndarray]:
    """Return the routes of a branch's tokens in pieces, or an empty list if the engine reports no
    routes."""
    routes = [turn.routes for turn in turns if turn.routes is not None]
    assert len(routes) in (0, len(turns)), "routes of some turns only"
    return joined_routes(routes) if routes else []


def assemble(
    played: Sequence[Played], samples: Sequence[int], per_prompt: int, *, has_episodes: bool
) -> RolloutGroup:
    """Join responses into one group whose rewards are still NaN.

    samples: the number of each response in the step; has_episodes: the responses come from an
    environment.
    """
    count, numbers = len(played), np.array(samples, np.int64)
    lengths = np.array([len(each.tokens) for each in played], np.int64)
    response_lengths = np.array([len(each.logprobs) for each in played], np.int64)
    group = RolloutGroup(
        tokens=_joined([each.tokens for each in played], np.int32),
        prompt_lengths=lengths - response_lengths,
        response_lengths=response_lengths,
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


def _joined(values: Sequence[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *values]).astype(dtype, copy=False)


@dataclass(eq=False)
class GroupScorer:
    """Scores groups with one reward: the reward of the run or of an evaluation suite."""

    scorer: Scorer
    shaping: Shaping
    tokenizer: Tokenizer
    # the objective, if it computes the advantage from the reward's parts (gdpo)
    by_part: ObjectiveSection | None = None
    teachers: Teachers | None = None
    model: ModelServer | None = None  # the server of a reward model
    # The names of the reward's parts, the same on all ranks. None: nothing has been scored yet.
    part_names: PartNames | None = None

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
        """Make a scorer from the configuration.

        section: how to call the reward; is_learnt: True for the run's reward, False for the reward
        of a suite. The shaping is the same for both.
        """
        shaping = Shaping(config.reward, config.rollout.max_response_tokens)
        by_part = config.objective if is_learnt and learns_from_parts(config.objective) else None
        scorer = Scorer(reward, section, needs_parts=by_part is not None)
        distillation, teachers = config.objective.distillation, None
        if is_learnt and (distillation.urls or distillation.field is not None):
            teachers = Teachers(distillation, section, tokenizer)
        model = None if section.model.url is None else ModelServer(section)
        return cls(scorer, shaping, tokenizer, by_part, teachers, model)

    @property
    def has_model(self) -> bool:
        """Whether a reward model gives a part of the reward: see `add_model`."""
        return self.scorer.section.model.is_on

    @property
    def shapes(self) -> bool:
        """Whether the reward to train on may differ from the logged reward. With gdpo it is an
        advantage instead, whose mean is always 0."""
        changes = self.shaping.is_on or self.scorer.section.model.normalize != "none"
        return changes and self.by_part is None

    @property
    def reward(self) -> Reward:
        return self.scorer.reward

    def samples(self, group: RolloutGroup, prompts: Mapping[int, Prompt]) -> list[Sample]:
        """Return the responses as text, in their order. prompts: by their numbers in the step.

        For an episode, the text is its last turn, and the prompt is the prompt of its first branch.
        """
        samples, end, responses_end = [], 0, 0
        rows = zip(
            group.prompt_lengths.tolist(),
            group.response_lengths.tolist(),
            group.truncated.tolist(),
            group.group_index.tolist(),
            strict=True,
        )
        for prompt_length, length, truncated, number in rows:
            start, end = end, end + prompt_length + length
            ids, transcript, written = group.tokens[start + prompt_length : end], "", ""
            if group.sampled is not None and group.in_response is not None:
                in_response = group.in_response[start:end]
                prompt_length = int(np.argmax(in_response))
                transcript = self._decode(group.tokens[start + prompt_length : end])
                sampled = group.sampled[responses_end : responses_end + length]
                written = self._decode(group.tokens[start:end][in_response][sampled])
                responses_end += length
                # The response shown is the last turn of the last branch, which has `count` tokens
                # after its prompt.
                count = end - start - (np.flatnonzero(~in_response)[-1] + 1)
                of_branch = group.sampled[responses_end - count : responses_end]
                ids = group.tokens[end - count : end][_last_turn(of_branch) :]
            prompt = prompts[number]
            samples.append(
                Sample(
                    prompt=prompt.text,
                    answer=prompt.answer,
                    response=self._decode(ids),
                    truncated=truncated,
                    fields=prompt.fields,
                    num_tokens=length,
                    messages=prompt.messages,
                    row_id=prompt.row_id,
                    num_prompt_tokens=prompt_length,
                    transcript=transcript,
                    written=written,
                    group=number,
                )
            )
        assert end == len(group.tokens)
        return samples

    async def ask_servers(
        self,
        group: RolloutGroup,
        samples: Sequence[Sample],
        prompts: Mapping[int, Prompt],
        *,
        is_learnt: bool,
    ) -> int:
        """Write the answers of teachers and of a reward model behind a URL into the columns of a
        group. `add_model` later adds the scores of this model to the reward.

        prompts: see `samples`; is_learnt: whether the policy learns from the responses; teachers
        judge no others. Returns the number of failed calls. Raises RewardError.
        """
        failures = 0
        if self.teachers is not None and is_learnt:
            failures += await self.teachers.judge(group, prompts)
        if self.model is not None:
            scored = await self.model.score(samples)
            group.model_scores, group.model_tokens = scored.scores, scored.tokens
            group.model_cut, group.model_seconds = scored.cut, np.array([scored.seconds])
            failures += scored.failures
        return failures

    def fill_in(
        self,
        group: RolloutGroup,
        samples: Sequence[Sample],
        scores: Sequence[Score | None],
        failed: FailedCalls,
        seconds: float,
        episodes: Sequence[Episode] = (),
    ) -> None:
        """Write the scores, in the order of the responses, into the columns of the group.

        A failed call (score None, or a teacher's log-prob NaN) gives NaN as shaped reward of its
        whole group. failed: failed calls of the reward and of `ask_servers`; episodes: the episodes
        of the responses, if there is an environment.
        """
        names, numbers, count = self.scorer.part_names, group.group_index.tolist(), len(samples)
        lost = {n for n, score in zip(numbers, scores, strict=True) if score is None}
        if group.teacher_logprobs is not None:
            unknown = np.isnan(group.teacher_logprobs)
            lost |= {*group.group_index.repeat(group.response_lengths)[unknown].tolist()}
        group.rewards, group.shaped = np.full(count, np.nan), np.full(count, np.nan)
        group.turns = np.zeros(count, np.int64)
        group.parts, group.part_names = np.full((count, len(names or ())), np.nan), names
        figures = self.reward.figures
        group.figures = np.full((count, len(figures)), np.nan) if figures else None
        turn_rewards, turn_tokens = [np.zeros(0)], [np.zeros(0, np.int64)]
        for row, (score, sample, number) in enumerate(zip(scores, samples, numbers, strict=True)):
            if score is None:
                continue
            shaped = self.shaping(score.rewards, sample)
            group.rewards[row] = score.rewards.sum()
            group.shaped[row] = np.nan if number in lost else shaped.sum()
            if group.figures is not None:
                group.figures[row] = [score.figures.get(name, np.nan) for name in figures]
            group.parts[row] = [score.parts.get(name, np.nan) for name in names or ()]
            if score.ends is not None:
                group.turns[row] = len(shaped)
                turn_rewards.append(shaped)
                turn_tokens.append(np.diff(score.ends, prepend=0).astype(np.int64))
        group.turn_rewards = np.concatenate(turn_rewards)
        group.turn_tokens = np.concatenate(turn_tokens)
        if self.by_part is not None and names and not self.has_model:
            group.shaped = self._of_parts(group, names, self.by_part.advantage_std)
        group.reasons = [score.reason if score else "" for score in scores]
        if episodes:
            group.records = records_of(episodes, scores)
        group.failed_calls = np.array(failed, np.int64)
        group.reward_seconds = np.array([seconds])

    def add_model(
        self,
        group: RolloutGroup,
        samples: Sequence[Sample],
        scores: np.ndarray,
        normalized: np.ndarray,
    ) -> None:
        """Add a reward model's part to the rewards of a group that `fill_in` has filled in.

        scores, normalized: [num_sequences] float64, NaN where the call failed for good. The logged
        part is the score itself. The reward to train on contains the normalized score.
        """
        names = group.part_names
        if names is None:  # all calls of the reward function failed
            return
        assert group.parts is not None, "its names are there"
        group.parts[:, names.index(PART)] = scores
        weight = self.scorer.section.weights.get(PART, 1.0)
        other_rewards = group.rewards
        group.rewards = other_rewards + weight * scores
        has_failed = np.isnan(group.shaped) | np.isnan(group.rewards)
        failed_groups = np.unique(group.group_index[has_failed])
        group.shaped = np.full(len(samples), np.nan)
        for row, (sample, number) in enumerate(zip(samples, group.group_index, strict=True)):
            if number not in failed_groups:
                reward = np.array([other_rewards[row] + weight * normalized[row]])
                group.shaped[row] = self.shaping(reward, sample)[0]
        if self.by_part is not None:
            group.shaped = self._of_parts(group, names, self.by_part.advantage_std)

    def _of_parts(
        self, group: RolloutGroup, names: PartNames, std: Literal["sample", "population"]
    ) -> np.ndarray:
        """Return the sum of the normalized parts, which replaces the shaped rewards.

        The penalties for overlong responses and for repetitions count as one more part.
        """
        assert group.parts is not None, "its names are there"
        weight_of = self.scorer.section.weights
        columns = np.stack([*group.parts.T, group.shaped - group.rewards])
        weights = [*(weight_of.get(name, 1.0) for name in names), 1.0]
        return sum_of_normalized_parts(columns, group.group_index, std, weights)

    def adopt(self, names: PartNames) -> None:
        """Set the names of the reward's parts. Raises RewardError if they change within a run."""
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

    def _decode(self, token_ids: np.ndarray) -> str:
        return self.tokenizer.decode_response(token_ids.tolist())


def _last_turn(written: np.ndarray) -> int:
    """Return the index of the last turn's first token. The turn ends where the response ends.

    written: [response tokens of a branch] bool, True on tokens that the policy wrote.
    """
    others = np.flatnonzero(~written)
    return int(others[-1]) + 1 if len(others) else 0


# Parts that differ only by float32 rounding count as equal, as in objectives/advantages.py.
_ROUNDING = 4 * float(np.finfo(np.float32).eps)


def sum_of_normalized_parts(
    parts: np.ndarray,
    groups: np.ndarray,
    std: Literal["sample", "population"],
    weights: Sequence[float] | None = None,
) -> np.ndarray:
    """Normalize each part of the rewards within its group, then add up the weighted parts (GDPO).

    Source: arXiv 2601.05242. The mean of the group is subtracted from a part, and the result is
    divided by the standard deviation of the group. A part without spread in a group adds exactly 0.

    parts: [parts, num_sequences] float64; NaN in groups with failed calls.
    groups: [num_sequences].
    weights: one for each part; None: 1. A weight before the division would have no effect.
    Returns [num_sequences] float64, NaN in groups with failed calls.
    """
    factors = np.ones(len(parts)) if weights is None else np.array(weights)
    total = np.zeros(len(groups))
    for number in np.unique(groups):
        rows = groups == number
        own = parts[:, rows]
        differs = np.ptp(own, axis=1) > _ROUNDING * np.abs(own).max(axis=1)
        centred = own - own.mean(axis=1, keepdims=True)
        degrees = max(own.shape[1] - (std == "sample"), 1)
        deviation = np.sqrt(np.square(centred).sum(axis=1) / degrees)
        scaled = centred[differs] / deviation[differs, None] * factors[differs, None]
        total[rows] = np.nan if np.isnan(own).any() else scaled.sum(axis=0)
    return total
