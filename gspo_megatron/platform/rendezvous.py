"""How the ranks of a run find each other: torch's store, and the network interface of gloo.

The store and the ports of the ranks ask for no password: a program that reaches one of them can
take part in the run. So store and ports listen only on the address that the ranks use, not on all
interfaces.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time

import psutil
import torch.distributed as dist

from gspo_megatron.addresses import (
    STORE_DESCRIPTOR,
    addresses_of,
    is_loopback,
    listen,
    listening_address,
    own_address,
)
from gspo_megatron.errors import UserError

_INTERFACE = "GLOO_SOCKET_IFNAME"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_logger = logging.getLogger(__name__)
_NAME_SECONDS = 60.0  # limit of the wait for a host's name, which may appear late


def join_store(timeout: datetime.timedelta) -> dist.Store:
    """Join the store of the ranks, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Returns once
    all ranks have joined. Rank 0 holds the store, or torchrun's agent if torchrun starts the ranks.
    Raises UserError if MASTER_ADDR or MASTER_PORT cannot be used."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _wait_for_name(host)
    choose_interface(host)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) or rank:
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    listener = _listener(host, port)
    address = listener.getsockname()[0]
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),  # without it the store listens on all interfaces
    )


def _listener(host: str, port: int) -> socket.socket:
    """Return the launcher's socket, which has listened from the beginning, or a new one."""
    descriptor = os.environ.pop(STORE_DESCRIPTOR, None)
    if descriptor is not None:
        os.set_inheritable(int(descriptor), False)
        return socket.socket(fileno=int(descriptor))
    address = listening_address(host)
    world_size = os.environ.get("WORLD_SIZE")
    if is_loopback(address) and os.environ.get("LOCAL_WORLD_SIZE", world_size) != world_size:
        _logger.warning(
            "MASTER_ADDR = %s: rank 0 listens on %s, which ranks on other hosts cannot reach; if "
            "there are any, set it to an address of rank 0's host",
            host,
            address,
        )
    try:
        return listen(address, port)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR = {host}, MASTER_PORT = {port}: rank 0 cannot listen on {address}, port "
            f"{port} ({error.strerror}); set them to a free port of rank 0's host"
        ) from error


def _wait_for_name(host: str) -> None:
    deadline = time.monotonic() + _NAME_SECONDS
    while not addresses_of(host) and time.monotonic() < deadline:
        time.sleep(1.0)


def choose_interface(master: str) -> None:
    """Let gloo use the network interface that leads to the first host, unless the user has named
    one. By default gloo takes the address of this host's own name, which may be 127.0.1.1."""
    if os.environ.get(_INTERFACE):
        return
    try:
        own = own_address(master)
    except UserError:
        if not addresses_of(master):
            raise
        return  # the interface is unknown here, but gloo may find it by itself
    for name, listed in psutil.net_if_addrs().items():
        addresses = [each.address.partition("%")[0] for each in listed if each.family in _FAMILIES]
        if own in addresses or (is_loopback(own) and any(map(is_loopback, addresses))):
            os.environ[_INTERFACE] = name
            return
