"""What `doctor` says about packages and processors."""

from __future__ import annotations

import importlib.machinery
import importlib.util

import pytest

from gspo_megatron.cli import doctor
from gspo_megatron.cli.main import main
from gspo_megatron.observe import environment


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
