"""The commands, options, keys, paths and make targets that the pages name must exist."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.cli.main import COMMANDS
from gspo_megatron.config.keys import list_keys
from gspo_megatron.config.load import STAGES
from tests.programs import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "slurm/README.md",
    *sorted(ROOT.glob("examples/*/README.md")),
]
# An example's script shows calls of itself in its first lines.
SCRIPTS = sorted(ROOT.glob("examples/*/run.sh"))
KEYS = {key.name for stage in STAGES for key in list_keys(stage)}
SECTIONS = {name.partition(".")[0] for name in KEYS}
# Folders whose paths a page may name in backticks, and files that commands write there.
ROOTS = ("gspo_megatron/", "tests/", "tools/", "docs/", "examples/", "slurm/", "requirements/")
ROOTS += ("pretrain_scripts/",)
PATH = re.compile(rf"(?<![\w./<-])((?:{'|'.join(ROOTS)})[\w./-]+\.\w+)")
# Allowed, although not in the repository: a file that the user writes, and a script of Megatron-LM.
ELSEWHERE = {"slurm/site.sh", "tools/preprocess_data.py"}
BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    commands = argparse.ArgumentParser().add_subparsers()
    for command in COMMANDS:
        command.add_parser(commands)
    return dict(commands.choices)


PARSERS = parsers()


def options(parser: argparse.ArgumentParser) -> set[str]:
    """All options of a command and of its subcommands (`convert megatron-to-hf`)."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found.update(*(options(each) for each in action.choices.values()))
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The words after `gspo-megatron`, in code blocks and in backticks."""
    blocks = re.findall(r"^ *```(?:bash|sh|text)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    rest = BLOCK.sub("", text)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    lines += re.findall(r"`([^`]+)`", rest)
    for line in lines:
        found = re.search(r"(?:^|[ |=])gspo-megatron ([^#|;&<>]+)", line)
        if found:
            try:
                yield shlex.split(found[1])
            except ValueError:  # the quotation continues in the next line
                yield found[1].split()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        if words[0].startswith("-") or not words[0].islower():
            continue  # `gspo-megatron COMMAND --help`
        assert words[0] in PARSERS, f"{page.name}: no command {words[0]}"
        known = options(PARSERS[words[0]])
        for word in words[1:]:
            if word.startswith("--"):
                assert word.partition("=")[0] in known, f"{page.name}: {words[0]} has no {word}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_keys_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "coming_from.md":  # the first column has keys of other projects
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
        text = "\n".join(cells[1] for cells in rows if len(cells) > 1)
    if page.name == "configuration.md":  # the first column has keys of the section above
        text = re.sub(r"^\| `[^`]+` \|", "|", text, flags=re.MULTILINE)
    given = [word for words in commands(text) for word in words if "=" in word]
    given += re.findall(r"`([a-z_]+\.[a-z0-9_.]+)(?:[:= ][^`]*)?`", text)
    for word in given:
        name = word.partition("=")[0]
        if name.partition(".")[0] not in SECTIONS or "." not in name:
            continue
        if re.search(r"\.(?:py|md|sh|yaml|json|jsonl|txt|html|dir)$", name) and name not in KEYS:
            continue  # a file, such as evaluation.jsonl
        path = re.sub(r"^(evaluation\.suites)\.\w+", r"\1.NAME", name)
        free = re.match(r"(model|optimizer)\.megatron\.|parallel\.ddp\.|[\w.]+\.options\.", path)
        known = {name, path.replace("suites.NAME.", "suites.<name>.")} & KEYS
        assert known or free or path.startswith("evaluation.suites.NAME"), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for word in PATH.findall(text):
        if not re.search(r"\.(py|md|sh|yaml|json|toml|sbatch|txt|png|svg|jsonl)$", word):
            continue  # a folder or a module
        if re.search(r"[A-Z]{3,}", Path(word).stem.replace("README", "")) or word in ELSEWHERE:
            continue  # rewards/NAME.py
        assert (ROOT / word).exists(), f"{page.name}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    shown = re.findall(r"^make ([a-z-]+)", "\n".join(BLOCK.findall(text)), re.MULTILINE)
    for target in shown + re.findall(r"`make ([a-z-]+)", BLOCK.sub("", text)):
        assert target in targets, f"{page.name}: make {target}"


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=ids)
def test_a_command_with_grpo_sets_both_clip_bounds_or_none(page: Path) -> None:
    """The bound that it leaves out would be that of the configuration, which is for GSPO."""
    text = re.sub(r"\\\n#?\s*", "", page.read_text(encoding="utf-8"))
    for line in text.splitlines():
        if "objective.name=grpo" in line:
            bounds = [name for name in ("clip_low", "clip_high") if f"objective.{name}=" in line]
            assert len(bounds) != 1, f"{page.name}: {line}"


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (test_commands_and_their_options_exist, "`gspo-megatron trian config.yaml`"),
        (test_commands_and_their_options_exist, "```bash\ngspo-megatron train a.yaml --fesh\n```"),
        (test_keys_exist, "set `rollout.group_sizes: 8`"),
        (test_keys_exist, "```bash\ngspo-megatron train a.yaml rollout.group_sizes=8\n```"),
        (test_paths_exist, "see gspo_megatron/rl/lockstep.py"),
        (test_links_lead_to_files, "see [it](nowhere.md)"),
        (test_make_targets_exist, "`make everything`"),
        (
            test_a_command_with_grpo_sets_both_clip_bounds_or_none,
            "# bash run.sh objective.name=grpo objective.clip_low=0.2 \\\n#     logging.dir=new",
        ),
    ],
)
def test_a_planted_mistake_is_found(check: Any, text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match="page.md: "):
        check(page)
