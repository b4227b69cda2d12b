"""Addresses at which other hosts reach this machine, and sockets that listen there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gspo_megatron.errors import UserError

# Environment variable: the file descriptor of a socket. The launcher has opened this socket, and
# rank 0 serves torch's store on this socket.
STORE_DESCRIPTOR = "GSPO_STORE_FD"
# comma-separated names of the job's hosts that only serve rollouts
ROLLOUT_NODES = "GSPO_ROLLOUT_NODES"
_LONGEST_WAIT = 30.0  # seconds, below the time limit of a reward's call (reward.timeout_seconds)
_DISCARD = 9  # a port; nothing is sent to it
_ABROAD = "192.0.2.1"  # no machine has this address (RFC 5737), so its route is the default route


def addresses_of(host: str) -> list[str]:
    """Resolve a host's name on this machine, IPv4 first; empty if the name is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def route_to(host: str) -> str | None:
    """Return the address that this machine uses to reach the host, or None without a route."""
    for address in addresses_of(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            try:
                way.connect((address, _DISCARD))  # only looks up the route
            except OSError:
                continue
            return str(way.getsockname()[0])
    return None


def own_address(master: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address at which the other hosts of the job reach this machine.

    master: the first host of the job. On many systems a host's own name resolves to 127.0.1.1 on
    the host itself. Other hosts cannot reach this address. In this case, and if the name has
    addresses in several networks, the result is the address that this machine uses to reach another
    host. Raises UserError if no address is known, or if `master` cannot be resolved.
    """
    known = addresses_of(master)
    if not known:
        raise UserError(
            f"MASTER_ADDR = {master}: this host knows no such name; set it to a name or address of "
            "the first host of the job"
        )
    if not is_loopback(known[0]):
        own = route_to(known[0]) or known[0]
        if own in known and len(known) > 1:  # this is the first host
            return next((way for way in _ways_to_others(environ) if way in known), own)
        return own
    found = _ways_to_others(environ)
    if found or not _spans_hosts(master, environ):
        return next((way for way in found if not is_loopback(way)), known[0])
    return _way_abroad(
        f"MASTER_ADDR = {master}: is {known[0]} on this host, which other hosts cannot reach"
    )


def own_address_for_servers(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address at which hosts that only serve rollouts reach this machine.

    This machine must be the first host of the job. Raises UserError like `own_address`, and if
    there is neither a known route to these hosts nor a default route.
    """
    master = environ.get("MASTER_ADDR") or socket.gethostname()
    own = own_address(master, environ)
    if not is_loopback(own):
        return own
    unknown = [name for name in rollout_nodes(environ) if route_to(name) is None]
    if not unknown:  # all of these hosts are this machine
        return own
    return _way_abroad(
        f"{ROLLOUT_NODES} = {','.join(unknown)}: this host has no route there; MASTER_ADDR = "
        f"{master}: is {own} on this host, which other hosts cannot reach"
    )


def _ways_to_others(environ: Mapping[str, str]) -> list[str]:
    return [way for way in map(route_to, other_hosts(environ)) if way is not None]


def _way_abroad(problem: str) -> str:
    """Return this machine's address on its default route. Raises UserError if there is no default
    route."""
    way = route_to(_ABROAD)
    if way is None or is_loopback(way):
        raise UserError(f"{problem}; set it to an address of the first host of the job")
    return way


def other_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return some hosts of the job: the last host of Slurm's list, and the hosts that serve
    rollouts."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return [*last_host(nodes), *rollout_nodes(environ)]


def takes_proxy(url: str) -> bool:
    """Return whether a request to a server may go through a proxy of the environment: not if the
    server is on this machine, even if no_proxy does not name it."""
    host = ""
    with contextlib.suppress(ValueError):  # a name; or no URL, as the request will tell
        host = urlsplit(url).hostname or ""
        return not ipaddress.ip_address(host).is_loopback
    return host != "localhost"


def key_in(variable: str) -> str | None:
    """Return the key in an environment variable, or None if the variable is empty or not set.

    Blanks and line ends around the key are left out: a key from a file often ends with one, and a
    header cannot hold it.
    """
    return os.environ.get(variable, "").strip() or None


def keyed_session(url: str, key_variable: str, seconds: float, **connector: Any) -> Any:
    """Return a session of aiohttp for one server, whose requests have the API key in an environment
    variable, if it is set.

    url: of the server; no proxy is used for this machine. seconds: the time limit of a request. The
    session has no limit on connections, because its callers limit their requests, and a request
    that waits for a connection would use up its time.
    """
    import aiohttp  # not at the top: most processes have no such session

    key = key_in(key_variable)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **connector),
        timeout=aiohttp.ClientTimeout(total=seconds),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        trust_env=takes_proxy(url),
    )


async def read_answer(response: Any, most: int = 1 << 26) -> bytes:
    """Return the body of an answer of aiohttp. Raises ConnectionError if it has more than `most`
    bytes, which a broken server may send without an end."""
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        size += len(part)
        if size > most:
            raise ConnectionError(f"{response.url}: an answer of more than {most:,} bytes")
    return b"".join(parts)


async def wait_as_told(response: Any) -> None:
    """Wait as long as an overloaded server wants (HTTP 429 or 503 with Retry-After), at most 30
    seconds. The caller then asks again."""
    import asyncio  # not at the top: the launcher imports this file, and needs no event loop

    seconds = response.headers.get("Retry-After", "")
    if response.status in (429, 503) and seconds.isdecimal():  # it may also be a date
        await asyncio.sleep(min(float(seconds), _LONGEST_WAIT))


def rollout_nodes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the nodes that only serve rollouts. The job's batch script names them in
    the environment. If the list is empty, servers run on the node of rank 0."""
    return [name for each in environ.get(ROLLOUT_NODES, "").split(",") if (name := each.strip())]


def last_host(nodes: str) -> list[str]:
    """Return the last name in a Slurm node list, such as node12 in login1,node[07-08,12].

    Returns [] if the list is empty or has an unknown form.
    """
    last = re.split(r",(?![^\[]*\])", nodes)[-1]
    host = re.sub(r"\[(?:[^\]]*[,-])?([^\],-]+)\]", r"\1", last)
    return [host] if host and "[" not in host and "]" not in host else []


def listen(address: str, port: int) -> socket.socket:
    """Open a socket that listens only on this address. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def listening_address(master: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address on which the first host of a job listens for the other hosts.

    The result is an address to which the name `master` resolves, if an interface of this host has
    this address and other hosts can reach it. Otherwise the result is `own_address`.
    """
    known: Sequence[str] = addresses_of(master)
    own = own_address(master, environ)
    if is_loopback(own):
        return known[0]
    if own in known:
        return own
    return next((each for each in known if _is_here(each) and not is_loopback(each)), own)


def _is_here(address: str) -> bool:
    try:
        listen(address, 0).close()
    except OSError:
        return False
    return True


def _spans_hosts(master: str, environ: Mapping[str, str]) -> bool:
    """Return whether ranks of the job may be on other hosts."""
    if master == "localhost" or re.fullmatch(r"[\d.]+|.*:.*", master):
        return False  # the user has named a loopback address
    here = environ.get("LOCAL_WORLD_SIZE")
    return here is None or here != environ.get("WORLD_SIZE", here)
