from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gspo_megatron.config.load import STAGES, parse_config
from gspo_megatron.observe import environment
from gspo_megatron.observe.environment import describe_environment
from gspo_megatron.observe.run_logger import RunLogger


def test_versions_are_those_installed_and_none_where_not() -> None:
    versions = describe_environment()["versions"]
    assert versions["python"] == platform.python_version()
    assert versions["numpy"] == importlib.metadata.version("numpy")
    assert {"torch", "megatron-core", "transformer-engine"} <= set(versions)


def test_the_world_size_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # another test may have set it
    assert describe_environment()["world_size"] == 1
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert describe_environment()["world_size"] == 16
    monkeypatch.setenv("WORLD_SIZE", "8")  # as torchrun does inside a Slurm job
    assert describe_environment()["world_size"] == 8


def test_the_slurm_job_is_told_only_inside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_environment()["slurm"] is None
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert describe_environment()["slurm"] == {"job_id": "4711"}


def test_the_version_of_vllm_is_that_of_the_interpreter_that_runs_the_servers(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.20.1\n")
    python.chmod(0o755)
    data = {"tokenizer": "t.model"}
    for engine, version in (
        ("vllm", "0.20.1"),
        ("megatron", environment.installed_version("vllm")),
    ):
        rollout = {"engine": engine, "vllm": {"servers": 1, "python": str(python)}}
        folder = tmp_path / engine
        logging = {"dir": str(folder)}
        config = parse_config({"data": data, "rollout": rollout, "logging": logging})
        RunLogger(config, is_main=True).close()
        assert json.loads((folder / "environment.json").read_text())["versions"]["vllm"] == version
    stage = parse_config(
        {"data": data, "logging": {"dir": str(tmp_path / "sft")}}, schema=STAGES["sft"]
    )
    RunLogger(stage, is_main=True).close()
    assert (tmp_path / "sft" / "environment.json").is_file()
    python.write_text("#!/bin/sh\nexit 1\n")  # a program that finds no vLLM
    assert describe_environment(str(python))["versions"]["vllm"] is None


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_a_checkout_not_of_a_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked, installed = tmp_path / "tracked.py", tmp_path / "installed.py"
    tracked.write_text("1\n")
    installed.write_text("1\n")
    assert environment._git_state(tracked) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "tracked.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert environment._git_state(tracked) == {"commit": commit, "modified": False}
    assert environment._git_state(installed) is None
    tracked.write_text("2\n")
    assert environment._git_state(tracked) == {"commit": commit, "modified": True}
    slow = tmp_path / "bin" / "git"  # a git whose look at all files takes too long, and fails here
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\n[ "$3" = status ] || exec {shutil.which("git")} "$@"\nexit 1\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent))
    assert environment._git_state(tracked) == {"commit": commit, "modified": None}


def test_a_machine_without_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment()["git"] is None


@pytest.mark.parametrize(
    ("version", "can"),
    [
        ("cuda = None\nhip = None\n", False),
        ("cuda = '12.8'\n", True),
        ("cuda = None\nhip = '6.4'\n", True),
        (None, True),  # without this file, torch itself is imported
    ],
)
def test_torch_says_in_a_file_what_it_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, can: bool
) -> None:
    if version is not None:
        (tmp_path / "version.py").write_text(version)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: spec)
    assert environment._torch_can_use_gpus() is can
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    assert environment._torch_can_use_gpus() is False
