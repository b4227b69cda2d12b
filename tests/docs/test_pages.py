"""Every command and program in the documentation runs, or says why it does not. No link is
broken."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import LANGUAGES, PAGES, SHELLS, Block, blocks_of, parse, run_blocks
from tests.programs import ROOT, run_program
from tools.docs_site import relink

FIRST_RUN = ROOT / "docs/first_run.md"  # test_first_run.py tests this page


def faults(block: Block) -> str | None:
    """The faults in the marks of a block; None if there are none."""
    if block.language not in (*SHELLS, "python", *LANGUAGES):
        return f"language {block.language!r}; allowed: {', '.join((*SHELLS, 'python', *LANGUAGES))}"
    if block.reason is not None and len(block.reason.split()) < 2:
        return "<!-- not run: REASON --> has no reason"
    return None


def test_every_block_is_run_or_says_why_not() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    fences = sum(
        len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES
    )
    hidden = sum(page.read_text(encoding="utf-8").count("\n<!-- setup\n") for page in PAGES)
    assert fences == 2 * (len(blocks) - hidden), "a fence that tests/docs/pages.py does not see"
    assert [f"{block.place}: {fault}" for block in blocks if (fault := faults(block))] == []


@pytest.mark.timeout(900)  # long, because a machine may have much other work
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != FIRST_RUN and any(block.runs for block in blocks_of(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_blocks(blocks_of(page), tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("```bash\nfalse\n```\n", "page.md:1: exit code 1"),
        (
            'a\n```python\nprint("b c")\n```\n\n<!-- output -->\n```text\nb ... d\n```\n',
            "page.md:6",
        ),
        ('```yaml title="a.yaml"\nb: c\n```\n```sh\ngrep b: a.yaml; rm d\n```\n', "page.md:4"),
    ],
)
def test_a_block_that_fails_or_prints_something_else_is_named(
    content: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=told):
        run_blocks(parse(content, "page.md"), tmp_path)


def test_a_block_with_a_reason_is_not_run_and_one_without_is_a_fault() -> None:
    content = "<!-- not run: {} -->\n```bash\nfalse\n```\n```\nplain\n```\n"
    good, plain = parse(content.format("needs a GPU"), "page.md")
    assert not good.runs and faults(good) is None
    assert "language ''" in str(faults(plain))
    bad, _ = parse(content.format("x"), "page.md")
    assert "no reason" in str(faults(bad))


def test_links_of_the_site() -> None:
    assert relink("[a](data.md#x)", "index.md") == "[a](data.md#x)"
    assert relink("[a](../slurm/README.md)", "index.md") == "[a](slurm.md)"
    assert relink("[a](../../docs/data.md)", "examples/tiny_cpu.md") == "[a](../data.md)"
    assert relink("[a](../README.md) b", "data.md") == "a (`README.md`) b"
    assert relink("[a](nowhere.md)", "data.md") == "[a](nowhere.md)"  # mkdocs refuses this link


def test_the_site_is_built_without_warnings_and_without_other_hosts(tmp_path: Path) -> None:
    words = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path)
    run_program(sys.executable, *words, cwd=ROOT, environ={"PYTHONPATH": str(ROOT)})
    for page in tmp_path.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img)[^>]+>", page.read_text(encoding="utf-8")):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), f"{page}: {tag}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120
