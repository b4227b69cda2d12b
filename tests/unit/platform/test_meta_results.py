"""What is remembered of an operation on meta tensors is what torch says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_megatron.platform.meta_results import MetaResults, tensors_in


class Remembering(TorchDispatchMode):
    def __init__(self, results: MetaResults) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.results(func, args, kwargs or {})


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The results that are made without asking torch."""
    made: list[Any] = []
    make = torch.empty_strided
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", lambda *a, **k: made.append(a) or make(*a, **k))
        yield made


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def form(value: Any) -> list[Any]:
    """Everything that can be told of meta tensors."""
    return [type(value)] + [
        (t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), t.untyped_storage().nbytes())
        for t in tensors_in(value)
    ]


OPERATIONS: list[Callable[[], Any]] = [
    lambda: meta(3, 5) + 1,
    lambda: meta(3, 5, dtype=torch.int64) + 1,
    lambda: meta(3, 5, dtype=torch.int64) + 1.0,  # another type, though 1 == 1.0
    lambda: meta(3, 5, dtype=torch.bool) + True,
    lambda: meta(3, 5).t() * meta(5, 1),
    lambda: torch.cat([meta(2, 3), meta(4, 3)]),
    lambda: torch.cat([meta(2, 3), meta(2, 3)], dim=1),
    lambda: meta(3, 5).to(torch.bfloat16),
    lambda: meta(7, 3, 5).transpose(0, 2).mean(dim=1, keepdim=True),
    lambda: meta(7, 5).topk(2),
    lambda: meta(7, 5).sort(dim=0),
    lambda: meta(7, 5).split(2),
    lambda: meta(7, 5)[2:4],
    lambda: meta(7, 5)[meta(4, dtype=torch.int64)],
    lambda: meta(7, 5).reshape(5, 7),
    lambda: meta(7, 5).add_(1),
    lambda: meta(4, 6) @ meta(6, 2),
    lambda: torch.zeros(3, 2, device="meta"),
]


def test_every_operation_gives_what_torch_gives_the_second_time_too() -> None:
    results = MetaResults()
    for operation in OPERATIONS:
        expected = form(operation())
        for _ in range(3):
            with Remembering(results):
                assert form(operation()) == expected


def test_the_second_time_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    values, fewer, results = meta(3, 5), meta(2, 5), MetaResults()
    with Remembering(results):
        torch.cat([values, values])
        with counted(monkeypatch) as made:
            torch.cat([values, values])
            assert len(made) == 1
            assert torch.cat([values, fewer]).shape == (5, 5)
            assert len(made) > 2  # another shape: torch made one, and we made one to compare


def test_a_view_stays_a_view() -> None:
    """_unsafe_view's schema says that its result is new."""
    values, results = meta(3, 5), MetaResults()
    for operation in (
        lambda: torch.ops.aten._unsafe_view(values, [15]),
        lambda: values.view(5, 3),
        lambda: values.detach(),
    ):
        for _ in range(3):
            with Remembering(results):
                view = operation()
            assert view.untyped_storage()._cdata == values.untyped_storage()._cdata


def test_real_tensors_are_computed_with() -> None:
    results = MetaResults()
    for number in range(3):
        with Remembering(results):
            total = torch.tensor([number, 2]).sum()
            counts = torch.tensor([number, 2]) * torch.tensor(2)
        assert total == number + 2
        assert counts.tolist() == [2 * number, 4]
