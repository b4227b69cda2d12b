"""The log-probs of some candidate tokens, and of all other tokens together. They are computed in
tiles and shards, and compared with a dense softmax in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from gspo_megatron.models import logprob_head
from gspo_megatron.models.top_k_head import NO_TOKEN, bucket_logprobs, most_probable, with_rest

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64, with additions in another order


def make_case(rows: int, width: int, vocab: int, k: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Hidden states, weight, candidates, and the gradient of each bucket."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    order = torch.rand(rows, vocab, generator=generator).argsort(1)
    return normal(rows, width), normal(vocab, width), order[:, :k], normal(rows, k + 1)


def dense(
    hidden: Tensor, weight: Tensor, candidates: Tensor, flow: Tensor, temperature: float = 1.0
) -> list[Tensor]:
    """Log-probs, flags, and the gradients of both inputs, computed by their definitions."""
    hidden, weight = (each.detach().clone().requires_grad_() for each in (hidden, weight))
    logits = hidden @ weight.T / temperature
    p = torch.softmax(logits, dim=-1)
    is_other = torch.ones_like(p).scatter(1, candidates, 0.0)
    buckets = torch.cat([p.gather(1, candidates), (p * is_other).sum(1, keepdim=True)], 1).log()
    (flow * buckets).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    greedy = logits.argmax(1) == candidates[:, 0]
    return [buckets.detach(), greedy, hidden.grad, weight.grad]


def in_tiles(
    hidden: Tensor, weight: Tensor, candidates: Tensor, flow: Tensor, **options: Any
) -> list[Tensor]:
    hidden, weight = (each.detach().clone().requires_grad_() for each in (hidden, weight))
    buckets, greedy = bucket_logprobs(hidden, weight, candidates, **options)
    (flow * buckets).sum().backward()
    assert hidden.grad is not None and weight.grad is not None and not greedy.requires_grad
    return [buckets.detach(), greedy, hidden.grad, weight.grad]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 3, 17, None])
@pytest.mark.parametrize("k", [1, 4, 30])
def test_equals_the_dense_softmax(
    k: int, chunk_size: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_head, "TILE_BYTES", 5 * 4 * 8)
    case = make_case(17, 5, 31, k)
    found = in_tiles(*case, chunk_size=chunk_size, temperature=temperature)
    assert_same(found, dense(*case, temperature))


def test_the_whole_vocabulary_leaves_no_rest() -> None:
    """If the candidates are the whole vocabulary, the log-prob of the rest is its lower bound. This
    bound is a constant, so the gradient of the rest changes nothing."""
    case = make_case(6, 5, 9, 9)
    buckets, _, *gradients = in_tiles(*case)
    p = torch.softmax(case[0] @ case[1].T, 1).log().gather(1, case[2])
    torch.testing.assert_close(buckets[:, :-1], p, **EXACT)
    assert buckets[:, -1].tolist() == pytest.approx([-24 * math.log(2)] * 6)
    case[3][:, -1] = 0.0
    for a, b in zip(gradients, in_tiles(*case)[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.isfinite().all()


def test_candidates_outside_the_vocabulary_have_no_probability() -> None:
    hidden, weight, candidates, flow = make_case(7, 5, 12, 3)
    more = torch.cat([candidates, torch.full((7, 1), NO_TOKEN), torch.full((7, 1), 13)], 1)
    flows = torch.cat([flow[:, :3], torch.randn(7, 2, dtype=torch.float64), flow[:, 3:]], 1)
    flows[:, 3:5] = 0.0
    padded = torch.cat([weight, torch.full((4, 5), 50.0, dtype=torch.float64)])
    buckets, greedy = bucket_logprobs(hidden, padded, more, vocab_size=12)
    expected, is_greedy, *_ = dense(hidden, weight, candidates, flow)
    assert (buckets[:, 3:5] == -torch.inf).all() and torch.equal(greedy, is_greedy)
    torch.testing.assert_close(buckets[:, [0, 1, 2, 5]], expected, **EXACT)
    inputs = [each.clone().requires_grad_() for each in (hidden, padded)]
    found, _ = bucket_logprobs(*inputs, more, vocab_size=12)
    found[:, [0, 1, 2, 5]].mul(flow).sum().backward()
    reference = dense(hidden, weight, candidates, flow)
    assert inputs[0].grad is not None and inputs[1].grad is not None
    torch.testing.assert_close(inputs[0].grad, reference[2], **EXACT)
    torch.testing.assert_close(inputs[1].grad[:12], reference[3], **EXACT)
    assert not inputs[1].grad[12:].any()


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_rest_that_is_tiny_is_still_precise_in_float32(scale: float) -> None:
    """In float32, 1 minus the sum of the candidates' probabilities would have no correct digit."""
    hidden, weight, _, _ = make_case(40, 8, 50, 1, seed=3)
    candidates = most_probable(hidden * scale, weight, 8)
    exact = dense(
        hidden.float().double() * scale, weight.float().double(), candidates, torch.ones(40, 9)
    )
    found, _ = bucket_logprobs(hidden.float() * scale, weight.float(), candidates)
    counts = exact[0][:, -1] > -20 * math.log(2)
    assert counts.sum() > 4 and (scale == 1.0 or exact[0][counts, -1].min() < -9)
    torch.testing.assert_close(
        found[counts, -1].double(), exact[0][counts, -1], rtol=2e-5, atol=2e-5
    )


def test_most_probable_are_those_of_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_head, "TILE_BYTES", 5 * 4 * 8)
    monkeypatch.setattr(logprob_head, "KEEP_EXPONENTIALS_BYTES", 0)
    hidden, weight, _, _ = make_case(13, 5, 31, 1)
    padded = torch.cat([weight, torch.full((4, 5), 50.0, dtype=torch.float64)])
    found = most_probable(hidden, padded, 6, vocab_size=31)
    assert torch.equal(found, (hidden @ weight.T).topk(6)[1])
    few = most_probable(hidden, weight[:3], 5)
    assert torch.equal(few[:, :3], (hidden @ weight[:3].T).topk(3)[1])
    assert (few[:, 3:] == NO_TOKEN).all()
    assert most_probable(hidden[:0], weight, 4).shape == (0, 4)


# Each case: rows, vocabulary, rows of the weight on each rank, k.
SHARDS = [(17, 22, 12, 4), (9, 12, 12, 3), (5, 13, 12, 13), (0, 22, 12, 2)]


def compare_shard(rank: int, world_size: int, rendezvous: str) -> None:
    logprob_head.TILE_BYTES = 5 * 4 * 8  # gives blocks of few columns
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    try:
        for seed, (rows, vocab, part, k) in enumerate(SHARDS):
            hidden, weight, candidates, flow = make_case(rows, 6, vocab, k, seed)
            padded = torch.full((part * world_size, 6), 50.0, dtype=torch.float64)
            padded[:vocab] = weight
            start = rank * part
            own = padded[start : start + part]
            options: Any = {
                "process_group": dist.group.WORLD,
                "vocab_start": start,
                "vocab_size": vocab,
            }
            best = most_probable(hidden, own, k, **options)
            found = in_tiles(hidden, own, candidates, flow, chunk_size=4, **options)
            dist.all_reduce(found[2])
            expected = dense(hidden, weight, candidates, flow)
            if k == vocab:  # `dense` would take the logarithm of 0, because no rest is left
                continue
            mine = max(min(vocab - start, part), 0)
            expected[3] = expected[3][start : start + mine]
            assert not found[3][mine:].any()
            found[3] = found[3][:mine]
            assert_same(found, expected)
            assert torch.equal(best, (hidden @ weight.T).topk(k)[1])
    finally:
        dist.destroy_process_group()


def test_shards_of_the_vocabulary_equal_the_dense_softmax(tmp_path: Path) -> None:
    mp.spawn(compare_shard, (2, str(tmp_path / "rendezvous")), nprocs=2)


def test_a_servers_log_probs_get_the_rest_that_the_head_gives() -> None:
    hidden, weight, _, flow = make_case(9, 5, 14, 4)
    candidates = most_probable(hidden, weight, 4)
    expected = dense(hidden, weight, candidates, flow)[0]
    found = with_rest(expected[:, :-1].float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    # Because of rounding, the probability is larger than 1. There is no second candidate.
    sure = with_rest(torch.tensor([[1e-8, -math.inf]]))
    assert sure[0, 2].item() == pytest.approx(-24 * math.log(2))
