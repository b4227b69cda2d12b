"""Writes episodes as readable records: speaker, text and reward of each turn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gspo_megatron.environments.episode import Episode
from gspo_megatron.environments.transcript import Transcript
from gspo_megatron.rewards.values import Score
from gspo_megatron.types import Message

if TYPE_CHECKING:
    from gspo_megatron.data.tokenizers import Tokenizer

POLICY = "assistant"  # the role of the policy's messages


def record_of(episode: Episode, score: Score | None) -> dict[str, Any]:
    """Return an episode's `turns` and `error` (why it failed) for samples.jsonl.

    The text of a policy's turn includes its special tokens, so that the text cannot imitate the end
    of a turn or another speaker. Between these turns are the messages or the text of the
    environment. `score` is None if the reward is unknown.
    """
    rewards = _rewards_of_turns(episode.transcript, score)
    error = None if episode.error is None else str(episode.error)
    return {"turns": [*_turns(episode, rewards)], "error": error}


def records_of(
    episodes: Sequence[Episode], scores: Sequence[Score | None]
) -> Sequence[dict[str, Any]]:
    """Return the records of several episodes; empty if the run has no environment.

    Each record is made on access, because a step writes only `logging.samples_per_step` of them."""
    return _Records([*zip(episodes, scores, strict=True)]) if episodes else []


class _Records(Sequence[Any]):
    def __init__(self, pairs: list[tuple[Episode, Score | None]]) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [record_of(*pair) for pair in self._pairs[index]]
        return record_of(*self._pairs[index])


def visible(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Decode tokens, including the names of special tokens."""
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    runs = itertools.groupby(map(int, token_ids), key=lambda n: n in names)
    return "".join(
        "".join(names[n] for n in run) if is_special else tokenizer.decode([*run])
        for is_special, run in runs
    )


def _turns(episode: Episode, rewards: Sequence[float] | None) -> Iterator[dict[str, Any]]:
    transcript, tokenizer = episode.transcript, episode.client.tokenizer
    for branch, part in enumerate(transcript.branches()):
        for number in part.turns:
            messages = episode.client.conversation.added[number]
            between = transcript.between[number]
            for message in messages:
                yield {**_of_message(message), "branch": branch, "trained": False}
            # The turn answers text instead of messages.
            if not messages and (number == 0 or between):
                ids = between if number else part.prompt
                role, text = "environment" if number else "prompt", visible(tokenizer, ids)
                yield {"role": role, "text": text, "branch": branch, "trained": False}
            turn = transcript.turns[number]
            if turn.source is None and episode.error is not None:
                continue  # the episode failed before its first turn
            yield {
                "role": POLICY,
                "text": visible(tokenizer, turn.token_ids),
                "branch": branch,
                "trained": episode.error is None,
                "truncated": turn.truncated,
                "reward": None if rewards is None else rewards[number],
            }


def _of_message(message: Message) -> Mapping[str, Any]:
    """Return the record of a message. An environment's message may have values of any type."""
    keys = ("role", "content", "tool_calls")
    role, content, calls = (_shown(_field(message, key)) for key in keys)
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {
        "role": "" if role is None else str(role),
        "text": "" if content is None else text,
        **({"tool_calls": calls} if calls else {}),
    }


def _field(message: Any, key: str) -> Any:
    return message.get(key) if isinstance(message, Mapping) else getattr(message, key, None)


def _shown(value: Any) -> Any:
    """Convert a value to JSON; to the name of its type if the conversion fails."""
    try:
        plain = _plain(value)
        json.dumps(plain)  # fails for an integer with too many digits
        return plain
    except Exception:  # noqa: BLE001 (code of the value's own class, or a list that holds itself)
        return f"({type(value).__name__})"


def _plain(value: Any) -> Any:
    """Convert a value to JSON; values that JSON lacks become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):  # numpy arrays and tensors; imports neither library
        return _plain(value.tolist())
    return str(value)


def _rewards_of_turns(transcript: Transcript, score: Score | None) -> list[float] | None:
    """Return the reward of each turn; None if the rewards do not belong to the turns."""
    if score is None or score.ends is None:
        return None
    ends = [int(end) for end in transcript.turn_ends()]
    return [float(r) for r in score.rewards] if [int(e) for e in score.ends] == ends else None
