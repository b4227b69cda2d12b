"""Responses with all that is known of them, from the engine that generated them to the step.

`RolloutGroup` declares each column once: its type, and what it has a row for. Memory, the store on
the disk, the way from rank to rank and the batch of a step all use this declaration.
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

# What a column has a row for.
SEQUENCE = "sequence"  # each response
TOKEN = "token"  # each token of prompts and responses, sequence after sequence
RESPONSE_TOKEN = "response token"  # each token of the responses
TURN = "turn"  # each turn that was rewarded, response after response
SUM = "sum"  # all responses together; joined groups add it up
SHARED = "shared"  # the same in all groups that are joined


class Column(NamedTuple):
    """How a field of RolloutGroup is kept. One with a default may be missing: None."""

    rows: str
    dtype: Any = None  # None: as it is
    is_added: bool = False  # groups in the stores of earlier versions do not have it


@dataclass
class Scores:
    """The rewards of this rank's responses on the device: columns of RolloutGroup."""

    rewards: Tensor  # [num_sequences] float64
    shaped: Tensor  # [num_sequences] float64
    turns: Tensor  # [num_sequences] int64
    turn_rewards: Tensor  # [turns] float64
    turn_tokens: Tensor  # [turns] int64


@dataclass
class RolloutGroup:
    """The responses to one prompt, or to several, flat; sequence i is prompt then response. That of
    an episode whose history was rewritten has several branches: each a prompt, then a part of the
    response."""

    tokens: Annotated[np.ndarray, Column(TOKEN, np.int32)]
    # in tokens, of all branches together
    prompt_lengths: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    response_lengths: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    # log-probs of the sampled tokens as the engine computed them, at the rollout temperature
    rollout_logprobs: Annotated[np.ndarray, Column(RESPONSE_TOKEN, np.float32)]
    # whether a limit of tokens cut the response off
    truncated: Annotated[np.ndarray, Column(SEQUENCE, np.bool_)]
    # unique in the step, over all ranks
    sample_index: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    # the prompt's number in the step
    group_index: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    # As the reward gives it: the sum of turns or of weighted parts. NaN: its call failed.
    rewards: Annotated[np.ndarray, Column(SEQUENCE, np.float64)]
    # what is trained on; NaN in the whole group of a failed call
    shaped: Annotated[np.ndarray, Column(SEQUENCE, np.float64)]
    # rewarded turns; 0: only the response as a whole was rewarded
    turns: Annotated[np.ndarray, Column(SEQUENCE, np.int64)]
    turn_rewards: Annotated[np.ndarray, Column(TURN, np.float64)]  # shaped
    turn_tokens: Annotated[np.ndarray, Column(TURN, np.int64)]  # response tokens of each
    # None: each sequence has a single branch
    in_response: Annotated[np.ndarray | None, Column(TOKEN, np.bool_)] = None
    # what the policy wrote; None: all
    sampled: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.bool_)] = None
    # what to learn from; None: all that the policy wrote
    mask: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.bool_)] = None
    # version of the weights that generated the token; None: those of the step
    versions: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.int32)] = None
    # [tokens, layers, k] uint8 or int16: the experts of each token, where the engine reports them.
    # Zeros: it did not say. A branch's last token was never fed to the model: its row is void.
    routes: Annotated[np.ndarray | None, Column(TOKEN)] = None
    # numbers of the layers in `routes`, from 1; None: all layers of the model
    layers: Annotated[np.ndarray | None, Column(SHARED, np.int64)] = None
    # [num_sequences, parts] of the rewards before weights, and their names; None: all calls failed
    parts: Annotated[np.ndarray | None, Column(SEQUENCE, np.float64)] = None
    part_names: Annotated[tuple[str, ...] | None, Column(SHARED)] = None
    # of a distillation's teacher behind a URL, and wall seconds [1] of asking it; None: no teacher
    teacher_logprobs: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.float32)] = None
    teacher_seconds: Annotated[np.ndarray | None, Column(SUM, np.float64)] = None
    # [response tokens, k] each: its most probable tokens, filled up with -1, and their log-probs;
    # None: the form of distillation reads none
    teacher_tokens: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.int32)] = None
    teacher_top_logprobs: Annotated[np.ndarray | None, Column(RESPONSE_TOKEN, np.float32)] = None
    # the number of the teacher among several, -1: none; None: there are not several
    teachers: Annotated[np.ndarray | None, Column(SEQUENCE, np.int32)] = None
    # why a reward is not more
    reasons: Annotated[Sequence[str] | None, Column(SEQUENCE, is_added=True)] = None
    # the turns of episodes: see environments.records
    records: Annotated[Sequence[dict[str, Any]] | None, Column(SEQUENCE, is_added=True)] = None
    failed_calls: Annotated[np.ndarray | None, Column(SUM, np.int64)] = None  # [3] as FailedCalls
    reward_seconds: Annotated[np.ndarray | None, Column(SUM, np.float64)] = None  # [1] of scoring

    @property
    def number(self) -> int:
        """The number in the step of the one prompt that these respond to."""
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
        """[response tokens] bool: the tokens to learn from; None: all."""
        return self.sampled if self.mask is None else self.mask

    def part_of(self, row: int) -> dict[str, float]:
        """The parts of a response's reward by their names; NaN where its call failed."""
        names = self.part_names or ()
        return {} if self.parts is None else dict(zip(names, self.parts[row].tolist()))

    def without_texts(self) -> RolloutGroup:
        """Without reasons and records: a step needs none, and they are long."""
        return dataclasses.replace(self, reasons=None, records=None)

    # Several groups

    def select(self, rows: np.ndarray) -> RolloutGroup:
        """The responses that `rows` [num_sequences] bool marks."""
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
        """The responses to these of the step's prompts."""
        return self.select(np.isin(self.group_index, np.array(numbers, np.int64)))

    @classmethod
    def join(cls, groups: Sequence[RolloutGroup]) -> RolloutGroup:
        """Groups end to end, as arrays of their own. Raises DataError where a column is in some of
        them only; one that earlier versions do not have is left out then."""
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
        """A group without responses that has the columns of this one."""
        empty = self.select(np.zeros(len(self.sample_index), bool))
        sums = {
            name: 0 * value
            for name, kind, value in self._columns()
            if kind.rows == SUM and value is not None
        }
        return dataclasses.replace(empty, **sums)

    def of_layers(self, numbers: Sequence[int]) -> RolloutGroup:
        """With the routes of these layers only, numbered from 1. Raises KeyError for a layer that
        nobody recorded."""
        if self.routes is None:
            return self
        known = range(1, self.routes.shape[1] + 1) if self.layers is None else self.layers.tolist()
        place = {number: index for index, number in enumerate(known)}
        chosen = self.routes[:, [place[number] for number in numbers]]
        return dataclasses.replace(self, routes=chosen, layers=np.array(numbers, np.int64))

    def parts_of(self, names: Sequence[str]) -> np.ndarray | None:
        """`parts` by these names; NaN where all calls failed before the names were known."""
        if self.parts is None or self.parts.shape[1] == len(names):
            return self.parts
        return np.full((len(self.sample_index), len(names)), np.nan)

    # Bytes

    def save(self, *, routes_only: bool = False) -> bytes:
        """The columns as a safetensors file."""
        arrays = {n: v for n, _, v in self._columns() if isinstance(v, np.ndarray)}
        if routes_only:
            arrays = {name: arrays[name] for name in ("routes", "layers") if name in arrays}
        else:
            arrays |= self._encoded()
            if self.parts is not None:
                arrays["parts"] = self.parts.T
        return save({name: np.ascontiguousarray(values) for name, values in arrays.items()})

    def _encoded(self) -> dict[str, np.ndarray]:
        """What is no array."""
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
        """The inverse of `save`. Raises DataError that says which columns are missing or wrong."""
        try:
            return cls.of_columns(load(content))
        except (SafetensorError, *WRONG_VALUES) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"holds no columns: {error}") from error

    @classmethod
    def of_columns(cls, columns: Mapping[str, np.ndarray]) -> RolloutGroup:
        """A group of the arrays of a safetensors file. Raises DataError for what does not fit the
        declaration."""
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
        """With the declared types. Raises DataError for columns of other types or sizes."""
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
        """What a step needs of the responses."""
        names = [each.name for each in fields(RolloutBatch)]
        arrays = {name: getattr(self, name) for name in names}
        arrays |= {"tokens": self.tokens.astype(np.int64), "mask": self.learnt}
        tensors: dict[str, Any] = {
            name: None if values is None else to_tensor(values, device)
            for name, values in arrays.items()
        }
        return RolloutBatch(**tensors)

    def to_scores(self, device: torch.device) -> Scores:
        """What a step needs of the rewards."""
        names = [each.name for each in fields(Scores)]
        return Scores(**{name: to_tensor(getattr(self, name), device) for name in names})

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
    """A column on a device."""
    import torch  # on the ranks; the rollout service works without it

    own = values if values.flags.writeable else values.copy()
    return torch.from_numpy(own).to(device)
