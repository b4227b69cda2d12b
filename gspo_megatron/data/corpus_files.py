"""Indexed datasets written by Megatron-Core's own builder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from gspo_megatron.platform.quiet import quiet_imports

with quiet_imports():
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def token_dtype(vocab_size: int) -> type[np.number]:
    """The smallest type that Megatron-Core uses for `vocab_size` ids."""
    return DType.optimal_dtype(vocab_size)


def write_indexed(
    documents: Iterable[np.ndarray], bin_path: Path, idx_path: Path, vocab_size: int
) -> None:
    """Writes documents, each [tokens] of integers, to both files."""
    builder = IndexedDatasetBuilder(bin_path=str(bin_path), dtype=token_dtype(vocab_size))
    for tokens in documents:
        builder.add_item(tensor=torch.from_numpy(tokens))
        builder.end_document()
    builder.finalize(idx_path=str(idx_path))
