"""`gspo-megatron serve`: mistakes of the user, and the folder for the converted weights.
tests/vllm/test_serve.py tests the server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program
from tests.unit.cli.conftest import Command, refused

PROGRAM = """
import os, signal, sys, time
from gspo_megatron.checkpoint import convert_adapters
from gspo_megatron.cli.main import main
from gspo_megatron.errors import DataError
from gspo_megatron.rollout.vllm import installed

def convert(source, destination):
    destination.mkdir()
    (destination / "weights").touch()
    if sys.argv[1] == "full":
        raise DataError(f"{destination}: 9 bytes to write, 8 are free")
    os.kill(os.getpid(), SIGNALS[sys.argv[1]])
    time.sleep(60)

SIGNALS = {"told to end": signal.SIGTERM, "the terminal is closed": signal.SIGHUP}
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
installed.device_of = lambda python: "cpu"
convert_adapters.any_to_hf = convert
sys.exit(main(["serve", "."]))
"""


# A server that is told to end by a closed terminal, unless it runs under nohup.
WORK = """
import asyncio, os, signal, sys
from gspo_megatron.rollout.vllm.standalone import until_told_to_end

async def work(ended):
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.1)
    print("told to end" if ended.is_set() else "goes on")

signal.signal(signal.SIGHUP, signal.Handlers[sys.argv[1]])
until_told_to_end(work)
"""


@pytest.mark.parametrize(
    ("case", "code", "told"),
    [
        ("full", 2, "8 are free; TMPDIR may name a folder with more space\n"),
        ("told to end", 143, ""),
        ("the terminal is closed", 129, ""),
    ],
)
def test_a_conversion_that_ends_early_leaves_no_weights(
    tmp_path: Path, case: str, code: int, told: str
) -> None:
    words = (sys.executable, "-c", PROGRAM, case)
    environ = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = run_program(*words, expect=code, environ=environ, cwd=tmp_path)
    assert done.stderr.endswith(told) and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("before", "told"), [("SIG_DFL", "told to end"), ("SIG_IGN", "goes on")])
def test_a_closed_terminal_ends_a_server_unless_nohup_forbids_it(before: str, told: str) -> None:
    done = run_program(sys.executable, "-c", WORK, before, environ={"PYTHONPATH": str(ROOT)})
    assert done.stdout == f"{told}\n"


def test_mistakes_are_told_in_one_line(gspo: Command, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for words, told in (
        (("max_num_seqs",), "max_num_seqs: allowed: OPTION=VALUE"),
        (("dtype=float32",), "dtype=float32: allowed: SOURCE, --host, --port and --dtype"),
        (("middleware=m.Own",), "middleware=m.Own: would replace the check of the token"),
        ((), "config.json: architectures = null"),
    ):
        [said] = refused(gspo, "serve", folder, *words)
        assert told in said
    [said] = refused(gspo, "serve", tmp_path / "nothing")
    assert "nothing: no such folder" in said
    [said] = refused(gspo, "serve", "--join", tmp_path / "nothing.yaml")
    assert "nothing.yaml: no such configuration file" in said
