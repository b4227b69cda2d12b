"""What the tests of the launcher share: scripts as its ranks, and a launcher that runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import gspo_megatron

ROOT = Path(gspo_megatron.__file__).parents[1]
PATIENCE = 30.0  # seconds until a test gives up, on a machine that is busy with others

LAUNCHER = """
import sys
from gspo_megatron.cli.failures import tell_failure
from gspo_megatron.cli.launch import launch
world_size, grace_seconds, settle_seconds, saves, *command = sys.argv[1:]
try:
    times = {"grace_seconds": float(grace_seconds), "settle_seconds": float(settle_seconds)}
    sys.exit(launch(command, int(world_size), saves_on_signals=saves == "True", **times))
except Exception as error:
    sys.exit(tell_failure(error))
"""

# What the ranks' scripts begin with. `say` lets the test wait for a rank; `block` never returns.
PREAMBLE = """
import os, signal, sys, threading
from pathlib import Path
from gspo_megatron.cli.failures import tell_failure
from gspo_megatron.cli.ranks import join_launcher
from gspo_megatron.errors import UserError
rank = int(os.environ["RANK"])
def say(word):
    Path(sys.argv[1], f"{word}-{rank}").touch()
def block():
    threading.Event().wait()
def await_word(word, of):
    while not Path(sys.argv[1], f"{word}-{of}").exists():
        threading.Event().wait(0.01)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@dataclass
class Launch:
    """A running launcher whose ranks can be found by the folder that is their argument."""

    folder: Path
    process: subprocess.Popen[str]

    def await_word(self, word: str, *ranks: int) -> None:
        wait_until(lambda: all((self.folder / f"{word}-{rank}").exists() for rank in ranks))

    def say(self, word: str, rank: int) -> None:
        (self.folder / f"{word}-{rank}").touch()

    def ask(self, signum: signal.Signals) -> None:
        """Send the launcher of two ranks a signal, and wait until they have it."""
        self.await_word("ready", 0, 1)
        self.process.send_signal(signum)
        self.await_word("asked", 0, 1)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, once it has ended."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def survivors(self) -> list[str]:
        """The command lines of processes that have the folder for an argument."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if str(self.folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(words))
        return found


Start = Callable[..., Launch]


@contextmanager
def launches(folder: Path) -> Iterator[Start]:
    """Gives a function that starts the launcher on a script, which it writes to a file after
    PREAMBLE."""
    launched: list[Launch] = []

    def begin(
        script: str,
        world_size: int = 2,
        grace: float = 5.0,
        settle: float = 0.3,
        *,
        saves_on_signals: bool = False,
        **environ: str,
    ) -> Launch:
        path = folder / "rank.py"
        path.write_text(PREAMBLE + textwrap.dedent(script))
        options = [str(world_size), str(grace), str(settle), str(saves_on_signals)]
        clean = {name: text for name, text in os.environ.items() if name != "MASTER_PORT"}
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *options, sys.executable, str(path), str(folder)],
            env={**clean, "PYTHONPATH": str(ROOT), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        launched.append(Launch(folder, process))
        return launched[-1]

    yield begin
    for launch in launched:
        launch.process.send_signal(signal.SIGTERM)  # harmless where it has ended
        try:
            launch.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:  # its ranks were to save themselves, and do not
            launch.process.kill()
            launch.process.communicate()
