"""A running, sharded model as a Hugging Face folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.checkpoint.hf.arrangement import weight_map
from gspo_megatron.checkpoint.hf.config import export_config
from gspo_megatron.checkpoint.hf.files import SIDE_FILES, HfWriter, TensorSpec
from gspo_megatron.checkpoint.hf.files_header import name_of
from gspo_megatron.checkpoint.hf.generation import generation_files
from gspo_megatron.checkpoint.hf.stream import MAIN_RANK, stream_hf, tensor_specs
from gspo_megatron.checkpoint.hf.writer import MAX_SHARD_BYTES
from gspo_megatron.config.families import family_of, family_of_shape
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy


def export_hf(
    policy: Policy,
    path: str | Path,
    *,
    hf_config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model's weights, config.json and tokenizer to the new folder `path`. All ranks call
    it; the main rank writes, a tensor at a time. The folder is there when it is whole.

    hf_config: config.json of the folder that the weights came from, which decides the family and
    keeps what it says beside the model; tokenizer: a folder, whose settings and tokenizer files
    are copied, or one file; dtype: of the weights (default: the model's).

    Raises, on every rank, ConfigError for a model that no family has and DataError for a
    destination that cannot be written.
    """
    family = family_of_shape(policy.shape) if hf_config is None else family_of(hf_config)
    dtype = dtype or policy.config.params_dtype
    config = export_config(policy.shape, policy.vocab_size, name_of(dtype), hf_config)
    weights = weight_map(family, policy.shape, policy.vocab_size)
    writer = _Writer(path, tensor_specs(policy, weights, dtype), max_shard_bytes)
    with writer.opened():
        for name, tensor in stream_hf(policy, family=family, dtype=dtype):
            writer.write(name, tensor)
        files = side_files(tokenizer)
        writer.publish({"config.json": config, **generation_files(files)}, files)


def side_files(tokenizer: str | Path | None) -> list[Path]:
    """The files that travel with weights: those of a tokenizer's folder, or its only file."""
    if tokenizer is None:
        return []
    path = Path(tokenizer)
    return [path] if path.is_file() else [p for name in SIDE_FILES if (p := path / name).is_file()]


class _Writer:
    """An HfWriter on the main rank alone, whose failures all ranks hear of: in the middle of the
    stream only when it has ended, because they are in step until then."""

    def __init__(self, path: str | Path, specs: Mapping[str, TensorSpec], max_bytes: int) -> None:
        is_main = dist.get_rank() == MAIN_RANK
        self._writer = HfWriter(path, specs, max_shard_bytes=max_bytes) if is_main else None
        self._problem: DataError | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self._try(lambda writer: stack.enter_context(writer))
            self._tell()
            yield

    def write(self, name: str, tensor: Tensor | None) -> None:
        self._try(lambda writer: writer.write(name, tensor))

    def publish(self, contents: Mapping[str, Mapping[str, Any]], copies: list[Path]) -> None:
        self._try(lambda writer: writer.seal())
        self._try(lambda writer: writer.publish(contents, copies))
        self._tell()

    def _try(self, action: Callable[[HfWriter], object]) -> None:
        if self._writer is None or self._problem is not None:
            return
        try:
            action(self._writer)
        except DataError as error:
            self._problem = error

    def _tell(self) -> None:
        told = [None if self._problem is None else str(self._problem)]
        dist.broadcast_object_list(told, src=MAIN_RANK)
        if told[0] is not None:
            raise DataError(told[0]) from self._problem
