"""Rules of the architecture that the contracts of import-linter in pyproject.toml cannot
express."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from tests.programs import ROOT, run_program

PACKAGE = ROOT / "gspo_megatron"
OUTSIDE = {"tests", "tools", "examples", "pretrain_scripts"}
MAY_IMPORT_MEGATRON = (
    "platform/",
    "models/",
    "batching/",
    "routing/",
    "checkpoint/",
    "hf/",
    "rl/",
    "verify/parity.py",  # counts the gradient norm as its optimizers do
    "supervised/",
    "rollout/megatron/engine.py",
)


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """The line and dotted name of each import in a file, also of imports inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from a import b` may import the module a.b.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports_of(name: str, files: list[Path]) -> list[str]:
    """The `file:line` of each import of a module or of something inside it."""
    return [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line, module in imported_modules(path)
        if f"{module}.".startswith(f"{name}.")
    ]


def modules_of(*names: str) -> list[str]:
    """The dotted names of all modules in these packages."""
    files = [path for name in names for path in python_files(f"gspo_megatron/{name}")]
    dotted = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return sorted(name.removesuffix(".__init__") for name in dotted)


@pytest.mark.parametrize(
    "package", ["config", "data", "environments", "evaluation", "rewards", "the rollout service"]
)
def test_package_imports_without_torch_and_megatron(package: str) -> None:
    # everything that this module imports runs in the service, too
    modules = ["gspo_megatron.rollout.vllm.service"]
    if package != "the rollout service":
        modules = modules_of(package)
    assert modules
    code = (
        "import importlib, sys\n"
        "for name in ('torch', 'megatron', 'transformers'):\n"
        "    sys.modules[name] = None  # an import now raises\n"
        f"for name in {['gspo_megatron.types', 'gspo_megatron.errors', *modules]}:\n"
        "    importlib.import_module(name)\n"
    )
    run_program(sys.executable, "-c", code, cwd=ROOT)


def test_the_check_for_imports_sees_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import gspo_megatron.objectives.parts"
    assert "torch" in run_program(sys.executable, "-c", code, cwd=ROOT, expect=1).stderr


@pytest.mark.parametrize("folder", sorted(OUTSIDE))
def test_package_imports_nothing_of_the_repository_outside_it(folder: str) -> None:
    assert imports_of(folder, python_files("gspo_megatron")) == []


def test_nothing_imports_megatron_training() -> None:
    files = python_files("gspo_megatron", *OUTSIDE)
    assert imports_of("megatron.training", files) == []


def test_only_the_modules_meant_to_import_megatron_core_do() -> None:
    others = [
        path
        for path in python_files("gspo_megatron")
        if not path.relative_to(PACKAGE).as_posix().startswith(MAY_IMPORT_MEGATRON)
    ]
    assert imports_of("megatron", others) == []
    # The check finds imports in the modules that may import Megatron-Core.
    assert imports_of("megatron", python_files("gspo_megatron"))


def import_cycle(package: str) -> list[str] | None:
    """The modules of one import cycle in a package, with the first module again at the end; None if
    there is no cycle. Imports inside functions count, but imports for type checkers do not."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_folders_that_other_ranks_may_make_are_made_in_one_place() -> None:
    """`files.make_folder` copes with file systems that show a new folder late. Only the heartbeat
    makes a folder itself, because the heartbeat must know which process was first."""
    found = [
        str(path.relative_to(PACKAGE))
        for path in python_files("gspo_megatron")
        if re.search(r"mkdir\([^)]*exist_ok", path.read_text(encoding="utf-8"))
    ]
    assert found == ["files.py", "process/heartbeat.py"]


def test_no_import_cycles() -> None:
    assert import_cycle("gspo_megatron") is None


@pytest.mark.parametrize(
    ("source", "is_cycle"),
    [
        ("import package.b", True),
        ("from package import b", True),
        ("from package.b import thing", True),
        ("def run():\n    from package.b import thing", True),
        ("if TYPE_CHECKING:\n    from package.b import thing", False),
        ("import package", False),
    ],
)
def test_the_check_for_cycles_sees_every_kind_of_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, is_cycle: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text(source)
    (folder / "b.py").write_text("from package import a")
    cycle = set(import_cycle("package") or ())
    assert cycle == ({"package.a", "package.b"} if is_cycle else set())


def test_every_package_has_an_init_file() -> None:
    # setuptools installs no folder without an __init__.py.
    folders = {path.parent for path in python_files("gspo_megatron")}
    # pyproject.toml names the files of these folders
    for data in ("cli/new_templates", "rollout/vllm/worker"):
        folders.remove(PACKAGE / data)
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def pins_of(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    pattern = re.compile(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*")
    assert [line for line in lines if not pattern.fullmatch(line)] == []
    assert lines
    return dict(line.lower().split("==") for line in lines)


@pytest.mark.parametrize("version", ["310", "311", "312"])
def test_requirements_are_names_with_exact_versions(version: str) -> None:
    pins = pins_of(ROOT / "requirements" / f"cpu-py{version}.txt")
    assert {"torch", "megatron-core", "pytest", "ruff"} <= pins.keys()
    assert "apex" not in pins  # on package indexes, another project has this name
    cuda_pins = pins_of(ROOT / "requirements" / f"cuda-torch-{pins['torch']}.txt")
    assert {"triton", "nvidia-nccl-cu13"} <= cuda_pins.keys()
    assert not pins.keys() & cuda_pins.keys()
