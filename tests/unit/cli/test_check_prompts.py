"""The messages of `check` about prompts that cannot be used: exit code 2 and one clear line
each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command

# This template refuses unknown roles. It reads an option, which may be set or not, and writes the
# beginning of the response.
TEMPLATE = (
    "{%- set thinking = enable_thinking if enable_thinking is defined else true -%}"
    "{%- for message in messages -%}"
    "{%- if message.role not in ('system', 'user', 'assistant') -%}"
    "{{- raise_exception('no role ' ~ message.role) -}}{%- endif -%}"
    "{{- message.content -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'a' if thinking else 'bb' -}}{%- endif -%}"
)
OPENS_NOTHING = "{% for message in messages %}{{ message.content }}{% endfor %}"

Rows = Sequence[object]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def row(prompt: object, answer: object = "a", **others: object) -> dict[str, object]:
    return {"prompt": prompt, "answer": answer, **others}


GOOD, CHAT = row("abc"), row([{"role": "system", "content": "ab"}, user("abc")])
ASSISTANT = {"role": "assistant", "content": "a"}


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Path) -> Path:
    """A folder with a tokenizer, to which a chat template may be added."""
    shutil.copy(tokenizer, tmp_path / "letters.model")
    return tmp_path


def write(folder: Path, *files: Rows, template: str | None = TEMPLATE) -> Path:
    """A configuration with these prompt files: a.jsonl, b.jsonl …"""
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    paths = [folder / f"{name}.jsonl" for name, _ in zip("abcd", files)]
    for path, rows in zip(paths, files, strict=True):
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    data = {"tokenizer": str(folder / "letters.model"), "prompts": [str(path) for path in paths]}
    (folder / "config.yaml").write_text(json.dumps({"data": data}))
    return folder / "config.yaml"


OPTION = "data.chat_template_options={%s: false}"
LETTERS = "{folder}/letters.model: "
# Faults of single rows are in tests/unit/data/test_prompts.py.
MISTAKES: list[tuple[Sequence[Rows], Sequence[str], str | None, str]] = [
    (
        [[CHAT, row([{"role": "boss", "content": "a"}])]],
        (),
        TEMPLATE,
        "{folder}/a.jsonl:2: " + LETTERS + "the chat template failed: no role boss",
    ),
    (
        [[CHAT] * 3],
        (),
        None,
        LETTERS + "a sentencepiece model has no chat template, and there is no "
        "chat_template.jinja beside it, which messages and data.chat_template: true need; add",
    ),
    (
        [[CHAT] * 3],
        (),
        TEMPLATE.replace("'bb'", "'<|x|>'").replace("'a'", "'<|im_end|>'"),
        LETTERS + "its chat template writes <|im_end|>, which the tokenizer does not",
    ),
    (
        [[CHAT] * 3],
        (),
        OPENS_NOTHING,
        LETTERS + "its chat template does not open the assistant's turn (add_gen",
    ),
    (
        [[CHAT]],
        (OPTION % "enable_thnking",),
        TEMPLATE,
        "data.chat_template_options.enable_thnking = false: the chat template of "
        "{folder}/letters.model never reads it; did you mean enable_thinking?",
    ),
    (
        [[GOOD]],
        (OPTION % "enable_thinking",),
        TEMPLATE,
        "data.chat_template_options: nothing reads it: no prompt is a list of messages, and data.",
    ),
    (
        [[GOOD], [GOOD]],
        ("data.weights=[1]",),
        None,
        "data.weights = [1.0]: 1 weights for 2 files in data.prompts; allowed: one for each",
    ),
    (
        [[GOOD]],
        ("data.prompts=[{folder}/a.jsonl, {folder}/../{name}/a.jsonl]",),
        None,
        "data.prompts = ['{folder}/a.jsonl', … : a file is listed twice; allowed: once",
    ),
    ([[GOOD], [row("")]], (), None, "{folder}/b.jsonl:1: field 'prompt' is empty; a prompt needs"),
    (
        [[{"question": "a", "answer": "#### 1"}]],
        ("data.format=gsm8k", "data.prompt_field=question"),
        None,
        "data.prompt_field = 'question': data.format = gsm8k names it; allowed: prompt",
    ),
    (
        [[GOOD, row("a", 82)]],
        (),
        None,
        "{folder}/a.jsonl:2: the answer 82 is not a string (reward 'exact_match')",
    ),
    (
        [[GOOD]],
        ("data.answer_field=",),
        None,
        "data.answer_field = null: reward.name = exact_match compares responses with answers;",
    ),
]


@pytest.mark.parametrize(("files", "words", "template", "told"), MISTAKES)
def test_a_mistake_is_one_clear_line(
    folder: Path,
    gspo: Command,
    files: Sequence[Rows],
    words: Sequence[str],
    template: str | None,
    told: str,
) -> None:
    names = {"{folder}": str(folder), "{name}": folder.name}

    def named(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    path = write(folder, *files, template=template)
    code, _, err = gspo("check", path, *map(named, words))
    assert (code, len(err.splitlines())) == (2, 1), err
    start, *rest = named(told).split(" … ")  # a long value is cut short
    assert err.startswith(start) and all(part in err for part in rest)


def test_a_file_of_the_wrong_kind_is_six_lines(folder: Path, gspo: Command) -> None:
    for files, lines in (([[row(None)] * 23], 6), ([[row(None)] * 23, [row("a", 1)] * 23], 6)):
        code, _, err = gspo("check", write(folder, *files))
        assert (code, len(err.splitlines())) == (2, lines)
        assert err.splitlines()[-1] == "… and 18 more"


def test_prompts_of_all_kinds_together_are_sound(folder: Path, gspo: Command) -> None:
    path = write(folder, [CHAT, GOOD], [row([user("abcd"), ASSISTANT, user("a")], id=7)])
    options = OPTION % "enable_thinking"
    code, out, err = gspo("check", path, "data.weights=[1, 2.5]", options)
    assert code == 0, err
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[:8])
    assert lines["prompts"] == "3 in data.prompts"
    # the longest prompt is abcd + a + a, and the template adds bb because of the option
    assert lines["lengths"].startswith("prompts of at most 8 tokens (96 allowed)")


def test_rewards_take_the_answers_that_they_say(folder: Path, gspo: Command) -> None:
    """`math` takes numbers. A user's function takes whatever the row has, or no answer."""
    (folder / "own_reward.py").write_text("def reward(sample): return float(sample.answer is None)")
    path = write(folder, [row("abc", 82), row("abc", 0.5)], [row("a", "1/2")])
    answers = ["data.answer_field=", "reward.import_path=own_reward:reward"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert gspo("check", path, *answers)[0] == 0
        assert gspo("check", path, answers[1])[0] == 0
    pytest.importorskip("math_verify")
    code, _, err = gspo("check", path, "reward.name=math")
    assert code == 0, err
    write(folder, [row("abc", True)])
    code, _, err = gspo("check", path, "reward.name=math")
    assert code == 2 and "the answer True is not a string or number (reward 'math')" in err
