"""`check` and `train` look for the optional packages that a run needs, before the run starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command, ConfigWriter

SERVERS = ("rollout.engine=vllm", "rollout.vllm.servers=1")


def test_packages_of_trackers_that_are_missing_are_named_all_at_once(
    write_config: ConfigWriter, gspo: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)  # makes its import fail
    words = ("check", write_config(), "logging.trackers=[wandb, mlflow]")
    code, _, err = gspo(*words, "rollout.group_size=1")
    assert (code, [line.split(":")[0] for line in err.splitlines()]) == (
        2,
        ["rollout.group_size = 1", "logging.trackers = wandb", "logging.trackers = mlflow"],
    )
    assert "install it with `pip install wandb`" in err
    assert gspo(*words, "--no-files")[0] == 0  # the run is for another machine
    code, _, err = gspo("train", *words[1:])
    assert code == 2 and "logging.trackers = mlflow" in err


def fake_python(folder: Path, packages: str | None) -> Path:
    """Write an interpreter that finds only the packages of the folder `packages`. If `packages` is
    None, the file is not an interpreter."""
    path = folder / "python"
    path.write_text(
        "#!/bin/sh\nexit 1\n"
        if packages is None
        else f'#!/bin/sh\nPYTHONPATH="{packages}" exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def test_an_interpreter_without_vllm_is_refused(
    write_config: ConfigWriter, gspo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config()
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    told = {}
    for name, packages in (("none", ""), ("folder", str(tmp_path / "packages")), ("no", None)):
        (tmp_path / name).mkdir()
        python = fake_python(tmp_path / name, packages)
        words = ("check", config, *SERVERS, f"rollout.vllm.python={python}")
        code, _, told[name] = gspo(*words)
        assert code == 2 and f"rollout.vllm.python = '{python}': " in told[name]
    assert "has no package vllm" in told["none"] and "has no package vllm" in told["folder"]
    assert "is no Python interpreter" in told["no"]
    (tmp_path / "packages" / "vllm" / "__init__.py").touch()
    words = ("check", config, *SERVERS, f"rollout.vllm.python={tmp_path / 'folder' / 'python'}")
    assert gspo(*words)[0] == 0
    # nothing can be known about servers that run elsewhere
    monkeypatch.setenv("GSPO_ROLLOUT_NODES", "node7")
    words = ("check", config, *SERVERS, f"rollout.vllm.python={tmp_path / 'none' / 'python'}")
    assert gspo(*words)[0] == 0


def test_without_an_interpreter_of_its_own_vllm_must_be_in_this_one(
    write_config: ConfigWriter, gspo: Command
) -> None:
    code, _, err = gspo("check", write_config(), *SERVERS)
    assert code == 2
    assert f"rollout.vllm.python = null: {sys.executable}, which runs this program, has no" in err
