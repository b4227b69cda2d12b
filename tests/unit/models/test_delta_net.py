"""Gated delta nets: the rule compared with Megatron-Core's, packed sequences, states, and
parameters that stay in fp32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, run_chunk
from gspo_megatron.config import resolve_parallel
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.delta_net import CachedDeltaNet
from gspo_megatron.models.delta_rule import CHUNK, delta_rule, delta_step, normalized
from gspo_megatron.models.optimizer import Schedule, build_trainer
from tests.unit.hf.policies import config_of, greedy, logits_of, policy_of
from tests.unit.hf.published import DELTA_NETS, VOCABULARY, write_model
from tests.unit.models.one_rank import micro_batch, random_sequences

# isort: split
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

LENGTH = 2 * CHUNK + 22


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value, decay and rate of 2 sequences with 3 heads."""
    generator = torch.Generator().manual_seed(1)

    def draw(*dims: int) -> Tensor:
        return torch.randn((2, LENGTH, 3, *dims), generator=generator, dtype=torch.float64)

    states = [normalized(draw(6)), normalized(draw(6)), draw(14), -draw().abs(), draw().sigmoid()]
    return [each.to(dtype).requires_grad_() for each in states]


def step_by_step(states: list[Tensor], length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """The definition of the rule, token by token."""
    state = states[0].new_zeros((2, 3, 6, 14))
    with torch.no_grad():
        outputs = [delta_step(state, *(s[:, token] for s in states)) for token in range(length)]
    return torch.stack(outputs, dim=1), state


def test_chunks_are_the_rule_token_by_token() -> None:
    states = inputs()
    found, state = delta_rule(*states)
    expected, last = step_by_step(states)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-12)


def test_it_is_megatron_cores_rule_with_its_gradients() -> None:
    """The tolerance is that of fp32, in which Megatron-Core computes the rule."""
    ours, theirs = inputs(torch.float32), inputs(torch.float32)
    found, state = delta_rule(*ours)
    query, key, value, decay, rate = theirs
    expected, last = torch_chunk_gated_delta_rule(
        query, key, value, g=decay, beta=rate, output_final_state=True
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    for each in (found, expected):
        (each * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_tokens_of_decay_and_rate_0_leave_the_state() -> None:
    states = [each.detach() for each in inputs()]
    for each in states[3:]:
        each[:, 70:] = 0.0
    _, state = delta_rule(*states)
    _, last = step_by_step(states, 70)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-12)


@pytest.fixture(params=DELTA_NETS)
def folder(request: pytest.FixtureRequest, one_rank: None, tmp_path: Path) -> Path:
    return write_model(tmp_path / request.param, request.param, seed=2)


def test_packed_sequences_are_computed_each_by_itself(folder: Path) -> None:
    """Log-probs and gradients are compared with those of separate sequences. The lengths make
    several blocks, one of them with padding."""
    policy = policy_of(config_of(folder, "float64", moe_aux_loss_coeff=0.0))
    sequences = random_sequences(5, [(30, 60), (3, 4), (50, 90), (2, 7), (40, 41)], VOCABULARY)
    builder = MicroBatchBuilder(policy, pad_id=0, temperature=1.0)
    found, gradients = passed(policy, builder, [sequences])
    expected, theirs = passed(policy, builder, [[each] for each in sequences])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        difference = (gradient - theirs[name]).norm() / theirs[name].norm()
        # fp64 is not reached, because Megatron-Core computes the sigmoid of output gates in fp32
        assert difference < 1e-6, name


def passed(policy: Policy, builder: MicroBatchBuilder, batches: list) -> tuple[Tensor, dict]:
    """The log-probs of all responses, and the gradients of their weighted sum."""
    [model] = policy.models
    outputs = []
    for sequences in batches:
        outputs.append(run_chunk(policy.chunks[0], micro_batch(builder, sequences))[0])
    logprobs = torch.cat(outputs)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(3))
    named = dict(model.named_parameters())
    loss = (logprobs * weights).sum()
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {n: g for n, g in zip(named, gradients, strict=True) if g is not None}
    assert any("A_log" in name for name in found)
    return logprobs.detach(), found


def test_decoding_continues_what_whole_sequences_give(folder: Path) -> None:
    """Decoding is compared with passes of whole sequences. One padded batch has prompts of several
    chunks and of one token."""
    policy = policy_of(config_of(folder))
    draw = random.Random(6)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in (CHUNK + 9, 1, 2, 130)]
    continuations, logprobs = greedy(policy, prompts, count=8)
    for prompt, tokens, found in zip(prompts, continuations, logprobs, strict=True):
        logits = logits_of(policy, prompt + tokens)[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(8), tokens]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


def test_new_decays_are_logarithms_of_numbers_from_1_to_16(folder: Path) -> None:
    config = config_of(folder)
    policy = build_policy(config, resolve_parallel(config, 1), VOCABULARY)
    nets = [m for m in policy.models[0].modules() if isinstance(m, CachedDeltaNet)]
    numbers = torch.cat([net.A_log.detach() for net in nets]).exp()
    assert numbers.min() > 1 and numbers.max() < 16 and len(numbers.unique()) == 3 * 6
    # the mean of 18 uniform numbers has a standard error of 1.02
    assert float(numbers.mean()) == pytest.approx(8.5, abs=4)


def test_the_decay_is_fp32_in_a_bf16_model_and_trained_so(folder: Path) -> None:
    config = config_of(folder, "bfloat16")
    policy = policy_of(config)
    nets = [m for m in policy.models[0].modules() if isinstance(m, CachedDeltaNet)]
    assert len(nets) == 3
    wide = [getattr(net, name) for net in nets for name in ("A_log", "dt_bias")]
    assert {each.dtype for each in wide} == {torch.float32}
    assert {net.in_proj.weight.dtype for net in nets} == {torch.bfloat16}
    trainer = build_trainer(policy, config.optimizer, Schedule(1e-5, 1e-5, 0, 1, "constant"))
    before = [each.detach().clone() for each in wide]
    for each in policy.models[0].parameters():
        each.main_grad.fill_(1.0)
    trainer.optimizer.step()
    for each, old in zip(wide, before, strict=True):
        # The step is so small that a bf16 parameter would not change.
        moved = (each - old).abs()
        assert moved.min() > 0 and moved.max() < 1e-4
