"""A policy update by the formulas alone. This reference shares no code with the trainer.

It runs in one process and computes one sequence at a time, without padding. It uses whole logits,
torch's log-softmax, plain autograd in float64, and the formula of each objective's paper. From the
package it uses only the model, which other tests compare with transformers. The routers' auxiliary
losses are left out, because they are means over micro-batches, and this reference has no
micro-batches.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.config import Config
from gspo_megatron.families.weight_map import is_vocabulary
from gspo_megatron.models.shards import parameter_shards
from gspo_megatron.platform.groups import tear_down_model_parallel
from gspo_megatron.verify.results import StepResult
from gspo_megatron.verify.synthetic import SyntheticBatch
from tests.parallel.models import build_on_ranks

# The lower and upper half-widths of the clip range in the papers.
CLIP = {
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "luspo": (3e-4, 4e-4),
    "grpo": (0.2, 0.27),
    "minirl": (0.2, 0.27),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "reinforce_leave_one_out": (0.2, 0.2),
}
# The divisor of a sum over all tokens of a mini-batch. Objectives that are not in this table
# average over the tokens of each sequence, and then over sequences.
SUMS = {
    "dapo": lambda sequences, tokens, longest: tokens,
    "cispo": lambda sequences, tokens, longest: tokens,
    "dppo_tv": lambda sequences, tokens, longest: tokens,
    "dppo_kl": lambda sequences, tokens, longest: tokens,
    "ipo": lambda sequences, tokens, longest: tokens,
    "vespo": lambda sequences, tokens, longest: tokens,
    "dr_grpo": lambda sequences, tokens, longest: sequences * longest,
    "minirl": lambda sequences, tokens, longest: sequences,
    "luspo": lambda sequences, tokens, longest: sequences,
}


def explicit_update(config: Config, vocab_size: int, batch: SyntheticBatch) -> StepResult:
    """Loss, gradient norm and gradients. The configuration must ask for float64."""
    assert config.training.precision == "fp64" and dist.get_world_size() == 1
    policy = build_on_ranks(config, vocab_size)
    policy.eval()  # so the routers compute no auxiliary losses
    [model] = policy.models

    name = config.objective.name
    loss, count = torch.zeros((), dtype=torch.float64), sum(batch.masked_lengths())
    sequences, longest = len(batch.tokens), config.rollout.max_response_tokens
    masks = batch.masks or [torch.ones(n, dtype=torch.bool) for n in batch.response_lengths]
    # Advantages are float32, because the trainer sends them to the ranks in float32.
    of_tokens = batch.token_advantages or [
        torch.full((n,), advantage, dtype=torch.float32)
        for n, advantage in zip(batch.response_lengths, batch.advantages, strict=True)
    ]
    branches = batch.branches or [
        [(len(tokens) - response, response)]
        for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True)
    ]
    for tokens, pieces, log_ratios, advantages, mask in zip(
        batch.tokens, branches, batch.log_ratios, of_tokens, masks, strict=True
    ):
        if not mask.any():  # the sequence has no term, but counts as a sequence
            continue
        found: list[Tensor] = []
        for ids, (prompt, _) in zip(tokens.split([sum(each) for each in pieces]), pieces):
            positions = torch.arange(len(ids))[None]
            hidden = model(input_ids=ids[None], position_ids=positions, attention_mask=None)[0]
            logits = hidden @ model.head_weight[:vocab_size].t() / config.rollout.temperature
            distribution = torch.log_softmax(logits, dim=-1)
            found += [distribution[place - 1, ids[place]] for place in range(prompt, len(ids))]
        logprobs = torch.stack(found)
        old = logprobs.detach() - log_ratios.double()
        # Tokens outside the mask are treated like prompt tokens.
        logprobs, old = logprobs[mask], old[mask]
        weights = advantages[mask].double()
        weight = weights if batch.token_advantages else weights[0]
        terms = surrogate(name, logprobs, old, weight).expand(len(old))  # one term for each token
        if name in SUMS:
            loss = loss - terms.sum() / SUMS[name](sequences, count, longest)
        else:
            loss = loss - terms.mean() / sequences

    parameters = list(model.parameters())
    of_parameters = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
    gradients: dict[str, Tensor] = {}
    # A parameter may consist of several tensors, such as gate and up projection.
    for shard in parameter_shards(model):
        whole = gradients.setdefault(shard.name, loss.new_zeros(shard.global_shape))
        whole[shard.slices] = shard.view(of_parameters[shard.parameter])
    for name in gradients:
        if is_vocabulary(name):
            gradients[name] = gradients[name][:vocab_size]
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    tear_down_model_parallel()
    return StepResult({"loss": loss.item(), "grad_norm": norm.item()}, gradients)


def surrogate(name: str, logprobs: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """The terms of one sequence: one term for each token [tokens], or one term for the whole
    sequence."""
    log_ratios = logprobs - old
    ratios = log_ratios.exp()
    if name == "cispo":  # arXiv 2506.13585, eqs. 4-5, with a cap of 5
        return ratios.detach().clamp(max=5.0) * advantage * logprobs
    if name == "sapo":  # arXiv 2511.20347
        tau = 1.0 if advantage > 0 else 1.05
        return 4 / tau * torch.sigmoid(tau * (ratios - 1)) * advantage
    if name == "gmpo":  # arXiv 2507.20673, eq. 4, with limits e^-0.4 and e^0.4
        sign = advantage.sign()
        limited = sign * torch.min(sign * log_ratios, (sign * log_ratios).clamp(-0.4, 0.4))
        return limited.mean().exp() * advantage
    if name in ("dppo_tv", "dppo_kl", "ipo"):
        return within_trust_region(name, logprobs, old, advantage)
    if name == "vespo":  # arXiv 2602.10693
        product = log_ratios.sum().exp().detach()
        k, fall = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        return product**k * torch.exp(fall * (1 - product)) * advantage * logprobs
    low, high = CLIP[name]
    # arXiv 2512.01374; in these tests the rollout's log-probs are the old log-probs
    if name == "minirl":
        cut = ((advantage > 0) & (ratios > 1 + high)) | ((advantage < 0) & (ratios < 1 - low))
        return torch.where(cut, 0.0, ratios.detach()) * advantage * logprobs
    if name in ("gspo", "luspo"):  # arXiv 2507.18071, eqs. 5 and 7
        ratios = log_ratios.mean().exp()
    if name == "gspo_token":  # eqs. 13 and 14
        ratios = log_ratios.mean().exp().detach() * (logprobs - logprobs.detach()).exp()
    if name == "reinforce_leave_one_out":
        ratios = log_ratios.sum().exp()
    return torch.min(ratios * advantage, ratios.clamp(1 - low, 1 + high) * advantage)


def within_trust_region(name: str, logprobs: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """The terms of the objectives that mask tokens by a divergence: those of arXiv 2602.04879, and
    the IPO loss of prime-rl."""
    ratios, p, q = (logprobs - old).exp(), old.exp(), logprobs.detach().exp()
    if name == "ipo":
        near = (q - p).abs() <= 0.1
        return torch.where(near, ratios * advantage, 0.0) - 1e-3 * (logprobs - old).square()
    if name == "dppo_tv":
        far = (q - p).abs() > 0.15
    else:
        far = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log() > 0.05
    away = ((advantage > 0) & (q > p)) | ((advantage < 0) & (q < p))
    return torch.where(far & away, 0.0, ratios) * advantage
