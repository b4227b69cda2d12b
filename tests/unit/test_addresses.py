"""The choice of the address by which other hosts reach a host, even if the host's own name stands
for a loopback address."""

from __future__ import annotations

import os
import socket

import pytest

from gspo_megatron import addresses
from gspo_megatron.addresses import (
    last_host,
    listen,
    listening_address,
    other_hosts,
    own_address,
    own_address_for_servers,
    route_to,
)
from gspo_megatron.errors import UserError
from gspo_megatron.platform import rendezvous

# The names on a host that is set up like Debian: the host's own name stands for a loopback address.
NAMES = {
    "node1": ["127.0.1.1"],
    "node2": ["10.9.0.2"],
    "far": ["198.51.100.7"],
    "twice": ["127.0.1.1", "10.9.0.1"],
    "both": ["10.9.0.1", "10.8.0.1"],
    "10.9.0.2": ["10.9.0.2"],
    "127.0.1.1": ["127.0.1.1"],
    "127.0.0.1": ["127.0.0.1"],
    "localhost": ["127.0.0.1"],
}
OWN = "10.9.0.1"


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The routes of this host: name or address of another host -> this host's own address on the
    way to it. A test may add a route."""
    ways = {"10.9.0.2": OWN, "node2": OWN, "127.0.1.1": "127.0.0.1", "node1": "127.0.0.1"}
    monkeypatch.setattr(addresses, "addresses_of", lambda host: NAMES.get(host, []))
    monkeypatch.setattr(addresses, "route_to", ways.get)
    return ways


def test_the_way_to_the_first_host_decides(debian: dict[str, str]) -> None:
    assert own_address("node2", {}) == OWN
    assert own_address("10.9.0.2", {}) == OWN


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_STEP_NODELIST": "node[1-2]"},
        {"SLURM_JOB_NODELIST": "node1,node2"},
        {"GSPO_ROLLOUT_NODES": "node2"},
    ],
)
def test_on_the_first_host_the_way_to_another_one_decides(
    debian: dict[str, str], environ: dict[str, str]
) -> None:
    assert own_address("node1", environ) == OWN
    assert listening_address("node1", environ) == OWN


def test_on_one_host_all_ranks_meet_where_its_name_leads(debian: dict[str, str]) -> None:
    alone = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    for name, address in (("node1", "127.0.1.1"), ("localhost", "127.0.0.1")):
        assert own_address(name, alone) == listening_address(name, alone) == address
    # the user chose this address
    assert own_address("127.0.0.1", {"WORLD_SIZE": "2"}) == "127.0.0.1"
    # All nodes of a Slurm job may be this host.
    assert own_address("node1", {"SLURM_STEP_NODELIST": "127.0.1.1"}) == "127.0.1.1"


def test_without_a_known_host_the_default_route_decides(debian: dict[str, str]) -> None:
    several = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    with pytest.raises(UserError) as told:
        own_address("node1", several)
    assert str(told.value) == (
        "MASTER_ADDR = node1: is 127.0.1.1 on this host, which other hosts cannot reach; set it to "
        "an address of the first host of the job"
    )
    debian["192.0.2.1"] = OWN
    assert own_address("node1", several) == OWN


def test_a_name_that_nobody_knows_is_told(debian: dict[str, str]) -> None:
    with pytest.raises(UserError, match="MASTER_ADDR = nodd1: this host knows no such name"):
        own_address("nodd1", {})


def test_servers_on_hosts_without_a_known_way_are_told_no_loopback(debian: dict[str, str]) -> None:
    alone = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    for master in ("node1", "localhost"):
        told = {**alone, "MASTER_ADDR": master}
        # The servers are on this host, or on a host whose name is known.
        assert own_address_for_servers({**told, "GSPO_ROLLOUT_NODES": "node1"}).startswith("127.")
        assert own_address_for_servers({**told, "GSPO_ROLLOUT_NODES": "node2"}) == OWN
    lost = {**alone, "MASTER_ADDR": "node1", "GSPO_ROLLOUT_NODES": "node1,nodd9"}
    with pytest.raises(UserError) as refused:
        own_address_for_servers(lost)
    assert str(refused.value) == (
        "GSPO_ROLLOUT_NODES = nodd9: this host has no route there; MASTER_ADDR = node1: is "
        "127.0.1.1 on this host, which other hosts cannot reach; set it to an address of the first "
        "host of the job"
    )
    debian["192.0.2.1"] = OWN
    assert own_address_for_servers(lost) == OWN
    # The ranks, which are all on this host, still meet at the address of this host's name.
    assert listening_address("node1", {**alone, "GSPO_ROLLOUT_NODES": "nodd9"}) == "127.0.1.1"


def test_of_several_addresses_the_one_on_the_way_to_the_others_counts(
    debian: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_is_here", lambda address: True)
    debian |= {"10.9.0.1": "10.9.0.1", "far": "10.8.0.1"}
    slurm = {"SLURM_STEP_NODELIST": "both,far"}
    assert own_address("both", slurm) == listening_address("both", slurm) == "10.8.0.1"
    assert own_address("both", {}) == listening_address("both", {}) == "10.9.0.1"
    # The route to the host `far` begins at an address that the name does not stand for.
    debian["far"] = "172.16.0.1"
    assert own_address("both", slurm) == listening_address("both", slurm) == "10.9.0.1"
    # The name belongs to another host.
    debian["10.9.0.1"] = "10.9.0.2"
    assert own_address("both", slurm) == "10.9.0.2"


def test_gloo_is_left_alone_where_nothing_tells_the_way(
    debian: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "GSPO_ROLLOUT_NODES"):
        monkeypatch.delenv(name, raising=False)
    # monkeypatch sets the variable first, so that the variable is restored after the test.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rendezvous, "addresses_of", lambda host: NAMES.get(host, []))
    rendezvous.choose_interface("node1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == ""
    with pytest.raises(UserError, match="MASTER_ADDR = nodd1: this host knows no such name"):
        rendezvous.choose_interface("nodd1")


@pytest.mark.parametrize("ranks_here", ["1", "2", None])
def test_rank_0_on_loopback_says_who_does_not_reach_it(
    ranks_here: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GSPO_STORE_FD", raising=False)
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "GSPO_ROLLOUT_NODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks_here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    with rendezvous._listener("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    warned = (
        "MASTER_ADDR = 127.0.0.1: rank 0 listens on 127.0.0.1, which ranks on other hosts cannot "
        "reach; if there are any, set it to an address of rank 0's host"
    )
    assert caplog.messages == ([warned] if ranks_here == "1" else [])


@pytest.mark.parametrize(
    ("nodes", "last"),
    [
        ("", []),
        ("node7", ["node7"]),
        ("login1,node[07-08,12]", ["node12"]),
        ("node[07-08]", ["node08"]),
        ("gpu[1-2]-ib,cpu3", ["cpu3"]),
        ("rack[1-2]n[3,5-9]x", ["rack2n9x"]),
        ("node[1-2", []),
    ],
)
def test_the_last_host_of_a_node_list(nodes: str, last: list[str]) -> None:
    assert last_host(nodes) == last
    assert other_hosts({"SLURM_JOB_NODELIST": nodes, "GSPO_ROLLOUT_NODES": ""}) == last


def test_a_listener_has_one_address() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(listener.getsockname())
    assert route_to("127.0.0.1") == "127.0.0.1"
    assert route_to("no-such-host.invalid") is None
