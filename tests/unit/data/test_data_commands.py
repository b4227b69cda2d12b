"""The command lines of tools/prepare_data.py and tools/train_tokenizer.py, without their work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tools import prepare_data, train_tokenizer

INPUT = ("in.jsonl", "--tokenizer", "t.model")


def refused(
    capsys: pytest.CaptureFixture[str], *words: str, parse: Callable = prepare_data.parse
) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("given", ["a/c", "a/c.bin", "a/c.idx", "a/c.json"])
def test_a_file_of_a_dataset_names_its_prefix(given: str) -> None:
    assert prepare_data.parse([*INPUT, "-o", given]).output == "a/c"
    assert prepare_data.parse(["--check", given, "--vocab-size", "9"]).check == "a/c"
    assert prepare_data.parse([*INPUT, "-o", "a.bin/c.v1"]).output == "a.bin/c.v1"


@pytest.mark.parametrize(
    ("given", "instead"),
    [("a/", "a/corpus"), ("a/.bin", "a/corpus"), (".", "./corpus"), ("..", "../corpus")],
)
def test_a_folder_is_no_prefix(
    given: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"{given}: names a folder and no file in it; write for example {instead}"
    assert refused(capsys, *INPUT, "-o", given).endswith(f"--output {message}")
    assert refused(capsys, "--check", given).endswith(f"--check {message}")


def test_options_that_nothing_would_read_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, *INPUT, "-o", "c", "--vocab-size", "9")
    assert "--vocab-size needs --check" in message
    for words in (["--deduplicate"], ["--text-field", "body"], ["--chunk-bytes", "9"], ["in.txt"]):
        assert "--check takes only --vocab-size" in refused(capsys, "--check", "c", *words)
    assert prepare_data.parse(["--check", "c"]).vocab_size is None


def test_all_missing_options_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (INPUT, (*INPUT[:1], "-o", "c"), (*INPUT[1:], "-o", "c"), ()):
        message = refused(capsys, *words)
        assert message.endswith("error: give INPUT, --tokenizer and --output, or --check")
    message = refused(capsys, "in.txt", parse=train_tokenizer.parse)
    assert message.endswith("the following arguments are required: -o/--output, --vocab-size")


def test_interrupts_and_errors_end_a_tool_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = [str(tmp_path / "in.txt"), "-o", str(tmp_path / "t"), "--vocab-size", "99"]
    tools = (
        (train_tokenizer, "train_tokenizer", train, ""),
        (prepare_data, "prepare", [*INPUT, "-o", "c"], "interrupted; the same command continues\n"),
        (prepare_data, "check_dataset", ["--check", "c"], ""),
    )
    forbidden = PermissionError(13, "Permission denied", "c.bin")
    for tool, work, words, interrupted in tools:
        monkeypatch.setattr(tool, work, Mock(side_effect=KeyboardInterrupt))
        assert tool.main(words) == 130
        assert capsys.readouterr() == ("", interrupted)
        monkeypatch.setattr(tool, work, Mock(side_effect=forbidden))
        assert tool.main(words) == 2
        assert capsys.readouterr() == ("", "c.bin: Permission denied\n")
