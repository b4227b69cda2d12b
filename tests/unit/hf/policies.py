"""Policies whose shape and weights come from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.config import Config, check_config, parse_config, resolve_parallel
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine

PRECISIONS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}
NO_TOKEN = 10_000  # an end-of-sequence token that is never sampled


def config_of(
    folder: Path, dtype: str = "float32", layout: str = "tp=1", **megatron: Any
) -> Config:
    return parse_config(
        {
            "model": {"hf_path": str(folder), "megatron": megatron, "backend": "torch_native"},
            "parallel": {"layout": layout},
            "data": {"tokenizer": "none"},
            # With shared prompts, routers' losses would differ under context parallelism.
            "training": {"precision": PRECISIONS[dtype], "share_prompts": False},
        }
    )


def policy_of(config: Config) -> Policy:
    """A policy with the weights of the folder."""
    world_size = dist.get_world_size()
    check_config(config, world_size)
    vocab_size = config.resolved_model().vocab_size
    assert vocab_size is not None and config.model.hf_path is not None
    policy = build_policy(config, resolve_parallel(config, world_size), vocab_size)
    load_hf(config.model.hf_path, policy)
    return policy


@torch.no_grad()
def logits_of(policy: Policy, ids: list[int]) -> Tensor:
    """The logits [length, vocabulary] on one rank."""
    policy.eval()
    model = policy.models[0]
    positions = torch.arange(len(ids))[None]
    hidden = model(input_ids=torch.tensor([ids]), position_ids=positions, attention_mask=None)
    return model.next_token_logits(hidden[0])


def greedy(
    policy: Policy, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The most probable continuations of all prompts, and the log-probs of their tokens. Every
    data-parallel rank runs its rollout engine on all prompts."""
    engine = MegatronEngine(policy, pad_id=0, eos_id=NO_TOKEN)
    requests = Requests(prompts, list(range(len(prompts))), responses_per_prompt=1)
    batch = engine.generate(requests, Sampling(max_tokens=count, temperature=0.0), seed=1)
    lengths = batch.response_lengths.tolist()
    total = (batch.prompt_lengths + batch.response_lengths).tolist()
    tokens = [row.tolist()[-n:] for row, n in zip(batch.tokens.split(total), lengths)]
    return tokens, [row.tolist() for row in batch.rollout_logprobs.split(lengths)]
