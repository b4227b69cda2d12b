"""Counts the matrix products of an RL step, and measures how long they take by themselves on this
machine."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that multiply matrices -> the index of an argument whose last dimension is summed over.
# (In inference mode, `linear` appears as one operator, and so does the attention.)
PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "linear": 0,
    "_linear_pointwise": 0,
    "matmul": 0,
    "_grouped_mm": 0,
    "addmm": 1,
    "addmm_": 1,
    "baddbmm": 1,
}
# Attention operators -> (number of matrix products, index of the query). The forward pass has two
# products: scores, and scores times values. The backward pass has two gradients of each of these,
# and computes the scores again.
ATTENTION = {
    "scaled_dot_product_attention": (2, 0),
    "_scaled_dot_product_flash_attention_for_cpu": (2, 0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1),
}
REPEATS = 5  # number of measurements of each product; the fastest one counts


class Products(TorchDispatchMode):
    """Sums the work of the products by phase, operator and shapes while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "rollout"
        self.flops: Counter[tuple[str, Any]] = Counter()  # by phase and kind
        # by kind: the FLOPs of its first product, and a function that prepares such a product
        self.examples: dict[Any, tuple[float, Callable[[], Callable[[], None]]]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator.__name__.split(".")[0]
        if name in PRODUCTS or name in ATTENTION:
            self._count(operator, name, args, kwargs or {}, result)
        return result

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def _count(self, operator: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        kind = (operator, *(_form(value) for value in args if _is_matrix(value)))
        flops = _flops(name, args, out)
        self.flops[self.phase, kind] += flops
        if kind not in self.examples:
            forms = [_without_memory(value) for value in args]
            named = {key: _without_memory(value) for key, value in kwargs.items()}

            def prepare() -> Callable[[], None]:
                copies = [_with_memory(value) for value in forms]
                others = {key: _with_memory(value) for key, value in named.items()}
                return lambda: operator(*copies, **others)

            self.examples[kind] = flops, prepare

    def alone(self) -> dict[str, dict[str, float]]:
        """Return the GFLOP of each phase, and the seconds of its products without other work."""
        with torch.inference_mode():
            seconds = {
                kind: _fastest(prepare()) / max(flops, 1.0)
                for kind, (flops, prepare) in self.examples.items()
            }  # for each FLOP
        found: dict[str, dict[str, float]] = {}
        for (phase, kind), flops in self.flops.items():
            sums = found.setdefault(phase, {"gflop": 0.0, "alone": 0.0})
            sums["gflop"] += flops / 1e9
            sums["alone"] += flops * seconds[kind]
        return found


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _form(matrix: Tensor) -> Any:
    """Matrices of one form are nearly equally fast. The number of an expert's rows is different in
    each layer, so sizes are rounded."""
    sizes = tuple(size if size <= 64 else -(-size // 64) * 64 for size in matrix.shape)
    if matrix.is_mkldnn:
        return sizes
    strides = matrix.stride()
    order = sorted(range(matrix.dim()), key=lambda dimension: -strides[dimension])
    return sizes, tuple(order), tuple(stride == 0 for stride in strides)


def _without_memory(value: Any) -> Any:
    """Return a tensor's shape and strides as a meta tensor. Integer tensors keep their values,
    because they are the ends of groups. Weights in oneDNN's own layout are used as they are."""
    if not _is_matrix(value) or value.is_mkldnn:
        return value.clone() if isinstance(value, Tensor) and not value.is_mkldnn else value
    # a dimension with stride 0 is one element, seen several times
    shape = [size if stride else 1 for size, stride in zip(value.shape, value.stride())]
    memory = torch.empty_strided(shape, value.stride(), dtype=value.dtype, device="meta")
    return memory.expand(value.shape)


def _with_memory(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    shape = [size if stride else 1 for size, stride in zip(value.shape, value.stride())]
    memory = torch.empty_strided(shape, value.stride(), dtype=value.dtype)
    return memory.normal_().expand(value.shape)


def _flops(name: str, args: Any, out: Any) -> float:
    """Return the FLOPs of an operator: two for each multiplication."""
    if name in ATTENTION:
        products, first = ATTENTION[name]
        query, key = args[first], args[first + 1]
        return 2.0 * products * query.numel() * key.shape[-2]
    left = args[PRODUCTS[name]]
    # groups split the summed dimension
    if name == "_grouped_mm" and left.dim() == args[1].dim() == 2:
        return 2.0 * left.numel() * args[1].shape[-1]
    return 2.0 * out.numel() * left.shape[-1]


def _fastest(run: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def measure_limit(step: Callable[[], Any], updater: Any) -> dict[str, dict[str, float]]:
    """Measure one more step, whose time does not count. updater: the PolicyUpdater that it uses."""
    products = Products()

    def within(phase: str, native: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with products.of(phase):
                return native(*args)

        return run

    updater.compute_old_logprobs = within("logprob", updater.compute_old_logprobs)
    updater.train = within("train", updater.train)
    with products:
        step()
    return products.alone()
