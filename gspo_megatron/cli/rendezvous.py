"""Where the ranks of one machine meet, and what makes a process one of them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping

from gspo_megatron.errors import UserError


def rank_environment(
    environ: Mapping[str, str], number: int, world_size: int, port: int
) -> dict[str, str]:
    """The variables that make a process rank `number` of `world_size`, all on this machine.

    Threads and gloo's network interface are left as they are where `environ` sets them.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    added = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # Every rank would else take all cores for itself.
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // world_size)),
        # Gloo asks for the address of the host's name, which many a laptop cannot resolve.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    added |= {name: value for name, value in defaults.items() if name not in environ}
    return added


@contextlib.contextmanager
def reserved_port(environ: Mapping[str, str]) -> Iterator[int]:
    """A TCP port for rank 0 to listen on: MASTER_PORT where set, else one that is free.

    The port stays bound, but not listened on, inside the context: rank 0, whose store reuses
    addresses, can listen there, and no other program gets it while rank 0 is importing torch.

    Raises UserError where MASTER_PORT is no port or is in use.
    """
    said = environ.get("MASTER_PORT", "")
    if said and not (said.isascii() and said.isdigit() and 1 <= int(said) <= 65535):
        raise UserError(f"MASTER_PORT = {said!r} in the environment: not a port; legal: 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("", int(said or 0)))
        except OSError as error:
            if not said:
                raise
            raise UserError(
                f"MASTER_PORT = {said} in the environment: port {said} cannot be used "
                f"({error.strerror}); unset it to have a free one chosen"
            ) from error
        yield holder.getsockname()[1]
