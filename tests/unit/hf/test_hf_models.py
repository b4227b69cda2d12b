"""Each family on one rank: import and export keep every bit, and the model computes the same as in
transformers."""

from __future__ import annotations

import json
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from gspo_megatron.families import FAMILIES
from gspo_megatron.families.qwen3_next import FULL, LINEAR
from gspo_megatron.hf.export import export_hf
from tests.unit.hf.policies import config_of, greedy, logits_of, policy_of
from tests.unit.hf.published import (
    ADDED_KEYS,
    CONFIGS,
    VOCABULARY,
    Variant,
    assert_same_bits,
    read_folder,
    variant_name,
    write_model,
)
from tests.unit.hf.transformers_side import ask

pytestmark = pytest.mark.usefixtures("one_rank")

# The tolerance for fp32 logits of size 3 to 5 from four layers. The package and transformers add up
# in different orders. The largest error seen was 5e-6.
TOLERANCE = 1e-5
# The tolerance for delta nets and texts of 150 tokens. Compared with fp64, transformers has an
# error as large as that of the package, because norms amplify small values.
DELTA_TOLERANCE = 5e-5

YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32,
    "beta_slow": 1,
}
VARIANTS: list[Variant] = [
    *((family, {}) for family in CONFIGS),
    ("qwen3_moe", {"tie_word_embeddings": True, "norm_topk_prob": False}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    # families of experts, but all layers are dense
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}),
    ("deepseek_v3", {"first_k_dense_replace": 4}),
    ("ernie4_5_moe", {"moe_layer_start_index": 4}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": []}),
    ("olmoe", {"num_key_value_heads": 6, "norm_topk_prob": True}),
    # The original context of YaRN is 8 tokens, and the texts are longer. The first config has both
    # mscale factors of DeepSeek-V3. The next three have other factors, one factor, and no factor.
    ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("glm4_moe_lite", {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5}}),
    ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 0.707}, "q_lora_rank": None, "n_group": 1}),
    ("glm4_moe_lite", {"rope_scaling": YARN}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "partial_rotary_factor": 1.0}),
    ("llama", {"rope_scaling": None, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    # In the first of these configs, three of the four layers have a window of one token, and YaRN
    # has rounded bounds. The second config has no windows.
    (
        "gpt_oss",
        {
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "sliding_window": 1,
            "rope_scaling": YARN | {"beta_fast": 0.7, "beta_slow": 0.07},
        },
    ),
    ("gpt_oss", {"layer_types": ["full_attention"] * 4, "rope_scaling": {"rope_type": "default"}}),
    ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}),
    ("minimax_m2", {"num_key_value_heads": 6, "rotary_dim": 12}),
    (
        "ernie4_5_moe",
        {"tie_word_embeddings": True, "moe_num_shared_experts": 0, "moe_layer_interval": 1},
    ),
    ("bailing_moe_v2", {"use_qkv_bias": True, "use_qk_norm": False, "first_k_dense_replace": 2}),
    # Every second layer has attention, and each key head has one value head.
    ("qwen3_next", {"layer_types": [LINEAR, FULL] * 2, "linear_num_value_heads": 2}),
]
HAVE_NO_CLASS = ("bailing_moe_v2",)  # transformers has no class for it; see test_bailing


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, "float32") for variant in VARIANTS),
        (("qwen3_moe", {}), "bfloat16"),
        # The routers of these families have fp32 biases.
        *(((name, {}), "bfloat16") for name in ("deepseek_v3", "minimax_m2", "ernie4_5_moe")),
        (("qwen3_next", {}), "bfloat16"),  # its delta nets have a decay in fp32
    ],
    ids=lambda given: given if isinstance(given, str) else variant_name(given),
)
def test_there_and_back_is_bit_for_bit(tmp_path: Path, variant: Variant, dtype: str) -> None:
    family, changes = variant
    source = write_model(tmp_path / "source", family, seed=3, **changes, torch_dtype=dtype)
    policy = policy_of(config_of(source, dtype))
    original = json.loads((source / "config.json").read_text())
    export_hf(policy, tmp_path / "again", hf_config=original, max_shard_bytes=30_000)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 2
    assert_same_bits(read_folder(tmp_path / "again"), read_folder(source))
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert written == original | ADDED_KEYS.get(family, {})


@pytest.mark.parametrize(
    "variant", [each for each in VARIANTS if each[0] not in HAVE_NO_CLASS], ids=variant_name
)
def test_transformers_computes_the_same(
    tmp_path: Path, variant: Variant, transformers_side: ProcessPoolExecutor
) -> None:
    family, changes = variant
    source = write_model(tmp_path / "source", family, seed=4, **changes)
    policy = policy_of(config_of(source))
    # The export uses a config.json that the package made, so it must be complete.
    ours = FAMILIES[family].config(policy.shape, VOCABULARY)
    export_hf(policy, tmp_path / "export", hf_config=ours)
    draw = random.Random(4)
    # Delta nets compute in chunks of 64 tokens, so their text has several chunks.
    has_delta_nets = "linear_conv_kernel_dim" in CONFIGS[family]
    length = 150 if has_delta_nets else 23
    ids = [draw.randrange(VOCABULARY) for _ in range(length)]
    prompts = [ids[:5], ids[:1], ids[7:16], ids[: length // 2]]
    asked = transformers_side.submit(ask, tmp_path / "export", ids, prompts, count=12)
    logits, (continuations, _) = logits_of(policy, ids), greedy(policy, prompts, count=12)
    theirs = asked.result()
    assert not theirs.complaints
    assert theirs.architecture == CONFIGS[family]["architectures"][0]
    assert theirs.logits.abs().max() > 1
    tolerance = DELTA_TOLERANCE if has_delta_nets else TOLERANCE
    assert (logits - theirs.logits).abs().max() < tolerance
    assert continuations == theirs.continuations
