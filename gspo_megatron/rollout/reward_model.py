"""Makes the conversations that a reward model scores, and asks a server for the scores.

The model has its own tokenizer and chat template. This module applies both, so a server gets token
ids. The server is vLLM with `--runner pooling --convert classify`, or another server with the same
routes /classify, /tokenize and /v1/models.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gspo_megatron.addresses import keyed_session
from gspo_megatron.config.reward_model import PART, RewardModelSection
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.data.chat import ASSISTANT, USER, tools_of_prompt
from gspo_megatron.data.prompts import encode_whole
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import DataError, RewardError
from gspo_megatron.hub import tokenizer_in
from gspo_megatron.process.coroutines import BusySeconds, run_together
from gspo_megatron.rewards.values import Score, shorten
from gspo_megatron.rollout.asking import Asker
from gspo_megatron.types import Sample

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from gspo_megatron.data.tokenizers import Tokenizer

KEY_VARIABLE = "GSPO_REWARD_MODEL_KEY"  # environment variable with the server's API key


class Conversations(NamedTuple):
    """Conversations as token ids of a reward model."""

    ids: list[list[int]]
    cut: np.ndarray  # [conversations] bool: too long, so the first tokens were cut off

    @property
    def tokens(self) -> np.ndarray:
        """The number of tokens of each conversation, [conversations] int64."""
        return np.array([len(each) for each in self.ids], np.int64)


class ModelTexts:
    """Makes the conversations that a reward model scores."""

    def __init__(self, section: RewardSection) -> None:
        self.section, self.name = section.model, section.model.source
        # None: replaced by the server's limit when this is known
        self.longest = section.model.max_tokens
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer, loaded when it is first used. Raises DataError."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self.section)
        return self._tokenizer

    def conversations(self, samples: Sequence[Sample]) -> Conversations:
        """Return the conversations of these responses, each at most `longest` tokens.

        Raises RewardError if the chat template refuses the messages of a prompt.
        """
        try:
            ids = [self.ids_of(sample) for sample in samples]
        except DataError as error:
            raise RewardError(f"{self.name}: {error}") from error
        longest = math.inf if self.longest is None else self.longest
        cut = np.array([len(each) > longest for each in ids], np.bool_)
        if self.longest is not None:
            ids = [each[-self.longest :] for each in ids]
        return Conversations(ids, cut)

    def ids_of(self, sample: Sample) -> list[int]:
        """Return a prompt and its response as tokens of the model.

        The chat template renders the prompt's messages and the response. If the prompt is a text,
        it becomes one user message. Without a chat template, prompt and response are one text,
        followed by the end-of-sequence token. Text that spells a control token is encoded as text,
        so a response cannot end its own message. Raises DataError.
        """
        tokenizer, renders = self.tokenizer, self.section.chat_template
        if renders is None:
            renders = tokenizer.chat_template is not None
        if renders:
            prompt = sample.messages or ({"role": USER, "content": sample.prompt},)
            messages = [*prompt, {"role": ASSISTANT, "content": sample.response}]
            tools = tools_of_prompt(sample.fields, tokenizer)
            rendered = tokenizer.render(messages, tools=tools)
            return tokenizer.encode_rendered(rendered.text, rendered.quoted).ids
        if len(sample.messages) > 1:
            raise DataError(
                f"a prompt has {len(sample.messages)} messages ({sample.row_id}), and without a "
                "chat template the model reads one text; give a tokenizer with a template"
            )
        return encode_whole(sample.prompt, sample.response, tokenizer)


def tokenizer_of(section: RewardModelSection) -> Tokenizer:
    """Load a reward model's own tokenizer. Raises DataError."""
    path = tokenizer_in(Path(section.tokenizer_folder))
    return load_tokenizer(path, section.chat_template_options)


@dataclass
class ModelScores:
    """A model's scores of the responses of a group."""

    scores: np.ndarray  # [num_sequences] float64; NaN: the call failed for good
    tokens: np.ndarray  # [num_sequences] int64: tokens of the conversation
    cut: np.ndarray  # [num_sequences] bool: whether the conversation was too long
    seconds: float  # wall time; time that groups share counts for only one of them
    failures: int = 0  # number of failed calls, including calls that later succeeded


class ModelServer(Asker):
    """The server of a reward model. The section `reward` sets the deadline of a call."""

    def __init__(self, section: RewardSection) -> None:
        assert section.model.url is not None
        super().__init__(section.model.source, section)
        self.url, self.batch_size = section.model.url.rstrip("/"), section.model.batch_size
        self.texts = ModelTexts(section)
        self._busy = BusySeconds()

    async def score(self, samples: Sequence[Sample]) -> ModelScores:
        """Ask the server for the scores of these responses, in their order.

        Raises RewardError for mistakes of the user. If `reward.on_failure` is `stop`, also raises
        RewardError for a call that fails after all repetitions.
        """
        with self._busy.running():
            seconds = self.reward.timeout_seconds
            async with keyed_session(self.url, KEY_VARIABLE, seconds) as session:
                failures = await self.find_model_name(session)
                # done in a thread, so that a rollout service can do other work at the same time
                conversations = await asyncio.to_thread(self.texts.conversations, samples)
                scores, failed = await self._ask(session, conversations.ids)
        seconds = self._busy.take()
        tokens, cut = conversations.tokens, conversations.cut
        return ModelScores(scores, tokens, cut, seconds, failures + failed)

    async def checked_model_name(self, session: ClientSession) -> str:
        """See Asker."""
        model = (await self.request_json(session, "GET", f"{self.url}/v1/models"))["data"][0]
        tokenize, tokenizer = f"{self.url}/tokenize", self.texts.tokenizer
        if not await self.has_tokenizer(session, tokenize, model["id"], tokenizer):
            raise RewardError(
                f"{self.name}: its tokenizer makes other tokens of a text than "
                "reward.model.tokenizer; give the folder of the model that is served"
            )
        longest = model.get("max_model_len")
        if self.texts.longest is None and type(longest) is int:
            self.texts.longest = longest
        return str(model["id"])

    async def _ask(
        self, session: ClientSession, ids: Sequence[list[int]]
    ) -> tuple[np.ndarray, int]:
        """Return the scores, and the number of failed calls."""
        scores, failures = np.full(len(ids), np.nan), 0
        if not self.model:  # the call for the name failed after all repetitions
            return scores, failures
        starts = range(0, len(ids), self.batch_size)
        batches = [ids[start : start + self.batch_size] for start in starts]

        async def ask(batch: list[list[int]]) -> tuple[list[float] | None, int]:
            async with self.slots:
                return await self.with_retries(partial(self._scores, session, batch))

        answers = await run_together(ask([*batch]) for batch in batches)
        for start, batch, (batch_scores, failed) in zip(starts, batches, answers, strict=True):
            failures += failed
            if batch_scores is not None:
                scores[start : start + len(batch)] = batch_scores
        return scores, failures

    async def _scores(self, session: ClientSession, batch: list[list[int]]) -> list[float]:
        """Return the scores of a batch.

        Raises ValueError if a conversation has no score or a score that is not finite, and
        RewardError if the model does not give exactly one number for each conversation.
        """
        content = {"model": self.model, "input": batch, "use_activation": False}
        answer = (await self.request_json(session, "POST", f"{self.url}/classify", content))["data"]
        if len(answer) != len(batch):
            raise ValueError(f"{len(answer)} scores for {len(batch)} conversations")
        scores = [math.nan] * len(batch)
        for place, each in enumerate(answer):
            scores[each.get("index", place)] = self._number(each["probs"])
        if any(map(math.isnan, scores)):
            raise ValueError("scores of only some of the conversations")
        return scores

    def _number(self, values: Any) -> float:
        """Return the only number of an answer."""
        if not isinstance(values, list) or len(values) != 1:
            count = len(values) if isinstance(values, list) else shorten(values)
            raise RewardError(
                f"{self.name}: the model gives {count} numbers for a conversation; give a "
                "...ForSequenceClassification model with one label"
            )
        if type(values[0]) not in (int, float) or not math.isfinite(values[0]):
            raise ValueError(f"a score of {shorten(values[0])}")
        return float(values[0])

    def advice(self, status: int, text: str) -> str | None:
        """Explain an answer that says that tokens are not in the model's vocabulary."""
        if status == 400 and "out of vocabulary" in text:
            return "reward.model.tokenizer is that of another model"
        return None


def with_model(
    section: RewardSection, samples: Sequence[Sample], scores: Sequence[Score | None]
) -> list[Score | None]:
    """If the configuration has a reward model behind a URL, add its scores to the scores of a
    reward function.

    This function is for responses outside of a run. Raises the errors of `ModelServer.score`.
    """
    if section.model.url is None:
        return [*scores]
    weight = section.weights.get(PART, 1.0)
    model_scores = asyncio.run(ModelServer(section).score(samples)).scores.tolist()
    return [
        None
        if score is None or math.isnan(value)
        else replace(
            score,
            rewards=score.rewards + weight * value,
            parts=dict(sorted({**score.parts, PART: value}.items())),
        )
        for score, value in zip(scores, model_scores, strict=True)
    ]
