"""The pretended world: what it says of itself, that it leaves nothing behind, and that each
substitution in it is still needed."""

from __future__ import annotations

import contextlib
import gc
import sys

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from gspo_megatron.config import parse_config, resolve_parallel
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.platform.megatron_meta import META, EqualLoad, Trace, pretended_rank


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
        dist.all_reduce(states, group=dist.new_group([1]))  # with nobody
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
        assert trace.live_bytes == 800  # the view keeps all of its storage
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
        assert (counts.to(META) + torch.empty(8, device=META)).is_meta  # real where values count


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
    assert shapes.count((2, 4, 10, 8)) == 2  # query and output
    assert (2, 4, 10) in shapes  # log-sum-exp
    assert (2, 1, 10, 12) not in shapes
    out.sum().backward()
    assert key.grad is not None and key.grad.shape == key.shape


# Each of these fails when torch or Megatron-Core learns to do without the substitution.


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
