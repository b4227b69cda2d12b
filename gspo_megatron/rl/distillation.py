"""On-policy distillation: a teacher judges the tokens that the policy has written.

reverse_kl: each response token gets log pi_teacher - log pi_old, detached: over samples of the
policy its mean is minus the reverse KL divergence KL(pi, teacher).
`objective.distillation.coefficient` times it is added to the advantages (the form of Thinking
Machines' "On-Policy Distillation", with discount 0). Ratios, clips and weights of the objective
stay what they are.

forward_kl_topk, reverse_kl_topk: at each position there are k + 1 buckets, one for each of the
teacher's k most probable tokens and one for all other tokens together. The divergence of the two
distributions over these buckets, times the coefficient, is added to the loss. It is 0 if they are
equal, and never larger than the divergence over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, head_outputs
from gspo_megatron.config.distillation import DistillationSection
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import Policy
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.objectives import Objective
from gspo_megatron.objectives.metrics import pair
from gspo_megatron.objectives.parts import sequence_log_ratio
from gspo_megatron.platform.collectives import raise_everywhere
from gspo_megatron.types import LossInputs, LossOutputs


def teacher_of(folder: str | Path, policy: Policy, *, offload: bool) -> ReferencePolicy:
    """Read the weights of a Hugging Face folder, for passes in place of the policy's weights, which
    the policy keeps. Raises DataError, on all ranks alike, if the folder is damaged, holds a model
    of another shape, or has weights that are not finite."""
    weights = ReferencePolicy(policy, offload=offload)  # the policy's own, until they are exchanged
    try:
        load_hf(folder, policy, ignore_custom_code=True)  # refused before the start, if unwanted
    finally:
        weights.swap()
    wrong = f"{folder}: this teacher has weights that are not finite; give an undamaged folder"
    raise_everywhere(None if weights.is_finite() else wrong)
    return weights


def ask_folder(
    policy: Policy,
    teacher: ReferencePolicy,
    micro_batches: Sequence[MicroBatch],
    number: int,
    top_k: int,
) -> None:
    """Store, in the micro-batches, the log-probs that a teacher computed on these ranks gives to
    its response tokens, and to its own `top_k` most probable tokens.

    All micro-batches go through the model, also those without a response for this teacher: the
    experts of other ranks' tokens may be here.
    """
    if not micro_batches:
        return
    for micro_batch in micro_batches:
        micro_batch.head.top_k = top_k
    with teacher.in_place():
        outputs = head_outputs(policy, micro_batches)  # empty except on the last stage
    for micro_batch, output in zip(micro_batches, outputs):
        said, candidates = {"teacher_logprobs": output[0]}, micro_batch.head.candidates
        if candidates is not None:
            said["teacher_tokens"] = candidates
            said["teacher_buckets"] = output[3:].t()
        for name, values in said.items():
            before, numbers = getattr(micro_batch, name), micro_batch.teacher_numbers
            if before is not None and numbers is not None:
                own = (numbers == number).view(-1, *[1] * (values.dim() - 1))
                values = torch.where(own, values, before)
            setattr(micro_batch, name, values)
    for micro_batch in micro_batches:
        micro_batch.head.top_k, micro_batch.head.candidates = 0, None


def of_taught_tokens(inputs: LossInputs, micro_batch: MicroBatch) -> LossInputs:
    """Return the inputs with a mask of the tokens that have a teacher."""
    numbers = micro_batch.teacher_numbers
    if numbers is None:
        return inputs
    return replace(inputs, mask=inputs.mask.where(numbers >= 0, 0.0))


def with_advice(
    inputs: LossInputs,
    taught: LossInputs,
    teacher_logprobs: Tensor,
    objective: Objective,
    coefficient: float,
) -> LossInputs:
    """Call `add_to_advantages` with 0 for tokens that have no teacher."""
    known = teacher_logprobs.where(taught.mask > 0, inputs.old_logprobs)
    return add_to_advantages(inputs, known, objective, coefficient)


def add_to_advantages(
    inputs: LossInputs, teacher_logprobs: Tensor, objective: Objective, coefficient: float
) -> LossInputs:
    """The inputs with what the teacher [response tokens] says in their advantages: of each token
    where the objective has a term for each, else the mean over the response."""
    difference = teacher_logprobs - inputs.old_logprobs
    difference = difference.detach().where(inputs.mask > 0, 0.0)
    if not objective.of_tokens:
        mean = sequence_log_ratio(inputs, difference).to(inputs.advantages.dtype)
        return replace(inputs, advantages=inputs.advantages + coefficient * mean)
    own = inputs.token_advantages
    own = inputs.advantages[inputs.sequence_index] if own is None else own
    return replace(inputs, token_advantages=own + coefficient * difference)


def divergence_metrics(inputs: LossInputs, teacher_logprobs: Tensor) -> dict[str, Tensor]:
    """`distill/kl`: the mean over tokens of log pi_old - log pi_teacher, an estimate of the reverse
    KL divergence."""
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
    """Add the divergence of the policy's `buckets` from the teacher's to the loss.

    buckets: [response tokens, k + 1], with gradient; teacher: the same shape. The divergence of the
    tokens is aggregated like the terms of the objective's tokens. It is 0 for tokens without a
    teacher.
    """
    terms = bucket_divergence(section.form, buckets, teacher, taught.mask > 0)
    loss, mean = objective.aggregate(-terms, inputs)
    return LossOutputs(
        outputs.loss + section.coefficient * loss,
        {**outputs.means, "distill/loss": mean},
        outputs.values,
    )


def bucket_divergence(form: str, policy: Tensor, teacher: Tensor, chosen: Tensor) -> Tensor:
    """Return KL(teacher, policy) or KL(policy, teacher), by the form, [tokens].

    policy, teacher: log-probs [tokens, k + 1] of k tokens and of the rest. Value and gradient are 0
    for tokens that are not `chosen`. A token that the policy's vocabulary lacks (-inf in `policy`)
    counts to the teacher's rest. The gradient for the log-probs has its mean over the distribution
    subtracted. This does not change the gradient for logits, and makes it exactly 0, to the last
    bit, if both distributions are equal.
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
    attached = (slopes.to(policy.dtype) * (movable - movable.detach())).sum(1)  # value 0
    return values.to(policy.dtype) + attached


def top_k_metrics(taught: LossInputs, is_greedy: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    """Return two means over tokens: how often the teacher's most probable token is the policy's,
    and the teacher's probability of its k tokens.

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
