"""On-policy distillation: a teacher judges the tokens that the policy has written.

reverse_kl: the difference log pi_teacher - log pi_old of each response token, detached and times
`objective.distillation.coefficient`, is added to the advantages. Over samples of the policy, the
mean of this difference is the negative reverse KL divergence, -KL(pi, teacher). This is the form of
Thinking Machines' "On-Policy Distillation", with discount 0. Ratios, clips and weights of the
objective do not change.

forward_kl_topk, reverse_kl_topk: at each position there are k + 1 buckets, one for each of the
teacher's k most probable tokens and one for all other tokens together. Policy and teacher each have
a distribution over these buckets. The divergence of the two, times the coefficient, is added to the
loss. It is 0 if the two distributions are equal, and never larger than the divergence over the
whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, head_outputs
from gspo_megatron.config.distillation import DistillationSection
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import Policy
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.objectives import Objective
from gspo_megatron.objectives.metrics import pair
from gspo_megatron.objectives.parts import sequence_log_ratio
from gspo_megatron.platform.collectives import raise_everywhere
from gspo_megatron.types import LossInputs, LossOutputs


class Distillation:
    """The teachers of a run, and what they add to its policy updates."""

    def __init__(self, policy: Policy, objective: Objective, section: ObjectiveSection) -> None:
        """Load the teachers that these ranks compute. Raises DataError like `teacher_of`."""
        self.policy, self.objective, self.section = policy, objective, section.distillation
        # by number, as in `MicroBatch.teacher_numbers`
        self.teachers = {
            number: teacher_of(folder, policy, offload=section.reference_offload)
            for number, folder in self.section.folders.items()
        }

    def ask_folders(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Compute the log-probs of the teachers on these ranks and store them in the micro-batches:
        log-probs of the response tokens that a teacher judges, and of its own most probable tokens.

        All micro-batches go through each model, even those without a response for this teacher,
        because this rank may hold experts for the tokens of other ranks.
        """
        for number, teacher in self.teachers.items() if micro_batches else ():
            for micro_batch in micro_batches:
                micro_batch.head.top_k = self.section.candidates
            with teacher.in_place():
                outputs = head_outputs(self.policy, micro_batches)  # empty before the last stage
            for micro_batch, output in zip(micro_batches, outputs):
                fields, candidates = {"teacher_logprobs": output[0]}, micro_batch.head.candidates
                if candidates is not None:
                    fields["teacher_tokens"] = candidates
                    fields["teacher_buckets"] = output[3:].t()
                for name, values in fields.items():
                    before, numbers = getattr(micro_batch, name), micro_batch.teacher_numbers
                    if before is not None and numbers is not None:
                        is_own = (numbers == number).view(-1, *[1] * (values.dim() - 1))
                        values = torch.where(is_own, values, before)
                    setattr(micro_batch, name, values)
            for micro_batch in micro_batches:
                micro_batch.head.top_k, micro_batch.head.candidates = 0, None

    def outputs(
        self, inputs: LossInputs, micro_batch: MicroBatch, of_candidates: Tensor | None
    ) -> tuple[LossOutputs, dict[str, Tensor]]:
        """Return the outputs of the objective with the teacher's term, and the metrics of how far
        the policy is from its teacher. Without a teacher, these are the objective's own outputs.

        of_candidates: [k + 2, tokens], the rows of the head's output that follow the rows of
        log-probs and entropies, if the form of distillation adds a term to the loss.
        """
        teacher = micro_batch.teacher_logprobs
        if teacher is None:
            return self.objective(inputs), {}
        taught = of_taught_tokens(inputs, micro_batch)
        means = divergence_metrics(taught, teacher)
        if of_candidates is None:  # the term is part of the advantages
            # Tokens without a teacher get a difference of 0.
            teacher = teacher.where(taught.mask > 0, inputs.old_logprobs)
            coefficient = self.section.coefficient
            inputs = add_to_advantages(inputs, teacher, self.objective, coefficient)
            return self.objective(inputs), means
        buckets = micro_batch.teacher_buckets
        assert buckets is not None, "its tokens are the candidates"
        means |= top_k_metrics(taught, of_candidates[0], buckets)
        own = of_candidates[1:].t()
        outputs = self.objective(inputs)
        outputs = with_divergence(
            outputs, inputs, taught, own, buckets, self.objective, self.section
        )
        return outputs, means


def teacher_of(folder: str | Path, policy: Policy, *, offload: bool) -> ReferencePolicy:
    """Read a teacher's weights from a Hugging Face folder. Passes can use them in place of the
    policy's weights; the policy keeps its own. Raises DataError, on all ranks alike, if the folder
    is damaged, holds a model of another shape, or has weights that are not finite."""
    weights = ReferencePolicy(policy, offload=offload)  # the policy's weights, until `swap` below
    try:
        # Whether the folder may have custom code was checked before the start.
        load_hf(folder, policy, ignore_custom_code=True)
    finally:
        weights.swap()
    wrong = f"{folder}: this teacher has weights that are not finite; give an undamaged folder"
    raise_everywhere(None if weights.is_finite() else wrong)
    return weights


def of_taught_tokens(inputs: LossInputs, micro_batch: MicroBatch) -> LossInputs:
    """Return the inputs with a mask that keeps only tokens that have a teacher."""
    numbers = micro_batch.teacher_numbers
    if numbers is None:
        return inputs
    return replace(inputs, mask=inputs.mask.where(numbers >= 0, 0.0))


def add_to_advantages(
    inputs: LossInputs, teacher_logprobs: Tensor, objective: Objective, coefficient: float
) -> LossInputs:
    """Add coefficient * (log pi_teacher - log pi_old) to the advantages, and return the new inputs.

    If the objective has a term for each token, each token gets its own difference. Otherwise, each
    response gets the mean of the differences of its tokens. With a custom objective, both are done,
    because it may read either of them. teacher_logprobs: [response tokens].
    """
    difference = teacher_logprobs - inputs.old_logprobs
    difference = difference.detach().where(inputs.mask > 0, 0.0)
    of_sequences, of_tokens = inputs.advantages, inputs.token_advantages
    if objective.of_tokens:
        own = of_sequences[inputs.sequence_index] if of_tokens is None else of_tokens
        of_tokens = own + coefficient * difference
    if objective.of_sequences:
        mean = sequence_log_ratio(inputs, difference).to(of_sequences.dtype)
        of_sequences = of_sequences + coefficient * mean
    return replace(inputs, advantages=of_sequences, token_advantages=of_tokens)


def divergence_metrics(inputs: LossInputs, teacher_logprobs: Tensor) -> dict[str, Tensor]:
    """Return `distill/kl`, the mean over tokens of log pi_old - log pi_teacher. It is an estimate
    of the reverse KL divergence."""
    masked = inputs.mask > 0
    difference = (inputs.old_logprobs - teacher_logprobs).detach().double()
    return {"distill/kl": pair(difference.where(masked, 0.0).sum(), masked.sum())}


def with_divergence(
    outputs: LossOutputs,
    inputs: LossInputs,
    taught: LossInputs,
    buckets: Tensor,
    teacher: Tensor,
    objective: Objective,
    section: DistillationSection,
) -> LossOutputs:
    """Add to the loss the divergence between the policy's `buckets` and the teacher's.

    buckets: [response tokens, k + 1], with gradient; teacher: the same shape. The divergences of
    the tokens are aggregated in the same way as the objective's own token terms. A token without a
    teacher has divergence 0.
    """
    terms = bucket_divergence(section.form, buckets, teacher, taught.mask > 0)
    loss, mean = objective.aggregate(-terms, inputs)
    return LossOutputs(
        outputs.loss + section.coefficient * loss,
        {**outputs.means, "distill/loss": mean},
        outputs.values,
    )


def bucket_divergence(form: str, policy: Tensor, teacher: Tensor, chosen: Tensor) -> Tensor:
    """Return KL(teacher, policy) if the form is forward, KL(policy, teacher) if reverse, [tokens].

    policy, teacher: log-probs [tokens, k + 1] of k tokens and of all other tokens together. Value
    and gradient are 0 for tokens that are not `chosen`. If the policy's vocabulary lacks one of the
    k tokens (-inf in `policy`), the teacher's probability of it is added to that of all other
    tokens. The gradient g for the log-probs is replaced by g - q * sum(g), with the policy's
    distribution q. This does not change the gradient for logits, and makes it exactly 0, to the
    last bit, if both distributions are equal.
    """
    log_q, log_p = policy.detach().double(), teacher.detach().double()
    exists = (log_q > -torch.inf) & chosen[:, None]
    beyond = log_p.where(log_q == -torch.inf, -torch.inf).logsumexp(1)
    rest = torch.logaddexp(log_p[:, -1], beyond)
    log_p = torch.cat([log_p[:, :-1], rest[:, None]], 1).where(exists, 0.0)
    log_q = log_q.where(exists, 0.0)
    p, q = (each.exp().where(exists, 0.0) for each in (log_p, log_q))
    if form == "forward_kl_topk":
        values, slopes = (p * (log_p - log_q)).sum(1), q - p
    else:
        assert form == "reverse_kl_topk", form
        values = (q * (log_q - log_p)).sum(1)
        slopes = q * (log_q - log_p - values[:, None])
    movable = policy.where(exists, 0.0)
    # The value of `attached` is 0, and its gradient for `policy` is `slopes`.
    attached = (slopes.to(policy.dtype) * (movable - movable.detach())).sum(1)
    return values.to(policy.dtype) + attached


def top_k_metrics(taught: LossInputs, is_greedy: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    """Return two means over tokens: how often teacher and policy have the same most probable token,
    and how much probability the teacher gives to its k tokens together.

    is_greedy: [tokens]; teacher: [tokens, k + 1] log-probs.
    """
    masked = taught.mask > 0
    means = {
        "distill/greedy_agreement": is_greedy.detach().double(),
        "distill/top_k_mass": 1.0 - teacher[:, -1].double().exp(),
    }
    return {
        name: pair(values.where(masked, 0.0).sum(), masked.sum()) for name, values in means.items()
    }
