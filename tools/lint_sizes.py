"""Checks size limits of the code: 600 lines for a file, 80 lines for a function. Also checks the
package's docstrings: they must begin with a verb or a noun phrase, not with a preposition.

    python tools/lint_sizes.py [FOLDER …]

Prints each violation as `file:line: message` and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
# A docstring such as "Of each branch the place" has to be read twice.
PREPOSITIONS = {"Of", "As", "By", "To", "From", "With", "Within"}
PACKAGE = "gspo_megatron"
FOLDERS = ("gspo_megatron", "tools", "tests", "examples", "pretrain_scripts")


def oversized(path: Path) -> Iterator[str]:
    """Yield a line for each limit that a Python file exceeds."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{path}:1: {lines} lines; a file has at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1  # docstring included, decorators not
            if length > MAX_FUNCTION_LINES:
                yield (
                    f"{path}:{node.lineno}: {node.name} has {length} lines; "
                    f"a function has at most {MAX_FUNCTION_LINES}"
                )


def vague_docstrings(path: Path) -> Iterator[str]:
    """Yield a line for each docstring of the package that begins with a preposition."""
    if PACKAGE not in path.parts:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].rstrip(",:") in PREPOSITIONS:
                yield (
                    f"{path}:{getattr(node, 'lineno', 1)}: the docstring begins with "
                    f"{words[0]!r}; begin with a verb, or with what it is"
                )


def main(arguments: Sequence[str]) -> int:
    folders = [Path(name) for name in arguments or FOLDERS]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if arguments and missing:  # a missing default folder is no error
        print(f"no such folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    problems = [line for path in files for line in (*oversized(path), *vague_docstrings(path))]
    for line in problems:
        print(line)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
