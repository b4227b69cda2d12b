"""Indexed datasets, written by Megatron-Core's own builder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from gspo_megatron.platform.quiet import quiet_imports

with quiet_imports():
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def write_indexed(documents: Iterable[np.ndarray], prefix: Path, vocab_size: int) -> None:
    """Write PREFIX.bin and PREFIX.idx. A document is [tokens] of integers."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    for tokens in documents:
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
