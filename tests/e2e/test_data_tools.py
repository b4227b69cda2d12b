"""tools/train_tokenizer.py and tools/prepare_data.py as a user calls them."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.programs import ROOT, command_environment, run_program, wait_until
from tests.unit.data.corpora import make_texts, write_jsonl


def command(tool: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]


def call(tool: str, *words: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return run_program(*command(tool, *words), expect=expect)


def figures(output: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in output.strip().splitlines()[-1].split())


def refused(tool: str, *arguments: object) -> str:
    return call(tool, *arguments, expect=2).stderr.strip()


def checksums(prefix: Path) -> list[str]:
    files = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx", ".json")]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with corpus.jsonl and a tokenizer that the tool trained."""
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "corpus.jsonl", make_texts(2000, seed=1, words=120))
    result = call(
        *("train_tokenizer", folder / "corpus.jsonl", "-o", folder / "tokenizer"),
        *("--vocab-size", 500, "--chat-template", "chatml", "--control-symbols", "<|doc|>"),
    )
    assert figures(result.stdout)["vocab_size"] == "500"
    return folder


def test_a_tokenizer_a_dataset_and_its_check(corpus: Path, tmp_path: Path) -> None:
    tokenizer = corpus / "tokenizer"
    prefix = tmp_path / "data"
    words = (corpus / "corpus.jsonl", "--tokenizer", tokenizer / "tokenizer.model", "-o", prefix)
    result = call("prepare_data", *words, "--workers", 2, "--chunk-bytes", 100_000, "--deduplicate")
    assert "tokenize" in result.stderr  # the progress
    summary = figures(result.stdout)
    manifest = json.loads(Path(f"{prefix}.json").read_text())
    assert {key: str(manifest[key]) for key in ("documents", "tokens", "dtype")} == {
        key: summary[key] for key in ("documents", "tokens", "dtype")
    }

    # The Hugging Face form of the tokenizer gives the same tokens.
    folder_prefix = tmp_path / "folder"
    words = (words[0], "--tokenizer", tokenizer, "-o", folder_prefix)
    call("prepare_data", *words, "--workers", 1, "--deduplicate")
    assert checksums(prefix)[:2] == checksums(folder_prefix)[:2]

    call("prepare_data", "--check", prefix, "--vocab-size", 512)
    told = refused("prepare_data", "--check", prefix, "--vocab-size", 499)
    assert "the model's vocabulary has 499" in told
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-2])
    assert "do not belong together" in refused("prepare_data", "--check", prefix)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_stopped_continues(
    corpus: Path, tmp_path: Path, how: signal.Signals
) -> None:
    tokenizer = corpus / "tokenizer" / "tokenizer.model"
    words = ("--tokenizer", tokenizer, corpus / "corpus.jsonl", "--chunk-bytes", 1000)
    call("prepare_data", *words, "-o", tmp_path / "whole", "--workers", 1)

    stopped = ("prepare_data", *words, "-o", tmp_path / "stopped", "--workers", 2)
    process = subprocess.Popen(
        command(*stopped),
        env=command_environment(),
        stderr=subprocess.PIPE,
        text=True,
        # tests in the background of a shell inherit that it is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert wait_until(lambda: len(list(tmp_path.glob("stopped.partial/*.npz"))) > 1, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    process.send_signal(how)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}[how]
    if how == signal.SIGINT:
        assert errors.strip().splitlines()[-1] == "interrupted; the same command continues"
        assert "Traceback" not in errors
    _, left = psutil.wait_procs(workers, timeout=30)
    assert left == []
    assert not (tmp_path / "stopped.idx").exists()

    result = call(*stopped)
    assert "chunks were done before" in result.stderr
    assert checksums(tmp_path / "stopped") == checksums(tmp_path / "whole")
    assert not (tmp_path / "stopped.partial").exists()


def test_mistakes_are_named_without_a_traceback(corpus: Path, tmp_path: Path) -> None:
    """The messages have unit tests; here they reach the user."""
    tokenizer, out = corpus / "tokenizer" / "tokenizer.model", ("-o", tmp_path / "out")
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"text": "fine"}\n{"text": "\xff\xfe"}\n{"text": \n{"body": "x"}\n')
    faults = [
        f"{bad}:2: not valid UTF-8 at byte 11 of the line",
        f"{bad}:3: not JSON: Expecting value at column 9",
        f"{bad}:4: no field 'text'; the fields are: 'body' (--text-field chooses one)",
    ]
    lines = refused("prepare_data", bad, "--tokenizer", tokenizer, *out).splitlines()
    assert [line for line in lines if line.startswith(str(bad))] == faults
    assert refused("train_tokenizer", bad, *out, "--vocab-size", 400).splitlines() == faults
    assert "give INPUT, --tokenizer and --output" in refused("prepare_data", bad)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}\n{% endfor %}")
    assert "chat_template: not valid Jinja: line 2: " in refused(
        *("train_tokenizer", corpus / "corpus.jsonl", *out, "--vocab-size", 400),
        *("--chat-template", template),
    )


def test_the_benchmark_compares_equal_tokens() -> None:
    result = call("bench_prepare_data", "--megabytes", 0.3, "--repeats", 1, "--vocab-size", 800)
    assert "preprocess_data.py is not in the megatron-core wheel" in result.stdout
    summary = figures(result.stdout)
    assert summary["same_tokens"] == "1" and float(summary["speedup"]) > 0
