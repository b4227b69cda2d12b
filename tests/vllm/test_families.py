"""The families that vLLM serves on CPUs. A model of each family is trained for two RL steps, from a
folder in the published format. The log-probs of the responses must be those of training, both with
the first weights and with updated weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.hf.published import DELTA_NETS, model_config, random_tensors, write_folder
from tests.unit.hf.test_hf_models import YARN
from tests.vllm.runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# The largest allowed difference. Both sides compute in fp32 with different kernels. vLLM's decoding
# with latent attention is the least precise.
SAME = 5e-5
# The largest allowed difference with delta nets, for which vLLM has only bf16 kernels on CPUs. The
# largest difference that we have seen was 0.02.
SAME_IN_BF16 = 0.06
VOCABULARY = 257
# vLLM's kernels need heads of 32, 64, ... channels. For latent attention, vLLM's kernels need the
# widths of published models.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
NO_WIDTH = {"num_attention_heads": 2, "num_key_value_heads": 1}
LATENT = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# transformers reads mlp_layer_types. vLLM reads first_k_dense_replace.
TYPES = {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1}
SERVED: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "glm4_moe": HEADS,
    "llama": HEADS | {"tie_word_embeddings": True},
    # This family has no YaRN, so vLLM uses another rotary kernel than for the families above.
    "glm4_moe_lite": LATENT | TYPES,
    "hy_v3": HEADS | TYPES | {"expert_hidden_dim": 28},  # vLLM has its own name for this size
    "mixtral": HEADS,
    "olmoe": NO_WIDTH | {"num_key_value_heads": 2},
    "qwen2": NO_WIDTH,
    "qwen2_moe": HEADS | {"mlp_only_layers": []},
    "qwen3": HEADS,
    "qwen3_moe": HEADS | {"mlp_only_layers": []},
    "qwen3_next": HEADS
    | {"num_hidden_layers": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"linear_num_value_heads": 4, "mlp_only_layers": []},
}
QUICK = ("deepseek_v3",)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in SERVED],
)
def test_servers_sample_from_the_policy(vllm_python: Path, tmp_path: Path, family: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    sizes |= {"max_position_embeddings": 2048, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5}
    in_bf16 = family in DELTA_NETS
    dtype = "bfloat16" if in_bf16 else "float32"
    config = model_config(family, dtype, **sizes | SERVED[family])
    model = write_folder(tmp_path / "model", config, random_tensors(config, seed=1))
    has_experts = any("experts_per_tok" in key for key in config)
    run = make_run(
        tmp_path,
        vllm_python,
        model={"megatron": {}, "hf_path": str(model)},
        routing={"replay": "r3"} if has_experts else {},
        training={"steps": 2, "precision": "bf16" if in_bf16 else "fp32"},
    )
    assert "does not have the trainer's weights" not in run.finish(run.start())
    steps = run.steps()
    assert [record["sync/version"] for record in steps] == [1, 2]
    for record in steps:
        assert record["mismatch/abs_mean"] < (SAME_IN_BF16 if in_bf16 else SAME)
        assert record["grad_norm"] > 0
        assert record.get("replay/missing_rows", 0) == 0
