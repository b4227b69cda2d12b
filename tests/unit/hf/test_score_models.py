"""Preference models: import, export, and scores compared with transformers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from gspo_megatron.batching import scores
from gspo_megatron.batching.micro_batches import MicroBatch
from gspo_megatron.checkpoint.convert import hf_to_megatron
from gspo_megatron.checkpoint.start import load_base
from gspo_megatron.config import check_config, resolve_parallel
from gspo_megatron.config.scorer import scorer_problems
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.families import FAMILIES as FAMILY_TABLE
from gspo_megatron.families import describe, model_shape
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.hf.export import export_hf
from gspo_megatron.hf.files import SINGLE_FILE
from gspo_megatron.hf.side_files import export_config
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.rl.scorer import FrozenScorer
from tests.parallel.models import odd_moe
from tests.programs import ROOT
from tests.unit.hf.policies import config_of
from tests.unit.hf.preference_folder import scores_by_transformers, write_score_model
from tests.unit.hf.published import VOCABULARY, assert_same_bits, read_folder, write_model
from tests.unit.hf.transformers_side import transformers_process
from tests.unit.supervised.synthetic_preferences import preference_config

pytestmark = pytest.mark.usefixtures("one_rank")

TOLERANCE = 1e-5
# Families for which transformers has a class of preference models.
FAMILIES = (
    *("qwen3_moe", "qwen3", "qwen2_moe", "qwen2", "mixtral", "deepseek_v3", "gpt_oss", "llama"),
    *("qwen3_next", "qwen3_5_text"),
)

_draw = random.Random(4)
SEQUENCES = [[_draw.randrange(1, VOCABULARY) for _ in range(n)] for n in (4, 9, 1, 17)]
# three responses to one prompt, of which one has a single token
SEQUENCES += [SEQUENCES[1] + SEQUENCES[0][:n] for n in (3, 1, 4)]


@pytest.fixture(scope="module")
def transformers() -> Iterator[ProcessPoolExecutor]:
    with transformers_process() as process:
        yield process


def frozen_scores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], bool]:
    """The scores, and whether they were computed with shared prompts."""
    shared: list[bool] = []
    native = scores.head_outputs

    def watched(policy: Policy, batches: list[MicroBatch]) -> list[Tensor]:
        shared.extend(each.packed.shared is not None for each in batches)
        return native(policy, batches)

    monkeypatch.setattr(scores, "head_outputs", watched)
    config = odd_moe("tp=1", training={"micro_batch_tokens": 45, "share_prompts": None})
    scorer = FrozenScorer(str(folder), config, resolve_parallel(config, 1))
    flat = torch.tensor([token for each in SEQUENCES for token in each])
    return scorer(flat, [*map(len, SEQUENCES)]).tolist(), any(shared)


def classes() -> set[str]:
    """The families for which transformers has a class of preference models."""
    import transformers

    return {
        name
        for name, each in FAMILY_TABLE.items()
        if hasattr(transformers, each.score_architecture)
    }


def test_the_page_names_the_families_without_a_class(transformers: ProcessPoolExecutor) -> None:
    present = transformers.submit(classes).result()
    text = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"has no such class for (.*?)\. Their", text, re.DOTALL)
    assert {*re.findall(r"`([^`]+)`", told)} == FAMILY_TABLE.keys() - present
    assert present >= {*FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_gives_its_scores(
    transformers: ProcessPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    folder = write_score_model(tmp_path / family, family, seed=2)
    name, complaints, expected = transformers.submit(
        scores_by_transformers, folder, SEQUENCES
    ).result()
    assert name.endswith("ForSequenceClassification") and not complaints
    with_config(folder, architectures=[name])  # the name that transformers writes
    found, are_shared = frozen_scores(folder, monkeypatch)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert are_shared is (family not in ("qwen3_next", "qwen3_5_text"))  # these have delta nets


def test_of_a_preference_model_that_reads_images_the_language_model_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes such a model from a published folder of Qwen3.5. The label is outside of
    the config of the language model."""
    folder = write_score_model(tmp_path / "score", "qwen3_5_text", seed=2)
    expected, _ = frozen_scores(folder, monkeypatch)
    file = folder / "config.json"
    text = json.loads(file.read_text())
    labels = {key: text.pop(key) for key in ("id2label", "label2id")}
    del text["architectures"]
    name = "Qwen3_5ForSequenceClassification"
    outer = CONFIG_MAPPING["qwen3_5"](num_labels=1, architectures=[name], text_config=text)
    saved = json.loads(outer.to_json_string())
    assert (saved["architectures"], saved["id2label"]) == ([name], labels["id2label"])
    file.write_text(json.dumps(saved))
    tensors = {
        key.replace("model.", "model.language_model.", 1): tensor
        for key, tensor in load_file(folder / SINGLE_FILE).items()
    }
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(16, 12)
    save_file(tensors, folder / SINGLE_FILE)
    found, _ = frozen_scores(folder, monkeypatch)
    assert found == expected
    written = export_config(shape_of(describe(saved)), VOCABULARY, torch.float32, saved)
    assert {key: written[key] for key in labels} == labels


def started(folder: Path, **model: Any) -> tuple[Policy, dict[str, Tensor]]:
    """A preference model with the weights at the start of a run, and its tensors by Hugging Face
    names."""
    config = preference_config(training={"precision": "fp32"})
    given = {"megatron": {}, "preset": None, **model}
    config = config.model_copy(update={"model": type(config.model)(**given)})
    vocab_size = config.resolved_model().vocab_size
    assert vocab_size == VOCABULARY
    policy = build_policy(config, resolve_parallel(config, 1), vocab_size)
    load_base(config, policy)
    export_hf(policy, folder, hf_config=config_of_weights(config.model))
    return policy, read_folder(folder)


def config_of_weights(model: Any) -> Any:
    return model_shape.config_of_weights(model.hf_path, model.checkpoint_path)


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_gets_a_new_head(tmp_path: Path, tied: bool) -> None:
    """A language model is read from its folder and from its checkpoint. All weights except the head
    are kept, bit for bit."""
    folder = write_model(tmp_path / "lm", "qwen3_moe", seed=7, tie_word_embeddings=tied)
    hf_to_megatron(folder, tmp_path / "checkpoint")
    language = read_folder(folder)
    language.pop("lm_head.weight", None)
    heads = []
    for name, source in (("hf_path", "lm"), ("checkpoint_path", "checkpoint")):
        _, found = started(tmp_path / f"from-{name}", **{name: str(tmp_path / source)})
        heads.append(found.pop("score.weight"))
        assert_same_bits(found, language)
        config = json.loads((tmp_path / f"from-{name}" / "config.json").read_text())
        assert config["architectures"] == ["Qwen3MoeForSequenceClassification"]
        assert config["tie_word_embeddings"] is tied and config["router_aux_loss_coef"] == 0.003
    assert torch.equal(*heads) and heads[0].shape == (1, 44) and heads[0].abs().min() > 0


def test_a_preference_model_keeps_its_head(tmp_path: Path) -> None:
    folder = write_score_model(tmp_path / "score", "mixtral", seed=8)
    hf_to_megatron(folder, tmp_path / "checkpoint")
    for name, source in (("hf_path", "score"), ("checkpoint_path", "checkpoint")):
        _, found = started(tmp_path / f"from-{name}", **{name: str(tmp_path / source)})
        assert_same_bits(found, read_folder(folder))


def with_config(folder: Path, **keys: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return folder


def test_folders_that_hold_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for each folder is one line, for a frozen scorer and for a model to train."""
    config = odd_moe("tp=1")
    language = write_model(tmp_path / "lm", "qwen3", seed=1)
    (line,) = scorer_problems(config, str(language), 1)
    assert line.startswith("architectures = ") and "holds no preference model" in line
    (line,) = scorer_problems(config, str(tmp_path / "nothing"), 1)
    assert "no such folder" in line
    folder = write_score_model(tmp_path / "score", "qwen3", seed=1)
    assert scorer_problems(config, str(folder), 1) == []
    (line,) = scorer_problems(odd_moe("tp=4"), str(folder), 4)
    assert line.startswith("parallel.tensor_model_parallel_size = 4: the model in ")
    with_config(folder, id2label={"0": "bad", "1": "good"})
    (line,) = scorer_problems(config, str(folder), 1)
    assert line.endswith("a preference model has one label, the score")
    with_config(folder, id2label={"0": "score"})
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "score.weight"}, folder / SINGLE_FILE)
    with pytest.raises(DataError, match="score.weight is missing"):
        frozen_scores(folder, monkeypatch)


def test_a_policy_is_no_preference_model(tmp_path: Path) -> None:
    folder = write_score_model(tmp_path / "score", "qwen3", seed=1)
    with pytest.raises(ConfigError) as caught:
        check_config(config_of(folder), 1)
    (line,) = caught.value.problems
    assert line.startswith(f"model.hf_path = '{folder}': holds a preference model")
