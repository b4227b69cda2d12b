"""Weights of a Hugging Face folder straight into a sharded model."""

from __future__ import annotations

from pathlib import Path

import torch

from gspo_megatron.checkpoint.hf.arrangement import WeightMap
from gspo_megatron.checkpoint.hf.checked import checked_folder, tied_copy
from gspo_megatron.checkpoint.hf.files import HfFolder
from gspo_megatron.checkpoint.hf.local import Held, held_tensors
from gspo_megatron.checkpoint.hf.pieces import fill
from gspo_megatron.config.families import family_of
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy


@torch.no_grad()
def load_hf(path: str | Path, policy: Policy) -> None:
    """Fill this rank's parameters, and the biases of its routers, from the folder.

    Each rank reads what its own shards need and nothing beside it; values are converted to the
    model's dtype, padding of the vocabulary becomes zero. An optimizer that exists already keeps
    its fp32 copies of the old weights: load before it is built, or call its reload_model_params.

    Raises DataError, with all that is wrong with the folder and before anything is changed.
    """
    folder, weights = checked_folder(path, policy.shape, policy.vocab_size)
    held = held_tensors(policy, weights)
    _check_tied_copy(folder, weights, held)
    for tensor in held:
        fill(tensor.data, weights[tensor.name], tensor.slices, folder.read)
    folder.close()


def _check_tied_copy(folder: HfFolder, weights: WeightMap, held: list[Held]) -> None:
    """Some published folders hold a tied embedding twice; two different ones are two models."""
    copy = tied_copy(weights, family_of(folder.config))
    if copy is None or copy not in folder.tensors:
        return
    embedding = "embedding.word_embeddings.weight"
    for tensor in held:
        for box in weights[tensor.name].cut(tensor.slices) if tensor.name == embedding else ():
            slices = box.source_slices
            if not torch.equal(folder.read(copy, slices), folder.read(box.name, slices)):
                raise DataError(
                    f"{folder.path}: config.json says tie_word_embeddings, and {copy} differs from "
                    f"{box.name}"
                )
