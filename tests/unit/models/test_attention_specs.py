"""Layouts and backends that a kind of attention cannot be cut for are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gspo_megatron.errors import UserError
from gspo_megatron.models.specs import block_spec


def _refusal(backend: str = "torch_native", joint: bool = False, **config: Any) -> str:
    values = {
        "tensor_model_parallel_size": 1,
        "num_query_groups": 2,
        "multi_latent_attention": False,
        "sequence_parallel": True,
        "layernorm_epsilon": 1e-6,
        "q_lora_rank": 8,
    }
    with pytest.raises(UserError) as error:
        block_spec(SimpleNamespace(**values | config), backend, None, joint_qk_norm=joint)
    return str(error.value)


def test_norms_over_all_heads_want_whole_heads_of_keys() -> None:
    said = _refusal(joint=True, tensor_model_parallel_size=4)
    assert said.startswith("parallel.tensor_model_parallel_size = 4: ") and " 2 heads" in said


def test_latent_attention_wants_sequence_parallelism() -> None:
    said = _refusal(
        multi_latent_attention=True, tensor_model_parallel_size=2, sequence_parallel=False
    )
    assert said.startswith("parallel.sequence_parallel = false: ")


def test_fused_norms_have_one_epsilon() -> None:
    said = _refusal("transformer_engine", multi_latent_attention=True, layernorm_epsilon=1e-5)
    assert said.startswith("model.backend = transformer_engine: ") and "1e-05" in said
