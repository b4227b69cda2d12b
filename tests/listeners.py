"""The addresses on which processes listen, from Linux's /proc/net/tcp and tcp6."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections import defaultdict
from collections.abc import Iterable

_LISTENS = "0A"


def addresses_of_listeners(pids: Iterable[int]) -> dict[str, list[int]]:
    """For each address, the ports on which these processes listen with TCP."""
    sockets = set().union(*(_sockets_of(pid) for pid in pids))
    found = defaultdict(list)
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENS and inode in sockets:
                    address, port = local.split(":")
                    found[_readable(address)].append(int(port, 16))
    return dict(found)


def _sockets_of(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                if match := re.fullmatch(r"socket:\[(\d+)\]", link):
                    found.add(match[1])
    return found


def _readable(address: str) -> str:
    """Convert an address from the form in /proc/net: words of four bytes in the byte order of this
    machine."""
    words = (
        int(address[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(address), 8)
    )
    return str(ipaddress.ip_address(b"".join(words)))
