"""A running, sharded model as a Hugging Face folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gspo_megatron.checkpoint.hf.side_files import export_config, generation_files, tokenizer_files
from gspo_megatron.checkpoint.hf.stream import MAIN_RANK, stream_hf, tensor_specs
from gspo_megatron.checkpoint.hf.weight_map import weight_map
from gspo_megatron.checkpoint.hf.writer import MAX_SHARD_BYTES, HfWriter
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
    it; the main rank writes, a tensor at a time. The folder appears when it is complete.

    hf_config: config.json of the folder that the weights came from; it decides the family, and its
    other keys are kept; tokenizer: a folder, of which the settings and tokenizer files are copied,
    or one file; dtype: of the weights (default: the model's).

    Raises, on every rank, ConfigError for a model that no family has and DataError for a
    destination that cannot be written.
    """
    family = family_of_shape(policy.shape) if hf_config is None else family_of(hf_config)
    dtype = dtype or policy.config.params_dtype
    config = export_config(policy.shape, policy.vocab_size, dtype, hf_config)
    weights = weight_map(family, policy.shape, policy.vocab_size)
    specs = tensor_specs(policy, weights, dtype)
    writer = HfWriter(path, specs, max_shard_bytes=max_shard_bytes)
    is_main, problem = dist.get_rank() == MAIN_RANK, None

    def attempt(action: Callable[[], object]) -> None:
        """On the main rank, unless something failed before."""
        nonlocal problem
        if is_main and problem is None:
            try:
                action()
            except DataError as error:
                problem = error

    def publish() -> None:
        files = tokenizer_files(tokenizer)
        writer.finish()
        writer.publish({"config.json": config, **generation_files(files)}, files)

    with contextlib.ExitStack() as stack:
        attempt(lambda: stack.enter_context(writer))
        _raise_on_all_ranks(problem)
        # All ranks are in step until the end of the stream, even when writing fails.
        for name, tensor in stream_hf(policy, family=family, dtype=dtype):
            if tensor is not None:
                attempt(lambda name=name, tensor=tensor: writer.write(name, tensor))
        attempt(publish)
        _raise_on_all_ranks(problem)


def _raise_on_all_ranks(problem: DataError | None) -> None:
    message = [None if problem is None else str(problem)]
    dist.broadcast_object_list(message, src=MAIN_RANK)
    if message[0] is not None:
        raise DataError(message[0]) from problem
