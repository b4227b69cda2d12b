"""Random numbers, the sampling of tokens, and stop strings, compared with references in plain
Python."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece
from gspo_megatron.rollout.engine import Sampling
from gspo_megatron.rollout.megatron import sampling as sampling_module
from gspo_megatron.rollout.megatron.sampling import (
    BLOCK,
    RouterRandomness,
    StopStrings,
    sample_tokens,
    uniforms,
    with_special_tokens,
)
from tests.unit.data.corpora import make_tokenizer

# --- Random numbers -------------------------------------------------------------------------------

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def splitmix64_finaliser(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, figure 16), with Stafford's mix 13, in
    unsigned integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def reference_bits(seed: int, sample: int, position: int) -> int:
    state = splitmix64_finaliser(seed * _GAMMA & _MASK)
    state = splitmix64_finaliser((state + sample * _GAMMA) & _MASK)
    return splitmix64_finaliser((state + (position + 1) * _GAMMA) & _MASK)


@pytest.mark.parametrize("seed", [0, 1, 7, (1 << 32) + 5, (123456 << 32) + 99_999])
def test_every_number_is_that_of_splitmix64(seed: int) -> None:
    samples = [0, 1, 2, 1000, 123_456_789, 1 << 40]
    values = uniforms(seed, torch.tensor(samples), 9)
    assert values.dtype == torch.float64 and values.shape == (len(samples), 9)
    for row, sample in zip(values.tolist(), samples, strict=True):
        for position, value in enumerate(row):
            # The number has 52 bits, so the last bit may be rounded.
            expected = reference_bits(seed, sample, position) * 2.0**-64
            assert value == pytest.approx(expected, abs=2.0**-52, rel=0.0)


def kolmogorov_smirnov(values: Tensor) -> float:
    """The Kolmogorov-Smirnov statistic: the largest distance between the empirical and the uniform
    distribution, times sqrt(n)."""
    ordered = values.flatten().sort().values
    count = ordered.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max()
    return float(distance) * math.sqrt(count)


CRITICAL = 1.95  # with uniform numbers, the statistic exceeds this value with probability 0.001


@pytest.mark.parametrize("seed", [0, 1, 5, (1 << 32) + 1])
def test_the_distribution_is_uniform(seed: int) -> None:
    values = uniforms(seed, torch.arange(1000), 20)
    assert float(values.min()) > 0.0 and float(values.max()) < 1.0
    assert kolmogorov_smirnov(values) < CRITICAL
    for position in (0, 1, 19):  # the samples of a step use the numbers of one position
        assert kolmogorov_smirnov(values[:, position]) < CRITICAL
    assert kolmogorov_smirnov(uniforms(seed, torch.tensor([17]), 5000)) < CRITICAL
    seeds = range(seed, seed + 2000)
    across_seeds = torch.stack([uniforms(s, torch.tensor([3]), 1) for s in seeds])
    assert kolmogorov_smirnov(across_seeds) < CRITICAL


def test_neighbours_are_not_correlated() -> None:
    values = torch.stack([uniforms(seed, torch.arange(100), 50) for seed in range(8)]) - 0.5
    pairs = {
        "position": (values[:, :, 1:], values[:, :, :-1]),
        "sample": (values[:, 1:], values[:, :-1]),
        "seed": (values[1:], values[:-1]),
        "diagonal": (values[:, 1:, :-1], values[:, :-1, 1:]),
    }
    for name, (left, right) in pairs.items():
        correlation = float((left * right).mean()) * 12.0  # a uniform number has variance 1/12
        # with independent numbers, the left side exceeds 3.3 with probability 0.001
        assert abs(correlation) * math.sqrt(left.numel()) < 3.3, name


@pytest.mark.parametrize("bits", [0, -1])
def test_neither_zero_nor_one_comes_out(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(sampling_module, "_finalise", lambda z: torch.full_like(z, bits))
    assert 0.0 < float(uniforms(1, torch.tensor([0]), 1)) < 1.0


@pytest.mark.parametrize("seed", [0, 7])
def test_router_noise_repeats_no_number_that_draws_a_token(seed: int) -> None:
    positions = torch.arange(4).expand(3, 4)
    numbers = RouterRandomness(seed, torch.tensor([0, 1, 5])).numbers(positions)
    noise = torch.stack([numbers(layer, 6) for layer in range(3)])
    assert noise.shape == (3, 12, 6) and noise.unique().numel() == noise.numel()
    assert not torch.isin(noise, uniforms(seed, torch.arange(100), 50)).any()
    # The tokens are in the routers' order. A sequence has the same numbers in every batch.
    alone = RouterRandomness(seed, torch.tensor([1])).numbers(positions[:1])
    assert torch.equal(alone(2, 6), noise[2].view(4, 3, 6)[:, 1])


# --- The sampling of tokens -----------------------------------------------------------------------

LOGITS = [0.3, -1.2, 2.1, 0.0, 1.7, -3.0, 0.9]
DRAWS = 20_000
# 0.999 quantiles of the chi-square distribution, by degrees of freedom
CHI_SQUARE = {0: 1e-9, 1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46}


def softmax(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(x / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def kept(probabilities: list[float], top_k: int = 0, top_p: float = 1.0, **_: Any) -> set[int]:
    """The tokens that can be sampled. The probabilities of the `top_k` most probable tokens are
    added up, the largest first, until the share `top_p` of their sum is reached. transformers and
    vLLM do the same."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[: top_k or None]
    total = sum(probabilities[i] for i in order)
    chosen: set[int] = set()
    for token in order:
        if sum(probabilities[i] for i in chosen) >= top_p * total:
            break
        chosen.add(token)
    return chosen


def draw_many(sampling: Sampling, seed: int = 1) -> tuple[Tensor, Tensor]:
    uniform = uniforms(seed, torch.arange(DRAWS), 1)[:, 0]
    return sample_tokens(torch.tensor([LOGITS]).expand(DRAWS, -1), sampling, uniform)


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    *({"top_k": k} for k in (1, 3, 7, 100)),
    {"top_k": 2, "temperature": 1.4},
    *({"top_p": p} for p in (1e-6, 0.8, 0.999)),
    {"top_p": 0.5, "temperature": 1.7},
    *({"top_k": k, "top_p": p} for k, p in ((1, 0.1), (3, 0.95), (3, 0.8), (5, 0.6), (2, 0.3))),
]


def test_top_p_ends_with_the_token_that_reaches_it() -> None:
    uniforms = torch.arange(1, 100, dtype=torch.float64)[:, None] / 100
    tokens, _ = sample_tokens(torch.zeros(99, 2), Sampling(1, top_p=0.5), uniforms[:, 0])
    # two tokens have a probability of 0.5, and the first one reaches top_p
    assert len(tokens.unique()) == 1


@pytest.mark.parametrize("values", CASES, ids=str)
def test_frequencies_are_those_of_the_truncated_softmax(values: dict[str, Any]) -> None:
    tokens, logprobs = draw_many(Sampling(1, **values))
    probabilities = softmax(LOGITS, values.get("temperature", 1.0))
    left = kept(probabilities, **values)
    counts = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    assert {token for token, count in enumerate(counts) if count} <= left
    total = sum(probabilities[token] for token in left)
    expected = {token: DRAWS * probabilities[token] / total for token in left}
    assert min(expected.values()) > 5  # large enough for the chi-square approximation
    statistic = sum((counts[t] - e) ** 2 / e for t, e in expected.items())
    assert statistic <= CHI_SQUARE[len(left) - 1]
    # The log-prob is that of the full softmax, before truncation.
    for token, logprob in zip(tokens[:50].tolist(), logprobs[:50].tolist(), strict=True):
        assert logprob == pytest.approx(math.log(probabilities[token]), abs=1e-6)


@pytest.mark.parametrize("size", [1, 53, BLOCK, BLOCK + 1, 5 * BLOCK - 7])
def test_tokens_invert_the_cumulative_distribution(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = 2.0 * torch.randn(40, size, generator=generator)
    uniform = torch.rand(40, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, Sampling(1, temperature=0.9), uniform)
    compared = 0
    for row, u, token, logprob in zip(logits.tolist(), uniform.tolist(), tokens, logprobs):
        probabilities = softmax(row, 0.9)
        edges = [sum(probabilities[: i + 1]) for i in range(len(row))]
        expected = next(i for i, edge in enumerate(edges) if edge > u)
        assert float(logprob) == pytest.approx(math.log(probabilities[int(token)]), abs=1e-5)
        if min(abs(edge - u) for edge in edges) > 1e-6:  # near an edge, rounding in fp32 decides
            assert int(token) == expected
            compared += 1
    assert compared > 35 or size == 1


@pytest.mark.parametrize("best", [0.5, 0.99])
def test_logprobs_of_a_large_vocabulary_are_exact(best: float) -> None:
    """torch's softmax is wrong by 1e-4 here, a third of GSPO's clip range."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(6, 151_936, generator=generator)
    logits[:, 5] = logits[:, 6:].double().logsumexp(-1) + math.log(best / (1 - best))
    uniform = torch.rand(6, generator=generator, dtype=torch.float64)
    for temperature in (0.0, 1.0, 0.8):
        tokens, logprobs = sample_tokens(logits, Sampling(1, temperature=temperature), uniform)
        exact = (logits.double() / (temperature or 1.0)).log_softmax(-1)
        expected = exact.gather(1, tokens[:, None])[:, 0]
        # rounding of the logits' differences in fp32 and of the quotient
        torch.testing.assert_close(logprobs.double(), expected, atol=2e-6, rtol=0.0)


def test_greedy_takes_the_largest_logit_and_its_logprob_at_temperature_one() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(12, 31, generator=generator)
    uniform = torch.rand(12, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, Sampling(1, temperature=0.0), uniform)
    assert torch.equal(tokens, logits.argmax(-1))
    expected = torch.log_softmax(logits.double(), -1).amax(-1)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=0.0)


def test_a_token_without_probability_is_never_drawn() -> None:
    # The tokens without probability are the first, the last and one in the middle. The random
    # numbers are at both ends of the unit interval.
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0, -math.inf]])
    for u, expected in ((2.0**-54, 1), (0.25, 1), (0.75, 3), (1.0 - 2.0**-53, 3)):
        uniform = torch.tensor([u], dtype=torch.float64)
        for values in ({}, {"top_k": 3}, {"top_p": 0.999}):
            tokens, _ = sample_tokens(logits, Sampling(1, **values), uniform)
            assert tokens.tolist() == [expected]


@pytest.mark.parametrize("size", [6 * BLOCK, 200 * BLOCK - 3])
@pytest.mark.parametrize("seed", range(20))
def test_few_tokens_with_probability_are_found_in_any_block(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    possible = torch.randperm(size, generator=generator)[:3]
    logits = torch.full((1, size), -math.inf)
    logits[0, possible] = 3.0 * torch.randn(3, generator=generator)
    edges = logits.double().softmax(-1)[0].cumsum(0)[possible.sort().values]
    around = [float(edge) + step * 2.0**-k for edge in edges for k in (24, 50) for step in (-1, 1)]
    for u in (2.0**-54, *around, 1.0 - 2.0**-53):
        if 0.0 < u < 1.0:
            uniform = torch.tensor([u], dtype=torch.float64)
            assert int(sample_tokens(logits, Sampling(1), uniform)[0]) in possible.tolist()


@pytest.mark.parametrize("size", [1, 5, 3 * BLOCK, 3 * BLOCK - 7, 90 * BLOCK + 1])
def test_logits_that_are_not_a_number_give_a_token(size: int) -> None:
    """The log-prob is NaN, so the loss stops the run."""
    logits = torch.full((2, size), math.nan)
    tokens, logprobs = sample_tokens(
        logits, Sampling(1), torch.tensor([0.2, 0.9], dtype=torch.float64)
    )
    assert logprobs.isnan().all() and tokens.max() < size


@pytest.mark.parametrize("seed", range(100))
def test_no_token_without_weight_is_drawn_at_the_edge_of_a_block(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = 100 * BLOCK  # large enough for blocks of full size
    weights = (8.0 * torch.randn(8, size, generator=generator)).exp()
    weights *= torch.rand(8, size, generator=generator) < 0.1
    ends = weights.unflatten(1, (-1, BLOCK)).sum(-1).cumsum(1, dtype=torch.float64)
    for edge in (ends / ends[:, -1:])[:, :-1].unbind(1):
        tokens = sampling_module._inverted(weights, edge[:, None])
        assert weights.gather(1, tokens).min() > 0


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([LOGITS])
    before = logits.clone()
    sample_tokens(
        logits, Sampling(1, temperature=0.5, top_k=2, top_p=0.5), torch.tensor([0.3]).double()
    )
    assert torch.equal(logits, before)


# --- Stop strings ---------------------------------------------------------------------------------

CHINESE = "以上就是最终答案"


def byte_level(folder: Path) -> Path:
    """A byte-level BPE like that of GPT-2 and Qwen. Its merges join bytes within and across
    characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the answer is 以上就是 aaa 🙂"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def with_leading_space(folder: Path) -> Path:
    """A tokenizer like Llama 2's, whose decoder drops the space before the first token."""
    options = {"add_dummy_prefix": True, "control_symbols": ["<|im_end|>"], "byte_fallback": True}
    lines = ["the answer is a b c"] * 20
    return train_sentencepiece(lines, 300, folder / "t", model_type="char", **options)


@pytest.fixture(scope="module", params=["byte-level", "leading space", "byte fallback", "folder"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / "t"
    if request.param == "byte-level":
        return load_tokenizer(byte_level(folder))
    if request.param == "leading space":
        return load_tokenizer(with_leading_space(folder))
    made = make_tokenizer(folder, "bpe")
    return load_tokenizer(made if request.param == "folder" else made / "tokenizer.model")


def found_end(tokenizer: Tokenizer, stop: Sequence[str], ids: list[int], block: int) -> int | None:
    """Search as the engine does: after every `block` tokens, in the new tokens and a window before
    them."""
    stops = StopStrings(stop, tokenizer.decode)
    for searched in range(0, len(ids), block):
        first = max(0, searched + 1 - stops.window)
        end = stops.end(ids[first : searched + block], searched - first)
        if end is not None:
            return first + end
    return None


def texts() -> Iterator[tuple[str, tuple[str, ...]]]:
    source = random.Random(3)
    stops = [(CHINESE,), ("🙂🙂",), ("er i", CHINESE), ("nsw",), (" b",), ("案", "\n\n")]
    for _ in range(60):
        stop = source.choice(stops)
        words = ["the answer is", "a b", "以上", "就是 🙂🙂", "终é", "\n", "答案", CHINESE[:-1]]
        chosen = [*source.choices(words, k=source.randint(0, 12)), source.choice(stop)]
        yield source.choice(["", " "]).join([*chosen, *source.choices(words, k=3)]), stop


def test_a_response_ends_with_the_token_that_completes_a_stop_string(tokenizer: Tokenizer) -> None:
    for text, stop in texts():
        ids = tokenizer.encode(text)
        prefixes = (tokenizer.decode(ids[:n]) for n in range(len(ids) + 1))
        expected = next(n for n, prefix in enumerate(prefixes) if any(s in prefix for s in stop))
        for block in (1, 4):
            assert found_end(tokenizer, stop, ids, block) == expected, (text, stop)
        assert found_end(tokenizer, ["no such text"], ids, 4) is None


def test_special_tokens_inside_a_stop_string_do_not_hide_it(tokenizer: Tokenizer) -> None:
    special = tokenizer.symbol_id("<|im_end|>")
    assert special is not None and tokenizer.decode([special]) == ""
    for stop in (CHINESE, "a b"):
        for before in ("", "c", "终", "🙂🙂🙂"):
            ids = tokenizer.encode(f"{before}{stop}c")
            end = found_end(tokenizer, [stop], ids, 4)
            prefixes = [tokenizer.decode(ids[:n]) for n in range(end or 0)]
            inside = max(
                n for n, text in enumerate(prefixes) if text.endswith((stop[0], stop[:-1]))
            )
            ids[inside:inside] = [special, special]
            assert found_end(tokenizer, [stop], ids, 4) == end + 2


def test_a_stop_of_text_and_a_special_token(tokenizer: Tokenizer) -> None:
    name = "<|im_end|>"
    special = tokenizer.special_tokens[name]
    stops = StopStrings([f"is{name}a"], with_special_tokens(tokenizer.decode, {special: name}))
    answer, after = tokenizer.encode("the answer is"), tokenizer.encode("a b")
    text_alone = [*answer, *after]
    assert stops.end(text_alone, searched=0) is None
    ids = [special, *answer, special, *after]
    end = stops.end(ids, searched=0)
    assert end is not None and tokenizer.decode(ids[len(answer) + 2 : end]).startswith("a")
    assert stops.end(ids[: end - 1], searched=0) is None


def test_a_stop_string_may_end_inside_a_token() -> None:
    pieces = [b"so ", b"the end. And", b" more", b"\x80 end."]
    decode = lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")  # noqa: E731
    stops = StopStrings(["end."], decode)
    assert stops.end([0, 0, 1, 2], searched=0) == 3
    assert stops.end([0, 1], searched=1) == 2 and stops.end([0, 0], searched=0) is None
    # The stop string is in a token that begins with an incomplete character.
    assert stops.end([3, 0], searched=0) == 1
