"""The numbers of a policy update that no gradient shows: rewards from which the divergence is
subtracted, metrics of a step with several updates, and what the objective is given. They are
compared with loops over tokens, and with the log-probs of the policies in question."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import response_logprobs
from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.objectives import Objective, group_mean
from gspo_megatron.objectives.advantages import AdvantageEstimator
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.types import LossInputs, LossOutputs
from tests.unit.routing.steps import LENGTHS, Step, a_step, moe_policy, updater_for

pytestmark = pytest.mark.usefixtures("one_rank")

RESPONSES = [response for _, response in LENGTHS]
TOKENS = sum(RESPONSES)
FIRST = 4  # sequences of the first mini-batch
EMPTY = 2  # a sequence of it without tokens inside the mask


def step_of(mask: Tensor) -> Step:
    """A step of two mini-batches, with two sequences in each micro-batch of the first one. mask:
    [response tokens]."""
    step, counts = a_step(), [int(own.sum()) for own in mask.split(RESPONSES)]
    step.sequences.mask = mask
    index = replace(step.index, masked_lengths=tuple(counts))
    members = [((0, 1), (2, 3)), ((4,), (5,))]
    plans = [
        MiniBatch((each,), sum(map(len, each)), sum(counts[n] for n in chain(*each)))
        for each in members
    ]
    return replace(step, index=index, plans=plans)


def random_mask() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    mask = (torch.rand(TOKENS, generator=generator) < 0.7).float()
    mask.split(RESPONSES)[EMPTY].zero_()
    return mask


# The estimates of the divergence by log pi - log reference of a token.
ESTIMATES: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("mask", [torch.ones(TOKENS), random_mask()], ids=["all", "masked"])
@pytest.mark.parametrize("kl", ESTIMATES)
def test_rewards_lose_the_divergence_summed_over_their_tokens(kl: str, mask: Tensor) -> None:
    objective = {"name": "dr_grpo", "kl": kl, "kl_coefficient": 0.3, "kl_in": "reward"}
    updater, step = updater_for(moe_policy(), {}, objective), step_of(mask)
    mini_batches = updater.build_micro_batches(step.plans, step.sequences, step.index)
    generator = torch.Generator().manual_seed(4)
    old, moved = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    reference = (old - 0.8 * moved).where(mask > 0, math.nan)
    for batch in chain.from_iterable(mini_batches):
        rows = batch.packed.response_index
        batch.old_logprobs, batch.reference_logprobs = old[rows], reference[rows]
    found = updater.penalized_advantages(mini_batches, step.index)

    rewards = []
    columns = [values.split(RESPONSES) for values in (old, reference, mask)]
    for reward, *own in zip(step.index.rewards.tolist(), *columns, strict=True):
        kls = [ESTIMATES[kl](float(o - r)) for o, r, m in zip(*own, strict=True) if m]
        rewards.append(reward - 0.3 * math.fsum(kls))
    means = [statistics.fmean(rewards[n - n % 2 :][:2]) for n in range(len(rewards))]
    expected = [reward - mean for reward, mean in zip(rewards, means, strict=True)]
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_advantages_of_rewards_with_a_penalty_are_computed_once() -> None:
    """A function of the user may keep values from call to call."""
    objective = {"name": "dr_grpo", "kl": "k1", "kl_coefficient": 0.3, "kl_in": "reward"}
    updater, step = updater_for(moe_policy(), {}, objective), step_of(torch.ones(TOKENS))
    calls: list[Tensor] = []

    def estimate(rewards: Tensor, groups: Tensor) -> Tensor:
        calls.append(rewards)
        return group_mean(rewards, groups)

    advantages = AdvantageEstimator(updater.section, estimate)
    updater.objective = replace(updater.objective, advantages=advantages)
    before, _ = advantages.of_step(step.index.rewards, step.index.groups, None)
    update_policy(updater, step.sequences, step.index, step.plans, before)
    assert before is None and len(calls) == 1


def test_what_is_measured_of_the_policy_that_sampled_is_of_the_first_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The difference to the engine's log-probs, and the divergence from the teacher. Later updates
    change the policy, so they have no part in these metrics. The gradient norm is a mean over all
    updates."""
    mask, judged = random_mask(), (0, -1, 0, 0, 0, 0)  # the second sequence has no teacher
    objective = {"name": "grpo", "distillation": {"url": "http://x", "coefficient": 0.5}}
    updater, step = updater_for(moe_policy(), {}, objective), step_of(mask)
    step = replace(step, index=replace(step.index, teachers=judged))
    generator = torch.Generator().manual_seed(5)
    teacher = -3 * torch.rand(TOKENS, generator=generator)
    taught = mask * torch.tensor(judged).repeat_interleave(torch.tensor(RESPONSES)).eq(0)
    step.sequences.teacher_logprobs = teacher.where(taught > 0, math.nan)

    mini_batches = updater.build_micro_batches(step.plans, step.sequences, step.index)
    trained = torch.zeros(TOKENS)
    outputs = response_logprobs(updater.policy, mini_batches[0])
    for batch, (logprobs, _) in zip(mini_batches[0], outputs, strict=True):
        trained[batch.packed.response_index] = logprobs
    native, norms = updater.trainer.update, []

    def watched() -> tuple[float, float]:
        norm, rate = native()
        norms.append(norm)
        return norm, rate

    monkeypatch.setattr(updater.trainer, "update", watched)
    updater.compute_old_logprobs(mini_batches)
    for plan, batches in zip(step.plans, mini_batches, strict=True):
        updater.train(plan, batches, torch.tensor([1.0, -1.0] * 3))
    metrics = updater.reduce_metrics()

    differences = (trained.double() - step.sequences.rollout_logprobs.double()).split(RESPONSES)
    inside = [own[m > 0].tolist() for own, m in zip(differences, mask.split(RESPONSES))][:FIRST]
    assert [not own for own in inside] == [n == EMPTY for n in range(FIRST)]
    noise = [statistics.fmean(own) ** 2 for own in inside if own]
    flat = [*chain(*inside)]
    divergences = (trained.double() - teacher.double()).split(RESPONSES)
    chosen = [own[t > 0].tolist() for own, t in zip(divergences, taught.split(RESPONSES))][:FIRST]
    expected = {
        "ratio/noise_floor": statistics.fmean(noise) ** 0.5,
        "mismatch/abs_mean": statistics.fmean(map(abs, flat)),
        "mismatch/k1": -statistics.fmean(flat),
        "mismatch/max": max(map(abs, flat)),
        "distill/kl": statistics.fmean(chain(*chosen)),
        "grad_norm": statistics.fmean(norms),
    }
    # the engine computes in fp32
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert len(norms) == 2 and max(norms) > 1.01 * min(norms)


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_an_update_learns_from_the_log_probs_of_each_policy(
    monkeypatch: pytest.MonkeyPatch, old_logprobs: str
) -> None:
    """In a run of two steps: the old policy is that of the step's beginning or of the rollout, and
    the reference is always the policy before the first step."""
    objective = {"name": "dapo", "kl": "k2", "kl_coefficient": 0.3, "old_logprobs": old_logprobs}
    updater, mask = updater_for(moe_policy(), {}, objective), random_mask()
    seen: list[LossInputs] = []
    native, advantages = type(updater.objective).__call__, torch.linspace(-1, 1, len(LENGTHS))

    def watched(objective: Objective, inputs: LossInputs) -> LossOutputs:
        seen.append(inputs)
        return native(objective, inputs)

    monkeypatch.setattr(type(updater.objective), "__call__", watched)
    counts, starts = torch.tensor([int(own.sum()) for own in mask.split(RESPONSES)]), []
    for _ in range(2):
        step = step_of(mask)
        mini_batches = updater.build_micro_batches(step.plans, step.sequences, step.index)
        everything, rollout = [*chain(*mini_batches)], step.sequences.rollout_logprobs
        starts.append([own for own, _ in response_logprobs(updater.policy, everything)])
        updater.compute_old_logprobs(mini_batches)
        for plan, batches in zip(step.plans, mini_batches, strict=True):
            now = response_logprobs(updater.policy, batches)
            updater.train(plan, batches, advantages)
            for inputs, batch, (logprobs, entropies) in zip(seen, batches, now, strict=True):
                number = next(n for n, each in enumerate(everything) if each is batch)
                members, rows = torch.tensor(batch.packed.members), batch.packed.response_index
                old = rollout[rows] if old_logprobs == "rollout" else starts[-1][number]
                assert inputs.reference_logprobs is not None and inputs.entropy is not None
                assert inputs.rollout_logprobs is not None
                for found, expected in (
                    (inputs.logprobs, logprobs),
                    (inputs.entropy, entropies),
                    (inputs.old_logprobs, old),
                    (inputs.reference_logprobs, starts[0][number]),
                    (inputs.rollout_logprobs, rollout[rows]),
                    (inputs.mask, mask[rows]),
                    (inputs.advantages, advantages[members]),
                    (inputs.sequence_lengths, counts[members].float()),
                ):
                    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-5)
                total = inputs.global_num_sequences, inputs.global_num_tokens
                assert total == (plan.num_sequences, plan.num_response_tokens)
            seen.clear()
    for later, first in zip(starts[1], starts[0], strict=True):
        assert float((later - first).abs().max()) > 1e-2
