"""Preferences in published formats and in plain fields: their tokens, the rows that are left out,
and bad rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_megatron.config.stages import PreferenceDataSection
from gspo_megatron.data.chat import CHATML
from gspo_megatron.data.preferences import PreferenceData, load_preferences
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from tests.unit.data.corpora import make_tokenizer, refusal, write_parquet, write_rows

Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "char", "char"))


def form(max_tokens: int = 200, **keys: Any) -> PreferenceDataSection:
    return PreferenceDataSection(tokenizer="t", max_tokens=max_tokens, **keys)


def load(
    tmp_path: Path, tokenizer: Tokenizer, rows: list[Any], *, ratings: bool = False, **keys: Any
) -> PreferenceData:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return load_preferences(path, tokenizer, form(**keys), regression=ratings)


def faults(
    tmp_path: Path, tokenizer: Tokenizer, rows: list[Any], *, ratings: bool = False, **keys: Any
) -> list[str]:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    lines = refusal(load_preferences, path, tokenizer, form(**keys), regression=ratings)
    return [line.replace(str(tmp_path), "") for line in lines]


def sequences(data: PreferenceData, number: int = 0) -> list[list[int]]:
    found = data[number]
    parts = np.split(found.token_ids, np.cumsum(found.lengths)[:-1])
    return [part.tolist() for part in parts]


def text(tokenizer: Tokenizer, *parts: str) -> list[int]:
    return [*(token for part in parts for token in tokenizer.encode(part)), tokenizer.eos_id]


def chat(tokenizer: Tokenizer, *contents: str, system: str = "") -> list[int]:
    """The token ids of a conversation in which user and assistant speak alternately."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": ("user", "assistant")[n % 2], "content": content}
        for n, content in enumerate(contents)
    ]
    rendered = tokenizer.render(messages)
    return tokenizer.encode_rendered(rendered.text, rendered.quoted).ids


def turns(*contents: str) -> Messages:
    return [
        {"role": ("user", "assistant")[n % 2], "content": content}
        for n, content in enumerate(contents)
    ]


TRANSCRIPT = "\n\nHuman: ka\n\nAssistant: lo\n\nHuman: mi\n\nAssistant: "
ROWS: dict[str, dict[str, Any]] = {
    "hh_rlhf": {"chosen": TRANSCRIPT + "ster", "rejected": TRANSCRIPT + "ung"},
    "ultrafeedback": {
        "prompt": "ka",
        "prompt_id": "1",
        "chosen": turns("ka", "ster"),
        "rejected": turns("ka", "ung"),
        "messages": turns("ka", "ster"),
        "score_chosen": 8.0,
        "score_rejected": 7.5,
    },
    "helpsteer2": {
        "prompt": "ka",
        "response_1": "ung",
        "response_2": "ster",
        "preference_strength": 2,
    },
    "helpsteer3": {
        "domain": "code",
        "context": turns("ka", "lo", "mi"),
        "response1": "ster",
        "response2": "ung",
        "overall_preference": -1,
        "individual_preference": [{"score": -1, "reasoning": "x"}],
    },
    "skywork": {"chosen": turns("ka", "ster"), "rejected": turns("ka", "ung"), "source": "a b"},
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_published_datasets(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    before = ("ka", "lo", "mi") if name in ("hh_rlhf", "helpsteer3") else ("ka",)
    data = load(tmp_path, tokenizer, [ROWS[name]], format=name, chat_template=True)
    expected = [chat(tokenizer, *before, "ster"), chat(tokenizer, *before, "ung")]
    assert sequences(data) == expected
    assert data[0].values.tolist() == [0.0] and data.left_out() == []
    assert data.sources == (["a_b"] if name == "skywork" else [""])


def test_texts_without_a_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = ROWS["hh_rlhf"]
    data = load(tmp_path, tokenizer, [row], format="hh_rlhf")
    assert sequences(data) == [text(tokenizer, row["chosen"]), text(tokenizer, row["rejected"])]
    data = load(tmp_path, tokenizer, [{"q": "ka", "a": "lo", "b": "mi"}], prompt_field="q",
                chosen_field="a", rejected_field="b")  # fmt: skip
    assert sequences(data) == [text(tokenizer, "ka", "lo"), text(tokenizer, "ka", "mi")]


def test_prompt_and_messages_are_one_conversation(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"prompt": turns("ka"), "chosen": "lo", "rejected": turns("", "mi")[1:]}
    data = load(tmp_path, tokenizer, [row], prompt_field="prompt", system_prompt="ster")
    assert sequences(data) == [
        chat(tokenizer, "ka", "lo", system="ster"),
        chat(tokenizer, "ka", "mi", system="ster"),
    ]


def test_a_system_message_needs_messages(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row, keys = {"prompt": "ka", "chosen": "lo", "rejected": "mi"}, {"prompt_field": "prompt"}
    assert faults(tmp_path, tokenizer, [row], system_prompt="ster", **keys) == [
        "/rows.jsonl:1: field 'chosen' is a string: data.system_prompt needs messages, or "
        "data.chat_template = true for strings"
    ]
    data = load(tmp_path, tokenizer, [row], system_prompt="ster", chat_template=True, **keys)
    assert sequences(data)[1] == chat(tokenizer, "ka", "mi", system="ster")


def test_several_rejected_responses_with_margins(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"prompt": "ka", "chosen": "lo", "rejected": ["mi", "ster", "lo"], "m": [1, 0.5, 2]}
    data = load(tmp_path, tokenizer, [row], prompt_field="prompt", margin_field="m")
    assert sequences(data) == [text(tokenizer, "ka", end) for end in ("lo", "mi", "ster")]
    assert data[0].values.tolist() == [1.0, 0.5]
    assert data.left_out() == ["1, a tie"] and data.pairs == 2


def test_margins_of_a_strength_have_no_sign(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [ROWS["helpsteer3"], ROWS["helpsteer3"] | {"overall_preference": 3}]
    key = {"format": "helpsteer3", "margin_field": "overall_preference", "chat_template": True}
    data = load(tmp_path, tokenizer, rows, source_field="domain", **key)
    assert [data[n].values.tolist() for n in range(2)] == [[1.0], [3.0]]
    assert sequences(data, 0) == sequences(data, 1)[::-1] and data.sources == ["code"]


def test_ties_and_long_pairs_are_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = "ka" * 20
    rows = [
        {"chosen": "ka", "rejected": "ka"},
        {"chosen": long, "rejected": ["lo", "mi"]},
        {"chosen": "lo", "rejected": [long, "mi"]},
    ]
    data = load(tmp_path, tokenizer, rows, max_tokens=20)
    assert sequences(data) == [text(tokenizer, "lo"), text(tokenizer, "mi")]
    assert data.left_out() == ["3, too long", "1, a tie"]
    ties = [ROWS["helpsteer2"] | {"preference_strength": 0}]
    assert faults(tmp_path, tokenizer, ties, format="helpsteer2") == [
        "/rows.jsonl: holds no preferences (1 left out: ties)"
    ]
    equal = [ROWS["ultrafeedback"] | {"score_chosen": 7.5}]
    assert "1 left out: ties" in faults(tmp_path, tokenizer, equal, format="ultrafeedback")[0]


def test_ratings(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "ka", "response": "lo", "helpfulness": 3, "verbosity": 1}]
    data = load(tmp_path, tokenizer, rows, ratings=True, format="helpsteer")
    assert sequences(data) == [text(tokenizer, "ka", "lo")] and data[0].values.tolist() == [3.0]


def test_a_parquet_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    columns = {name: [value] for name, value in ROWS["ultrafeedback"].items()}
    path = write_parquet(tmp_path / "rows.parquet", columns)
    data = load_preferences(path, tokenizer, form(format="ultrafeedback"), regression=False)
    assert sequences(data)[0] == chat(tokenizer, "ka", "ster")
    (line,) = refusal(load_preferences, path, tokenizer, form(rejected_field="x"), regression=False)
    assert line.startswith(f"{path}: no column 'x'; the columns are: 'prompt'")


def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    good = {"chosen": "ka", "rejected": "lo", "m": 1, "s": "x"}
    rows: list[Any] = [
        good | {"rejected": None},
        b"{",
        good | {"rejected": []},
        good | {"m": -1},
        good | {"s": 3},
    ]
    assert faults(tmp_path, tokenizer, rows, margin_field="m", source_field="s") == [
        "/rows.jsonl:1: field 'rejected' is null; a string is wanted, or an array of messages",
        "/rows.jsonl:2: not JSON: Expecting property name enclosed in double quotes at column 2",
        "/rows.jsonl:3: field 'rejected' holds no response",
        "/rows.jsonl:4: field 'm' is -1; a margin is a number from 0",
        "/rows.jsonl:5: field 's' is a number; a string is wanted",
    ]
    rows = [
        {"rejected": "lo"},
        {"chosen": turns("ka"), "rejected": turns("ka", "lo")},
        {"chosen": [{"role": "user"}], "rejected": "lo"},
        good | {"rejected": ["lo", "mi"], "m": [1]},
    ]
    assert faults(tmp_path, tokenizer, rows, margin_field="m") == [
        "/rows.jsonl:1: no field 'chosen'; the fields are: 'rejected' (data.chosen_field chooses "
        "one)",
        "/rows.jsonl:2: field 'chosen': the last message is not the assistant's",
        "/rows.jsonl:3: field 'chosen': 'content' of message 1 is missing; a string is wanted",
        "/rows.jsonl:4: field 'm' has 1 margins for 2 rejected responses",
    ]


@pytest.mark.parametrize(
    ("transcript", "fault"),
    [
        ("ka", r"does not begin with '\n\nHuman: '"),
        ("\n\nAssistant: ka", r"does not begin with '\n\nHuman: '"),
        ("\n\nHuman: ka", ": the last turn of the transcript is not the assistant's"),
    ],
)
def test_a_transcript_that_is_none(
    tmp_path: Path, tokenizer: Tokenizer, transcript: str, fault: str
) -> None:
    rows = [ROWS["hh_rlhf"] | {"rejected": transcript}]
    (line,) = faults(tmp_path, tokenizer, rows, format="hh_rlhf", chat_template=True)
    assert line.startswith("/rows.jsonl:1: field 'rejected'") and line.endswith(fault)


def test_a_number_that_is_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows: list[Any] = [
        b'{"prompt": "ka", "response": "lo", "rating": NaN}',
        {"prompt": "ka", "response": "lo", "rating": True},
        {"prompt": "", "response": "lo", "rating": 1},
        b'{"prompt": "ka", "response": "lo", "rating": 1%s}' % (b"0" * 400),
    ]
    assert faults(tmp_path, tokenizer, rows, ratings=True, prompt_field="prompt") == [
        "/rows.jsonl:1: field 'rating' is nan; a finite number is wanted",
        "/rows.jsonl:2: field 'rating' is a boolean; a finite number is wanted",
        "/rows.jsonl:3: field 'prompt' is empty",
        "/rows.jsonl:4: field 'rating' is a number; a finite number is wanted",
    ]


def test_too_many_sources(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"chosen": "ka", "rejected": "lo", "s": f"{n}"} for n in range(65)]
    data = load(tmp_path, tokenizer, [rows[5], rows[3], rows[5]], source_field="s")
    assert data.sources == ["5", "3"] and data.source_numbers.tolist() == [0, 1, 0]
    (line,) = faults(tmp_path, tokenizer, rows, source_field="s")
    assert line.endswith("field 's' has 65 values; allowed: at most 64 (data.source_field chooses "
                         "one)")  # fmt: skip


def test_sequences_that_end_in_padding_are_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"chosen": "ka", "rejected": "lo"}]
    assert load(tmp_path, tokenizer, rows).counts.ends_in_padding == 0
    tokenizer.pad_id, kept = tokenizer.eos_id, tokenizer.pad_id
    try:
        assert load(tmp_path, tokenizer, rows).counts.ends_in_padding == 2
    finally:
        tokenizer.pad_id = kept


def test_the_tools_of_a_row_are_described(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "char", "char"))
    head = "{%- if tools -%}{{- tools[0].name ~ eos_token -}}{%- endif -%}"
    tokenizer.chat_template = head + CHATML
    row = {"prompt": "ka", "chosen": "lo", "rejected": "mi"}
    rows: list[Any] = [row | {"tools": [{"name": "ster"}]}, row]
    keys: dict[str, Any] = {"prompt_field": "prompt", "chat_template": True}
    data = load(tmp_path, tokenizer, rows, **keys)
    begin = text(tokenizer, "ster")
    assert sequences(data, 0) == [begin + each for each in sequences(data, 1)]
    # texts without a template, in which nothing reads the tools
    data = load(tmp_path, tokenizer, rows, prompt_field="prompt")
    plain = [text(tokenizer, "ka", end) for end in ("lo", "mi")]
    assert sequences(data, 0) == sequences(data, 1) == plain
    odd = [row | {"tools": [{"name": "\ud800"}]}]
    assert faults(tmp_path, tokenizer, odd, **keys) == [
        "/rows.jsonl:1: field 'tools' holds half a surrogate pair at character 1"
    ]
