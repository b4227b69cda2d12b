"""On-policy distillation: what the teacher adds to the advantages, compared with the formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.config.distillation import DistillationSection
from gspo_megatron.models.top_k_head import bucket_logprobs
from gspo_megatron.objectives import Objective
from gspo_megatron.rl.distillation import (
    add_to_advantages,
    bucket_divergence,
    divergence_metrics,
    top_k_metrics,
    with_divergence,
)
from gspo_megatron.types import LossInputs
from tests.unit.objectives.batches import (
    LONGEST,
    as_mini_batch,
    choose,
    inputs_of,
    make_objective,
    without_tokens,
)

OF_TOKENS = ["grpo", "gspo_token", "dapo", "vespo"]
OF_SEQUENCES = ["gspo", "luspo", "gmpo"]


def teacher_of(inputs: LossInputs, seed: int) -> Tensor:
    """A teacher's log-probs [tokens], NaN outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(inputs.mask.shape, generator=generator, dtype=torch.float64)
    return (inputs.old_logprobs + noise).where(inputs.mask > 0, math.nan)


def expected_advantages(inputs: LossInputs, teacher: Tensor, coefficient: float) -> list[Any]:
    """The expected advantages of each token, and of each sequence as the mean over its tokens."""
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
    """The surrogate is summed over all tokens of the vocabulary. The weights are the policy's
    probabilities. The gradient of minus this sum is that of KL(pi, teacher), computed from its
    definition."""
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


@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo"])
def test_a_teacher_far_away_is_followed_and_what_is_masked_is_not_read(
    name: str, hidden: float
) -> None:
    """The log-probs of policy and teacher differ by 200 at one token. The gradient in float32
    equals the gradient in float64."""
    gradients = []
    for dtype in (torch.float64, torch.float32):
        inputs, objective = inputs_of(name, 3, dtype=dtype), make_objective(name)
        teacher = teacher_of(inputs, 4).to(dtype).where(inputs.mask > 0, hidden)
        teacher[int(inputs.mask.nonzero()[0])] -= 200.0
        taught = add_to_advantages(inputs, teacher, objective, 0.5)
        expected = expected_advantages(inputs, teacher.double(), 0.5)
        read, wanted = taught.token_advantages, expected[0]
        if not objective.of_tokens:
            read, wanted = taught.advantages, expected[1]
        assert read is not None
        masked = inputs.mask.bool() if objective.of_tokens else torch.ones(len(wanted)).bool()
        wanted = torch.tensor(wanted, dtype=torch.float64)[masked]
        tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
        torch.testing.assert_close(read.double()[masked], wanted, **tolerance)
        objective(taught).loss.backward()
        gradients.append(inputs.logprobs.grad)
    assert gradients[0].isfinite().all() and gradients[0].any()
    torch.testing.assert_close(gradients[1].double(), gradients[0], rtol=1e-4, atol=1e-6)


TOPK = ["forward_kl_topk", "reverse_kl_topk"]


@pytest.mark.parametrize("form", TOPK)
def test_a_divergence_of_200_and_masked_infinities(form: str) -> None:
    """Some log-probs are -200, and the log-probs outside the mask are -inf. The result agrees with
    the definition in float64, and is finite in float32."""
    far = [math.log1p(-math.exp(-1.0)), -200.0, -1.0]
    near = [-200.0, math.log1p(-math.exp(-1.0)), -1.0]
    lost = [-math.inf, -math.inf, -math.inf]
    chosen = torch.tensor([True, False, True])
    for dtype in (torch.float64, torch.float32):
        ours = torch.tensor([far, lost, near], dtype=dtype, requires_grad=True)
        teacher = torch.tensor([near, lost, near], dtype=dtype)
        found = bucket_divergence(form, ours, teacher, chosen)
        over, under = (near, far) if form == "forward_kl_topk" else (far, near)
        wanted = math.fsum(math.exp(a) * (a - b) for a, b in zip(over, under, strict=True))
        assert found.tolist() == [pytest.approx(wanted, rel=1e-6), 0.0, 0.0] and wanted > 100
        [gradient] = torch.autograd.grad(found.sum(), ours)
        assert gradient.isfinite().all() and gradient[0].any() and not gradient[1:].any()


def a_pair(seed: int, tokens: int = 6, vocab: int = 11) -> tuple[Tensor, Tensor]:
    """The logits of policy and teacher."""
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = torch.randn(2, tokens, vocab, generator=generator, dtype=torch.float64) * 2
    return ours.requires_grad_(), theirs


def in_buckets(logits: Tensor, best: Tensor) -> Tensor:
    """The log-probs of the tokens `best` [tokens, k], and the log-prob of all other tokens
    together."""
    p = logits.softmax(1)
    rest = p.scatter(1, best, 0.0).sum(1, keepdim=True)
    return torch.cat([p.gather(1, best), rest], 1).log()


def by_loops(form: str, ours: Tensor, theirs: Tensor, best: Tensor) -> list[Tensor]:
    """The divergence of each token by its definition, with a sum over the whole vocabulary."""
    found = []
    for row in range(len(ours)):
        q, p = ours[row].softmax(0), theirs[row].softmax(0)
        buckets = [[token] for token in best[row].tolist()]
        buckets.append([token for token in range(len(q)) if [token] not in buckets])
        total = torch.zeros((), dtype=torch.float64)
        for bucket in buckets:
            of_q, of_p = sum(q[t] for t in bucket), sum(p[t] for t in bucket)
            over, under = (of_p, of_q) if form == "forward_kl_topk" else (of_q, of_p)
            assert isinstance(over, Tensor) and isinstance(under, Tensor)
            total = total + over * (over / under).log()
        found.append(total)
    return found


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("form", TOPK)
def test_a_divergence_over_buckets_is_that_of_the_definition(form: str, k: int) -> None:
    ours, theirs = a_pair(k)
    best = theirs.topk(k)[1]
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    expected = torch.stack(by_loops(form, ours, theirs, best))
    [wanted] = torch.autograd.grad((weights * expected).sum(), ours)
    chosen = torch.ones(6, dtype=torch.bool)
    found = bucket_divergence(form, in_buckets(ours, best), in_buckets(theirs, best), chosen)
    [gradient] = torch.autograd.grad((weights * found).sum(), ours)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", TOPK)
def test_equal_distributions_have_no_divergence_and_no_gradient(
    form: str, dtype: torch.dtype
) -> None:
    ours, _ = a_pair(3)
    best = ours.topk(4)[1]
    buckets = in_buckets(ours.detach(), best).to(dtype)
    leaf = buckets.clone().requires_grad_()
    found = bucket_divergence(form, leaf, buckets, torch.ones(6, dtype=torch.bool))
    found.sum().backward()
    assert not found.any() and leaf.grad is not None and not leaf.grad.any()


@pytest.mark.parametrize("form", TOPK)
def test_what_is_not_learnt_from_may_hold_anything(form: str) -> None:
    """Outside the mask, and at tokens that it does not judge, the teacher has NaN. At the remaining
    tokens it has probabilities near 0 and 1."""
    ours, theirs = a_pair(5)
    best = theirs.topk(3)[1]
    teacher, chosen = in_buckets(theirs, best), torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool)
    teacher[~chosen] = math.nan
    # The teacher gives one token a probability of nearly 1.
    teacher[0] = torch.tensor([0.0, -90.0, -95.0, -16.6])
    scaled = ours * torch.tensor([1.0, 200.0, 1.0, 1.0, 1.0, 1.0])[:, None]
    policy, _ = bucket_logprobs(scaled, torch.eye(11, dtype=torch.float64), best)
    found = bucket_divergence(form, policy, teacher, chosen)
    [gradient] = torch.autograd.grad(found.sum(), ours)
    assert found.isfinite().all() and gradient.isfinite().all()
    assert (
        not found[~chosen].any() and not gradient[~chosen].any() and gradient[chosen].any(1).all()
    )


@pytest.mark.parametrize("form", TOPK)
def test_a_token_that_the_policy_does_not_have_is_one_of_the_rest(form: str) -> None:
    ours, theirs = a_pair(8)
    best = theirs.topk(4)[1]
    q, p = in_buckets(ours, best), in_buckets(theirs, best)
    fewer = torch.cat([q[:, :2], q[:, 3:4], torch.logaddexp(q[:, 2], q[:, 4])[:, None]], 1)
    folded = torch.cat([p[:, :2], p[:, 3:4], torch.logaddexp(p[:, 2], p[:, 4])[:, None]], 1)
    chosen = torch.ones(6, dtype=torch.bool)
    expected = bucket_divergence(form, fewer, folded, chosen)
    lacking = torch.cat([fewer[:, :2], torch.full((6, 1), -math.inf), fewer[:, 2:]], 1)
    found = bucket_divergence(form, lacking, p, chosen)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    [gradient] = torch.autograd.grad(found.sum(), ours)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("name", "form"), [("gspo", TOPK[0]), ("dapo", TOPK[1]), ("dr_grpo", TOPK[0])]
)
def test_a_divergence_is_aggregated_as_the_tokens_of_the_objective(name: str, form: str) -> None:
    inputs, objective = as_mini_batch(inputs_of(name, 4)), make_objective(name)
    count = len(inputs.mask)
    ours, theirs = a_pair(9, tokens=count)
    best = theirs.topk(3)[1]
    q, p = in_buckets(ours, best), in_buckets(theirs, best)
    section = DistillationSection(teacher="x", form=form, coefficient=0.3, top_k=3)
    taught = replace(inputs, mask=inputs.mask * (torch.arange(count) % 4 > 0))
    plain = objective(inputs)
    found = with_divergence(plain, inputs, taught, q, p, objective, section)
    terms = torch.stack(by_loops(form, ours, theirs, best)) * taught.mask
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(count):
        length = float(inputs.sequence_lengths[inputs.sequence_index[row]])
        sequences = inputs.global_num_sequences
        divisor = {"gspo": sequences * length, "dapo": inputs.global_num_tokens}
        expected = expected + terms[row] / divisor.get(name, sequences * LONGEST)
    torch.testing.assert_close(found.loss - plain.loss, 0.3 * expected, rtol=1e-9, atol=1e-12)
    numerator, denominator = found.means["distill/loss"].tolist()
    assert numerator / denominator == pytest.approx(float(expected), rel=1e-9)
    assert "distill/loss" not in plain.means


def test_metrics_of_a_teachers_tokens() -> None:
    inputs = inputs_of("gspo", 4)
    taught, count = inputs.mask > 0, len(inputs.mask)
    flags = torch.arange(count) % 3 == 0
    teacher = torch.full((count, 3), math.nan)
    teacher[taught] = torch.tensor([0.5, 0.2, 0.3]).log()
    found = top_k_metrics(inputs, flags.double(), teacher)
    numerator, tokens = found["distill/greedy_agreement"].tolist()
    assert (numerator, tokens) == (int((flags & taught).sum()), int(taught.sum()))
    numerator, tokens = found["distill/top_k_mass"].tolist()
    assert numerator / tokens == pytest.approx(0.7, rel=1e-6)
