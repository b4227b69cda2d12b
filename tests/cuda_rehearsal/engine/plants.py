"""Calls that Transformer Engine would refuse. Each is a right call with one planted mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.cuda_rehearsal.engine.contract import ContractError

BF16, INT32 = torch.bfloat16, torch.int32


def on_device(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(*shape, device="cuda").to(dtype)


def indices(*values: int, dtype: torch.dtype = INT32) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=dtype)


def attention(**changes: Any) -> None:
    import transformer_engine.pytorch as te

    bounds = indices(0, 5, 12)
    options = {"num_gqa_groups": 2, "attn_mask_type": "padding_causal"}
    call = {
        "query_layer": on_device(12, 4, 16),
        "key_layer": on_device(12, 2, 16),
        "value_layer": on_device(12, 2, 16),
        "qkv_format": "thd",
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": 7,
        "max_seqlen_kv": 7,
    }
    te.DotProductAttention(4, 16, **options)(**call | changes)


def linear(kind: str = "Linear", fp8: Any = None, **changes: Any) -> None:
    import transformer_engine.pytorch as te

    layer = getattr(te, kind)(32, 16, bias=False, params_dtype=BF16, device="cuda")
    with te.fp8_autocast(enabled=fp8 is not None, fp8_recipe=fp8):
        layer(**{"inp": on_device(16, 1, 32)} | changes)


def fused(**changes: Any) -> None:
    linear("LayerNormLinear", **changes)


def delayed() -> Any:
    from transformer_engine.common import recipe

    return recipe.DelayedScaling()


def experts(dtype: torch.dtype = BF16, fp8: Any = None, **changes: Any) -> None:
    import transformer_engine.pytorch as te

    layer = te.GroupedLinear(2, 32, 16, bias=False, params_dtype=dtype, device="cuda")
    with te.fp8_autocast(enabled=fp8 is not None, fp8_recipe=fp8):
        layer(**{"inp": on_device(48, 32), "m_splits": [16, 32]} | changes)


def padding(**changes: Any) -> None:
    import transformer_engine.pytorch as te

    te.Fp8Padding(2, 16)(**{"inp": on_device(12, 32), "m_splits": [5, 7]} | changes)


def norm(**changes: Any) -> None:
    import transformer_engine.pytorch as te

    te.RMSNorm(32, device="cuda")(**{"input": on_device(4, 32)} | changes)


def rope(**changes: Any) -> None:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    call = {
        "t": on_device(12, 4, 16),
        "freqs": on_device(7, 1, 1, 16, dtype=torch.float32),
        "tensor_format": "thd",
        "fused": True,
        "cu_seqlens": indices(0, 5, 12),
    }
    apply_rotary_pos_emb(**call | changes)


def permute(**changes: Any) -> None:
    from transformer_engine.pytorch.permutation import moe_permute_with_probs

    chosen = on_device(6, 3, dtype=torch.bool)
    call = {
        "inp": on_device(6, 32),
        "probs": on_device(6, 3, dtype=torch.float32),
        "routing_map": chosen,
        "num_out_tokens": 18,
    }
    moe_permute_with_probs(**call | changes)


def unpermute(**changes: Any) -> None:
    from transformer_engine.pytorch.permutation import moe_permute, moe_unpermute

    chosen = on_device(6, 3, dtype=torch.bool)
    rows, places = moe_permute(on_device(6, 32), chosen, num_out_tokens=18)
    change = changes.pop("row_id_map", lambda places: places)
    call = {"inp": rows, "row_id_map": change(places), "restore_shape": torch.Size([6, 32])}
    moe_unpermute(**call | changes)


def sort_chunks(**changes: Any) -> None:
    from transformer_engine.pytorch.permutation import moe_sort_chunks_by_index_with_probs

    call = {
        "inp": on_device(12, 32),
        "probs": on_device(12, dtype=torch.float32),
        "split_sizes": indices(5, 7),
        "sorted_index": indices(1, 0),
    }
    moe_sort_chunks_by_index_with_probs(**call | changes)


def router(**changes: Any) -> None:
    from transformer_engine.pytorch.router import fused_topk_with_score_function

    call = {
        "logits": on_device(6, 4, dtype=torch.float32),
        "topk": 2,
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "score_function": "softmax",
        "expert_bias": None,
    }
    fused_topk_with_score_function(**call | changes)


def balance(**changes: Any) -> None:
    from transformer_engine.pytorch.router import fused_moe_aux_loss

    call = {
        "probs": on_device(6, 4, dtype=torch.float32),
        "tokens_per_expert": indices(3, 3, 3, 3),
        "total_num_tokens": 6,
        "num_experts": 4,
        "topk": 2,
        "coeff": 0.01,
    }
    fused_moe_aux_loss(**call | changes)


def adam(dtype: torch.dtype = torch.float32) -> None:
    from transformer_engine.pytorch.optimizers import FusedAdam

    parameter = torch.nn.Parameter(on_device(4, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    FusedAdam([parameter]).step()


def gradient_norm(change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
    from transformer_engine.pytorch import optimizers

    lists = [[change(on_device(4, 6, dtype=torch.float32))]]
    function, flag = optimizers.multi_tensor_l2norm, indices(0)
    optimizers.multi_tensor_applier(function, flag, lists, False)


def recompute(change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
    from transformer_engine.pytorch.distributed import checkpoint

    checkpoint(torch.square, change(on_device(4).requires_grad_()))


def recipe(kind: str = "DelayedScaling", fp8_format: str = "HYBRID") -> None:
    import transformer_engine
    import transformer_engine.pytorch as te

    recipes = transformer_engine.common.recipe
    made = getattr(recipes, kind)(fp8_format=recipes.Format[fp8_format])
    with te.fp8_autocast(enabled=True, fp8_recipe=made):
        pass


@dataclass(frozen=True)
class Plant:
    call: Callable[..., None]
    argument: str  # the argument that the message must name
    changes: Callable[[], dict[str, Any]]  # makes the wrong arguments of the call, by name
    only: str | None = None  # the only version that refuses the call; None: all versions


def _of(call: Callable[..., None], argument: str, value: Callable[[], Any], **more: Any) -> Plant:
    return Plant(call, argument, lambda: {argument: value()}, **more)


PLANTS = {
    "lengths in int64": _of(
        attention, "cu_seqlens_q", lambda: indices(0, 5, 12, dtype=torch.int64)
    ),
    "lengths on the host": _of(attention, "cu_seqlens_kv", lambda: indices(0, 5, 12).cpu()),
    "padded lengths in int64": _of(
        attention, "cu_seqlens_q_padded", lambda: indices(0, 5, 12, dtype=torch.int64)
    ),
    "lengths past the tokens": _of(attention, "cu_seqlens_q", lambda: indices(0, 5, 13)),
    "lengths of another number": _of(attention, "cu_seqlens_kv", lambda: indices(0, 12)),
    "a longest sequence that is too short": _of(attention, "max_seqlen_q", lambda: 5),
    "a longest sequence as a fraction": _of(attention, "max_seqlen_kv", lambda: 7.0),
    "queries on the host": _of(attention, "query_layer", lambda: on_device(12, 4, 16).cpu()),
    "queries with gaps": _of(
        attention, "query_layer", lambda: on_device(12, 16, 4).transpose(1, 2)
    ),
    "queries in float64": Plant(
        attention,
        "query_layer",
        lambda: {
            f"{name}_layer": on_device(12, heads, 16, dtype=torch.float64)
            for name, heads in (("query", 4), ("key", 2), ("value", 2))
        },
    ),
    "keys of another dtype": _of(
        attention, "key_layer", lambda: on_device(12, 2, 16, dtype=torch.float32)
    ),
    "keys of another size": _of(attention, "key_layer", lambda: on_device(12, 2, 8)),
    "values of other heads": _of(attention, "value_layer", lambda: on_device(12, 4, 16)),
    "packed tensors as rows": _of(attention, "qkv_format", lambda: "bhsd"),
    "packed tensors as sequences": Plant(
        attention, "query_layer", lambda: {"qkv_format": "sbhd", "attn_mask_type": "causal"}
    ),
    "a mask that is no padding": _of(attention, "attn_mask_type", lambda: "causal"),
    "activations of another dtype": _of(
        linear, "inp", lambda: on_device(16, 1, 32, dtype=torch.float32)
    ),
    "activations of another size": _of(linear, "inp", lambda: on_device(16, 1, 24)),
    "activations on the host": _of(fused, "inp", lambda: on_device(16, 1, 32).cpu()),
    "normed activations of another size": _of(fused, "inp", lambda: on_device(16, 1, 16)),
    "rows that FP8 does not take": Plant(
        linear, "inp", lambda: {"inp": on_device(12, 1, 32), "fp8": delayed()}
    ),
    "splits that are not the rows": _of(experts, "m_splits", lambda: [16, 16]),
    "splits of other experts": _of(experts, "m_splits", lambda: [16, 16, 16]),
    "splits as a tensor": _of(experts, "m_splits", lambda: indices(16, 32), only="2.11.0"),
    "splits as fractions": _of(experts, "m_splits", lambda: on_device(2) * 24),
    "splits that FP8 does not take": Plant(
        experts, "m_splits", lambda: {"m_splits": [24, 24], "fp8": delayed()}
    ),
    "experts of another dtype": Plant(experts, "inp", lambda: {"dtype": torch.float32}),
    "rows of another size": _of(experts, "inp", lambda: on_device(48, 16)),
    "padded splits as a tensor": _of(padding, "m_splits", lambda: indices(5, 7)),
    "a norm of another size": _of(norm, "input", lambda: on_device(4, 16)),
    "positions in int64": _of(rope, "cu_seqlens", lambda: indices(0, 5, 12, dtype=torch.int64)),
    "angles without the axis of heads": _of(rope, "freqs", lambda: on_device(7, 1, 16)),
    "angles of too few positions": _of(rope, "freqs", lambda: on_device(6, 1, 1, 16)),
    "rows instead of packed tokens": _of(rope, "t", lambda: on_device(12, 1, 4, 16)),
    "routes as numbers": _of(permute, "routing_map", lambda: on_device(6, 3)),
    "routes on the host": _of(
        permute, "routing_map", lambda: on_device(6, 3, dtype=torch.bool).cpu()
    ),
    "probabilities of other experts": _of(permute, "probs", lambda: on_device(6, 2)),
    "no rows": _of(permute, "num_out_tokens", lambda: 0),
    "fewer rows than routes": _of(permute, "num_out_tokens", lambda: 12),
    "a map in int64": _of(unpermute, "row_id_map", lambda: torch.Tensor.long),
    "another shape restored": _of(unpermute, "restore_shape", lambda: torch.Size([5, 32])),
    "sizes on the host": _of(sort_chunks, "split_sizes", lambda: indices(5, 7).cpu()),
    "sizes that are not the rows": _of(sort_chunks, "split_sizes", lambda: indices(5, 6)),
    "an order of other chunks": _of(sort_chunks, "sorted_index", lambda: indices(1, 0, 2)),
    "scores in float64": _of(router, "logits", lambda: on_device(6, 4, dtype=torch.float64)),
    "another score": _of(router, "score_function", lambda: "tanh"),
    "a fraction of tokens": _of(balance, "total_num_tokens", lambda: 6.0),
    "counts of other experts": _of(balance, "tokens_per_expert", lambda: indices(3, 3, 3)),
    "weights in float64": Plant(adam, "self.param_groups", lambda: {"dtype": torch.float64}),
    "gradients with gaps": Plant(gradient_norm, "tensor_lists", lambda: {"change": torch.Tensor.t}),
    "recomputed from the host": Plant(recompute, "args", lambda: {"change": torch.Tensor.cpu}),
    "a recipe that the GPU lacks": Plant(
        recipe, "fp8_recipe", lambda: {"kind": "MXFP8BlockScaling", "fp8_format": "E4M3"}
    ),
    "a format for gradients alone": Plant(recipe, "fp8_format", lambda: {"fp8_format": "E5M2"}),
}


def refusals() -> dict[str, str]:
    """The message with which the stand-in refuses each mistake; "" for a mistake that it accepts.
    Also checks that the same calls without mistakes are accepted."""
    for call in {plant.call for plant in PLANTS.values()}:
        call()
    found = {}
    for name, plant in PLANTS.items():
        try:
            plant.call(**plant.changes())
            found[name] = ""
        except ContractError as error:
            found[name] = str(error)
    return found
