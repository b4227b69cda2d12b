"""The small files of a checkpoint: the state of the run and the description of its model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import gspo_megatron
from gspo_megatron.checkpoint.folder import Position
from gspo_megatron.config import Config
from gspo_megatron.config.load import parse_yaml
from gspo_megatron.config.lora import LoraSection
from gspo_megatron.config.schema import suite_key
from gspo_megatron.config.stages import AnyConfig
from gspo_megatron.data.tokenizers import files_beside
from gspo_megatron.errors import ConfigError, DataError
from gspo_megatron.families.model_shape import MODEL_FILE
from gspo_megatron.files import fingerprint, fingerprint_of_weights, os_errors, parse_json
from gspo_megatron.hub import name_of, written
from gspo_megatron.plugins import module_folders

STATE_FILE = "run.json"
CONFIG_FILE = "config.yaml"
TOKENIZER, BESIDE_TOKENIZER = "data.tokenizer", "data.tokenizer beside"
_PACKAGES = ("megatron-core", "torch")


@dataclass
class RunState:
    """The state of a run without its tensors: the contents of run.json."""

    phase: str  # the stage; see folder.PHASES
    step: int  # finished steps of the stage
    trainer: dict[str, Any]  # trainer_state: the position in the learning-rate schedule
    loader: dict[str, Any]  # PromptLoader.state_dict
    fingerprints: dict[str, str]  # see the function `fingerprints`
    layout: str
    world_size: int
    versions: dict[str, str]  # package -> version
    metrics: dict[str, float] = field(default_factory=dict)  # the metrics that `keep_best` compares
    warned: list[str] = field(default_factory=list)  # the warnings given so far
    # Describes the next step's responses, if the run was saved with them; see rl.step_inputs
    rollouts: dict[str, Any] | None = None
    # If there are `rollouts`: the fields `loader` and `reward_moments` as they were before them
    before_rollouts: dict[str, Any] = field(default_factory=dict)
    # Metrics of the step that are not logged yet, because something failed after the update.
    unevaluated: dict[str, float] | None = None
    watch: dict[str, Any] = field(default_factory=dict)  # CollapseWatch.state
    # RunningMoments of a reward model's scores, with reward.model.normalize = running
    reward_moments: dict[str, float] = field(default_factory=dict)
    rollbacks: int = 0  # how often the run has gone back to an earlier checkpoint

    @property
    def position(self) -> Position:
        return Position(self.phase, self.step, self.rollouts is not None)

    def without_rollouts(self) -> RunState:
        """Return the state as it was before the responses of the next step were generated."""
        return dataclasses.replace(self, rollouts=None, before_rollouts={}, **self.before_rollouts)

    def dump(self) -> bytes:
        """Return the contents of run.json."""
        return (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode()

    @classmethod
    def read(cls, checkpoint: Path) -> RunState:
        """Read the state in a checkpoint. Raises DataError if this version cannot read it."""
        path = checkpoint / STATE_FILE
        content = _read(path)
        try:
            return cls(**parse_json(content))
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}: written by another version of this program") from error


def read_config(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of the configuration that a checkpoint was saved with. Raises
    DataError."""
    path = checkpoint / CONFIG_FILE
    try:
        sections = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    is_mapping = isinstance(sections, dict)
    if not (is_mapping and all(isinstance(each, dict) for each in sections.values())):
        raise DataError(f"{path}: not the configuration of a run")
    return sections


def fingerprints(config: AnyConfig) -> dict[str, str]:
    """Return fingerprints of the input files, the tokenizer and the user's functions, by
    configuration key. Raises DataError."""
    files: dict[str, Sequence[str | Path]] = {**config.input_files()}
    files[TOKENIZER] = [config.data.tokenizer]
    if isinstance(config, Config):
        named = {
            "environment.import_path": config.environment.import_path,
            "reward.import_path": config.reward.import_path,
            "objective.import_path": config.objective.import_path,
            "objective.advantage_import_path": config.objective.advantage_import_path,
            **{
                f"{suite_key(name)}.reward.import_path": suite.reward.import_path
                for name, suite in config.evaluation.suites.items()
            },
        }
        code = {key: _module_file(path.partition(":")[0]) for key, path in named.items() if path}
        files |= {key: [file] for key, file in code.items() if file is not None and file.is_file()}
    result = {
        key: "+".join(fingerprint(path, of_rows=key != TOKENIZER) for path in paths)
        for key, paths in files.items()
    }
    # under a key of its own, which checkpoints of earlier versions do not have
    beside = files_beside(config.data.tokenizer)
    return {**result, BESIDE_TOKENIZER: "+".join(map(fingerprint, beside))}


def _module_file(module: str) -> Path | None:
    """Return the file that `plugins.load_function` would import for a module. This function does
    not import the module, because the module may need torch."""
    if module in sys.modules:
        known = getattr(sys.modules[module], "__file__", None)
        return None if known is None else Path(known)
    name, places, origin = "", [*sys.path, *module_folders()], None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return None
        places, origin = list(spec.submodule_search_locations or ()), spec.origin
    return None if origin is None else Path(origin)


def versions() -> dict[str, str]:
    """Return the versions of this program and of the packages that compute its results."""
    found = {"gspo-megatron": gspo_megatron.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def describe_model(
    config: AnyConfig, vocab_size: int, hf: Any = None, base: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the contents of model.json, which conversions read. `vocab_size`: without padding;
    `hf`: the config.json that the model was imported with; `base`: the base of adapters, see
    `base_of`."""
    adapters = {}
    if config.model.lora.rank:
        lora = config.model.lora.model_dump(exclude={"checkpoint"})
        adapters = {"lora": lora, "base": None if base is None else dict(base)}
    return {
        "shape": dataclasses.asdict(config.resolved_model()),
        "vocab_size": vocab_size,
        # absolute: a conversion may run in another working directory
        "tokenizer": written(str(Path(config.data.tokenizer).absolute())),
        "hf": hf,
        **adapters,
    }


def base_of(path: str | Path) -> dict[str, str]:
    """Describe the frozen model that adapters are trained on. `path` is a Hugging Face folder or a
    checkpoint of this program. The description has its absolute path, or its name on the Hub, and a
    fingerprint of its weights. Raises DataError."""
    name = name_of(str(path))
    place = str(Path(path).absolute()) if name is None else str(name)
    return {"path": place, "fingerprint": fingerprint_of_weights(path)}


def lora_of(document: Mapping[str, Any], checkpoint: Path) -> LoraSection | None:
    """Return the settings of a checkpoint's adapters from its model.json, or None if the checkpoint
    holds a whole model. Raises DataError."""
    found = document.get("lora")
    if found is None:
        return None
    try:
        return LoraSection.model_validate(found)
    except ValueError as error:
        wrong = "does not describe adapters that this version knows"
        raise DataError(f"{checkpoint / MODEL_FILE}: lora: {wrong}") from error


def read_model(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's model.json. Raises DataError."""
    path = checkpoint / MODEL_FILE
    content = _read(path)
    try:
        model = parse_json(content)
    except ValueError as error:
        raise DataError(f"{path}: not JSON") from error
    if not isinstance(model, dict) or not {"shape", "vocab_size"} <= model.keys():
        raise DataError(f"{path}: lacks the model's shape or vocabulary")
    return model


def _read(path: Path) -> bytes:
    with os_errors(path, "cannot be read"):
        return path.read_bytes()
