"""A real Slurm cluster on this machine: munged, slurmctld, and one slurmd for each virtual node.

Each daemon runs below a subreaper (subreaper.py), which reads from a pipe of this process. When
this process ends, the pipe closes and the subreaper kills the daemon with all job steps and tasks.
Because of this structure, a node can also be killed as a whole.

On loopback, the nodes are named by addresses of 127.0.0.0/8, which resolve everywhere. With
isolated=True, every node has a network namespace and a host name of its own, and a bridge in the
controller's namespace connects the nodes. Then a node cannot reach the loopback of another node.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.slurm.packages import program_environment

_SUBREAPER = Path(__file__).with_name("subreaper.py")
_START_SECONDS = 90
_COMMAND_SECONDS = 60
_NETWORK = "10.231.77"
_CPUS_PER_NODE = 4
_UNSHARE = ["unshare", "--net", "--uts", "--"]

_CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=2
MinJobAge=3600
SlurmdTimeout=300
SlurmctldTimeout=30
FirstJobId={first_job}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""

# $1: the address of this node. The controller's namespace sends one end of a veth pair. This end
# becomes the node's eth0.
_JOIN = """
hostname "$1" && ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip addr add "$1/24" dev eth0 && ip link set eth0 up
shift
exec "$@"
"""
_HEAD = """
hostname "$1" && ip link set lo up && ip link add bridge0 type bridge &&
ip addr add "$1/24" dev bridge0 && ip link set bridge0 up && touch "$2"
exec sleep infinity
"""

_TAKES_JOBS = {"idle", "mix", "alloc", "comp"}
FINISHED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class Cluster:
    """A context manager. The cluster starts on entry. On exit it ends with all its processes."""

    def __init__(self, folder: Path, prefix: Path, *, isolated: bool = False) -> None:
        """`folder`: an empty folder with a short path. `prefix`: the result of `slurm_prefix`."""
        self.folder, self.prefix, self.isolated = folder, prefix, isolated
        # Each process of pytest-xdist has a cluster of its own. A job's port follows from its
        # number, and rank 0 listens on all addresses. With equal job numbers in two clusters, one
        # of the jobs could not start.
        worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
        self._first_job = 1 + 1000 * int(worker)
        network = _NETWORK if isolated else f"127.0.{worker}"
        self.nodes = [f"{network}.{number}" for number in (11, 12)]
        self.address = f"{_NETWORK}.1" if isolated else "127.0.0.1"
        self.environ = dict(os.environ) | program_environment(prefix)
        self.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        self._hurried: set[tuple[str, str]] = set()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill every process of the cluster and of its jobs."""
        for name in reversed(list(self._daemons)):
            self.kill(name)

    # --- The actions of users ---------------------------------------------------------------------

    def run(self, *command: object, check: bool = True, **environ: str) -> str:
        """Run a client program on the controller's host. Returns its output."""
        done = subprocess.run(
            [*self._at_the_controller(), *map(str, command)],
            env=self.environ | environ,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0 or not check, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(
        self, script: Path, *arguments: object, options: Sequence[str] = (), **environ: str
    ) -> str:
        """Call sbatch. Returns the job's number."""
        return self.run("sbatch", "--parsable", *options, script, *arguments, **environ).strip()

    def job(self, number: str) -> dict[str, str]:
        """The output of `scontrol show job`, by key."""
        return self._components(number)[0]

    def _components(self, number: str) -> list[dict[str, str]]:
        """The output of `scontrol show job` for each component of a heterogeneous job. Any other
        job has one component."""
        lines = self.run("scontrol", "-o", "show", "job", number).splitlines()
        return [dict(re.findall(r"([\w/:]+)=(.*?)(?= [\w/:]+=|\s*$)", line)) for line in lines]

    def wait(
        self, number: str, condition: Callable[[dict[str, str]], bool], timeout: float = 300
    ) -> dict[str, str]:
        """Poll the job until the condition holds. Slurm holds a requeued job back for two minutes;
        this function releases it immediately."""
        deadline = time.monotonic() + timeout
        while True:
            components = self._components(number)
            job = components[0]
            if condition(job):
                return job
            assert time.monotonic() < deadline, (job, self.log(job)[-4000:])
            start = (number, job["Restarts"])
            held = ("PENDING", "BeginTime")
            is_held = all((each["JobState"], each["Reason"]) == held for each in components)
            if is_held and start not in self._hurried:
                self._hurried.add(start)
                self.run("scontrol", "update", f"JobId={number}", "StartTime=now+2")
            time.sleep(0.3)

    def finish(self, number: str, timeout: float = 300) -> dict[str, str]:
        """Wait until the job ends in any state."""
        return self.wait(number, lambda job: job["JobState"] in FINISHED, timeout)

    def ended(self, number: str, outcome: str, timeout: float = 300) -> str:
        """Wait until the job ends with this state and exit code, such as "FAILED 2:0". Returns its
        log."""
        job = self.finish(number, timeout)
        log = self.log(job)
        assert f"{job['JobState']} {job['ExitCode']}" == outcome, log[-4000:]
        return log

    def restarts(self, number: str) -> int:
        """The number of times that Slurm has requeued the job."""
        return int(self.job(number)["Restarts"])

    def clear(self) -> None:
        """Cancel all jobs, and wait until all nodes are idle."""
        for name in self.nodes:
            if name not in self._daemons:
                self.start_node(name)
        self.run("scancel", "--user", getpass.getuser(), check=False)
        self._until(lambda: not self.run("squeue", "--noheader"))
        self.wait_for_nodes()

    @staticmethod
    def log(job: Mapping[str, str]) -> str:
        """The job's output so far."""
        path = Path(job["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    # --- Failures and starts of nodes -------------------------------------------------------------

    def start_node(self, name: str) -> None:
        """Start slurmd on a node that is down."""
        slurmd = [self._program("slurmd"), "-D", "-f", self.environ["SLURM_CONF"], "-N", name]
        slurmd += ["-d", self._program("slurmstepd")]
        if not self.isolated:
            self._launch(name, self._reaped(slurmd))
            return
        joined = [*_UNSHARE, "sh", "-c", _JOIN, "sh", name, *self._reaped(slurmd)]
        process = self._launch(name, joined)
        link = f"v{self.nodes.index(name)}"
        # The veth pair of a killed node disappears with its namespace, but not immediately.
        self._until(lambda: link not in self.run("ip", "-o", "link"))
        self._until(lambda: self._has_own_network(process.pid))
        pair = ["type", "veth", "peer", "name", "eth0", "netns", process.pid]
        self.run("ip", "link", "add", link, *pair)
        self.run("ip", "link", "set", link, "master", "bridge0", "up")

    def wait_for_nodes(self) -> None:
        """Wait until every node can run jobs or is running jobs."""

        def ready() -> bool:
            text = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t", check=False)
            states = dict(line.split() for line in text.splitlines())
            return len(states) == len(self.nodes) and set(states.values()) <= _TAKES_JOBS

        self._until(ready)

    # --- Internal functions -----------------------------------------------------------------------

    def _start(self) -> None:
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o700)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        host = self.address if self.isolated else socket.gethostname().partition(".")[0]
        (self.folder / "slurm.conf").write_text(self._conf(host))
        if self.isolated:
            up = self.folder / "network-is-up"
            head = ["sh", "-c", _HEAD, "sh", self.address, str(up)]
            self._launch("head", [*_UNSHARE, *self._reaped(head)])
            self._until(up.exists)
        munged = [self._program("munged"), "--foreground", "--force", f"--key-file={key}"]
        munged += [f"--socket={key.with_name('socket')}", f"--pid-file={key.with_name('pid')}"]
        munged += [f"--log-file={key.with_name('log')}", f"--seed-file={key.with_name('seed')}"]
        self._launch("munged", self._reaped(munged))
        self._until(key.with_name("socket").exists)
        slurmctld = [self._program("slurmctld"), "-D", "-f", self.environ["SLURM_CONF"]]
        self._launch("slurmctld", [*self._at_the_controller(), *self._reaped(slurmctld)])
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_nodes()

    def _conf(self, host: str) -> str:
        ports = _free_ports(1 + len(self.nodes))
        lines = []
        for name, port in zip(self.nodes, ports[1:], strict=True):
            own, address = (name, name) if self.isolated else (host, "127.0.0.1")
            lines.append(
                f"NodeName={name} NodeHostname={own} NodeAddr={address} Port={port} "
                f"CPUs={_CPUS_PER_NODE} State=UNKNOWN"
            )
        return _CONF.format(
            host=host,
            address=self.address,
            port=ports[0],
            folder=self.folder,
            first_job=self._first_job,
            user=getpass.getuser(),
            plugins=next(self.prefix.glob("usr/lib/*/slurm-wlm")),
            nodes="\n".join(lines),
        )

    def _program(self, name: str) -> str:
        return str(self.prefix / "usr" / "sbin" / name)

    def _reaped(self, command: Sequence[str]) -> list[str]:
        return [sys.executable, "-I", str(_SUBREAPER), *command]

    def _at_the_controller(self) -> list[str]:
        if not self.isolated:
            return []
        return ["nsenter", "--target", str(self._daemons["head"].pid), "--net", "--uts", "--"]

    def _launch(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                command,
                env=self.environ,
                cwd=self.folder,
                stdin=subprocess.PIPE,  # the subreaper waits for the end of this pipe
                stdout=out,
                stderr=out,
                start_new_session=True,  # a Ctrl-C in the terminal reaches only pytest
            )
        self._daemons[name] = process
        return process

    def kill(self, name: str) -> None:
        """Kill a daemon and all processes below it. For a node, this has the effect of a power
        failure."""
        process = self._daemons.pop(name)
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @staticmethod
    def _has_own_network(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
        return False

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            ended = [name for name, process in self._daemons.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                texts = [f"the cluster does not start; ended: {', '.join(ended) or 'none'}"]
                for path in sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")]):
                    texts.append(f"{path.name}: {path.read_text(errors='replace')[-1500:]}")
                raise AssertionError("\n".join(texts))
            time.sleep(0.1)


def why_not_isolated() -> str | None:
    """The reason why this process cannot make network namespaces; None if it can."""
    for program in ("unshare", "nsenter", "ip", "hostname"):
        if shutil.which(program) is None:
            return f"no {program}"
    trial = "ip link add bridge0 type bridge && ip link add v0 type veth peer name v1"
    done = subprocess.run(
        [*_UNSHARE, "sh", "-c", trial],
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
        check=False,
    )
    return None if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()[:200]}"


def _free_ports(count: int) -> list[int]:
    """Free ports. They are below the ports of jobs, and below the ports that the system gives to
    processes. So no other process takes such a port before its daemon does."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(15000, 20000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.add(port)
    return sorted(found)
