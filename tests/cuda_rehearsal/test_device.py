"""The rehearsed device refuses what a GPU refuses. It also reports mistakes that cause no error on
a GPU."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.cuda_rehearsal.environment import rehearsal
from tests.programs import run_program

BEFORE = """
import torch
import torch.distributed as dist
def error_of(work):
    try:
        work()
    except Exception as error:
        return str(error)
a, side = torch.arange(6.0, device="cuda"), torch.cuda.Stream()
"""
TRUE = {
    "it is there": "torch.cuda.is_available() and torch.cuda.device_count() == 2",
    "values": "(a @ a).item() == 55 and (a * 2).tolist() == [0, 2, 4, 6, 8, 10]",
    "new memory holds no zeros": "torch.empty(3, device='cuda').isnan().all()",
    "indices of tensors": "torch.ones(2, device='cuda:1').device.index == 1",
    "host and device": "'same device' in error_of(lambda: a + torch.ones(6))",
    "two devices": "'same device' in error_of(lambda: a + torch.ones(6, device='cuda:1'))",
    "an index on the host": "'same device' in error_of(lambda: a.gather(0, torch.tensor([0])))",
    "no such device": "'ordinal' in error_of(lambda: torch.ones(1, device='cuda:5'))",
    "numpy": "'numpy' in error_of(lambda: a.numpy())",
    "pinned memory": "a.cpu().pin_memory().is_pinned() and not a.cpu().is_pinned()",
    "a copy that nobody awaits": (
        "'not pinned' in error_of(lambda: torch.empty(6).copy_(a, non_blocking=True))"
    ),
    "generators": "torch.rand(2, device='cuda', generator=torch.Generator('cuda')).is_cuda",
    "memory": "torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() >= 24",
}
PROGRAMS = {
    "a race, and an event against it": """
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            b = a * 2
        assert "no event orders" in error_of(lambda: b + 1)
        torch.cuda.current_stream().wait_event(side.record_event())
        assert (b + 1).tolist()[0] == 1
    """,
    "memory that is used again": """
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            b = a * 2
        del a
        assert "record_stream" in error_of(lambda: torch.empty(6, device="cuda"))
        a = torch.ones(6, device="cuda")
        side.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(side):
            b = a * 2
        a.record_stream(side)
        del a
        torch.empty(6, device="cuda")
    """,
    "collectives": """
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        work = dist.all_reduce(a, async_op=True)
        assert "no event orders" in error_of(lambda: a + 1)
        work.wait()
        assert (a + 1).tolist()[1] == 2
        assert "No backend" in error_of(lambda: dist.all_reduce(torch.ones(1)))
        assert "contiguous" in error_of(lambda: dist.all_reduce(a[::2]))
        short = torch.ones(1, dtype=torch.int16, device="cuda")
        assert "int16" in error_of(lambda: dist.all_reduce(short))
    """,
    "waits": """
        from tests.cuda_rehearsal.runtime import counted_waits
        with counted_waits() as waits:
            a.sum().item(), a.cpu(), a[a > 1], torch.tensor([1.0], device="cuda")
            torch.cuda.synchronize()
            a + 1, torch.zeros(3, device="cuda"), a.cpu().to("cuda", non_blocking=True)
        assert waits.total() == 6, waits
    """,
}


def run(text: str, expect: int = 0) -> str:
    program = BEFORE + textwrap.dedent(text)
    done = run_program(sys.executable, "-c", program, environ=rehearsal(2), expect=expect)
    return done.stderr


def test_what_is_true_of_a_gpu() -> None:
    run("\n".join(f"assert {fact}, {name!r}" for name, fact in TRUE.items()))


@pytest.mark.parametrize("name", PROGRAMS)
def test_order(name: str) -> None:
    run(PROGRAMS[name])


def test_host_memory_that_a_copy_is_filling_may_not_be_touched() -> None:
    text = """
        host = torch.empty(6, pin_memory=True)
        host.copy_(a, non_blocking=True)
    """
    run(text + "    torch.cuda.synchronize()\n        assert host.sum() == 15")
    assert "before the copy is done" in run(text + "    print(host.sum())", expect=-11)
