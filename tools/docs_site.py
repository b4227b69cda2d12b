"""Hooks of mkdocs for `make docs`: README files of other folders become pages of the site.

Links in pages are relative paths in the repository. A link to a page of the site stays a link. A
link to any other file is replaced by the file's path, because the site does not have the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Page of the site -> file of the repository.
READMES = {"slurm.md": "slurm/README.md"} | {
    f"examples/{path.parent.name}.md": str(path.relative_to(ROOT))
    for path in sorted((ROOT / "examples").glob("*/README.md"))
}
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README files."""
    for page, path in READMES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with the links of the site. A link to a missing file stays, so that mkdocs
    refuses it."""
    return relink(markdown, page.file.src_uri)


def relink(markdown: str, page: str) -> str:
    """Replace the links of a page. page: its path in the site."""
    here = Path(READMES.get(page, f"docs/{page}")).parent
    pages = {path: name for name, path in READMES.items()}

    def link(match: re.Match[str]) -> str:
        path = os.path.normpath(here / match[1])
        if not (ROOT / path).exists():
            return match[0]
        name = path.removeprefix("docs/") if path.startswith("docs/") else pages.get(path)
        if name is None:
            return f"] (`{path}`)"
        return f"]({os.path.relpath(name, os.path.dirname(page) or '.')}{match[2] or ''})"

    # Where a link was replaced by a path, remove the brackets of its label.
    return re.sub(r"\[([^\[\]]+)\] (\(`[^`]+`\))", r"\1 \2", _LINK.sub(link, markdown))
