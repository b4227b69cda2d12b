from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest

from gspo_megatron.data import toy
from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.data.toy import (
    SUPERVISED_ADDITION_SHARE,
    TASKS,
    corpus,
    generate,
    main,
    supervised_rows,
    write_toy_dataset,
)
from gspo_megatron.errors import DataError

ENDINGS = {"reversal": ">", "copy": "=", "sort": "<"}


def solve(prompt: str) -> str:
    """The right answer, computed from the prompt alone, by other code than that of the
    generator."""
    if match := re.fullmatch(r"(\d\d)\+(\d\d)=", prompt):
        assert min(map(int, match.groups())) >= 10
        return str(int(match[1]) + int(match[2]))
    match = re.fullmatch(r"([a-h]{3,4})([>=<])", prompt)
    assert match, prompt
    letters = list(match[1])
    if match[2] == ">":
        letters.reverse()
    elif match[2] == "<":
        letters.sort()
    return "".join(letters)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_and_prompts_distinct(task: str) -> None:
    train, test = generate(task, 301, 51, seed=2)
    assert (len(train), len(test)) == (301, 51)
    rows = train + test
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert all(row["answer"] == solve(row["prompt"]) for row in rows)
    assert all(set(row) == {"prompt", "answer", "task"} for row in rows)
    if task in ENDINGS:
        assert {(row["prompt"][-1], row["task"]) for row in rows} == {(ENDINGS[task], task)}


def test_mixed_is_reversal_and_addition_3_to_1_in_both_files() -> None:
    train, test = generate("mixed", 101, 40, seed=5)
    assert Counter(row["task"] for row in train) == {"reversal": 75, "addition": 26}
    assert Counter(row["task"] for row in test) == {"reversal": 30, "addition": 10}
    # The kinds are shuffled, not one after the other.
    assert len({row["task"] for row in train[:20]}) == 2
    assert generate("mixed", 101, 40, seed=5) == (train, test) != generate("mixed", 101, 40, seed=1)


def test_supervised_rows_are_mostly_additions_of_the_training_file() -> None:
    train, _ = generate("mixed", 800, 1, seed=4)
    rows = supervised_rows(train)
    counts = Counter(row["task"] for row in rows)
    assert counts["addition"] == 200
    assert counts["addition"] / len(rows) == pytest.approx(SUPERVISED_ADDITION_SHARE, abs=0.005)
    order = [train.index(row) for row in rows]
    assert order == sorted(order)
    copies, _ = generate("copy", 30, 1, seed=4)
    assert supervised_rows(copies) == copies


def test_lengths_are_even_as_long_as_strings_last() -> None:
    train, test = generate("copy", 100, 100, seed=3)
    assert Counter(len(row["answer"]) for row in train + test) == dict.fromkeys((3, 4), 100)
    train, test = generate("copy", 3900, 100, seed=3)
    # There are only 8^3 = 512 strings of three letters. All other rows have longer strings.
    counts = Counter(len(row["answer"]) for row in train + test)
    assert counts == {3: 512, 4: 3488}
    train, test = generate("addition", 1500, 100, seed=1)  # all possible problems
    assert len({row["prompt"] for row in train + test}) == 40 * 40


@pytest.mark.parametrize(
    ("task", "train", "test", "named"),
    [
        ("rot13", 1, 1, "allowed: reversal, copy"),
        ("sort", 0, 1, "train = 0"),
        ("sort", 1, -1, "-1"),
        ("addition", 1500, 101, "'addition' has 1600 different prompts; .* ask for 1601"),
        ("sort", 5_000, 1, "'sort' has 4608 different prompts; .* 5001"),
    ],
)
def test_bad_arguments_are_refused(task: str, train: int, test: int, named: str) -> None:
    with pytest.raises(DataError, match=named):
        generate(task, train, test, seed=1)


def test_data_set_is_readable_by_the_package_and_short_in_tokens(tmp_path: Path) -> None:
    paths = write_toy_dataset(tmp_path / "toy", "mixed", 64, 16, seed=1)
    names = [path.name for path in paths]
    assert names == ["train.jsonl", "supervised.jsonl", "test.jsonl", "tokenizer.model"]
    assert sorted(files_in(tmp_path / "toy")) == sorted(names)
    tokenizer = load_tokenizer(paths[3])
    prompts = load_prompts(paths[0]) + load_prompts(paths[2])
    assert len(prompts) == 80
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text + prompt.answer)
        assert tokenizer.decode(ids) == prompt.text + prompt.answer
        assert 0 not in ids
        assert len(tokenizer.encode(prompt.text)) <= 8
        assert prompt.answer == solve(prompt.text)
        assert prompt.fields["task"] in ("reversal", "addition")


def test_command_line_writes_the_same_files_again(tmp_path: Path) -> None:
    arguments = ["--task", "sort", "--train", "20", "--test", "5", "--seed", "3", "-o"]
    command = [sys.executable, "-m", "gspo_megatron.data.toy", *arguments, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    names = ("train.jsonl", "supervised.jsonl", "test.jsonl", "tokenizer.model")
    assert done.stdout.splitlines() == [str(tmp_path / "a" / name) for name in names]
    first = files_in(tmp_path / "a")
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert main([*arguments, str(folder)]) == 0
        assert files_in(folder) == first


WORDS = {"again": "=", "in order": "<", "backwards": ">"}


def as_prompt(sentence: str) -> tuple[str, str]:
    """The prompt and the answer in a sentence of the corpus."""
    if match := re.fullmatch(r"(\d+) plus (\d+) is (\d+)\.", sentence):
        return f"{match[1]}+{match[2]}=", match[3]
    if match := re.fullmatch(rf"([a-h]+) ({'|'.join(WORDS)}) is ([a-h]+)\.", sentence):
        return match[1] + WORDS[match[2]], match[3]
    match = re.fullmatch(r"(.+[>=<])(\w+)\.", sentence)
    assert match, sentence
    return match[1], match[2]


@pytest.mark.parametrize("task", TASKS)
def test_text_is_true_and_of_the_rows_alone(task: str) -> None:
    train, _ = generate(task, 100, 50, seed=6)
    documents = corpus(train, 120, seed=6)
    sentences = [re.findall(r"[^.]+\.", row["text"]) for row in documents]
    assert min(map(len, sentences)) >= 4 and max(map(len, sentences)) <= 16
    said = [as_prompt(sentence.strip()) for document in sentences for sentence in document]
    assert all(answer == solve(prompt) for prompt, answer in said)
    assert {prompt for prompt, _ in said} == {row["prompt"] for row in train}
    in_words = sum(" is " in sentence for document in sentences for sentence in document)
    assert 0.25 < in_words / len(said) < 0.42  # a third of about 1,200


def test_with_documents_text_takes_the_place_of_the_tokenizer(tmp_path: Path) -> None:
    words = ["--train", "64", "--test", "16", "--documents", "40", "-o"]
    assert main([*words, str(tmp_path / "a")]) == main([*words, str(tmp_path / "b")]) == 0
    one = files_in(tmp_path / "a")
    assert one == files_in(tmp_path / "b")
    assert set(one) == {"train.jsonl", "supervised.jsonl", "test.jsonl", "corpus.jsonl"}
    assert one["corpus.jsonl"].count(b"\n") == 40
    known = {prompt.text for prompt in load_prompts(tmp_path / "a" / "supervised.jsonl")}
    tested = {prompt.text for prompt in load_prompts(tmp_path / "a" / "test.jsonl")}
    assert known and tested and not known & tested


@pytest.mark.parametrize(
    ("words", "folder", "fault"),
    [
        (["--task", "addition", "--train", "9000"], "a", "has 1600 different prompts"),
        (["--documents", "-1"], "a", "documents = -1: allowed: 0 or more"),
        (["--train", "5", "--test", "5"], "file", "cannot be written"),
    ],
)
def test_command_line_ends_with_two_and_one_line_on_a_users_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], folder: str, fault: str
) -> None:
    (tmp_path / "file").touch()
    assert main([*words, "-o", str(tmp_path / folder)]) == 2
    error = capsys.readouterr().err
    assert fault in error and error.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_a_key_or_a_reader_that_left_ends_the_command_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--train", "5", "--test", "5", "-o", str(tmp_path / "a")]
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as unread:
        patch.setattr(sys, "stdout", unread)
        assert main(words) == 0
        unread.flush()  # the interpreter does this when it ends
    assert (tmp_path / "a" / "tokenizer.model").is_file()

    monkeypatch.setattr(toy, "write_toy_dataset", Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 130
    assert capsys.readouterr() == ("", "")
