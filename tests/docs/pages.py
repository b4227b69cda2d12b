"""The code blocks of a page. They are run as a reader would run them: in order, in one new folder.

A page marks its blocks in these ways. Marks are HTML comments, so a reader does not see them:

    ```bash, ```sh, ```shell, ```python    run; a failing block fails the test
    ```yaml title="my.yaml"                saved under that name, whatever the language
    <!-- not run: REASON --> before it     not run
    <!-- shorter: WORDS --> before it      run with these words in each `gspo-megatron train`
    <!-- output --> before a ```text       the output of the block above; `...` stands for any text
    <!-- setup, then lines of bash, -->    run like a block, to prepare what the page assumes

Every block must name its language. A block of another kind (yaml, json, text) is only read. The new
folder has links to the repository's folders, for commands like `bash examples/...`.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import forks
from tests.programs import ROOT, command_environment

PAGES = sorted(
    [ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "slurm/README.md"]
    + [*ROOT.glob("examples/*/README.md")]
)
SHELLS, LANGUAGES = ("bash", "sh", "shell"), ("yaml", "json", "text", "toml", "mermaid")
LINKED = ("examples", "slurm", "tools", "pretrain_scripts", "docs")
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<body>.*?)^ *```$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_REASON, _SHORTER = "not run: ", "shorter: "
_TRAIN = re.compile(r"^gspo-megatron train \S+", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block, or a hidden one in a comment."""

    place: str  # "file:line"
    language: str
    text: str
    file: str | None  # the name under which the block is saved instead of run
    reason: str | None  # the reason why it is not run
    is_output: bool  # whether it shows the output of the block before

    @property
    def runs(self) -> bool:
        if self.file is not None or self.reason is not None or self.is_output:
            return False
        return self.language in (*SHELLS, "python")


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    return list(parse(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))))


def parse(content: str, name: str) -> Iterator[Block]:
    """The blocks of a page's Markdown."""
    for found in _FENCE.finditer(content):
        place = f"{name}:{content.count(chr(10), 0, found.start()) + 1}"
        if found["setup"] is not None:
            yield Block(place, "bash", found["setup"], None, None, False)
            continue
        mark, info, indent = found["mark"] or "", found["info"], found["indent"]
        text = re.sub(f"^{indent}", "", found["body"], flags=re.MULTILINE)
        language = info.split(" ")[0]
        title = re.search(r'title="([^"]+)"', info)
        reason = mark.removeprefix(_REASON).strip() if mark.startswith(_REASON) else None
        if mark.startswith(_SHORTER):
            text = _TRAIN.sub(rf"\g<0> {mark.removeprefix(_SHORTER)}", text)
        yield Block(place, language, text, title and title[1], reason, mark == "output")


def run_blocks(blocks: Iterable[Block], folder: Path, timeout: float = 550) -> None:
    """Run the blocks of a page in `folder`. An error names the block and shows its output. The
    program `gspo-megatron` is forked (tests/forks.py)."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    environment = command_environment() | {
        **forks.shell_environ(),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    printed = ""
    for block in blocks:
        if block.file is not None:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.is_output:
            same = doctest.OutputChecker().check_output(
                block.text, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            )
            assert same, f"{block.place}: the block above printed\n{printed}\nnot\n{block.text}"
        elif block.runs:
            shell = block.language in SHELLS
            command = ["bash", "-euo", "pipefail", "-c"] if shell else [sys.executable, "-c"]
            done = subprocess.run(
                [*command, block.text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
            printed = done.stdout
            said = printed[-3000:] + done.stderr[-3000:]
            assert done.returncode == 0, f"{block.place}: exit code {done.returncode}\n{said}"
