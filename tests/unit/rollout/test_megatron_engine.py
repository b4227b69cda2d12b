"""Rollouts of the real model on one rank, compared with full forward passes without a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, response_logprobs
from gspo_megatron.models import lora
from gspo_megatron.models.attention import KeyValueCache, Spans
from gspo_megatron.models.build import Policy
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.types import RolloutBatch
from tests.unit.models.one_rank import (
    PAD,
    VOCABULARY,
    hidden_states,
    random_sequences,
    tiny_policy,
)

NEVER = -1  # an end-of-sequence id that is never sampled
PROMPTS = [prompt for prompt, _ in random_sequences(8, [(3, 0), (9, 0), (1, 0), (6, 0), (4, 0)])]


@pytest.fixture(scope="module")
def policy(one_rank: None) -> Policy:
    # Large weights make the distributions far from uniform.
    return tiny_policy(model={"megatron": {"init_method_std": 0.15}})


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


@dataclass
class Response:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    truncated: bool


def responses_of(batch: RolloutBatch) -> list[Response]:
    """The responses of a flat batch, as a list. Checks that the lengths fit the flat tensors."""
    prompt_lengths, lengths = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    assert batch.tokens.numel() == sum(prompt_lengths) + sum(lengths)
    assert (
        batch.rollout_logprobs.numel() == sum(lengths)
        and batch.rollout_logprobs.dtype == torch.float32
    )
    tokens, logprobs = batch.tokens.tolist(), batch.rollout_logprobs.tolist()
    result = []
    for prompt, length, cut in zip(prompt_lengths, lengths, batch.truncated.tolist(), strict=True):
        result.append(
            Response(tokens[:prompt], tokens[prompt : prompt + length], logprobs[:length], cut)
        )
        tokens, logprobs = tokens[prompt + length :], logprobs[length:]
    return result


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    per_prompt: int = 1,
    max_tokens: int = 12,
    seed: int = 5,
    groups: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    **options: Any,
) -> RolloutBatch:
    """Generate responses. `options` are arguments of the engine."""
    engine = MegatronEngine(policy, pad_id=PAD, **{"eos_id": NEVER, "decode": letters} | options)
    requests = Requests(prompts, groups or range(len(prompts)), per_prompt)
    sampling = Sampling(max_tokens, temperature, top_k=top_k, stop=tuple(stop))
    return engine.generate(requests, sampling, seed)


def test_greedy_decoding_is_the_argmax_of_the_full_forward_pass(policy: Policy) -> None:
    responses = responses_of(generate(policy, temperature=0.0))
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert response.prompt == prompt and len(response.tokens) == 12
        ids = list(prompt)
        for token, logprob in zip(response.tokens, response.logprobs, strict=True):
            with torch.no_grad():
                logits = policy.models[0].next_token_logits(hidden_states(policy, ids)[-1:])[0]
            assert token == int(logits.argmax())
            expected = float(torch.log_softmax(logits.double(), -1)[token])
            assert logprob == pytest.approx(expected, abs=1e-5)  # sums in fp32 in another order
            ids.append(token)


def trainer_difference(policy: Policy, batch: RolloutBatch, temperature: float) -> Tensor:
    """The absolute differences [tokens] between the log-probs of the trainer and of the engine. The
    trainer computes two micro-batches, with the sequences in another order."""
    lengths = batch.response_lengths.tolist()
    tokens = list(batch.tokens.split((batch.prompt_lengths + batch.response_lengths).tolist()))
    offsets = [sum(lengths[:n]) for n in range(len(lengths))]
    builder = MicroBatchBuilder(policy, PAD, temperature)
    members = [list(range(1, len(lengths), 2)), list(range(0, len(lengths), 2))]
    micro_batches = [builder.build(m, tokens, lengths, offsets) for m in members]
    found = zip(micro_batches, response_logprobs(policy, micro_batches), strict=True)
    return torch.cat(
        [t - batch.rollout_logprobs[m.packed.response_index] for m, (t, _) in found]
    ).abs()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("per_prompt", [1, 3])
def test_rollout_logprobs_are_the_trainers(
    policy: Policy, temperature: float, per_prompt: int
) -> None:
    batch = generate(policy, per_prompt=per_prompt, temperature=temperature, eos_id=11)
    difference = trainer_difference(policy, batch, temperature)
    # Both results are fp32 and differ only by the order of sums.
    assert len(difference) == len(batch.rollout_logprobs) and float(difference.max()) <= 1e-5


@pytest.mark.parametrize("batch_size", [1, 2, 4, 7, 100])
@pytest.mark.parametrize("per_prompt", [1, 3])
def test_the_batch_size_changes_nothing(policy: Policy, batch_size: int, per_prompt: int) -> None:
    together = generate(policy, per_prompt=per_prompt, eos_id=11)
    apart = generate(policy, per_prompt=per_prompt, eos_id=11, batch_size=batch_size)
    assert_same(apart, together)


def assert_same(found: RolloutBatch, expected: RolloutBatch) -> None:
    for name, value in columns(expected).items():
        if name == "rollout_logprobs":
            torch.testing.assert_close(getattr(found, name), value, atol=1e-5, rtol=0.0)
        else:
            assert torch.equal(getattr(found, name), value), name


def watched_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that gets the shape of each forward pass: sequences, and tokens of each."""
    passes: list[tuple[int, int]] = []
    native = MegatronEngine._forward

    def watched(self: MegatronEngine, ids: Tensor, *others: Any) -> Any:
        passes.append((ids.shape[0], ids.shape[1]))
        return native(self, ids, *others)

    monkeypatch.setattr(MegatronEngine, "_forward", watched)
    return passes


# Every prompt has at least two tokens; the longest has ten.
LONGER = [(*prompt, 3) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("prefill_tokens", "shapes"),
    [
        (None, [(5, 10)]),
        (50, [(5, 10)]),
        (49, [(3, 10), (2, 10)]),
        (29, [(2, 10), (2, 10), (1, 10)]),
        (3, [(1, 10)] * 5),  # a prompt is not cut
    ],
)
def test_prompts_go_through_the_model_in_passes_of_a_size(
    policy: Policy,
    monkeypatch: pytest.MonkeyPatch,
    prefill_tokens: int | None,
    shapes: list[tuple[int, int]],
) -> None:
    together = generate(policy, LONGER, per_prompt=2, eos_id=11)
    passes = watched_passes(monkeypatch)
    found = generate(policy, LONGER, per_prompt=2, eos_id=11, prefill_tokens=prefill_tokens)
    assert [shape for shape in passes if shape[1] > 1] == shapes
    assert_same(found, together)


@pytest.mark.parametrize("batch_size", [2, 4, 7])
@pytest.mark.parametrize("prefill_tokens", [1, 12, 20])
def test_groups_that_start_in_parts_keep_the_prompt_of_the_last_pass(
    policy: Policy, batch_size: int, prefill_tokens: int
) -> None:
    options = {"per_prompt": 3, "eos_id": 11}
    together = generate(policy, **options)
    sizes = {"batch_size": batch_size, "prefill_tokens": prefill_tokens}
    assert_same(generate(policy, **options, **sizes), together)


def scheduled_steps(lengths: Sequence[int], rows: int) -> int:
    """The number of steps until the last response ends. A response starts in the row that becomes
    free first. Rows become free at every fourth step."""
    free = [0] * rows
    for length in lengths:
        free[free.index(min(free))] += -(-length // 4) * 4
    return max(free)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_free_row_takes_the_next_response(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    passes = watched_passes(monkeypatch)
    batch = generate(
        policy, LONGER, per_prompt=8, eos_id=(2, 11, 17), max_tokens=40, batch_size=rows
    )
    lengths = batch.response_lengths.tolist()
    steps = [sequences for sequences, length in passes if length == 1]
    # The prefill gives the first token of a response.
    assert len(steps) == scheduled_steps(lengths, rows) - 1
    batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
    if rows > 1:
        # fewer steps than with one batch after another
        assert len(steps) < 0.8 * sum(map(max, batches))
    # Each prompt is computed once. The number of rows falls only when no response is waiting.
    assert sum(sequences for sequences, length in passes if length > 1) == len(LONGER)
    assert max(steps) == rows and steps == sorted(steps, reverse=True)


def test_long_sequences_among_short_ones_have_the_trainers_logprobs(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of long sequences is computed separately. Some of them start in rows that have
    become free."""
    long_rows = []
    native = KeyValueCache.start_token

    def watched(self: KeyValueCache, positions: Tensor, spans: Spans, *others: Any) -> None:
        long_rows.append(spans.long_rows)
        native(self, positions, spans, *others)

    monkeypatch.setattr(KeyValueCache, "start_token", watched)
    lengths = [2, 50, 1, 3, 1, 2, 60, 1, 2, 40]
    prompts = [prompt for prompt, _ in random_sequences(4, [(n, 0) for n in lengths])]
    batch = generate(policy, prompts, per_prompt=2, eos_id=(2, 11, 17), max_tokens=30, batch_size=6)
    assert set(long_rows) >= {0, 1, 2}
    assert float(trainer_difference(policy, batch, 1.0).max()) <= 1e-5


def test_a_sample_is_the_same_among_other_prompts(policy: Policy) -> None:
    everything = responses_of(generate(policy, per_prompt=2))
    alone = responses_of(generate(policy, PROMPTS[3:4], groups=[3], per_prompt=2))
    assert [r.tokens for r in alone] == [r.tokens for r in everything[6:8]]


def test_a_groups_responses_differ_and_repeat_with_their_seed(policy: Policy) -> None:
    batch = generate(policy, per_prompt=4)
    responses = responses_of(batch)
    assert batch.sample_index.tolist() == list(range(20))
    assert batch.group_index.tolist() == [n // 4 for n in range(20)]
    for group in range(5):
        members = responses[4 * group : 4 * group + 4]
        assert len({tuple(r.tokens) for r in members}) == 4
        assert all(r.prompt == PROMPTS[group] for r in members)
    assert torch.equal(generate(policy, per_prompt=4).tokens, batch.tokens)
    assert not torch.equal(generate(policy, per_prompt=4, seed=6).tokens, batch.tokens)


def test_prompts_are_numbered_by_their_group_index(policy: Policy) -> None:
    batch = generate(policy, groups=[7, 2, 40, 3, 11], per_prompt=2, max_tokens=2)
    assert batch.group_index.tolist() == [7, 7, 2, 2, 40, 40, 3, 3, 11, 11]
    assert batch.sample_index.tolist() == [14, 15, 4, 5, 80, 81, 6, 7, 22, 23]


def without_end(ids: Sequence[int]) -> str:
    """Token 11 is special and has no text."""
    return letters([i for i in ids if i != 11])


SPECIAL = {"stop": ("<end>",), "special_tokens": {"<end>": 11}, "decode": without_end}


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"eos_id": 2}, [2]),
        ({"eos_id": 11}, [11]),
        ({"eos_id": (11, 30)}, [11, 30]),
        (SPECIAL, [11]),
        ({"eos_id": [2, 30], **SPECIAL}, [2, 11, 30]),
    ],
)
def test_an_end_token_ends_a_response_and_is_part_of_it(
    policy: Policy, options: dict[str, Any], ends: list[int]
) -> None:
    sizes = {"per_prompt": 6, "max_tokens": 23}
    endless = responses_of(generate(policy, **sizes))
    ending = responses_of(generate(policy, **options, **sizes))
    assert all(r.truncated and len(r.tokens) == 23 for r in endless)
    for whole, cut in zip(endless, ending, strict=True):
        found = [n for n, token in enumerate(whole.tokens, 1) if token in ends]
        length = min(found, default=23)
        assert cut.tokens == whole.tokens[:length]
        assert cut.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
        assert cut.truncated is not bool(found)
    lengths = {len(r.tokens) for r in ending}
    assert len(lengths) > 3 and 23 in lengths  # some responses end early, some at the limit


def test_an_end_at_the_last_position_is_no_truncation(policy: Policy) -> None:
    (endless,) = responses_of(generate(policy, PROMPTS[:1], max_tokens=5))
    last = endless.tokens[-1]
    assert last not in endless.tokens[:-1]
    (response,) = responses_of(generate(policy, PROMPTS[:1], max_tokens=5, eos_id=last))
    assert response.tokens == endless.tokens and response.truncated is False


@pytest.mark.parametrize(("max_tokens", "rows"), [(18, None), (20, None), (21, None), (21, 7)])
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
    policy: Policy, max_tokens: int, rows: int | None
) -> None:
    options = {"per_prompt": 6, "max_tokens": max_tokens}
    endless = [letters(r.tokens) for r in responses_of(generate(policy, **options))]
    # These sequences of tokens occur at known places.
    pair, single, last = endless[4][7:9], endless[9][3], endless[2][-3:]
    decoded = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(ids)
        return letters(ids)

    for stop, eos in (((pair,), ""), ((last,), ""), ((pair, single), ""), (tuple("ABCDE"), "L")):
        decoded.clear()
        batch = generate(
            policy,
            stop=stop,
            eos_id=ord(eos) - ord("A") if eos else NEVER,
            decode=decode,
            batch_size=rows,
            **options,
        )
        ends = [
            min((text.index(s) + len(s) for s in (*stop, eos) if s and s in text), default=None)
            for text in endless
        ]
        for text, end, response in zip(endless, ends, responses_of(batch), strict=True):
            assert letters(response.tokens) == text[:end]
            assert response.truncated is (end is None)
        ended = sum(end is not None for end in ends)
        assert 1 <= ended < len(ends)
        # Rows that have ended are not decoded. There is one call for each 4 tokens of a response,
        # and up to 4 calls at its end.
        checks = sum(-(-(end or max_tokens) // 4) for end in ends)
        assert checks <= len(decoded) <= checks + 4 * ended + len(stop)


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("a終🙂以上就是最终答案", "以上就是最终答案"),
        ("a終\x01終\x01\n", "終<end>\n"),
        ("\x01\x01b\x01", "b<end>"),
        ("a\x01終b", "終b"),  # the special token before the stop string has no effect
    ],
)
def test_a_stop_string_of_many_bytes_or_with_special_tokens_ends_a_response(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, text: str, stop: str
) -> None:
    """Every token is one byte, and token 1 is special. All rows get the same tokens."""
    content = f"{text}。b\n".encode()
    script = iter(content)

    def draw(self: Any, hidden: Any, sampling: Any, uniform: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full((len(uniform),), next(script)), torch.zeros(len(uniform))

    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != 1).decode(errors="replace")

    monkeypatch.setattr(MegatronEngine, "_sample_tokens", draw)
    monkeypatch.setattr(MegatronEngine, "_forward", lambda self, ids, *args: (ids[..., None], None))
    options = {"max_tokens": len(content), "stop": ("no such text", stop), "decode": decode}
    for response in responses_of(generate(policy, special_tokens={"<end>": 1}, **options)):
        assert bytes(response.tokens).decode() == text and not response.truncated


def test_one_token(policy: Policy) -> None:
    batch = generate(policy, per_prompt=3, max_tokens=1)
    assert batch.response_lengths.tolist() == [1] * 15
    assert batch.truncated.all()
    longer = responses_of(generate(policy, per_prompt=3, max_tokens=6))
    assert [r.tokens for r in responses_of(batch)] == [r.tokens[:1] for r in longer]


def columns(batch: RolloutBatch) -> dict[str, Tensor]:
    """All columns except the routes and the mask, which are not requested."""
    assert batch.routes is None and batch.mask is None
    return {name: value for name, value in vars(batch).items() if value is not None}


def test_no_requests(policy: Policy) -> None:
    batch = generate(policy, [], per_prompt=4)
    for name, value in columns(batch).items():
        assert value.numel() == 0, name
    filled = generate(policy, max_tokens=2)
    for name, value in columns(batch).items():
        assert value.dtype == getattr(filled, name).dtype, name


def test_tokens_come_from_the_true_vocabulary_only(policy: Policy) -> None:
    batch = generate(policy, per_prompt=20, max_tokens=20, temperature=5.0)
    assert set(batch.tokens.tolist()) == set(range(VOCABULARY))


def test_top_k_holds_at_every_step(policy: Policy) -> None:
    for response in responses_of(generate(policy, per_prompt=2, top_k=2, temperature=1.5)):
        with torch.no_grad():
            hidden = hidden_states(policy, response.prompt + response.tokens)
            logits = policy.models[0].next_token_logits(hidden[len(response.prompt) - 1 : -1])
        likeliest = logits.topk(2).indices.tolist()
        assert all(t in allowed for t, allowed in zip(response.tokens, likeliest, strict=True))


def test_the_engine_follows_the_policys_weights_and_leaves_it_in_training_mode(
    one_rank: None,
) -> None:
    policy = tiny_policy(model={"megatron": {"init_method_std": 0.15}})
    engine = MegatronEngine(policy, pad_id=PAD, eos_id=NEVER)
    requests, greedy = Requests(PROMPTS, range(5)), Sampling(6, 0.0)
    before = engine.generate(requests, greedy, 1)
    weight = policy.models[0].head_weight
    with torch.no_grad():
        weight[:VOCABULARY] = weight[:VOCABULARY].flip(0)
    engine.update_weights()
    after = engine.generate(requests, greedy, 1)
    assert after.tokens[3] == VOCABULARY - 1 - before.tokens[3]  # the first sampled token
    assert all(module.training for module in policy.models[0].modules())
    assert not after.rollout_logprobs.requires_grad


def test_bf16_rollouts_come_close_to_bf16_training(one_rank: None) -> None:
    policy = tiny_policy(
        model={"megatron": {"init_method_std": 0.15}}, training={"precision": "bf16"}
    )
    # Rounding changes logits of size 5 by 2^-8. For some tokens it also changes the choice of an
    # expert.
    difference = trainer_difference(policy, generate(policy, per_prompt=2), 1.0)
    assert float(difference.median()) < 0.05


def test_the_adapters_of_each_rollout_are_joined_once(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron = {"init_method_std": 0.15}
    policy = tiny_policy(model={"megatron": megatron, "lora": {"rank": 4}})
    join, calls = lora._joined_b, []
    monkeypatch.setattr(lora, "_joined_b", lambda *given: calls.append(1) or join(*given))
    first, joined = generate(policy), len(calls)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # an update of the adapters
        for model in policy.models:
            for weight in (w for w in model.parameters() if w.requires_grad):
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
    second = generate(policy)
    num_layers = len(policy.models[0].decoder.layers)
    assert joined == 4 * num_layers and len(calls) == 2 * joined  # qkv, proj, fc1 and fc2
    monkeypatch.setattr(lora.Lora, "unchanged", lambda _: contextlib.nullcontext())
    expected = generate(policy)  # joins the adapters at each pass
    assert len(calls) > 4 * joined
    assert torch.equal(second.rollout_logprobs, expected.rollout_logprobs)
    assert not torch.equal(second.rollout_logprobs, first.rollout_logprobs)
