"""An objective put together from its parts: LossInputs in, LossOutputs out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gspo_megatron.config.objectives import CORRECTIONS, RULES, TOKEN_CORRECTIONS, Recipe
from gspo_megatron.objectives import rules
from gspo_megatron.objectives.aggregation import aggregate_sequences, aggregate_tokens
from gspo_megatron.objectives.checks import check_inputs
from gspo_megatron.objectives.corrections import (
    kept_by_off_policy_mask,
    log_mismatch,
    sequence_weights,
    summed_over_sequences,
    token_weights,
)
from gspo_megatron.objectives.metrics import (
    policy_metrics,
    ratio_values,
    reference_metrics,
    sequence_clip_metrics,
    share_of_sequences,
    token_clip_metrics,
    weight_metrics,
)
from gspo_megatron.objectives.ratios import (
    exponentiate,
    sequence_sums,
    sequence_token_log_ratio,
    token_advantages,
    token_log_ratio,
)
from gspo_megatron.objectives.regularisation import divergence, mean_entropy
from gspo_megatron.objectives.rules import Clipped
from gspo_megatron.types import LossInputs, LossOutputs


@dataclass(frozen=True)
class Surrogate:
    """A recipe with its numbers, and what is added to it. Minimising the loss maximises

        aggregation of  weight * rule(ratio, advantage) - kl_coefficient * divergence
        + entropy_coefficient * mean entropy.

    `loss` has the same value on all shards of the sequences or is a part of it, depending on the
    recipe, and each shard's own gradient.
    """

    recipe: Recipe
    max_response_tokens: int
    off_policy_mask: float | None = None
    kl: str = "none"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        check_inputs(inputs, token_advantages=self.recipe.terms == "token")
        log_ratio = token_log_ratio(inputs)
        limited = self._limited(inputs, log_ratio)
        mismatch = None if self.recipe.correction == "none" else log_mismatch(inputs)
        sums = self._sequence_sums(inputs, log_ratio, limited, mismatch)
        means = sums["ratio"] / inputs.sequence_lengths.clamp_min(1)
        ratio = self._ratio(inputs, log_ratio, sums)
        clipped = self._rule(inputs, ratio)
        terms, weighting = self._weighted(inputs, clipped.surrogate, means, mismatch, sums)
        loss, mean = self._aggregate(terms, inputs)
        metrics = {
            "loss": mean,
            **self._clip_metrics(inputs, limited or clipped),
            **weight_metrics("ratio", self.recipe.terms, ratio, inputs),
            **policy_metrics(inputs, log_ratio),
            **weighting,
        }
        if self.kl != "none":
            # aggregation turns what is to be large into a loss: a penalty is the other way round
            penalty, metrics["kl/penalty"] = self._aggregate_tokens(
                -self._divergence(inputs), inputs
            )
            loss = loss + self.kl_coefficient * penalty
        if inputs.reference_logprobs is not None:
            metrics |= reference_metrics(inputs)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * mean_entropy(inputs)
        return LossOutputs(loss, metrics, ratio_values(inputs, log_ratio, means))

    def complete(self, metrics: dict[str, float]) -> dict[str, float]:
        """A step's metrics from the reduced means: the whole loss, and effective sample sizes."""
        metrics = dict(metrics)
        metrics["loss"] += self.kl_coefficient * metrics.get("kl/penalty", 0.0)
        metrics["loss"] -= self.entropy_coefficient * metrics.get("policy/entropy", 0.0)
        for name in ("ratio", "correction"):
            squared = metrics.pop(f"{name}/squared_weight", None)
            if squared is not None:
                mean = metrics[f"{name}/weight"]
                share = mean**2 / squared if squared else 0.0
                metrics[f"{name}/effective_sample_share"] = share
        return metrics

    def _divergence(self, inputs: LossInputs) -> Tensor:
        """[tokens]; 0 outside the mask, where a NaN would otherwise reach the gradient."""
        assert inputs.reference_logprobs is not None, "no log-probs of the reference policy"
        masked = inputs.mask > 0
        reference = inputs.reference_logprobs.where(masked, 0.0)
        return divergence(self.kl, inputs.logprobs.where(masked, 0.0), reference)

    def _limited(self, inputs: LossInputs, log_ratio: Tensor) -> Clipped | None:
        """Token log-ratios as the geometric mean takes them, where the rule limits them first."""
        if self.recipe.rule != "geometric_clip":
            return None
        advantages = inputs.advantages[inputs.sequence_index]
        return rules.clip_log_ratio(log_ratio, advantages, self.recipe.parameters["log_clip"])

    def _sequence_sums(
        self,
        inputs: LossInputs,
        log_ratio: Tensor,
        limited: Clipped | None,
        mismatch: Tensor | None,
    ) -> dict[str, Tensor]:
        """All sums over sequences, [num_sequences] each, in one collective."""
        wanted = {"ratio": log_ratio}
        if limited is not None:
            wanted["limited"] = limited.surrogate
        if mismatch is not None:
            values = summed_over_sequences(self.recipe.correction, mismatch)
            if values is not None:
                wanted["mismatch"] = values
        sums = sequence_sums(inputs, *wanted.values())
        return dict(zip(wanted, sums.unbind(0), strict=True))

    def _ratio(self, inputs: LossInputs, log_ratio: Tensor, sums: dict[str, Tensor]) -> Tensor:
        """[tokens] or [num_sequences], as the recipe's terms are."""
        kind = self.recipe.ratio
        if kind == "token":
            return exponentiate(log_ratio)
        if kind == "sequence_product":
            return exponentiate(sums["ratio"])
        means = sums.get("limited", sums["ratio"]) / inputs.sequence_lengths.clamp_min(1)
        if kind == "sequence":
            return exponentiate(means)
        assert kind == "sequence_token", kind
        return exponentiate(sequence_token_log_ratio(inputs, log_ratio, means))

    def _rule(self, inputs: LossInputs, ratio: Tensor) -> Clipped:
        of_tokens = self.recipe.terms == "token"
        advantages = token_advantages(inputs) if of_tokens else inputs.advantages
        name = self.recipe.rule
        numbers = {key: self.recipe.parameters[key] for key in RULES[name][0]}
        if name == "geometric_clip":  # the ratio is limited already
            nothing = torch.zeros_like(ratio, dtype=torch.bool)
            return Clipped(ratio * advantages, nothing, nothing, nothing)
        logprobs = inputs.logprobs.where(inputs.mask > 0, 0.0) if of_tokens else None
        if name == "capped":
            return rules.capped(ratio, advantages, logprobs, **numbers)
        if name == "masked":
            assert inputs.rollout_logprobs is not None
            sampled = inputs.rollout_logprobs.where(inputs.mask > 0, 0.0)
            return rules.masked(ratio, advantages, logprobs, sampled, **numbers)
        rule = {"min_clip": rules.min_clip, "dual_clip": rules.dual_clip}.get(name, rules.soft_gate)
        return rule(ratio, advantages, **numbers)

    def _weighted(
        self,
        inputs: LossInputs,
        terms: Tensor,
        means: Tensor,
        mismatch: Tensor | None,
        sums: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The terms times all weights, and the figures of these."""

        def times(weights: Tensor, kind: str) -> Tensor:
            assert kind == "sequence" or self.recipe.terms == "token", "token weights of a sequence"
            spread = kind != self.recipe.terms
            return terms * (weights[inputs.sequence_index] if spread else weights)

        metrics: dict[str, Tensor] = {}
        if mismatch is not None:
            kind, weights = self._correction(inputs, mismatch, sums)
            terms = times(weights, kind)
            metrics |= weight_metrics("correction", kind, weights, inputs)
        if self.off_policy_mask is not None:
            kept = kept_by_off_policy_mask(means, inputs.advantages, self.off_policy_mask)
            terms = times(kept.to(terms.dtype), "sequence")
            metrics["off_policy/dropped"] = share_of_sequences(~kept, inputs)
        return terms, metrics

    def _correction(
        self, inputs: LossInputs, mismatch: Tensor, sums: dict[str, Tensor]
    ) -> tuple[Literal["token", "sequence"], Tensor]:
        """Of what the weights are, and the weights, detached: [tokens] or [num_sequences]."""
        name = self.recipe.correction
        bounds = {key: self.recipe.parameters[key] for key in CORRECTIONS[name]}
        if name in TOKEN_CORRECTIONS:
            return "token", token_weights(name, mismatch, **bounds).detach()
        lengths = inputs.sequence_lengths
        return "sequence", sequence_weights(name, sums["mismatch"], lengths, **bounds).detach()

    def _aggregate(self, terms: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        if self.recipe.terms == "sequence":
            return aggregate_sequences(terms, inputs, self.recipe.aggregation)
        return self._aggregate_tokens(terms, inputs)

    def _aggregate_tokens(self, terms: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        return aggregate_tokens(terms, inputs, self.recipe.aggregation, self.max_response_tokens)

    def _clip_metrics(self, inputs: LossInputs, clipped: Clipped) -> dict[str, Tensor]:
        if self.recipe.terms == "token" or self.recipe.rule == "geometric_clip":
            return token_clip_metrics(clipped, inputs)
        return sequence_clip_metrics(clipped, inputs)
