"""The pages of decisions: their heads, their index, and the files that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import ROOT
from tools import make_decisions_index
from tools.make_decisions_index import FOLDER, index, read_decisions


def test_numbers_are_consecutive_and_the_index_is_up_to_date() -> None:
    decisions = read_decisions()
    assert [int(each.number) for each in decisions] == list(range(1, len(decisions) + 1))
    assert (FOLDER / "index.md").read_text(encoding="utf-8") == index(decisions), (
        "run `python tools/make_decisions_index.py`"
    )


@pytest.mark.parametrize(
    "text",
    [
        "# 0001. A title\n\n- Date: yesterday\n- Status: accepted\n- Room: data\n\n## Context\n",
        "# 0001. A title\n\n- Date: 2026-11-20\n- Status: done\n- Room: data\n\n## Context\n",
        "# 0001. A title\n\n- Date: 2026-11-20\n- Status: accepted\n- Room: attic\n\n## Context\n",
        "# 0002. A title\n\n- Date: 2026-11-20\n- Status: accepted\n- Room: data\n\n## Context\n",
    ],
)
def test_a_wrong_head_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_decisions_index, "FOLDER", tmp_path)
    (tmp_path / "0001-a.md").write_text(text)
    with pytest.raises(ValueError, match=r"0001-a\.md: not a decision's head; allowed: "):
        read_decisions()


def test_a_replaced_decision_names_a_later_one_that_exists() -> None:
    names = {each.file for each in read_decisions()}
    for each in read_decisions():
        if each.status.startswith("superseded"):
            [later] = re.findall(r"\]\(([^)]+)\)", each.status)
            assert later in names and later > each.file


def test_accepted_decisions_name_only_files_that_exist() -> None:
    """If the code of a decision has been removed, the status of the decision must become
    `superseded` or `dropped`."""
    named = 0
    for each in read_decisions():
        text = (FOLDER / each.file).read_text(encoding="utf-8")
        if each.status == "accepted":
            for path in re.findall(r"\b\w[\w/]*/\w+\.(?:py|sh|md|txt)\b", text):
                places = (ROOT / path, ROOT / "gspo_megatron" / path)
                assert any(place.is_file() for place in places), f"{each.file}: {path}"
                named += 1
    assert named > 20
