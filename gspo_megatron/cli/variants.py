"""The variants of an ablation and their runs: names, overrides, folders. Starts nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gspo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config

OBJECTIVES = ("grpo", "gspo")
REPLAYS = ("off", "r2", "r3")
REPORT_NAMES = ("plots", "report.html")  # they lie beside the folders of the variants

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w+.-]*")
_SET_BY_ABLATE = ("training.seed", "logging.dir", "routing.volatility")
T = TypeVar("T")


@dataclass(frozen=True)
class Variant:
    """A variant of the configuration: its name, and the values that it changes."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class PlannedRun:
    """One run of the ablation: `train CONFIG.yaml OVERRIDES`."""

    variant: Variant
    seed: int
    folder: Path
    overrides: tuple[str, ...]  # of the command line and the variant, then seed and folder
    config: Config

    @property
    def name(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"


def default_variants(config: Config) -> list[Variant]:
    """Return GRPO, GSPO and the objective of the configuration, each without replay, with r2 and
    with r3. GSPO cannot use rewards of turns. If turns may have rewards of their own, GSPO-token
    takes the place of GSPO. The objective of the configuration keeps its clip range, the other
    objectives get their default clip ranges. Raises UserError for a custom objective.
    """
    from gspo_megatron.config.load import override
    from gspo_megatron.environments.registry import environment_of

    if config.objective.import_path is not None:
        raise UserError(
            f"objective.import_path = {config.objective.import_path!r}: replaces the objectives of "
            "the default variants; define other variants with --variants FILE.yaml"
        )
    own, of_sequences = config.objective.name, {"gspo", "gspo_token"}
    by_turns = own == "gspo_token" or getattr(environment_of(config), "gives_rewards", False)
    usual = ["grpo", "gspo_token" if by_turns else "gspo"]
    names = usual if own in {*usual, "gspo"} else [*usual, own]
    variants = []
    for name in names:
        chosen = [override("objective.name", name)]
        # GSPO and GSPO-token both clip ratios of sequences, so one clip range fits both.
        if own != name and not {own, name} <= of_sequences:
            chosen += ["objective.clip_low=null", "objective.clip_high=null"]
        for replay in REPLAYS:
            overrides = [*chosen, override("routing.replay", replay)]
            routes_unused = replay == "off" and config.routing.reference_replay == "off"
            if routes_unused and config.routing.store_on_host:
                overrides.append("routing.store_on_host=false")
            full_name = name if replay == "off" else f"{name}+{replay}"
            variants.append(Variant(full_name, tuple(overrides)))
    return variants


def read_variants(path: Path) -> list[Variant]:
    """Read variants from a YAML file: a mapping from names to mappings from dotted keys to values.
    Raises ConfigError with all problems of the file."""
    from gspo_megatron.config.load import override, parse_yaml

    try:
        values = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    form = "a mapping of variants, as in `grpo+r2: {objective.name: grpo, routing.replay: r2}`"
    if not isinstance(values, Mapping) or not values:
        raise ConfigError([f"{path}: must be {form}"])
    problems = []
    for name, settings in values.items():
        if not isinstance(name, str) or not _FOLDER_NAME.fullmatch(name):
            problems.append(f"variant {name!r}: must be a possible name of a folder")
        elif name.casefold() in REPORT_NAMES:  # on some file systems "Plots" is "plots"
            problems.append(f"variant {name}: the report uses this name; choose another")
        elif not isinstance(settings, Mapping):
            problems.append(f"variant {name}: {settings!r:.60}; the file must be {form}")
        else:
            refused = [key for key in _SET_BY_ABLATE if key in settings]
            problems += [f"variant {name}: {key}: set by `ablate` itself" for key in refused]
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return [
        Variant(name, tuple(override(str(key), value) for key, value in settings.items()))
        for name, settings in values.items()
    ]


def choose_variants(words: Sequence[str], config: Config) -> list[Variant]:
    """Return the variants that `--variants` names, in that order. Without names, return all
    variants. If one of the words is a YAML file, the variants come from this file; otherwise they
    are the default variants. Raises UserError."""
    from gspo_megatron.errors import suggest

    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    names = [word for word in words if word not in files]
    if len(files) > 1:
        raise UserError(f"--variants {' '.join(files)}: one file at most")
    variants = read_variants(Path(files[0])) if files else default_variants(config)
    by_name = {variant.name: variant for variant in variants}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(
            [f"--variants {n}: no such variant; {suggest(n, list(by_name))}" for n in unknown]
        )
    return [by_name[name] for name in dict.fromkeys(names)] if names else variants


def seeds_found(variants: Sequence[Variant], out: Path) -> list[int]:
    """Return the seeds for which a variant has a run in OUT/VARIANT/seed_N."""
    folders = [folder for each in variants for folder in (out / each.name).glob("seed_*")]
    numbers = {folder.name.removeprefix("seed_") for folder in folders}
    return sorted(int(number) for number in numbers if number.isdigit())


def plan_runs(
    path: str,
    overrides: Sequence[str],
    variants: Sequence[Variant],
    seeds: Sequence[int],
    out: Path,
) -> list[PlannedRun]:
    """Plan all runs: every variant with the first seed, then every variant with the second seed,
    and so on. So an ablation that is stopped early has complete comparisons. Raises ConfigError."""
    from gspo_megatron.config.load import load_config, override

    is_moe = load_config(path, overrides).resolved_model().num_moe_experts is not None
    measured = ["routing.volatility=true"] if is_moe else []

    def plan(variant: Variant) -> list[PlannedRun]:
        runs = []
        for seed in seeds:
            folder = out / variant.name / f"seed_{seed}"
            last = [override("training.seed", seed), override("logging.dir", str(folder))]
            words = (*overrides, *measured, *variant.overrides, *last)
            runs.append(PlannedRun(variant, seed, folder, words, load_config(path, words)))
        return runs

    planned = for_each_variant(variants, plan).values()
    return [run for runs_of_seed in zip(*planned, strict=True) for run in runs_of_seed]


def for_each_variant(variants: Sequence[Variant], action: Callable[[Variant], T]) -> dict[str, T]:
    """Call `action` for each variant, and return the results by name. Raises ConfigError with the
    problems of all variants, one line each. A problem that all variants have is listed once,
    without names."""
    results: dict[str, T] = {}
    problems: dict[str, list[str]] = {}  # for each problem, the variants that have it
    for variant in variants:
        try:
            results[variant.name] = action(variant)
        except UserError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(variant.name)
    if problems:
        raise ConfigError(
            [
                line if len(names) == len(variants) else f"variant {', '.join(names)}: {line}"
                for line, names in problems.items()
            ]
        )
    return results
