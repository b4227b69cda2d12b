"""The environment with vLLM, tiny models for vLLM, and one server for all tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo_megatron.data.toy import write_toy_dataset
from tests.vllm.environment import find_vllm_python
from tests.vllm.servers import Server, run_options, serve


@pytest.hookimpl(tryfirst=True)  # before the function in tests/conftest.py
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests of the server to one process of pytest-xdist, because the server takes long to
    start."""
    for item in items:
        if "vllm_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("vllm_server"))


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of an environment with vLLM for CPUs. It is made if it is missing."""
    return find_vllm_python()


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, answers and a tokenizer."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy_dataset(folder, "mixed", train=32, test=4, seed=1)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A function that takes a seed and returns a Hugging Face folder: a Qwen3-MoE with random
    weights in fp32 and a tied output layer. Each folder is made once."""

    @functools.cache
    def make(seed: int) -> Path:
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            vocab_size=257,
            # vLLM's kernels need a multiple of 32, and a head_dim of 32, 64, 80, ....
            hidden_size=64,
            head_dim=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            # With this value the experts matter, and log-probs have a usual size.
            initializer_range=0.1,
        )
        folder = tmp_path_factory.mktemp(f"tiny_qwen3_moe_{seed}")
        Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="package")
def vllm_server(
    vllm_python: Path,
    tiny_qwen3_moe: Callable[[int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A server that starts with the tiny model of seed 0. Tests give it other weights."""
    with serve(
        vllm_python, tmp_path_factory.mktemp("vllm"), run_options(tiny_qwen3_moe(0))
    ) as server:
        yield server
