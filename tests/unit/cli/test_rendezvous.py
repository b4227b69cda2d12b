"""The port where ranks meet and the environment each is given."""

from __future__ import annotations

import os
import socket

import pytest

from gspo_megatron.cli.rendezvous import rank_environment, reserved_port
from gspo_megatron.errors import UserError


def test_the_chosen_port_is_free_for_rank_0_and_kept_from_others() -> None:
    with reserved_port({}) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        # As torch's store opens its port.
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", port))
            store.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass


def test_two_launchers_choose_different_ports() -> None:
    with reserved_port({}) as one, reserved_port({}) as other:
        assert one != other


def test_a_port_that_is_said_and_in_use_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        said = {"MASTER_PORT": str(port)}
        with pytest.raises(UserError, match=f"MASTER_PORT = {port}.*in use"), reserved_port(said):
            pass


@pytest.mark.parametrize("text", ["0", "65536", "http", "-1"])
def test_what_is_no_port_is_refused(text: str) -> None:
    said = {"MASTER_PORT": text}
    with pytest.raises(UserError, match="legal: 1 to 65535"), reserved_port(said):
        pass


def test_ranks_of_a_machine_share_its_cores_and_meet_on_the_loopback() -> None:
    added = rank_environment({}, 1, 2, 4321)
    cores = len(os.sched_getaffinity(0))
    assert added["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert added["GLOO_SOCKET_IFNAME"] == "lo"
    assert (added["RANK"], added["LOCAL_RANK"]) == ("1", "1")
    assert (added["WORLD_SIZE"], added["LOCAL_WORLD_SIZE"]) == ("2", "2")
    assert (added["MASTER_ADDR"], added["MASTER_PORT"]) == ("127.0.0.1", "4321")
    assert rank_environment({}, 0, 10_000, 1)["OMP_NUM_THREADS"] == "1"


def test_threads_and_interface_that_are_set_stay() -> None:
    said = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth1"}
    assert not said.keys() & rank_environment(said, 0, 2, 1).keys()
