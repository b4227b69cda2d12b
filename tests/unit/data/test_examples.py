"""Examples for fine-tuning: the learned tokens, compared with transformers and computed by hand."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

from gspo_megatron.config import load_config
from gspo_megatron.config.stages import FineTuningConfig, FineTuningDataSection
from gspo_megatron.data.chat import CHATML, encode_conversation
from gspo_megatron.data.examples import Counts, load_supervised
from gspo_megatron.data.inputs import read_fine_tuning
from gspo_megatron.data.prompts import Found, encode_prompts, load_prompts
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.errors import ConfigError
from gspo_megatron.types import Prompt
from tests.unit.data.corpora import (
    SYLLABLES,
    both,
    make_tokenizer,
    refusal,
    write_parquet,
    write_rows,
)

UNMARKED = re.sub(r"\{%-(end)?generation-%\}|\{%- (end)?generation -%\}", "", CHATML)
assert "generation -%" not in UNMARKED


@pytest.fixture(scope="module", params=["char", "bpe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / request.param, request.param)


def with_template(folder: Path, tmp_path: Path, template: str) -> Path:
    """A copy of a tokenizer folder with another chat template."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text(template)
    return copy


def conversation(source: random.Random) -> list[dict[str, str]]:
    turns = []
    if source.random() < 0.5:
        turns.append(("system", 5))
    for _ in range(source.randint(1, 4)):
        turns += [("user", 30), ("assistant", 30)]
    if source.random() < 0.3:
        turns.append(("user", 3))
    pieces = [*SYLLABLES, " ", "\n", "<sep>", "🙂", "||"]
    return [
        {"role": role, "content": "".join(source.choices(pieces, k=source.randint(1, longest)))}
        for role, longest in turns
    ]


def separable(source: random.Random) -> list[dict[str, str]]:
    """A conversation in which no message begins with a line break. A line break at the start of a
    message would form one token with the line break before it."""
    return [{**m, "content": m["content"].lstrip("\n") or "ka"} for m in conversation(source)]


def exchange(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def form(max_tokens: int, **keys: object) -> FineTuningDataSection:
    return FineTuningDataSection(tokenizer="t", max_tokens=max_tokens, **keys)


CHAT = form(100, messages_field="messages")


def test_marked_turns_are_those_of_transformers(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    source = random.Random(1)
    for _ in range(60):
        messages = conversation(source)
        expected = theirs.apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True
        )
        for tokenizer in both(folder):
            ids, mask = encode_conversation(messages, tokenizer)
            assert ids.tolist() == expected["input_ids"]
            assert mask.tolist() == [bool(flag) for flag in expected["assistant_masks"]]
            assert (ids.dtype, mask.dtype) == (np.int32, bool)


def test_learned_text_is_what_the_assistant_says(folder: Path) -> None:
    source = random.Random(2)
    for _ in range(30):
        messages = separable(source)
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        for tokenizer in both(folder):
            ids, mask = encode_conversation(messages, tokenizer)
            assert (ids[mask] == tokenizer.eos_id).sum() == len(said)
            assert tokenizer.decode(ids[mask].tolist()) == "".join(said)
            # A response begins at the same token as in a rollout: right after the rendered history.
            starts = np.flatnonzero(mask & ~np.roll(mask, 1))
            where = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
            for start, number in zip(starts, where, strict=True):
                text = tokenizer.render(messages[:number], open_answer=True).text
                assert tokenizer.encode_rendered(text).ids == ids[:start].tolist()


def test_prefixes_find_the_same_tokens_as_marks(folder: Path, tmp_path: Path) -> None:
    unmarked = with_template(folder, tmp_path, UNMARKED)
    source = random.Random(3)
    for _ in range(30):
        messages = separable(source)
        for marked, plain in zip(both(folder), both(unmarked), strict=True):
            assert plain.render(messages).answers is None
            for one, other in zip(
                encode_conversation(messages, marked), encode_conversation(messages, plain)
            ):
                assert np.array_equal(one, other)


def test_a_template_that_changes_earlier_messages_is_refused(folder: Path, tmp_path: Path) -> None:
    # Like some published templates, this template drops the thoughts of earlier turns.
    changing = UNMARKED.replace(
        "message['content'] ~", "(message['content'] if loop.last else '…') ~"
    )
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": exchange("ka", "lo")}])
    for tokenizer in both(with_template(folder, tmp_path, changing)):
        (message,) = refusal(load_supervised, path, tokenizer, CHAT)
        assert message.startswith(f"{path}:1: message 2: cannot tell where the answer begins or ")
        assert "writes earlier messages differently" in message
        assert "{% generation %}" in message


def test_a_boundary_inside_a_token_is_refused(tmp_path: Path) -> None:
    # Only spaces separate the turns, and the first word of a response forms a token with its space.
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% endfor %}"
    )
    folder = make_tokenizer(tmp_path / "bpe", "bpe")
    for tokenizer in both(with_template(folder, tmp_path, template)):
        assert tokenizer.encode(" lo") != [*tokenizer.encode(" "), *tokenizer.encode("lo")]
        (line,) = refusal(encode_conversation, exchange("ka ", "lo"), tokenizer)
        assert "joins text from before and after that place" in line


@pytest.mark.parametrize(
    ("template", "section", "expected"),
    [
        (UNMARKED.replace("eos_token", "'.'"), CHAT, "{}:1: the chat template ends no answer with"),
        (
            CHATML.replace("<|im_start|>", "<|turn|>"),
            CHAT,
            "{tokenizer}: its chat template writes <|turn|>, which",
        ),
        (
            CHATML + "\n\n{% endif %}",
            form(100, chat_template=True),
            "{tokenizer}: its chat template is not valid Jinja: line 3: ",
        ),
    ],
)
def test_an_unusable_template_is_refused_once(
    folder: Path, tmp_path: Path, template: str, section: FineTuningDataSection, expected: str
) -> None:
    row = {"prompt": "ka", "answer": "lo", "messages": exchange("a", "b")}
    path = write_rows(tmp_path / "rows.jsonl", [row])
    for tokenizer in both(with_template(folder, tmp_path, template)):
        (line,) = refusal(load_supervised, path, tokenizer, section)
        assert line.startswith(expected.format(path, tokenizer=tokenizer.name))


@pytest.mark.parametrize("template", [CHATML, UNMARKED], ids=["marks", "prefixes"])
def test_an_answer_may_end_with_any_token_that_ends_a_response(
    folder: Path, tmp_path: Path, template: str
) -> None:
    """The end of a turn is often another token than the tokenizer's end of sequence."""
    copy = with_template(folder, tmp_path, template.replace("eos_token", "'<|doc|>'"))
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": exchange("ka", "lo")}])
    (line,) = refusal(load_supervised, path, load_tokenizer(copy), CHAT)
    assert line.startswith(f"{path}:1: the chat template ends no answer with")
    end = load_tokenizer(copy).symbol_id("<|doc|>")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    for tokenizer in both(copy):
        example = load_supervised(path, tokenizer, CHAT)[0]
        learned = example.token_ids[example.loss_mask].tolist()
        assert learned == [*tokenizer.encode("lo"), end]


def test_prompts_and_answers_by_hand(folder: Path, tmp_path: Path) -> None:
    rows = [{"q": "kalo?", "a": " mi"}, {"q": "ung", "a": ""}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for tokenizer in both(folder):
        data = load_supervised(path, tokenizer, form(50, prompt_field="q", answer_field="a"))
        assert len(data) == 2
        for number, row in enumerate(rows):
            question, answer = tokenizer.encode(row["q"]), tokenizer.encode(row["a"])
            ids, example = [*question, *answer, tokenizer.eos_id], data[number]
            assert example.token_ids.tolist() == ids and data.lengths[number] == len(ids)
            assert example.loss_mask.tolist() == [n >= len(question) for n in range(len(ids))]
            assert example.source == f"{path}:{number + 1}"
        # with a chat template, question and answer become two messages
        section = form(50, prompt_field="q", answer_field="a", chat_template=True)
        example = load_supervised(path, tokenizer, section)[0]
        ids, mask = encode_conversation(exchange("kalo?", " mi"), tokenizer)
        assert np.array_equal(example.token_ids, ids) and np.array_equal(example.loss_mask, mask)


def test_a_prompt_may_be_messages_before_the_answer(folder: Path, tmp_path: Path) -> None:
    question = [{"role": "system", "content": "ka"}, {"role": "user", "content": "lo"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": question, "answer": "mi"}])
    tokenizer = load_tokenizer(folder)
    example = load_supervised(path, tokenizer, form(50))[0]
    ids, mask = encode_conversation([*question, {"role": "assistant", "content": "mi"}], tokenizer)
    assert np.array_equal(example.token_ids, ids) and np.array_equal(example.loss_mask, mask)
    write_rows(path, [{"prompt": question, "answer": 5}])
    wrong = "field 'answer' is a number; a string is wanted"
    assert refusal(load_supervised, path, tokenizer, form(50)) == [f"{path}:1: {wrong}"]


def test_template_options_reach_the_examples(folder: Path, tmp_path: Path) -> None:
    template = CHATML.replace("'assistant' -%}", "'assistant' -%}{{- 'mi' if brief else '' -}}")
    copy = with_template(folder, tmp_path, template)
    rows = [{"messages": exchange("ka", "lo"), "prompt": "ka", "answer": "lo"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "config.yaml").write_text("{}")
    words = [f"data.tokenizer={copy}", f"data.examples={path}", "data.messages_field=messages"]
    lengths = []
    for more in ([], ["data.chat_template_options={brief: true}"]):
        config = load_config(tmp_path / "config.yaml", words + more, FineTuningConfig)
        lengths += read_fine_tuning(config).train.lengths.tolist()
    assert lengths[0] < lengths[1]
    words = [*words[:2], "data.chat_template_options={brief: true}"]
    config = load_config(tmp_path / "config.yaml", words, FineTuningConfig)
    with pytest.raises(ConfigError, match="data.chat_template_options: nothing reads it: "):
        read_fine_tuning(config)


def test_too_long_examples(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    rows = [
        {"prompt": "ka", "answer": "lo"},
        {"prompt": "ka", "answer": "lo" * 40},
        {"prompt": "ka" * 40, "answer": "lo"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    lengths = load_supervised(path, tokenizer, form(1000)).lengths
    assert lengths[0] < 12 < min(lengths[1:])

    assert refusal(load_supervised, path, tokenizer, form(12)) == [
        f"{path}:{n}: the example has {lengths[n - 1]} tokens; at most 12 are allowed"
        for n in (2, 3)
    ]

    dropped = load_supervised(path, tokenizer, form(12, too_long="drop"))
    assert [dropped[n].source for n in range(len(dropped))] == [f"{path}:1"]
    assert dropped.counts == Counts(dropped=2)

    # The limit would leave only the question of the third example, from which nothing is learned.
    cut = load_supervised(path, tokenizer, form(12, too_long="truncate"))
    assert cut.lengths.tolist() == [lengths[0], 12]
    whole = load_supervised(path, tokenizer, form(1000))
    assert np.array_equal(cut[1].token_ids, whole[1].token_ids[:12])
    assert cut[1].loss_mask[-1] and tokenizer.eos_id not in cut[1].token_ids
    assert cut.counts == Counts(dropped=1, truncated=1)

    message = f"{path}: holds no examples that fit 1 tokens"
    assert refusal(load_supervised, path, tokenizer, form(1, too_long="truncate")) == [message]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, "no field 'messages'; the fields are: 'text' (data.messages_field chooses"),
        ({"messages": "hi"}, "field 'messages': a string; an array of messages is wanted"),
        ({"messages": [{"role": 1, "content": ""}]}, "'role' of message 1 is a number; a string"),
        ({"messages": [{"from": "human", "value": "ka"}]}, "message 1 has ShareGPT's keys; rename"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "'content' of message 1 is neither a string nor an array of texts",
        ),
        (
            {"messages": [{"role": "user", "content": "ka"}]},
            "no message has the role 'assistant', so there is nothing to learn",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a\ud800"}]},
            "'content' of message 1 holds half a surrogate pair at character 2",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "calls": [{"x": ["\ud800"]}]}]},
            "'calls' of message 1 holds half a surrogate pair at character 1",
        ),
    ],
)
def test_bad_rows_are_named(folder: Path, tmp_path: Path, row: object, expected: str) -> None:
    good = {"messages": [{"role": "assistant", "content": "ka"}]}
    path = write_rows(tmp_path / "rows.jsonl", [good, row, good, row])
    lines = refusal(load_supervised, path, load_tokenizer(folder), CHAT)
    assert [line.startswith(f"{path}:{n}: ") for n, line in zip((2, 4), lines)] == [True, True]
    assert len(lines) == 2 and expected in lines[0]
    assert refusal(load_supervised, write_rows(path, []), load_tokenizer(folder), CHAT) == [
        f"{path}: holds no examples"
    ]


ADD = {"type": "function", "function": {"name": "add", "description": "kalo"}}
TOOLS = "{%- if tools -%}{{- '<|im_start|>tools\\n' ~ (tools | tojson) ~ eos_token -}}{%- endif -%}"


@pytest.mark.parametrize("with_messages", [True, False])
@pytest.mark.parametrize("template", [TOOLS + CHATML, TOOLS + UNMARKED], ids=["marks", "prefixes"])
def test_the_tools_of_a_row_are_described_and_not_learned(
    folder: Path, tmp_path: Path, template: str, with_messages: bool
) -> None:
    messages = exchange("ka", "lo")
    row, section = {"messages": messages}, form(1000, messages_field="messages")
    if not with_messages:
        row, section = {"prompt": messages[:1], "answer": "lo"}, form(1000)
    given = [[ADD], json.dumps([ADD]), None, [], "[]", "null"]
    rows = [row | {"tools": tools} for tools in given]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, row])
    copy = with_template(folder, tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(copy, local_files_only=True)
    expected = theirs.apply_chat_template(messages, tools=[ADD], return_dict=True)["input_ids"]
    for tokenizer in both(copy):
        data = load_supervised(path, tokenizer, section)
        for number in (0, 1):
            ids, mask = data[number].token_ids, data[number].loss_mask
            assert ids.tolist() == expected
            assert '"description": "kalo"' in tokenizer.decode(ids.tolist())
            assert tokenizer.decode(ids[mask].tolist()) == "lo"
        for number in range(2, len(data)):
            assert np.array_equal(data[number].token_ids, data[2].token_ids)
            assert "kalo" not in tokenizer.decode(data[number].token_ids.tolist())


def test_the_tools_of_a_prompt_are_described_unless_an_environment_has_tools(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(with_template(folder, tmp_path, TOOLS + CHATML))
    asked, other = ({"role": "user", "content": "ka"},), [{"name": "mi"}]
    row = Prompt("ka", "lo", "p.jsonl:1", {"tools": [ADD]}, messages=asked)
    for options, described, tools in (({}, [ADD], (ADD,)), ({"tools": other}, other, ())):
        tokenizer.template_options = options
        (prompt,) = encode_prompts([row], tokenizer, 999)
        wanted = tokenizer.render(asked, open_answer=True, tools=described)
        assert list(prompt.token_ids) == tokenizer.encode_rendered(wanted.text, wanted.quoted).ids
        assert prompt.tools == tools
    tokenizer.template_options = {}
    row = replace(row, fields={"tools": [{"name": "\ud800"}]})
    (line,) = refusal(encode_prompts, [row], tokenizer, 999)
    assert line.startswith("p.jsonl:1: field 'tools' holds half a surrogate pair")


def test_parquet_adds_no_keys_to_tools_and_calls(folder: Path, tmp_path: Path) -> None:
    """Parquet gives all rows the keys of any row, with nulls."""

    def row(name: str) -> dict[str, object]:
        call = {"function": {"name": name, "arguments": {name: 1}}}
        answer = {"role": "assistant", "content": "lo", "tool_calls": [call]}
        tool = {"function": {"name": name, "parameters": {name: "number"}}}
        return {"messages": [{"role": "user", "content": "ka"}, answer], "tools": [tool]}

    rows = [row("ka"), row("mi")]
    calls = "{% for m in messages if m.tool_calls %}{{ m.tool_calls | tojson }}{% endfor %}"
    tokenizer = load_tokenizer(with_template(folder, tmp_path, TOOLS + calls + CHATML))
    plain = write_rows(tmp_path / "rows.jsonl", rows)
    columns = {key: [each[key] for each in rows] for key in rows[0]}
    parquet = write_parquet(tmp_path / "rows.parquet", columns)
    section = form(1000, messages_field="messages")
    wanted, found = (load_supervised(path, tokenizer, section) for path in (plain, parquet))
    for number in range(2):
        text = tokenizer.decode(found[number].token_ids.tolist())
        assert ("null" not in text and '"ka": 1' in text) or '"mi": 1' in text
        assert np.array_equal(found[number].token_ids, wanted[number].token_ids)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("m.tool_calls[0].function.arguments | tojson", {"ka": [1, "é"]}),
        ("'' + m.tool_calls[0].function.arguments", '{"ka": [1, "é"]}'),  # needs a text
    ],
)
def test_messages_may_have_openais_form(
    folder: Path, tmp_path: Path, written: str, arguments: object
) -> None:
    """Contents are null or arrays of parts there, and the arguments of calls are JSON text."""

    def row(question: object, content: object, arguments: object) -> dict[str, object]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        called = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c", "content": "mi"}
        asked = {"role": "user", "content": question}
        return {"messages": [asked, called, result, {"role": "assistant", "content": "lo"}]}

    calls = f"{{% for m in messages if m.tool_calls %}}{{{{ {written} }}}}{{% endfor %}}"
    copy = with_template(folder, tmp_path, calls + CHATML)
    theirs = transformers.AutoTokenizer.from_pretrained(copy, local_files_only=True)
    wanted = theirs.apply_chat_template(
        row("kalo", "", arguments)["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    parts = [{"type": "text", "text": text} for text in ("ka", "lo")]
    rows = [row(parts, content, '{"ka": [1, "é"]}') for content in (None, [], "")]
    del rows[0]["messages"][1]["content"]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for tokenizer in both(copy):
        data = load_supervised(path, tokenizer, CHAT)
        for number in range(len(rows)):
            assert data[number].token_ids.tolist() == wanted["input_ids"]
            assert data[number].loss_mask.tolist() == [*map(bool, wanted["assistant_masks"])]


@pytest.mark.parametrize("tools", ["[{", '"add"', {}, ["add"], [ADD]])
def test_a_field_of_another_meaning_and_tools_that_nobody_reads_are_left_alone(
    folder: Path, tmp_path: Path, tools: object
) -> None:
    plain = {"messages": exchange("ka", "lo")}
    path = write_rows(tmp_path / "rows.jsonl", [plain, plain | {"tools": tools}])
    template = CHATML if tools == [ADD] else TOOLS + CHATML
    tokenizer = load_tokenizer(with_template(folder, tmp_path, template))
    data = load_supervised(path, tokenizer, form(1000, messages_field="messages"))
    assert np.array_equal(data[0].token_ids, data[1].token_ids)


def test_tools_with_an_odd_text_are_named(folder: Path, tmp_path: Path) -> None:
    row = {"messages": exchange("ka", "lo"), "tools": [{"name": ["\ud800"]}]}
    path = write_rows(tmp_path / "rows.jsonl", [row])
    (line,) = refusal(load_supervised, path, load_tokenizer(folder), CHAT)
    assert line == f"{path}:1: field 'tools' holds half a surrogate pair at character 1"


def test_a_byte_order_mark_is_no_part_of_a_template(folder: Path, tmp_path: Path) -> None:
    copy = with_template(folder, tmp_path, "\ufeff" + CHATML)
    assert load_tokenizer(copy / "tokenizer.model").chat_template == CHATML


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_unknown_characters_are_counted(tmp_path: Path, byte_fallback: bool) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": exchange("ka🙂", "lo")}])
    expected = Found() if byte_fallback else Found(1, f"{path}:1", ("🙂",))
    for tokenizer in both(make_tokenizer(tmp_path / "t", byte_fallback=byte_fallback)):
        assert load_supervised(path, tokenizer, CHAT).counts.odd.unknown == expected


def test_the_examples_of_the_manual_can_be_read(folder: Path, tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    prompts, chats = re.findall(r"```json.*?\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "rows.jsonl"
    path.write_text(prompts)
    assert [prompt.answer for prompt in load_prompts(path)] == ["82", "dbac"]
    path.write_text(chats)
    tokenizer = load_tokenizer(folder)
    data = load_supervised(path, tokenizer, form(10**6, messages_field="messages"))
    learned = [data[n].token_ids[data[n].loss_mask].tolist() for n in (0, 1)]
    assert [tokenizer.decode(ids) for ids in learned] == ["Paris", "Hello! How can I help?82"]
