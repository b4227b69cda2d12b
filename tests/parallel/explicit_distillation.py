"""A distillation update by the formulas alone, in float64 on one rank. The computation uses the
whole logits of policy and teacher, and plain autograd. The terms of the policy's objective come
from explicit.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gspo_megatron.config import Config
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.models.shards import parameter_shards
from gspo_megatron.platform.groups import tear_down_model_parallel
from gspo_megatron.verify.results import StepResult
from gspo_megatron.verify.synthetic import SyntheticBatch
from tests.parallel.explicit import surrogate
from tests.parallel.models import build_on_ranks


def explicit_distillation(
    config: Config,
    vocab_size: int,
    batch: SyntheticBatch,
    teachers: Sequence[type[ReferencePolicy] | None],
) -> StepResult:
    """The loss and gradients for an objective that takes means over sequences. teachers: for each
    sequence, the weights of its teacher, or None if it has no teacher."""
    policy = build_on_ranks(config, vocab_size)
    policy.eval()
    [model] = policy.models
    section = config.objective.distillation
    loss, parameters = torch.zeros((), dtype=torch.float64), list(model.parameters())

    def distributions(tokens: Tensor, length: int) -> Tensor:
        positions = torch.arange(len(tokens))[None]
        hidden = model(input_ids=tokens[None], position_ids=positions, attention_mask=None)[0]
        logits = hidden[-length - 1 : -1] @ model.head_weight[:vocab_size].t()
        return torch.log_softmax(logits / config.rollout.temperature, dim=-1)

    said_of_all: list[Tensor | None] = [None] * len(teachers)
    for number, teacher in enumerate(teachers):
        if teacher is not None:
            with torch.no_grad(), teacher(policy, offload=False).in_place():
                row = batch.tokens[number], batch.response_lengths[number]
                said_of_all[number] = distributions(*row)
    rows = zip(batch.tokens, batch.response_lengths, batch.log_ratios, batch.advantages)
    for (tokens, length, log_ratios, advantage), theirs in zip(rows, said_of_all, strict=True):
        ours, written = distributions(tokens, length), tokens[-length:, None]
        logprobs = ours.gather(1, written)[:, 0]
        old = logprobs.detach() - log_ratios.double()
        advantages = torch.full_like(old, torch.tensor(advantage, dtype=torch.float32))
        if theirs is not None and section.form == "reverse_kl":
            said = theirs.gather(1, written)[:, 0] - old
            said = said if config.objective.name != "gspo" else said.mean()
            advantages = advantages + section.coefficient * said
        terms = surrogate(config.objective.name, logprobs, old, advantages)
        loss = loss - terms.mean() / len(batch.tokens)
        if theirs is not None and section.form != "reverse_kl":
            divergence = of_buckets(section.form, ours, theirs, section.top_k)
            loss = loss + section.coefficient * divergence.mean() / len(batch.tokens)

    gradients: dict[str, Tensor] = {}
    of_parameters = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
    for shard in parameter_shards(model):
        whole = gradients.setdefault(shard.name, loss.new_zeros(shard.global_shape))
        whole[shard.slices] = shard.view(of_parameters[shard.parameter])
    for name in gradients:
        if "word_embeddings" in name or "output_layer" in name:
            gradients[name] = gradients[name][:vocab_size]
    tear_down_model_parallel()
    return StepResult({"loss": loss.item()}, gradients)


def of_buckets(form: str, ours: Tensor, theirs: Tensor, k: int) -> Tensor:
    """The divergence [tokens] over the teacher's k tokens and the rest, computed from log-probs
    [tokens, vocabulary]."""
    best = theirs.topk(k)[1]
    is_rest = torch.ones_like(theirs).scatter(1, best, 0.0)

    def buckets(logprobs: Tensor) -> Tensor:
        rest = (logprobs.exp() * is_rest).sum(1, keepdim=True)
        return torch.cat([logprobs.gather(1, best), rest.log()], 1)

    q, p = buckets(ours), buckets(theirs)
    pairs = (p, q) if form == "forward_kl_topk" else (q, p)
    return (pairs[0].exp() * (pairs[0] - pairs[1])).sum(1)
