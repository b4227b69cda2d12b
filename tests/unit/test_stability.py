"""Everything that docs/stability.md promises exists, and the public modules export nothing that the
page does not promise."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.programs import ROOT

PAGE = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(gspo_megatron\.\w+)` \| (.*) \|$", PAGE, re.MULTILINE)


def test_the_four_public_modules_are_on_the_page() -> None:
    parts = {module.rpartition(".")[2] for module, _ in ROWS}
    assert parts == {"types", "rewards", "environments", "objectives", "errors"}


@pytest.mark.parametrize(("module", "cell"), ROWS)
def test_the_page_names_what_a_module_exports(module: str, cell: str) -> None:
    imported, named = importlib.import_module(module), re.findall(r"`(\w+)`", cell)
    assert named
    assert all(hasattr(imported, name) for name in named)
    if hasattr(imported, "__all__"):
        assert named == sorted(imported.__all__)


@pytest.mark.parametrize("page", ["rewards", "environments", "objectives", "recipes", "first_run"])
def test_pages_for_users_import_stable_names_only(page: str) -> None:
    stable = {module: set(re.findall(r"`(\w+)`", cell)) for module, cell in ROWS}
    # The code in pages may also import these modules: the runner of programs, and the tokenizer of
    # the tutorial's toy model.
    other = {"gspo_megatron.process.sandbox", "gspo_megatron.data.character_tokenizer"}
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^from (gspo_megatron[\w.]*) import (?:\(([^)]*)\)|(.*))$", text, re.MULTILINE
    )
    assert found
    for module, block, line in found:
        if module not in other:
            assert set(re.findall(r"\w+", block or line)) <= stable.get(module, set()), module
