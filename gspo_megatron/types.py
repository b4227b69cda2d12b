"""The records that the layers exchange. This module imports no torch and has no behaviour.

Sequences are flat: one tensor of tokens and one of lengths, never a Python object per token. The
names in `__all__` are stable (docs/stability.md).
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

Message = Mapping[str, Any]  # the strings role and content, and other keys of the row


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file."""

    text: str  # the prompt; for messages, the text of the last user message
    answer: Any  # the row's value, mostly a string; None: the file has no answers
    source: str  # "file:line", for error messages
    # The fields of the row other than prompt and answer. If only a part of a field is the prompt or
    # the answer, the whole field is here, too.
    fields: dict[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()  # filled in by data.prompts
    # Input of the chat template: the row's messages, or one user message; () without a template.
    messages: tuple[Message, ...] = ()
    row_id: str = ""  # the row's id, else "file name:line"
    # The tools of the row that the chat template has described; filled in by data.prompts.
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Sample:
    """The input of a reward function: one response with its prompt, answer and fields."""

    prompt: str  # the prompt's text; for messages, the text of the last user message
    # The value of data.answer_field. Built-in rewards need a string (for `math`, a number is also
    # possible); a reward of your own may use any JSON value. None with data.answer_field: null.
    answer: Any
    # Decoded without the end-of-sequence token; for an episode, only the last turn.
    response: str
    truncated: bool  # the response reached the length limit before it ended
    fields: dict[str, Any] = field(default_factory=dict)  # as in Prompt
    # Tokens of the response with its end-of-sequence token; for an episode, of all its turns and
    # the tokens between them.
    num_tokens: int = 0
    # The messages (role, content) that the chat template got; () without a template.
    messages: tuple[Message, ...] = ()
    row_id: str = ""  # the id of the prompt's row, else "file name:line"
    num_prompt_tokens: int = 0  # tokens of the whole prompt, including the chat template's tokens
    transcript: str = ""  # for an episode: all its turns, and the text between them
    written: str = ""  # for an episode: what the policy wrote in all its turns
    group: int = 0  # the prompt's number in the step: the same for all responses to one prompt


class Reasoned(float):
    """A reward with an explanation and named figures. A reward function may return it instead of a
    number.

    Evaluations write the reason beside the response. The mean of each figure over a step's
    responses becomes the metric reward/NAME; `figures`, an attribute of the function, names the
    figures.
    """

    reason: str
    figures: Mapping[str, float]

    def __new__(
        cls, reward: float, reason: str = "", figures: Mapping[str, float] | None = None
    ) -> Reasoned:
        made = super().__new__(cls, reward)
        made.reason, made.figures = reason, dict(figures or {})
        return made

    def __getnewargs__(self) -> tuple[float, str, Mapping[str, float]]:  # ty: ignore[incompatible-method-override]  # to be pickled
        return float(self), self.reason, self.figures


@dataclass(frozen=True)
class TurnRewards:
    """A reward for each turn of a response; a reward function may return it instead of a number.

    The turns follow each other without gaps. If each token is a turn, each token has a reward.
    """

    rewards: Sequence[float] | np.ndarray  # [turns]
    # [turns], the index of the response token after each turn; the last index is `num_tokens`
    ends: Sequence[int] | np.ndarray


@dataclass
class RolloutBatch:
    """Responses with their prompts, flat. Sequence i is a prompt, then its response.

    An episode whose history was rewritten has several branches: each is a prompt, then a part of
    the response. `rollout_logprobs` are the rollout engine's log-probs of the sampled tokens, at
    the rollout temperature (mu in the papers).
    """

    tokens: Tensor  # [sum(prompt_lengths + response_lengths)] int64
    prompt_lengths: Tensor  # [num_sequences] int64, for all branches together
    response_lengths: Tensor  # [num_sequences] int64
    rollout_logprobs: Tensor  # [sum(response_lengths)] float32
    truncated: Tensor  # [num_sequences] bool
    sample_index: Tensor  # [num_sequences] int64, unique in the step over all ranks
    group_index: Tensor  # [num_sequences] int64, the prompt's number in the step
    mask: Tensor | None = None  # [sum(response_lengths)] bool, tokens to learn from; None: all
    # [tokens, MoE layers of this rank, k] uint8 or int16: the experts of each token; None: not
    # recorded. The last token of a branch never goes through the model; its row means nothing.
    routes: Tensor | None = None
    in_response: Tensor | None = None  # [tokens] bool; None: each sequence has a single branch
    teacher_logprobs: Tensor | None = None  # [sum(response_lengths)] float32, from a server
    # [sum(response_lengths), k] each: the teacher's most probable tokens, filled up with -1, and
    # their log-probs
    teacher_tokens: Tensor | None = None  # int32
    teacher_top_logprobs: Tensor | None = None  # float32
    # [num_sequences] int32, the number of the sequence's teacher, if there are several; -1: the
    # sequence has no teacher
    teachers: Tensor | None = None


@dataclass
class LossInputs:
    """One rank's part of a micro-batch. An objective needs neither process groups nor Megatron.

    A sequence may be split over several ranks (context parallelism). Each of these ranks holds the
    whole [num_sequences] vectors, and the tokens of its own shard.
    """

    logprobs: Tensor  # [tokens] float32, carries the gradient
    old_logprobs: Tensor  # [tokens] float32, the anchor of the importance ratio
    mask: Tensor  # [tokens] float32, 1 on response tokens that count
    sequence_index: Tensor  # [tokens] int64, the number of the sequence in the micro-batch
    advantages: Tensor  # [num_sequences] float32
    sequence_lengths: Tensor  # [num_sequences] float32, tokens with mask 1 over all shards
    global_num_sequences: int  # in the optimizer mini-batch, over all ranks and micro-batches
    global_num_tokens: int  # tokens with mask 1 in the mini-batch, over all ranks and micro-batches
    sum_over_shards: Callable[[Tensor], Tensor]  # [num_sequences] summed over a sequence's ranks
    is_primary_shard: bool  # True on exactly one of the ranks that share these sequences
    entropy: Tensor | None = None  # [tokens] float32
    # [tokens] float32; None: all tokens of a sequence have the same advantage
    token_advantages: Tensor | None = None
    rollout_logprobs: Tensor | None = None  # [tokens] float32, of the rollout engine
    reference_logprobs: Tensor | None = None  # [tokens] float32, of the frozen reference policy


@dataclass
class LossOutputs:
    """The result of an objective.

    The gradients of `loss`, summed over all ranks and micro-batches of the mini-batch, are the
    gradient of the objective: `loss` is already divided by the global counts. `means` holds
    [numerator, denominator] pairs, and `values` holds one-dimensional tensors. Per-sequence figures
    are filled only on the primary shard, per-token figures on every shard. So plain sums and
    concatenations over all ranks count everything once.
    """

    loss: Tensor  # scalar
    means: dict[str, Tensor]  # name -> [2]: numerator, denominator
    # "ratio/sequence" [num_sequences], NaN: no tokens count; "ratio/token" [tokens that count]
    values: dict[str, Tensor]
