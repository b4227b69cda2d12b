"""Writes docs/decisions/index.md, the list of all decisions by room, from the decisions' files.

python tools/make_decisions_index.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "decisions"
# The rooms, in the order in which data go through them. A room is a folder of the package or the
# repository.
ROOMS = (
    *("config", "families", "data", "rewards", "environments"),
    *("rollout", "rollout/megatron", "rollout/vllm"),
    *("batching", "objectives", "routing", "models", "rl", "supervised"),
    *("checkpoint", "hf", "evaluation", "verify", "estimate", "observe"),
    *("platform", "process", "slurm", "examples", "tests", "tools", "docs"),
)
HEADER = """# Decisions

Each file describes a decision that a newcomer may question: the reason, and the alternatives that
were tried and measured. If another decision replaces it, the file stays, and its status names the
other decision.
`python tools/make_decisions_index.py` writes this list.
"""
_HEAD = re.compile(
    r"# (?P<number>\d{4})\. (?P<title>.+)\n\n"
    r"- Date: (?P<date>\d{4}-\d\d-\d\d)\n"
    r"- Status: (?P<status>accepted|superseded by .+|dropped: .+)\n"
    r"- Room: (?P<room>\S+)\n\n"
    r"## (?:Context|Decision)\n"
)


@dataclass(frozen=True)
class Decision:
    file: str  # NNNN-slug.md
    number: str
    title: str
    date: str
    status: str
    room: str


def read_decisions() -> list[Decision]:
    """Return all decisions, by number. Raises ValueError for a file without a decision's head."""
    decisions = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        head = _HEAD.match(path.read_text(encoding="utf-8"))
        if head is None or head["room"] not in ROOMS or head["number"] != path.name[:4]:
            raise ValueError(
                f"{path}: not a decision's head; allowed: '# NNNN. TITLE' with the number of the "
                "file's name, '- Date: YYYY-MM-DD', '- Status: accepted', 'superseded by …' or "
                f"'dropped: …', '- Room: …' with one of {', '.join(ROOMS)}, then '## Context' or "
                "'## Decision'"
            )
        decisions.append(Decision(path.name, **head.groupdict()))
    return decisions


def index(decisions: list[Decision]) -> str:
    """Return the text of the page."""
    parts = [HEADER]
    for room in ROOMS:
        rows = [each for each in decisions if each.room == room]
        lines = []
        for each in rows:
            kind = each.status.partition(" ")[0].rstrip(":")
            after = "" if kind == "accepted" else f" ({kind})"
            lines.append(f"- {each.number} [{each.title}]({each.file}), {each.date}{after}")
        if lines:
            parts.append(f"## {room}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (FOLDER / "index.md").write_text(index(read_decisions()), encoding="utf-8")
