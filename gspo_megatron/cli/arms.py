"""The arms of an ablation and the runs they make: names, overrides, folders. Starts nothing."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config

OBJECTIVES = ("grpo", "gspo")
REPLAYS = ("off", "r2", "r3")

_NAME = re.compile(r"[A-Za-z0-9][\w+.-]*")  # a folder's
_TAKEN = ("plots", "report.html", "report.md")  # the report's
_NOT_AN_ARMS_OWN = ("training.seed", "logging.dir", "routing.volatility")
_PLAIN = re.compile(r"[\w./][\w./+-]*")


@dataclass(frozen=True)
class Arm:
    """A named setting: what it changes in the configuration."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class PlannedRun:
    """One run of the ablation: `train CONFIG.yaml OVERRIDES`."""

    arm: Arm
    seed: int
    folder: Path
    overrides: tuple[str, ...]  # the command line's, the arm's, seed and folder
    config: Config


def override(key: str, value: Any) -> str:
    """section.key=value, as the command line takes it; text is quoted only where YAML needs it."""
    from gspo_megatron.config.load import parse_yaml

    if isinstance(value, str) and _PLAIN.fullmatch(value) and parse_yaml(value, key) == value:
        return f"{key}={value}"
    return f"{key}={json.dumps(value)}"


def default_arms(config: Config) -> list[Arm]:
    """Both objectives, each without replay, with r2 and with r3.

    The objective that the configuration has keeps its clip range, the other one gets its own
    default. Raises UserError for an objective of the user's own, of which none of this is known.
    """
    if config.objective.import_path is not None:
        raise UserError(
            f"objective.import_path = {config.objective.import_path!r}: replaces the objectives of "
            "the usual arms; name arms of your own with --arms FILE.yaml"
        )
    arms = []
    for name in OBJECTIVES:
        chosen = [override("objective.name", name)]
        if config.objective.name != name:
            chosen += ["objective.clip_low=null", "objective.clip_high=null"]
        for replay in REPLAYS:
            overrides = [*chosen, override("routing.replay", replay)]
            reference_replays = config.routing.reference_replay != "off"
            if replay == "off" and config.routing.store_on_host and not reference_replays:
                overrides.append("routing.store_on_host=false")  # nothing would read it
            arms.append(Arm(name if replay == "off" else f"{name}+{replay}", tuple(overrides)))
    return arms


def read_arms(path: Path) -> list[Arm]:
    """Arms of a YAML file: a mapping from names to mappings from dotted keys to values.

    Raises ConfigError with all that is wrong with it.
    """
    from gspo_megatron.config.load import parse_yaml

    try:
        values = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not a text file: {error}"]) from error
    form = "a mapping of arms, as in `grpo+r2: {objective.name: grpo, routing.replay: r2}`"
    if not isinstance(values, Mapping) or not values:
        raise ConfigError([f"{path}: must be {form}"])
    problems = []
    for name, settings in values.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(f"{path}: arm {name!r}: must be a name for a folder")
        elif name.casefold() in _TAKEN:  # some file systems tell no capitals apart
            problems.append(f"{path}: arm {name}: the report has that name; give the arm another")
        elif not isinstance(settings, Mapping):
            problems.append(f"{path}: arm {name}: {settings!r:.60}; the file must be {form}")
        else:
            own = [f"{path}: arm {name}: {key}: set by `ablate` itself" for key in _NOT_AN_ARMS_OWN]
            problems += [text for key, text in zip(_NOT_AN_ARMS_OWN, own) if key in settings]
    if problems:
        raise ConfigError(problems)
    return [
        Arm(name, tuple(override(str(key), value) for key, value in settings.items()))
        for name, settings in values.items()
    ]


def choose_arms(words: Sequence[str], config: Config) -> list[Arm]:
    """What `--arms` names: arms, in that order, of the file among the words or else of the usual
    ones; all of them where none is named. Raises UserError."""
    from gspo_megatron.config.problems import suggest

    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    names = [word for word in words if word not in files]
    if len(files) > 1:
        raise UserError(f"--arms {' '.join(files)}: one file at most")
    arms = read_arms(Path(files[0])) if files else default_arms(config)
    by_name = {arm.name: arm for arm in arms}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(
            [f"--arms {n}: no such arm; {suggest(n, list(by_name))}" for n in unknown]
        )
    return [by_name[name] for name in dict.fromkeys(names)] if names else arms


def plan_runs(
    path: str, overrides: Sequence[str], arms: Sequence[Arm], seeds: Sequence[int], out: Path
) -> list[PlannedRun]:
    """All runs: every arm of a seed, then the next seed, so that an ablation that is stopped early
    has whole comparisons. Raises ConfigError with what is wrong with any arm."""
    from gspo_megatron.config import load_config

    measured = []
    if load_config(path, overrides).resolved_model().num_moe_experts is not None:
        measured = ["routing.volatility=true"]
    runs: list[PlannedRun] = []
    problems = ArmProblems(arms)
    for seed in seeds:
        for arm in arms:
            folder = out / arm.name / f"seed_{seed}"
            own = [override("training.seed", seed), override("logging.dir", str(folder))]
            all_overrides = (*overrides, *measured, *arm.overrides, *own)
            with problems.of(arm):
                config = load_config(path, all_overrides)
                runs.append(PlannedRun(arm, seed, folder, all_overrides, config))
    problems.raise_if_any()
    return runs


class ArmProblems:
    """Gathers what is wrong with arms; what is wrong with all of them is said once."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = arms
        self._found: dict[str, dict[str, None]] = {}  # line -> names of arms, in order

    @contextlib.contextmanager
    def of(self, arm: Arm) -> Iterator[None]:
        """Note the UserErrors inside as problems of `arm`."""
        try:
            yield
        except UserError as error:
            for line in str(error).splitlines():
                self._found.setdefault(line, {})[arm.name] = None

    def raise_if_any(self) -> None:
        """Raise ConfigError with one line a problem."""
        lines = []
        for text, names in self._found.items():
            everywhere = len(names) == len(self._arms)
            kind = "arm" if len(names) == 1 else "arms"
            lines.append(text if everywhere else f"{kind} {', '.join(names)}: {text}")
        if lines:
            raise ConfigError(lines)


def baselines(runs: Sequence[PlannedRun]) -> dict[str, str]:
    """For each arm with replay the arm that is the same without it, where there is one."""
    no_replay = {"replay": "off", "store_on_host": False}
    without: dict[str, str] = {}
    keys = {}
    for run in runs:
        values = run.config.model_dump(exclude={"logging"})
        values["training"].pop("seed")
        values["routing"] |= no_replay
        key = keys[run.arm.name] = json.dumps(values, sort_keys=True)
        if run.config.routing.replay == "off":
            without.setdefault(key, run.arm.name)
    return {
        run.arm.name: without[keys[run.arm.name]]
        for run in runs
        if run.config.routing.replay != "off" and keys[run.arm.name] in without
    }
