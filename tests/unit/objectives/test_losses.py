"""Properties of the objectives that do not fit into the table of test_oracle.py."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo_megatron.config.objectives import RECIPES
from gspo_megatron.objectives import Objective, losses, parts
from gspo_megatron.types import LossInputs
from tests.unit.objectives.batches import (
    EVERY_OBJECTIVE,
    EXACT,
    choose,
    inputs_of,
    make_inputs,
    make_objective,
    owners,
    poisoned,
    run_shards,
)
from tests.unit.objectives.papers import expect
from tests.unit.objectives.test_oracle import BOUNDS, OF_TOKENS

# Objectives with one clip flag for each sequence. All other objectives need the flags of all shards
# for their clip metrics.
CLIP_SEQUENCES = [
    name for name, each in RECIPES.items()
    if each.ratio in ("sequence", "sequence_product") and each.rule in ("min_clip", "dual_clip")
]  # fmt: skip
OF_SEQUENCES = [*CLIP_SEQUENCES, "gmpo"]


@pytest.mark.parametrize("seed", range(3))
def test_gspo_on_half_a_page_is_the_recipe_bit_for_bit(seed):
    """`losses.gspo` is the short version for readers. It is compared on whole batches and on the
    shards of context parallelism."""
    inputs = inputs_of("gspo", seed, dtype=torch.float32, with_reference=True)
    owner = owners("zigzag", len(inputs.mask), 2)
    everything = torch.zeros_like(owner)
    for division in (everything, owner):
        short, general = (
            run_shards(inputs, division, function)
            for function in (losses.gspo, make_objective("gspo"))
        )
        for (mine, ours), (theirs, outputs) in zip(short, general, strict=True):
            ours.loss.backward()
            outputs.loss.backward()
            assert torch.equal(ours.loss, outputs.loss)
            assert torch.equal(mine.logprobs.grad, theirs.logprobs.grad)
            for key, pair in ours.means.items():
                assert torch.equal(pair, outputs.means[key]), key
            for key, values in ours.values.items():
                assert torch.equal(values, outputs.values[key]), key
    wide = make_objective("gspo", clip_low=0.01, clip_high=0.02)
    assert torch.equal(losses.gspo(inputs, 0.01, 0.02).loss, wide(inputs).loss)


# --- Other parts in place of the recipe's own ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part", "value", "same_as"),
    [
        ("grpo", "ratio", "sequence", "gspo"),
        ("grpo", "ratio", "sequence_token", "gspo_token"),
        ("gspo", "ratio", "token", "grpo"),
        ("gspo", "rule", "geometric_clip", "gmpo"),
        ("grpo", "rule", "soft_gate", "sapo"),
        ("dapo", "rule", "capped", "cispo"),
    ],
)
def test_a_part_in_place_of_the_recipes_own(name, part, value, same_as):
    inputs = make_inputs(1, spread=0.4)
    changed = make_objective(name, **{part: value})(inputs).loss
    assert changed != make_objective(name)(inputs).loss
    torch.testing.assert_close(changed, make_objective(same_as)(inputs).loss)


@pytest.mark.parametrize(
    ("keys", "reference", "entropy"),
    [
        ({}, False, False),
        ({"kl": "k3", "kl_coefficient": 0.1}, True, False),
        ({"kl": "k1", "kl_coefficient": 0.1, "kl_in": "reward"}, True, False),
        ({"entropy_coefficient": 0.01}, False, True),
    ],
)
def test_what_the_trainer_has_to_provide(keys, reference, entropy):
    objective = make_objective("gspo", **keys)
    assert (objective.needs_reference, objective.needs_entropy_gradient) == (reference, entropy)


def test_effective_sample_share_is_that_of_its_formula():
    objective = make_objective("grpo", correction="token_tis")
    inputs = make_inputs(3, spread=0.4, mismatch=0.5)
    outputs = objective(inputs)
    masked = inputs.mask > 0
    weights = (inputs.old_logprobs - inputs.rollout_logprobs).exp().clamp(max=2.0)[masked]
    metrics = objective.complete({key: float(a / b) for key, (a, b) in outputs.means.items()})
    for key, w in (("ratio", outputs.values["ratio/token"]), ("correction", weights)):
        expected = float(w.sum() ** 2 / (len(w) * w.square().sum()))
        assert metrics[f"{key}/effective_sample_share"] == pytest.approx(expected, rel=1e-12)
        assert f"{key}/squared_weight" not in metrics


# --- Single parts in which the formulas of papers.py could contain the same mistake -------------


def test_a_dual_clip_inside_the_range_counts_as_outside_where_it_binds():
    ratio, advantages = torch.tensor([1.2]), torch.tensor([-1.0])
    clipped = parts.dual_clip(make_inputs(0), ratio, advantages, 0.2, 0.3, dual_clip=1.1)
    assert clipped.surrogate.tolist() == pytest.approx([-1.1])
    assert clipped.high.item() and clipped.outside.item()


def test_estimators_are_means_of_the_divergence():
    """Averaged with the probabilities of pi over the whole vocabulary, k1 and k3 are the exact
    divergence. The gradient of k2 is that of the divergence."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    new = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.4, 1.0], dtype=torch.float64), 0)
    exact = (new.exp() * (new - reference)).sum()
    weights = new.exp().detach()
    estimates = {
        kind: (weights * parts.divergence(kind, new, reference)).sum()
        for kind in ("k1", "k2", "k3")
    }
    for kind in ("k1", "k3"):
        torch.testing.assert_close(estimates[kind], exact, **EXACT)
    exact_gradient, of_k1, of_k2 = (
        torch.autograd.grad(value, logits, retain_graph=True)[0]
        for value in (exact, estimates["k1"], estimates["k2"])
    )
    torch.testing.assert_close(of_k2, exact_gradient, **EXACT)
    torch.testing.assert_close(of_k1, torch.zeros_like(exact_gradient), **EXACT)


def test_k3_mask_bounds_the_divergence_of_the_rollouts_policy_from_the_old_one():
    """The batch contains each token as often as the rollout policy samples it. So the mean of k3 is
    KL(rollout, old), exactly."""
    rollout = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    old = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    kl = float((rollout * (rollout / old).log()).sum())
    tokens = torch.tensor([0, 0, 1, 2])
    inputs = make_inputs(1, lengths=(4,))
    inputs.mask.fill_(1)
    inputs.sequence_lengths.fill_(4)
    inputs.rollout_logprobs, inputs.old_logprobs = rollout.log()[tokens], old.log()[tokens]
    for bound, kept in ((kl * 1.0001, 1.0), (kl * 0.9999, 0.0)):
        objective = make_objective("gspo", correction="k3_mask", correction_high=bound)
        assert objective(inputs).means["correction/weight"].tolist() == [kept, 1.0]


def test_bounds_belong_to_what_is_kept():
    logs = torch.tensor([0.5, 1.0, 2.0, 2.5], dtype=torch.float64).log()
    ones = torch.ones(4, dtype=torch.float64)
    assert parts.icepop(make_inputs(1), logs, 0.5, 2.0).tolist() == pytest.approx([0.5, 1, 2, 0])
    assert parts.sequence_mask(logs, ones, 0.6, 2.1).tolist() == [0, 1, 1, 0]


def test_the_divergence_of_a_token_that_is_certain():
    """In float32, the probability of a token often rounds to 1. The probability of all others is
    then below the rounding error, but not 0. So a policy that is sure up to rounding is close to a
    policy that is sure, and far from one that is not."""
    certain, half, nearly = torch.zeros(1), torch.tensor([0.5]).log(), torch.tensor([-1e-6])
    assert parts.binary_kl(certain, half).item() == pytest.approx(math.log(2), rel=1e-5)
    assert parts.binary_kl(half, certain).item() > 5
    assert parts.binary_kl(certain, certain).item() == parts.binary_kl(half, half).item() == 0
    for p, q in ((nearly, certain), (certain, nearly)):
        # 1 - p = 1e-6, and 1 - q is at least 1e-12, so the divergence is at most 1.4e-5
        assert 0 <= parts.binary_kl(p, q).item() < 1.4e-5
    inputs = inputs_of("dppo_kl", 0, dtype=torch.float32)
    inputs.rollout_logprobs = torch.zeros_like(inputs.mask)
    inputs.old_logprobs = torch.full_like(inputs.mask, -1e-6)
    inputs.logprobs = torch.zeros_like(inputs.mask).requires_grad_()
    means = make_objective("dppo_kl", correction="kpop")(inputs).means
    assert means["correction/dropped"][0] == means["clip/token/outside"][0] == 0


def test_a_token_that_a_correction_drops_may_have_lost_all_its_probability():
    inputs = inputs_of("cispo", 0)
    inputs.mask[0] = 1
    with torch.no_grad():
        inputs.logprobs[0] = -math.inf
        inputs.rollout_logprobs[0] = inputs.old_logprobs[0] - 50.0
    loss = make_objective("cispo", correction="token_k1_mask")(inputs).loss
    loss.backward()
    assert loss.isfinite() and inputs.logprobs.grad.isfinite().all()


def test_k3_of_tiny_differences_keeps_its_digits_in_float32():
    inputs = make_inputs(4, spread=0.0, dtype=torch.float32)
    with torch.no_grad():
        inputs.old_logprobs.fill_(0.0)
        inputs.logprobs.fill_(1e-3)
    numerator, tokens = make_objective("gspo")(inputs).means["kl/k3"].tolist()
    # The result is about x^2/2 = 5e-7, and float32 numbers near 1 have a distance of 1e-7. So
    # exp(x) - 1 - x would have no correct digit.
    assert numerator / tokens == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


# --- Batches at the edge -------------------------------------------------------------------------


@pytest.mark.parametrize("global_tokens", [0, 40])
@EVERY_OBJECTIVE
def test_a_batch_without_any_masked_token_gives_zero(name, global_tokens):
    """With 40 global tokens, other micro-batches have tokens inside the mask. With 0, the whole
    mini-batch has none, and the loss must not be 0/0."""
    inputs = inputs_of(name, 3)
    inputs.mask.zero_()
    inputs.sequence_lengths.zero_()
    inputs.global_num_tokens = global_tokens
    outputs = make_objective(name, entropy_coefficient=0.1)(inputs)
    outputs.loss.backward()
    assert outputs.loss == 0
    assert (inputs.logprobs.grad == 0).all()
    assert all(torch.isfinite(pair).all() for pair in outputs.means.values())
    assert all(values.isnan().all() for values in outputs.values.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("jump", [500.0, -500.0])
@EVERY_OBJECTIVE
def test_one_runaway_token_leaves_no_nan_and_the_other_sequences_gradient(name, advantage, jump):
    gradients = []
    for first in (-1.0, jump):
        inputs = inputs_of(name, 0, lengths=(3, 2), dtype=torch.float32)
        inputs.mask.fill_(1)
        inputs.sequence_lengths = torch.tensor([3.0, 2.0])
        inputs.advantages = torch.tensor([advantage, 1.0])
        with torch.no_grad():
            inputs.logprobs[0] = first
        outputs = make_objective(name)(inputs)
        outputs.loss.backward()
        gradients.append(inputs.logprobs.grad)
    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(gradients[1]).all()
    assert all(torch.isfinite(pair).all() for pair in outputs.means.values())
    torch.testing.assert_close(gradients[1][3:], gradients[0][3:])


@pytest.mark.parametrize("delta", [200.0, -200.0])
@pytest.mark.parametrize(
    ("name", "correction"),
    # Rules and corrections that drop a token with a very large or small ratio, or give it a small
    # weight. In float64, exp(200) is finite, so papers.py can compute their losses.
    [
        *((name, None) for name in ("dppo_tv", "dppo_kl", "ipo", "vespo")),
        *(("grpo", name) for name in BOUNDS),
    ],
)
def test_the_loss_of_a_token_whose_log_probs_differ_by_200(name, correction, delta):
    inputs = inputs_of(name, 0)
    inputs.mask[0] = 1
    inputs.sequence_lengths[0] = inputs.mask[inputs.sequence_index == 0].sum()
    first, second, keys = -0.5 + min(delta, 0.0), -0.5 - max(delta, 0.0), {}
    with torch.no_grad():
        if correction is None:  # the policy has moved in the direction of the advantage
            inputs.advantages[0] = math.copysign(0.7, delta)
            inputs.logprobs[0], inputs.old_logprobs[0] = first, second
        else:
            keys = {"correction": correction, **BOUNDS[correction][0]}
            inputs.logprobs[0] = first + 0.05
            inputs.old_logprobs[0], inputs.rollout_logprobs[0] = first, second
    inputs = poisoned(inputs, -math.inf)
    outputs, expected = make_objective(name, **keys)(inputs), expect(name, inputs, **keys)
    outputs.loss.backward()
    torch.testing.assert_close(outputs.loss.detach(), expected.loss, **EXACT)
    torch.testing.assert_close(inputs.logprobs.grad, expected.gradient, **EXACT)


@pytest.mark.parametrize("policy", ["rollout_logprobs", "old_logprobs"])
@pytest.mark.parametrize("correction", BOUNDS)
def test_a_runaway_mismatch_stays_finite_and_weights_are_constants_to_the_gradient(
    correction, policy
):
    inputs = make_inputs(1, spread=0.4, dtype=torch.float32)
    getattr(inputs, policy)[0] = -5000.0
    inputs.rollout_logprobs.requires_grad_()
    outputs = make_objective("grpo", correction=correction, **BOUNDS[correction][0])(inputs)
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss) and torch.isfinite(inputs.logprobs.grad).all()
    assert all(torch.isfinite(pair).all() for pair in outputs.means.values())
    assert inputs.rollout_logprobs.grad is None or (inputs.rollout_logprobs.grad == 0).all()


@EVERY_OBJECTIVE
def test_shapes_that_would_broadcast_are_refused(name):
    inputs = inputs_of(name, 5)
    wrong = {
        "advantages": inputs.advantages[:, None],
        "sequence_lengths": inputs.sequence_lengths[:, None],
        "old_logprobs": inputs.old_logprobs[:, None],
        "mask": inputs.mask[None],
        "logprobs": inputs.logprobs[:, None],
        "entropy": inputs.entropy[:1],
        "rollout_logprobs": inputs.rollout_logprobs[:, None],
        "reference_logprobs": inputs.old_logprobs[:1],
    }
    for field, tensor in wrong.items():
        with pytest.raises(AssertionError):
            make_objective(name)(dataclasses.replace(inputs, **{field: tensor}))


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_token_advantages_that_would_not_be_read_are_refused(name):
    with pytest.raises(AssertionError, match="token_advantages"):
        make_objective(name)(make_inputs(6, with_token_advantages=True))


def test_what_a_part_needs_and_the_inputs_lack_is_refused():
    inputs = dataclasses.replace(make_inputs(1), rollout_logprobs=None)
    with pytest.raises(AssertionError, match="rollout's log-probs"):
        make_objective("gspo", correction="sequence_tis")(inputs)
    with pytest.raises(AssertionError, match="rollout's log-probs"):
        make_objective("minirl")(inputs)
    with pytest.raises(AssertionError, match="reference policy"):
        make_objective("gspo", kl="k3", kl_coefficient=0.1)(inputs)
    inputs.entropy = None
    assert "policy/entropy" not in make_objective("gspo")(inputs).means


# --- Collectives, and operators that GPUs run in random order ------------------------------------


def sent_by(objective: Objective, inputs: LossInputs) -> list[Tensor]:
    """The vectors that the objective sums over shards, one for each collective."""
    sent = []

    def sum_over_shards(vector: Tensor) -> Tensor:
        sent.append(vector)
        return vector

    inputs.sum_over_shards = sum_over_shards
    objective(inputs).loss.backward()
    return sent


@pytest.mark.parametrize(
    ("correction", "sums"), [("none", 1), ("sequence_mask", 2), ("k3_mask", 2)]
)
@EVERY_OBJECTIVE
def test_bytes_a_sequence_whatever_its_length_and_the_additions(name, correction, sums):
    inputs = make_inputs(1, lengths=(50, 3, 20), dtype=torch.float32, with_reference=True)
    additions = {"kl": "k3", "kl_coefficient": 0.1, "entropy_coefficient": 0.1}
    objective = make_objective(name, correction=correction, off_policy_mask=0.1, **additions)
    sums += name == "gmpo"  # also the sum of the limited log-ratios
    # The first message has all sums. If tokens have clip flags, a second message has three sums of
    # flags.
    expected = [sums * 4] if name in CLIP_SEQUENCES else [sums * 4, 12]
    sent = sent_by(objective, inputs)
    assert [each.numel() * each.element_size() / 3 for each in sent] == expected
    empty = choose(inputs, torch.zeros(len(inputs.mask), dtype=torch.bool))
    assert len(sent_by(objective, empty)) == len(sent)


@EVERY_OBJECTIVE
def test_a_shards_loss_is_the_whole_or_a_part_of_it(name):
    whole, objective = inputs_of(name, 8), make_objective(name)
    shards = run_shards(whole, owners("zigzag", len(whole.mask), 3), objective)
    found = torch.stack([outputs.loss.detach() for _, outputs in shards])
    expected = objective(whole).loss.detach()
    if name in OF_TOKENS:
        torch.testing.assert_close(found.sum(), expected, **EXACT)
    else:
        torch.testing.assert_close(found, expected.expand(3), **EXACT)


class Operators(TorchDispatchMode):
    """Records the operators that get floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.is_floating_point() for x in tensors):
            self.seen.add(function._opname.rstrip("_"))
        return function(*args, **(kwargs or {}))


@EVERY_OBJECTIVE
def test_no_loss_or_gradient_adds_in_the_random_order_of_gpu_threads(name):
    inputs = inputs_of(name, 0, with_reference=True)
    objective = make_objective(
        name, kl="k3", kl_coefficient=0.1, correction="k3_mask", off_policy_mask=0.1
    )
    with Operators() as operators:
        objective(inputs).loss.backward()
    assert "segment_reduce" in operators.seen
    atomic = {"index_add", "scatter_add", "scatter_reduce", "index_put", "bincount", "cumsum"}
    assert not operators.seen & atomic
