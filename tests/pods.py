"""Pods without Kubernetes. A pod is a network namespace on a bridge, with its own name, address and
processes. It gets the variables and the command of a JobSet's container. Only root can make a
pod."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, command_environment, wait_until

NETWORK = "10.231.78"
_HEAD = (
    "ip link set lo up && ip link add bridge0 type bridge && ip link set bridge0 up && "
    "echo there && read -r _ || true"
)
# $1: the file of host names, $2: the name of the pod, $3: its address, $4: the address of its
# network card. At the end the script becomes the program, as process 1.
_POD = """
set -e
mount --bind "$1" /etc/hosts
hostname "$2"
ip link set lo up
echo there
read -r _
ip link set eth0 address "$4"
ip addr add "$3/24" dev eth0
ip link set eth0 up
shift 4
exec "$@" </dev/null
"""


def skip_without_namespaces() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can make network namespaces")
    for program in ("unshare", "nsenter", "ip", "hostname"):
        if shutil.which(program) is None:
            pytest.skip(f"no program {program}")
    trial = "ip link add bridge0 type bridge && ip link add v0 type veth peer name v1"
    done = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--", "sh", "-c", trial],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no network namespaces: {done.stderr.strip()[:200]}")


@dataclass
class Pod:
    name: str
    process: subprocess.Popen[str]
    log: Path

    def kill(self) -> None:
        """Kill all processes of the pod at once, like a power failure of its node."""
        self.process.kill()
        self.process.wait()

    def evict(self) -> None:
        """Send SIGTERM to process 1, as the kubelet does when it evicts a pod."""
        [first] = children(self.process.pid)
        os.kill(first, signal.SIGTERM)

    def wait(self, seconds: float = 200) -> int:
        """Wait until the pod ends. Returns its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name}: {self.text()[-3000:]}") from None

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Pods:
    """A network with pods. The file `hosts` takes the place of its DNS."""

    folder: Path
    head: subprocess.Popen[str]
    pods: list[Pod] = field(default_factory=list)

    @property
    def hosts(self) -> Path:
        return self.folder / "hosts"

    def know(self, *names: str) -> None:
        """Add these pod names to the file of host names. The file is changed in place, because it
        is mounted in the pods."""
        with self.hosts.open("a") as file:
            file.writelines(f"{self.address(name)} {name} {name.split('.')[0]}\n" for name in names)

    @staticmethod
    def address(name: str) -> str:
        """The address for a name. A pod that comes back gets its old address, because other pods
        may still use this address."""
        number = sum(ord(letter) * place for place, letter in enumerate(name, start=1))
        return f"{NETWORK}.{2 + number % 250}"

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> Pod:
        """Start a pod. `name` includes the domain; the host name is its first part."""
        log = self.folder / f"{name}-{len(self.pods)}.log"
        space = ["unshare", "--net", "--uts", "--mount", "--propagation=private"]
        space += ["--pid", "--fork", "--kill-child", "--mount-proc", "--"]
        words = ["bash", "-c", _POD, "pod", str(self.hosts), name.split(".")[0]]
        with log.open("w") as out:
            # The hardware address of the card also follows from the name, because other pods
            # remember it for a minute together with the pod's address.
            card = f"02:00:00:00:00:{int(self.address(name).rpartition('.')[2]):02x}"
            process = subprocess.Popen(
                [*space, *words, self.address(name), card, *command],
                cwd=self.folder,
                env=command_environment() | {"PYTHONPATH": str(ROOT)} | dict(environ),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        pod = Pod(name, process, log)
        self.pods.append(pod)
        wait_until(lambda: "there\n" in log.read_text(), process, seconds=30)
        link = f"p{len(self.pods)}"
        ends = [link, "netns", str(self.head.pid), "type", "veth"]
        peer = ["peer", "name", "eth0", "netns", str(process.pid)]
        subprocess.run(["ip", "link", "add", *ends, *peer], check=True)
        inside = ["nsenter", "--target", str(self.head.pid), "--net", "--"]
        up = ["ip", "link", "set", link, "master", "bridge0", "up"]
        subprocess.run([*inside, *up], check=True)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return pod


@contextlib.contextmanager
def network(folder: Path) -> Iterator[Pods]:
    """A network without pods."""
    skip_without_namespaces()
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    head = subprocess.Popen(
        ["unshare", "--net", "--", "sh", "-c", _HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pods = Pods(folder, head)
    try:
        assert head.stdout is not None
        assert head.stdout.readline() == "there\n"
        yield pods
    finally:
        for pod in pods.pods:
            pod.kill()
            assert pod.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                pod.process.stdin.close()
        head.kill()
        head.communicate()


# --- The containers that Kubernetes makes from a manifest ----------------------------------------

_REFERENCE = re.compile(r"\$\((\w+)\)")
_FIELD = re.compile(r"metadata\.(labels|annotations)\['([\w./-]+)'\]")


@dataclass
class Container:
    """A container of a pod: its host name with the domain, its variables, and the words of its
    command."""

    pod: str
    environ: dict[str, str]
    words: list[str]


def containers(manifest: Mapping[str, Any], job: str) -> list[Container]:
    """The containers of a replicated job in a JobSet, one for each pod."""
    name = manifest["metadata"]["name"]
    [found] = [each for each in manifest["spec"]["replicatedJobs"] if each["name"] == job]
    spec = found["template"]["spec"]
    [given] = spec["template"]["spec"]["containers"]
    made = []
    for index in range(spec["completions"]):
        metadata = {
            "labels": {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/jobset-uid": "5f0c3a52-0000-4000-8000-000000000001",
            },
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        }
        environ: dict[str, str] = {}
        for variable in given["env"]:  # in order, because a value may refer to earlier variables
            if "valueFrom" in variable:
                kind, key = _FIELD.fullmatch(
                    variable["valueFrom"]["fieldRef"]["fieldPath"]
                ).groups()
                environ[variable["name"]] = metadata[kind][key]
            else:
                environ[variable["name"]] = _expanded(variable["value"], environ)
        words = [_expanded(each, environ) for each in [*given["command"], *given.get("args", [])]]
        made.append(Container(f"{name}-{job}-0-{index}.{name}", environ, words))
    return made


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """Replace each $(NAME) by the variable's value. An unknown name raises KeyError here, although
    Kubernetes would leave it as it is."""
    return _REFERENCE.sub(lambda found: environ[found[1]], text)
