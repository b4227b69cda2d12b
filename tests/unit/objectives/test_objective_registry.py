"""The objective that a configuration gives: its parts, its numbers, what it needs."""

from __future__ import annotations

import pytest
import torch

from gspo_megatron.config.objectives import RECIPES
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives import build_objective
from tests.unit.objectives.batches import inputs_of, make_inputs, make_objective
from tests.unit.objectives.papers import NUMBERS


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_with_the_numbers_of_its_paper(name):
    objective = make_objective(name)
    assert objective.name == name
    assert objective.function.recipe.parameters == NUMBERS[name]
    assert not objective.needs_reference
    assert not objective.needs_entropy_gradient


def test_overrides_reach_the_objective():
    inputs = make_inputs(0, spread=1e-2)
    narrow = make_objective("gspo")(inputs)
    wide = make_objective("gspo", clip_low=0.5, clip_high=0.5)(inputs)
    assert narrow.means["clip/sequence/outside"][0] > 0
    assert wide.means["clip/sequence/outside"][0] == 0


@pytest.mark.parametrize(
    ("name", "part", "value", "same_as"),
    [
        ("grpo", "aggregation", "token_sum", None),
        ("grpo", "ratio", "sequence", "gspo"),
        ("grpo", "ratio", "sequence_token", "gspo_token"),
        ("gspo", "ratio", "token", "grpo"),
        ("gspo", "rule", "geometric_clip", "gmpo"),
        ("grpo", "rule", "soft_gate", "sapo"),
    ],
)
def test_a_part_in_place_of_the_recipes_own(name, part, value, same_as):
    inputs = make_inputs(1, spread=0.4)
    changed = make_objective(name, **{part: value})(inputs).loss
    assert changed != make_objective(name)(inputs).loss
    if same_as is not None:
        torch.testing.assert_close(changed, make_objective(same_as)(inputs).loss)


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "token_sum"])
def test_aggregations_of_token_terms(name, aggregation):
    """By hand from the gradients of a single aggregation, whose weights are known."""
    by_constant, other = inputs_of(name, 2), inputs_of(name, 2)
    make_objective(name, aggregation="constant_length")(by_constant).loss.backward()
    make_objective(name, aggregation=aggregation)(other).loss.backward()
    sequences, tokens = other.global_num_sequences, other.global_num_tokens
    weights = {
        "sequence_mean": 1 / (sequences * other.sequence_lengths[other.sequence_index]),
        "token_mean": torch.full_like(other.mask, 1 / tokens),
        "token_sum": torch.full_like(other.mask, 1 / sequences),
    }[aggregation]
    expected = by_constant.logprobs.grad * (sequences * 40) * weights
    torch.testing.assert_close(other.logprobs.grad, expected)


def test_the_longest_response_is_the_divisor_of_dr_grpo():
    section = ObjectiveSection(name="dr_grpo")
    inputs = make_inputs(0, spread=0.4)
    short = build_objective(section, max_response_tokens=10)(inputs).loss
    long = build_objective(section, max_response_tokens=1000)(inputs).loss
    torch.testing.assert_close(short, 100 * long)


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


def test_a_divergence_without_the_reference_is_refused():
    with pytest.raises(AssertionError, match="reference policy"):
        make_objective("gspo", kl="k3", kl_coefficient=0.1)(make_inputs(0))
