"""The records that travel between the layers. No torch at import, no behaviour.

Sequences travel flat: one tensor of tokens and one of lengths, never a Python object per token.
The names in `__all__` are stable (docs/stability.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = [
    "LossInputs",
    "LossOutputs",
    "Message",
    "Prompt",
    "Reasoned",
    "Sample",
    "TurnRewards",
]

Message = Mapping[str, Any]  # the strings role and content, and what else the row has


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file."""

    text: str  # the prompt; of messages the text of the last user message
    answer: Any  # as the row has it, mostly a string; None: the file has no answers
    source: str  # "file:line", for error messages
    # Of the row: all other fields, and objects of which only a part was the prompt or the answer.
    fields: dict[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()  # filled in by data.prompts
    # What the chat template gets: the row's messages, or one user message; () without a template.
    messages: tuple[Message, ...] = ()
    row_id: str = ""  # the row's id, else "file name:line"


@dataclass(frozen=True)
class Sample:
    """What a reward function sees of one response."""

    prompt: str  # the prompt's text; of messages the text of the last user message
    # The value of data.answer_field: a string for the built-in rewards (`math`: or a number), for a
    # reward of your own whatever JSON value the row has; None with data.answer_field: null.
    answer: Any
    # Decoded without the end-of-sequence token; of an episode of several turns, the last turn.
    response: str
    truncated: bool  # the response hit the length limit before it ended
    fields: dict[str, Any] = field(default_factory=dict)  # the other fields of the prompt's row
    num_tokens: int = 0  # of the response, with its end-of-sequence token; of an episode, in all
    # The prompt as messages (role, content), as the chat template got them; () without a template.
    messages: tuple[Message, ...] = ()
    row_id: str = ""  # the id of the prompt's row, else "file name:line"
    num_prompt_tokens: int = 0  # of the whole prompt, with all that the chat template writes
    transcript: str = ""  # of an episode: all its turns and what stands between them


class Reasoned(float):
    """What a reward function may return instead of a number: a reward, and why it is not more.
    Evaluations write the reason beside the response."""

    reason: str

    def __new__(cls, reward: float, reason: str = "") -> Reasoned:
        made = super().__new__(cls, reward)
        made.reason = reason
        return made

    def __getnewargs__(self) -> tuple[float, str]:  # ty: ignore[incompatible-method-override]  # to be pickled
        return float(self), self.reason


@dataclass(frozen=True)
class TurnRewards:
    """What a reward function may return instead of a number: a reward for each turn of a response.

    The turns follow each other without gaps. A turn for each token makes rewards of tokens.
    """

    rewards: Sequence[float] | np.ndarray  # [turns]
    # [turns], the response token after each turn; the last is `num_tokens`
    ends: Sequence[int] | np.ndarray


@dataclass
class RolloutBatch:
    """Responses with their prompts, flat; sequence i is prompt then response. That of an episode
    whose history was rewritten has several branches: each a prompt, then a part of the response.

    `rollout_logprobs` are the log-probs of the sampled tokens as the rollout engine computed them,
    at the rollout temperature (mu in the papers).
    """

    tokens: Tensor  # [sum(prompt_lengths + response_lengths)] int64
    prompt_lengths: Tensor  # [num_sequences] int64, of all branches together
    response_lengths: Tensor  # [num_sequences] int64
    rollout_logprobs: Tensor  # [sum(response_lengths)] float32
    truncated: Tensor  # [num_sequences] bool
    sample_index: Tensor  # [num_sequences] int64, unique in the step over all ranks
    group_index: Tensor  # [num_sequences] int64, the prompt's number in the step
    mask: Tensor | None = None  # [sum(response_lengths)] bool, tokens to learn from; None: all
    # [tokens, MoE layers of this rank, k] uint8 or int16: the experts of each token, where the
    # engine records them. A branch's last token was never fed to the model: its row is void.
    routes: Tensor | None = None
    in_response: Tensor | None = None  # [tokens] bool; None: each sequence has a single branch
    teacher_logprobs: Tensor | None = None  # [sum(response_lengths)] float32, of a teacher's server
    # [sum(response_lengths), k] each: its most probable tokens, filled up with -1, and their
    # log-probs
    teacher_tokens: Tensor | None = None  # int32
    teacher_top_logprobs: Tensor | None = None  # float32
    teachers: Tensor | None = None  # [num_sequences] int32, which of several teachers; -1: none


@dataclass
class LossInputs:
    """One micro-batch as one rank holds it; the objective sees neither process groups nor Megatron.

    A sequence may be cut over several ranks (context parallelism). Every such rank holds all
    [num_sequences] vectors whole, and the tokens of its own shard.
    """

    logprobs: Tensor  # [tokens] float32, carries the gradient
    old_logprobs: Tensor  # [tokens] float32, the anchor of the importance ratio
    mask: Tensor  # [tokens] float32, 1 on response tokens that count
    sequence_index: Tensor  # [tokens] int64, which sequence of the micro-batch
    advantages: Tensor  # [num_sequences] float32
    sequence_lengths: Tensor  # [num_sequences] float32, masked tokens over all shards
    global_num_sequences: int  # in the optimizer mini-batch, over all ranks and micro-batches
    global_num_tokens: int  # masked response tokens in the optimizer mini-batch, likewise
    sum_over_shards: Callable[[Tensor], Tensor]  # [num_sequences] summed over a sequence's ranks
    is_primary_shard: bool  # True on exactly one of the ranks that share these sequences
    entropy: Tensor | None = None  # [tokens] float32
    token_advantages: Tensor | None = None  # [tokens] float32, where they differ in a sequence
    rollout_logprobs: Tensor | None = None  # [tokens] float32, of the rollout engine
    reference_logprobs: Tensor | None = None  # [tokens] float32, of the frozen reference policy


@dataclass
class LossOutputs:
    """What an objective returns.

    The gradients of `loss`, summed over all ranks and micro-batches of the mini-batch, are the
    gradient of the objective: the mean is already taken with the global counts. `means` holds
    [numerator, denominator] pairs and `values` one-dimensional tensors; both are filled on the
    primary shard for per-sequence figures and on every shard for per-token ones, so that plain
    sums and concatenations over all ranks count everything once.
    """

    loss: Tensor  # scalar
    means: dict[str, Tensor]  # name -> [2]: numerator, denominator
    values: dict[str, Tensor]  # "ratio/sequence" [num_sequences], "ratio/token" [masked tokens]
