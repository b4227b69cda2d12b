"""The transfer of weights from rank 0 to the workers of servers over gloo, in separate processes.
tests/vllm/test_stream.py tests this transfer with vLLM."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo_megatron.addresses import listen
from gspo_megatron.rollout.vllm import weight_stream
from gspo_megatron.rollout.vllm.process import WORKER_FOLDER
from gspo_megatron.rollout.vllm.weight_stream import WeightStream, bucket_layout
from tests.listeners import addresses_of_listeners
from tests.programs import command_environment, wait_until

# A worker without vLLM, which writes the tensors that it loads to a file. One line on stdin is one
# call.
_WORKER = """
import json, sys, time, torch
from safetensors.torch import save_file
from gspo_vllm_worker import GspoWorker
class Worker(GspoWorker):
    rank, device = int(sys.argv[1]), torch.device("cpu")
    def reload_weights(self, weights_iterator):
        loaded = {}
        for name, tensor in weights_iterator:
            loaded[name] = tensor
            if name == self.dies_at:
                sys.exit(9)
            if name == self.hangs_at:
                open(self.path + ".hangs", "w").close()
                time.sleep(600)
        save_file(loaded, self.path)
worker = Worker()
for line in sys.stdin:
    given = json.loads(line)
    worker.path, worker.dies_at, worker.hangs_at = given.pop("told")
    print(worker.receive_weights(**given), flush=True)
"""


class Worker:
    """One worker of a server."""

    def __init__(self, folder: Path, key: str, rank: int, workers: int) -> None:
        self.key, self.workers, self.path = key, workers, folder / f"{key}_{rank}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(rank)],
            env=command_environment() | {"PYTHONPATH": str(WORKER_FOLDER)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(
        self, plan: dict[str, Any], dies: str | None = None, hangs: str | None = None
    ) -> None:
        given = {"plan": plan, "key": self.key, "world_size": self.workers + 1}
        told = (str(self.path), dies, hangs)
        self.process.stdin.write(json.dumps({**given, "told": told}) + "\n")
        self.process.stdin.flush()

    def received(self) -> dict[str, torch.Tensor]:
        count = int(self.process.stdout.readline())
        found = load_file(self.path)
        assert len(found) == count
        return found


Start = Callable[[str, int], list[Worker]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts the workers of a server. It takes the server's key and the number of
    workers."""
    running: list[Worker] = []

    def begin(key: str, workers: int) -> list[Worker]:
        started = [Worker(tmp_path, key, rank, workers) for rank in range(workers)]
        running.extend(started)
        return started

    yield begin
    for worker in running:
        worker.process.kill()
        worker.process.communicate()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> WeightStream:
    monkeypatch.setattr(weight_stream, "_LOOK_SECONDS", 0.1)
    return WeightStream("127.0.0.1", torch.device("cpu"), seconds=60)


def model(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of several types and odd sizes. The largest is larger than a bucket in these
    tests."""
    shapes = {"a": (3, 5), "b": (7,), "c": (40, 9), "d": (1,), "e": (2, 3, 11), "f": (13,)}
    kinds = (torch.float32, torch.bfloat16)
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=random).to(kinds[number % 2])
        for number, (name, shape) in enumerate(shapes.items())
    }


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_a_stream_has_an_address_of_either_family() -> None:
    try:
        listen("::1", 0).close()
    except OSError:
        pytest.skip("no IPv6 here")
    found = WeightStream("::1", torch.device("cpu"), seconds=60)
    with socket.create_connection(("::1", found.port), timeout=30):
        pass
    assert found.host == "::1"


def test_a_stream_listens_on_its_address_alone(stream: WeightStream, start: Start) -> None:
    """docs/security.md promises this."""
    [worker], sent = start("server", 1), model(0)
    plan = stream.plan(specs(sent))
    worker.begin(plan)
    stream.send(plan, {"server": 1}, iter(sent.items()), lambda: ["server"])
    worker.received()
    found = addresses_of_listeners([os.getpid()])
    assert stream.port in found["127.0.0.1"]
    assert set(addresses_of_listeners([worker.process.pid])) <= {"127.0.0.1"}
    assert not [a for a, ports in found.items() if stream.port in ports and a != "127.0.0.1"]


@pytest.mark.parametrize("limit", [1, 64, 200, 1 << 20])
def test_a_bucket_holds_whole_tensors_and_no_more_bytes_than_allowed(limit: int) -> None:
    tensors = model(0)
    buckets = bucket_layout(specs(tensors), limit)
    assert [entry[0] for bucket in buckets for entry in bucket["tensors"]] == list(tensors)
    for bucket in buckets:
        assert bucket["bytes"] <= limit or len(bucket["tensors"]) == 1
        end = 0
        for name, dtype, shape, begin in bucket["tensors"]:
            assert begin >= end and begin % 16 == 0  # a view of another type needs this alignment
            assert (getattr(torch, dtype), tuple(shape)) == (
                tensors[name].dtype,
                tuple(tensors[name].shape),
            )
            end = begin + tensors[name].nbytes
        assert end <= bucket["bytes"]
    if limit == 1 << 20:
        assert len(buckets) == 1


def test_every_worker_gets_every_tensor_again_and_again(
    stream: WeightStream, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 200)
    workers = [*start("one", 1), *start("two", 2)]
    for seed in range(3):
        sent = model(seed)
        plan = json.loads(json.dumps(stream.plan(specs(sent))))
        for worker in workers:
            worker.begin(plan)
        stream.send(plan, {"one": 1, "two": 2}, iter(sent.items()), lambda: ["one", "two"])
        for worker in workers:
            assert_same(worker.received(), sent)


def test_a_server_that_dies_or_gives_up_takes_no_other_with_it(
    stream: WeightStream, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server never comes, and one dies while it loads. All other servers get this version and
    the next one."""
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 64)
    sound, dying, sent = start("sound", 1)[0], start("dying", 1)[0], model(0)
    plan = stream.plan(specs(sent))
    sound.begin(plan)
    dying.begin(plan, dies="b")
    begin = time.monotonic()
    receiving = {"sound", "dying"}  # the service knows that the third server is gone
    receivers = {"gone": 1, "dying": 1, "sound": 1}
    stream.send(plan, receivers, iter(sent.items()), lambda: receiving)
    assert time.monotonic() - begin < 50  # the timeout of the process group is 60 s
    assert dying.process.wait(30) == 9
    assert_same(sound.received(), sent)
    sent, [again] = model(1), start("dying-1", 1)  # the server was started again with another key
    for worker in (sound, again):
        worker.begin(plan)
    stream.send(plan, {"sound": 1, "dying-1": 1}, iter(sent.items()), lambda: ["sound", "dying-1"])
    for worker in (sound, again):
        assert_same(worker.received(), sent)


def test_a_server_with_another_nccl_refuses_before_it_connects(
    stream: WeightStream, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """NCCL gives such a group an error, or none of its members returns."""
    [worker], sent = start("server", 1), model(0)
    plan, rest = stream.plan(specs(sent)) | {"nccl": [2, 29, 7]}, iter(sent.items())
    worker.begin(plan)
    stream.send(plan, {"server": 1}, rest, lambda: ["server"][: worker.process.poll() is None])
    assert worker.process.wait(30) == 1 and not stream._groups
    assert "NCCL None, and rank 0 of the run has [2, 29, 7]" in capfd.readouterr().err
    assert next(rest, None) is None


def test_a_server_that_hangs_is_dropped_when_the_service_gives_it_up(
    stream: WeightStream, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 64)
    # These tensors are too large for the buffers of the receiver's socket.
    sent = {name: torch.randn(1 << 22) for name in "abcd"}
    [worker], plan = start("hanging", 1), stream.plan(specs(sent))
    worker.begin(plan, hangs="a")
    hangs, rest, began = Path(f"{worker.path}.hangs"), iter(sent.items()), time.monotonic()
    stream.send(plan, {"hanging": 1}, rest, lambda: [] if hangs.exists() else ["hanging"])
    # the timeout of the process group is 60 s
    assert hangs.exists() and time.monotonic() - began < 55
    # the iterator must be consumed, because other ranks take part in it
    assert next(rest, None) is None
    worker.process.kill()
    wait_until(lambda: stream._stuck[0][0].is_completed(), seconds=30)
    stream.send(plan, {}, iter(sent.items()), list)
    assert not stream._stuck
