"""Fine-tuning of adapters with the real command. The run is killed, continues on another layout,
and is exported."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from gspo_megatron.cli.main import main
from tests.e2e.resuming import all_records, environment
from tests.e2e.test_convert import logits_by_transformers
from tests.programs import ROOT, run_program, start_program, wait_until
from tests.unit.hf.published import assert_same_bits, read_folder, write_model

VOCABULARY, STEPS, TOLERANCE = 53, 4, 1e-5  # two epochs of two steps
TOKENS = torch.randint(VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(4))


def config_of(toy: Path, folder: Path, source: Path) -> Path:
    config = {
        "model": {
            "hf_path": str(source),
            "lora": {"rank": 4, "alpha": 8.0, "targets": ["all", "router", "head"]},
        },
        "data": {"tokenizer": str(toy / "tokenizer.model"), "examples": str(toy / "train.jsonl")},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"precision": "fp32", "epochs": 2, "batch_size": 32, "micro_batch_tokens": 48},
        "checkpoint": {"interval": 1, "keep_last": None},
        "logging": {"dir": str(folder / "run"), "plots": False},
        "export": {"hf_path": str(folder / "hf")},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def command(config: Path, *words: str) -> list[str]:
    return [sys.executable, str(ROOT / "pretrain_scripts" / "sft_moe.py"), str(config), *words]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in all_records(run, "sft") if record["step"] > 0]


def test_killed_and_on_another_layout_a_run_ends_as_undisturbed(toy: Path, tmp_path: Path) -> None:
    """The router and the output layer have adapters, too. Both exports, the merged model and the
    adapter, compute the same as the trained model."""
    source = write_model(
        tmp_path / "source", "qwen3_moe", seed=9, vocab_size=VOCABULARY, mlp_only_layers=[]
    )
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    config = config_of(toy, undisturbed, source)
    run_program(*command(config), environ=environment(config))

    config = config_of(toy, killed, source)
    with (tmp_path / "stderr").open("w") as err:
        process = start_program(*command(config), environ=environment(config), err=err)
    wait_until(lambda: (killed / "run" / "checkpoints" / "sft_00000001").exists())
    ranks = psutil.Process(process.pid).children(recursive=True)
    for each in [psutil.Process(process.pid), *ranks]:
        each.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(ranks, timeout=10)
    assert len(steps_of(killed / "run")) < STEPS and not (killed / "hf").exists()
    run_program(*command(config, "parallel.layout=tp=2,ep=2"), environ=environment(config))

    mine, theirs = steps_of(killed / "run"), steps_of(undisturbed / "run")
    assert [record["step"] for record in mine] == list(range(1, STEPS + 1))
    for ours, other in zip(mine, theirs, strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(other[name], rel=1e-4), (ours["step"], name)
    first, second = (sum(record["loss"] for record in part) for part in (theirs[:2], theirs[2:]))
    assert second < first  # the second epoch has the same examples
    assert_leaves_the_same(killed, source)


def assert_leaves_the_same(folder: Path, source: Path) -> None:
    merged, adapter, run = folder / "merged", folder / "adapter", str(folder / "run")
    assert main(["convert", "megatron-to-hf", run, str(merged)]) == 0
    assert main(["convert", "megatron-to-hf", run, str(adapter), "--adapter"]) == 0
    changed, before = read_folder(merged), read_folder(source)
    moved = {name for name in before if not torch.equal(changed[name], before[name])}
    ends = ("_proj.weight", "mlp.gate.weight", "lm_head.weight")
    assert moved == {name for name in before if name.endswith(ends)}
    for name, tensor in read_folder(folder / "hf").items():
        assert float((tensor.float() - changed[name]).abs().max()) <= TOLERANCE, name
    names = load_file(adapter / "adapter_model.safetensors")
    assert names["base_model.model.lm_head.lora_B.weight"].shape == (VOCABULARY, 4)
    assert names["base_model.model.model.layers.1.mlp.gate.lora_A.weight"].shape == (4, 44)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert {"lm_head", "gate", "q_proj", "down_proj"} <= set(settings["target_modules"])
    assert (settings["r"], settings["lora_alpha"], settings["bias"]) == (4, 8, "none")
    assert settings["base_model_name_or_path"] == str(source)

    expected = logits_by_transformers(merged, TOKENS)
    assert float((expected - logits_by_transformers(source, TOKENS)).abs().max()) > 1e-3
    again = folder / "again"  # the PEFT folder is converted back to a checkpoint
    assert main(["convert", "hf-to-megatron", str(adapter), str(again)]) == 0
    back = folder / "back"
    assert main(["convert", "megatron-to-hf", str(again), str(back), "--adapter"]) == 0
    assert_same_bits(names, load_file(back / "adapter_model.safetensors"))
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(base, adapter)(TOKENS).logits
    assert float((found - expected).abs().max()) <= TOLERANCE
