"""PEFT folders from other programs: which of them are accepted or refused, and with which
messages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_megatron.checkpoint.convert import hf_to_megatron
from gspo_megatron.checkpoint.convert_adapters import any_to_hf, peft_to_megatron
from gspo_megatron.checkpoint.run_state import base_of
from gspo_megatron.config.lora import LoraSection
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.families import FAMILIES, describe
from gspo_megatron.families.adapter_map import adapted_weights, adapter_map
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.families.weight_map import weight_map
from gspo_megatron.hf.adapters import PeftFolder, peft_layout
from tests.unit.checkpoint.test_convert_checks import change_model, make_trained, write_tokenizer
from tests.unit.hf.published import (
    CONFIGS,
    VOCABULARY,
    model_config,
    tensor_shapes,
    write_model,
)

RANK = 4


def write_adapter(
    folder: Path, base: Path, targets: list[str], *, base_name: str = "", **changes: Any
) -> Path:
    """Write adapters of a qwen3_moe model. base_name: the name of the base, if it is not its path;
    changes: replaced keys of adapter_config.json."""
    config = json.loads((base / "config.json").read_text())
    weights = weight_map(FAMILIES["qwen3_moe"], shape_of(describe(config)), VOCABULARY)
    adapted = adapted_weights(weights, targets)
    section = LoraSection(rank=RANK, alpha=8.0, targets=targets)
    folder.mkdir()
    shapes = adapter_map(adapted, RANK).shapes
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
    name, maps = base_name or str(base), (weights, weights)
    document, tensors = peft_layout(section, adapted, maps, zeros, name)
    save_file(tensors, folder / "adapter_model.safetensors")
    document |= changes
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "model", "qwen3_moe", seed=1)


def refusal(folder: Path, tmp_path: Path, base: Path | None = None) -> str:
    with pytest.raises(DataError) as caught:
        peft_to_megatron(folder, tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"use_dora": True}, "use_dora is true"),
        ({"init_lora_weights": "pissa_niter_4"}, "PEFT changes the base weights when it loads"),
        ({"bias": "all"}, "bias is "),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is "),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern is "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is "),
        ({"peft_type": "ADALORA"}, "peft_type is "),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
        ({"r": "16"}, "r is "),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is "),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"r": 8}, "has the shape"),
    ],
)
def test_all_but_plain_adapters_is_refused(
    tmp_path: Path, base: Path, changes: dict[str, Any], told: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", base, ["attention"], **changes)
    assert told in refusal(folder, tmp_path)


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_any_start_that_leaves_the_base_weights_alone_is_read(
    tmp_path: Path, base: Path, start: object
) -> None:
    folder = write_adapter(tmp_path / "adapter", base, ["attention"], init_lora_weights=start)
    assert PeftFolder(folder).settings().rank == RANK


def test_every_tensor_has_to_belong_to_the_model(tmp_path: Path, base: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base, ["attention"])
    file = folder / "adapter_model.safetensors"
    tensors, stem = load_file(file), "base_model.model.model.layers.0.self_attn."
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(RANK, 44)
    del tensors[f"{stem}q_proj.lora_B.weight"]
    tensors[f"{stem}o_proj.lora_A.weight"] = torch.zeros(RANK, 61)
    tensors[f"{stem}k_proj.lora_A.weight"] = torch.zeros(RANK, 44, dtype=torch.int32)
    save_file(tensors, file)
    document = json.loads((folder / "adapter_config.json").read_text())
    with pytest.raises((DataError, ConfigError)) as caught:
        peft_to_megatron(folder, tmp_path / "out")
    assert "lm_head" in str(caught.value)
    del tensors["base_model.model.lm_head.lora_A.weight"]
    save_file(tensors, file)
    lines = refusal(folder, tmp_path)
    assert f"{stem}q_proj.lora_B.weight is missing" in lines
    assert f"{stem}o_proj.lora_A.weight has the shape [4, 61], not [4, 60]" in lines
    assert f"{stem}k_proj.lora_A.weight has the dtype I32" in lines
    assert f"adapters made for {document['base_model_name_or_path']} do not fit" in lines


def test_a_wrong_base_is_named(tmp_path: Path, base: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base, ["attention"])
    other = write_model(tmp_path / "other", "qwen3_moe", seed=2, hidden_size=52)
    told = refusal(folder, tmp_path, other)
    assert "has the shape" in told and f"made for {base}" in told
    gone = write_adapter(
        tmp_path / "gone", base, ["attention"], base_model_name_or_path="nobody/nothing"
    )
    assert "give its folder with --base" in refusal(gone, tmp_path)


@pytest.mark.parametrize(
    ("base_name", "name", "revision"),
    [
        (f"nobody/nothing@{40 * 'a'}", "nobody/nothing", 40 * "a"),
        ("nobody/nothing", "nobody/nothing", None),
        ("/models/a@b", "/models/a@b", None),
    ],
)
def test_peft_gets_the_revision_of_a_base_of_the_hub_by_itself(
    tmp_path: Path, base: Path, base_name: str, name: str, revision: str | None
) -> None:
    """PEFT gives both keys to transformers, which takes no name with an @."""
    folder = write_adapter(tmp_path / "adapter", base, ["attention"], base_name=base_name)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (name, revision)
    assert PeftFolder(folder).base == base_name


def test_pickles_are_never_read(tmp_path: Path, base: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base, ["attention"])
    mark = tmp_path / "a pickle was read"
    (folder / "adapter_model.bin").write_bytes(f"cos\nmkdir\n(S'{mark}'\ntR.".encode())
    peft_to_megatron(folder, tmp_path / "from_safetensors")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "adapter_model.bin may run code and is not read" in refusal(folder, tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(b"\x10" + bytes(40))
    assert "damaged" in refusal(folder, tmp_path)
    assert not mark.exists()


def test_target_modules_name_what_is_adapted_and_nothing_else(tmp_path: Path, base: Path) -> None:
    """Layer 1 is dense, so the target `experts` gives no adapter to its gate_proj."""
    for targets, expected in ((["attention"], 4), (["all"], 7)):
        folder = write_adapter(tmp_path / targets[0], base, targets)
        assert len(PeftFolder(folder).config["target_modules"]) == expected
    folder = write_adapter(tmp_path / "experts", base, ["experts"])
    modules = PeftFolder(folder).config["target_modules"]
    assert "model.layers.0.mlp.experts.0.gate_proj" in modules
    assert not any(".layers.1." in module for module in modules)


@pytest.mark.parametrize("family", CONFIGS)
def test_each_matrix_of_a_layer_has_an_adapter_by_its_published_name(family: str) -> None:
    """Routers and the input projections of delta nets have no adapters."""
    config = model_config(family)
    weights = weight_map(FAMILIES[family], shape_of(describe(config)), VOCABULARY)
    found = {
        matrix.name: (matrix.rows, matrix.columns)
        for weight in adapted_weights(weights, ["all"]).values()
        for matrix in weight.matrices
    }
    assert found == {
        name: shape
        for name, shape in published_matrices(config).items()
        if ".layers." in name and name.endswith(".weight") and len(shape) == 2
        if not name.endswith(("gate.weight", "router.weight")) and ".in_proj_" not in name
    }


def published_matrices(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the published matrices, by name. A tensor that holds one matrix for each expert
    of a layer is split into these matrices. In gpt-oss the matrices of experts are transposed."""
    shapes = tensor_shapes(config)
    for name, shape in list(shapes.items()):
        start, _, leaf = name.rpartition(".")
        if start.endswith(".experts") and len(shape) == 3:
            count, columns, rows = shape
            leaves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[leaf]
            shapes |= {
                f"{start}.{expert}.{each}.weight": (rows // len(leaves), columns)
                for expert in range(count)
                for each in leaves
            }
    return shapes


def test_unknown_targets_are_told_with_what_there_is() -> None:
    shape = shape_of(describe(model_config("qwen3_moe")))
    weights = weight_map(FAMILIES["qwen3_moe"], shape, VOCABULARY)
    with pytest.raises(ConfigError, match="q_porj.*no such matrices.*q_proj"):
        adapted_weights(weights, ["q_porj"])
    assert len(adapted_weights(weights, ["router"])) == 3
    assert list(adapted_weights(weights, ["head"])) == ["output_layer.weight"]
    assert "output_layer.weight" not in adapted_weights(weights, ["all"])
    with pytest.raises(ConfigError, match="embed_tokens.*the embedding has no adapters here"):
        adapted_weights(weights, ["embed_tokens"])


@pytest.mark.parametrize("target", ["head", "lm_head"])
def test_a_head_that_is_the_embedding_is_refused(target: str) -> None:
    shape = shape_of(describe(model_config("qwen3_moe", tie_word_embeddings=True)))
    weights = weight_map(FAMILIES["qwen3_moe"], shape, VOCABULARY)
    with pytest.raises(ConfigError) as caught:
        adapted_weights(weights, ["all", target])
    [line] = caught.value.problems
    assert line.startswith(f"model.lora.targets = '{target}': the output layer is tied to ")


def test_a_routers_parameter_is_a_module_as_any_other(tmp_path: Path, base: Path) -> None:
    """PEFT treats the router's `gate` as a parameter, and names it in target_parameters."""
    named = {"target_parameters": ["gate.weight"]}
    folder = write_adapter(tmp_path / "adapter", base, ["attention", "router"], **named)
    peft_to_megatron(folder, tmp_path / "out")
    others = write_adapter(
        tmp_path / "others", base, ["attention"], target_parameters=["mlp.experts.gate_up_proj"]
    )
    assert "target_parameters is " in refusal(others, tmp_path / "2")


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a gpt_oss model, which has one tensor for all experts of a layer, and an
    adapter_config.json for it."""
    base = write_model(tmp_path_factory.mktemp("joint") / "model", "gpt_oss", seed=1)
    names = [f"mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")]
    document = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    return base, document | {"target_parameters": names, "base_model_name_or_path": str(base)}


def write_joint(folder: Path, base: Path, document: dict[str, Any], rank: int) -> Path:
    """Write adapters of only the experts. rank: the rank of the adapter that gate and up projection
    share."""
    shapes, tensors = tensor_shapes(json.loads((base / "config.json").read_text())), {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if len(shape) != 3 or leaf not in ("gate_up_proj", "down_proj"):
            continue
        count, columns, rows = shape
        stem = f"base_model.model.{module}" + ".base_layer" * (leaf == "gate_up_proj")
        size = count * (rank if leaf == "gate_up_proj" else RANK)
        tensors[f"{stem}.lora_A.weight"] = torch.randn(size, columns)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, size)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("rank", "changes", "told"),
    [
        (2 * RANK, {}, "has rank 8 for gate and up projection together; allowed: rank 4 for each"),
        (3 * RANK, {}, "do not fit rank 4 and the model's"),
        (RANK, {"rank_pattern": {"gate_up_proj": 8}}, "gate_up_proj has rank 8 and alpha 8: these"),
        (RANK, {"alpha_pattern": {r".*\.down_proj": 4}}, "has rank 4 and alpha 4: these adapters"),
        (RANK, {"rank_pattern": {"gate_up_proj": 0}}, "gate_up_proj has rank 0"),
        (RANK, {"rank_pattern": {"q_proj": 8}}, "rank_pattern is "),
        (RANK, {"target_parameters": ["mlp.experts.other"]}, "target_parameters is "),
        (RANK, {"target_parameters": 3}, "target_parameters is 3"),
    ],
)
def test_experts_in_one_pair_that_is_not_one_of_each_are_refused(
    tmp_path: Path,
    joint: tuple[Path, dict[str, Any]],
    rank: int,
    changes: dict[str, Any],
    told: str,
) -> None:
    base, document = joint
    assert told in refusal(write_joint(tmp_path / "a", base, document | changes, rank), tmp_path)


def test_experts_with_the_plain_rank_enter(
    tmp_path: Path, joint: tuple[Path, dict[str, Any]]
) -> None:
    base, document = joint
    peft_to_megatron(write_joint(tmp_path / "a", base, document, RANK), tmp_path / "out")


def test_merged_with_a_checkpoint_a_model_has_the_files_of_the_run(
    tmp_path: Path, base: Path
) -> None:
    """The run that trained the adapters may have another tokenizer than its base, such as one with
    a chat template, and a longer context. If the tokenizer is missing, that of the base is kept."""
    source, tokenizer = shutil.copytree(base, tmp_path / "source"), tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(source, 30)
    write_tokenizer(tokenizer, 37)
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    hf_to_megatron(source, tmp_path / "start")
    run = tmp_path / "run"
    peft_to_megatron(write_adapter(tmp_path / "adapter", base, ["attention"]), run)
    make_trained(run, tokenizer)

    def change(document: dict[str, Any]) -> None:
        document["base"] = base_of(tmp_path / "start")
        document["shape"]["max_sequence_length"] = 640

    change_model(run, change)
    any_to_hf(run, tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tokenizer / name).read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["max_position_embeddings"] == 640
    shutil.rmtree(tokenizer)
    any_to_hf(run, tmp_path / "without")
    kept = (tmp_path / "without/tokenizer.json").read_bytes()
    assert kept == (source / "tokenizer.json").read_bytes()
