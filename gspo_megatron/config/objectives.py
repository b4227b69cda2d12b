"""The section `objective`: the named objectives, their parts and numbers, and checks that these fit
together.

The functions of the parts are in gspo_megatron/objectives/; this file needs no torch. To add an
objective, add an entry to RECIPES. To add a rule, add an entry to RULES and its function to
objectives/parts.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Field

from gspo_megatron.config.distillation import DistillationSection, distillation_problems
from gspo_megatron.config.section import ImportPath, Positive, Section, harmless, key, shapes
from gspo_megatron.errors import problem


@dataclass(frozen=True)
class Recipe:
    """The parts of an objective."""

    ratio: str  # one of RATIOS
    rule: str  # one of RULES
    aggregation: str  # one of AGGREGATIONS
    advantage: str = "group_mean_std"
    parameters: Mapping[str, float] = field(default_factory=dict)  # the numbers of the rule
    # Key: a name in CORRECTIONS; value: its bounds. The weights of all corrections are multiplied.
    corrections: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    source: str = ""

    @property
    def clips_sequences(self) -> bool:
        """Whether the clip range applies to the ratios of sequences. These are geometric means,
        which stay close to 1."""
        of_sequences = self.ratio in ("sequence", "sequence_token")
        return of_sequences and self.rule in ("min_clip", "dual_clip")

    @property
    def corrects_tokens(self) -> bool:
        """Whether the weights of the corrections differ between tokens of a sequence."""
        return any(CORRECTIONS[name].level == "token" for name in self.corrections)

    @property
    def terms(self) -> Literal["token", "sequence"]:
        """Whether the surrogate has a term for each `sequence` or for each `token`."""
        return "sequence" if self.ratio in ("sequence", "sequence_product") else "token"


def _recipe(
    parts: str, source: str, numbers: Mapping[str, float], advantage: str = "group_mean_std"
) -> Recipe:
    """Make a recipe. parts: ratio, rule and aggregation; source: a paper on arXiv."""
    ratio, rule, aggregation = parts.split()
    return Recipe(ratio, rule, aggregation, advantage, numbers, source=f"arXiv {source}")


# The numbers come from the papers. The keys `objective.*` can replace each of them.
_SEQUENCE_CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}
_TOKEN_CLIP = {"clip_low": 0.2, "clip_high": 0.27}
_PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_DAPO_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
_CISPO_CAP = {"clip_high": 4.0}  # so a weight is at most 5
_SAPO_GATE = {"tau_positive": 1.0, "tau_negative": 1.05}
_GMPO_CLIP = {"log_clip": 0.4}
_TOTAL_VARIATION = {"max_divergence": 0.15}
_BINARY_KL = {"max_divergence": 0.05}
_IPO_BOUND = {"max_divergence": 0.1, "log_ratio_penalty": 1e-3}
_VESPO_GAMMA = {
    "k_positive": 2.0,
    "lambda_positive": 3.0,
    "k_negative": 3.0,
    "lambda_negative": 2.0,
}
RECIPES: dict[str, Recipe] = {
    "gspo": _recipe("sequence min_clip sequence_mean", "2507.18071, eqs. 5-7", _SEQUENCE_CLIP),
    "gspo_token": _recipe(
        "sequence_token min_clip sequence_mean", "2507.18071, eqs. 13-14", _SEQUENCE_CLIP
    ),
    "grpo": _recipe(
        "token min_clip sequence_mean",
        "2402.03300, eq. 3; the clip range of the baseline in arXiv 2507.18071",
        _TOKEN_CLIP,
    ),
    "dapo": _recipe("token min_clip token_mean", "2503.14476, eq. 8", _DAPO_CLIP),
    "dr_grpo": _recipe(
        "token min_clip constant_length", "2503.20783, section 3.2", _PPO_CLIP, "group_mean"
    ),
    "cispo": _recipe(
        "token capped token_mean",
        "2506.13585, eqs. 4-5; the cap of 5 is that of arXiv 2510.13786",
        _CISPO_CAP,
    ),
    "sapo": _recipe("token soft_gate sequence_mean", "2511.20347", _SAPO_GATE),
    "gmpo": _recipe("sequence geometric_clip sequence_mean", "2507.20673, eq. 4", _GMPO_CLIP),
    "luspo": _recipe(
        "sequence min_clip token_sum", "2602.05261: GSPO times the length", _SEQUENCE_CLIP
    ),
    "minirl": _recipe("token masked token_sum", "2512.01374, section 3", _TOKEN_CLIP, "group_mean"),
    "reinforce_leave_one_out": _recipe(
        "sequence_product min_clip sequence_mean", "2402.14740", _PPO_CLIP, "leave_one_out"
    ),
    "dppo_tv": _recipe("token total_variation_mask token_mean", "2602.04879", _TOTAL_VARIATION),
    "dppo_kl": _recipe("token binary_kl_mask token_mean", "2602.04879", _BINARY_KL),
    "ipo": Recipe(
        *("token", "two_sided_mask", "token_mean", "group_mean"),
        parameters=_IPO_BOUND,
        source="prime-rl, its default loss since August 2026",
    ),
    "vespo": _recipe("sequence_product_token gamma_weight token_mean", "2602.10693", _VESPO_GAMMA),
}

RATIOS = ("token", "sequence", "sequence_token", "sequence_product", "sequence_product_token")
ADVANTAGES = ("group_mean_std", "group_mean", "batch_std", "leave_one_out", "max_rl", "gdpo")
AGGREGATIONS = ("sequence_mean", "token_mean", "token_sum", "constant_length")


@dataclass(frozen=True)
class Rule:
    """The treatment of ratios far from 1."""

    function: str  # name in objectives/parts.py; its keyword arguments are `defaults`
    ratios: tuple[str, ...]  # the ratios for which the rule is defined
    # The keys that the rule reads. A clip range in them is for single tokens.
    defaults: Mapping[str, float]

    @property
    def has_clip_range(self) -> bool:
        """Whether the rule clips on both sides of 1. All rules with this property interpret a range
        in the same way."""
        return "clip_low" in self.defaults


_CLIPPED_RATIOS = ("token", "sequence", "sequence_token", "sequence_product")
# The bound of dual clip comes from arXiv 1912.09729.
RULES: dict[str, Rule] = {
    "min_clip": Rule("min_clip", _CLIPPED_RATIOS, _TOKEN_CLIP),
    "dual_clip": Rule("dual_clip", _CLIPPED_RATIOS, {**_TOKEN_CLIP, "dual_clip": 3.0}),
    "capped": Rule("cispo_cap", ("token",), _CISPO_CAP),
    "soft_gate": Rule("sapo_gate", ("token", "sequence", "sequence_token"), _SAPO_GATE),
    "masked": Rule("policy_gradient_mask", ("token",), _TOKEN_CLIP),
    "geometric_clip": Rule("geometric_clip", ("sequence",), _GMPO_CLIP),
    "total_variation_mask": Rule("total_variation_mask", ("token",), _TOTAL_VARIATION),
    "binary_kl_mask": Rule("binary_kl_mask", ("token",), _BINARY_KL),
    "two_sided_mask": Rule("two_sided_mask", ("token",), _IPO_BOUND),
    "gamma_weight": Rule("gamma_weight", ("sequence_product_token",), _VESPO_GAMMA),
}


@dataclass(frozen=True)
class Correction:
    """Weights for responses that another engine sampled.

    Its function in objectives/parts.py has the name that the correction has in the configuration.
    """

    level: Literal["token", "sequence"]  # whether each token or each sequence has a weight
    # "mask": each weight is 0 or 1. "weight": a weight depends on k, the ratio of the old policy to
    # the rollout policy.
    kind: Literal["weight", "mask"]
    defaults: Mapping[str, float]  # the keys that the correction reads
    # The name of a function of a token's log k (in objectives/parts.py), whose values are summed
    # over a sequence. "": log k itself is summed.
    summed: Literal["", "k3", "is_outside"] = ""


# Bounds for a geometric mean over a sequence, whose noise is about 1e-3 (arXiv 2507.18071).
_GEOMETRIC = {"correction_low": 0.99, "correction_high": 1.01}
CORRECTIONS: dict[str, Correction] = {
    "token_tis": Correction("token", "weight", {"correction_high": 2.0}),
    "icepop": Correction("token", "weight", {"correction_low": 0.5, "correction_high": 5.0}),
    "kpop": Correction("token", "weight", {"correction_high": 0.1}),
    "token_k1_mask": Correction("token", "mask", {"correction_low": 0.5, "correction_high": 2.0}),
    "token_k2_mask": Correction("token", "mask", {"correction_high": 0.25}),
    "token_k3_mask": Correction("token", "mask", {"correction_high": 0.25}),
    "sequence_tis": Correction("sequence", "weight", {"correction_high": 2.0}),
    "sequence_mask": Correction("sequence", "mask", _GEOMETRIC),
    "sequence_product_tis": Correction("sequence", "weight", {"correction_high": 2.0}),
    "k3_mask": Correction("sequence", "mask", {"correction_high": 1e-3}, "k3"),
    "worst_token_mask": Correction(
        "sequence", "mask", {"correction_low": 0.1, "correction_high": 10.0}, "is_outside"
    ),
}

# A ratio of whole sequences mostly stays within 1e-3 of 1. A clip range of 0.05 or more clips so
# few sequences that the algorithm is no longer GSPO. A range of 0.2 usually comes from a
# configuration with a token-level objective.
WIDE_CLIP = 0.05

_PARTS = ("ratio", "rule", "aggregation", "advantage")
# The keys of the numbers that rules read, and of the numbers that corrections read.
NUMBERS = tuple(dict.fromkeys(name for rule in RULES.values() for name in rule.defaults))
BOUNDS = ("correction_low", "correction_high")
_CorrectionName = Literal[tuple(CORRECTIONS)]  # ty: ignore[invalid-type-form]
_Bound = Annotated[float, Field(gt=0)]


# A part or number that is null has the value of the named objective.
class ObjectiveSection(Section):
    """The section `objective`. The keys can replace each part and number of the named objective."""

    name: Literal[tuple(RECIPES)] = shapes("gspo", "the objective; see docs/objectives.md")  # ty: ignore[invalid-type-form]
    import_path: ImportPath | None = key(
        "code", None, "a custom objective function, package.module:function; replaces name"
    )
    options: dict[str, Any] = shapes({}, "keyword arguments of the custom objective")
    ratio: Literal[RATIOS] | None = shapes(  # ty: ignore[invalid-type-form]
        None,
        "the importance ratio: of each token (token), or of a sequence: the geometric mean over "
        "its tokens (sequence, sequence_token) or their product (sequence_product)",
    )
    rule: Literal[tuple(RULES)] | None = shapes(None, "treatment of ratios far from 1")  # ty: ignore[invalid-type-form]
    aggregation: Literal[AGGREGATIONS] | None = shapes(  # ty: ignore[invalid-type-form]
        None,
        "how terms become one number: sequence_mean gives each sequence the same weight. The "
        "others give each token the same weight, and divide by the tokens of the mini-batch "
        "(token_mean), by its sequences (token_sum), or by its sequences times max_response_tokens "
        "(constant_length)",
    )
    advantage: Literal[ADVANTAGES] | None = shapes(  # ty: ignore[invalid-type-form]
        None,
        "reward minus the group's mean (group_mean), then divided by the group's std "
        "(group_mean_std), by the batch's std (batch_std) or by the group's mean (max_rl); "
        "leave_one_out: reward minus the mean of the other rewards in the group; gdpo: the sum of "
        "group_mean_std over the parts of the reward",
    )
    correction: Literal[("none", *CORRECTIONS)] | list[_CorrectionName] | None = shapes(  # ty: ignore[invalid-type-form]
        None,
        "weights that correct for old log-probs that differ from the rollout engine's; if several "
        "corrections are listed, their weights are multiplied",
    )
    clip_low: float | None = shapes(None, "the ratio is clipped below at 1 - clip_low", gt=0, lt=1)
    clip_high: float | None = shapes(None, "the ratio is clipped above at 1 + clip_high", gt=0)
    allow_wide_clip: bool = shapes(
        False, "allow a clip range of sequence ratios that is as wide as for token ratios"
    )
    dual_clip: float | None = shapes(
        None,
        "bound of the rule dual_clip: the largest ratio that counts if the advantage is below 0",
        gt=1,
    )
    tau_positive: float | None = shapes(
        None, "temperature of the soft gate for advantages above 0", gt=0
    )
    tau_negative: float | None = shapes(
        None, "temperature of the soft gate for all other advantages", gt=0
    )
    log_clip: float | None = shapes(None, "bound of a token's log-ratio in a geometric mean", gt=0)
    max_divergence: float | None = shapes(
        None,
        "bound on the divergence between a token's probabilities under the old and the new policy; "
        "the rule may mask tokens beyond it; the divergence is the difference, or with rule "
        "binary_kl_mask the binary KL divergence",
        gt=0,
    )
    log_ratio_penalty: float | None = shapes(
        None, "weight of the squared log-ratio that is subtracted from each token's term", ge=0
    )
    k_positive: float | None = shapes(
        None, "k in the weight W^k exp(lambda (1 - W)) of advantages of 0 and above", gt=0
    )
    lambda_positive: float | None = shapes(
        None, "lambda in the weight W^k exp(lambda (1 - W)) of advantages of 0 and above", gt=0
    )
    k_negative: float | None = shapes(
        None, "k in the weight W^k exp(lambda (1 - W)) of negative advantages", gt=0
    )
    lambda_negative: float | None = shapes(
        None, "lambda in the weight W^k exp(lambda (1 - W)) of negative advantages", gt=0
    )
    correction_low: _Bound | dict[_CorrectionName, _Bound] | None = shapes(
        None,
        "smallest ratio of old policy to rollout that counts; for several corrections: "
        "{name: number}",
    )
    correction_high: _Bound | dict[_CorrectionName, _Bound] | None = shapes(
        None,
        "largest ratio of old policy to rollout that counts: a cap, or the bound of a mask; for "
        "several corrections {name: number}",
    )
    off_policy_mask: float | None = shapes(
        None,
        "a sequence with a negative advantage is dropped when the mean of log(old / new policy) "
        "over its tokens exceeds this number; null: no sequence is dropped",
        gt=0,
    )
    max_token_staleness: int | None = shapes(
        None,
        "largest staleness of a token that is learned from, in steps; null: all tokens, up to "
        "rollout.max_staleness",
        ge=0,
    )
    old_logprobs: Literal["auto", "recompute", "rollout"] = shapes(
        "auto",
        "the denominator of the ratio: a forward pass of the trainer before the first mini-batch, "
        "or the log-probs that the rollout engine reported; auto: the engine's log-probs if both "
        "are equal (rollout.engine = megatron in fp32), else the forward pass",
    )
    mini_batches: Positive = shapes(
        4, "number of mini-batches, and so of optimizer updates, of an RL step"
    )
    advantage_std: Literal["sample", "population"] = shapes(
        "sample",
        "whether a standard deviation divides by the number of rewards minus 1 (sample) or by "
        "their number (population)",
    )
    advantage_import_path: ImportPath | None = key(
        "code", None, "a custom advantage function, package.module:function; replaces advantage"
    )
    kl: Literal["none", "k1", "k2", "k3", "k3_unbiased"] = shapes(
        "none", "estimator of the KL divergence to the policy that RL started from"
    )
    kl_coefficient: float | None = shapes(
        None, "weight of the KL divergence; 0.0: it is only measured", ge=0
    )
    kl_in: Literal["loss", "reward"] = shapes(
        "loss",
        "where the KL divergence goes: into each token's loss, or subtracted from the reward",
    )
    reference_offload: bool = harmless(
        False, "keep idle weights of a reference or a teacher in host memory"
    )
    distillation: DistillationSection = Field(default_factory=DistillationSection)
    entropy_coefficient: float = shapes(
        0.0, "weight of a bonus on the mean entropy of the response tokens", ge=0
    )


def may_have_reference(section: ObjectiveSection) -> bool:
    """Return whether a run may have a reference policy: for the divergence from it, or because a
    custom objective may read it."""
    return section.kl != "none" or section.import_path is not None


def resolve_objective(section: ObjectiveSection) -> Recipe:
    """Return the recipe of `objective.name`, with the parts that the section sets, and with all
    numbers."""
    named = RECIPES[section.name]
    chosen = {part: getattr(section, part) for part in _PARTS if getattr(section, part) is not None}
    recipe = replace(named, **chosen)
    parameters = _rule_numbers(named, recipe)
    own_values = {name: getattr(section, name) for name in parameters}
    parameters |= {name: value for name, value in own_values.items() if value is not None}
    corrections = {name: _bounds(section, name) for name in _corrections_of(section)}
    return replace(recipe, parameters=parameters, corrections=corrections)


def narrow_clip_warnings(section: ObjectiveSection) -> list[str]:
    """Return a line if the clip range of single tokens is one for whole sequences. This happens if
    `objective.name` of a configuration for GSPO is changed, and its clip range stays."""
    if section.import_path is not None:
        return []
    recipe = resolve_objective(section)
    if recipe.clips_sequences or not RULES[recipe.rule].has_clip_range:
        return []
    narrow = {name: recipe.parameters[name] for name in ("clip_low", "clip_high")}
    if min(narrow.values()) >= WIDE_CLIP:
        return []
    values = " and ".join(f"objective.{name} = {value:g}" for name, value in narrow.items())
    return [
        f"{values}: a range for ratios of whole sequences; {section.name} clips ratios of "
        f"{'whole products' if recipe.ratio == 'sequence_product' else 'single tokens'}, which "
        "vary much more. For its own range: objective.clip_low=null objective.clip_high=null"
    ]


def learns_from_parts(section: ObjectiveSection) -> bool:
    """Return whether each part of a reward has an advantage of its own (gdpo), instead of the sum
    of the parts."""
    own = section.advantage_import_path is not None
    return not own and resolve_objective(section).advantage == "gdpo"


def _corrections_of(section: ObjectiveSection) -> list[str]:
    value = section.correction
    return value if isinstance(value, list) else [] if value in (None, "none") else [value]


def _bounds(section: ObjectiveSection, name: str) -> dict[str, float]:
    """Return the bounds of a correction. In the section, a bound is a mapping from names of
    corrections to numbers. If there is only one correction, a single number is enough."""
    bounds = dict(CORRECTIONS[name].defaults)
    for side in bounds:
        bound = getattr(section, side)
        value = bound.get(name) if isinstance(bound, dict) else bound
        bounds[side] = bounds[side] if value is None else value
    return bounds


def _rule_numbers(named: Recipe, recipe: Recipe) -> dict[str, float]:
    """Return the default numbers of the recipe's rule.

    The numbers come from the named objective if they have the same meaning for this rule and this
    ratio, else from the rule.
    """
    rule, rule_named = RULES[recipe.rule], RULES[named.rule]
    same_ratio = recipe.ratio == named.ratio or (recipe.clips_sequences and named.clips_sequences)
    same_rule = rule is rule_named or (rule.has_clip_range and rule_named.has_clip_range)
    numbers = dict(rule.defaults)
    if recipe.clips_sequences:
        numbers |= _SEQUENCE_CLIP
    if same_ratio and same_rule:
        numbers |= {name: named.parameters[name] for name in numbers if name in named.parameters}
    return numbers


def objective_problems(section: ObjectiveSection, *, reads_std: bool = False) -> Iterator[str]:
    """Yield the problems of the section: parts that do not fit together, unread numbers. reads_std:
    whether something else reads advantage_std."""
    recipe = resolve_objective(section)
    rules = (_custom_objective,) if section.import_path is not None else _RULES_OF_RECIPES
    for rule in (*rules, _advantage, _regularisation):
        for name, wrong in rule(section, recipe):
            if name == "advantage_std" and reads_std:
                continue
            value = attrgetter(name)(section)
            if value is None:  # then the recipe's value is used
                value = recipe.parameters.get(name, getattr(recipe, name, None))
            yield problem(f"objective.{name}", value, wrong)
    for name, value, wrong in distillation_problems(section.distillation):
        yield problem(f"objective.distillation.{name}", value, wrong)


_Problems = Iterator[tuple[str, str]]  # a key of the section, and what is wrong with its value


def _custom_objective(section: ObjectiveSection, _: Recipe) -> _Problems:
    parts = ("ratio", "rule", "aggregation", "correction", *NUMBERS, *BOUNDS)
    others = ("off_policy_mask", "allow_wide_clip", "entropy_coefficient")
    why = "a custom objective reads only objective.options"
    yield from section.unread((*parts, *others), why)
    if section.kl != "none" and section.kl_in == "loss":
        wrong = "a custom objective has its own terms in the loss"
        yield "kl", f"{wrong}; allowed: none, or objective.kl_in = reward"


def _parts_mix(section: ObjectiveSection, recipe: Recipe) -> _Problems:
    if recipe.ratio not in RULES[recipe.rule].ratios:
        allowed = ", ".join(name for name, rule in RULES.items() if recipe.ratio in rule.ratios)
        yield "rule", f"is not defined on ratio {recipe.ratio}; allowed: {allowed}"
    named = RECIPES[section.name]
    sums_tokens = recipe.ratio != "token" and recipe.aggregation != "sequence_mean"
    # A named recipe that has this combination itself (luspo) intends it; else it is a mistake.
    if sums_tokens and (recipe.ratio, recipe.aggregation) != (named.ratio, named.aggregation):
        wrong = f"a sum over tokens weights the ratio of a sequence ({recipe.ratio}) by its length"
        allowed = "sequence_mean, or objective.name = luspo if you want this"
        yield "aggregation", f"{wrong}; allowed: {allowed}"


def _corrections_mix(section: ObjectiveSection, recipe: Recipe) -> _Problems:
    names = _corrections_of(section)
    for name in dict.fromkeys(names):
        for wrong in _correction_problems(name, recipe):
            yield "correction", f"{name} {wrong}" if len(names) > 1 else wrong
    weights = [name for name in names if CORRECTIONS[name].kind == "weight"]
    if len(set(names)) < len(names):
        yield "correction", "a name is listed twice; allowed: each name once"
    elif len(weights) > 1:
        wrong = f"{' and '.join(weights)} would apply the same ratio as a weight twice"
        masks = ", ".join(name for name, each in CORRECTIONS.items() if each.kind == "mask")
        yield "correction", f"{wrong}; allowed: one of them, with any of the masks {masks}"
    if names and section.old_logprobs == "rollout":
        wrong = "corrects for old log-probs that differ from the rollout's"
        yield "correction", f"{wrong}; with old_logprobs = rollout they are the same; allowed: none"


def _correction_problems(name: str, recipe: Recipe) -> Iterator[str]:
    """Yield why a correction does not fit the recipe's ratio and rule."""
    correction = CORRECTIONS[name]
    of_sequences = [other for other, each in CORRECTIONS.items() if each.level == "sequence"]
    if correction.level == "token" and recipe.ratio != "token":
        wrong = f"weights single tokens, but a whole sequence has one ratio ({recipe.ratio})"
        allowed = ", ".join(each for each in of_sequences if "product" not in each)
        yield f"{wrong}; allowed: {allowed}"
    if name == "sequence_product_tis" and recipe.ratio in ("sequence", "sequence_token"):
        wrong = "its product over all tokens changes exponentially with the length, while ratio "
        wrong += f"{recipe.ratio} is a geometric mean: it makes the update many times smaller"
        yield f"{wrong}; allowed: sequence_tis"
    if recipe.rule == "masked" and correction.kind == "weight":
        wrong = "rule masked already weights by the ratio to the rollout's log-probs"
        masks = (other for other, each in CORRECTIONS.items() if each.kind == "mask")
        yield f"{wrong}; allowed: {', '.join(['none', *masks])}"


def _bounds_are_read(section: ObjectiveSection, recipe: Recipe) -> _Problems:
    names = _corrections_of(section)
    readers = {side: [n for n in names if side in CORRECTIONS[n].defaults] for side in BOUNDS}
    for side, those in readers.items():
        given = getattr(section, side)
        if given is None:
            continue
        if not those:
            what = f"correction {' and '.join(names) or 'none'}"
            yield side, f"nothing reads it with {what}; allowed: null"
        elif isinstance(given, dict):
            for name in sorted(given.keys() - set(those)):
                yield side, f"nothing reads {name} there; allowed: {', '.join(those)}"
        elif len(names) > 1:
            example = "{" + ", ".join(f"{name}: NUMBER" for name in those) + "}"
            yield side, f"one number for several corrections; allowed: {example}"
    for bounds in recipe.corrections.values():
        low, high = (bounds.get(side) for side in BOUNDS)
        if low is not None and high is not None and low >= high:
            wrong = "every response would be dropped; allowed: "
            if section.correction_high is None:
                yield "correction_low", f"{wrong}below correction_high = {high}"
            else:
                yield "correction_high", f"{wrong}above correction_low = {low}"


def _numbers_are_read(section: ObjectiveSection, recipe: Recipe) -> _Problems:
    why = f"nothing reads it with rule {recipe.rule}, which reads {', '.join(recipe.parameters)}"
    yield from section.unread([name for name in NUMBERS if name not in recipe.parameters], why)
    if section.options:
        wrong = "nothing reads it without a custom objective"
        yield (
            "options",
            f"{wrong}; allowed: {{}}, or objective.import_path = package.module:function",
        )


def _clip_range_is_sane(section: ObjectiveSection, recipe: Recipe) -> _Problems:
    if not recipe.clips_sequences:
        why = f"{section.name} clips no ratios of whole sequences"
        yield from section.unread(["allow_wide_clip"], why)
        return
    for name in ("clip_low", "clip_high"):
        if not section.allow_wide_clip and (getattr(section, name) or 0) >= WIDE_CLIP:
            wrong = f"a range for ratios of single tokens; {section.name} clips ratios of whole "
            wrong += "sequences, which vary much less, so it would clip few of them"
            allowed = f"below {WIDE_CLIP}, or objective.allow_wide_clip = true"
            yield name, f"{wrong}; allowed: {allowed}"


_RULES_OF_RECIPES = (
    _parts_mix,
    _corrections_mix,
    _bounds_are_read,
    _numbers_are_read,
    _clip_range_is_sane,
)


def _advantage(section: ObjectiveSection, recipe: Recipe) -> _Problems:
    reader = f"advantage {recipe.advantage}"
    divides = recipe.advantage in ("group_mean_std", "batch_std", "gdpo")
    if section.advantage_import_path is not None:
        reader, divides = "a custom advantage", False
        yield from section.unread(["advantage"], "objective.advantage_import_path replaces it")
    if not divides:
        yield from section.unread(["advantage_std"], f"{reader} does not read it")


def _regularisation(section: ObjectiveSection, recipe: Recipe) -> _Problems:
    if section.kl == "none":
        # A custom objective may need a reference policy. The key also offloads teachers.
        reads = section.import_path is not None or section.distillation.folders
        names = [] if reads else ["reference_offload"]
        why = "nothing reads it with kl = none"
        yield from section.unread(["kl_coefficient", "kl_in", *names], why)
    elif section.kl_coefficient is None:
        yield "kl_coefficient", f"needed with kl = {section.kl}; allowed: from 0"
    if recipe.advantage == "gdpo" and section.kl_in == "reward":
        wrong = "with advantage gdpo there is no single reward to subtract the divergence from"
        yield "kl_in", f"{wrong}; allowed: loss"
    if section.kl == "k3_unbiased" and section.kl_in == "reward":
        wrong = "its ratio of new to old policy is 1 where the reward is computed; allowed: k3"
        yield "kl", f"{wrong}, or objective.kl_in = loss"
