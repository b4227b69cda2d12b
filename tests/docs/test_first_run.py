"""docs/first_run.md, followed block by block in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import blocks_of, run_blocks
from tests.programs import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_can_be_followed_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    """In tests/e2e/test_release.py a new interpreter trains with a reward in the current folder."""
    run_blocks(blocks_of(ROOT / "docs/first_run.md"), tmp_path)
