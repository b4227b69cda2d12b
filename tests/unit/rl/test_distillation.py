"""On-policy distillation: what the teacher adds to the advantages, against the formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.objectives import Objective
from gspo_megatron.rl.distillation import add_to_advantages, divergence_metrics
from gspo_megatron.types import LossInputs, LossOutputs
from tests.unit.objectives.batches import (
    as_mini_batch,
    choose,
    inputs_of,
    make_objective,
    owners,
    run_shards,
    without_tokens,
)

OF_TOKENS = ["grpo", "gspo_token", "dapo", "vespo"]
OF_SEQUENCES = ["gspo", "luspo", "gmpo"]


def teacher_of(inputs: LossInputs, seed: int) -> Tensor:
    """[tokens], NaN outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(inputs.mask.shape, generator=generator, dtype=torch.float64)
    return (inputs.old_logprobs + noise).where(inputs.mask > 0, math.nan)


def expected_advantages(inputs: LossInputs, teacher: Tensor, coefficient: float) -> list[Any]:
    """Of each token, and of each sequence by its mean."""
    of_tokens, of_sequences = [], []
    for i, advantage in enumerate(inputs.advantages.tolist()):
        rows = [t for t in range(len(inputs.mask)) if int(inputs.sequence_index[t]) == i]
        said = {
            t: float(teacher[t]) - float(inputs.old_logprobs[t])
            for t in rows
            if float(inputs.mask[t])
        }
        mean = math.fsum(said.values()) / max(len(said), 1)
        of_sequences.append(advantage + coefficient * mean)
        own = inputs.token_advantages
        base = {t: advantage if own is None else float(own[t]) for t in rows}
        of_tokens += [base[t] + coefficient * said.get(t, 0.0) for t in rows]
    return [of_tokens, of_sequences]


@pytest.mark.parametrize("with_token_advantages", [False, True])
@pytest.mark.parametrize("name", OF_TOKENS)
def test_tokens_get_what_the_teacher_says_of_them(name: str, with_token_advantages: bool) -> None:
    inputs = inputs_of(name, 3, with_token_advantages=with_token_advantages)
    teacher = teacher_of(inputs, 5)
    found = add_to_advantages(inputs, teacher, make_objective(name), 0.7)
    of_tokens, _ = expected_advantages(inputs, teacher, 0.7)
    assert found.token_advantages is not None
    assert found.token_advantages.tolist() == pytest.approx(of_tokens, rel=1e-12)
    assert torch.equal(found.advantages, inputs.advantages)
    make_objective(name)(found).loss.backward()
    assert inputs.logprobs.grad is not None and inputs.logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_sequences_get_the_mean_over_their_tokens(name: str) -> None:
    inputs = without_tokens(inputs_of(name, 4), 2)
    teacher = teacher_of(inputs, 6)
    found = add_to_advantages(inputs, teacher, make_objective(name), 1.3)
    _, of_sequences = expected_advantages(inputs, teacher, 1.3)
    assert found.advantages.tolist() == pytest.approx(of_sequences, rel=1e-12)
    assert found.token_advantages is None and not found.advantages.requires_grad


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_shards_of_context_parallelism_have_the_gradient_of_the_whole(name: str) -> None:
    inputs = as_mini_batch(inputs_of(name, 8))
    teacher, objective = teacher_of(inputs, 9), make_objective(name)

    def of_part(part: LossInputs) -> LossOutputs:
        own = {float(old): said for old, said in zip(inputs.old_logprobs, teacher, strict=True)}
        said = torch.stack([own[float(old)] for old in part.old_logprobs])
        return objective(add_to_advantages(part, said, objective, 0.5))

    whole = choose(inputs, torch.arange(len(inputs.mask)))
    of_part(whole).loss.backward()
    owner, gradient = owners("zigzag", len(inputs.mask), 2), torch.zeros_like(inputs.mask)
    for shard, (part, outputs) in enumerate(run_shards(inputs, owner, of_part)):
        outputs.loss.backward()
        assert part.logprobs.grad is not None
        gradient[owner == shard] = part.logprobs.grad
    assert whole.logprobs.grad is not None and float(gradient.abs().max()) > 1e-4
    torch.testing.assert_close(gradient, whole.logprobs.grad, rtol=1e-10, atol=1e-13)


def gradient_of(objective: Objective, inputs: LossInputs) -> Tensor:
    part = choose(inputs, torch.arange(len(inputs.mask)))
    objective(part).loss.backward()
    assert part.logprobs.grad is not None
    return part.logprobs.grad


@pytest.mark.parametrize("name", [*OF_TOKENS, *OF_SEQUENCES])
def test_a_teacher_that_is_the_policy_changes_nothing(name: str) -> None:
    inputs, objective = inputs_of(name, 2), make_objective(name)
    changed = add_to_advantages(inputs, inputs.old_logprobs.clone(), objective, 3.0)
    assert torch.equal(gradient_of(objective, changed), gradient_of(objective, inputs))
    pure = choose(inputs, torch.arange(len(inputs.mask)), advantages=inputs.advantages * 0)
    nothing = add_to_advantages(pure, pure.old_logprobs.clone(), objective, 3.0)
    assert not gradient_of(objective, nothing).any()
    numerator, count = divergence_metrics(inputs, inputs.old_logprobs)["distill/kl"].tolist()
    assert numerator == 0 and count == float(inputs.mask.sum())


def test_on_policy_the_gradient_is_that_of_the_reverse_divergence() -> None:
    """Over all tokens that the policy may write, weighted by its probabilities, the gradient of
    minus the surrogate is that of KL(pi, teacher), from its definition."""
    generator = torch.Generator().manual_seed(1)
    logits, theirs = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(0), theirs.log_softmax(0)
    [expected] = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)
    objective, total = make_objective("grpo"), torch.zeros(5, dtype=torch.float64)
    for token in range(5):
        inputs = as_mini_batch(inputs_of("grpo", 1, lengths=(1,)))
        inputs.advantages = torch.zeros(1, dtype=torch.float64)
        inputs.logprobs = logits.log_softmax(0)[token : token + 1]
        inputs.old_logprobs = inputs.logprobs.detach()
        said = log_q[token : token + 1]
        loss = objective(add_to_advantages(inputs, said, objective, 1.0)).loss
        [gradient] = torch.autograd.grad(loss, logits)
        total += log_p[token].exp().detach() * gradient
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)
