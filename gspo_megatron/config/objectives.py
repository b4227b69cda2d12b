"""The objectives by name: of which parts each is made, with what numbers, and what does not mix.

The parts themselves are in gspo_megatron/objectives/, under the same names; this table needs no
torch, so that a configuration is judged before anything is loaded. A further objective is one more
entry here, and at most one more part there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gspo_megatron.config.problems import format_value, problem

if TYPE_CHECKING:
    from gspo_megatron.config.schema import ObjectiveSection


@dataclass(frozen=True)
class Recipe:
    """What an objective is made of."""

    ratio: str  # token | sequence | sequence_token | sequence_product
    rule: str  # what is done with a ratio far from 1
    aggregation: str  # sequence_mean | token_mean | token_sum | constant_length
    advantage: str = "group_mean_std"
    parameters: Mapping[str, float] = field(default_factory=dict)  # of the rule
    correction: str = "none"
    source: str = ""

    @property
    def clips_sequences(self) -> bool:
        """Whether the clip range is one for geometric means over a sequence, close around 1."""
        return self.ratio in ("sequence", "sequence_token") and self.rule in (
            "min_clip",
            "dual_clip",
        )

    @property
    def terms(self) -> str:
        """Whether the surrogate has a term for each `sequence` or for each `token`."""
        return "token" if self.ratio in ("token", "sequence_token") else "sequence"


# The numbers are those of the papers; `objective.*` keys replace them one by one.
RECIPES: dict[str, Recipe] = {
    "gspo": Recipe(
        "sequence",
        "min_clip",
        "sequence_mean",
        parameters={"clip_low": 3e-4, "clip_high": 4e-4},
        source="arXiv 2507.18071, eqs. 5-7",
    ),
    "gspo_token": Recipe(
        "sequence_token",
        "min_clip",
        "sequence_mean",
        parameters={"clip_low": 3e-4, "clip_high": 4e-4},
        source="arXiv 2507.18071, eqs. 13-14",
    ),
    "grpo": Recipe(
        "token",
        "min_clip",
        "sequence_mean",
        parameters={"clip_low": 0.2, "clip_high": 0.27},
        source="arXiv 2402.03300, eq. 3; the clip range of the baseline in arXiv 2507.18071",
    ),
    "dapo": Recipe(
        "token",
        "min_clip",
        "token_mean",
        parameters={"clip_low": 0.2, "clip_high": 0.28},
        source="arXiv 2503.14476, eq. 8",
    ),
    "dr_grpo": Recipe(
        "token",
        "min_clip",
        "constant_length",
        advantage="group_mean",
        parameters={"clip_low": 0.2, "clip_high": 0.2},
        source="arXiv 2503.20783, section 3.2",
    ),
    "cispo": Recipe(
        "token",
        "capped",
        "token_mean",
        parameters={"clip_high": 4.0},  # a weight of at most 5
        source="arXiv 2506.13585, eqs. 4-5; the cap of 5 is that of arXiv 2510.13786",
    ),
    "sapo": Recipe(
        "token",
        "soft_gate",
        "sequence_mean",
        parameters={"tau_positive": 1.0, "tau_negative": 1.05},
        source="arXiv 2511.20347",
    ),
    "gmpo": Recipe(
        "sequence",
        "geometric_clip",
        "sequence_mean",
        parameters={"log_clip": 0.4},
        source="arXiv 2507.20673, eq. 4",
    ),
    "luspo": Recipe(
        "sequence",
        "min_clip",
        "token_sum",
        parameters={"clip_low": 3e-4, "clip_high": 4e-4},
        source="arXiv 2602.05261: GSPO times the length",
    ),
    "minirl": Recipe(
        "token",
        "masked",
        "token_sum",
        advantage="group_mean",
        parameters={"clip_low": 0.2, "clip_high": 0.27},
        source="arXiv 2512.01374, section 3",
    ),
    "reinforce_leave_one_out": Recipe(
        "sequence_product",
        "min_clip",
        "sequence_mean",
        advantage="leave_one_out",
        parameters={"clip_low": 0.2, "clip_high": 0.2},
        source="arXiv 2402.14740",
    ),
}

# What each part reads of the `objective` section, and on which ratios a rule is defined.
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "min_clip": (
        ("clip_low", "clip_high"),
        ("token", "sequence", "sequence_token", "sequence_product"),
    ),
    "dual_clip": (
        ("clip_low", "clip_high", "dual_clip"),
        ("token", "sequence", "sequence_token", "sequence_product"),
    ),
    "capped": (("clip_high",), ("token",)),
    "soft_gate": (("tau_positive", "tau_negative"), ("token", "sequence", "sequence_token")),
    "masked": (("clip_low", "clip_high"), ("token",)),
    "geometric_clip": (("log_clip",), ("sequence",)),
}
AGGREGATIONS = ("sequence_mean", "token_mean", "token_sum", "constant_length")
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "token_tis": ("correction_high",),
    "icepop": ("correction_low", "correction_high"),
    "sequence_tis": ("correction_high",),
    "sequence_mask": ("correction_low", "correction_high"),
    "sequence_product_tis": ("correction_high",),
    "k3_mask": ("correction_high",),
}
TOKEN_CORRECTIONS = ("token_tis", "icepop")
# Those that are weights; the others are masks, 0 or 1.
_WEIGHTING_CORRECTIONS = (*TOKEN_CORRECTIONS, "sequence_tis", "sequence_product_tis")
# Where a part is chosen that the objective's own recipe does not have.
DEFAULTS: dict[str, float] = {
    "dual_clip": 3.0,  # arXiv 1912.09729
    "tau_positive": 1.0,
    "tau_negative": 1.05,
    "log_clip": 0.4,
}
_CLIP_RANGE = {True: (3e-4, 4e-4), False: (0.2, 0.27)}  # of sequences, of tokens
_CAP = 4.0  # CISPO's clip_high
_CLIPPING_RULES = ("min_clip", "dual_clip", "masked")  # to which a clip range means the same
CORRECTION_BOUNDS: dict[str, tuple[float | None, float]] = {
    "token_tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_tis": (None, 2.0),
    # a geometric mean over a sequence: arXiv 2507.18071's noise is of the order of 1e-3
    "sequence_mask": (0.99, 1.01),
    "sequence_product_tis": (None, 2.0),
    "k3_mask": (None, 1e-3),
}

# A ratio of whole sequences stays within about 1e-3 of 1: at 0.05 and above nothing is ever clipped
# and the algorithm is another one. 0.2 is the usual leftover of a token-level configuration.
WIDE_CLIP = 0.05

_PARTS = ("ratio", "rule", "aggregation", "advantage", "correction")
_NUMBERS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "tau_positive",
    "tau_negative",
    "log_clip",
    "correction_low",
    "correction_high",
)


def resolve_objective(section: ObjectiveSection) -> Recipe:
    """The recipe of `objective.name` with the section's own choices in place, its numbers whole."""
    named = RECIPES[section.name]
    chosen = {part: getattr(section, part) for part in _PARTS if getattr(section, part) is not None}
    recipe = replace(named, **chosen)
    parameters = {}
    defaults = _default_numbers(named, recipe)
    for name in RULES[recipe.rule][0]:
        given = getattr(section, name)
        parameters[name] = defaults[name] if given is None else given
    bounds = CORRECTION_BOUNDS.get(recipe.correction, (None, None))
    for name, default in zip(("correction_low", "correction_high"), bounds, strict=True):
        if name in CORRECTIONS[recipe.correction]:
            given = getattr(section, name)
            parameters[name] = default if given is None else given
    return replace(recipe, parameters=parameters)


def _default_numbers(named: Recipe, recipe: Recipe) -> dict[str, float]:
    """Of all rules' numbers: the named objective's own where they mean the same to `recipe`."""
    low, high = _CLIP_RANGE[recipe.clips_sequences]
    if recipe.rule == "capped":
        high = _CAP
    defaults = DEFAULTS | {"clip_low": low, "clip_high": high}
    same_ratio = recipe.ratio == named.ratio or (recipe.clips_sequences and named.clips_sequences)
    same_rule = recipe.rule == named.rule or {recipe.rule, named.rule} <= set(_CLIPPING_RULES)
    return defaults | dict(named.parameters) if same_ratio and same_rule else defaults


def objective_problems(section: ObjectiveSection) -> Iterator[str]:
    """What is wrong with the section by itself: parts that do not mix, numbers nothing reads."""
    if section.import_path is not None:
        yield from _own_objective(section)
        return
    recipe = resolve_objective(section)
    yield from _parts_mix(section, recipe)
    read = (*RULES[recipe.rule][0], *CORRECTIONS[recipe.correction])
    for name in _NUMBERS:
        value = getattr(section, name)
        if value is not None and name not in read:
            yield problem(
                f"objective.{name}",
                value,
                f"nothing reads it with rule {recipe.rule} and correction {recipe.correction}; "
                f"legal: null; read are {', '.join(read)}",
            )
    if section.options:
        yield problem(
            "objective.options",
            section.options,
            "nothing reads it without an objective of your own; legal: {}, or "
            "objective.import_path = package.module:function",
        )
    yield from _clip_range_is_sane(section, recipe)
    yield from _correction_is_sane(section, recipe)
    yield from _advantage(section)
    yield from _regularisation(section)


def _own_objective(section: ObjectiveSection) -> Iterator[str]:
    unread: dict[str, Any] = dict.fromkeys(
        ("ratio", "rule", "aggregation", "correction", *_NUMBERS, "off_policy_mask")
    )
    unread |= {"allow_wide_clip": False, "entropy_coefficient": 0.0}
    for name, unset in unread.items():
        value = getattr(section, name)
        if value != unset:
            yield problem(
                f"objective.{name}",
                value,
                "an objective of your own reads objective.options alone; legal: "
                + format_value(unset),
            )
    if section.kl != "none" and section.kl_in == "loss":
        yield problem(
            "objective.kl",
            section.kl,
            "an objective of your own has its own terms in the loss; legal: none, or "
            "objective.kl_in = reward",
        )
    yield from _advantage(section)
    yield from _regularisation(section)


def _advantage(section: ObjectiveSection) -> Iterator[str]:
    if section.advantage_import_path is not None:
        reader, divides = "an advantage of your own", False
        if section.advantage is not None:
            yield problem(
                "objective.advantage",
                section.advantage,
                "objective.advantage_import_path replaces it; legal: null",
            )
    else:
        name = resolve_objective(section).advantage
        reader, divides = f"advantage {name}", name in ("group_mean_std", "batch_std")
    if section.advantage_std != "sample" and not divides:
        yield problem(
            "objective.advantage_std",
            section.advantage_std,
            f"{reader} does not read it; legal: sample, the default",
        )


def _parts_mix(section: ObjectiveSection, recipe: Recipe) -> Iterator[str]:
    ratios = RULES[recipe.rule][1]
    if recipe.ratio not in ratios:
        yield problem(
            "objective.rule",
            recipe.rule,
            f"is not defined on ratio {recipe.ratio}; legal: "
            + ", ".join(name for name, (_, on) in RULES.items() if recipe.ratio in on),
        )
    own = RECIPES[section.name]
    sums_tokens = recipe.ratio != "token" and recipe.aggregation != "sequence_mean"
    # by its recipe alone: there it is the algorithm, elsewhere a mistake
    if sums_tokens and (recipe.ratio, recipe.aggregation) != (own.ratio, own.aggregation):
        yield problem(
            "objective.aggregation",
            recipe.aggregation,
            f"sums over tokens weight a ratio of whole sequences ({recipe.ratio}) by its "
            "length; legal: sequence_mean, or objective.name = luspo where that is meant",
        )
    correction = recipe.correction
    if correction == "none":
        return
    if correction in TOKEN_CORRECTIONS and recipe.ratio != "token":
        yield problem(
            "objective.correction",
            correction,
            f"weights of single tokens on ratio {recipe.ratio}: what the objective takes from "
            "a whole sequence would vary within it; legal: sequence_tis, sequence_mask, k3_mask",
        )
    if correction == "sequence_product_tis" and recipe.ratio in ("sequence", "sequence_token"):
        yield problem(
            "objective.correction",
            correction,
            "a product over all tokens beside a geometric mean over them: it is exponential in the "
            "length, and scales the update down many times; legal: sequence_tis",
        )
    if recipe.rule == "masked" and correction in _WEIGHTING_CORRECTIONS:
        yield problem(
            "objective.correction",
            correction,
            "rule masked weights by the ratio to the rollout's log-probs already, and this would "
            "weight by it once more; legal: none, sequence_mask, k3_mask",
        )
    if section.old_logprobs == "rollout":
        yield problem(
            "objective.correction",
            correction,
            "corrects for old log-probs that differ from the rollout's; with old_logprobs = "
            "rollout they are the same; legal: none",
        )


def _clip_range_is_sane(section: ObjectiveSection, recipe: Recipe) -> Iterator[str]:
    if section.allow_wide_clip:
        if not recipe.clips_sequences:
            yield problem(
                "objective.allow_wide_clip",
                True,
                f"{section.name} clips no ratios of whole sequences; legal: false",
            )
        return
    for key in ("clip_low", "clip_high"):
        value = getattr(section, key)
        if recipe.clips_sequences and value is not None and value >= WIDE_CLIP:
            yield problem(
                f"objective.{key}",
                value,
                f"{section.name} clips ratios of whole sequences, which hardly leave 1, so this "
                f"never clips; legal: below {WIDE_CLIP}, or objective.allow_wide_clip = true",
            )


def _correction_is_sane(section: ObjectiveSection, recipe: Recipe) -> Iterator[str]:
    low = recipe.parameters.get("correction_low")
    high = recipe.parameters.get("correction_high")
    if low is not None and high is not None and low >= high:
        key, value, legal = "correction_high", high, f"above correction_low = {low}"
        if section.correction_high is None:
            key, value, legal = "correction_low", low, f"below correction_high = {high}"
        yield problem(f"objective.{key}", value, f"every response would be dropped; legal: {legal}")


def _regularisation(section: ObjectiveSection) -> Iterator[str]:
    if section.kl == "none":
        unread: list[tuple[str, Any]] = [("kl_coefficient", None), ("kl_in", "loss")]
        if section.import_path is None:  # else the function may ask for a reference policy
            unread.append(("reference_offload", False))
        for key, unset in unread:
            value = getattr(section, key)
            if value != unset:
                legal = unset if isinstance(unset, str) else format_value(unset)
                yield problem(
                    f"objective.{key}", value, f"nothing reads it with kl = none; legal: {legal}"
                )
    if section.kl != "none" and section.kl_coefficient is None:
        yield problem(
            "objective.kl_coefficient", None, f"needed with kl = {section.kl}; legal: above 0"
        )
