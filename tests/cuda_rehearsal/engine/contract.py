"""The requirements of Transformer Engine for the arguments of a call, from `contract.json`.

A requirement is a Python expression. It may use the call's arguments, `self`, and the names below.
Each requirement names the argument that it is about. For each version of Transformer Engine that
has the requirement, it also names the place in the source. All other versions do not have the
requirement.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.cuda_rehearsal.engine.precision import region
from tests.cuda_rehearsal.engine.tables import Unknown

FILE = Path(__file__).with_name("contract.json")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class ContractError(TypeError):
    """Raised if Transformer Engine would refuse the call, or read the wrong memory."""


def _ranks(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _is_int(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _sums_of(tensor: Tensor) -> bool:
    """Whether the values are running sums: the first is 0, and none is smaller than the one
    before."""
    values = tensor.tolist()
    return values[0] == 0 and values == sorted(values)


NAMES: dict[str, Any] = {
    "Tensor": Tensor,
    "FLOATS": _FLOATS,
    "HALVES": (torch.float16, torch.bfloat16),
    "all": all,
    "any": any,
    "bool": bool,
    "isinstance": isinstance,
    "int": int,
    "len": len,
    "list": list,
    "tuple": tuple,
    "sum": sum,
    "max": max,
    "prod": math.prod,
    "capability": lambda: torch.cuda.get_device_capability(),
    "in_fp8": lambda: region.enabled,
    "is_int": _is_int,
    "kind": lambda value: type(value).__name__,
    "ranks": _ranks,
    "sums_of": _sums_of,
    "torch": torch,
}


@functools.cache
def demands() -> dict[str, list[dict[str, Any]]]:
    return json.loads(FILE.read_text())


def contract_of(name: str, version: str) -> Callable[..., None]:
    """Return check(arguments, self), which raises ContractError if the version refuses the call.

    An argument that is left out has its default from the table, or Unknown if the table does not
    have the default.
    """
    found = [
        (compile(d["demand"], name, "eval"), compile(d.get("when", "True"), name, "eval"), d)
        for d in demands().get(name, ())
        if version in d["where"]
    ]

    def check(arguments: dict[str, Any], owner: Any = None) -> None:
        given = {name: value for name, value in arguments.items() if value is not Unknown}
        names = {**NAMES, "self": owner, **given, "__builtins__": {}}
        for code, when, demand in found:
            if arguments.get(demand["argument"]) is Unknown:
                continue  # the argument was left out, so Transformer Engine uses its own default
            if not eval(when, names):
                continue
            try:
                holds = eval(code, names)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                holds, demand = False, demand | {"error": repr(error)}
            if not holds:
                raise ContractError(_message(name, version, demand, arguments))

    return check


def _message(name: str, version: str, demand: dict[str, Any], arguments: dict[str, Any]) -> str:
    argument, where = demand["argument"], demand["where"][version].rpartition(" ")[0]
    given = _describe(arguments[argument]) if argument in arguments else demand.get("error", "")
    return (
        f"{name}: {argument} is {given}; Transformer Engine {version} demands "
        f"{demand['demand']} ({where})"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        gaps = "" if value.is_contiguous() else ", with gaps"
        return f"a tensor {list(value.shape)} of {value.dtype} on {value.device}{gaps}"
    return f"{value!r:.80}"
