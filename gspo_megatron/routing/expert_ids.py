"""How the numbers of experts are kept where there is one for each token and layer."""

from __future__ import annotations

import torch


def expert_dtype(num_experts: int) -> torch.dtype:
    """One byte for up to 256 experts, two beyond."""
    return torch.uint8 if num_experts <= 256 else torch.int16
