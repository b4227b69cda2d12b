"""The simulated process group: its size and rank, its complete removal, and the need for each of
the substitutions in torch and Megatron-Core."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_megatron.config import parse_config, resolve_parallel
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.platform.megatron_meta import (
    META,
    EqualLoad,
    MetaResults,
    Trace,
    pretended_rank,
    tensors_in,
)


def set_up(layout: str, world_size: int) -> None:
    config = parse_config({"parallel": {"layout": layout}, "data": {"tokenizer": "none"}})
    set_up_model_parallel(resolve_parallel(config, world_size), seed=0)


def test_a_rank_of_a_thousand_knows_its_groups() -> None:
    with pretended_rank(517, 1024):
        set_up("tp=4,pp=8,ep=16,cp=2", 1024)
        assert (dist.get_rank(), dist.get_world_size()) == (517, 1024)
        assert parallel_state.get_pipeline_model_parallel_rank() == 517 // 128
        assert parallel_state.get_tensor_model_parallel_rank() == 517 % 4
        assert torch.cuda.current_device() == META
    assert not dist.is_initialized()


def test_nothing_is_left_behind() -> None:
    before = (torch.cuda.current_device, mappings._gather_along_first_dim, sys.excepthook)
    with contextlib.suppress(KeyError), pretended_rank(0, 2):
        raise KeyError
    assert (torch.cuda.current_device, mappings._gather_along_first_dim, sys.excepthook) == before


def test_the_scale_of_the_routers_losses_is_that_of_the_process_again() -> None:
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    with pretended_rank(0, 2):
        assert MoEAuxLossAutoScaler.main_loss_backward_scale is None
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones((), device=META))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is before
    assert not dist.is_initialized()


def test_collectives_are_recorded_with_the_whole_message() -> None:
    with pretended_rank(1, 8) as trace:
        set_up("tp=4,dp=2", 8)
        group = parallel_state.get_tensor_model_parallel_group()
        states = torch.empty((6, 5), device=META)
        gathered = mappings._gather_along_first_dim(states, group)
        assert gathered.shape == (24, 5)
        mappings._reduce_scatter_along_first_dim(gathered, group)
        dist.all_reduce(states, group=group)
        dist.all_reduce(states, group=dist.new_group([1]))  # a group of one rank sends nothing
    found = [(each.kind, each.ranks, each.num_bytes) for each in trace.collectives]
    ranks = (0, 1, 2, 3)
    assert found == [
        ("all_gather", ranks, 480),
        ("reduce_scatter", ranks, 480),
        ("all_reduce", ranks, 120),
    ]


def test_live_bytes_and_their_peak() -> None:
    with Trace() as trace:
        first = torch.empty(100, device=META)
        second = first + 1
        view = second[10:]
        del second
        assert trace.live_bytes == 800  # the view keeps its whole storage alive
        del first, view
        gc.collect()
        assert (trace.live_bytes, trace.peak_bytes) == (0, 800)
        trace.start_peak()
        torch.empty(5, device=META)
        assert trace.peak_bytes == 20


def test_experts_get_equally_many_tokens() -> None:
    with EqualLoad(2 / 8):
        chosen = torch.empty((30, 8), dtype=torch.bool, device=META)
        counts = chosen.sum(dim=0)
        assert counts.tolist() == [8, 8, 8, 8, 7, 7, 7, 7]
        scores = torch.empty((8, 30), device=META, requires_grad=True)
        taken = scores.masked_select(chosen.T)
        assert taken.shape == (60,)
        taken.sum().backward()
        assert scores.grad is not None and scores.grad.shape == (8, 30)
        # `counts` has real values, but its copy on the meta device can be added to a meta tensor.
        assert (counts.to(META) + torch.empty(8, device=META)).is_meta


def test_attention_keeps_what_a_fused_kernel_keeps() -> None:
    kept: list[torch.Tensor] = []
    query = torch.empty((2, 4, 10, 8), device=META, requires_grad=True)
    key = torch.empty((2, 2, 12, 8), device=META, requires_grad=True)
    mask = torch.empty((2, 1, 10, 12), dtype=torch.bool, device=META)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with EqualLoad(0.0), hooks:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, key, attn_mask=mask, enable_gqa=True
        )
    assert out.shape == query.shape
    shapes = [tuple(t.shape) for t in kept]
    assert shapes.count((2, 4, 10, 8)) == 2  # the shape of query and output
    assert (2, 4, 10) in shapes  # the shape of the log-sum-exp of each row
    assert (2, 1, 10, 12) not in shapes
    out.sum().backward()
    assert key.grad is not None and key.grad.shape == key.shape


# --- The substitutions: each test fails if torch or Megatron-Core makes one unnecessary ---------


def test_attention_on_meta_would_keep_the_scores_of_all_pairs() -> None:
    kept: list[torch.Tensor] = []
    states = torch.empty((1, 2, 64, 8), device=META, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torch.nn.functional.scaled_dot_product_attention(states, states, states, is_causal=True)
    assert any(tensor.numel() >= 2 * 64 * 64 for tensor in kept)


def test_selections_and_counts_on_meta_have_no_values() -> None:
    mask = torch.empty(4, dtype=torch.bool, device=META)
    for read in (lambda: torch.empty(4, device=META).masked_select(mask), mask.long().tolist):
        with pytest.raises(RuntimeError, match="(?i)meta"):
            read()


def test_routers_still_record_their_losses_for_the_process() -> None:
    from megatron.core.transformer.moe import router

    names = ("save_to_aux_losses_tracker", "get_moe_metrics_tracker")
    assert any(hasattr(router, name) for name in names)


def test_torch_does_not_wrap_what_runs_at_every_operation() -> None:
    assert not hasattr(Trace.__torch_dispatch__, "__wrapped__")


# --- The cached results of operations on meta tensors equal torch's own ------------------------


class Remembering(TorchDispatchMode):
    def __init__(self, results: MetaResults) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.results(func, args, kwargs or {})


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect the results that are made without torch's operation."""
    made: list[Any] = []
    make = torch.empty_strided
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", lambda *a, **k: made.append(a) or make(*a, **k))
        yield made


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def form(value: Any) -> list[Any]:
    """All properties of meta tensors."""
    return [type(value)] + [
        (t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), t.untyped_storage().nbytes())
        for t in tensors_in(value)
    ]


OPERATIONS: list[Callable[[], Any]] = [
    lambda: meta(3, 5) + 1,
    lambda: meta(3, 5, dtype=torch.int64) + 1,
    lambda: meta(3, 5, dtype=torch.int64) + 1.0,  # another dtype than with 1, although 1 == 1.0
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
            assert len(made) > 2  # for a new shape, torch itself runs the operation


def test_a_view_stays_a_view() -> None:
    """The schema of _unsafe_view claims that its result is a new tensor."""
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
