"""The figures in the pages equal those in docs/figures.yaml."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
import yaml

from tests.programs import ROOT
from tools import figures
from tools.figures import FILE, MARK, PAGES, filled_in, main, read_figures


def test_pages_have_the_measured_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out + "run `python tools/figures.py`"


def test_every_figure_is_quoted() -> None:
    quoted = {name for page in PAGES for name in MARK.findall(page.read_text(encoding="utf-8"))}
    assert set(read_figures()) == quoted


def test_measurements_say_when_where_and_how() -> None:
    for measurement in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        assert set(measurement) == {"command", "date", "machine", "figures"}
        assert isinstance(measurement["date"], datetime.date)
        assert measurement["machine"]
        command = measurement["command"]
        if command is not None:
            program = command.split()[0 if command.startswith("gspo-megatron") else 1]
            assert program == "gspo-megatron" or (ROOT / program).is_file(), command


def test_all_measured_figures_of_limits_are_from_the_file() -> None:
    section = (
        (ROOT / "docs/limits.md").read_text(encoding="utf-8").partition("## Measured figures")[2]
    )
    rows = re.findall(r"^\| [^|]+ \| ([^|]*\d[^|]*) \|$", section, re.MULTILINE)
    assert len(rows) > 8
    for row in rows:
        rest = figures.QUOTE.sub("", row)
        assert not re.search(r"\d", re.sub(r"r[23]|H200", "", rest)), row


def test_a_planted_mistake_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "limits.md"
    right = (ROOT / "docs/limits.md").read_text(encoding="utf-8")
    page.write_text(right.replace("2.73<!-- figure", "1.31<!-- figure"))
    assert page.read_text() != right
    monkeypatch.setattr(figures, "PAGES", (page,))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert main(["--check"]) == 1
    assert "limits.md: has other figures" in capsys.readouterr().out
    assert main([]) == 0  # writes the figures into the pages
    assert page.read_text() == right


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a ratio of 2.0<!-- figure: nobody.measured -->", "no such figure"),
        ("no number <!-- figure: rl_step.small.ratio -->", "no value before the mark"),
    ],
)
def test_a_wrong_mark_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        filled_in(text, read_figures())


@pytest.mark.parametrize(
    "value", ["2.73", "18,806 to 20,218", "8.8e-7", "0.29%", "31.2% to 100.0%"]
)
def test_values_are_replaced_whole(value: str) -> None:
    text = f"It is {value}<!-- figure: a.b --> now."
    assert filled_in(text, {"a.b": "1"}) == "It is 1<!-- figure: a.b --> now."
