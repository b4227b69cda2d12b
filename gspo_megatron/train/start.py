"""What a run goes on from, found by all ranks together: each reads a share of the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gspo_megatron.checkpoint.folder import CHECKPOINTS, REFERENCE
from gspo_megatron.checkpoint.manifest import find_damage
from gspo_megatron.checkpoint.resume import (
    Start,
    candidates,
    conclude,
    given_checkpoint,
    is_of_model,
    run_folder,
    weights_fit,
)
from gspo_megatron.checkpoint.run_state import read_model
from gspo_megatron.checkpoint.tensors import load_model
from gspo_megatron.config import Config
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.train.agreement import of_all, on_main


def find_start(config: Config, *, fresh: bool) -> Start:
    """The newest whole checkpoint of the run, or nothing; every rank calls it.

    Raises UserError, on all ranks alike, for what `fresh` forbids, for a run of which no checkpoint
    is whole, and for keys that have changed and must not.
    """
    damage: dict[str, list[str]] = {}
    chosen = None
    for checkpoint in on_main(lambda: candidates(config, fresh=fresh)):
        wrong = damage_of(checkpoint)
        if not wrong:
            chosen = checkpoint
            break
        damage[checkpoint.name] = wrong
    return on_main(lambda: conclude(config, chosen, damage))


def damage_of(checkpoint: Path, *, model_only: bool = False) -> list[str]:
    """What is wrong with a checkpoint's files; every rank calls it and gets the same."""
    share = (dist.get_rank(), dist.get_world_size())
    only = is_of_model if model_only else None
    return sorted(
        line for lines in of_all(find_damage(checkpoint, share=share, only=only)) for line in lines
    )


def load_weights(config: Config, policy: Policy, path: str) -> Path:
    """Read the weights that model.checkpoint_path names; returns the checkpoint. Raises UserError,
    on all ranks alike, where there is none, or it is damaged or of another model."""
    checkpoint = on_main(lambda: given_checkpoint(path))
    _assert_whole(checkpoint, model_only=True)
    on_main(lambda: weights_fit(checkpoint, config, policy.vocab_size))
    load_model(checkpoint, policy)
    return checkpoint


def load_initial_weights(config: Config, policy: Policy) -> Any:
    """Give the policy the weights that a new run begins with: those of a checkpoint, of a Hugging
    Face folder, or random ones, which it has already.

    Returns the config.json of the Hugging Face model that they come from, None where they do not.
    """
    if config.model.checkpoint_path is not None:
        return read_model(load_weights(config, policy, config.model.checkpoint_path))["hf"]
    if config.model.hf_path is not None:
        from gspo_megatron.checkpoint.hf.load import load_hf

        load_hf(config.model.hf_path, policy)
        return json.loads((Path(config.model.hf_path) / "config.json").read_bytes())
    return None


def load_reference(config: Config, policy: Policy) -> None:
    """Read the weights that RL started from. Raises UserError, on all ranks alike, where they are
    not whole."""
    reference = run_folder(config) / CHECKPOINTS / REFERENCE
    _assert_whole(reference)
    load_model(reference, policy)


def _assert_whole(checkpoint: Path, *, model_only: bool = False) -> None:
    wrong = damage_of(checkpoint, model_only=model_only)
    if wrong:
        raise DataError("\n".join(f"{checkpoint}: {line}" for line in wrong))
