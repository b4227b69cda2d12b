"""Special contents of published folders: FP8 in blocks, experts in MXFP4, layers that predict
further tokens, and a vision model."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations import mxfp4

from gspo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from gspo_megatron.checkpoint.storage import read_index, tensors_of
from gspo_megatron.errors import DataError
from gspo_megatron.families import weight_map
from gspo_megatron.hf.export import export_hf
from gspo_megatron.hf.files import HfFolder
from gspo_megatron.hf.load import load_hf
from tests.unit.hf.policies import config_of, logits_of, policy_of
from tests.unit.hf.published import (
    ADDED_KEYS,
    CONFIGS,
    VOCABULARY,
    assert_same_bits,
    model_config,
    random_tensors,
    read_folder,
    write_folder,
)

pytestmark = pytest.mark.usefixtures("one_rank")
# The rows and columns of a block. No size of the model is a multiple of ROWS or COLUMNS.
ROWS, COLUMNS = 16, 12
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [ROWS, COLUMNS],
}


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix. Returns the FP8 matrix, the scales of its blocks, and the values that the
    two represent."""
    scales = torch.empty(math.ceil(len(weight) / ROWS), math.ceil(weight.shape[1] / COLUMNS))
    small, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * ROWS, (i + 1) * ROWS), slice(j * COLUMNS, (j + 1) * COLUMNS))
            scales[i, j] = weight[block].abs().max() / 448
            small[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            values[block] = small[block].float() * scales[i, j]
    return small, scales, values


def fp8_model(
    seed: int, family: str = "deepseek_v3"
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """A model in the form in which DeepSeek publishes models. Returns config, tensors, and the
    tensors without quantization."""
    named = {"fmt": "float8_e4m3fn"} if family == "minimax_m2" else {}
    config = model_config(family, quantization_config=QUANTIZED | named)
    tensors, plain = {}, {}
    for name, tensor in random_tensors(config, seed).items():
        tensors[name] = plain[name] = tensor
        if is_quantized(name):
            tensors[name], tensors[f"{name}_scale_inv"], plain[name] = in_blocks(tensor)
    return config, tensors, plain


def is_quantized(name: str) -> bool:
    """Whether the tensor is quantized. All matrices of layers are quantized, except the matrices of
    routers."""
    kinds = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "query_key_value.weight")
    nets = ("in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight")
    return name.endswith((*kinds, *nets, "dense.weight", "proj_with_mqa.weight"))


def test_any_part_of_an_fp8_matrix_is_read_with_its_scales(tmp_path: Path) -> None:
    config, tensors, plain = fp8_model(seed=5)
    folder = HfFolder(write_folder(tmp_path / "fp8", config, tensors))
    draw = random.Random(5)
    for name in filter(is_quantized, plain):
        for _ in range(5):
            pairs = [sorted(draw.sample(range(n + 1), 2)) for n in plain[name].shape]
            part = tuple(slice(*pair) for pair in pairs)
            assert torch.equal(folder.read(name, part), plain[name][part]), (name, part)


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "gpt_oss"])
def test_an_fp8_folder_is_the_model_of_its_values(tmp_path: Path, family: str) -> None:
    """One matrix contains queries, keys and values. In Ling, keys and values begin in the middle of
    a block. In Qwen3-Next, so do the keys and the values of each single head."""
    config, tensors, plain = fp8_model(seed=6, family=family)
    source = write_folder(tmp_path / "fp8", config, tensors)
    policy = policy_of(config_of(source))
    ids = random.Random(6).choices(range(VOCABULARY), k=19)
    found = logits_of(policy, ids)
    export_hf(policy, tmp_path / "again", hf_config=config)
    assert_same_bits(read_folder(tmp_path / "again"), plain)
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert "quantization_config" not in written
    load_hf(tmp_path / "again", policy)
    assert torch.equal(logits_of(policy, ids), found)


def test_a_converted_fp8_folder_is_bf16(tmp_path: Path) -> None:
    config, tensors, _ = fp8_model(seed=7)
    source = write_folder(tmp_path / "fp8", config, tensors)
    hf_to_megatron(source, tmp_path / "megatron")
    kinds = {
        key: entry.properties.dtype
        for key, entry in tensors_of(read_index(tmp_path / "megatron/model")).items()
    }
    assert {kind for key, kind in kinds.items() if "linear_proj" in key} == {torch.bfloat16}
    assert {kind for key, kind in kinds.items() if "expert_bias" in key} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors, name: tensors.pop(name), "its scales"),
        (lambda tensors, name: tensors.update({name: tensors[name][1:]}), "it must be F32 [3, 6]"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, change: Any, named: str) -> None:
    config, tensors, _ = fp8_model(seed=8)
    change(tensors, "model.layers.2.self_attn.o_proj.weight_scale_inv")
    source = write_folder(tmp_path / "fp8", config, tensors)
    with pytest.raises(DataError, match="o_proj") as error:
        policy_of(config_of(source))
    assert named in str(error.value) and "\n" not in str(error.value)


def mxfp4_model(seed: int) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """A model in the form in which OpenAI publishes models, with square matrices of experts.
    Returns config, tensors, and the tensors that transformers would export in bf16."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config = model_config("gpt_oss", "bfloat16", **sizes, quantization_config=method)
    tensors = random_tensors(config, seed)
    plain = dict(tensors)
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith(("up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        draw = {"generator": generator, "dtype": torch.uint8}
        blocks = torch.randint(0, 256, (*shape, 16), **draw)
        scales = torch.randint(121, 126, shape, **draw)  # exponents of powers of two, from 2^-6 on
        scales[0, 0, 0], scales[1, 0, 0] = 0, 200
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = mxfp4.convert_moe_packed_tensors(blocks, scales)
    return config, tensors, plain


def test_any_part_of_mxfp4_experts_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    config, tensors, plain = mxfp4_model(seed=10)
    folder = HfFolder(write_folder(tmp_path / "mxfp4", config, tensors))
    draw = random.Random(10)
    for name in (name for name in plain if name.endswith(("up_proj", "down_proj"))):
        for step in (None, 2):
            pairs = [sorted(draw.sample(range(n + 1), 2)) for n in plain[name].shape]
            part = (*(slice(*pair) for pair in pairs[:-1]), slice(*pairs[-1], step))
            found = folder.read(name, part)
            assert torch.equal(found.to(torch.bfloat16), plain[name][part]), (name, part)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_mxfp4_folder_is_the_model_of_its_bf16_export(tmp_path: Path, dtype: str) -> None:
    config, tensors, plain = mxfp4_model(seed=11)
    source = write_folder(tmp_path / "mxfp4", config, tensors)
    policy = policy_of(config_of(source, dtype))
    export_hf(policy, tmp_path / "again", hf_config=config, dtype=torch.bfloat16)
    assert_same_bits(read_folder(tmp_path / "again"), plain)
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert "quantization_config" not in written
    assert written == {k: v for k, v in config.items() if k != "quantization_config"}


def test_a_converted_mxfp4_folder_comes_back_as_bf16(tmp_path: Path) -> None:
    config, tensors, plain = mxfp4_model(seed=12)
    source = write_folder(tmp_path / "mxfp4", config, tensors)
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again", max_shard_bytes=100_000)
    assert_same_bits(read_folder(tmp_path / "again"), plain)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "_scales, the scales of"),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][1:]}),
            "MXFP4 has bytes",
        ),
        (lambda tensors, name: tensors.pop(f"{name}_blocks"), "down_proj is missing"),
    ],
)
def test_mxfp4_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, named: str) -> None:
    config, tensors, _ = mxfp4_model(seed=13)
    change(tensors, "model.layers.2.mlp.experts.down_proj")
    source = write_folder(tmp_path / "mxfp4", config, tensors)
    with pytest.raises(DataError, match=named):
        policy_of(config_of(source))


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("glm4_moe", "num_nextn_predict_layers"),
        ("glm4_moe_lite", "num_nextn_predict_layers"),
        ("deepseek_v3", "num_nextn_predict_layers"),
        ("hy_v3", "num_nextn_predict_layers"),
        ("bailing_moe_v2", "num_nextn_predict_layers"),
        ("minimax_m2", "num_mtp_modules"),
    ],
)
def test_layers_for_further_tokens_are_left_out(tmp_path: Path, family: str, key: str) -> None:
    config = model_config(family, **{key: 1})
    tensors = random_tensors(config, seed=9)
    further = {
        name.replace("layers.3.", "layers.4."): tensor
        for name, tensor in tensors.items()
        if ".layers.3." in name
    }
    further["model.layers.4.eh_proj.weight"] = torch.zeros(44, 88)
    source = write_folder(tmp_path / "source", config, tensors | further)
    policy = policy_of(config_of(source))
    export_hf(policy, tmp_path / "again", hf_config=config)
    assert_same_bits(read_folder(tmp_path / "again"), tensors)
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert written == config | {key: 0} | ADDED_KEYS.get(family, {})

    # Without the key in config.json, such a layer is an unknown part of the model.
    wrong = write_folder(tmp_path / "wrong", config | {key: 0}, {**tensors, **further})
    with pytest.raises(DataError, match=r"layers\.4\..* is no part of the model"):
        policy_of(config_of(wrong))


DELTA_MTP = [f"mtp.{n}" for n in ("layers.0.mlp.gate", "layers.0.self_attn.q_proj", "fc", "norm")]
ERNIE_MTP = [f"model.mtp_{n}" for n in ("block.0.input_layernorm", "emb_norm.0", "linear_proj.0")]


@pytest.mark.parametrize(
    ("family", "names", "key"),
    [
        *((n, DELTA_MTP, {}) for n in ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text")),
        ("ernie4_5_moe", ERNIE_MTP, {"num_nextn_predict_layers": 1}),
    ],
)
def test_further_layers_with_names_of_their_own_are_left_out(
    tmp_path: Path, family: str, names: list[str], key: dict[str, int]
) -> None:
    config = model_config(family, **key)
    tensors = random_tensors(config, seed=9)
    further = {f"{name}.weight": torch.zeros(44) for name in names}
    source = write_folder(tmp_path / "source", config, tensors | further)
    export_hf(policy_of(config_of(source)), tmp_path / "again", hf_config=config)
    assert_same_bits(read_folder(tmp_path / "again"), tensors)
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert written == config | dict.fromkeys(key, 0) | ADDED_KEYS.get(family, {})


def with_vision(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict, dict]:
    """A language model in the form in which Qwen3.5 is published: with a vision model, a layer that
    predicts further tokens, and one tensor for all experts of a layer."""
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5_moe", "depth": 1, "hidden_size": 16},
        "text_config": {k: v for k, v in config.items() if k != "architectures"}
        | {"mtp_num_hidden_layers": 1},
    }
    found = {"model.visual.patch_embed.proj.weight": torch.zeros(16, 12)}
    found["mtp.layers.0.input_layernorm.weight"] = torch.zeros(44)
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(config["num_hidden_layers"]):
        experts = [
            [tensors[f"model.layers.{layer}.mlp.experts.{e}.{p}_proj.weight"] for p in PARTS]
            for e in range(config["num_experts"])
        ]
        start = f"model.language_model.layers.{layer}.mlp.experts."
        both = [torch.cat((gate, up)) for gate, up, _ in experts]
        found[f"{start}gate_up_proj"] = torch.stack(both)
        found[f"{start}down_proj"] = torch.stack([down for *_, down in experts])
    return outer, found


PARTS = ("gate", "up", "down")


@pytest.mark.parametrize("most", [2**24, 50], ids=["whole", "in blocks"])
def test_of_a_vision_language_folder_the_language_model_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(weight_map, "MOST_ELEMENTS", most)
    config = model_config("qwen3_5_moe_text", "bfloat16")
    tensors = random_tensors(config, seed=10)
    vision_config, vision = with_vision(config, tensors)
    source = write_folder(tmp_path / "source", vision_config, vision)
    policy = policy_of(config_of(source, "bfloat16"))
    export_hf(policy, tmp_path / "again", hf_config=vision_config)
    assert_same_bits(read_folder(tmp_path / "again"), tensors)
    assert json.loads((tmp_path / "again/config.json").read_text()) == config
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "converted")
    assert_same_bits(read_folder(tmp_path / "converted"), tensors)
    assert json.loads((tmp_path / "converted/config.json").read_text()) == config

    vision["model.language_model.other"] = torch.zeros(3)
    wrong = write_folder(tmp_path / "wrong", vision_config, vision)
    with pytest.raises(DataError, match=r"other is no part of the model"):
        policy_of(config_of(wrong, "bfloat16"))
