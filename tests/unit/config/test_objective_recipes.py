"""The table of objectives: names, numbers, refused combinations, and their messages."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from gspo_megatron.config.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    RECIPES,
    RULES,
    narrow_clip_warnings,
    objective_problems,
    resolve_objective,
)
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives import parts
from gspo_megatron.objectives.advantages import build_advantages

OWN = {"import_path": "mine:loss"}


def problems(**keys: Any) -> list[str]:
    return list(objective_problems(ObjectiveSection(**keys)))


def numbers(**keys: Any) -> dict[str, float]:
    """The numbers of the rule, and of the correction if there is one."""
    recipe = resolve_objective(ObjectiveSection(**keys))
    [bounds] = recipe.corrections.values() or [{}]
    return {**recipe.parameters, **bounds}


@pytest.mark.parametrize("name", RECIPES)
def test_the_parts_of_a_recipe_exist_and_mix(name):
    recipe = RECIPES[name]
    assert recipe.aggregation in AGGREGATIONS and recipe.corrections == {}
    assert recipe.ratio in RULES[recipe.rule].ratios
    assert recipe.advantage in ADVANTAGES
    assert set(recipe.parameters) == set(RULES[recipe.rule].defaults)
    assert "arXiv" in recipe.source or name == "ipo"
    assert problems(name=name) == []


def test_every_rule_and_correction_has_its_function_with_the_declared_numbers():
    tensors = {"inputs", "ratio", "advantages", "log_k", "sums", "lengths"}
    declared = [(rule.function, rule.defaults) for rule in RULES.values()]
    for name, each in CORRECTIONS.items():
        # A correction that sums `is_outside` leaves the bounds to this function.
        counts = each.summed == "is_outside"
        declared += [("is_outside", each.defaults)] if counts else []
        declared.append((name, {} if counts else each.defaults))
    for function, defaults in declared:
        arguments = inspect.signature(getattr(parts, function)).parameters.keys()
        assert arguments - tensors == defaults.keys(), function


def test_every_advantage_exists_and_a_ratio_of_one_is_within_the_bounds():
    for name in ADVANTAGES:
        assert callable(build_advantages(ObjectiveSection(advantage=name)).of_sequences)
    for correction in CORRECTIONS.values():
        bounds = correction.defaults
        if "correction_low" in bounds:
            assert bounds["correction_low"] < 1 < bounds["correction_high"]


TOKEN_CORRECTIONS = ("token_tis", "icepop", "kpop")
SEQUENCES, TOKENS = {"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": 0.2, "clip_high": 0.27}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # these ranges are the numbers in the papers
        *(({"name": name}, SEQUENCES) for name in ("gspo", "gspo_token", "luspo")),
        *(({"name": name}, TOKENS) for name in ("grpo", "minirl")),
        ({"name": "dapo"}, {"clip_low": 0.2, "clip_high": 0.28}),
        *(({"name": name}, {"clip_low": 0.2, "clip_high": 0.2})
          for name in ("dr_grpo", "reinforce_leave_one_out")),
        ({"name": "cispo"}, {"clip_high": 4.0}),
        ({"name": "sapo"}, {"tau_positive": 1.0, "tau_negative": 1.05}),
        ({"name": "gmpo"}, {"log_clip": 0.4}),
        # a range for the other kind of ratio is never inherited
        ({"name": "grpo", "ratio": "sequence"}, SEQUENCES),
        ({"name": "dapo", "ratio": "sequence_token"}, SEQUENCES),
        ({"name": "reinforce_leave_one_out", "ratio": "sequence"}, SEQUENCES),
        ({"name": "gmpo", "rule": "min_clip"}, SEQUENCES),
        ({"name": "gspo", "ratio": "token"}, TOKENS),
        ({"name": "luspo", "ratio": "sequence_product"}, TOKENS),
        ({"name": "cispo", "rule": "min_clip"}, TOKENS),
        ({"name": "sapo", "rule": "min_clip"}, TOKENS),
        # a range for the same kind of ratio is inherited
        ({"name": "dapo", "rule": "dual_clip"},
         {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
        ({"name": "dr_grpo", "rule": "masked"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"name": "gspo", "rule": "dual_clip"}, SEQUENCES | {"dual_clip": 3.0}),
        ({"name": "gspo", "ratio": "sequence_token"}, SEQUENCES),
        ({"name": "dapo", "aggregation": "sequence_mean"}, {"clip_low": 0.2, "clip_high": 0.28}),
        # a cap is not a clip range
        ({"name": "grpo", "rule": "capped"}, {"clip_high": 4.0}),
        ({"name": "gspo", "rule": "geometric_clip"}, {"log_clip": 0.4}),
        ({"name": "grpo", "rule": "soft_gate"}, {"tau_positive": 1.0, "tau_negative": 1.05}),
        # given values are kept
        ({"name": "gspo", "clip_high": 1e-3}, {"clip_low": 3e-4, "clip_high": 1e-3}),
        ({"name": "grpo", "rule": "capped", "clip_high": 1.0}, {"clip_high": 1.0}),
        ({"name": "gspo", "correction": "sequence_mask", "correction_low": 0.98},
         SEQUENCES | {"correction_low": 0.98, "correction_high": 1.01}),
        ({"name": "grpo", "correction": "icepop"},
         TOKENS | {"correction_low": 0.5, "correction_high": 5.0}),
    ],
)  # fmt: skip
def test_numbers_of_the_papers_and_of_other_parts(keys, expected):
    assert numbers(**keys) == expected


@pytest.mark.parametrize(
    ("keys", "key_and_value", "reason", "legal"),
    [
        # Bug 1 of test_known_bugs.py: a sequence ratio in a sum over tokens.
        *(
            ({"name": name, "aggregation": aggregation},
             f"objective.aggregation = '{aggregation}'", "by its length", "sequence_mean, or")
            for name in ("gspo", "gspo_token", "gmpo", "reinforce_leave_one_out")
            for aggregation in ("token_mean", "token_sum", "constant_length")
        ),
        ({"name": "dapo", "ratio": "sequence"}, "objective.aggregation = 'token_mean'",
         "by its length", "objective.name = luspo"),
        ({"name": "luspo", "aggregation": "token_mean"}, "objective.aggregation = 'token_mean'",
         "by its length", "sequence_mean"),
        ({"name": "luspo", "ratio": "sequence_token"}, "objective.aggregation = 'token_sum'",
         "by its length", "sequence_mean"),
        # Bug 2: clip bounds that were meant for token ratios.
        ({"name": "gspo", "clip_low": 0.2}, "objective.clip_low = 0.2", "vary much less",
         "below 0.05, or objective.allow_wide_clip = true"),
        ({"name": "gspo", "clip_high": 0.05}, "objective.clip_high = 0.05", "vary much less",
         "below 0.05"),
        ({"name": "grpo", "ratio": "sequence", "clip_high": 0.27}, "objective.clip_high = 0.27",
         "vary much less", "below 0.05"),
        ({"name": "gspo_token", "rule": "dual_clip", "clip_low": 0.2}, "objective.clip_low = 0.2",
         "vary much less", "below 0.05"),
        ({"name": "grpo", "allow_wide_clip": True}, "objective.allow_wide_clip = true",
         "clips no ratios of whole sequences", "false"),
        # Bug 8: token weights on a sequence ratio.
        *(
            ({"name": name, "correction": correction}, f"objective.correction = '{correction}'",
             "but a whole sequence has one ratio",
              "sequence_tis, sequence_mask, k3_mask, worst_token_mask")
            for name in ("gspo", "gspo_token", "luspo", "gmpo", "reinforce_leave_one_out")
            for correction in TOKEN_CORRECTIONS
        ),
        # Bug 7: a correction that is a product, with a ratio that is a geometric mean.
        *(
            ({"name": name, "correction": "sequence_product_tis"},
             "objective.correction = 'sequence_product_tis'", "exponentially with the length",
             "sequence_tis")
            for name in ("gspo", "gspo_token", "luspo", "gmpo")
        ),
        *(
            ({"name": "grpo", "correction": correction, "old_logprobs": "rollout"},
             f"objective.correction = '{correction}'", "they are the same", "none")
            for correction in sorted(CORRECTIONS)
        ),
        *(
            ({"name": "minirl", "correction": correction}, f"objective.correction = '{correction}'",
             "already weights by the ratio", "none, token_k1_mask")
            for correction in (*TOKEN_CORRECTIONS, "sequence_tis", "sequence_product_tis")
        ),
        ({"name": "grpo", "correction": "icepop", "correction_low": 6.0},
         "objective.correction_low = 6.0", "every response", "below correction_high = 5.0"),
        ({"name": "gspo", "correction": "sequence_mask", "correction_low": 1.2,
          "correction_high": 1.1},
         "objective.correction_high = 1.1", "every response", "above correction_low = 1.2"),
        ({"name": "grpo", "correction": ["token_tis", "icepop"]},
         "objective.correction = ['token_tis', 'icepop']", "as a weight twice",
          "one of them, with any of the masks"),
        ({"name": "grpo", "correction": ["k3_mask", "k3_mask"]},
         "objective.correction = ['k3_mask', 'k3_mask']", "twice", "each name once"),
        ({"name": "gspo", "correction": ["sequence_mask", "token_tis"]},
         "objective.correction = ['sequence_mask', 'token_tis']", "token_tis weights single tokens",
         "sequence_tis, sequence_mask"),
        ({"name": "grpo", "correction": ["sequence_mask", "token_tis"], "correction_high": 2.0},
         "objective.correction_high = 2.0", "one number for several",
         "{sequence_mask: NUMBER, token_tis: NUMBER}"),
        ({"name": "grpo", "correction": "token_tis", "correction_high": {"icepop": 2.0}},
         "objective.correction_high = {'icepop': 2.0}", "nothing reads icepop", "token_tis"),
        ({"name": "grpo", "correction": ["k3_mask", "token_tis"],
          "correction_low": {"token_tis": 1.0}},
         "objective.correction_low = {'token_tis': 1.0}", "correction k3_mask and token_tis",
         "null"),
        ({"name": "grpo", "correction": ["sequence_mask", "token_tis"],
          "correction_low": {"sequence_mask": 1.2}},
         "objective.correction_low = {'sequence_mask': 1.2}", "every response",
         "below correction_high = 1.01"),
        ({"name": "grpo", "correction": ["k3_mask", "token_tis"], "old_logprobs": "rollout"},
         "objective.correction = ['k3_mask', 'token_tis']", "they are the same", "none"),
        ({"advantage": "gdpo", "kl": "k1", "kl_coefficient": 0.1, "kl_in": "reward"},
         "objective.kl_in = 'reward'", "no single reward", "loss"),
        ({"distillation": {"coefficient": 2.0}},
         "objective.distillation.coefficient = 2.0", "nothing reads it without", "1.0"),
        ({"distillation": {"form": "forward_kl_topk"}},
         "objective.distillation.form = 'forward_kl_topk'", "nothing reads it", "reverse_kl"),
        ({"distillation": {"url": "u", "top_k": 5}},
         "objective.distillation.top_k = 5", "form = reverse_kl", "20, or a form with topk"),
        ({"distillation": {"url": "u", "teacher": "t"}},
         "objective.distillation.url = 'u'", "a teacher already", "null"),
        ({"distillation": {"url": "u", "field": "domain"}},
         "objective.distillation.field = 'domain'", "there are no", "null"),
        ({"distillation": {"teachers": {"a": {"url": "u"}}}},
         "objective.distillation.field = null", "needs the field that names",
          "the name of a field"),
        ({"distillation": {"field": "f", "url": "u", "teachers": {"a": {"url": "u"}}}},
         "objective.distillation.url = 'u'", "teachers names the teachers", "null"),
        ({"distillation": {"field": "f", "teachers": {"a": {"url": "u", "teacher": "t"}}}},
         "objective.distillation.teachers.a.url = 'u'", "already, teachers.a.teacher", "null"),
        ({"distillation": {"field": "f", "teachers": {"a": {}, "b": {}}}},
         "objective.distillation.teachers = 'a, b'", "none of them", "at least one that has"),
        ({"kl": "k3_unbiased", "kl_coefficient": 0.1, "kl_in": "reward"},
         "objective.kl = 'k3_unbiased'", "is 1 where the reward", "k3, or objective.kl_in = loss"),
        # rules on ratios that they are not defined on
        ({"name": "vespo", "rule": "min_clip"}, "objective.rule = 'min_clip'",
         "not defined on ratio sequence_product_token", "gamma_weight"),
        ({"name": "gspo", "rule": "binary_kl_mask"}, "objective.rule = 'binary_kl_mask'",
         "not defined on ratio sequence", "min_clip"),
        ({"name": "gspo", "rule": "masked"}, "objective.rule = 'masked'",
         "not defined on ratio sequence", "min_clip, dual_clip, soft_gate, geometric_clip"),
        ({"name": "grpo", "rule": "geometric_clip"}, "objective.rule = 'geometric_clip'",
         "not defined on ratio token", "min_clip, dual_clip, capped, soft_gate, masked"),
        # Bug 11: numbers that nothing reads.
        *(
            ({"name": name, key: 0.2}, f"objective.{key} = 0.2", "nothing reads it", "null")
            for name, key in (("cispo", "clip_low"), ("sapo", "clip_high"),
                              ("grpo", "tau_positive"), ("grpo", "tau_negative"),
                              ("gspo", "log_clip"))
        ),
        ({"name": "gspo", "dual_clip": 3.0}, "objective.dual_clip = 3.0", "nothing reads it",
         "null"),
        ({"name": "grpo", "correction_high": 2.0}, "objective.correction_high = 2.0",
         "nothing reads it with correction none", "null"),
        ({"name": "grpo", "correction": "token_tis", "correction_low": 0.5},
         "objective.correction_low = 0.5", "correction token_tis", "null"),
        ({"options": {"beta": 1}}, "objective.options = {'beta': 1}", "nothing reads it",
         "{}, or objective.import_path"),
        ({"name": "dr_grpo", "advantage_std": "population"},
         "objective.advantage_std = 'population'", "advantage group_mean does not read it",
         "sample"),
        ({"advantage": "group_mean", "advantage_import_path": "mine:advantage"},
         "objective.advantage = 'group_mean'", "replaces it", "null"),
        ({"advantage_std": "population", "advantage_import_path": "mine:advantage"},
         "objective.advantage_std = 'population'", "a custom advantage does not read it",
         "sample"),
        ({"kl_coefficient": 0.1}, "objective.kl_coefficient = 0.1", "with kl = none", "null"),
        ({"kl": "k3"}, "objective.kl_coefficient = null", "needed with kl = k3", "from 0"),
        ({"kl_in": "reward"}, "objective.kl_in = 'reward'", "with kl = none", "loss"),
        ({"reference_offload": True}, "objective.reference_offload = true", "with kl = none",
         "false"),
        *(
            (OWN | {key: value}, f"objective.{key} = {value!r}", "only objective.options", unset)
            for key, value, unset in (
                ("ratio", "token", "null"), ("rule", "capped", "null"), ("clip_low", 0.1, "null"),
                ("aggregation", "token_sum", "null"), ("correction", "icepop", "null"),
                ("clip_high", 0.1, "null"), ("dual_clip", 3.0, "null"),
                ("off_policy_mask", 0.1, "null"), ("entropy_coefficient", 0.1, "0.0"),
            )
        ),
        (OWN | {"allow_wide_clip": True}, "objective.allow_wide_clip = true",
         "only objective.options", "false"),
        (OWN | {"kl": "k3", "kl_coefficient": 0.1}, "objective.kl = 'k3'", "its own terms",
         "none, or objective.kl_in = reward"),
        (OWN | {"kl_coefficient": 0.1}, "objective.kl_coefficient = 0.1", "with kl = none", "null"),
        (OWN | {"kl": "k1", "kl_in": "reward"}, "objective.kl_coefficient = null", "needed",
         "from 0"),
    ],
)  # fmt: skip
def test_what_does_not_mix_is_refused_in_one_line(keys, key_and_value, reason, legal):
    (line,) = problems(**keys)
    assert line.startswith(f"{key_and_value}: "), line
    said, _, allowed = line.partition("; allowed: ")
    assert reason in said, line
    assert legal in allowed, line
    assert "\n" not in line


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2, "allow_wide_clip": True},
        {"name": "gspo", "clip_low": 0.049, "clip_high": 0.049},
        # A product of many ratios easily moves far away from 1.
        {"name": "reinforce_leave_one_out", "clip_low": 0.3},
        {"name": "reinforce_leave_one_out", "correction": "sequence_product_tis"},
        {"name": "grpo", "correction": "sequence_product_tis"},
        {"name": "gspo", "correction": "sequence_tis", "correction_high": 1.01},
        {"name": "luspo", "correction": "k3_mask"},
        {"name": "minirl", "correction": "sequence_mask"},
        {"name": "minirl", "correction": ["sequence_mask", "token_k2_mask", "worst_token_mask"]},
        {
            "name": "grpo",
            "correction": ["sequence_mask", "token_tis"],
            "correction_low": {"sequence_mask": 0.999},
            "correction_high": {"sequence_mask": 1.001, "token_tis": 3.0},
        },
        {
            "name": "reinforce_leave_one_out",
            "correction": ["sequence_mask", "sequence_product_tis"],
        },
        {"name": "grpo", "correction": ["kpop"], "correction_high": 0.2},
        {"name": "gspo", "correction": []},
        {"name": "dapo", "advantage": "gdpo", "advantage_std": "population"},
        {"distillation": {"url": "u", "form": "forward_kl_topk", "top_k": 64}},
        {
            "distillation": {
                "field": "f",
                "teachers": {"a": {"url": "u"}, "b": {"teacher": "t"}, "c": {}},
            }
        },
        {"kl": "k3_unbiased", "kl_coefficient": 0.1},
        {"name": "minirl", "old_logprobs": "rollout"},
        {"name": "dapo", "correction": "icepop", "correction_low": 0.2, "correction_high": 3.0},
        {"name": "grpo", "aggregation": "token_sum"},
        {"name": "luspo", "rule": "soft_gate"},
        {"name": "gspo", "rule": "dual_clip", "dual_clip": 1.01},
        {"name": "gspo", "off_policy_mask": 0.1, "entropy_coefficient": 0.01},
        {"name": "gspo", "correction": "none", "old_logprobs": "rollout"},
        {"name": "grpo", "advantage": "batch_std", "advantage_std": "population"},
        {"kl": "k3", "kl_coefficient": 0.1, "reference_offload": True},
        {"kl": "k1", "kl_coefficient": 0.1, "kl_in": "reward"},
        OWN | {"options": {"beta": 1.0}},
        OWN | {"kl": "k1", "kl_coefficient": 0.1, "kl_in": "reward"},
        OWN | {"advantage": "group_mean", "reference_offload": True},
        {"advantage_import_path": "mine:advantage"},
    ],
)
def test_what_mixes_passes(keys):
    assert problems(**keys) == []


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_that_a_refusal_offers_is_accepted(rule):
    for name in RECIPES:
        found = problems(name=name, rule=rule)
        refused = [line for line in found if line.startswith("objective.rule")]
        offered = refused[0].rpartition(": ")[2].split(", ") if refused else []
        for other in offered:
            assert "objective.rule" not in " ".join(problems(name=name, rule=other)), name


def test_several_problems_come_at_once():
    lines = problems(name="gspo", clip_low=0.2, correction="token_tis", dual_clip=3.0, kl="k3")
    assert [line.split(" ")[0] for line in lines] == [
        "objective.correction",
        "objective.dual_clip",
        "objective.clip_low",
        "objective.kl_coefficient",
    ]


@pytest.mark.parametrize("name", ["grpo", "dapo", "minirl", "reinforce_leave_one_out"])
def test_a_clip_range_of_sequences_is_warned_of_with_other_ratios(name):
    [line] = narrow_clip_warnings(ObjectiveSection(name=name, clip_low=0.04, clip_high=0.04))
    assert line.startswith("objective.clip_low = 0.04 and objective.clip_high = 0.04: ")
    assert line.endswith("objective.clip_low=null objective.clip_high=null")
    assert narrow_clip_warnings(ObjectiveSection(name=name)) == []


@pytest.mark.parametrize(
    "keys",
    [
        *({"name": name, "clip_low": 0.04} for name in ("gspo", "gspo_token", "luspo")),
        {"name": "grpo", "clip_low": 0.1},
        {"name": "cispo"},  # only an upper bound
        {"name": "gmpo"},
        OWN,
    ],
)
def test_other_clip_ranges_are_not_warned_of(keys):
    assert narrow_clip_warnings(ObjectiveSection(**keys)) == []
