"""The launcher with real processes. If a rank fails, every other rank ends, too, and no process is
left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.programs import ROOT, wait_until

# seconds until a test gives up; long, because other programs may keep the machine busy
PATIENCE = 30.0

LAUNCHER = """
import sys
from gspo_megatron.process.failures import tell_failure
from gspo_megatron.process.launcher import launch
world_size, grace_seconds, settle_seconds, saves, *command = sys.argv[1:]
try:
    times = {"grace_seconds": float(grace_seconds), "settle_seconds": float(settle_seconds)}
    sys.exit(launch(command, int(world_size), saves_on_signals=saves == "True", **times))
except Exception as error:
    sys.exit(tell_failure(error))
"""

# The first part of the ranks' scripts. With `say`, a rank tells the test which point it has
# reached. `block` never returns.
PREAMBLE = """
import os, signal, sys, threading
from pathlib import Path
from gspo_megatron.process.failures import tell_failure
from gspo_megatron.process.ranks import join_launcher
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


@dataclass
class Launch:
    """A running launcher. The folder is an argument of the ranks, so that a test can find their
    processes."""

    folder: Path
    process: subprocess.Popen[str]

    def await_word(self, word: str, *ranks: int) -> None:
        wait_until(lambda: all((self.folder / f"{word}-{rank}").exists() for rank in ranks))

    def say(self, word: str, rank: int) -> None:
        (self.folder / f"{word}-{rank}").touch()

    def ask(self, signum: signal.Signals) -> None:
        """Send a signal to the launcher of two ranks, and wait until both ranks have received
        it."""
        self.await_word("ready", 0, 1)
        self.process.send_signal(signum)
        self.await_word("asked", 0, 1)

    def end(self) -> tuple[int, str, str]:
        """Wait until the launcher ends, and check that no rank is left. Returns exit code, stdout
        and stderr."""
        out, err = self.process.communicate(timeout=PATIENCE)
        assert self.survivors() == []
        return self.process.returncode, out, err

    def survivors(self) -> list[str]:
        """The command lines of remaining processes that have the folder as an argument."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if str(self.folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(words))
        return found


Start = Callable[..., Launch]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that writes a script to a file, after PREAMBLE, and starts the launcher on it."""
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
        path = tmp_path / "rank.py"
        path.write_text(PREAMBLE + textwrap.dedent(script))
        options = [str(world_size), str(grace), str(settle), str(saves_on_signals)]
        clean = {name: text for name, text in os.environ.items() if name != "MASTER_PORT"}
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *options, sys.executable, str(path), str(tmp_path)],
            env={**clean, "PYTHONPATH": str(ROOT), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        launched.append(Launch(tmp_path, process))
        return launched[-1]

    yield begin
    for launch in launched:
        launch.process.send_signal(signal.SIGTERM)  # the launcher may have ended already
        try:
            launch.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            # the launcher still waits for ranks that should save the run
            launch.process.kill()
            launch.process.communicate()


def test_ranks_that_end_well_end_the_launcher_with_0(start: Start) -> None:
    launch = start(
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        print(*(os.environ[name] for name in names))
        """,
        3,
    )
    assert launch.end() == (0, "0 0 3 3 127.0.0.1\n", "")


def test_all_ranks_are_told_the_same_port_and_rank_0_listens_there(start: Start) -> None:
    launch = start(
        """
        import socket
        address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        assert (rank == 0) == ("GSPO_STORE_FD" in os.environ)
        if rank == 0:
            with socket.socket(fileno=int(os.environ["GSPO_STORE_FD"])) as server:
                assert server.getsockname() == address
                say("listening")
                for _ in range(2):
                    server.accept()[0].close()
        else:
            await_word("listening", 0)
            socket.create_connection(address).close()
        """,
        3,
    )
    assert launch.end() == (0, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net/tcp is Linux's")
def test_ranks_listen_on_loopback_alone(start: Start) -> None:
    launch = start(
        """
        import torch
        import torch.distributed as dist
        from gspo_megatron.platform.groups import start_processes, stop_processes
        from tests.listeners import addresses_of_listeners
        start_processes()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        found = addresses_of_listeners([os.getpid()])
        assert set(found) == {"127.0.0.1"}, found
        if rank == 0:
            print("at", os.environ["MASTER_PORT"] in map(str, found["127.0.0.1"]))
        dist.barrier()
        stop_processes()
        """
    )
    assert launch.end() == (0, "at True\n", "")


def test_one_death_ends_all_ranks_and_names_the_cause(start: Start) -> None:
    launch = start(
        """
        if rank != 2:
            say("blocked")
            block()
        await_word("blocked", 0)
        await_word("blocked", 1)
        print("about to fail")
        raise KeyError("expert 7")
        """,
        3,
    )
    code, out, err = launch.end()
    lines = err.splitlines()
    assert (code, out) == (1, "")
    assert lines[0] == "[rank 2] about to fail"
    assert "[rank 2] KeyError: 'expert 7'" in lines
    assert lines[-1] == "rank 2 of 3 ended with exit code 1"


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 of 2 was killed by SIGKILL"),
        ("os.kill(os.getpid(), 40)", 168, "rank 1 of 2 was killed by signal 40"),
        ("sys.exit(3)", 3, "rank 1 of 2 ended with exit code 3\n"),
    ],
)
def test_how_a_rank_died_is_told_and_a_deaf_one_is_killed_after_the_grace(
    start: Start, end: str, code: int, told: str
) -> None:
    launch = start(
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("deaf")
        if rank == 1:
            await_word("deaf", 0)
            {end}
        block()
        """,
        grace=0.2,
    )
    ended, _, err = launch.end()
    assert ended == code and err.startswith(told) and len(err.splitlines()) == 1


def test_children_of_a_failed_rank_end_with_it(start: Start) -> None:
    launch = start(
        """
        import subprocess
        if rank == 1:
            wait = "import sys, threading; threading.Event().wait()"
            subprocess.Popen([sys.executable, "-c", wait, sys.argv[1]])
            sys.exit(3)
        """,
    )
    assert launch.process.wait(timeout=PATIENCE) == 3
    wait_until(lambda: launch.survivors() == [])


def test_a_lost_connection_is_not_taken_for_the_cause(start: Start) -> None:
    launch = start(
        """
        join_launcher()
        if rank == 0:
            try:
                raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
            except RuntimeError as error:
                code = tell_failure(error)
            say("lost")
            sys.exit(code)
        await_word("lost", 0)
        try:
            raise ValueError("bad shape")
        except ValueError as error:
            sys.exit(tell_failure(error))
        """,
        settle=PATIENCE,  # this time never passes, because both ranks end by themselves
    )
    code, out, err = launch.end()
    lines = err.splitlines()
    assert (code, out) == (1, "")
    assert "[rank 1] ValueError: bad shape" in lines
    assert "Connection closed" not in err
    assert lines[-2] == "failed too, and not shown: rank 0"
    assert lines[-1] == "rank 1 of 2 ended with exit code 1: ValueError: bad shape"


@pytest.mark.parametrize("blocked", [False, True])
def test_a_user_error_is_told_once_and_alone(start: Start, blocked: bool) -> None:
    """After the error, the other ranks are ended without the usual pause."""
    launch = start(
        f"""
        join_launcher()
        say("ready")
        if rank == 0 and {blocked}:
            block()
        await_word("ready", 0)
        print("a warning of some library", file=sys.stderr) if rank else None
        sys.exit(tell_failure(UserError("prompts.jsonl:3: the prompt is empty\\nand more")))
        """,
        3,
        settle=2 * PATIENCE,
    )
    assert launch.end() == (2, "", "prompts.jsonl:3: the prompt is empty\nand more\n")


def test_only_the_last_lines_of_a_rank_are_kept(start: Start) -> None:
    launch = start(
        """
        if rank == 1:
            for number in range(10_000):
                print("line", number)
            print("x" * 100_000)
            sys.exit(5)
        """,
    )
    code, out, err = launch.end()
    lines = err.splitlines()
    assert (code, out) == (5, "")
    assert len(lines) == 201  # the last 200 lines of rank 1, and a line of the launcher
    assert "[rank 1] line 9999" in lines
    assert max(map(len, lines)) < 10_000


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all_ranks(start: Start, signum: signal.Signals) -> None:
    launch = start(
        """
        def stop(signum, frame):
            say(signal.Signals(signum).name)
            sys.exit(0)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        if os.getsid(0) == os.getpid():  # out of the reach of the terminal's Ctrl-C
            say("ready")
        block()
        """,
        3,
    )
    launch.await_word("ready", 0, 1, 2)
    launch.process.send_signal(signum)
    assert launch.end() == (128 + signum, "", "")
    launch.await_word(signum.name, 0, 1, 2)


def test_a_second_signal_does_not_wait_for_the_grace(start: Start) -> None:
    launch = start(
        """
        signal.signal(signal.SIGINT, lambda *_: say("asked"))
        say("ready")
        while True:
            block()
        """,
        grace=2 * PATIENCE,
    )
    launch.ask(signal.SIGINT)
    launch.process.send_signal(signal.SIGINT)
    assert launch.end()[0] == 130


def test_ranks_die_with_a_launcher_that_is_killed(start: Start) -> None:
    launch = start(
        """
        join_launcher()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ready")
        block()
        """,
        3,
    )
    launch.await_word("ready", 0, 1, 2)
    assert len(launch.survivors()) == 4
    launch.process.kill()
    wait_until(lambda: launch.survivors() == [])


def test_a_rank_does_not_outlive_a_launcher_that_was_killed_before_it_joined(start: Start) -> None:
    launch = start(
        """
        say("starting")
        await_word("go", 0)
        join_launcher()
        say("joined")
        """,
    )
    launch.await_word("starting", 0, 1)
    launch.process.kill()
    launch.process.wait(timeout=PATIENCE)
    launch.say("go", 0)
    wait_until(lambda: launch.survivors() == [])
    assert not list(launch.folder.glob("joined-*"))


def test_sigusr1_is_passed_on_and_harmless_before_a_rank_is_ready(start: Start) -> None:
    launch = start(
        """
        def await_signal():
            received = []
            signal.signal(signal.SIGUSR1, lambda *_: received.append(True))
            say("ready")
            while not received:
                threading.Event().wait(0.01)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Python itself resets it to deadly
            say("received")
        if rank < 2:
            say("deaf")
            await_word("received", 2)  # the last to be told: the deaf ones have been
        await_signal()
        """,
        3,
    )
    launch.await_word("deaf", 0, 1)
    launch.await_word("ready", 2)
    launch.process.send_signal(signal.SIGUSR1)
    launch.await_word("ready", 0, 1)
    launch.process.send_signal(signal.SIGUSR1)
    assert launch.end() == (0, "", "")


# The script of a rank that records the signal, and ends when the test allows it.
SAVES = """
asked = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda *_: asked.append(True))
say("ready")
while not asked:
    threading.Event().wait(0.01)
say("asked")
await_word("go", 0)
"""


@pytest.fixture
def start_saving(start: Start) -> Start:
    """A function that starts ranks which save the run when they are told to stop. Ranks that do not
    save have hardly any time to end."""
    return partial(start, grace=0.1, settle=0.1, saves_on_signals=True)


SAVES_LONG = SAVES + "threading.Event().wait(0.5)  # longer than the grace\nsys.exit(75)"
SAVES_IN_VAIN = SAVES + 'join_launcher()\nsys.exit(tell_failure(UserError("the disk is full")))'


@pytest.mark.parametrize(
    ("script", "number", "code", "told"),
    [
        (SAVES_LONG, signal.SIGTERM, 75, r"told to end[^\n]*\n"),
        # the launcher prints nothing; in a real run, rank 0 prints a line
        (SAVES_LONG, signal.SIGINT, 75, ""),
        (SAVES_LONG, signal.SIGUSR1, 75, ""),
        (SAVES, signal.SIGTERM, 0, ".*"),  # a run that ends by itself during the save is finished
        (SAVES_IN_VAIN, signal.SIGTERM, 2, r".*\nthe disk is full\n"),
    ],
)
def test_the_ranks_take_the_time_they_need(
    start_saving: Start, script: str, number: signal.Signals, code: int, told: str
) -> None:
    launch = start_saving(script)
    launch.ask(number)
    launch.say("go", 0)
    ended, out, err = launch.end()
    assert (ended, out) == (code, "") and re.fullmatch(told, err, re.DOTALL), err


@pytest.mark.parametrize(("script", "code"), [(SAVES_LONG, 75), (SAVES_IN_VAIN, 2)])
def test_a_log_without_a_reader_does_not_keep_the_ranks_from_saving(
    start_saving: Start, script: str, code: int
) -> None:
    """A signal to a whole process group also ends the program `tee` that writes the log."""
    launch = start_saving(script)
    launch.await_word("ready", 0, 1)
    assert launch.process.stderr is not None
    launch.process.stderr.close()
    launch.process.stderr = None
    launch.ask(signal.SIGTERM)
    launch.say("go", 0)
    assert launch.end()[0] == code


SAVED_AT = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@SAVED_AT
def test_asked_twice_the_ranks_end_now(start_saving: Start, number: signal.Signals) -> None:
    launch = start_saving(SAVES)
    launch.ask(number)
    launch.process.send_signal(number)
    assert launch.end()[0] == 128 + number


@SAVED_AT
def test_a_rank_that_is_not_ready_yet_ends_the_others(
    start_saving: Start, number: signal.Signals
) -> None:
    launch = start_saving('if rank == 0:\n    say("ready")\n    block()\n' + SAVES)
    launch.await_word("ready", 0, 1)
    launch.process.send_signal(number)
    assert launch.end()[0] == 128 + number
