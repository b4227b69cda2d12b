"""`preflight` with real processes: sound ranks, one that is slow, one that cannot take part."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_megatron.process.failures import UNFIT
from tests.programs import command_environment, gspo

PATIENCE = 240

# A rank as srun starts it, whose imports are done before anything happens to it.
_RANK = """
import os, sys, threading, time
import gspo_megatron.config.load, gspo_megatron.platform.preflight
from gspo_megatron.cli.main import main

def when_measuring(act):
    def wait():
        while "speed" not in [thread.name for thread in threading.enumerate()]:
            time.sleep(0.01)
        act()
    threading.Thread(target=wait, daemon=True).start()

if os.environ["RANK"] == "1":
    exec(os.environ["DISTURBANCE"])
sys.exit(main(["preflight", *sys.argv[1:]]))
"""

# Many others want the only core that it may use, for as long as the measurements take.
_SLOW = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
reading, writing = os.pipe()
for _ in range(15):
    if os.fork() == 0:
        os.read(reading, 1)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            pass
        os._exit(0)
when_measuring(lambda: os.write(writing, bytes(15)))
"""

# No further socket from the moment in which it begins to measure.
_BROKEN = """
import resource
def no_more_files():
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
when_measuring(no_more_files)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("data: {tokenizer: none, prompts: none}\ntraining: {precision: fp32}\n")
    return path


def run_on_hosts(config: Path, disturbance: str, *options: str) -> tuple[str, str]:
    """What rank 0 said on stdout and stderr, of a rank on each of the hosts n0, n1 and n2, where
    rank 1 is disturbed. It tells that the hosts are unfit, and all end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(3):
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "SLURMD_NODENAME": f"n{rank}",
            "DISTURBANCE": disturbance,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(config), *options],
                env=command_environment() | environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        out, err = processes[0].communicate(timeout=PATIENCE)
        assert [process.wait(timeout=PATIENCE) for process in processes] == [UNFIT, 0, 0], err
        return out, err
    finally:
        for process in processes:  # and what it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_sound_ranks_on_this_machine(config: Path) -> None:
    done = gspo("preflight", config, "parallel.layout=tp=2", "--share=0")
    assert "preflight: all hosts are fit" in done.stdout
    for measure in ("matmul", "tp all-reduce", "tp all-to-all", "tp send/recv"):
        assert measure in done.stdout
    assert "dp all-reduce" not in done.stdout  # groups of one rank have no links
    done = gspo("preflight", config, "--minimum=matmul=1e6", expect=UNFIT)
    assert f"less than 1e+06\npreflight: unfit to train on: {socket.gethostname()}" in done.stderr


@pytest.mark.full  # it measures: on a machine with other work everything is slow
@pytest.mark.skipif(sys.platform != "linux", reason="it binds a process to one core")
def test_a_slow_host_is_named_and_all_ranks_end(config: Path) -> None:
    out, err = run_on_hosts(config, _SLOW, "--share=0.5")
    named = [line for line in err.splitlines() if "matmul" in line]
    assert len(named) == 1 and named[0].startswith("n1: rank 1: matmul"), err
    assert "unfit to train on" in err and "n1" in err.splitlines()[-1]
    assert "matmul" in out


def test_a_rank_that_cannot_take_part_is_named_at_once(config: Path) -> None:
    _, err = run_on_hosts(config, _BROKEN)
    assert err.splitlines()[-1] == "preflight: unfit to train on: n1"
    assert "n1: rank 1: " in err and "open files" in err


@pytest.mark.parametrize(
    ("option", "told"),
    [("--share=1.5", "not a share from 0 to 1"), ("--minimum=gpu=3", "names: matmul, tp, pp")],
)
def test_options_that_make_no_sense(config: Path, option: str, told: str) -> None:
    assert told in gspo("preflight", config, option, expect=2).stderr
