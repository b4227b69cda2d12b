"""Two hosts on which the host's own name stands for 127.0.1.1, as on Debian and Ubuntu. The hosts
are network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import ROOT, command_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="only root can make network namespaces, with the program ip",
    ),
]

# The program of a rank. If the user makes a mistake, this program ends as a command does: with exit
# code 2 and one line.
_RANK = """
import os, sys
import torch
import torch.distributed as dist
from gspo_megatron.platform.groups import start_processes, stop_processes
from gspo_megatron.process.failures import exit_code_of
from tests.listeners import addresses_of_listeners
def reduce():
    start_processes(timeout_minutes=1.0)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(total.item(), *addresses_of_listeners([os.getpid()]), flush=True)
    dist.barrier()
    stop_processes()
    return 0
sys.exit(exit_code_of(reduce))
"""
# The start of a host: a shell that reports that it runs, waits for a line, and then becomes the
# program of the host.
_HOST = """
set -e
mount --bind "$1" /etc/hosts
ip link set lo up
echo there
read -r
ip addr add "10.9.0.$2/24" dev "$3"
ip link set "$3" up
shift 3
exec "$@"
"""


class Host:
    def __init__(self, number: int, folder: Path, link: str, *command: str, **environ: str) -> None:
        hosts = folder / f"hosts{number}"
        names = {1: "10.9.0.1", 2: "10.9.0.2", number: "127.0.1.1"}
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{names[n]} node{n}\n" for n in (1, 2)))
        self.link = f"{link}{number}"
        words = ["unshare", "--net", "--mount", "--propagation=private", "bash", "-c", _HOST]
        self.process = subprocess.Popen(
            [*words, "host", str(hosts), str(number), self.link, *command],
            env=command_environment() | {"PYTHONPATH": str(ROOT)} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "there\n":
            pytest.skip("no network namespaces here")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def two_hosts(folder: Path, *command: str, **environ: str) -> Iterator[list[Host]]:
    link, hosts = f"gm{os.getpid()}", []
    try:
        for number in (1, 2):
            own = {"RANK": str(number - 1), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
            place = {"MASTER_ADDR": "node1", "MASTER_PORT": "29555"}
            hosts.append(Host(number, folder, link[:12] + "v", *command, **own, **place, **environ))
        first, second = hosts
        words = ["ip", "link", "add", first.link, "netns", str(first.process.pid), "type", "veth"]
        subprocess.run(
            [*words, "peer", "name", second.link, "netns", str(second.process.pid)], check=True
        )
        for host in hosts:
            host.go()
        yield hosts
    finally:
        for host in hosts:
            host.process.kill()  # the namespace ends with the process
            host.process.communicate()


def test_ranks_find_each_other_and_listen_on_the_way_between_them(tmp_path: Path) -> None:
    slurm = {"SLURM_STEP_NODELIST": "node[1-2]"}
    with two_hosts(tmp_path, sys.executable, "-c", _RANK, **slurm) as hosts:
        for number, host in enumerate(hosts, start=1):
            out, errors = host.process.communicate(timeout=150)
            assert out == f"2.0 10.9.0.{number}\n", errors[-3000:]
            assert host.process.returncode == 0
