"""One GSPO step, from prompts to new weights, with the parts of the package. If you want to
understand the package, read this file first.

    python examples/one_step.py               # one step, in seconds, on any machine
    python examples/one_step.py --steps 20    # the reward rises

In a training run, gspo_megatron/rl/loop.py does the same for real prompts, on any number of ranks.
The shapes below use these letters:

    B  sequences of the step: 8 prompts with 4 responses each
    T  response tokens of all sequences, one sequence after the other
    b, t  sequences and response tokens of one micro-batch

GSPO (arXiv 2507.18071) has one importance ratio for each sequence: the geometric mean of the ratios
of its tokens, s_i = exp(mean over t of (log pi(y_t) - log pi_old(y_t))). It clips whole sequences.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    forward_backward,
    response_logprobs,
)
from gspo_megatron.batching.plan import MiniBatch, plan_step
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config, parse_config, resolve_parallel
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from gspo_megatron.objectives.advantages import group_mean_std
from gspo_megatron.platform.groups import set_up_model_parallel, start_processes, stop_processes
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.types import RolloutBatch

VOCABULARY, PAD, END = 16, 0, 1
PROMPTS, GROUP, LONGEST = 8, 4, 12  # prompts a step, responses a prompt, tokens a response
MINI_BATCHES = 2
# The paper's range of 3e-4 and 4e-4 is for responses of thousands of tokens. The ratio of a short
# response is a mean over few tokens and varies more, so the range here is wider.
CLIP_LOW, CLIP_HIGH = 0.02, 0.03

CONFIG = {
    "model": {"preset": "tiny", "megatron": {"num_layers": 2}},  # 8 experts, 2 for each token
    "data": {"tokenizer": "none"},  # the prompts below are token ids already
    "rollout": {"group_size": GROUP, "prompts_per_step": PROMPTS, "max_response_tokens": LONGEST},
    "training": {"precision": "fp32"},
    "optimizer": {"learning_rate": 3.0e-3},
}


@dataclass
class Parts:
    """The objects that a step needs."""

    config: Config
    policy: Policy  # Megatron-Core's GPTModel, or this rank's shard of it
    trainer: Trainer  # Megatron-Core's distributed Adam and the learning-rate schedule
    engine: MegatronEngine  # samples responses from the policy's own weights
    builder: MicroBatchBuilder  # packs sequences into micro-batches


def build_parts(seed: int) -> Parts:
    """A small policy with random weights, and the other parts. Without torchrun this process is the
    only rank. With torchrun and a `parallel` section in CONFIG, the same lines build a shard of the
    model on each rank."""
    config = parse_config(CONFIG)
    ranks = start_processes()
    parallel = resolve_parallel(config, ranks.world_size)
    set_up_model_parallel(parallel, seed)
    policy = build_policy(config, parallel, VOCABULARY)
    rate = config.optimizer.learning_rate
    return Parts(
        config,
        policy,
        build_trainer(policy, config.optimizer, Schedule(rate, rate, 0, 1, "constant")),
        MegatronEngine(policy, pad_id=PAD, eos_id=END),
        MicroBatchBuilder(policy, PAD, temperature=1.0),
    )


def reward_of(response: list[int]) -> float:
    """The share of even tokens. It is only an example: any function of a response can be a
    reward."""
    return sum(token % 2 == 0 for token in response) / len(response)


def score(batch: RolloutBatch) -> Tensor:
    """The rewards, [B] float64."""
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()  # [B]
    rewards = []
    for tokens, length in zip(batch.tokens.split(lengths), batch.response_lengths.tolist()):
        rewards.append(reward_of(tokens[-length:].tolist()))
    return torch.tensor(rewards, dtype=torch.float64)


@dataclass
class GspoLoss:
    """The loss of one mini-batch, called with each of its micro-batches on the last pipeline stage.

    `gspo` in gspo_megatron/objectives/losses.py is the same loss with metrics and context
    parallelism.
    """

    mini_batch: MiniBatch
    advantages: Tensor  # [B] float32
    clipped: int = 0  # number of clipped sequences

    def __call__(
        self, micro_batch: MicroBatch, logprobs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, None]:
        """`logprobs` and `entropies`, [t] float32, are those of this micro-batch's response tokens.
        Returns this micro-batch's part of the loss, a scalar."""
        packed = micro_batch.packed
        old = micro_batch.old_logprobs  # [t]; None in the first mini-batch
        old = logprobs.detach() if old is None else old
        # The sequence ratio: for each sequence, the sum over its tokens, then the mean, then exp.
        log_ratio = logprobs - old  # [t]
        sums = logprobs.new_zeros(len(packed.members))  # [b]
        sums = sums.index_add(0, packed.sequence_index, log_ratio)
        ratio = torch.exp(sums / packed.response_lengths)  # [b]
        # The clipped surrogate of PPO, for whole sequences.
        advantages = self.advantages[list(packed.members)]  # [b]
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)  # [b]
        self.clipped += int((surrogate < ratio * advantages).sum())
        # The loss is the mean over all sequences of the mini-batch, on all ranks. This is the part
        # of one micro-batch on this rank; Megatron-Core adds up the gradients of all parts.
        return -surrogate.sum() / self.mini_batch.num_sequences, None


def run_step(parts: Parts, step: int) -> dict[str, float]:
    """Make one step. Returns its metrics."""
    # 1. Draw the prompts: every prompt is two numbers.
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randint(2, VOCABULARY, (PROMPTS, 2), generator=generator).tolist()

    # 2. Roll out: GROUP responses for each prompt, with the log-prob of each sampled token.
    requests = Requests(prompts, group_index=range(PROMPTS), responses_per_prompt=GROUP)
    batch = parts.engine.generate(requests, Sampling(LONGEST), seed=step)
    # batch.tokens: prompts and responses; batch.response_lengths: [B]; batch.rollout_logprobs: [T]

    # 3. Score.
    rewards = score(batch)  # [B]

    # 4. Advantages: a reward relative to the other responses to the same prompt.
    group = dist.group.WORLD  # the data-parallel ranks: here one
    index = gather_index(batch, rewards, group)  # lengths, groups and rewards of all ranks
    advantages = group_mean_std(index.rewards, torch.tensor(index.groups))  # [B]

    # 5. Plan: mini-batches (one optimizer update each), cut into micro-batches by a token budget.
    plan = plan_step(
        index.lengths,
        index.response_lengths,
        mini_batches=MINI_BATCHES,
        data_parallel_size=1,
        token_budget=parts.config.training.micro_batch_tokens,
    )

    # 6. Redistribute: every sequence goes to the rank that trains on it.
    sequences = redistribute(batch, index, plan, group)
    mini_batches = parts.builder.build_step(plan, sequences, index)

    # 7. Old log-probs: a forward pass before the first update. The first mini-batch needs no such
    #    pass, because its old policy is the current policy.
    later = [micro_batch for batches in mini_batches[1:] for micro_batch in batches]
    for micro_batch, (logprobs, _) in zip(later, response_logprobs(parts.policy, later)):
        micro_batch.old_logprobs = logprobs  # [t]

    # 8. One optimizer update for each mini-batch, through Megatron-Core's pipeline schedule.
    norms, clipped = [], 0
    for mini_batch, micro_batches in zip(plan, mini_batches):
        loss = GspoLoss(mini_batch, advantages)
        zero_gradients(parts.policy.chunks, parts.trainer.optimizer)
        forward_backward(parts.policy, micro_batches, loss, mini_batch.num_micro_batches)
        norm, _ = parts.trainer.update()
        norms.append(norm)
        clipped += loss.clipped

    # 9. The rollout engine gets the new weights (this engine shares them).
    parts.engine.update_weights()
    return {
        "reward": float(rewards.mean()),
        "response_length": float(batch.response_lengths.float().mean()),
        "grad_norm": sum(norms) / len(norms),
        "clipped_sequences": clipped / len(index.lengths),
    }


def main() -> None:
    """Run some steps and print a line for each."""
    parser = argparse.ArgumentParser(description="one GSPO step on a tiny model")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    parts = build_parts(arguments.seed)
    try:
        for step in range(1, arguments.steps + 1):
            metrics = run_step(parts, step)
            print(f"step {step}", *(f"{name}={value:.3f}" for name, value in metrics.items()))
    finally:
        stop_processes()


if __name__ == "__main__":
    main()
