"""The list of all keys, and the page docs/configuration.md, which is made from it."""

from __future__ import annotations

import pytest

from gspo_megatron.cli.main import main
from gspo_megatron.config.keys import find_keys, list_keys
from gspo_megatron.config.load import STAGES
from gspo_megatron.config.section import keys_of
from tools.make_configuration_doc import PAGE, markdown

Capture = pytest.CaptureFixture[str]


def test_the_page_is_made_from_the_schema_as_it_is() -> None:
    """If the page is out of date, `python tools/make_configuration_doc.py` makes it again."""
    assert PAGE.read_text(encoding="utf-8") == markdown()


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_is_listed_with_its_meaning(stage: str) -> None:
    listed = {key.name: key for key in list_keys(stage)}
    assert listed.keys() == keys_of(STAGES[stage]).keys()
    assert all(key.meaning and key.resume for key in listed.values())
    assert listed["optimizer.beta1"].legal == "from 0, below 1"
    assert listed["logging.trackers"].type == "list of texts"
    assert listed["training.recompute"].legal == "none, full, selective"
    assert listed["data.tokenizer"].default == "required"
    assert listed["model.lora.targets"].default == "[all]"


def test_keys_are_found_by_a_word_without_a_configuration(capsys: Capture) -> None:
    assert main(["check", "--keys", "GROUP_size"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    meaning = "number of responses to each prompt; allowed: from 1"
    assert line == f"rollout.group_size (integer, default 8): {meaning}"
    assert main(["check", "--keys"]) == 0
    assert capsys.readouterr().out.splitlines() == find_keys()
    assert main(["check", "--keys", "wsd_steps", "--stage", "sft"]) == 0
    assert capsys.readouterr().out.startswith("optimizer.wsd_steps (integer or null, ")
    found = [line.split("]")[0] for line in find_keys("data.max_tokens")]
    assert found == ["[sft", "[reward_model"]


def test_neither_keys_nor_a_configuration(capsys: Capture) -> None:
    assert main(["check", "--keys", "nonsense"]) == 2
    assert (
        capsys.readouterr().err
        == "--keys nonsense: no key has this word in its name or description\n"
    )
    with pytest.raises(SystemExit, match="2"):
        main(["check"])
    assert "required: CONFIG.yaml" in capsys.readouterr().err
