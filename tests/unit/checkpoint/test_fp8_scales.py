"""The places of FP8 scales in a checkpoint. The scales of an expert always stay with the expert."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gspo_megatron.checkpoint.model_pieces import keeps_scales, scale_boxes
from gspo_megatron.checkpoint.storage import Piece

HISTORY = 4


def module_of(experts: range) -> SimpleNamespace:
    """The FP8 state of Transformer Engine's linear module for these experts. Scale k of expert e is
    e + k / 10. Row r of the amax history is the scales plus 100 * r."""

    def state(tensors: int) -> SimpleNamespace:
        scale = torch.tensor([e + k / 10 for e in experts for k in range(tensors)])
        return SimpleNamespace(
            scale=scale, amax_history=scale + 100 * torch.arange(HISTORY)[:, None]
        )

    meta = {"num_gemms": len(experts), "scaling_fwd": state(3), "scaling_bwd": state(2)}
    return SimpleNamespace(fp8_meta=meta)


def joined(pieces: list[Piece]) -> dict[str, torch.Tensor]:
    """The global tensors. Checks that every element is written exactly once."""
    found: dict[str, torch.Tensor] = {}
    for piece in pieces:
        whole = found.setdefault(piece.key, torch.full(piece.global_shape, torch.nan))
        assert whole[piece.slices].isnan().all()
        whole[piece.slices] = piece.data
    assert not any(whole.isnan().any() for whole in found.values())
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_each_expert_has_its_own_place_on_every_layout(ranks: int) -> None:
    share = 6 // ranks
    pieces = []
    for rank in range(ranks):
        own = range(rank * share, (rank + 1) * share)
        pieces += scale_boxes(module_of(own), "experts.linear_fc1", own.start, 6)
    tensors = joined(pieces)
    assert len(tensors) == 4
    experts = torch.arange(6.0)[:, None]
    scale = tensors["fp8.scale_fwd.experts.linear_fc1"]
    torch.testing.assert_close(scale, experts + torch.arange(3) / 10)
    history = tensors["fp8.amax_history_bwd.experts.linear_fc1"]
    backward = experts + torch.arange(2) / 10
    torch.testing.assert_close(history, backward + 100 * torch.arange(HISTORY)[:, None, None])


def test_pieces_are_the_modules_own_tensors() -> None:
    module = module_of(range(1))
    for piece in scale_boxes(module, "linear_qkv", 0, 1):
        piece.data.fill_(7.0)
    for state in ("scaling_fwd", "scaling_bwd"):
        assert (module.fp8_meta[state].scale == 7.0).all()
        assert (module.fp8_meta[state].amax_history == 7.0).all()


def test_only_delayed_scaling_keeps_anything() -> None:
    def policy(fp8: str | None, recipe: str) -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(fp8=fp8, fp8_recipe=recipe))

    assert keeps_scales(policy("hybrid", "delayed"))
    assert not keeps_scales(policy(None, "delayed"))  # the default: no FP8
    assert not keeps_scales(policy("e4m3", "blockwise")) and not keeps_scales(
        policy("e4m3", "mxfp8")
    )
