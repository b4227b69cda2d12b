"""The entry point: parses the command line and runs one command. Exit codes:

0: done. 2: an error that the user can correct; only its message is printed. 1: any other error,
with its traceback. 130: interrupted. 141: the reader of the output closed the pipe, and nothing is
printed.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from typing import Any

import gspo_megatron
from gspo_megatron.cli import (
    ablate,
    check,
    convert,
    doctor,
    evaluate,
    new,
    play,
    prompts,
    report,
    score,
    serve,
    tasks,
    train,
    verify,
)
from gspo_megatron.errors import UserError
from gspo_megatron.process.failures import exit_code_of, make_streams_safe
from gspo_megatron.process.ranks import join_launcher
from gspo_megatron.process.signals import heed_sigterm_as_process_1, see_ends_of_children

COMMANDS = (
    new, train, check, verify, play, evaluate, score, convert, serve, tasks, prompts, report,
    ablate, doctor,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gspo-megatron ARGV...` and return its exit code."""
    join_launcher()
    make_streams_safe()
    heed_sigterm_as_process_1()
    see_ends_of_children()
    return exit_code_of(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = parse(argv)
    except SystemExit as ended:  # argparse has printed the help, or what is wrong
        return int(ended.code or 0)
    try:
        return arguments.run(arguments)
    except OSError as error:
        if error.errno == errno.ENOENT and error.filename is None:
            if "temporary directory" in str(error):  # of tempfile, which tries to write into each
                raise UserError(
                    f"{error.strerror}: none of these can be written and has room; name a folder "
                    "in TMPDIR"
                ) from error
            # of os.getcwd
            raise UserError("the current folder was removed; change to another one") from error
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        raise UserError(f"{error.filename}: {error.strerror}") from error
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop from"):  # of Path.resolve, before Python 3.13
            raise
        raise UserError(f"{error}; name another path") from error


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        """Print like argparse, but raise the error of a stdout that takes no output."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. `run` in the result is the command's function. Raises SystemExit."""
    parser = _Parser(prog="gspo-megatron", description=gspo_megatron.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=gspo_megatron.__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    if "#" in words:  # a pasted line with its comment: an interactive zsh passes the comment on
        words = words[: words.index("#")]
    arguments, extra = parser.parse_known_args(words)
    # argparse fills a list of positionals only once. In `train a.yaml --nproc 2 training.steps=5`
    # argparse does not take the last word, although this word is an override like any other.
    unknown = [text for text in extra if text.startswith("-") or arguments.list_name is None]
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if extra:
        getattr(arguments, arguments.list_name).extend(extra)
    return arguments
