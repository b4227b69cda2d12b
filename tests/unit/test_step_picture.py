"""docs/step.svg shows the step as rl/loop.py runs it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tools import draw_step


def test_the_picture_is_that_of_the_code() -> None:
    """If the picture is out of date, `python tools/draw_step.py` draws it again."""
    assert draw_step.PICTURE.read_text(encoding="utf-8") == draw_step.svg()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("plan = plan_step(", "plan = check_plan("),
        ("index = gather_index(", "index = gather_lengths("),
        ("updater.compute_old_logprobs(mini_batches)", "pass"),
    ],
)
def test_a_changed_step_has_to_be_drawn_again(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (draw_step.PACKAGE / "rl" / "loop.py").read_text(encoding="utf-8")
    assert source.count(old) == 1
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "loop.py").write_text(source.replace(old, new))
    monkeypatch.setattr(draw_step, "PACKAGE", tmp_path)
    monkeypatch.setattr(draw_step, "shapes", lambda: defaultdict(str))
    with pytest.raises(SystemExit, match="of rl/loop.py calls"):
        draw_step.svg()
