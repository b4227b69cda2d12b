"""RL on published weights with the real command. The weights are read from their folder, or
converted beforehand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gspo_megatron.checkpoint.convert import megatron_to_hf, open_checkpoint
from gspo_megatron.checkpoint.tensors import load_model
from gspo_megatron.cli.main import main
from gspo_megatron.config import load_config, resolve_parallel
from gspo_megatron.models.build import build_policy
from tests.e2e.conftest import write_config
from tests.e2e.resuming import assert_same_run, make_small, train
from tests.e2e.test_convert import logits_by_transformers
from tests.programs import gspo
from tests.unit.hf.policies import logits_of
from tests.unit.hf.published import assert_same_bits, read_folder, write_model
from tests.unit.models.one_rank import one_rank_groups

VOCABULARY = 53  # of the published model; larger than the tokenizer's vocabulary
LAYOUT = "tp=2,ep=2"
LAST = "rl_00000002"
# The tolerance for fp32 logits of size 1 after four layers, if sums are computed in another order.
TOLERANCE = 1e-5


@dataclass
class Published:
    """A published model, its conversion, and a run of two RL steps that began with the
    conversion."""

    source: Path
    config: Path

    @property
    def run(self) -> Path:
        return self.config.parent / "run"


@pytest.fixture(scope="module")
def published(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("published")
    source = write_model(folder / "source", "qwen3_next", seed=9, vocab_size=VOCABULARY)
    checkpoint = folder / "start"
    assert main(["convert", "hf-to-megatron", str(source), str(checkpoint)]) == 0
    config = rl_config(toy, folder, {**sizes(checkpoint), "checkpoint_path": str(checkpoint)})
    train(config)
    return Published(source, config)


def sizes(checkpoint: Path) -> dict[str, Any]:
    """The keys of the section `model` that describe the model in a checkpoint."""
    shape = json.loads((checkpoint / "model.json").read_text())["shape"]
    names = ("vocab_size", "max_sequence_length", "rotary_base", "tie_embeddings", "megatron")
    return {name: shape[name] for name in names}


def rl_config(toy: Path, folder: Path, model: dict[str, Any]) -> Path:
    return make_small(
        write_config(toy, folder),
        model={"megatron": {}, **model},
        parallel={"layout": LAYOUT},
    )


def test_read_from_the_folder_the_run_is_the_same(
    toy: Path, tmp_path: Path, published: Published
) -> None:
    """The two runs have equal metrics, samples, weights and moments, bit for bit."""
    config = rl_config(toy, tmp_path, {"hf_path": str(published.source)})
    train(config)
    assert_same_run(tmp_path / "run", published.run, LAST)


def test_what_was_trained_is_a_model_of_transformers(tmp_path: Path, published: Published) -> None:
    """The trained model is converted by two processes and by one. Both conversions are equal.
    With the converted weights, transformers computes the same as Megatron-Core with the trained
    model."""
    pytest.importorskip("transformers")
    by_two, by_one = tmp_path / "by-two", tmp_path / "by-one"
    gspo("convert", "megatron-to-hf", published.run, by_two, "--layout", "tp=2,ep=2")
    megatron_to_hf(published.run, by_one)
    assert_same_bits(read_folder(by_two), read_folder(by_one))
    assert (by_two / "config.json").read_bytes() == (by_one / "config.json").read_bytes()
    found, began = read_folder(by_one), read_folder(published.source)
    assert found.keys() == began.keys()
    still = [name for name, tensor in began.items() if torch.equal(tensor, found[name])]
    assert not still, f"not trained: {still}"
    ids = torch.randint(VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(4))
    values = yaml.safe_load(published.config.read_text()) | {"parallel": {"layout": "tp=1"}}
    alone = tmp_path / "alone.yaml"
    alone.write_text(yaml.safe_dump(values))
    ours = logits_of_checkpoint(published.run / "checkpoints", alone, ids)
    theirs = logits_by_transformers(by_one, ids)[0]
    torch.testing.assert_close(theirs, ours, rtol=TOLERANCE, atol=TOLERANCE)


def logits_of_checkpoint(
    checkpoints: Path, config_file: Path, tokens: torch.Tensor
) -> torch.Tensor:
    """The logits [length, vocabulary] by Megatron-Core on one rank."""
    source = open_checkpoint(checkpoints)
    config = load_config(str(config_file), [])
    with one_rank_groups():
        policy = build_policy(config, resolve_parallel(config, 1), source.vocab_size)
        load_model(source.folder, policy)
        return logits_of(policy, tokens[0].tolist())
