"""GSPO's loss, and the objectives of the configuration: LossInputs in, LossOutputs out.

`gspo` shows the method in a few lines. `PolicyLoss` generalises it to every recipe of
config/objectives.py: other ratios, rules, weights and means, and the terms that a configuration may
add. The functions of these parts are in parts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gspo_megatron.config.objectives import CORRECTIONS, RULES, Recipe, resolve_objective
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.objectives import metrics, parts
from gspo_megatron.objectives.advantages import AdvantageEstimator, build_advantages
from gspo_megatron.plugins import load_function, option_problems, without_exit
from gspo_megatron.types import LossInputs, LossOutputs


def gspo(inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutputs:
    """GSPO (arXiv 2507.18071, eqs. 5-7), with the loss and gradient of `PolicyLoss` for the recipe
    `gspo`. A custom objective may begin as a copy of this function."""
    log_ratio = parts.token_log_ratio(inputs)  # [tokens], 0 outside the mask
    mean_log_ratio = parts.sequence_log_ratio(inputs, log_ratio)  # [num_sequences]
    ratio = parts.exponentiate(mean_log_ratio)  # s_i, [num_sequences]
    advantages = inputs.advantages  # [num_sequences]
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss, mean = aggregate_sequences(surrogate, inputs, "sequence_mean")
    means = {"loss": mean, **metrics.policy_metrics(inputs, log_ratio)}
    return LossOutputs(loss, means, metrics.ratio_values(inputs, log_ratio, mean_log_ratio))


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a recipe, with the terms that the section `objective` adds. Minimising the loss
    maximises

        aggregation of  weight * rule(ratio, advantage) - kl_coefficient * divergence
        + entropy_coefficient * mean entropy.

    Depending on the recipe, `loss` is the whole loss or the part of this shard's tokens. The
    gradient is always that of this shard's tokens.
    """

    section: ObjectiveSection
    recipe: Recipe
    max_response_tokens: int

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        section, recipe, of_tokens = self.section, self.recipe, self.recipe.terms == "token"
        parts.check_inputs(inputs, token_advantages=of_tokens)
        spread_advantages = inputs.advantages[inputs.sequence_index]  # [tokens]

        # Log-ratios of tokens, and all sums over whole sequences in one collective.
        log_ratio = parts.token_log_ratio(inputs)  # [tokens]
        summed, limited = {"log_ratio": log_ratio}, None
        # the tokens' log-ratios are clipped before their mean is taken
        if recipe.rule == "geometric_clip":
            bound = recipe.parameters["log_clip"]
            limited = parts.clip_log_ratio(log_ratio, spread_advantages, bound)
            summed["limited"] = limited.surrogate
        log_k = parts.log_mismatch(inputs) if recipe.corrections else None  # [tokens]
        if log_k is not None:
            summed |= self._summed_for_corrections(log_k)
        sums = dict(zip(summed, parts.sequence_sums(inputs, *summed.values()), strict=True))
        log_ratio_means = sums["log_ratio"] / inputs.sequence_lengths.clamp_min(1)

        # One term for each ratio: [tokens] or [num_sequences].
        ratio = self._ratio(inputs, log_ratio, sums)
        advantages = inputs.advantages
        if of_tokens:
            own = inputs.token_advantages
            advantages = spread_advantages if own is None else own
        assert ratio.shape == advantages.shape, (
            f"ratio {tuple(ratio.shape)} and advantages {tuple(advantages.shape)} would broadcast"
        )
        rule = RULES[recipe.rule]
        numbers = {name: recipe.parameters[name] for name in rule.defaults}
        clipped = getattr(parts, rule.function)(inputs, ratio, advantages, **numbers)

        # Weights of the terms.
        terms, means = clipped.surrogate, metrics.policy_metrics(inputs, log_ratio)
        if log_k is not None:
            level, weights, metrics_of_each = self._correction(inputs, log_k, sums)
            terms = self._weighted(terms, weights, level, inputs)
            means |= metrics.weight_metrics("correction", level, weights, inputs)
            means |= metrics_of_each
        if section.off_policy_mask is not None:
            bound = section.off_policy_mask
            kept = parts.kept_by_off_policy_mask(log_ratio_means, inputs.advantages, bound)
            terms = self._weighted(terms, kept.to(terms.dtype), "sequence", inputs)
            means["off_policy/dropped"] = metrics.share_of_sequences(~kept, inputs)

        # The loss as one number.
        if of_tokens:
            loss, means["loss"] = self.aggregate_tokens(terms, inputs)
        else:
            loss, means["loss"] = aggregate_sequences(terms, inputs, recipe.aggregation)
        if section.kl != "none" and section.kl_in == "loss":
            # the rules of the configuration guarantee this
            assert section.kl_coefficient is not None
            # The sign is negative, because aggregation returns minus the mean.
            penalty, means["kl/penalty"] = self.aggregate_tokens(-self._divergence(inputs), inputs)
            loss = loss + section.kl_coefficient * penalty
        if section.entropy_coefficient:
            loss = loss - section.entropy_coefficient * parts.mean_entropy(inputs)

        means |= metrics.weight_metrics("ratio", recipe.terms, ratio, inputs)
        level = "token" if limited is not None else recipe.terms
        means |= metrics.clip_metrics(limited or clipped, level, inputs)
        return LossOutputs(loss, means, metrics.ratio_values(inputs, log_ratio, log_ratio_means))

    def complete(self, reduced: dict[str, float]) -> dict[str, float]:
        """The metrics of a step, from means that were reduced over ranks. The result also has the
        whole loss and effective sample sizes."""
        completed = dict(reduced)
        if "kl/penalty" in completed:
            assert self.section.kl_coefficient is not None
            completed["loss"] += self.section.kl_coefficient * completed["kl/penalty"]
        completed["loss"] -= self.section.entropy_coefficient * completed.get("policy/entropy", 0.0)
        for key in [key for key in completed if key.endswith("/squared_weight")]:
            name = key.removesuffix("/squared_weight")
            squared = completed.pop(key)
            share = completed[f"{name}/weight"] ** 2 / squared if squared else 0.0
            completed[f"{name}/effective_sample_share"] = share
        return completed

    def _ratio(self, inputs: LossInputs, log_ratio: Tensor, sums: dict[str, Tensor]) -> Tensor:
        """Return the recipe's ratio: w_it or s_it [tokens] for tokens, s_i or the product of w_it
        [num_sequences] for sequences."""
        kind = self.recipe.ratio
        if kind == "token":
            return parts.exponentiate(log_ratio)
        whole = sums.get("limited", sums["log_ratio"])  # [num_sequences]
        if kind in ("sequence", "sequence_token"):
            whole = whole / inputs.sequence_lengths.clamp_min(1)
        if kind in ("sequence_token", "sequence_product_token"):
            whole = parts.sequence_token_log_ratio(inputs, log_ratio, whole)  # [tokens]
        return parts.exponentiate(whole)

    def _summed_for_corrections(self, log_k: Tensor) -> dict[str, Tensor]:
        """Return values [tokens] by name. The corrections of whole sequences need the sums of these
        values over each sequence."""
        summed = {}
        for name, bounds in self.recipe.corrections.items():
            correction = CORRECTIONS[name]
            if correction.level == "sequence":
                values = {"": lambda k: k, "k3": parts.k3}.get(correction.summed)
                values = values or partial(parts.is_outside, **bounds)
                summed[f"correction {correction.summed}"] = values(log_k)
        return summed

    def _correction(
        self, inputs: LossInputs, log_k: Tensor, sums: dict[str, Tensor]
    ) -> tuple[Literal["token", "sequence"], Tensor, dict[str, Tensor]]:
        """Return the level of the weights (token or sequence), the product of all corrections'
        weights, [tokens] or [num_sequences], and metrics. Metrics of single corrections are
        returned only if there are several corrections."""
        weights: list[Tensor] = []
        means: dict[str, Tensor] = {}
        level = "token" if self.recipe.corrects_tokens else "sequence"
        for name, bounds in self.recipe.corrections.items():
            correction, function = CORRECTIONS[name], getattr(parts, name)
            if correction.level == "token":
                own = function(inputs, log_k, **bounds)
            else:
                of_sums = {} if correction.summed == "is_outside" else bounds
                summed = sums[f"correction {correction.summed}"]
                own = function(summed, inputs.sequence_lengths, **of_sums)
            if len(self.recipe.corrections) > 1:
                prefix = f"correction/{name}"
                means |= metrics.weight_metrics(prefix, correction.level, own, inputs)
            weights.append(own if correction.level == level else own[inputs.sequence_index])
        product = weights[0]
        for other in weights[1:]:
            product = product * other
        return level, product, means

    def _weighted(self, terms: Tensor, weights: Tensor, level: str, inputs: LossInputs) -> Tensor:
        """Return terms times weights. The weight of a sequence applies to each of its tokens. A
        term of weight 0 becomes 0, even if it is NaN."""
        if level != self.recipe.terms:
            assert level == "sequence", "token weights of a sequence"
            weights = weights[inputs.sequence_index]
        return terms.where(weights != 0, 0.0) * weights

    def _divergence(self, inputs: LossInputs) -> Tensor:
        """The divergence from the reference policy, [tokens]. Outside the mask it is 0, because a
        NaN there would reach the gradient."""
        assert inputs.reference_logprobs is not None, "no log-probs of the reference policy"
        reference = parts.inside_mask(inputs, inputs.reference_logprobs)
        logprobs = parts.inside_mask(inputs, inputs.logprobs)
        if self.section.kl == "k3_unbiased":
            return parts.k3_unbiased(inputs, logprobs, reference)
        return parts.divergence(self.section.kl, logprobs, reference)

    def aggregate_tokens(self, terms: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Aggregate terms [tokens] with the recipe's aggregation."""
        return aggregate_tokens(terms, inputs, self.recipe.aggregation, self.max_response_tokens)


# --- From terms to one loss ----------------------------------------------------------------------
#
# The denominators are counts of the whole mini-batch. Each function returns the loss, which is
# minimised, and the pair [numerator, denominator] of its mean. The pairs are summed over all ranks
# and micro-batches of the mini-batch. The quotient of the sums is the reported loss.


def aggregate_sequences(
    terms: Tensor, inputs: LossInputs, aggregation: str
) -> tuple[Tensor, Tensor]:
    """Aggregate `terms` [num_sequences], which are the same on every shard.

    sequence_mean: -(1/N) sum_i terms_i; token_sum: -(1/N) sum_i |y_i| terms_i (LUSPO). A sequence
    without tokens in the mask counts in N, but adds nothing to the sum.
    """
    assert terms.shape == inputs.advantages.shape, f"terms {tuple(terms.shape)}"
    assert aggregation in ("sequence_mean", "token_sum"), aggregation
    if aggregation == "token_sum":
        terms = terms * inputs.sequence_lengths
    total = terms.where(inputs.sequence_lengths > 0, 0.0).sum()
    # All shards have the same value, so only one shard may report it.
    numerator = -total if inputs.is_primary_shard else total.new_zeros(())
    return -total / inputs.global_num_sequences, metrics.pair(numerator, _num_sequences(inputs))


def aggregate_tokens(
    terms: Tensor, inputs: LossInputs, aggregation: str, max_response_tokens: int
) -> tuple[Tensor, Tensor]:
    """Aggregate this shard's `terms` [tokens]; the mini-batch has N sequences and T tokens.

    sequence_mean: -(1/N) sum_i (1/|y_i|) sum_t terms_it. |y_i| is the length of the whole sequence,
    so the parts of all shards add up to the sequence's mean.
    token_mean: -(1/T) sum_it terms_it.
    token_sum: -(1/N) sum_it terms_it.
    constant_length: token_sum divided by max_response_tokens (Dr. GRPO).
    """
    assert terms.shape == inputs.mask.shape, f"terms {tuple(terms.shape)}"
    if aggregation == "sequence_mean":
        terms = terms / inputs.sequence_lengths.clamp_min(1)[inputs.sequence_index]
    total = parts.inside_mask(inputs, terms).sum()
    if aggregation == "token_mean":
        # The loss of a mini-batch without tokens in the mask is 0, not 0/0.
        return -total / max(inputs.global_num_tokens, 1), metrics.pair(
            -total, (inputs.mask > 0).sum()
        )
    if aggregation == "constant_length":
        total = total / max_response_tokens
    else:
        assert aggregation in ("sequence_mean", "token_sum"), aggregation
    return -total / inputs.global_num_sequences, metrics.pair(-total, _num_sequences(inputs))


def _num_sequences(inputs: LossInputs) -> int:
    return len(inputs.advantages) if inputs.is_primary_shard else 0


# --- The objective of a configuration ------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """The function that the trainer calls with each micro-batch, and the inputs that it needs."""

    name: str
    function: Callable[[LossInputs], LossOutputs]
    advantages: AdvantageEstimator
    # completes the reduced metrics of a step
    complete: Callable[[dict[str, float]], dict[str, float]]
    needs_reference: bool
    needs_entropy_gradient: bool
    of_tokens: bool  # whether the function may read an advantage for each token
    of_sequences: bool  # whether it may read an advantage for each sequence
    # Turns the terms [tokens] of a distillation loss into a loss and the pair of its mean, as
    # `aggregate_tokens` does. With a custom objective, the aggregation is sequence_mean.
    aggregate: Callable[[Tensor, LossInputs], tuple[Tensor, Tensor]]

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return self.function(inputs)


def build_objective(section: ObjectiveSection, max_response_tokens: int) -> Objective:
    """Return the objective of a checked configuration. Raises UserError if a custom objective
    cannot be loaded."""
    loss = PolicyLoss(section, resolve_objective(section), max_response_tokens)
    objective = Objective(
        name=section.name,
        function=loss,
        advantages=build_advantages(section),
        complete=loss.complete,
        needs_reference=section.kl != "none",
        needs_entropy_gradient=section.entropy_coefficient > 0,
        of_tokens=loss.recipe.terms == "token",
        of_sequences=loss.recipe.terms == "sequence",
        aggregate=loss.aggregate_tokens,
    )
    if section.import_path is None:
        return objective
    function = load_function("objective.import_path", section.import_path)
    problems = option_problems("objective", section.import_path, function, section.options)
    if problems:
        raise ConfigError(problems)
    sequence_mean = {"aggregation": "sequence_mean", "max_response_tokens": max_response_tokens}
    return replace(
        objective,
        name=section.import_path,
        function=partial(_checked_loss, section, function),
        complete=dict,
        # A KL term of the configuration needs the reference, even if the function does not.
        needs_reference=objective.needs_reference or getattr(function, "needs_reference", False),
        needs_entropy_gradient=getattr(function, "needs_entropy_gradient", False),
        of_tokens=True,
        of_sequences=True,
        aggregate=partial(aggregate_tokens, **sequence_mean),
    )


def needs_reference(section: ObjectiveSection) -> bool:
    """Return whether the objective of a configuration needs the reference policy. A custom
    objective that this machine does not have counts as one that does not."""
    function = None
    if section.import_path is not None:
        with suppress(UserError):
            function = load_function("objective.import_path", section.import_path)
    return section.kl != "none" or bool(getattr(function, "needs_reference", False))


def _checked_loss(
    section: ObjectiveSection, function: Callable[..., Any], inputs: LossInputs
) -> LossOutputs:
    """Call a custom objective with its options, and check its results."""
    name = f"objective.import_path = {section.import_path}"
    with without_exit(name):
        outputs = function(inputs, **section.options)
    if not isinstance(outputs, LossOutputs):
        raise UserError(f"{name}: returned {type(outputs).__name__}, not LossOutputs")
    results = [("the loss", outputs.loss, (), "a scalar")]
    for key, mean in outputs.means.items():
        results.append((f"means[{key!r}]", mean, (2,), "what objectives.pair returns"))
    for what, value, shape, expected in results:
        is_tensor = isinstance(value, Tensor)
        if not is_tensor or value.shape != shape:
            found = (
                f"has shape {tuple(value.shape)}" if is_tensor else f"is a {type(value).__name__}"
            )
            raise UserError(f"{name}: {what} {found}; allowed: {expected}")
    return outputs
