"""A server on a CPU, for a model with gated delta nets. For such models vLLM has only bf16 kernels
on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.vllm.servers import run_options, serve

# As all families but one in test_families.py, which trains such a model.
pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1800)]
# Both sides compute in bf16 with sums in different orders, which gave a difference of 0.07. A wrong
# layout of the weights gives a far larger difference.
TOLERANCE = 0.25


def test_it_draws_by_the_log_probs_of_transformers(vllm_python: Path, tmp_path: Path) -> None:
    """The prompts are longer than a chunk of 64 tokens. The test also compares the experts of each
    token."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=257,
        hidden_size=64,
        head_dim=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_key_head_dim=128,  # vLLM's kernels for CPUs support only this size
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        intermediate_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    model = Qwen3NextForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    # For such models, prefix caching needs chunked prefill (a prompt is computed in parts), which
    # our runs on CPUs turn off.
    options = run_options(folder) | {"dtype": "bfloat16", "enable_prefix_caching": False}
    prompt = [3 + number % 250 for number in range(0, 7 * 87, 7)]
    with serve(vllm_python, tmp_path, options) as server:
        sample = server.sample(prompt, 20, temperature=1.0, seed=1)
    assert sample.experts.shape == (len(prompt) + 19, 4, 2)
    ids = prompt + sample.tokens
    with torch.no_grad():
        logits = model.float()(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[range(20), sample.tokens]
    difference = torch.tensor(sample.logprobs) - expected
    assert difference.abs().max() < TOLERANCE
