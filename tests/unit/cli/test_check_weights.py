"""The start of a run of any stage, as `check` reports it: from its run folder, or from the weights
that the configuration names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_megatron.checkpoint.folder import Position
from gspo_megatron.config.load import load_any_config
from tests.unit.checkpoint.test_resume_start import add
from tests.unit.cli.conftest import Command, ConfigWriter, refused
from tests.unit.hf.published import CONFIGS

VOCAB = 48  # the vocabulary of the checkpoints that `add` writes
SIZE = f"model.vocab_size={VOCAB}"
SMALL = CONFIGS["qwen3_moe"] | {"max_position_embeddings": 128}


@pytest.fixture
def config(write_config: ConfigWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # the run folder is here
    return write_config()


def weights(gspo: Command, *words: object) -> str:
    code, out, _ = gspo("check", *words)
    (line,) = [line for line in out.splitlines() if line.startswith("weights ")]
    assert code == 0
    return line.split(maxsplit=1)[1]


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A Hugging Face folder without weights."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(SMALL))
    return tmp_path / "hf"


def test_a_checkpoint_that_is_not_there_or_not_of_this_model(
    config: Path, tmp_path: Path, gspo: Command
) -> None:
    nothing = f"model.checkpoint_path={tmp_path / 'nothing'}"
    # The missing folder is reported together with all other problems.
    absent, size = sorted(refused(gspo, "check", config, nothing, "rollout.group_size=1"))
    assert size.startswith("rollout.group_size = 1")
    assert absent == f"model.checkpoint_path = '{tmp_path / 'nothing'}': no such folder"
    for shape in ("model.preset=", "model.preset=tiny"):
        assert refused(gspo, "check", config, nothing, shape) == [absent]

    dense = "model.megatron.moe_layer_freq=2"  # every second layer is dense
    other = load_any_config(config, [f"logging.dir={tmp_path / 'other'}", dense])
    path = add(other, Position("rl", 2))
    given = f"model.checkpoint_path={tmp_path / 'other'}"
    assert weights(gspo, config, given, SIZE) == str(tmp_path / "other")
    lines = refused(
        gspo, "check", config, given, "model.preset=tiny", "model.megatron.num_layers=2"
    )
    names = [line.split(" = ")[0].rpartition(".")[2] for line in lines]
    assert names == ["vocab_size", "num_layers", "moe_layer_freq"]
    assert gspo("check", config, given, "model.megatron.moe_expert_capacity_factor=2.0")[0] == 0
    (path / "model" / "__0_0.distcp").unlink()
    assert str(path) in refused(gspo, "check", config, given, SIZE)[0]
    assert gspo("check", config, given, SIZE, "--no-files")[0] == 0


def test_a_run_that_goes_on_and_one_that_cannot(
    config: Path, tmp_path: Path, gspo: Command
) -> None:
    path = add(load_any_config(config, [SIZE]), Position("rl", 3))
    assert weights(gspo, config, SIZE) == f"{path}: the run is resumed"
    # A run that is resumed does not read the weights in model.checkpoint_path.
    nothing = f"model.checkpoint_path={tmp_path / 'nothing'}"
    words = (SIZE, nothing, "training.seed=7", "objective.clip_low=0.1")
    # The error lists the changed keys together with the values that break rules.
    lines = refused(gspo, "check", config, *words)
    changed = [line for line in lines if ": was " in line]
    assert [line.split(" = ")[0] for line in changed] == [
        "model.checkpoint_path",
        "objective.clip_low",
        "training.seed",
    ]
    assert any("a range for ratios of single tokens" in line for line in lines)
    assert refused(gspo, "check", config, SIZE, "--fresh")[0].startswith(
        "--fresh: runs/config is not"
    )
    assert weights(gspo, config, SIZE, "--fresh", "logging.dir=new") == "random"


def test_a_hugging_face_folder_without_weights(config: Path, hf: Path, gspo: Command) -> None:
    (line,) = refused(gspo, "check", config, f"model.hf_path={hf}/none")
    assert f"{hf}/none" in line
    given = f"model.hf_path={hf}"
    (line,) = refused(gspo, "check", config, given)
    assert line == f"{hf}: neither model.safetensors nor model.safetensors.index.json"
    assert gspo("check", config, given, "--no-files")[0] == 0
