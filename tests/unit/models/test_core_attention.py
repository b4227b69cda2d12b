"""The attention of the backend torch_native, compared with a float64 softmax of one query at a
time."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from gspo_megatron.batching.packing import zigzag_shard
from gspo_megatron.models import core_attention
from gspo_megatron.models.core_attention import (
    TiledAttention,
    TorchCoreAttention,
    cut_into_tiles,
    plan_attention,
    zigzag_order,
)
from gspo_megatron.platform.cpu import faster
from tests.unit.models.test_logprob_head import LargestTensor

DIM = 8
TOLERANCES = {
    torch.float64: 1e-12,  # rounding of sums over a few dozen terms of size 1
    torch.float32: 2e-5,  # the same sums with 2^-24 in place of 2^-53, and gradients of size 10
}


def cp_group(size: int = 1, rank: int = 0) -> SimpleNamespace:
    """A stand-in for a context-parallel process group."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def attention(
    group: SimpleNamespace | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> TorchCoreAttention:
    config = SimpleNamespace(
        attention_dropout=0.0,
        kv_channels=DIM,
        num_attention_heads=0 if sinks is None else len(sinks),
        params_dtype=torch.float64,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=2,
        softmax_type="vanilla" if sinks is None else "learnable",
    )
    groups = SimpleNamespace(cp=group or cp_group(), tp=cp_group())
    built = TorchCoreAttention(config, 1, None, "self", softmax_scale=scale, pg_collection=groups)
    if sinks is not None:
        built.softmax_offset = torch.nn.Parameter(sinks)
    return built


def packed_params(boundaries: list[int]) -> PackedSeqParams:
    ends = torch.tensor(boundaries, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)


def random_states(seed: int, tokens: int, heads: int, groups: int) -> tuple[Tensor, ...]:
    """Query [tokens, heads, dim], key and value [tokens, groups, dim], in float64."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(tokens, n, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (heads, groups, groups)
    )


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: list[int],
    scale: float = DIM**-0.5,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The output [tokens, heads * dim], computed for one sequence, query and head at a time."""
    heads, per_group = query.shape[1], query.shape[1] // key.shape[1]
    rows = []
    for start, end in zip(boundaries, boundaries[1:]):
        for token in range(start, end):
            first = start if window is None else max(start, token + 1 - window)
            seen = slice(first, token + 1)
            outputs = []
            for head in range(heads):
                group = head // per_group
                scores = scale * (key[seen, group] @ query[token, head])
                most = scores.detach().max()
                weights = torch.exp(scores - most)
                total = weights.sum()
                if sinks is not None:  # a sink takes its share and adds no value
                    total = total + torch.exp(sinks[head] - most)
                outputs.append((weights / total) @ value[seen, group])
            rows.append(torch.cat(outputs))
    return torch.stack(rows)


def random_boundaries(seed: int, unit: int = 1) -> list[int]:
    source = random.Random(seed)
    boundaries = [0]
    for _ in range(source.randint(1, 9)):
        length = source.choice([1, source.randint(1, 5), source.randint(1, 24)])
        boundaries.append(boundaries[-1] + unit * length)
    return boundaries


def assert_same_with_gradients(
    output: Tensor, expected: Tensor, states: tuple[Tensor, ...], tolerance: float
) -> None:
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad((output.double() * weights).sum(), states)
    wanted = torch.autograd.grad((expected * weights).sum(), states)
    for gradient, by_hand in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient, by_hand, atol=tolerance, rtol=tolerance)


RAGGED = [random_boundaries(seed) for seed in range(3)]
OF_ONE_LENGTH = [list(range(0, end + 1, step)) for end, step in ((1, 1), (23, 23), (5, 1), (28, 7))]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("boundaries", [*RAGGED, *OF_ONE_LENGTH], ids=str)
def test_packed_attention_with_gradients(
    boundaries: list[int],
    heads: int,
    groups: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if boundaries in OF_ONE_LENGTH:  # the test fails if rows are copied
        monkeypatch.setattr(core_attention, "take_rows", None)
    states = random_states(boundaries[-1], boundaries[-1], heads, groups)
    output = attention()(
        *(s.to(dtype) for s in states), packed_seq_params=packed_params(boundaries)
    )
    assert output.dtype == dtype
    expected = reference(*states, boundaries)
    assert_same_with_gradients(output, expected, states, TOLERANCES[dtype])


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("length", [24, core_attention.SHORT, core_attention.SHORT + 3])
def test_bf16_with_gradients(length: int, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster, "IS_ON", is_on)
    boundaries, layer = [0, length], attention()
    states = random_states(7, length, 2, 1)
    narrow = tuple(s.detach().bfloat16().requires_grad_() for s in states)
    output = layer(*narrow, packed_seq_params=packed_params(boundaries))
    assert output.dtype == torch.bfloat16
    if is_on and length <= core_attention.SHORT:
        wide = layer(*(s.float() for s in narrow), packed_seq_params=packed_params(boundaries))
        assert torch.equal(output, wide.bfloat16())
    exact = tuple(s.detach().double().requires_grad_() for s in narrow)
    expected = reference(*exact, boundaries)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = torch.autograd.grad(output, narrow, upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for value, by_hand in zip((output, *got), (expected, *wanted), strict=True):
        # a few roundings to 8 bits, relative to the largest entry
        difference = (value.double() - by_hand).abs().max() / by_hand.abs().max()
        assert float(difference) <= 2e-2


@pytest.mark.parametrize("mask_elements", [40, core_attention.MASK_ELEMENTS])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("boundaries", [[0, 9, 18], [0, 3, 20, 21, 34]], ids=str)
def test_windows_and_sinks_with_gradients(
    boundaries: list[int],
    has_sinks: bool,
    window: int | None,
    mask_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_attention, "MASK_ELEMENTS", mask_elements)
    states = random_states(4, boundaries[-1], 4, 2)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64) if has_sinks else None
    layer = attention(window=window, sinks=sinks)
    learned = () if layer.softmax_offset is None else (layer.softmax_offset,)
    output = layer(*states, packed_seq_params=packed_params(boundaries))
    expected = reference(*states, boundaries, DIM**-0.5, window, *learned)
    assert_same_with_gradients(output, expected, (*states, *learned), 1e-12)


@pytest.mark.parametrize("of_each_query", [True, False])
def test_heads_that_share_a_key_may_be_further_queries(of_each_query: bool) -> None:
    """GPUs compute it in this way if there is a mask."""
    torch.manual_seed(3)
    query = torch.randn(2, 6, 5, 8, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(2, 3, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    mask = torch.rand(2, 1, 5 if of_each_query else 1, 7) < 0.6
    mask[..., 0] = True
    results = []
    for function in (core_attention.attend, core_attention.attend_by_key_heads):
        out = function(query, key, value, 0.3, mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_every_layer_has_the_window_that_its_number_says() -> None:
    config = SimpleNamespace(window_size=(4, 0), window_attn_skip_freq=2)
    assert [core_attention.window_of(config, number) for number in (1, 2, 3, 4)] == [5, None] * 2
    config.window_attn_skip_freq = [0, 1, 1]
    assert [core_attention.window_of(config, number) for number in (1, 2, 3)] == [None, 5, 5]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
def test_padded_attention_with_gradients(heads: int, groups: int, dtype: torch.dtype) -> None:
    length, batch = 7, 3
    states = random_states(5, batch * length, heads, groups)
    # Unpacked batches of Megatron-Core have the layout [length, batch, ...].
    turned = tuple(s.to(dtype).unflatten(0, (batch, length)).transpose(0, 1) for s in states)
    output = attention()(*turned)
    assert output.shape == (length, batch, heads * DIM)
    expected = reference(*states, [n * length for n in range(batch + 1)])
    output = output.transpose(0, 1).flatten(0, 1)
    assert_same_with_gradients(output, expected, states, TOLERANCES[dtype])


def test_under_context_parallelism_tokens_are_no_whole_block() -> None:
    plan = plan_attention(packed_params([0, 8, 16]), cp_group(2, 1), torch.device("cpu"))
    assert plan.whole is None and len(plan.restore) == 8


def test_empty_sequences_are_skipped_and_the_scale_is_the_one_given() -> None:
    boundaries = [0, 3, 3, 8, 8]
    states = random_states(8, 8, 2, 1)
    output = attention(scale=0.9)(*states, packed_seq_params=packed_params(boundaries))
    torch.testing.assert_close(output, reference(*states, boundaries, scale=0.9))


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_context_parallel_shards_join_to_the_whole(
    cp: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This test simulates the gather. Tests with several processes run the real gather.
    boundaries = random_boundaries(9, unit=2 * cp) if packed else [0, 6 * cp]
    states = tuple(s.detach() for s in random_states(9, boundaries[-1], 4, 2))
    shards = [zigzag_shard(boundaries, cp, rank) for rank in range(cp)]
    expected = reference(*states, boundaries)

    def gather(_: TorchCoreAttention, local: Tensor) -> Tensor:
        whole = states[1] if torch.equal(local.flatten(), states[1][rows].flatten()) else states[2]
        return torch.cat([whole[shard] for shard in shards]).view(-1, *local.shape[1:])

    monkeypatch.setattr(TorchCoreAttention, "_gather", gather)
    for rank, rows in enumerate(shards):
        module = attention(cp_group(cp, rank))
        local = tuple(s[rows] for s in states)
        if packed:
            output = module(*local, packed_seq_params=packed_params(boundaries))
        else:
            output = module(*(s[:, None] for s in local))[:, 0]
        torch.testing.assert_close(output, expected[rows])


@pytest.mark.parametrize("mask_elements", [1, 60, core_attention.MASK_ELEMENTS])
@pytest.mark.parametrize("rank", [0, 1])
def test_tiles_are_attention_with_a_whole_mask(
    rank: int, mask_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_attention, "MASK_ELEMENTS", mask_elements)
    query, key, value = context_parallel_states(length=24, rank=rank)
    _, of_queries = zigzag_order(12, cp_group(2, rank))
    positions = cut_into_tiles(of_queries[None], len(query), torch.device("cpu"))
    rows = [row for tile, _ in positions.tiles for row in range(12)[tile]]
    assert rows == list(range(12))
    output = TiledAttention.apply(query, key, value, 0.4, positions)
    mask = of_queries[:, None] >= torch.arange(24)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.4, enable_gqa=True
    )
    assert_same_with_gradients(output, expected, (query, key, value), 1e-12)


def test_no_tensor_has_an_element_for_every_query_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_attention, "MASK_ELEMENTS", 2048)
    states = context_parallel_states(length=1024, rank=1)
    _, of_queries = zigzag_order(512, cp_group(2, 1))
    with LargestTensor() as largest:
        positions = cut_into_tiles(of_queries[None], len(states[0]), torch.device("cpu"))
        TiledAttention.apply(*states, 1.0, positions).sum().backward()
    assert largest.elements <= max(s.numel() for s in states) < 512 * 1024 / 8


def test_on_the_meta_device_tiles_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different shapes would make an estimate of a long context take minutes."""
    monkeypatch.setattr(core_attention, "MASK_ELEMENTS", 2048)
    _, of_queries = zigzag_order(512, cp_group(2, 1))
    here, meta = (
        cut_into_tiles(of_queries[None], 1, torch.device(kind)).tiles for kind in ("cpu", "meta")
    )
    assert [tile for tile, _ in here] == [tile for tile, _ in meta]
    shapes = {(tile.stop - tile.start, keys.stop - keys.start) for tile, keys in meta}
    assert len(meta) > 100 and len(shapes) <= 4


def context_parallel_states(length: int, rank: int) -> tuple[Tensor, ...]:
    """Tensors [batch, heads, tokens, dim]: the queries of one of two ranks, and the keys and values
    of both."""
    generator = torch.Generator().manual_seed(rank)
    sizes = ((2, 4, length // 2, DIM), (2, 2, length, DIM), (2, 2, length, DIM))
    kind = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    return tuple(torch.randn(size, **kind) for size in sizes)


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_holds_every_token_once_in_few_well_filled_blocks(seed: int) -> None:
    source = random.Random(seed)
    lengths = [source.randint(1, 60) for _ in range(source.randint(1, 30))]
    boundaries = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    tokens = boundaries[-1]
    plan = plan_attention(packed_params(boundaries), cp_group(), torch.device("cpu"))

    joined = torch.cat([block.query_rows.flatten() for block in plan.blocks])
    assert joined[plan.restore].tolist() == list(range(tokens))
    counts = joined.bincount()
    # padding rows point to the last token, so only its number may occur more than once
    assert len(counts) == tokens and set(counts[:-1].tolist()) <= {1}
    for block in plan.blocks:
        assert torch.equal(block.query_rows, block.key_rows) and block.positions is None
        held = [lengths[boundaries.index(first)] for first in block.query_rows[:, 0].tolist()]
        assert 2 * min(held) >= block.query_rows.shape[1] == max(held)
    # The longest sequence of a block is at most half as long as the longest sequence of the block
    # before. So there are few blocks.
    assert len(plan.blocks) <= math.log2(max(lengths)) + 1


def test_the_plan_is_made_once_a_micro_batch() -> None:
    packed = packed_params([0, 3, 7])
    states = random_states(1, 7, 2, 2)
    attention()(*states, packed_seq_params=packed)
    plan = packed.attention_plan
    attention()(*states, packed_seq_params=packed)
    assert packed.attention_plan is plan


def test_padded_boundaries_are_the_ones_that_count() -> None:
    packed = packed_params([0, 3, 7])
    packed.cu_seqlens_q_padded = torch.tensor([0, 5, 9], dtype=torch.int32)
    plan = plan_attention(packed, cp_group(), torch.device("cpu"))
    assert len(plan.restore) == 9
    packed.cu_seqlens_q_padded = torch.tensor([0, 4, 8], dtype=torch.int32)
    assert plan_attention(packed, cp_group(), torch.device("cpu")).whole == (2, 4)
