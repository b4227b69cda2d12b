"""The small files of a checkpoint: how far the run is, and what its model is."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_megatron.checkpoint.folder import Position
from gspo_megatron.config import Config
from gspo_megatron.config.stages import StageConfig
from gspo_megatron.data.fingerprints import fingerprint
from gspo_megatron.data.inputs import prompt_files
from gspo_megatron.errors import DataError

STATE_FILE = "run.json"
CONFIG_FILE = "config.yaml"
MODEL_FILE = "model.json"
TOKENIZER = "data.tokenizer"


@dataclass
class RunState:
    """run.json: everything of a run at a checkpoint that is no tensor."""

    phase: str
    step: int  # finished steps of the phase
    phase_is_done: bool
    trainer: dict[str, Any]  # trainer_state: where the learning-rate schedule is
    loader: dict[str, Any]  # PromptLoader.state_dict
    fingerprints: dict[str, str]  # of the input files, by the key that names them
    layout: str
    world_size: int
    versions: dict[str, str | None]
    figures: dict[str, float] = field(default_factory=dict)  # what `keep_best` goes by
    said: list[str] = field(default_factory=list)  # warnings that are given once in a run
    rollouts: dict[str, Any] | None = None  # of a step that is half done: see train.rollout_buffer

    @property
    def position(self) -> Position:
        return Position(self.phase, self.step, self.rollouts is not None)

    def dump(self) -> bytes:
        """The contents of run.json."""
        return (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode()

    @classmethod
    def read(cls, checkpoint: Path) -> RunState:
        """That of a checkpoint. Raises DataError where this version cannot read it."""
        path = checkpoint / STATE_FILE
        try:
            return cls(**json.loads(path.read_bytes()))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}: written by another version of this program") from error


def fingerprints(config: Config | StageConfig) -> dict[str, str]:
    """Of the input files and the tokenizer. Raises DataError."""
    if isinstance(config, StageConfig):
        files = {**config.input_files(), TOKENIZER: [config.data.tokenizer]}
        return {key: "+".join(map(fingerprint, paths)) for key, paths in files.items()}
    files = {**prompt_files(config), TOKENIZER: config.data.tokenizer}
    return {key: fingerprint(path) for key, path in files.items()}


def describe_model(config: Config, vocab_size: int, hf: Any = None) -> dict[str, Any]:
    """model.json: what a conversion has to know. `vocab_size` is the true one; `hf` the contents of
    the config.json that the model was imported from."""
    return {
        "shape": dataclasses.asdict(config.resolved_model()),
        "vocab_size": vocab_size,
        "tokenizer": config.data.tokenizer,
        "hf": hf,
    }


def read_model(checkpoint: Path) -> dict[str, Any]:
    """The model.json of a checkpoint. Raises DataError."""
    path = checkpoint / MODEL_FILE
    try:
        model = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON") from error
    if not isinstance(model, dict) or not {"shape", "vocab_size"} <= model.keys():
        raise DataError(f"{path}: lacks the model's shape or vocabulary")
    return model
