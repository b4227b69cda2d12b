"""Prompt files: rows, faults with file and line, token ids, unknown characters."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from gspo_megatron.config import Config, load_config
from gspo_megatron.config.stages import FineTuningConfig
from gspo_megatron.data.chat import Rendered
from gspo_megatron.data.formats import FORMATS, FieldMap, last_box
from gspo_megatron.data.inputs import read_fine_tuning, read_inputs
from gspo_megatron.data.prompts import OddTexts, encode_prompts, encode_text, load_prompts
from gspo_megatron.data.tokenizers import Encoded, load_tokenizer, train_sentencepiece
from gspo_megatron.errors import ConfigError
from gspo_megatron.types import Prompt
from tests.unit.data.chat_templates import CHATML, byte_level
from tests.unit.data.corpora import load, refusal, write_parquet, write_rows


def problems_of(path: Path, **fields: str | None) -> list[str]:
    return refusal(load_prompts, path, FieldMap(**fields))


GOOD = {"prompt": "37+45=", "answer": "82"}
ASKED = {"role": "user", "content": "ab"}


def test_json_lines_keep_order_source_and_other_fields(tmp_path: Path) -> None:
    rows = ({"prompt": " a ", "answer": "", "task": "x", "level": 3}, b"", b" \t")
    path = write_rows(tmp_path / "p.jsonl", [*rows, {"prompt": "größer?", "answer": "ja"}])
    first, second = load_prompts(path)
    assert (first.text, first.answer, first.source) == (" a ", "", f"{path}:1")
    assert first.fields == {"task": "x", "level": 3}
    assert first.token_ids == ()
    # Blank lines are skipped but counted.
    assert (second.text, second.answer, second.source) == ("größer?", "ja", f"{path}:4")


def test_fields_can_be_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"question": "q", "solution": "s", "prompt": 1}])
    (prompt,) = load_prompts(path, FieldMap("question", "solution"))
    assert (prompt.text, prompt.answer, prompt.fields) == ("q", "s", {"prompt": 1})
    # A byte-order mark and carriage returns are not part of the text.
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n")
    assert load_prompts(path)[0].text == "37+45="


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"prompt": "a" "answer": "b"}', "not JSON: Expecting ',' delimiter at column 16"),
        # the line ends too early
        (b'{"prompt": "a"', "not JSON: Expecting ',' delimiter at column 15"),
        (b'{"prompt": "a', "not JSON: Unterminated string starting at column 12"),
        ([1, 2], "an array; a JSON object is wanted"),
        (None, "null; a JSON object is wanted"),
        (
            b'{"prompt": "a", "answer": "b", "prompt": "c"}',
            "JSON that cannot be read: key 'prompt' is there twice; keep one of them",
        ),
        (
            b'{"prompt": "a", "more": [{"x": 1, "y": 1, "x": 1}]}',
            "JSON that cannot be read: key 'x' is there twice; keep one of them",
        ),
        (
            {"prompt": "a", "reply": "b"},
            "no field 'answer'; the fields are: 'prompt', 'reply' (data.answer_field chooses one)",
        ),
        (
            {"prompt": None, "answer": "b"},
            "field 'prompt' is null; a string or messages are wanted",
        ),
        ({"prompt": {}, "answer": "b"}, "field 'prompt' is an object; a string or messages are"),
        ({"prompt": [], "answer": "b"}, "field 'prompt': holds no message"),
        ({"prompt": ["a"], "answer": "b"}, "field 'prompt': message 1 is a string; an object is"),
        ({"prompt": [{}], "answer": "b"}, "field 'prompt': 'role' of message 1 is missing; a"),
        (
            {"prompt": [{"role": "user", "content": None}], "answer": "b"},
            "field 'prompt': 'content' of message 1 is null; a string is wanted",
        ),
        (
            {"prompt": [{"role": "user", "content": " "}], "answer": "b"},
            "field 'prompt' is empty; a prompt needs some text",
        ),
        (
            {"prompt": [ASKED, {"role": "assistant", "content": "c"}], "answer": "b"},
            "field 'prompt': the last message has the role 'assistant', but the policy writes ",
        ),
        (
            {"prompt": "a", "answer": "b", "id": [7]},
            "field 'id' is an array; a string or a number is wanted (data.id_field chooses one, "
            "null: none)",
        ),
        ({"prompt": "", "answer": "b"}, "field 'prompt' is empty; a prompt needs some text"),
        ({"prompt": " \t", "answer": "b"}, "field 'prompt' is empty; a prompt needs some text"),
        (b'{"prompt": "\xff"}', "not valid UTF-8 at byte 13 of the line"),
        (b"[" * 200_000, "JSON that cannot be read: "),
        (
            b'{"prompt": "a", "answer": ' + b"[" * 900 + b"]" * 900 + b"}",
            "JSON that cannot be read: nested more than 100 levels deep",
        ),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "JSON that cannot be read: "),
        (
            {"prompt": "ab\ud800", "answer": "b"},
            "field 'prompt' holds half a surrogate pair at character 3",
        ),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(
    tmp_path: Path, line: object, expected: str
) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", [GOOD, line])
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:2: {expected}")


def test_the_first_problems_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    for count, hidden in ((5, []), (23, ["… and 18 more"])):
        lines = [f"{path}:{n}: a number; a JSON object is wanted" for n in range(1, 6)]
        assert problems_of(write_rows(path, [1] * count)) == lines + hidden
    assert len(problems_of(write_rows(path, [{"prompt": 1}]))) == 2


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    assert problems_of(path) == [f"{path}: no such prompt file"]
    (tmp_path / "folder").mkdir()
    nothing = "a folder without .jsonl and .parquet files"
    assert problems_of(tmp_path / "folder") == [f"{tmp_path / 'folder'}: {nothing}"]
    for content in (b"", b"\n  \n"):
        path.write_bytes(content)
        assert problems_of(path) == [f"{path}: holds no prompts; one JSON object a line is wanted"]


@pytest.mark.parametrize("name", ["p.parquet", "no_suffix"])
def test_parquet_reads_like_json_lines(tmp_path: Path, name: str) -> None:
    path = write_parquet(
        tmp_path / name, {"prompt": ["a", "b"], "answer": ["1", "2"], "level": [7, 8]}
    )
    prompts = load_prompts(path)
    assert [(p.text, p.answer, p.source, p.fields) for p in prompts] == [
        ("a", "1", f"{path}:1", {"level": 7}),
        ("b", "2", f"{path}:2", {"level": 8}),
    ]


def test_faults_of_parquet_files_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", {"q": ["a"] * 3, "r": ["1"] * 3})
    assert problems_of(path) == [
        f"{path}: no column '{name}'; the columns are: 'q', 'r' (data.{name}_field chooses one)"
        for name in ("prompt", "answer")
    ]
    columns = [pyarrow.array([text]) for text in "abc"]
    table = pyarrow.Table.from_arrays(columns, ["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, path)
    assert problems_of(path) == [f"{path}: column 'answer' is there twice; keep one of them"]
    days = pyarrow.array([1 << 30], pyarrow.date32())  # Python has no such date
    write_parquet(path, {"prompt": ["a"], "answer": ["1"], "day": days})
    assert problems_of(path)[0].startswith(f"{path}: not a readable Parquet file: days=1073741824")
    write_parquet(path, {"prompt": ["a", None, " "], "answer": ["1"] * 3})
    assert problems_of(path) == [
        f"{path}:2: field 'prompt' is null; a string or messages are wanted",
        f"{path}:3: field 'prompt' is empty; a prompt needs some text",
    ]


# --- messages, answers of any kind, ids ----------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATION = [SYSTEM, ASKED, {"role": "assistant", "content": "c"}, {**ASKED, "content": "d?"}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_prompt_may_be_a_conversation(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p.{suffix}"
    named = {**ASKED, "name": "Ann"}  # in Parquet, the other messages then have name = None
    prompts, answers = [CONVERSATION, [SYSTEM, named]], ["1", "2"]
    if suffix == "parquet":
        write_parquet(path, {"prompt": prompts, "answer": answers})
    else:
        write_rows(path, [{"prompt": p, "answer": a} for p, a in zip(prompts, answers)])
    first, second = load_prompts(path)
    assert (first.text, first.messages) == ("d?", tuple(CONVERSATION))
    assert (second.text, second.messages) == ("ab", (SYSTEM, named))
    (encoded, _) = encode_prompts([first, second], CodePoints(bos_id=5), 99)
    assert "".join(map(chr, encoded.token_ids)) == (
        "[system]Be brief.[user]ab[assistant]c[user]d?[assistant]"
    )
    # a content may be an array of texts, as in OpenAI's format
    parts = {**ASKED, "content": [{"type": "text", "text": text} for text in "ab"]}
    (prompt,) = load_prompts(write_rows(tmp_path / "o.jsonl", [{**GOOD, "prompt": [parts]}]))
    assert (prompt.text, prompt.messages) == ("ab", (ASKED,))


def test_a_string_is_a_message_only_with_a_chat_template(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [GOOD])
    assert load_prompts(path)[0].messages == ()
    message = {"role": "user", "content": "37+45="}
    assert load_prompts(path, chat_template=True)[0].messages == (message,)


@pytest.mark.parametrize("answer", [82, 0.5, True, None, ["a", 1], {"tests": [{"in": "1"}]}])
def test_an_answer_is_any_json_value_or_none(tmp_path: Path, answer: object) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a", "answer": answer}])
    (prompt,) = load_prompts(path)
    assert prompt.answer == answer and type(prompt.answer) is type(answer)
    (prompt,) = load_prompts(path, FieldMap(answer=None))
    assert (prompt.answer, prompt.fields) == (None, {"answer": answer})


def test_an_answer_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    days = [datetime.date(2026, 1, 2)]
    path = write_parquet(tmp_path / "p.parquet", {"prompt": ["a"], "answer": days})
    wrong = "is of type date; a JSON value is wanted"
    assert problems_of(path) == [f"{path}:1: field 'answer' {wrong}"]
    write_parquet(path, {"prompt": ["a"], "answer": [float("nan")]})
    assert problems_of(path) == [f"{path}:1: field 'answer' is nan; a JSON value is wanted"]
    write_parquet(path, {"prompt": ["a"], "answer": [days]})
    assert problems_of(path) == [f"{path}:1: field 'answer' holds a value that {wrong}"]


def test_a_row_is_known_by_its_id_or_by_file_and_line(tmp_path: Path) -> None:
    rows = [{**GOOD, "id": "x"}, {**GOOD, "id": 7}, GOOD, {**GOOD, "id": None, "uid": "y"}]
    path = write_rows(tmp_path / "p.jsonl", rows)
    assert [p.row_id for p in load_prompts(path)] == ["x", "7", "p.jsonl:3", "p.jsonl:4"]
    assert load_prompts(path)[0].fields == {"id": "x"}
    assert load_prompts(path, FieldMap(id=None))[0].row_id == "p.jsonl:1"
    # if the configuration names a field, every row must have it
    lines = problems_of(path, id="uid")
    fields = "the fields are: 'prompt', 'answer', 'id' (data.id_field chooses one)"
    assert lines[0] == f"{path}:1: no field 'uid'; {fields}"
    assert len(lines) == 3


def test_two_rows_with_one_id_are_one_line(tmp_path: Path) -> None:
    rows = [{**GOOD, "id": n} for n in ("a", "b", "a", "c", "b", "a")]
    path = write_rows(tmp_path / "p.jsonl", rows)
    legal = "allowed: one id for each row, or data.id_field = null"
    assert problems_of(path) == [
        f"{path}:3: id 'a' is also that of {path}:1, and 2 more like it; {legal}"
    ]
    assert len(load_prompts(path, FieldMap(id=None))) == 6


# --- objects in rows, published datasets ----------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_dotted_field_is_part_of_an_object(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p.{suffix}"
    row = {"prompt": "a", "reward_model": {"ground_truth": "34", "style": "rule"}, "a.b": "c"}
    if suffix == "parquet":
        write_parquet(path, {name: [value] for name, value in row.items()})
    else:
        write_rows(path, [row])
    (prompt,) = load_prompts(path, FieldMap(answer="reward_model.ground_truth"))
    assert prompt.answer == "34"
    assert prompt.fields == {"reward_model": row["reward_model"], "a.b": "c"}
    # a field may have a dot in its name
    assert load_prompts(path, FieldMap(answer="a.b"))[0].answer == "c"
    (line,) = problems_of(path, answer="reward_model.truth")
    assert line == (
        f"{path}:1: no field 'reward_model.truth'; the fields of 'reward_model' are: "
        "'ground_truth', 'style' (data.answer_field chooses one)"
    )
    (line,) = problems_of(path, answer="prompt.x")
    assert line == (
        f"{path}:1: field 'prompt' is a string; 'prompt.x' needs an object (data.answer_field)"
    )


# Rows in their published form: openai/gsm8k, hendrycks MATH, BytedTsinghua-SIA/DAPO-Math-17k, APPS.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[str, object]]] = {
    "gsm8k": (
        {
            "question": "How many?",
            "answer": "He sells 16 - 3 = <<16-3=13>>13.\n1000 more: 1013\n#### 1,013",
        },
        ("How many?", "1013"),
    ),
    "math": (
        {
            "problem": "Find $x$.",
            "level": "Level 5",
            "type": "Algebra",
            "solution": r"First \boxed{1}, so $x = \boxed{\frac{1}{2}}$.",
        },
        ("Find $x$.", r"\frac{1}{2}"),
    ),
    "dapo": (
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve it.", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
        },
        ("Solve it.", "34"),
    ),
    "apps": (
        {
            "problem_id": 0,
            "question": "Print the sum.",
            "solutions": '["print(sum(map(int, input().split())))"]',
            "input_output": '{"inputs": ["1 2"], "outputs": ["3"]}',
            "difficulty": "interview",
            "url": "https://example.org",
            "starter_code": "",
        },
        ("Print the sum.", {"inputs": ["1 2"], "outputs": ["3"]}),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_published_rows_are_read_by_name(tmp_path: Path, name: str) -> None:
    row, expected = PUBLISHED[name]
    path = write_rows(tmp_path / "p.jsonl", [row])
    (prompt,) = load_prompts(path, FORMATS[name])
    assert (prompt.text, prompt.answer) == expected
    # `fields` includes the field that contains the answer
    assert {*row} - {*prompt.fields} == {FORMATS[name].prompt}


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        ("gsm8k", "13", "field 'answer' has no '####' before the answer (data.format = gsm8k)"),
        ("gsm8k", 13, "field 'answer' has no '####' before the answer (data.format = gsm8k)"),
        ("math", "x", r"field 'solution' has no \boxed{...} with the answer (data.format = math)"),
        ("math", r"\boxed{\frac{1}", r"field 'solution' has a \boxed{ that is not closed (data."),
        ("apps", "", "field 'input_output' is not JSON with tests in 'inputs' and 'outputs'; "),
        ("apps", "[1]", "field 'input_output' is not JSON with tests in 'inputs' and 'outputs'; "),
        ("apps", '{"inputs": [], "outputs": []}', "field 'input_output' is not JSON with tests in"),
        ("dapo", "34", "field 'reward_model' is a string; 'reward_model.ground_truth' needs an ob"),
        (
            "gsm8k",
            None,
            "no field 'answer'; the fields are: 'question' (data.format = gsm8k chooses one)",
        ),
    ],
)
def test_rows_of_another_dataset_are_refused(
    tmp_path: Path, name: str, answer: object, told: str
) -> None:
    field = (FORMATS[name].answer or "").split(".")[0]
    row = {**PUBLISHED[name][0], field: answer}
    if answer is None:
        del row[field]
    path = write_rows(tmp_path / "p.jsonl", [PUBLISHED[name][0], row])
    (line,) = refusal(load_prompts, path, FORMATS[name])
    assert line.startswith(f"{path}:2: {told}")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\fbox{2}", "2"),
        (r"$\boxed 7$.", "7"),
        (r"\boxed{a{b}c} d}", "a{b}c"),
        (r"It is \boxed {7}. So", "7"),
        (r"\boxed{\left\{ x \right.} d}", r"\left\{ x \right."),
    ],
)
def test_boxes_of_several_forms(solution: str, answer: str) -> None:
    assert last_box(solution) == answer


def test_parquet_with_invalid_utf8_is_refused(tmp_path: Path) -> None:
    raw = pyarrow.array([b"ok", b"\xff"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
    path = write_parquet(tmp_path / "p.parquet", {"prompt": text, "answer": ["1", "2"]})
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:1: not valid UTF-8")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 and then something else PAR1"])
def test_damaged_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.parquet"
    path.write_bytes(content)
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}: not a readable Parquet file: ")


# --- a template of the prompt, and a system message ----------------------------------------------


def test_training_rows_have_a_template_and_a_system_message(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "t", CHATML)
    rows = [{"question": f"What is {n}?", "answer": f"it is\n#### {n}"} for n in range(2)]
    train = write_rows(tmp_path / "train.jsonl", rows)
    data = {"tokenizer": folder, "prompts": train, "format": "gsm8k", "chat_template": "true"}
    data |= {"template": "{question} Put it in \\\\boxed{}.", "system_prompt": "Be brief."}
    suite = "evaluation.suites={s: {prompts: '" + str(train) + "', format: gsm8k, "
    suite += "system_prompt: Be long., reward: {name: exact_match}}}"
    (tmp_path / "config.yaml").write_text("{}\n")
    words = [f'data.{key}="{value}"' for key, value in data.items() if key != "chat_template"]
    config = load_config(tmp_path / "config.yaml", [*words, "data.chat_template=true", suite])
    inputs = read_inputs(config)
    asked = "What is 1? Put it in \\boxed{}."
    system = {"role": "system", "content": "Be brief."}
    assert inputs.train[1].messages == (system, {"role": "user", "content": asked})
    assert (inputs.train[1].text, inputs.train[1].answer) == (asked, "1")
    (first, _) = inputs.files["evaluation.suites.s"]
    assert first.messages[0]["content"] == "Be long."
    assert first.messages[1]["content"] == "What is 0?"


def test_a_system_message_of_the_row_stays_and_strings_need_a_template(tmp_path: Path) -> None:
    fields = FieldMap(system="Be brief.")
    own = [{"role": "system", "content": "Mine."}, ASKED]
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": own, "answer": "x"}])
    assert load_prompts(path, fields)[0].messages == tuple(own)
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "x"}])
    assert load_prompts(path, fields, True)[0].messages[0]["content"] == "Be brief."
    (line,) = refusal(load_prompts, path, fields)
    assert line == (
        f"{path}:1: the prompt is a string: data.system_prompt needs messages, or "
        "data.chat_template = true for strings"
    )
    data = {
        "tokenizer": byte_level(tmp_path / "t", CHATML, eos_token="<|im_end|>"),
        "examples": path,
        "max_tokens": 99,
    }
    data |= {"system_prompt": "Be brief.", "template": "Say {prompt}", "chat_template": "true"}
    found = read_fine_tuning(load(tmp_path, FineTuningConfig, **data))
    text = load_tokenizer(data["tokenizer"]).decode(found.train[0].token_ids.tolist())  # type: ignore[arg-type]
    assert text == "system\nBe brief.\nuser\nSay a\nassistant\nx\n"


# --- token ids ------------------------------------------------------------------------------------


class CodePoints:
    """A tokenizer whose ids are code points."""

    def __init__(self, bos_id: int | None = None) -> None:
        self.bos_id, self.bos_text = bos_id, "<s>"
        self.chat_template, self.template_options = None, {}

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def encode_rendered(self, text: str, quoted: Sequence[Any]) -> Encoded:
        return Encoded(self.encode(text), [], [])

    def render(self, messages: Sequence[Any], open_answer: bool, **_: Any) -> Rendered:
        text = "".join(f"[{m['role']}]{m['content']}" for m in messages)
        return Rendered(text + "[assistant]" * open_answer, None)


def prompt(text: str, line: int = 1) -> Prompt:
    return Prompt(text=text, answer="x", source=f"p.jsonl:{line}", fields={"task": "t"})


def test_the_beginning_token_goes_first_and_counts_without_a_chat_template() -> None:
    encoded = encode_prompts([prompt("ab"), prompt("c", 2)], CodePoints(), 2)
    assert encoded[0].token_ids == (97, 98)
    assert encoded[1] == replace(prompt("c", 2), token_ids=(99,))
    tokenizer = CodePoints(bos_id=5)
    assert encode_prompts([prompt("ab")], tokenizer, 3)[0].token_ids == (5, 97, 98)
    (line,) = refusal(encode_prompts, [prompt("ab")], tokenizer, 2)
    assert "has 3 tokens; at most 2" in line
    chat = replace(prompt("ab"), messages=(ASKED,))
    (encoded,) = encode_prompts([chat], tokenizer, 99)
    assert "".join(map(chr, encoded.token_ids)) == "[user]ab[assistant]"
    assert encoded.text == "ab"


def test_all_bad_prompts_are_named_with_their_lengths() -> None:
    prompts = [prompt("abcd", 1), prompt("ok", 2), prompt(" ", 3), prompt("abcde", 4)]
    allowed = "tokens; at most 3 are allowed (data.max_prompt_tokens)"
    assert refusal(encode_prompts, prompts, CodePoints(), 3) == [
        f"p.jsonl:1: the prompt has 4 {allowed}",
        "p.jsonl:3: the prompt is empty",
        f"p.jsonl:4: the prompt has 5 {allowed}",
    ]


# --- unknown characters ---------------------------------------------------------------------------

WARNING = (
    "texts hold characters that the tokenizer does not know; it replaces them all by the same token"
)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of only the letters a to h."""
    prefix = tmp_path_factory.mktemp("tokenizer") / "letters"
    return train_sentencepiece(["abcdefgh", "hgfedcba"], 64, prefix, "char")


def pairs(*texts: str) -> list[object]:
    return [dict(zip(("prompt", "answer"), text.split("|"), strict=True)) for text in texts]


def test_unknown_characters_of_prompts(tmp_path: Path, letters: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", pairs("ab|c", "aé日é|x", "b|ü", "日|"))
    test = write_rows(tmp_path / "test.jsonl", pairs("abc|é"))
    config = load(tmp_path, Config, tokenizer=letters, prompts=train, eval_prompts=test)
    (line,) = read_inputs(config).warnings
    assert line == f"data.prompts: 2 of 4 {WARNING}; the first is {train}:2: 'é', '日'"
    write_rows(train, pairs("ab|ü"))
    assert read_inputs(config).warnings == ()


def test_texts_that_spell_control_tokens_are_told(tmp_path: Path) -> None:
    """The texts spell control tokens because a template has rendered them already, or because they
    begin with a BOS token. The check covers prompts, evaluation prompts and examples."""
    folder = byte_level(tmp_path / "t")
    once = encode_text("hello", load_tokenizer(folder))
    texts = ("<s>hello", "a|b", "<s>[INST] hi [/INST][INST]", "hello")
    rows = [{"prompt": text, "answer": "x", "id": n} for n, text in enumerate(texts)]
    train = write_rows(tmp_path / "train.jsonl", rows)
    config = load(tmp_path, Config, tokenizer=folder, prompts=train, eval_prompts=train)
    inputs = read_inputs(config)
    assert inputs.train[0].token_ids == inputs.train[3].token_ids == tuple(once)
    begins = "2 of 4 prompts begin with '<s>', which the tokenizer puts before every prompt: each "
    begins += f"gets it once; leave it out of the prompts; the first is {train}:1"
    spells = "1 of 4 texts spell control tokens of the tokenizer; they are encoded as plain text, "
    spells += "because only a chat template writes control tokens: give conversations as messages, "
    spells += f"or use data.chat_template; the first is {train}:3: [INST], [/INST]"
    keys = ("data.prompts", "data.eval_prompts")
    assert list(inputs.warnings) == [f"{key}: {line}" for key in keys for line in (begins, spells)]
    data = {"tokenizer": folder, "examples": train, "max_tokens": 50}
    found = read_fine_tuning(load(tmp_path, FineTuningConfig, **data))
    assert list(found.warnings) == [f"data.examples: {line}" for line in (begins, spells)]
    assert found.train[0].token_ids.tolist()[: len(once)] == once


def test_problems_of_all_files_come_at_once(tmp_path: Path, letters: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [*pairs("ab|c"), []])
    files = {"prompts": train, "eval_prompts": tmp_path / "none"}
    for tokenizer, problem in ((tmp_path / "t", "no such tokenizer; "), (letters, None)):
        with pytest.raises(ConfigError) as caught:
            read_inputs(load(tmp_path, Config, tokenizer=tokenizer, **files))
        lines = caught.value.problems
        assert lines[-2:] == [
            f"{train}:2: an array; a JSON object is wanted",
            f"{tmp_path}/none: no such prompt file",
        ]
        assert len(lines) == 2 + (problem is not None)
        assert problem is None or lines[0].startswith(f"{tokenizer}: {problem}")


def test_several_files_are_one_list_and_evaluations_take_a_share_of_each(
    tmp_path: Path, letters: Path
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("one", "two")}
    write_rows(files["one"], pairs(*(f"a{'b' * n}|c" for n in range(6))))
    write_rows(files["two"], pairs("c|a", "d|a"))
    named = f"[{files['one']}, {files['two']}]"
    inputs = read_inputs(load(tmp_path, Config, tokenizer=letters, prompts=named))
    texts = ["a", "ab", "abb", "abbb", "abbbb", "abbbbb", "c", "d"]
    assert [prompt.text for prompt in inputs.train] == texts
    assert inputs.train_sizes == (6, 2)
    assert [prompt.row_id for prompt in inputs.train[5:7]] == ["one.jsonl:6", "two.jsonl:1"]
    inputs = read_inputs(
        load(tmp_path, Config, tokenizer=letters, prompts=files["two"], eval_prompts=named)
    )
    held_out = [prompt.text for prompt in inputs.evaluation]
    assert sorted(held_out) == sorted(texts) and [t for t in held_out if t in "ab" * 9] != texts[:6]
    for count in (4, 8):
        assert sum(text in "cd" for text in held_out[:count]) == count // 4


def test_unknown_characters_of_examples(tmp_path: Path, letters: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", pairs("ab|c", "a" * 90 + "é|b", "a|xyx"))
    data = {"tokenizer": letters, "examples": path, "max_tokens": 50, "too_long": "drop"}
    (line,) = read_fine_tuning(load(tmp_path, FineTuningConfig, **data)).warnings
    assert line == f"data.examples: 1 of 2 {WARNING}; the first is {path}:3: 'x', 'y'"


def test_many_characters_are_not_all_shown(letters: Path) -> None:
    tokenizer, odd = load_tokenizer(letters), OddTexts()
    for text in ("a", "ijklmnopqrstuvw", "z"):
        odd.add(tokenizer, "p.jsonl:7", tokenizer.encode(text), text, of_messages=True)
    (line,) = odd.warnings("data.prompts", 1200)
    expected = f"data.prompts: 2 of 1,200 {WARNING}; the first is p.jsonl:7: 'i', 'j', "
    assert line.startswith(expected) and line.endswith(", 'r' and 5 more")


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "second"}\n')
    write_parquet(tmp_path / "a.parquet", {"prompt": ["first"]})
    (tmp_path / "README.md").write_text("no rows")
    prompts = load_prompts(tmp_path, FieldMap(answer=None))
    assert [prompt.text for prompt in prompts] == ["first", "second"]
    assert [prompt.row_id for prompt in prompts] == ["a.parquet:1", "b.jsonl:1"]
