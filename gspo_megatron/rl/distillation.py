"""On-policy distillation: a teacher's opinion of the tokens that the policy has written.

Each response token gets log pi_teacher - log pi_old, detached: over samples of the policy its mean
is minus the reverse KL divergence KL(pi, teacher). `objective.distillation.coefficient` times it is
added to the advantages (the form of Thinking Machines' "On-Policy Distillation", with discount 0).
Ratios, clips and weights of the objective stay what they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import Policy
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.objectives import Objective
from gspo_megatron.objectives.metrics import pair
from gspo_megatron.objectives.parts import sequence_log_ratio
from gspo_megatron.types import LossInputs


def teacher_of(folder: str | Path, policy: Policy, *, offload: bool) -> ReferencePolicy:
    """The weights of a Hugging Face folder, for passes in place of the policy's, which it keeps.
    Raises UserError, on all ranks alike, where the folder is damaged or holds a model of another
    shape."""
    weights = ReferencePolicy(policy, offload=offload)  # the policy's own, until they are exchanged
    try:
        load_hf(folder, policy, ignore_custom_code=True)  # refused before the start, if unwanted
    finally:
        weights.swap()
    return weights


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
