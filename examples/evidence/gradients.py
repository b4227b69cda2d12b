"""The gradient of each objective, k updates away from the policy that sampled.

    python examples/evidence/gradients.py --length 32 --output results/gradients.jsonl

A small MoE draws batches of responses of one length. Then it is updated k times on other responses
of the same policy, as mini-batches do. At k = 1, 2, 4, 8, 16 each objective's gradient is taken on
every batch, and compared with the policy gradient on fresh responses of the updated policy
(estimators.py). Every objective sees the same batches. One JSON line for each k and objective is
added to the output; those that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from estimators import Products, ratio_figures, with_intervals
from torch import Tensor

from gspo_megatron.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    forward_backward,
    response_logprobs,
)
from gspo_megatron.batching.plan import MiniBatch, data_ranks, plan_step
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config, parse_config, resolve_parallel
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from gspo_megatron.objectives import Objective, build_objective
from gspo_megatron.objectives.advantages import group_mean_std
from gspo_megatron.platform.groups import set_up_model_parallel, start_processes, stop_processes
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron import MegatronEngine
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.routing.replay import Recording, Replaying, RouteTable
from gspo_megatron.types import LossInputs, RolloutBatch

VOCABULARY, PAD = 32, 0
PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 4  # a batch has 64 responses
UPDATES = (1, 2, 4, 8, 16)
WARM_UP = 35  # supervised updates before anything is measured: about half of the reward
ROUTER_NOISE = 0.1  # std on the routers' scores of the engine, with --mismatch router_noise

UNCLIPPED = {"clip_low": 0.999, "clip_high": 1e9}
# What an arm changes in the `objective` section, and which routes its gradient replays. The means
# over tokens and over sequences are the same here, as all responses have one length.
SAME_SCALE = {"aggregation": "sequence_mean", "advantage": "group_mean_std"}
ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "gspo": ({"name": "gspo"}, "off"),
    "gspo ±0.04": ({"name": "gspo", "clip_low": 0.04, "clip_high": 0.04}, "off"),
    "gspo unclipped": ({"name": "gspo", **UNCLIPPED}, "off"),
    "gspo_token": ({"name": "gspo_token"}, "off"),
    "grpo": ({"name": "grpo"}, "off"),
    "grpo unclipped": ({"name": "grpo", **UNCLIPPED}, "off"),
    "cispo": ({"name": "cispo", **SAME_SCALE}, "off"),
    "gmpo": ({"name": "gmpo"}, "off"),
    "minirl": ({"name": "minirl", **SAME_SCALE}, "off"),
    "product unclipped": ({"name": "reinforce_leave_one_out", **UNCLIPPED, **SAME_SCALE}, "off"),
    "gspo ±0.04 + r2": ({"name": "gspo", "clip_low": 0.04, "clip_high": 0.04}, "r2"),
    "gspo ±0.04 + r3": ({"name": "gspo", "clip_low": 0.04, "clip_high": 0.04}, "r3"),
    "grpo + r2": ({"name": "grpo"}, "r2"),
    "grpo + r3": ({"name": "grpo"}, "r3"),
}


UNBIASED = "product unclipped"


@dataclass(frozen=True)
class Setting:
    """What is varied between the runs of this file."""

    length: int
    mismatch: str  # of the engine that samples: none | router_noise
    learning_rate: float
    seed: int
    batches: int
    reference_batches: int


@dataclass
class Batch:
    """Responses with what the gradients of all arms need."""

    micro_batches: list[MicroBatch]
    mini_batch: MiniBatch
    advantages: Tensor  # [num_sequences] float32
    reward: float  # mean
    routes: list[dict[str, RouteTable]]  # of each micro-batch: r2, the trainer's; r3, the engine's


class Laboratory:
    """One policy, and what is done with it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.config = configuration(setting)
        ranks = start_processes()
        parallel = resolve_parallel(self.config, ranks.world_size)
        set_up_model_parallel(parallel, setting.seed)
        self.policy: Policy = build_policy(self.config, parallel, VOCABULARY)
        self.layers = attach_hooks(self.policy.models)
        rate = setting.learning_rate
        schedule = Schedule(rate, rate, 0, 1, "constant")
        self.trainer: Trainer = build_trainer(self.policy, self.config.optimizer, schedule)
        self.builder = MicroBatchBuilder(self.policy, PAD, temperature=1.0)
        noise = ROUTER_NOISE if setting.mismatch == "router_noise" else 0.0
        self.engines = {
            name: MegatronEngine(
                self.policy,
                pad_id=PAD,
                eos_id=VOCABULARY,  # never drawn: all responses have their full length
                record_routes=True,
                router_noise=std,
            )
            for name, std in (("sampling", noise), ("reference", 0.0))
        }
        self.parameters = [p for model in self.policy.models for p in model.parameters()]
        self._draws = 0

    def draw(self, engine: str = "sampling") -> Batch:
        """A new batch of the present policy."""
        self._draws += 1
        seed = (self.setting.seed << 20) + self._draws
        generator = torch.Generator().manual_seed(seed)
        shape = (PROMPTS, PROMPT_TOKENS)
        prompts = torch.randint(1, VOCABULARY, shape, generator=generator).tolist()
        requests = Requests(prompts, group_index=range(PROMPTS), responses_per_prompt=GROUP)
        drawn = self.engines[engine].generate(requests, Sampling(self.setting.length), seed=seed)
        tokens = drawn.tokens.view(PROMPTS * GROUP, -1)
        return self._batch(drawn, share_right(tokens))

    def imitate(self) -> None:
        """One supervised update on responses that are right."""
        self._draws += 1
        generator = torch.Generator().manual_seed((self.setting.seed << 20) + self._draws)
        tokens = right_sequences(PROMPTS * GROUP, self.setting.length, generator)
        count = torch.full((len(tokens),), self.setting.length)
        drawn = RolloutBatch(
            tokens=tokens.flatten(),
            prompt_lengths=torch.full_like(count, PROMPT_TOKENS),
            response_lengths=count,
            rollout_logprobs=torch.zeros(tokens.shape[0] * self.setting.length),
            truncated=torch.zeros_like(count, dtype=torch.bool),
            sample_index=torch.arange(len(tokens)),
            group_index=torch.arange(len(tokens)) // GROUP,
        )
        batch = self._batch(drawn, share_right(tokens))
        batch.advantages = torch.ones(len(tokens))  # the gradient of the mean log-likelihood
        self.update(batch, objective_of(ARMS["gspo unclipped"][0], self.setting.length))

    def _batch(self, drawn: RolloutBatch, rewards: Tensor) -> Batch:
        group = dist.group.WORLD
        index = gather_index(drawn, rewards, group)
        (mini_batch,) = plan = plan_step(
            index.lengths,
            index.masked_lengths,
            mini_batches=1,
            data_parallel_size=1,
            token_budget=self.config.training.micro_batch_tokens,
        )
        sequences = redistribute(drawn, index, data_ranks(plan, len(index.lengths)), group)
        (micro_batches,) = self.builder.build_step(plan, sequences, index)
        routes = [
            {} if each.rollout_routes is None else {"r3": self._engine_routes(each)}
            for each in micro_batches
        ]
        advantages = group_mean_std(index.rewards, torch.tensor(index.groups))
        return Batch(micro_batches, mini_batch, advantages, float(rewards.mean()), routes)

    def _engine_routes(self, micro_batch: MicroBatch) -> RouteTable:
        """The sequences stand end to end in a micro-batch, without padding between them. The last
        token of each was never fed to the engine: the trainer's router chooses for it."""
        pieces = micro_batch.rollout_routes
        assert pieces is not None
        experts = torch.cat(pieces)  # [tokens, layers, k]
        count = micro_batch.packed.input_ids.numel()
        known = torch.ones(count, dtype=torch.bool)
        known[torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1] = False
        known[len(experts) :] = False  # padding
        table = experts.new_zeros((count, *experts.shape[1:]))
        table[: len(experts)] = experts
        return RouteTable(tuple(self.layers), table.permute(1, 0, 2).contiguous(), known)

    def remember(self, batch: Batch) -> None:
        """Old log-probs and routes of the present policy."""
        recordings = []
        for micro_batch in batch.micro_batches:
            micro_batch.routes = Recording(num_layers=len(self.layers))
            recordings.append(micro_batch.routes)
        found = response_logprobs(self.policy, batch.micro_batches)
        for number, (micro_batch, (logprobs, _)) in enumerate(zip(batch.micro_batches, found)):
            micro_batch.old_logprobs = logprobs
            batch.routes[number]["r2"] = recordings[number].table()
            micro_batch.routes = None

    def gradient(self, batch: Batch, objective: Objective, replay: str) -> tuple[Tensor, float]:
        """The gradient of the objective (of what is maximised) on a batch, [parameters] float32,
        and the share of tokens that are clipped."""
        clipped, count = 0.0, 0.0

        def loss(micro_batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> Any:
            nonlocal clipped, count
            packed, old = micro_batch.packed, micro_batch.old_logprobs
            outputs = objective(
                LossInputs(
                    logprobs=logprobs,
                    old_logprobs=logprobs.detach() if old is None else old,
                    mask=torch.ones_like(logprobs.detach()),
                    sequence_index=packed.sequence_index,
                    advantages=batch.advantages[list(packed.members)],
                    sequence_lengths=packed.response_lengths.float(),
                    global_num_sequences=batch.mini_batch.num_sequences,
                    global_num_tokens=batch.mini_batch.num_response_tokens,
                    sum_over_shards=lambda values: values,
                    is_primary_shard=True,
                    entropy=entropies,
                    rollout_logprobs=micro_batch.rollout_logprobs,
                )
            )
            share = outputs.means.get("clip/token/binding")
            if share is not None:
                clipped, count = clipped + float(share[0]), count + float(share[1])
            return outputs.loss, None

        for number, micro_batch in enumerate(batch.micro_batches):
            table = batch.routes[number].get(replay)
            micro_batch.routes = None if table is None else Replaying(table)
        zero_gradients(self.policy.chunks, self.trainer.optimizer)
        total = batch.mini_batch.num_micro_batches
        forward_backward(self.policy, batch.micro_batches, loss, total)
        for micro_batch in batch.micro_batches:
            micro_batch.routes = None
        flat = torch.cat([-p.main_grad.flatten() for p in self.parameters])
        if objective.name == ARMS[UNBIASED][0]["name"]:
            flat /= self.setting.length  # it weighs sums over a response, the others means
        return flat, clipped / max(count, 1.0)

    def update(self, batch: Batch, objective: Objective) -> float:
        """One optimizer step; returns the gradient's norm."""
        self.gradient(batch, objective, "off")
        norm, _ = self.trainer.update()
        for engine in self.engines.values():
            engine.update_weights()
        return norm

    def distance(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """How far the policy is from the one that sampled, over all batches."""
        log_ratios, mismatch, changed = [], [], []
        for batch in batches:
            recordings = []
            for micro_batch in batch.micro_batches:
                micro_batch.routes = Recording(num_layers=len(self.layers))
                recordings.append(micro_batch.routes)
            found = response_logprobs(self.policy, batch.micro_batches)
            for number, (micro_batch, (now, _)) in enumerate(zip(batch.micro_batches, found)):
                old, engine = micro_batch.old_logprobs, micro_batch.rollout_logprobs
                log_ratios.append((now - old).view(-1, self.setting.length).double())
                mismatch.append((old - engine).abs().mean())
                before, after = batch.routes[number]["r2"], recordings[number].table()
                stays = (before.experts[..., None] == after.experts[..., None, :]).any(-1)
                changed.append(1 - stays.double().mean((1, 2)))  # [layers]
                micro_batch.routes = None
        joined = torch.cat(log_ratios)
        return {
            "kl": float(-joined.mean()),
            "mismatch": float(torch.stack(mismatch).mean()),
            "changed_experts": torch.stack(changed).mean(0).tolist(),
            **ratio_figures(joined.numpy()),
        }


def share_right(tokens: Tensor) -> Tensor:
    """Rewards [sequences] float64 of [sequences, prompt + response tokens]: the share of response
    tokens y_t with (y_t + y_{t-1}) mod 3 equal to the first prompt token mod 3."""
    response, before = tokens[:, PROMPT_TOKENS:], tokens[:, PROMPT_TOKENS - 1 : -1]
    return ((response + before) % 3 == tokens[:, :1] % 3).double().mean(1)


def right_sequences(count: int, length: int, generator: torch.Generator) -> Tensor:
    """[count, prompt + response tokens]: random ones that earn the whole reward."""
    tokens = torch.randint(1, VOCABULARY, (count, PROMPT_TOKENS + length), generator=generator)
    for place in range(PROMPT_TOKENS, tokens.shape[1]):
        wrong = tokens[:, place] + tokens[:, place - 1] - tokens[:, 0]
        tokens[:, place] -= wrong % 3
        # 0 is for padding, and what is below it: three higher are right as well
        tokens[:, place] += 3 * (tokens[:, place] < 1)
    return tokens


def configuration(setting: Setting) -> Config:
    """32 experts of which a token takes 4, in 2 layers."""
    return parse_config(
        {
            "model": {
                "preset": "tiny",
                "vocab_size": VOCABULARY,
                "max_sequence_length": PROMPT_TOKENS + setting.length,
                "megatron": {
                    "num_layers": 2,
                    "num_moe_experts": 32,
                    "moe_router_topk": 4,
                    "moe_ffn_hidden_size": 32,
                    "moe_aux_loss_coeff": 0.0,
                },
            },
            "data": {"tokenizer": "none"},
            "rollout": {
                "group_size": GROUP,
                "prompts_per_step": PROMPTS,
                "max_response_tokens": setting.length,
            },
            "optimizer": {"learning_rate": setting.learning_rate},
            "training": {"precision": "fp32", "micro_batch_tokens": 1 << 14},
        }
    )


def objective_of(section: Mapping[str, Any], length: int) -> Objective:
    """As in a run with this `objective` section."""
    config = parse_config({"objective": dict(section), "data": {"tokenizer": "none"}})
    return build_objective(config.objective, length)


def measure(setting: Setting, arms: Sequence[str], updates: Sequence[int], path: Path) -> None:
    """Add the lines of a setting to the file."""
    start = time.monotonic()
    laboratory = Laboratory(setting)
    plain = objective_of(ARMS["gspo unclipped"][0], setting.length)
    for _ in range(WARM_UP):
        laboratory.imitate()
    kept = [laboratory.draw() for _ in range(setting.batches)]
    spent = [laboratory.draw() for _ in range(max(updates))]  # for the updates
    for batch in kept + spent:
        laboratory.remember(batch)
    grpo = objective_of(ARMS["grpo"][0], setting.length)
    whole = objective_of(ARMS[UNBIASED][0], setting.length)
    for number, batch in enumerate(spent, 1):
        laboratory.update(batch, grpo)
        if number not in updates:
            continue
        distance = laboratory.distance(kept)
        fresh = [laboratory.draw("reference") for _ in range(setting.reference_batches)]
        reference = torch.stack([laboratory.gradient(b, plain, "off")[0] for b in fresh])
        reward = sum(b.reward for b in fresh) / len(fresh)
        unbiased = torch.stack([laboratory.gradient(b, whole, "off")[0] for b in kept])
        for arm in arms:
            section, replay = ARMS[arm]
            objective = objective_of(section, setting.length)
            pairs = [laboratory.gradient(batch, objective, replay) for batch in kept]
            record = {
                "length": setting.length,
                "mismatch": setting.mismatch,
                "learning_rate": setting.learning_rate,
                "seed": setting.seed,
                "updates": number,
                "arm": arm,
                "batches": len(kept),
                "reference_batches": len(fresh),
                "reward": round(reward, 4),
                "clipped_tokens": float(np.mean([share for _, share in pairs])),
                "distance": distance,
                **with_intervals(products(torch.stack([g for g, _ in pairs]), unbiased, reference)),
            }
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rounded(record)) + "\n")
        print(f"length {setting.length}, {number} updates: {time.monotonic() - start:.0f} s")


def products(own: Tensor, unbiased: Tensor, reference: Tensor) -> Products:
    """own, unbiased: [batches, parameters] float32, of the same batches; reference: likewise."""
    own, unbiased, reference = own.double(), unbiased.double(), reference.double()
    pairs = ((own, own), (own - unbiased,) * 2, (own, reference), (reference, reference))
    return Products(*((left @ right.T).numpy() for left, right in pairs))


def rounded(value: Any) -> Any:
    """Floats with six digits, all through a JSON value."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=32, help="tokens of every response")
    parser.add_argument("--mismatch", choices=("none", "router_noise"), default="none")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batches", type=int, default=32, help="of 64 responses, for a gradient")
    parser.add_argument("--reference-batches", type=int, default=64)
    parser.add_argument("--updates", type=int, nargs="+", default=list(UPDATES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--output", type=Path, default=Path("gradients.jsonl"))
    arguments = parser.parse_args()
    setting = Setting(
        arguments.length,
        arguments.mismatch,
        arguments.learning_rate,
        arguments.seed,
        arguments.batches,
        arguments.reference_batches,
    )
    try:
        measure(setting, arguments.arms, arguments.updates, arguments.output)
    finally:
        stop_processes()


if __name__ == "__main__":
    main()
