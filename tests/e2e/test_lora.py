"""Adapters are trained with the real command. The tests check the contents of a checkpoint, resumed
runs, and exports as merged models and as PEFT folders."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_megatron.checkpoint.storage import read_index, tensors_of
from gspo_megatron.cli.main import main
from tests.e2e.conftest import write_config
from tests.e2e.resuming import all_records, assert_same_run, checkpoint_names, make_small, train
from tests.unit.hf.published import write_model

VOCABULARY, STEPS = 53, 3
LAST = f"rl_{STEPS:08d}"


@dataclass
class Trained:
    """A published model, and a run that trained adapters for it."""

    source: Path
    config: Path

    @property
    def run(self) -> Path:
        return self.config.parent / "run"

    @property
    def last(self) -> Path:
        return self.run / "checkpoints" / LAST


def lora_config(toy: Path, folder: Path, source: Path, **lora: Any) -> Path:
    """A configuration with adapters. The loss contains a divergence from the reference."""
    return make_small(
        write_config(toy, folder),
        model={
            "hf_path": str(source),
            "megatron": {},
            "lora": {"rank": 4, "alpha": 8.0, **lora},
        },
        objective={"kl": "k3", "kl_coefficient": 0.1, "mini_batches": 1},
        # There are no evaluations, because a run in several parts would have an evaluation at the
        # end of each part.
        data={"eval_prompts": None},
        training={"steps": STEPS},
    )


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in all_records(run, "rl") if record["step"] > 0]


@pytest.fixture(scope="module")
def published(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("lora")
    # All layers of this model have experts. PEFT would also adapt the MLPs of dense layers, because
    # their matrices have the same names as the experts' matrices.
    source = write_model(
        folder / "source", "qwen3_moe", seed=9, vocab_size=VOCABULARY, mlp_only_layers=[]
    )
    config = lora_config(toy, folder, source)
    train(config)
    return Trained(source, config)


def test_a_checkpoint_holds_adapters_and_their_optimizer(published: Trained) -> None:
    assert checkpoint_names(published.run) == ["latest", *(f"rl_{n:08d}" for n in (1, 2, 3))]
    for part in ("model", "optimizer"):
        keys = tensors_of(read_index(published.last / part))
        assert keys and all("lora." in key for key in keys)
    model = json.loads((published.last / "model.json").read_text())
    assert model["lora"]["rank"] == 4
    assert model["base"]["path"] == str(published.source)
    records = steps_of(published.run)
    assert records[0]["kl/reference_k3"] == pytest.approx(0.0, abs=1e-7)
    assert records[-1]["kl/reference_k3"] > 1e-5
    for record in records:  # the policy with its adapters generated the responses
        assert record["mismatch/abs_mean"] <= 1e-5


def test_a_new_run_begins_with_adapters_from_outside(
    toy: Path, tmp_path: Path, published: Trained
) -> None:
    """The adapters come from a PEFT folder or from another run. The reference policy is the policy
    at the start of RL."""
    adapter = tmp_path / "adapter"
    arguments = [str(published.run), str(adapter), "--adapter"]
    assert main(["convert", "megatron-to-hf", *arguments]) == 0
    (tmp_path / "peft").mkdir()
    config = lora_config(toy, tmp_path / "peft", published.source, checkpoint=str(adapter))
    train(config, "training.steps=2")
    first = steps_of(tmp_path / "peft/run")
    assert first[0]["kl/reference_k3"] == pytest.approx(0.0, abs=1e-7)
    (tmp_path / "run").mkdir()
    other = lora_config(toy, tmp_path / "run", published.source, checkpoint=str(published.run))
    train(other, "training.steps=1")
    train(other, "training.steps=2")  # the resumed run loads the reference again
    assert_same_run(tmp_path / "run/run", tmp_path / "peft/run", "rl_00000002")
    # Adapters under a wrong key are reported.
    whole = yaml.safe_load(other.read_text())
    whole["model"] = {"checkpoint_path": str(published.run)}
    whole["logging"]["dir"] = str(tmp_path / "whole")
    other.write_text(yaml.safe_dump(whole))
    assert "holds only adapters" in train(other, expect=2).stderr


def test_a_changed_base_is_refused(
    toy: Path, tmp_path: Path, published: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(published.source, source)
    config = lora_config(toy, tmp_path, source)
    train(config, "training.steps=1")
    shutil.rmtree(source)
    write_model(source, "qwen3_moe", seed=10, vocab_size=VOCABULARY, mlp_only_layers=[])
    assert "whose weights at that time differ" in train(config, expect=2).stderr
    run = str(tmp_path / "run")
    assert main(["convert", "megatron-to-hf", run, str(tmp_path / "out")]) == 2
    assert "not the model that the adapters were trained on" in capsys.readouterr().err
    moved = ["--base", str(published.source)]
    assert main(["convert", "megatron-to-hf", run, str(tmp_path / "out"), *moved]) == 0
