"""Self-attention with a key/value cache for decoding, on either layer backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gspo_megatron.models.core_attention import attend, attend_causally, window_of
from gspo_megatron.platform.cpu import faster

# Cost of a key that is copied first (read, written, read again), relative to a key read in place.
COPY_COST = 2

# torch's softmax on a CPU is vectorised along the keys, and is slow for fewer keys than this
# number. So attention takes at least this many keys and masks the surplus.
FEWEST_KEYS = 16

# Layer number -> keys and values of prefilled prompts, [prompts, heads, length, dim] each. A delta
# net has no keys and values: its entry holds the last inputs of its convolution and its state.
# The size of these two does not depend on the length.
PromptStates = dict[int, tuple[Tensor, Tensor]]


@dataclass
class Spans:
    """The numbers of keys that attention reads for the rows of a decoding batch.

    A batch often has a few long sequences and many short ones. If attention read as many keys for
    every row as for the longest, most of these keys would be masked out. So attention runs twice.
    In the first run all rows read `others` keys. In the second run only the `long_rows` longest
    rows read, with `longest` keys each. For these rows, the result of the second run replaces that
    of the first.
    """

    long_rows: int  # the number of rows with `longest` keys
    longest: int
    others: int  # the number of keys of all other rows

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Spans:
        """Choose the number of long rows for which attention costs least. The keys of long rows
        must be copied first (COPY_COST).

        lengths: the tokens of the sequence in each row, 0 for a row without a sequence.
        """
        ordered = [*sorted((max(length, 1) for length in lengths), reverse=True), 1]
        costs = [
            len(lengths) * others + COPY_COST * long_rows * ordered[0]
            for long_rows, others in enumerate(ordered)
        ]
        long_rows = costs.index(min(costs))
        return cls(long_rows, ordered[0], ordered[long_rows])

    def grow(self, limit: int) -> None:
        """Let each row see one more key, but no more than `limit`."""
        self.longest, self.others = min(self.longest + 1, limit), min(self.others + 1, limit)


class KeyValueCache:
    """Keys and values of a batch of sequences that grow token by token, for one pipeline stage.

    The sequences of a batch differ in length: each has its own position, and a query sees the keys
    up to its position. Prompts are computed apart from the batch (`start_prefill`), padded on the
    right, and then copied to rows of the batch (`place`), where they overwrite earlier sequences.
    Keys of padding and of an earlier sequence lie after the row's position, so no query sees them.
    New tokens overwrite them.

    A layer with a window keeps only `window` keys. The key of position p is in place p % window,
    where it overwrites the key of position p - window, which no later query sees.
    """

    def __init__(
        self, frequencies: Tensor, rows: int, max_length: int, factor: float = 1.0
    ) -> None:
        """frequencies: rotary angles [positions, 1, 1, dim] of Megatron's RotaryEmbedding;
        factor: YaRN multiplies cos and sin of the angles by it;
        rows, max_length: the numbers of sequences and positions to allocate."""
        self._frequencies = frequencies
        self._cos, self._sin = frequencies.cos() * factor, frequencies.sin() * factor
        self._num_rows, self._max_length = rows, max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._recurrent: set[int] = set()  # layers with a delta net; their states do not grow
        self._windows: dict[int, int | None] = {}  # layer number -> its window
        self._prompts: PromptStates | None = None
        self._lengths: Tensor | None = None  # lengths of the prompts, [prompts]
        # [sequences]: the positions of the new tokens
        self._positions = torch.zeros(0, dtype=torch.long)
        # results of `_slots_of`, by its arguments
        self._slots: dict[tuple[int, int], Tensor] = {}
        self._parts: list[RowGroup] = []

    def start_prefill(self, length: int, lengths: Tensor | None = None) -> PromptStates:
        """Let the next forward pass compute the first `length` tokens of prompts, apart from the
        batch. Returns the dict that the pass fills with their keys and values.

        lengths [prompts]: the prompts' own lengths, if they are padded to `length`.
        """
        self._prompts, self._lengths = {}, lengths
        self.cos, self.sin = self._cos[:length], self._sin[:length]
        self.angles = self._frequencies[:length]
        return self._prompts

    def place(self, prompts: PromptStates, chosen: Tensor, rows: Tensor, lengths: Tensor) -> None:
        """Copy the prefilled prompts `chosen` [n], of `lengths` [n] tokens, to `rows` [n]."""
        for layer, states in prompts.items():
            for cached, of_prompts in zip(self._of_layer(layer, *states), states):
                places = cached.shape[2]
                if of_prompts.shape[2] <= places:
                    cached[rows, :, : of_prompts.shape[2]] = of_prompts[chosen]
                    continue
                # for each place of the window, the last position of the prompt that has this place
                last = lengths[:, None] - 1
                positions = last - (last - torch.arange(places, device=last.device)) % places
                positions = positions.clamp(min=0)
                cached[rows] = of_prompts[chosen[:, None], :, positions].transpose(1, 2)

    def _places(self, layer: int, states: Tensor) -> int:
        """Return how many keys the cache holds for a row of a layer; for a delta net, the fixed
        size of its states."""
        if layer in self._recurrent:
            return states.shape[2]
        return min(self._windows[layer] or self._max_length, self._max_length)

    def _of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values of the batch, [rows, heads, positions, dim]. The first call
        allocates them, with the heads and dims of `key` and `value` [any, heads, any, dim]."""
        if layer not in self._layers:
            sizes = [
                (self._num_rows, s.shape[1], self._places(layer, s), s.shape[3])
                for s in (key, value)
            ]
            self._layers[layer] = key.new_zeros(sizes[0]), value.new_zeros(sizes[1])
        return self._layers[layer]

    @property
    def is_prefill(self) -> bool:
        """Whether the next forward pass computes prompts."""
        return self._prompts is not None

    def prompt_lengths(self, prompts: int, longest: int) -> Tensor:
        """[prompts]: the lengths of the prompts in this pass."""
        if self._lengths is None:
            return torch.full((prompts,), longest, device=self._cos.device)
        return self._lengths

    def remember(self, layer: int, states: tuple[Tensor, Tensor]) -> None:
        """Keep the states that a delta net has after the last tokens of the prompts."""
        assert self._prompts is not None
        self._recurrent.add(layer)
        self._prompts[layer] = states

    def recurrent(
        self, layer: int, sizes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        """Return the states of a delta net for the batch, [rows, *size]. The caller changes them in
        place. Rows without a prompt have zeros."""
        if layer not in self._layers:
            self._recurrent.add(layer)
            first, second = (
                torch.zeros((self._num_rows, *size), dtype=dtype, device=self._cos.device)
                for size, dtype in zip(sizes, dtypes, strict=True)
            )
            self._layers[layer] = first, second
        return self._layers[layer]

    def start_token(self, positions: Tensor, spans: Spans, long_rows: Tensor) -> None:
        """Let the next forward pass add one token per sequence, at `positions` [sequences].
        `long_rows` [spans.long_rows] are the rows that see `spans.longest` keys."""
        self._prompts = None
        self._positions = positions
        self._slots = {}
        fewest = min(FEWEST_KEYS, self._max_length) if faster.applies_to(positions) else 1
        self._parts = [RowGroup(None, _mask(positions, max(spans.others, fewest)))]
        if spans.long_rows:
            length = max(spans.longest, fewest)
            self._parts.append(RowGroup(long_rows, _mask(positions[long_rows], length)))
        self.cos = self._cos[positions, 0].unsqueeze(0)  # [1, sequences, 1, dim]
        self.sin = self._sin[positions, 0].unsqueeze(0)
        self.angles = self._frequencies[positions, 0].unsqueeze(0)

    def _slots_of(self, heads: int, places: int) -> Tensor:
        """[sequences * heads]: the index of each new token's states in a layer's flat cache."""
        if (heads, places) not in self._slots:
            rows = torch.arange(self._num_rows * heads, device=self._positions.device)
            slots = rows.view(-1, heads) * places + self._positions[:, None] % places
            self._slots[heads, places] = slots.flatten()
        return self._slots[heads, places]

    def keep(self, rows: Tensor) -> None:
        """Keep only the sequences in `rows`."""
        self._num_rows = len(rows)
        self._layers = {n: (k[rows], v[rows]) for n, (k, v) in self._layers.items()}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of [length, sequences, heads, dim] queries, keys and values; values may have a
        dim of their own. Returns [length, sequences, heads * dim of the values]. window, sinks: see
        `attend_causally`."""
        self._windows[layer] = window
        if self._prompts is not None:
            query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
            self._prompts[layer] = key, value
            out = attend_causally(query, key, value, scale, window, sinks)
            return out.permute(2, 0, 1, 3).flatten(2)
        return self._attend_once(layer, query[0], key[0], value[0], scale, sinks).unsqueeze(0)

    def _attend_once(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one token of each sequence: [sequences, heads, dim] each -> [sequences,
        heads * dim]."""
        keys, values = self._of_layer(layer, key.unsqueeze(2), value.unsqueeze(2))
        heads, places = keys.shape[1:3]
        slots = self._slots_of(heads, places)
        for cached, states in ((keys, key), (values, value)):
            dim = states.shape[-1]
            cached.view(-1, dim).index_copy_(0, slots, states.reshape(-1, dim))
        # Each sequence has one query. The query heads that share a key head are passed as several
        # queries of this one head, so that its keys are not repeated.
        query = query.unflatten(1, (heads, -1))
        if sinks is not None:
            sinks = sinks.view(heads, -1, 1)
        # not for bf16, in which a product would round the scores
        by_products = faster.applies_to(query) and query.dtype.itemsize >= 4
        for part in self._parts:
            # A query sees all keys of a full window. Their order does not matter.
            mask, rows = part.mask[..., :places], part.rows
            seen = (keys[:, :, : mask.shape[-1]], values[:, :, : mask.shape[-1]])
            part_query = query
            if rows is not None:
                seen = tuple(states.index_select(0, rows) for states in seen)
                part_query = query.index_select(0, rows)
            if by_products:
                bias = part.bias(heads, query.dtype)[..., :places]
                part_out = _attend_by_products(part_query, *seen, scale, bias, sinks)
            else:
                part_out = attend(part_query, *seen, scale, mask, sinks)
            if rows is None:
                out = part_out
            else:
                out[rows] = part_out
        return out.flatten(1)


@dataclass
class RowGroup:
    """Rows of the batch that see the same number of keys."""

    rows: Tensor | None  # None: all rows
    mask: Tensor  # [rows, 1, 1, keys] bool: the keys that each row sees
    _biases: dict[int, Tensor] = field(default_factory=dict)

    def bias(self, heads: int, dtype: torch.dtype) -> Tensor:
        """The mask as [rows * heads, 1, keys] to add to scores."""
        if heads not in self._biases:
            bias = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            bias = bias.masked_fill_(~self.mask, -torch.inf).expand(-1, heads, -1, -1)
            self._biases[heads] = bias.flatten(0, 1)
        return self._biases[heads]


def _attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor, sinks: Tensor | None
) -> Tensor:
    """Attention of [rows, heads, queries, dim] by matrix products. The result has the query's axes.
    On a CPU, torch's own attention is slower for one or two queries per head. sinks: see
    `attend`."""
    rows, heads = query.shape[:2]
    query, key, value = (states.flatten(0, 1) for states in (query, key, value))
    scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale)
    if sinks is not None:
        column = sinks.to(scores.dtype).expand(rows, *sinks.shape).flatten(0, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[1]]
    return torch.bmm(weights, value).unflatten(0, (rows, heads))


def _mask(positions: Tensor, length: int) -> Tensor:
    """[sequences, 1, 1, length] bool: the keys that the queries at `positions` [sequences] see."""
    return (torch.arange(length, device=positions.device) <= positions[:, None])[:, None, None]


class CachedSelfAttention(SelfAttention):
    """Megatron-Core's SelfAttention, which decodes while a cache is attached.

    Megatron-Core's own inference contexts need CUDA kernels (dynamic batching) or one common
    position for the whole batch (static batching), and neither runs on a CPU.
    """

    key_value_cache: KeyValueCache | None = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return the rank's queries, keys, values and, if asked for, gates. If there are more
        tensor-parallel ranks than query groups, Megatron-Core takes the rank's part of a group's
        queries, but the gates of the whole group."""
        result = super().get_query_key_value_tensors(*args, **kwargs)
        if not kwargs.get("output_gate"):
            return result
        query, key, value, gate = result
        heads = query.shape[2]
        if gate.shape[2] > heads:
            ranks = self.config.tensor_model_parallel_size // self.config.num_query_groups
            first = parallel_state.get_tensor_model_parallel_rank() % ranks * heads
            gate = gate[:, :, first : first + heads]
        return query, key, value, gate

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        cache = self.key_value_cache
        if cache is None:
            return super().forward(hidden_states, *args, **kwargs)
        gated = {"output_gate": True} if self.config.attention_output_gate else {}
        query, key, value, *gate = self.get_query_key_value_tensors(hidden_states, **gated)
        neighbours = self.config.rotary_interleaved
        rotated = rotate(torch.cat((query, key), dim=2), cache.cos, cache.sin, neighbours)
        query, key = rotated.split((query.shape[2], key.shape[2]), dim=2)
        scale = self.config.softmax_scale or self.hidden_size_per_attention_head**-0.5
        rest = scale, *window_and_sinks(self)
        out = cache.attend(self.layer_number, query, key, value, *rest)
        return self.linear_proj(self._apply_output_gate(out, gate[0]) if gated else out)


def window_and_sinks(attention: SelfAttention) -> tuple[int | None, Tensor | None]:
    """The window and the sinks of a layer's attention, on either layer backend; see
    `attend_causally`."""
    sinks = getattr(attention.core_attention, "softmax_offset", None)
    return window_of(attention.config, attention.layer_number), sinks


def rotary_frequencies(model: torch.nn.Module, length: int) -> Tensor:
    """Return the rotary angles of positions 0 to length - 1, [length, 1, 1, dim]. A rank gets the
    angles of all positions, also under context parallelism."""
    # The model computes the angles. With latent attention, each layer does.
    owners = (module for module in model.modules() if hasattr(module, "rotary_pos_emb"))
    rotary: Any = next(owners).rotary_pos_emb
    # packed_seq=True: the angles of all positions
    frequencies = rotary(length, packed_seq=True)
    return frequencies[0] if isinstance(frequencies, tuple) else frequencies


def rotary_factor(config: TransformerConfig) -> float:
    """Return the factor by which YaRN multiplies cos and sin of the rotary angles; 1 without YaRN.
    Layers of latent attention have a factor of their own."""
    return _yarn_get_concentration_factor_from_config(config)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Rotary position embedding on the first `cos.shape[-1]` channels, with the arithmetic of
    Megatron's `_apply_rotary_pos_emb_bshd`. neighbours (rotary_interleaved): channels 2i and 2i + 1
    are a pair; otherwise channel i of the first half and channel i of the second half are a
    pair."""
    channels = cos.shape[-1]
    turned, rest = states[..., :channels], states[..., channels:]
    if neighbours:
        across = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        low, high = turned.chunk(2, dim=-1)
        across = torch.cat((-high, low), dim=-1)
    turned = turned * cos.to(states.dtype) + across * sin.to(states.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
