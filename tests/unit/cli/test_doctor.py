"""The report of `doctor` about packages and processors."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest

from gspo_megatron.cli import doctor
from gspo_megatron.observe import environment
from tests.unit.cli.conftest import Command

GPU = {"names": ["H200", "H200"], "memory_bytes": [139 * 2**30, 140 * 2**30], "cuda": "13.2"}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the modules that can be found. Tests add to this set."""
    present: set[str] = set()

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, None) if name in present else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    # The real function would look for bubblewrap with `find_spec`, and cache the result.
    monkeypatch.setattr("gspo_megatron.process.sandbox_facts.protections", list)
    return present


def described(gpu: object = None, **versions: str | None) -> dict[str, object]:
    known = {"python": "3.12.1", "torch": "2.13.0+cu130", "megatron-core": "0.16.1"}
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    found = {**known, "transformer-engine": None, **named}
    return {"versions": found, "cpu": {"name": "Some CPU", "count": 4}, "gpu": gpu}


def table(
    gpu: object = None, trouble: str | None = None, **versions: str | None
) -> dict[str, tuple[str, str]]:
    """The lines of the table by name. A line has a text about what was found, and the advice."""
    rows = doctor.findings(described(gpu, **versions), trouble)
    return {name: (text, remedy) for name, text, remedy in rows}


def test_nvidias_apex_is_told_from_the_package_of_the_same_name(modules: set[str]) -> None:
    assert table()["apex"][0].startswith("not installed")
    modules.add("apex")
    assert table()["apex"][1].startswith("pip uninstall apex")
    modules.add("amp_C")
    assert table()["apex"][0].startswith("not NVIDIA's")
    modules.add("apex.multi_tensor_apply")
    assert table()["apex"] == ("NVIDIA's", "")


def test_processors_are_summed_up(
    modules: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert table(GPU)["gpu"] == ("2 x H200, 149 GB (10^9 bytes) each, CUDA 13.2", "")
    assert table()["cpu"] == ("4 x Some CPU", "")
    assert table()["gpu"] == ("none that torch can use: runs use the CPU", "")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: H200'\n")
    program.chmod(0o755)
    assert "a torch with CUDA" in table()["gpu"][1]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert table()["gpu"][1] == ""


def test_transformer_engine(modules: set[str]) -> None:
    assert "no FP8" in table()["transformer-engine"][0]
    assert table()["transformer-engine"][1] == ""  # no advice to install a package that needs a GPU
    assert table(GPU)["transformer-engine"][1].startswith("pip install 'gspo-megatron[gpu]'")
    assert "damaged" in table(transformer_engine="2.9")["transformer-engine"][0]
    modules.add("transformer_engine")
    assert table(transformer_engine="2.9")["transformer-engine"] == ("2.9", "")


def to_be_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and its children find the modules in a folder."""
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    # an earlier test may have imported Megatron-Core on a CPU, which puts a stand-in here
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)


@pytest.mark.parametrize(
    ("source", "trouble"),
    [
        ("", None),
        ("import sys; assert 'torch' in sys.modules", None),
        ("raise OSError('libcudart.so.12: not found\\nand more')", "OSError: libcudart.so.12: not"),
        ("print('hello'); import no_such_library", "ModuleNotFoundError: No module named"),
        ("import os; os.kill(os.getpid(), 11)", "the process ends with -11"),
        ("import time; time.sleep(60)", "not done after 1 s"),
    ],
)
def test_why_a_transformer_engine_does_not_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, trouble: str | None
) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch" / "__init__.py").write_text(source)
    to_be_found(tmp_path, monkeypatch)
    if "sleep" in source:
        monkeypatch.setattr(doctor, "_IMPORT_SECONDS", 1.0)
    found = doctor.engine_trouble()
    if trouble is None:
        assert found is None
        return
    assert found is not None and found.startswith(trouble) and "\n" not in found
    rows = table(GPU, found, transformer_engine="2.9")
    text, remedy = rows["transformer-engine"]
    assert text == f"2.9, but its import fails: {found}" and "--force-reinstall" in remedy
    assert rows["precisions"][0].startswith("fp32, bf16; fp8-delayed, fp8-blockwise, mxfp8: ")


def test_the_command_tries_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gspo: Command
) -> None:
    (tmp_path / "transformer_engine.py").write_text("raise ImportError('undefined_symbol')")
    to_be_found(tmp_path, monkeypatch)
    monkeypatch.setattr(environment, "describe_environment", described)
    code, out, _ = gspo("doctor")
    assert code == 0 and "import fails: ImportError: undefined_symbol" in out
    [python] = [line.split() for line in out.splitlines() if line.startswith(" python")]
    assert python[1:] == ["3.12.1", "nothing"]


@pytest.mark.parametrize(
    ("versions", "code", "text"),
    [
        ({}, 0, "0.16.1"),
        ({"torch": None}, 1, "missing, and needed"),
        ({"torch": "2.7.1"}, 1, "install torch >=2.8,<3"),
        ({"torch": "3.0"}, 1, "not supported"),
        ({"megatron_core": "0.16.0"}, 1, "not supported"),
        ({"megatron_core": "0.19.2rc1"}, 0, "0.19.2rc1"),
        ({"megatron_core": "0.20.0"}, 1, "install megatron-core >=0.16.1,<0.20"),
        ({"python": "3.9.2"}, 1, "not supported"),
    ],
)
def test_missing_and_unsupported_versions_exit_with_1(
    modules: set[str],
    monkeypatch: pytest.MonkeyPatch,
    gspo: Command,
    versions: dict[str, str | None],
    code: int,
    text: str,
) -> None:
    monkeypatch.setattr(environment, "describe_environment", lambda: described(**versions))
    ended, out, _ = gspo("doctor")
    assert ended == code and text in out


def test_what_servers_and_trackers_need_is_shown(
    modules: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"tensorboard": "2.21.0", "mlflow-skinny": "3.17.2"}
    monkeypatch.setattr(environment, "installed_version", versions.get)
    assert table()["trackers"] == ("tensorboard 2.21.0, mlflow 3.17.2; not installed: wandb", "")
    assert "rollout.vllm.python" in table()["vllm"][0]
    assert table(vllm="0.20.1")["vllm"] == ("0.20.1", "")


def test_no_line_is_wider_than_a_page(
    modules: set[str], monkeypatch: pytest.MonkeyPatch, gspo: Command
) -> None:
    names = {"names": ["NVIDIA H200 of a long name " * 4], "memory_bytes": [2**37], "cuda": "13"}
    monkeypatch.setattr(environment, "describe_environment", lambda: described(names, torch=None))
    _, out, _ = gspo("doctor")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[1:3]] == ["python", "torch"]
    assert lines[3].strip() == "do: pip install 'torch>=2.8,<3'"
    assert " ".join(out.split()).count("NVIDIA H200 of a long name") == 4


def test_precisions_are_those_that_a_run_could_use(
    modules: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_fp8 = "fp8-delayed, fp8-blockwise, mxfp8"
    on_cpu = f"fp32, bf16; {all_fp8}: needs a GPU and Transformer Engine"
    assert table()["precisions"][0] == on_cpu
    without_engine = f"fp32, bf16; {all_fp8}: needs Transformer Engine: pip install"
    assert table(GPU)["precisions"][0].startswith(without_engine)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("gspo_megatron.config.precision.engine_lacks", lambda: None)
    able, *others = table(GPU)["precisions"][0].split("; ")
    assert able == "fp32, bf16, fp8-delayed, fp8-blockwise"
    assert len(others) == 1 and others[0].startswith("mxfp8: needs a Blackwell GPU")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert table(GPU)["precisions"][0].startswith("fp32, bf16; fp8-delayed: needs")


def test_supported_versions_are_those_of_the_package() -> None:
    project = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    for name, bounds in doctor.SUPPORTED.items():
        lowest, beyond = (".".join(map(str, bound)) for bound in bounds)
        prefix = 'requires-python = "' if name == "python" else f'"{name}'
        assert f'{prefix}>={lowest},<{beyond}"' in project
    assert 'gpu = ["transformer-engine[pytorch]>=' in project
