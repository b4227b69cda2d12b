"""Linear layers and norms. Their weights have Transformer Engine's names, and torch computes the
products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.cuda_rehearsal.engine.precision import (
    DelayedScaling,
    Recipe,
    State,
    quantized,
    region,
    update_scales,
)


class TransformerEngineBaseModule(torch.nn.Module):
    """The common base of all modules. It has the attributes for FP8's scales, and the method for
    the extra state of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = self.primary_weights_in_fp8 = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.tp_group: Any = None
        self.save_original_input = False

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fp8 = self.fp8_meta["fp8_checkpoint"] = region.enabled
        if self.fp8:
            self.fp8_meta |= {"recipe": region.recipe, "num_gemms": num_gemms}
            if isinstance(region.recipe, DelayedScaling) and "scaling_bwd" not in self.fp8_meta:
                self.init_fp8_meta_tensors(region.recipe)

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        for number, (key, tensors) in enumerate((("scaling_fwd", 3), ("scaling_bwd", 2))):
            count = tensors * self.fp8_meta["num_gemms"]
            self.fp8_meta[key] = State(recipe, count, recipe.fp8_format.value[number])

    def get_extra_state(self) -> Tensor:
        """Return an empty state, because the package stores scales itself (see
        checkpoint/model_pieces.py)."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or not state.numel()

    def backward_dw(self) -> None:
        # Only Megatron-Core's delay_wgrad_compute needs this method. No run of the package sets
        # this option.
        raise NotImplementedError("delay_wgrad_compute")

    def _add(
        self, name: str, shape: Sequence[int], options: dict[str, Any], init: Any, tracker: Any
    ) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.empty(*shape, **options))
        self.register_parameter(name, parameter)
        forked = tracker().fork() if tracker is not None else contextlib.nullcontext()
        with forked, torch.no_grad():
            if init is not None and parameter.device.type != "meta":
                init(parameter)
        return parameter

    def _product(self, inp: Tensor, weight: Tensor, gemm: int = 0) -> Tensor:
        return _Product.apply(inp, weight, self, gemm) if self.fp8 else inp @ weight.t()


class _Product(torch.autograd.Function):
    """A matrix product. In the forward and the backward pass its operands are rounded to FP8."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, module: Any, gemm: int) -> Tensor:
        recipe, states = module.fp8_meta["recipe"], module.fp8_meta
        of_forward, ctx.largest = recipe.fp8_format.value
        state = states.get("scaling_fwd")
        if state is not None:
            region.states[True][state] = None
        ctx.is_first = region.is_first_module and not region.recomputing
        region.is_first_module = False
        inp = quantized(inp, recipe, state, 3 * gemm, of_forward)
        weight = quantized(weight, recipe, state, 3 * gemm + 1, of_forward)
        ctx.save_for_backward(inp, weight)
        ctx.recipe, ctx.state, ctx.gemm = recipe, states.get("scaling_bwd"), gemm
        return inp @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inp, weight = ctx.saved_tensors
        state, before = ctx.state, region.recomputing
        region.recomputing = False
        gradient = quantized(gradient, ctx.recipe, state, 2 * ctx.gemm, ctx.largest)
        region.recomputing = before
        if state is not None:
            region.states[False][state] = None
            if ctx.is_first:
                update_scales(False)
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_weight = flat.t() @ inp.reshape(-1, inp.shape[-1])
        return gradient @ weight, of_weight, None, None


def _shard_attributes(parameter: Tensor, dim: int) -> None:
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim, parameter.partition_stride = dim, 1  # type: ignore[attr-defined]


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Any,
        init_method: Callable[[Tensor], Any] | None,
        bias: bool,
        return_bias: bool,
        params_dtype: torch.dtype,
        parallel_mode: str | None,
        device: Any,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        elif parallel_mode == "row":
            self.in_features //= self.tp_size
        options = {"dtype": params_dtype, "device": device}
        self._make(options, init_method, get_rng_state_tracker)

    def _make(self, options: dict[str, Any], init: Any, tracker: Any) -> None:
        shape = (self.out_features, self.in_features)
        weight = self._add("weight", shape, options, init, tracker)
        _shard_attributes(weight, 1 if self.parallel_mode == "row" else 0)
        if not self.use_bias:
            self.bias = torch.empty(0, **options)
            return
        bias = self._add("bias", shape[:1], options, torch.nn.init.zeros_, None)
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        elif self.parallel_mode == "column":
            _shard_attributes(bias, 0)

    def forward(self, inp: Tensor) -> Any:
        self.init_fp8_metadata()
        return self._finish(self._parallel(inp))

    def _parallel(self, inp: Tensor) -> Tensor:
        group = self.tp_group
        is_shared = self.tp_size > 1
        if self.parallel_mode == "column" and is_shared:
            inp = _Gather.apply(inp, group) if self.sequence_parallel else _Copy.apply(inp, group)
        out = self._product(inp, self.weight)
        if self.parallel_mode == "row" and is_shared:
            out = _Scatter.apply(out, group) if self.sequence_parallel else _Sum.apply(out, group)
        return out

    def _finish(self, out: Tensor) -> Any:
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: Any,
        **rest: Any,
    ) -> None:
        taken = {name: rest[name] for name in _OF_LINEAR if name in rest}
        plain = Linear.__init__.__wrapped__  # type: ignore[attr-defined]  # checked here already
        plain(self, in_features, params_dtype=params_dtype, device=device, **taken)
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        options = {"dtype": params_dtype, "device": device}
        start = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        names = {"layer_norm_weight": start}
        if normalization == "LayerNorm":
            names["layer_norm_bias"] = torch.nn.init.zeros_
        for name, init in names.items():
            parameter = self._add(name, [in_features], options, init, None)
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor) -> Any:
        self.init_fp8_metadata()
        weight, bias = self.layer_norm_weight, getattr(self, "layer_norm_bias", None)
        normed = _norm(inp, weight, bias, self.eps, self.zero_centered_gamma, self.normalization)
        return self._finish(self._parallel(normed))


_OF_LINEAR = (
    "out_features",
    "sequence_parallel",
    "tp_group",
    "tp_size",
    "get_rng_state_tracker",
    "init_method",
    "bias",
    "return_bias",
    "parallel_mode",
)


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Any,
        init_method: Any,
        bias: bool,
        return_bias: bool,
        params_dtype: torch.dtype,
        parallel_mode: str | None,
        device: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode = parallel_mode
        options = {"dtype": params_dtype, "device": device}
        for i in range(num_gemms):
            shape = (out_features, in_features)
            weight = self._add(f"weight{i}", shape, options, init_method, get_rng_state_tracker)
            _shard_attributes(weight, 1 if parallel_mode == "row" else 0)
            if bias:
                self._add(f"bias{i}", shape[:1], options, torch.nn.init.zeros_, None)

    def forward(self, inp: Tensor, m_splits: Any) -> Any:
        self.init_fp8_metadata(self.num_gemms)
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits
        parts = inp.reshape(-1, self.in_features).split(sizes)
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        products = [self._product(part, w, i) for i, (part, w) in enumerate(zip(parts, weights))]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else []
        if biases and not self.return_bias:
            products = [product + bias for product, bias in zip(products, biases)]
        out = torch.cat(products).view(*inp.shape[:-1], self.out_features)
        return (out, biases) if self.return_bias else out


class RMSNorm(torch.nn.Module):
    kind = "RMSNorm"

    def __init__(
        self,
        normalized_shape: int | None,
        eps: float,
        sequence_parallel: bool | None,
        params_dtype: torch.dtype | None,
        zero_centered_gamma: bool,
        hidden_size: int | None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        options = {"device": device, "dtype": params_dtype or dtype}
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(size, **options))
        self.bias = None
        if self.kind == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(size, **options))
        for parameter in self.parameters():
            if sequence_parallel is not None:
                parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    get_extra_state = TransformerEngineBaseModule.get_extra_state
    set_extra_state = TransformerEngineBaseModule.set_extra_state

    def forward(self, inp: Tensor) -> Tensor:
        return _norm(inp, self.weight, self.bias, self.eps, self.zero_centered_gamma, self.kind)


class LayerNorm(RMSNorm):
    kind = "LayerNorm"


def _norm(
    inp: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, kind: str
) -> Tensor:
    """The norm, computed in float32 and returned in the dtype of the weight."""
    values = inp.float()
    if kind == "LayerNorm":
        values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    values = values * (weight.float() + zero_centered)
    return (values if bias is None else values + bias.float()).to(weight.dtype)


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: list[int]) -> list[int]:
        if self.align_size is None:
            is_mxfp8 = getattr(region.recipe, "block", None) == 32
            self.align_size = 32 if is_mxfp8 else 16
        return [-(-rows // self.align_size) * self.align_size for rows in m_splits]

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        sizes = self.padded(m_splits)
        parts = zip(inp.split(m_splits), sizes)
        return torch.cat([F.pad(p, (0, 0, 0, size - len(p))) for p, size in parts]), sizes


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # type: ignore[override]
        parts = zip(inp.split(self.padded(m_splits)), m_splits)
        return torch.cat([part[:rows] for part, rows in parts])


def general_gemm(
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    out_dtype: torch.dtype | None,
    layout: str,
    bias: Tensor | None,
) -> list[Tensor | None]:
    """A product of matrices that are stored column by column. "TN" is B times the transpose of
    A."""
    left = B.t() if layout[1] == "T" else B
    right = A.t() if layout[0] == "T" else A
    out = left.float() @ right.float()
    return [(out if bias is None else out + bias).to(out_dtype or A.dtype), None, None, None]


def _all_gather(tensor: Tensor, group: Any) -> Tensor:
    whole = tensor.new_empty(len(tensor) * dist.get_world_size(group), *tensor.shape[1:])
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
    return whole


def _reduce_scatter(tensor: Tensor, group: Any) -> Tensor:
    part = tensor.new_empty(len(tensor) // dist.get_world_size(group), *tensor.shape[1:])
    dist.reduce_scatter_tensor(part, tensor.contiguous(), group=group)
    return part


def _all_reduce(tensor: Tensor, group: Any) -> Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor, group=group)
    return tensor


def _same(tensor: Tensor, group: Any) -> Tensor:
    return tensor.view_as(tensor)


def _between_ranks(forwards: Callable[..., Tensor], backwards: Callable[..., Tensor]) -> Any:
    class Between(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
            ctx.group = group
            return forwards(tensor, group)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return backwards(gradient, ctx.group), None

    return Between


_Gather = _between_ranks(_all_gather, _reduce_scatter)
_Scatter = _between_ranks(_reduce_scatter, _all_gather)
_Sum = _between_ranks(_all_reduce, _same)
_Copy = _between_ranks(_same, _all_reduce)
gather = _Gather.apply
