"""The check of weights by sums of tensors, although vLLM fuses tensors, divides them among workers,
copies and pads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gspo_megatron.rollout.vllm.weight_check import (
    describe_families,
    suspect_families,
    tolerances,
)


def sums(*values: np.ndarray) -> list[float]:
    flat = np.concatenate([each.ravel() for each in values]).astype(np.float64)
    return [len(flat), float(flat.sum()), float((flat**2).sum())]


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    random, names = np.random.default_rng(7), ("q", "k", "norm", "embed")
    return {name: random.normal(size=(12, 5)).astype(np.float32) for name in names}


def folder(tensors: dict[str, np.ndarray]) -> dict[str, list[float]]:
    return {
        "attention of layer 0": sums(tensors["q"], tensors["k"]),
        "norms of layer 0": sums(tensors["norm"]),
        "embedding": sums(tensors["embed"]),
    }


def workers(tensors: dict[str, np.ndarray]) -> list[dict[str, list[float]]]:
    """The sums of two workers. q and k are halved, fused and reordered, the norm is copied, and the
    embedding has padded rows."""
    padded = np.concatenate([tensors["embed"], np.zeros((4, 5), np.float32)])
    found = []
    for rank in range(2):
        half = slice(6 * rank, 6 * rank + 6)
        found.append(
            {
                "attention of layer 0": sums(tensors["k"][half][::-1], tensors["q"][half]),
                "norms of layer 0": sums(tensors["norm"]),
                "embedding": sums(padded[8 * rank : 8 * rank + 8]),
            }
        )
    return found


def test_another_layout_of_the_same_tensors_is_no_difference(tensors: dict) -> None:
    assert suspect_families(workers(tensors), folder(tensors)) == []


@pytest.mark.parametrize(
    ("name", "family"),
    [("k", "attention of layer 0"), ("norm", "norms of layer 0"), ("embed", "embedding")],
)
@pytest.mark.parametrize("change", [np.nextafter(np.float32(1), np.float32(2)), -1.0])
def test_a_difference_in_one_element_is_found(
    tensors: dict, name: str, family: str, change: float
) -> None:
    """A difference in the last bit changes two sums. A difference in the sign changes one sum."""
    expected = folder(tensors)
    tensors[name][3, 2] *= np.float32(change)
    assert suspect_families(workers(tensors), expected) == [family]


def test_what_cannot_be_compared_is_left_out(tensors: dict) -> None:
    """Here the key heads are repeated on both workers, and the norms are quantized."""
    expected, found = folder(tensors), workers(tensors)
    for worker in found:
        worker["attention of layer 0"] = sums(tensors["q"][:6], tensors["k"])
        del worker["norms of layer 0"]
    assert suspect_families(found, expected) == []


@pytest.mark.parametrize(
    ("families", "known", "told"),
    [
        (["experts of layer 2"], 9, "experts of layer 2"),
        (["experts of layer 2", "embedding", "experts of layer 11"], 9,
         "experts of layers 2, 11; embedding"),
        ([f"norms of layer {n}" for n in range(9)], 30, "norms of layers 0, 1, 2, 3, 4, 5, ..."),
        (["embedding", "norms"], 2, "all of them"),
    ],
)  # fmt: skip
def test_families_in_a_message(families: list[str], known: int, told: str) -> None:
    assert describe_families(families, known) == told


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_the_error_of_log_softmax_on_cpus_is_allowed(vocab_size: int) -> None:
    """vLLM computes log-probs by torch's log_softmax in fp32. Its error on CPUs grows with the
    vocabulary, and is largest if one token has nearly all of the probability."""
    generator = torch.Generator().manual_seed(vocab_size)
    largest = 0.0
    for best in (0.5, 0.9, 0.99):
        for scale in (1.0, 2.0, 3.0):
            logits = scale * torch.randn(8, vocab_size, generator=generator)
            rest = logits[:, 1:].double().logsumexp(-1)
            logits[:, 0] = rest + np.log(best / (1 - best))
            errors = logits.log_softmax(-1) - logits.double().log_softmax(-1)
            largest = max(largest, float(errors[:, 0].abs().mean()))
    assert largest < tolerances("fp32", vocab_size=vocab_size, on_cpu=True)[1]
    assert tolerances("fp32", vocab_size=vocab_size)[1] == 3e-5
    better = "torch adds up with less error: on_cpu has become superfluous"
    assert largest > 3e-5 or vocab_size < 100_000, better
