"""Whether a server has the trainer's weights: what it answers to a probe, and its tensors' sums.

The probe is the proof: log-probs depend on all that a server computes with. The sums say where to
look when it fails, and at the start they hold each layer's tensors against the folder's, exactly in
any precision. They do not see what kernels make of parameters; the probe does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

# [elements, sum, sum of squares] of each family of tensors: GspoWorker.weight_sums
Sums = Mapping[str, Sequence[float]]

_TOLERANCE = 1e-12  # of sums in float64: their order differs
_PADDED = ("embedding", "output layer")  # vLLM adds rows of zeros
_SHOWN = 6


def suspect_families(workers: Sequence[Sums], folder: Sums) -> list[str]:
    """Families of tensors that are not the folder's.

    workers: of each worker of a server. A tensor that all of them have whole counts as often as
    there are workers. Families of which vLLM has another number of elements cannot be compared and
    are left out: on CPUs it keeps linear layers in a kernel's own form only (the experts stay), and
    with more workers than key heads it repeats these.
    """
    found = []
    for family, (count, total, squares) in folder.items():
        parts = [each[family] for each in workers if family in each]
        copies, rest = divmod(sum(part[0] for part in parts), count)
        if not copies or (rest and family not in _PADDED):
            continue
        differs = abs(sum(part[1] for part in parts) / copies - total)
        differs_squared = abs(sum(part[2] for part in parts) / copies - squares)
        scale = math.sqrt(count * squares)  # the sum of absolute values is not above it
        if differs > _TOLERANCE * scale or differs_squared > _TOLERANCE * squares:
            found.append(family)
    return found


def describe_families(families: Sequence[str], known: int) -> str:
    """For a message: `experts of layers 1, 2; embedding`. known: how many there are."""
    if len(families) == known > 1:
        return "all of them"
    layers: dict[str, list[str]] = {}
    for family in families:
        kind, _, layer = re.fullmatch(r"(.*?)( of layer (\d+))?", family).groups()
        layers.setdefault(kind, []).extend([layer] if layer else [])
    told = []
    for kind, numbers in layers.items():
        shown = ", ".join(numbers[:_SHOWN]) + (", ..." if len(numbers) > _SHOWN else "")
        plural = "s" if len(numbers) > 1 else ""
        told.append(f"{kind} of layer{plural} {shown}" if numbers else kind)
    return "; ".join(told)
