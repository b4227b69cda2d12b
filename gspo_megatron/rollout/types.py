"""Responses with their data: log-probs, rewards, routes and more.

`RolloutGroup` declares each column once: its type, and what one row stands for. Memory, the store
on disk, messages between ranks and the batch of a step all use this declaration.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from gspo_megatron.errors import DataError
from gspo_megatron.files import WRONG_VALUES
from gspo_megatron.observe.metrics_files import jsonable
from gspo_megatron.rewards.scoring import FailedCalls
from gspo_megatron.types import RolloutBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# What one row of a column stands for.
SEQUENCE = "sequence"  # a response
TOKEN = "token"  # a token of prompts and responses, sequence after sequence
RESPONSE_TOKEN = "response token"  # a token of the responses
TURN = "turn"  # a rewarded turn, response after response
SUM = "sum"  # all responses together; joining groups adds the values up
SHARED = "shared"  # all responses together; groups to join have the same value


class Column(NamedTuple):
    """The declaration of a field of RolloutGroup. A field with a default may be None."""

    rows: str
    dtype: Any = None  # None: any type
    is_added: bool = False  # stores of earlier versions of this package lack the column


@dataclass
class RolloutGroup:
    """The responses to one or several prompts, flat. A sequence is a prompt, then its response.

    An episode whose history was rewritten has several branches. Each branch is a prompt, then a
    part of the response.
    """

    tokens: Annotated[np.ndarray, Column(TOKEN, np.int32)]
    # prompt tokens of all branches together
    prompt_lengths: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    response_lengths: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    # the engine's log-probs of the sampled tokens, at the rollout temperature
    rollout_logprobs: Annotated[np.ndarray, Column(RESPONSE_TOKEN, np.float32)]
    # whether a token limit cut the response off
    truncated: Annotated[np.ndarray, Column(SEQUENCE, np.bool_)]
    # unique in the step, over all ranks
    sample_index: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    # the prompt's number in the step
    group_index: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    # The reward before shaping: the sum over turns or weighted parts. NaN: the call failed.
    rewards: Annotated[np.ndarray, Column(SEQUENCE, np.float64)]
    # the reward to train on; NaN in the whole group of a failed call
    shaped: Annotated[np.ndarray, Column(SEQUENCE, np.float64)]
    # number of rewarded turns; 0: only the response as a whole was rewarded
    turns: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    turn_rewards: Annotated[np.ndarray, Column(TURN, np.float64)]  # after shaping
    turn_tokens: Annotated[np.ndarray, Column(TURN, np.int64)]  # response tokens of each turn
    # whether the token belongs to the response; None: each sequence has a single branch
    in_response: Annotated[np.ndarray | None, Column(TOKEN, np.bool_)] = None
    # whether the policy wrote the token; None: it wrote all tokens
    sampled: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.bool_)] = None
    # whether to learn from the token; None: learn from all tokens that the policy wrote
    mask: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.bool_)] = None
    # weights version that generated the token; None: the version of the step
    versions: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.int32)] = None
    # [tokens, layers, k] uint8 or int16: the experts of each token; None: not reported. Zeros mean
    # that the engine reported no experts for this token. The last token of a branch never goes
    # through the model, so its row means nothing.
    routes: Annotated[np.ndarray | None, Column(TOKEN)] = None
    # numbers of the layers in `routes`, from 1; None: all layers of the model
    layers: Annotated[np.ndarray | None, Column(SHARED, np.int64)] = None
    # [num_sequences, parts]: unweighted parts of the rewards, and their names; None: all calls
    # failed
    parts: Annotated[np.ndarray | None, Column(SEQUENCE, np.float64)] = None
    part_names: Annotated[tuple[str, ...] | None, Column(SHARED)] = None
    # [num_sequences, figures], in the order of `Reward.figures`; NaN: the response has no such
    # figure; None: the reward has no figures
    figures: Annotated[np.ndarray | None, Column(SEQUENCE, np.float64, is_added=True)] = None
    # distillation: log-probs of a teacher behind a URL, and wall seconds [1] of its requests;
    # None: there is no such teacher
    teacher_logprobs: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.float32)] = None
    teacher_seconds: Annotated[np.ndarray | None, Column(SUM, np.float64)] = None
    # [response tokens, k] each: the teacher's most probable tokens, filled up with -1, and their
    # log-probs; None: the form of distillation does not use them
    teacher_tokens: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.int32)] = None
    teacher_top_logprobs: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.float32)] = None
    # with several teachers, the number of the response's teacher, or -1 if it has no teacher; None:
    # there is at most one teacher
    teachers: Annotated[np.ndarray | None, Column(SEQUENCE, np.int32)] = None
    # Answers of a reward model behind a URL, see ModelScores; None: there is no such model. NaN:
    # the call failed for good.
    model_scores: Annotated[np.ndarray | None, Column(SEQUENCE, np.float64)] = None
    model_tokens: Annotated[np.ndarray | None, Column(SEQUENCE, np.int64)] = None
    model_cut: Annotated[np.ndarray | None, Column(SEQUENCE, np.bool_)] = None
    model_seconds: Annotated[np.ndarray | None, Column(SUM, np.float64)] = None  # [1]
    # the explanation that the reward function gave with a reward
    reasons: Annotated[Sequence[str] | None, Column(SEQUENCE, is_added=True)] = None
    # the turns of an episode, see environments/records.py
    records: Annotated[Sequence[dict[str, Any]] | None, Column(SEQUENCE, is_added=True)] = None
    # the fields of FailedCalls: [3]
    failed_calls: Annotated[np.ndarray | None, Column(SUM, np.int64)] = None
    # wall seconds of scoring: [1]
    reward_seconds: Annotated[np.ndarray | None, Column(SUM, np.float64)] = None

    @property
    def number(self) -> int:
        """The number of the prompt in the step. The group must have exactly one prompt."""
        [number] = {*self.group_index.tolist()}
        return number

    @property
    def failed(self) -> FailedCalls:
        return (
            FailedCalls() if self.failed_calls is None else FailedCalls(*self.failed_calls.tolist())
        )

    @property
    def seconds(self) -> float:
        """Wall seconds of scoring."""
        return 0.0 if self.reward_seconds is None else float(self.reward_seconds.sum())

    @property
    def learnt(self) -> np.ndarray | None:
        """[response tokens] bool: the tokens to learn from; None: all tokens."""
        return self.sampled if self.mask is None else self.mask

    def part_of(self, row: int) -> dict[str, float]:
        """Return the parts of a response's reward by name; NaN if the call failed."""
        names = self.part_names or ()
        return {} if self.parts is None else dict(zip(names, self.parts[row].tolist()))

    def without_texts(self) -> RolloutGroup:
        """Return the group without reasons and records, which are long and not needed in a step."""
        return dataclasses.replace(self, reasons=None, records=None)

    # Several groups

    def select(self, rows: np.ndarray) -> RolloutGroup:
        """Return the responses that `rows` [num_sequences] bool marks."""
        if rows.all():
            return self
        marks = {
            SEQUENCE: rows,
            TOKEN: rows.repeat(self.prompt_lengths + self.response_lengths),
            RESPONSE_TOKEN: rows.repeat(self.response_lengths),
            TURN: rows.repeat(self.turns),
        }
        chosen: dict[str, Any] = {}
        for name, kind, values in self._columns():
            if values is not None and kind.rows in marks:
                marked = marks[kind.rows]
                if isinstance(values, np.ndarray):
                    chosen[name] = values[marked]
                else:
                    chosen[name] = [values[row] for row in marked.nonzero()[0].tolist()]
        return dataclasses.replace(self, **chosen)

    def of_prompts(self, numbers: Sequence[int]) -> RolloutGroup:
        """Return the responses to the prompts with these numbers in the step."""
        return self.select(np.isin(self.group_index, np.array(numbers, np.int64)))

    @classmethod
    def join(cls, groups: Sequence[RolloutGroup]) -> RolloutGroup:
        """Concatenate groups into new arrays.

        Raises DataError if only some groups have a column. A column with `is_added` is left out in
        this case, without an error.
        """
        names = max((group.part_names or () for group in groups), key=len)
        joined: dict[str, Any] = {}
        for name, kind in COLUMNS.items():
            values: list[Any] = [getattr(group, name) for group in groups]
            if name == "parts":
                values = [group.parts_of(names) for group in groups]
            lacks = [group.group_index for group, value in zip(groups, values) if value is None]
            if kind.rows == SHARED:
                known = next((value for value in values if value is not None), None)
                joined[name] = names or known if name == "part_names" else known
            elif lacks:
                if len(lacks) < len(groups) and not kind.is_added:
                    numbers = sorted({int(n) for group_index in lacks for n in group_index})
                    raise DataError(f"group {numbers[0] if numbers else 0} lacks {name}")
            elif isinstance(values[0], np.ndarray):
                joined[name] = np.sum(values, 0) if kind.rows == SUM else np.concatenate(values)
            else:
                joined[name] = [each for value in values for each in value]
        return cls(**joined)

    def nothing(self) -> RolloutGroup:
        """Return a group without responses that has the columns of this one."""
        empty = self.select(np.zeros(len(self.sample_index), bool))
        sums = {
            name: 0 * value
            for name, kind, value in self._columns()
            if kind.rows == SUM and value is not None
        }
        return dataclasses.replace(empty, **sums)

    def of_layers(self, numbers: Sequence[int]) -> RolloutGroup:
        """Return the group with the routes of only these layers, numbered from 1.

        Raises KeyError for a layer that was not recorded.
        """
        if self.routes is None:
            return self
        known = range(1, self.routes.shape[1] + 1) if self.layers is None else self.layers.tolist()
        place = {number: index for index, number in enumerate(known)}
        chosen = self.routes[:, [place[number] for number in numbers]]
        return dataclasses.replace(self, routes=chosen, layers=np.array(numbers, np.int64))

    def parts_of(self, names: Sequence[str]) -> np.ndarray | None:
        """Return `parts` with a column for each name. If all calls of the group failed, the group
        has no parts, and the columns are NaN."""
        if self.parts is None or self.parts.shape[1] == len(names):
            return self.parts
        return np.full((len(self.sample_index), len(names)), np.nan)

    # Bytes

    def save(self, *, routes_only: bool = False) -> bytes:
        """Return the columns as a safetensors file."""
        arrays = {n: v for n, _, v in self._columns() if isinstance(v, np.ndarray)}
        if routes_only:
            arrays = {name: arrays[name] for name in ("routes", "layers") if name in arrays}
        else:
            arrays |= self._encoded()
            if self.parts is not None:
                arrays["parts"] = self.parts.T
        return save({name: np.ascontiguousarray(values) for name, values in arrays.items()})

    def _encoded(self) -> dict[str, np.ndarray]:
        """Encode the columns that are not arrays."""
        encoded = {}
        if self.part_names is not None:
            encoded["part_names"] = _bytes(json.dumps(self.part_names))
        if self.reasons is not None:
            encoded["reasons"] = _bytes("".join(f"{json.dumps(each)}\n" for each in self.reasons))
        if self.records is not None:
            texts = [_bytes(json.dumps(jsonable(each))) for each in self.records]
            encoded["records"] = np.concatenate([np.empty(0, np.uint8), *texts])
            encoded["record_lengths"] = np.array([len(text) for text in texts], np.int64)
        return encoded

    @classmethod
    def load(cls, content: bytes) -> RolloutGroup:
        """Read what `save` returned. Raises DataError, which names missing or wrong columns."""
        try:
            return cls.of_columns(load(content))
        except (SafetensorError, *WRONG_VALUES) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"holds no columns: {error}") from error

    @classmethod
    def of_columns(cls, columns: Mapping[str, np.ndarray]) -> RolloutGroup:
        """Make a group from the arrays of a safetensors file.

        Raises DataError if the arrays do not fit the declaration.
        """
        values: dict[str, Any] = {name: columns[name] for name in COLUMNS if name in columns}
        if "parts" in values:
            values["parts"] = values["parts"].T
        if "part_names" in values:
            values["part_names"] = tuple(json.loads(bytes(values["part_names"])))
        if "reasons" in values:
            values["reasons"] = [*map(json.loads, bytes(values["reasons"]).decode().splitlines())]
        if "records" in values:
            ends = np.cumsum(columns["record_lengths"])[:-1]
            texts = np.split(values["records"], ends)
            values["records"] = [json.loads(text.tobytes()) for text in texts if len(text)]
        if lacks := [name for name in _NEEDED if name not in values]:
            raise DataError(f"lacks {', '.join(sorted(lacks))}")
        return cls(**values).checked()

    def checked(self) -> RolloutGroup:
        """Convert the columns to the declared types, and return the group itself.

        Raises DataError if a column has a type that cannot be converted, or a wrong size.
        """
        responses = int(self.response_lengths.sum())
        sizes = {
            SEQUENCE: len(self.sample_index),
            TOKEN: int(self.prompt_lengths.sum()) + responses,
            RESPONSE_TOKEN: responses,
            TURN: int(self.turns.sum()),
        }
        wrong = []
        for name, kind, values in self._columns():
            if isinstance(values, np.ndarray) and kind.dtype is not None:
                if not np.can_cast(values.dtype, kind.dtype, "same_kind"):
                    wrong.append(f"{name} is of type {values.dtype}")
                    continue
                setattr(self, name, values.astype(kind.dtype, copy=False))
            if values is not None and len(values) != sizes.get(kind.rows, len(values)):
                wrong.append(f"{name} has {len(values)} rows for {sizes[kind.rows]} {kind.rows}s")
        if wrong:
            raise DataError("; ".join(wrong))
        return self

    # The device

    def to_batch(self, device: torch.device) -> RolloutBatch:
        """Return the tensors of the responses that a step needs."""
        names = [each.name for each in fields(RolloutBatch)]
        arrays = {name: getattr(self, name) for name in names}
        arrays |= {"tokens": self.tokens.astype(np.int64), "mask": self.learnt}
        tensors: dict[str, Any] = {
            name: None if values is None else to_tensor(values, device)
            for name, values in arrays.items()
        }
        return RolloutBatch(**tensors)

    def _columns(self) -> Iterator[tuple[str, Column, Any]]:
        return ((name, kind, getattr(self, name)) for name, kind in COLUMNS.items())


COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(RolloutGroup, include_extras=True).items()
}
_NEEDED = [each.name for each in fields(RolloutGroup) if each.default is dataclasses.MISSING]


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def to_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy a column to a device."""
    import torch  # only here, because the rollout service runs without torch

    own = values if values.flags.writeable else values.copy()
    return torch.from_numpy(own).to(device)
