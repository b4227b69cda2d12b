"""The files config.json and generation_config.json of exported weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.data.chat import read_template
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.families import describe
from gspo_megatron.families.model_shape import ModelShape, shape_of
from gspo_megatron.hf.export import export_hf
from gspo_megatron.hf.side_files import export_config, generation_files, tokenizer_files
from tests.unit.hf.policies import config_of, policy_of
from tests.unit.hf.published import ADDED_KEYS, CONFIGS, VOCABULARY, model_config, write_model

NAME = "generation_config.json"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer, with tokenizer.model and tokenizer.json. Its first ids are the
    tokens for unknown characters, padding and the end."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(folder, ["abc"] * 20, 12, byte_fallback=False)
    return folder


@pytest.mark.parametrize("suffixes", [(".model",), (".json",), (".model", ".json")])
def test_either_form_of_a_tokenizer_says_where_an_answer_ends(
    tokenizer: Path, suffixes: tuple[str, ...]
) -> None:
    files = [file for file in tokenizer.iterdir() if file.suffix in suffixes]
    assert generation_files(files) == {NAME: {"eos_token_id": 2, "pad_token_id": 1}}


def test_a_sentencepiece_model_is_copied_with_what_belongs_to_it(tmp_path: Path) -> None:
    names = ["tokenizer.model", "chat_template.jinja", NAME]
    for name in (*names, "rows.jsonl"):
        (tmp_path / name).touch()
    assert [file.name for file in tokenizer_files(tmp_path / names[0])] == names
    (tmp_path / NAME).unlink()
    assert [file.name for file in tokenizer_files(tmp_path / names[0])] == names[:2]


def test_a_template_in_the_settings_is_copied_with_them(tmp_path: Path) -> None:
    """A run with a sentencepiece model takes its chat template from either file beside it."""
    model, settings = tmp_path / "tokenizer.model", tmp_path / "tokenizer_config.json"
    model.touch()
    settings.write_text("{}")
    assert tokenizer_files(model) == [model]
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert read_template(tmp_path) == "{{ messages }}"
    assert tokenizer_files(model) == [model, settings]
    template = tmp_path / "chat_template.jinja"
    template.touch()
    assert tokenizer_files(model) == [model, template]


def test_a_token_may_be_spelled_with_its_settings(tokenizer: Path, tmp_path: Path) -> None:
    settings = {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    assert generation_files(sorted(tmp_path.iterdir())) == {NAME: {"eos_token_id": 2}}


@pytest.mark.parametrize("is_old", [True, False])
def test_an_old_folder_has_its_special_tokens_in_another_file(
    tokenizer: Path, tmp_path: Path, is_old: bool
) -> None:
    """The export must name the token that ended the responses in training, which transformers
    chooses."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    if not is_old:
        settings["added_tokens_decoder"] = {"2": {"content": "</s>", "special": True, **plain}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    special = {"eos_token": {"content": "<pad>", **plain}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    made = generation_files(tokenizer_files(tmp_path))[NAME]
    assert made["eos_token_id"] == load_tokenizer(tmp_path).eos_id == (1 if is_old else 2)


def test_nothing_is_made_up(tokenizer: Path, tmp_path: Path) -> None:
    assert generation_files([]) == {}
    for name, text in ((NAME, "{}"), ("tokenizer_config.json", "{}"), ("merges.txt", "")):
        (tmp_path / name).write_text(text)
    theirs = [*tokenizer.iterdir(), tmp_path / NAME]  # the folder has its own file, which is copied
    assert generation_files(theirs) == {}
    files = [tmp_path / "tokenizer_config.json", tokenizer / "tokenizer.json"]
    assert generation_files(files) == {}  # tokenizer_config.json names no end-of-sequence token
    assert generation_files([tmp_path / "merges.txt"]) == {}


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_damaged_tokenizer_is_named(tokenizer: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{ damaged")
    files = [tmp_path / name]
    if name == "tokenizer.json":
        files.append(tokenizer / "tokenizer_config.json")
    with pytest.raises(DataError, match=f"{tmp_path}: no tokenizer that can be read"):
        generation_files(files)


@pytest.mark.usefixtures("one_rank")
def test_a_running_model_that_began_as_somebody_else_s(tokenizer: Path, tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", "qwen3", seed=18)
    original = json.loads((source / "config.json").read_text())
    policy = policy_of(config_of(source))
    export_hf(policy, tmp_path / "out", hf_config=original, tokenizer=tokenizer)
    made = json.loads((tmp_path / "out" / NAME).read_text())
    assert made == {"eos_token_id": 2, "pad_token_id": 1}


def _shape(hf: dict[str, Any], **megatron: Any) -> ModelShape:
    return shape_of(describe(hf), megatron)


# A model of one of these families may have the same shape as a model of a family that is earlier in
# the table. Without a config.json it is exported as a model of the earlier family.
FIRST_OF_ITS_SHAPE = {
    "hy_v3": "glm4_moe",
    "bailing_moe_v2": "glm4_moe",
    "glm4_moe_lite": "deepseek_v3",
    "qwen3_5_moe_text": "qwen3_next",
}


@pytest.mark.parametrize("family", CONFIGS)
def test_it_describes_the_same_model_and_keeps_an_original(family: str) -> None:
    shape = _shape(model_config(family))
    made = export_config(shape, VOCABULARY, torch.bfloat16)
    assert shape_of(describe(made)) == shape
    assert made["torch_dtype"] == "bfloat16"
    first = FIRST_OF_ITS_SHAPE.get(family, family)
    assert made["architectures"] == CONFIGS[first]["architectures"]
    original = model_config(family) | {"bos_token_id": 3, "somebodys_key": [1, 2]}
    made = export_config(_shape(original), VOCABULARY, torch.float32, original)
    assert made == original | ADDED_KEYS.get(family, {})


def test_code_that_an_export_does_not_have_is_not_named() -> None:
    original = model_config("deepseek_v3") | {"auto_map": {"AutoConfig": "own.Config"}}
    for name in ("deepseek_v3", "kimi_k2"):  # transformers does not know the second name
        original["model_type"] = name
        made = export_config(_shape(original), VOCABULARY, torch.float32, original)
        assert made == model_config("deepseek_v3")


def test_what_has_changed_is_changed_in_the_original() -> None:
    original = model_config("qwen3_moe") | {"bos_token_id": 3, "decoder_sparse_step": 2}
    del original["rope_theta"], original["rope_scaling"], original["torch_dtype"]
    original |= {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
    original |= {"dtype": "float32"}
    shape = replace(_shape(original, moe_aux_loss_coeff=0.5), rotary_base=700.0)
    made = export_config(shape, VOCABULARY, torch.bfloat16, original)
    assert made["router_aux_loss_coef"] == 0.5
    assert made["rope_theta"] == 700.0 and "rope_parameters" not in made
    assert made["dtype"] == "bfloat16" and "torch_dtype" not in made
    assert made["bos_token_id"] == 3
    assert shape_of(describe(made)) == shape


def test_a_model_that_is_no_more_of_the_family_is_refused() -> None:
    original = model_config("mixtral")
    shape = _shape(original, moe_router_pre_softmax=True)
    with pytest.raises(ConfigError, match="mixtral"):
        export_config(shape, VOCABULARY, torch.float32, original)
