"""Tokens on disk in Megatron-Core's own format, by its own builder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

# Here and not in the package's __init__: the worker processes import that, and need no Megatron.
from gspo_megatron.platform.quiet import quiet_imports

with quiet_imports():
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def token_dtype(vocab_size: int) -> type[np.number]:
    """The smallest type that Megatron-Core uses for so many ids."""
    return DType.optimal_dtype(vocab_size)


def write_indexed(
    documents: Iterable[np.ndarray], bin_path: Path, idx_path: Path, vocab_size: int
) -> None:
    """Writes documents, each a sequence [tokens] of whole numbers, to both files."""
    builder = IndexedDatasetBuilder(bin_path=str(bin_path), dtype=token_dtype(vocab_size))
    for tokens in documents:
        builder.add_item(tensor=torch.from_numpy(tokens))
        builder.end_document()
    builder.finalize(idx_path=str(idx_path))
