"""What `doctor` says about packages and processors."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import stat
import sys
from pathlib import Path

import pytest

from gspo_megatron.cli import doctor
from gspo_megatron.cli.main import main
from gspo_megatron.observe import environment

GPU = {"names": ["H200"], "memory_bytes": [139 * 2**30], "cuda": "13.2"}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules that can be found, to be filled by the test."""
    present: set[str] = set()

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, None) if name in present else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return present


def described(**versions: str | None) -> dict[str, object]:
    known = {"torch": "2.13.0", "megatron-core": "0.16.1", "transformer-engine": None}
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    return {"versions": {**known, **named}, "cpu": {"name": "Some CPU", "count": 4}, "gpu": None}


def test_nvidias_apex_is_told_from_the_package_of_the_same_name(modules: set[str]) -> None:
    assert doctor.apex().startswith("not installed")
    modules.add("apex")
    assert doctor.apex().startswith("not NVIDIA's")
    modules.add("amp_C")
    assert doctor.apex().startswith("not NVIDIA's")
    modules.add("apex.multi_tensor_apply")
    assert doctor.apex() == "NVIDIA's"


def test_gpus_are_summed_up() -> None:
    gpu = {"names": ["H200", "H200"], "memory_bytes": [139 * 2**30, 140 * 2**30], "cuda": "13.2"}
    assert doctor.cuda(gpu) == "13.2: 2 x H200, 139 GiB each"
    assert doctor.cuda(None).startswith("no GPU")


def test_transformer_engine_without_its_module_is_damaged(modules: set[str]) -> None:
    found = dict(doctor.findings(described(transformer_engine="2.1")))
    assert "damaged" in found["transformer-engine"]
    modules.add("transformer_engine")
    assert dict(doctor.findings(described(transformer_engine="2.1")))["transformer-engine"] == "2.1"


def to_be_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and others find the modules in a folder."""
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    # hidden where a test before this one has imported Megatron-Core on a CPU
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", None),
        (
            "raise OSError('libcudart.so.12: not found\\nand more')",
            "OSError: libcudart.so.12: not found",
        ),
        ("print('hello'); import no_such_library", "ModuleNotFoundError: No module named"),
        ("import os; os.kill(os.getpid(), 11)", "it ends the process with -11"),
        ("import time; time.sleep(60)", "nothing after 3 s"),
    ],
)
def test_a_transformer_engine_that_does_not_import_is_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, told: str | None
) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch" / "__init__.py").write_text(source)
    to_be_found(tmp_path, monkeypatch)
    if "sleep" in source:
        monkeypatch.setattr(doctor, "_IMPORT_SECONDS", 3.0)
    trouble = doctor.engine_trouble()
    if told is None:
        assert trouble is None
        return
    assert trouble is not None and trouble.startswith(told) and "\n" not in trouble
    machine = described(transformer_engine="2.9") | {"gpu": GPU}
    found = dict(doctor.findings(machine, trouble))["transformer-engine"]
    assert found == f"2.9, but it does not import: {trouble}"
    ((name, text),) = doctor.fused_paths(machine, trouble)
    assert name == "layers" and "does not import" in text
    assert "--force-reinstall" in dict(doctor.remedies(machine, trouble))["transformer-engine"]


def test_the_import_is_tried_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "transformer_engine.py").write_text("raise ImportError('undefined symbol: _Z3')")
    to_be_found(tmp_path, monkeypatch)
    monkeypatch.setattr(environment, "describe_environment", described)
    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "does not import: ImportError: undefined symbol: _Z3" in out


def test_a_missing_requirement_is_told_and_exits_with_1(
    modules: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "describe_environment", lambda: described(torch=None))
    assert main(["doctor"]) == 1
    assert "missing, and needed" in capsys.readouterr().out
    monkeypatch.setattr(environment, "describe_environment", described)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "0.16.1" in text
    assert "4 x Some CPU" in text


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_machine_without_slurm(programs: Path) -> None:
    rows = dict(doctor.slurm({"HOME": "/"}))
    assert rows["sinfo"].startswith("not found")
    assert rows["job"] == "this process is in none"


def test_slurm_and_the_job_in_it_are_told(programs: Path) -> None:
    script = """case $1 in
--version) echo 'slurm 23.11.4' ;;
*) echo 'gpu*|32|gpu:h100:8|2-00:00:00'; echo 'debug|2|(null)|30:00' ;;
esac"""
    write_program(programs, "sinfo", script)
    rows = dict(doctor.slurm({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_X": "y"}))
    assert rows["sinfo"] == "slurm 23.11.4"
    assert rows["gpu*"] == "32 nodes, gpu:h100:8, at most 2-00:00:00"
    assert rows["debug"] == "2 nodes, (null), at most 30:00"
    assert rows["job"] == "SLURM_JOB_ID=7 SLURM_NTASKS=16"


def test_a_controller_that_does_not_answer_is_told(programs: Path) -> None:
    write_program(programs, "sinfo", "[ $1 = --version ] && echo slurm || exit 1")
    assert dict(doctor.slurm({}))["controller"] == "does not answer"


def test_the_drivers_version_is_its_own_tools(programs: Path) -> None:
    assert doctor.driver() == "none"
    write_program(programs, "nvidia-smi", "echo 580.65; echo 580.65")
    assert doctor.driver() == "580.65"
    write_program(programs, "nvidia-smi", "exit 9")
    assert doctor.driver() == "none"


def test_fused_paths_are_those_that_a_run_would_take(
    modules: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules.add("torch")
    on_cpu = dict(doctor.fused_paths(described()))
    assert on_cpu["adam"] == on_cpu["gradient norm"] == "torch"
    assert "torch_native" in on_cpu["layers"]
    assert on_cpu["precisions"].startswith("fp32, bf16; fp8-delayed, fp8-blockwise, mxfp8: needs")
    modules |= {"apex", "amp_C", "apex.multi_tensor_apply"}
    assert dict(doctor.fused_paths(described()))["adam"] == "torch"  # apex does nothing on a CPU
    on_gpu = described() | {"gpu": GPU}
    assert dict(doctor.fused_paths(on_gpu))["adam"] == "NVIDIA's apex"
    modules.add("transformer_engine")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("gspo_megatron.config.precision.engine_lacks", lambda: None)
    with_engine = dict(doctor.fused_paths(on_gpu))
    assert with_engine["adam"] == with_engine["layers"] == "Transformer Engine"
    able, *others = with_engine["precisions"].split("; ")
    assert able == "fp32, bf16, fp8-delayed, fp8-blockwise"
    assert len(others) == 1 and others[0].startswith("mxfp8: needs a Blackwell GPU")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert dict(doctor.fused_paths(on_gpu))["precisions"].startswith("fp32, bf16; fp8-delayed: ")


def test_what_is_missing_comes_with_how_to_get_it(
    modules: set[str], monkeypatch: pytest.MonkeyPatch, programs: Path
) -> None:
    installed = {"wandb": "0.18"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    rows = dict(doctor.remedies(described(torch=None)))
    assert rows["torch"].startswith("pip install torch")
    assert rows["math-verify"].startswith("pip install 'gspo-megatron[math]'")
    assert "wandb" not in rows
    assert "transformer-engine" not in rows  # of no use without a GPU
    assert "apex" not in rows
    modules.add("apex")
    rows = dict(doctor.remedies(described() | {"gpu": GPU}))
    assert rows["transformer-engine"].startswith("pip install 'gspo-megatron[gpu]'")
    assert rows["apex"].startswith("pip uninstall apex")
    write_program(programs, "nvidia-smi", "echo 580.65")
    assert "without CUDA" in dict(doctor.remedies(described()))["cuda"]


def test_every_remedy_is_an_extra_of_the_package() -> None:
    setup = (Path(__file__).resolve().parents[3] / "setup.py").read_text(encoding="utf-8")
    for package, extra in doctor._EXTRAS.items():
        assert f'"{extra}": [' in setup
        assert package in setup
