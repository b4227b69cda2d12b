"""Pieces of the report as HTML text; everything that comes from a run is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

_STYLE = """
:root { --ink: #22303c; --muted: #66727f; --line: #e3e7eb; --accent: #2563a8; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f8; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 2px; }
h2 { font-size: 18px; margin: 36px 0 10px; }
p.path { color: var(--muted); margin: 0 0 20px; overflow-wrap: anywhere; }
section.card, details { background: #fff; border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; margin: 12px 0; overflow-x: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0; }
.tile { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px;
  min-width: 110px; flex: 1 1 auto; }
.tile span { display: block; color: var(--muted); font-size: 13px; }
.tile b { font-size: 22px; white-space: nowrap; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 600; font-size: 13px; }
th, td { text-align: right; padding: 6px 8px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; }
table.text th, table.text td { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere;
  vertical-align: top; }
table.text td { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
img { width: 100%; height: auto; display: block; }
summary { cursor: pointer; font-weight: 600; }
pre { margin: 10px 0 0; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@page { size: A3; margin: 10mm; }
"""


def page(title: str, body: Sequence[str]) -> str:
    """A whole document that needs no other file."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>",
            *body,
            "</main></body></html>\n",
        ]
    )


def heading(title: str, path: str) -> str:
    return f'<h1>{escape(title)}</h1><p class="path">{escape(path)}</p>'


def section(title: str, *content: str) -> str:
    return f"<h2>{escape(title)}</h2>" + "".join(content)


def card(content: str) -> str:
    return f'<section class="card">{content}</section>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Name and value pairs, large."""
    cells = (
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b></div>'
        for name, value in figures
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text: bool = False) -> str:
    """A table of figures, or of text whose spaces count."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    kind = ' class="text"' if text else ""
    return f"<table{kind}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def image(path: Path, description: str) -> str:
    """A PNG inside the document."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{data}">'


def fold(title: str, content: str) -> str:
    """Text that is shown when asked for."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(content)}</pre></details>"
