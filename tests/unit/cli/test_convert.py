"""The arguments and messages of the convert command."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gspo_megatron.checkpoint.convert import hf_to_megatron
from tests.unit.cli.conftest import Command
from tests.unit.hf.published import write_model

EXPORT = ("convert", "megatron-to-hf")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    source = write_model(folder / "hf", "qwen3", seed=1, num_hidden_layers=1)
    first = folder / "run/checkpoints/rl_00000001"
    first.parent.mkdir(parents=True)
    hf_to_megatron(source, first)
    for step in (2, 3):
        shutil.copytree(first, first.with_name(f"rl_0000000{step}"))
    return folder / "run"


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """A run with three checkpoints, which a test may damage."""
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def weights(run: Path, step: int) -> Path:
    return run / f"checkpoints/rl_0000000{step}/model/__0_0.distcp"


def alter(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_damaged_newer_checkpoints_and_the_one_taken_are_named(
    run: Path, tmp_path: Path, gspo: Command
) -> None:
    os.truncate(weights(run, 3), 9)
    (run / "checkpoints/rl_00000002/manifest.json").unlink()
    code, out, err = gspo(*EXPORT, run, tmp_path / "out")
    notes = [line for line in err.splitlines() if line.startswith("checkpoint ")]
    assert notes[0].startswith(
        "checkpoint rl_00000003 is damaged and not used: model/__0_0.distcp: cut short, it has 9 of"
    )
    assert notes[1:] == ["checkpoint rl_00000002 is damaged and not used: manifest.json: missing"]
    taken = run / "checkpoints/rl_00000001"
    assert (code, out.splitlines()[-1]) == (0, f"{tmp_path / 'out'}: written from {taken}")
    os.truncate(weights(run, 1), 9)
    code, _, err = gspo(*EXPORT, run, tmp_path / "none")
    assert code == 2 and "there is no whole one in it" in err


def test_altered_contents_end_the_command_and_are_named(
    run: Path, tmp_path: Path, gspo: Command
) -> None:
    """The command notices altered contents while it reads them. It does not silently use an older
    checkpoint."""
    os.truncate(weights(run, 3), 9)
    alter(weights(run, 2))
    code, _, err = gspo(*EXPORT, run, tmp_path / "out")
    lines = err.splitlines()[-3:]
    assert code == 2 and lines[0].startswith("checkpoint rl_00000003 is damaged and not used: ")
    assert lines[1].startswith(f"{run / 'checkpoints/rl_00000002'}: model/__0_0.distcp: altered")
    assert lines[2] == f"{run}: to convert another checkpoint of this folder, give its path"
    assert not (tmp_path / "out").exists()


def test_the_help_promises_no_more(gspo: Command) -> None:
    told = " ".join(gspo(*EXPORT, "--help")[1].split())
    assert "takes the newest one whose files all have their full size" in told
    assert "If a file was altered, the command fails" in told and "newest whole" not in told


def test_a_layout_is_not_passed_over_by_a_rank(run: Path, tmp_path: Path, gspo: Command) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    code, _, err = gspo(*EXPORT, run, tmp_path / "out", "--layout", "tp=2,pp=2")
    told = "--layout tp=2,pp=2: takes 4 processes, and this one is already one of 1"
    assert code == 2 and err.startswith(told) and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert gspo(*EXPORT, run, tmp_path / "out", "--layout", "tp=1")[0] == 0


def test_a_base_of_a_whole_model_is_refused(whole_run: Path, tmp_path: Path, gspo: Command) -> None:
    """The base is for conversions of adapters. A conversion of a whole model, in either direction,
    would never read the base."""
    source, base = whole_run.parent / "hf", whole_run.parent / "other"
    wrong = f"--base {base}: "
    code, _, err = gspo("convert", "hf-to-megatron", source, tmp_path / "a", "--base", base)
    assert code == 2
    assert f"{wrong}{source} holds a whole model and no adapters; leave --base out" in err
    code, _, err = gspo(*EXPORT, whole_run, tmp_path / "a", "--base", base)
    assert code == 2 and wrong in err and "holds a whole model and no adapters" in err
    assert not (tmp_path / "a").exists()
