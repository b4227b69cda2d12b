"""A cache of the results of operations on the meta device.

torch computes the shape of most results in Python, in up to a millisecond. A dry run does the same
few hundred operations on the same shapes in every layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries. (This runs at every operation, and
    torch's pytree takes ten times as long.)"""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


# Tensor, tuple or list; and size, stride and dtype of the tensors, each of its own memory
_Result = tuple[type, tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]]


def _make(result: _Result) -> Any:
    kind, tensors = result
    made = (
        torch.empty_strided(size, stride, dtype=dtype, device="meta")
        for size, stride, dtype in tensors
    )
    return next(made) if kind is Tensor else kind(made)


class MetaResults:
    """Runs operations on meta tensors, and caches them by the shapes and values of their inputs.

    Cached are only operations that write nothing, that take only meta tensors, and whose results
    are new, dense meta tensors.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, _Result | None] = {}
        self._pure: dict[Any, bool] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in self._pure:
            # By its schema. Some return a view although it denies this: see `_remembered`.
            schema = func._schema
            returns_new = all(each.alias_info is None for each in schema.returns)
            self._pure[func] = returns_new and not schema.is_mutable
        if not self._pure[func]:
            return func(*args, **kwargs)
        key = (func, _description(args), _description(tuple(kwargs.items())))
        if key in self._results:
            known = self._results[key]
            return func(*args, **kwargs) if known is None else _make(known)
        result = func(*args, **kwargs)
        self._results[key] = _remembered(result, (args, kwargs))
        return result


def _description(value: Any) -> Hashable:
    """A key of the cache. 1, 1.0 and True are equal in Python, so the type is part of the key."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(_description(item) for item in value)
    return type(value), value


def _remembered(result: Any, inputs: Any) -> _Result | None:
    """None: this operation cannot be cached."""
    tensors = tuple(tensors_in(result))
    kind = Tensor if isinstance(result, Tensor) else type(result)
    if kind not in (Tensor, tuple, list) or not tensors:
        return None
    if kind is not Tensor and len(tensors) != len(result):
        return None  # there are other values among them
    given = list(tensors_in(inputs))
    if not all(tensor.is_meta for tensor in (*given, *tensors)):
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    found = kind, tuple((t.shape, t.stride(), t.dtype) for t in tensors)
    for tensor, made in zip(tensors, tensors_in(_make(found))):
        storage = tensor.untyped_storage()
        if storage._cdata in storages or storage.nbytes() != made.untyped_storage().nbytes():
            return None
        storages.add(storage._cdata)
    return found
