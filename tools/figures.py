"""Writes the measured results of docs/figures.yaml into the pages that quote them.

    python tools/figures.py            write them
    python tools/figures.py --check    print each page that differs; exit with 1 if there is any

A page quotes a figure as its value and a comment with its name. Readers do not see the comment:

    2.73<!-- figure: rl_step.small.ratio -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "figures.yaml"
PAGES = (
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
)
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?%?"
QUOTE = re.compile(
    rf"(?P<value>{_NUMBER}(?: to {_NUMBER})?)(?P<mark><!-- figure: (?P<name>\S+) -->)"
)
MARK = re.compile(r"<!-- figure: (\S+) -->")


def read_figures() -> dict[str, str]:
    """Return the value of each figure, as it is written in the file."""
    figures: dict[str, str] = {}
    # BaseLoader keeps numbers as they are written: 4.80 is not 4.8.
    for measurement in yaml.load(FILE.read_text(encoding="utf-8"), yaml.BaseLoader):
        for name, value in measurement["figures"].items():
            if name in figures:
                raise ValueError(f"{FILE}: {name} is there twice")
            figures[name] = value
    return figures


def filled_in(text: str, figures: Mapping[str, str]) -> str:
    """Return a page's text with the measured values. Raises ValueError if a mark is wrong."""
    if len(QUOTE.findall(text)) != len(MARK.findall(text)):
        quoted = {match["name"] for match in QUOTE.finditer(text)}
        without = [name for name in MARK.findall(text) if name not in quoted]
        raise ValueError(f"no value before the mark of {', '.join(without)}")

    def value(match: re.Match[str]) -> str:
        if match["name"] not in figures:
            raise ValueError(f"{match['name']}: docs/figures.yaml has no such figure")
        return figures[match["name"]] + match["mark"]

    return QUOTE.sub(value, text)


def main(arguments: Sequence[str]) -> int:
    figures, status = read_figures(), 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = filled_in(text, figures)
        if new == text:
            continue
        if "--check" in arguments:
            print(f"{page.relative_to(ROOT)}: has other figures than docs/figures.yaml")
            status = 1
        else:
            page.write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
