"""Loads a configuration from a YAML file and overrides; one error reports all problems."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import BaseModel, ValidationError

from gspo_megatron.config.beside import path_problems, suites_beside, with_paths_beside
from gspo_megatron.config.hub import with_folders
from gspo_megatron.config.known import known_part
from gspo_megatron.config.megatron_fields import MEGATRON_CLASSES, megatron_problems
from gspo_megatron.config.model_rules import value_at
from gspo_megatron.config.parallel import LAYOUT_KEYS, expand_layout
from gspo_megatron.config.phases import phase_problems, phases_of, values_of_phase
from gspo_megatron.config.renamed import RENAMED, warn_of_old_names, with_new_names
from gspo_megatron.config.schema import Config, EvaluationSection, RunConfig
from gspo_megatron.config.section import NAME, key_above, keys_of
from gspo_megatron.config.stages import (
    AnyConfig,
    FineTuningConfig,
    PreferenceConfig,
    PretrainingConfig,
    StageConfig,
)
from gspo_megatron.config.suite_rules import suite_problems
from gspo_megatron.config.yaml12 import dump_yaml, has_comment, parse_yaml
from gspo_megatron.errors import ConfigError, did_you_mean, nearest, problem, suggest

C = TypeVar("C", bound=RunConfig)  # the kind of configuration


@overload
def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config: ...
@overload
def load_config(path: str | Path, overrides: Sequence[str], schema: type[C]) -> C: ...
def load_config(path: str | Path, overrides: Sequence[str] = (), schema: Any = Config) -> Any:
    """Read `path`, apply `section.key=value` overrides in order, validate as `schema`.

    Without `logging.dir` the run folder is runs/<name of the file>. Raises ConfigError with every
    problem of file, overrides and schema. Rules about several keys together are checked later, by
    `check_config`.
    """
    path = Path(path)
    values = read_mapping(path, overrides)
    warn_of_old_names(values, overrides)
    _refuse_other_stage(apply_overrides(values, overrides)[0], path, schema)
    return parse_config(values, overrides, path.stem, schema)


def _refuse_other_stage(values: Mapping[str, Any], path: Path, schema: Any) -> None:
    """Raise ConfigError if the values name the training data of another stage, and none of this."""
    data = values.get("data")
    section = data if isinstance(data, Mapping) else {}
    for stage, other in STAGES.items():
        key = other.inputs[0]
        if section.get(key) and not section.get(schema.inputs[0]):
            command = "train" if stage == "rl" else stage.replace("_", "-")
            wrong = f"with data.{key} it is a configuration of `gspo-megatron {command}`"
            raise ConfigError([f"{path}: {wrong}; allowed here: data.{schema.inputs[0]}"])


@overload
def parse_config(
    values: Mapping[str, Any], overrides: Sequence[str] = (), name: str = "config"
) -> Config: ...
@overload
def parse_config(
    values: Mapping[str, Any], overrides: Sequence[str], name: str, schema: type[C]
) -> C: ...
def parse_config(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    name: str = "config",
    schema: Any = Config,
) -> Any:
    """Make a configuration from values in memory; without `logging.dir` the run folder is
    runs/<name>. In everything else, this function does the same as `load_config`.

    Raises ConfigError.
    """
    values, problems = with_suites_of_files(values)  # first, as overrides may change a suite's key
    raw, wrong = apply_overrides(values, overrides)
    raw, unread = with_suites_of_files(raw)
    problems += wrong + [line for line in unread if line not in problems]
    problems += path_problems(raw)
    raw, wrong = with_folders(raw, name)
    problems += wrong
    for section in schema.model_fields:
        if raw.get(section) is None:  # absent or empty
            raw[section] = {}
    if isinstance(raw["parallel"], dict):
        raw["parallel"], wrong = expand_layout(raw["parallel"])
        if wrong:  # without `layout` the schema can still check the rest of the section
            del raw["parallel"]["layout"]
        problems += wrong
    config, errors, of_fields = None, [], []
    try:
        config = schema.model_validate(raw)
        problems += _problems_of_phases(config, name)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    for dotted in MEGATRON_CLASSES:
        section, key = dotted.split(".")
        fields = raw[section].get(key) if isinstance(raw[section], dict) else None
        if isinstance(fields, dict):
            of_fields += megatron_problems(dotted, fields)
    if config is None or problems or of_fields:
        known = known_part(raw, schema, errors, [*problems, *of_fields])
        problems += [*(_describe(item, schema) for item in _of_one_form(errors)), *of_fields]
        raise ConfigError(problems, None if known is None else _with_folder(known, name))
    return _with_folder(config, name)


def _problems_of_phases(config: Any, name: str) -> list[str]:
    """Return a line for each mistake in training.phases. Both the order of the phases and their
    values may have mistakes. name: the name of the default run folder."""
    phases = phases_of(config)
    problems, known = list(phase_problems(config)), set[str]()
    if problems or not phases:
        return problems
    values = config.model_dump()
    values["training"] = values["training"] | {"phases": []}
    for i in range(len(phases)):
        try:
            parse_config(values_of_phase(values, phases[: i + 1]), (), name)
        except ConfigError as error:  # a phase repeats the mistakes of the phase before
            problems += [f"training.phases[{i}]: {e}" for e in error.problems if e not in known]
            known.update(error.problems)
    return problems


def _with_folder(config: C, name: str) -> C:
    """Return the configuration with the default run folder, if it names none."""
    section: Any = config.known("logging")
    # A folder that is set stays. If a value is wrong, `section` is None or `dir` is missing.
    if section is None or vars(section).get("dir", "") is not None:
        return config
    logging = section.model_copy(update={"dir": f"runs/{name}"})
    return config.model_copy(update={"logging": logging})


def to_yaml(config: Config | StageConfig) -> str:
    """Return every key of a configuration as YAML, which `load_config` reads back unchanged."""
    return dump_yaml(config.model_dump())


def to_shown_yaml(config: Config | StageConfig, unread: Mapping[str, str]) -> str:
    """Return the text of `to_yaml` for people: a key that nothing reads becomes a comment with the
    reason.

    unread: section.key -> reason. It need not contain a key `name` that another key replaces, as
    reward.import_path replaces reward.name.
    """
    reasons, lines, section = {**_replaced_names(config), **unread}, [], ""
    for line in to_yaml(config).splitlines():
        if line[:1].isalpha():
            section = line.partition(":")[0]
        key = line.strip().partition(":")[0]
        is_key = line.startswith("  ") and line[2:3].isalpha()
        reason = reasons.get(f"{section}.{key}") if is_key else None
        lines.append(line if reason is None else f"  # {key}: not read; {reason}")
    return "\n".join(lines) + "\n"


def _replaced_names(config: Config | StageConfig) -> dict[str, str]:
    replaced = {}
    # objective.name is not listed: its advantage also serves objective.import_path
    for name in ("environment", "reward"):
        section = getattr(config, name, None)  # not every stage has all of these sections
        for key in ("import_path", "verifiers"):
            if getattr(section, key, None) is not None:
                replaced[f"{name}.name"] = f"{name}.{key} replaces it"
    return replaced


def apply_overrides(
    values: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of `values` with the overrides applied in order, and the problems of overrides.
    Renamed keys get their new names (config/renamed.py).

    An override is split at its first "="; its value is YAML: `training.steps=10`,
    `parallel.layout=tp=2,pp=2`, `rollout.stop=["a", "b"]`. An empty value is null. A new layout
    replaces the sizes of a run's resolved configuration, which names all of them.
    """
    result, problems = with_new_names(copy.deepcopy(dict(values)))
    parallel = result.get("parallel")
    sizes = LAYOUT_KEYS.values()
    is_resolved = isinstance(parallel, dict) and all(key in parallel for key in sizes)
    if is_resolved and any(map(_sets_layout, overrides)):
        result["parallel"] = {k: v for k, v in parallel.items() if k not in sizes}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        dotted = dotted.strip()
        parts = RENAMED.get(dotted, dotted).split(".")
        if not equals or len(parts) < 2 or not all(parts):
            problems.append(f"override {override!r}: not of the form section.key=value")
            continue
        try:
            value = parse_yaml(text, f"override {override!r}")
        except ConfigError as error:
            problems += error.problems
            continue
        if has_comment(text):
            quoted = json.dumps(text.strip(), ensure_ascii=False)
            wrong = f'" #" begins a comment in YAML; with quotes it is text: {dotted}={quoted}'
            problems.append(f"override {override!r}: {wrong}")
            continue
        node, key = result, parts.pop()
        for depth, part in enumerate(parts, start=1):
            child = node.get(part)
            if child is None:  # absent, or a section whose keys are all commented out
                child = node[part] = {}
            if not isinstance(child, dict):
                wrong = f"{'.'.join(parts[:depth])} is {child!r}, which has no keys below it"
                problems.append(f"override {override!r}: {wrong}")
                break
            node = child
        else:
            node[key] = value
    result, wrong = with_new_names(result)  # overrides may set whole sections
    return result, problems + wrong


def _sets_layout(override: str) -> bool:
    key, _, text = override.partition("=")
    return key.strip() == "parallel.layout" and text.strip() not in ("", "null", "~")


def with_suites_of_files(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace each file that `evaluation.suites` names by the suites in this file.

    Returns the new values, and the problems of the files.
    """
    section: Any = values.get("evaluation")
    problems: list[str] = []
    suites = section.get("suites") if isinstance(section, Mapping) else None
    if not isinstance(suites, Mapping):
        return dict(values), []
    result: dict[Any, Any] = {}
    for name, suite in suites.items():
        result[name] = suite
        if isinstance(suite, str):
            try:
                of_file = suites_of_file(suite)
                result[name] = of_file.get(name, next(iter(of_file.values())))
                if name not in of_file and len(of_file) > 1:
                    allowed = ", ".join(f"{suite}:{each}" for each in of_file)
                    problems.append(
                        f"evaluation.suites.{name} = {suite}: has several suites; "
                        f"allowed: {allowed}"
                    )
            except ConfigError as error:
                problems += [f"evaluation.suites.{name}: {line}" for line in error.problems]
                del result[name]
    return {**values, "evaluation": {**section, "suites": result}}, problems


def parse_suites(suites: Mapping[str, Any], overrides: Sequence[str]) -> EvaluationSection:
    """Make the section `evaluation` from suites and overrides, without a whole configuration.

    Raises ConfigError with all problems of the suites and overrides.
    """
    raw, problems = apply_overrides({"evaluation": {"suites": suites}}, overrides)
    raw, wrong = with_folders(raw, "")
    problems += wrong
    for other in raw.keys() - {"evaluation"}:
        problems.append(f"{other}: nothing reads it without a model; allowed: evaluation.key=value")
    try:
        section = EvaluationSection.model_validate(raw["evaluation"])
        for key, wrong in suite_problems(section):
            problems.append(problem(key, value_at(section, key.partition(".")[2]), wrong))
        if section.interval:
            wrong = "nothing reads it without a run; allowed: 0"
            problems.append(problem("evaluation.interval", section.interval, wrong))
        for name, suite in section.suites.items():
            if suite.chat_template is False:
                wrong = "a server applies its own chat template; allowed: null or true"
                problems.append(problem(f"evaluation.suites.{name}.chat_template", False, wrong))
    except ValidationError as error:
        for item in _of_one_form(error.errors(include_url=False)):
            item["loc"] = ("evaluation", *item["loc"])
            problems.append(_describe(item, Config))
    if problems:
        raise ConfigError(problems)
    return section


def suites_of_file(source: str) -> dict[str, Any]:
    """Return the suites of FILE.yaml by name, or only the suite NAME of FILE.yaml:NAME. Raises
    ConfigError."""
    path, name = source, ""
    if not os.path.exists(source) and ":" in source:  # False for an impossible name, too
        path, _, name = source.rpartition(":")
    suites = read_mapping(Path(path), what="file of suites")
    data = suites.get("data")
    if isinstance(data, dict) and "tokenizer" in data:
        wrong = "a configuration; allowed: a file with what evaluation.suites has below it"
        raise ConfigError([f"{path}: {wrong}"])
    if name and name not in suites:
        raise ConfigError([f"{path}: no suite {name!r}; {suggest(name, [*map(str, suites)])}"])
    return {name: suites[name]} if name else suites


def override(key: str, value: Any) -> str:
    """Return section.key=value for the command line; text is quoted only if YAML needs the
    quotes."""
    plain = isinstance(value, str) and _NEEDS_NO_QUOTES.fullmatch(value)
    if plain and parse_yaml(value, key) == value:
        return f"{key}={value}"
    # JSON writes a character beyond U+FFFF as two surrogates, which YAML would not join
    text = _TWO_HALVES.sub(lambda halves: json.loads(f'"{halves[0]}"'), json.dumps(value))
    return f"{key}={text}"


_NEEDS_NO_QUOTES = re.compile(r"[\w./][\w./+-]*")
_TWO_HALVES = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")


CONFIGURATION = "configuration file"


def read_mapping(
    path: Path, overrides: Sequence[str] = (), what: str = CONFIGURATION
) -> dict[str, Any]:
    """Read the sections of a configuration file, or the suites of a file of suites.

    Paths that exist only beside the file are replaced as in `with_paths_beside`. Raises
    ConfigError, which also reports the problems of overrides.
    """
    values = _read_mapping(path, overrides, what)
    if what == CONFIGURATION:
        return with_paths_beside(values, path)
    return suites_beside(values, path)


def _read_mapping(path: Path, overrides: Sequence[str], what: str) -> dict[str, Any]:
    try:
        values = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
        if isinstance(values, dict) and (values or what == CONFIGURATION):
            return values
        wrong = f"must be a mapping of sections, as in `model:`, not {values!r:.60}"
        if what != CONFIGURATION:
            wrong = "must be a mapping of names to suites, as in `aime24:`"
        elif values is None:
            wrong = "empty; a configuration needs at least data.tokenizer"
        problems = [f"{path}: {wrong}"]
    except ConfigError as error:
        problems = error.problems
    except FileNotFoundError:
        problems = [f"{path}: no such {what}"]
    except IsADirectoryError:
        problems = [f"{path}: is a folder; name the {what} in it"]
    except UnicodeDecodeError as error:
        problems = [f"{path}: not a text file: {error}"]
    except (OSError, ValueError) as error:  # ValueError: a NUL in the file's name
        problems = [f"{path}: cannot be read: {getattr(error, 'strerror', error)}"]
    raise ConfigError(problems + apply_overrides({}, overrides)[1])


# What pydantic writes into the place of an error, if a key's value may have several forms.
_FORM = re.compile(r"(literal|list|dict)\[.+\]|constrained-float")


def _of_one_form(errors: Sequence[Any]) -> list[Any]:
    """Return the errors, with those of only one form for a value that may have several forms, such
    as a name or a list of names. This is the form that the value has."""
    found, others = [], dict[Any, Any]()
    for error in errors:
        place = error["loc"]
        at = next((n for n, part in enumerate(place) if _FORM.fullmatch(str(part))), None)
        if at is None:
            found.append(error)
            continue
        above, inside = place[:at], place[at + 1 :]
        error = {**error, "loc": (*above, *inside)}
        is_one = error["type"] not in ("list_type", "dict_type")
        if inside or (is_one and not isinstance(error["input"], (list, dict))):
            found.append(error)
        else:
            others.setdefault(above, error)
    places = [error["loc"] for error in found]
    left = [e for above, e in others.items() if not any(p[: len(above)] == above for p in places)]
    return [*found, *left]


def _describe(error: Any, schema: type[BaseModel]) -> str:
    """Return one line for one error of pydantic."""
    location, value, kind = error["loc"], error["input"], error["type"]
    places = [*map(str, location)]
    is_suite = places[:2] == ["evaluation", "suites"] and len(places) > 2
    if is_suite and places[3:] == ["[key]"]:
        allowed = "allowed: letters, digits, _ and -, as in aime-24; a number in quotes"
        return f"evaluation.suites: {location[2]!r} cannot be the name of a suite; {allowed}"
    is_name, key = places[-1] == "[key]", places[0]
    for part in location[1 : len(location) - is_name]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    if is_suite:
        places[2] = NAME
    keys = keys_of(schema)
    above = key_above(".".join(places), keys)
    description = "a section" if above is None else keys[above].description
    if kind == "extra_forbidden":
        if len(location) == 1:
            return f"{key}: unknown section; {suggest(key, list(schema.model_fields))}"
        section, name = ".".join(places[:-1]), location[-1]
        if places[:2] == ["training", "phases"] and name in schema.model_fields:
            return f"{key}: stays the same for a whole run; set {name}"
        elsewhere = [known for known in keys if known.endswith(f".{name}")]
        siblings = [k.removeprefix(f"{section}.") for k in keys if k.startswith(f"{section}.")]
        inner = {k.split(".")[0] for k in siblings if "." in k}
        meant = elsewhere[:3] or nearest(str(name), inner)
        hint = did_you_mean(meant) if meant else description
        if siblings and not meant:
            hint = suggest(str(name), siblings)
        return problem(key, value, f"unknown key; {hint}")
    if kind == "invalid_key" or (is_name and kind == "string_type"):
        return f"{key}: a key must be text"
    if kind == "missing":
        return f"{key}: required and missing; {description}"
    if kind in ("model_type", "dict_type"):
        return problem(key, value, "must be a mapping of keys, as in `key: value`")
    if kind == "literal_error":
        allowed = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        hint, listing = suggest(str(value), allowed), f"allowed: {', '.join(allowed)}"
        hint = hint if hint == listing else f"{hint} {listing}"
        if is_name:
            return f"{key}: unknown key; {hint}"
        return problem(key, value, f"unknown value; {hint}")
    if kind == "string_pattern_mismatch":
        return problem(key, value, f"malformed; {description}")
    return problem(key, value, re.sub(r"^\w+ should", "must", error["msg"]))


STAGES: dict[str, type[AnyConfig]] = {
    each.phase: each for each in (Config, FineTuningConfig, PretrainingConfig, PreferenceConfig)
}


def load_any_config(
    path: str | Path, overrides: Sequence[str] = (), stage: str | None = None
) -> AnyConfig:
    """Load a configuration file of any stage. Without `stage`, its keys decide the stage.

    Raises ConfigError like `load_config`, and if the keys fit no stage or several.
    """
    path = Path(path)
    values = read_mapping(path, overrides)
    warn_of_old_names(values, overrides)
    if stage is None:
        given, problems = apply_overrides(values, overrides)
        try:
            stage = stage_of(given)
        except ConfigError as error:
            lines = [f"{path}: {line}" for line in error.problems]
            raise ConfigError(problems + lines) from None
    return parse_config(values, overrides, path.stem, STAGES[stage])


def stage_of(values: Mapping[str, Any]) -> str:
    """Return the stage of a configuration, a key of STAGES. This is the stage whose input the
    values name. If the values name no input, their keys decide.

    Raises ConfigError if no stage or several stages fit."""
    data = values.get("data")
    data_section = data if isinstance(data, Mapping) else {}
    inputs = {stage: schema.inputs[0] for stage, schema in STAGES.items()}
    named = {stage: f"data.{key}" for stage, key in inputs.items() if data_section.get(key)}
    if len(named) > 1:
        several = ", ".join(f"{key} ({stage})" for stage, key in named.items())
        raise ConfigError([f"has training data for several stages: {several}; keep one of them"])
    if named:
        return next(iter(named))
    known = {stage: {*schema.model_fields, *keys_of(schema)} for stage, schema in STAGES.items()}
    # for each section or key that only some stages have: these stages
    stages_of: dict[str, list[str]] = {}
    for name, section in values.items():
        keys = section if isinstance(section, Mapping) else ()
        for place in (str(name), *(f"{name}.{key}" for key in keys)):
            stages = [stage for stage, places in known.items() if place in places]
            if 0 < len(stages) < len(STAGES):
                stages_of[place] = stages
    fitting = [stage for stage in STAGES if all(stage in stages for stages in stages_of.values())]
    if len(fitting) > 1:  # a preference model is meant only if nothing else fits
        fitting = [stage for stage in fitting if stage != PreferenceConfig.phase]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        places = ", ".join(f"{key} ({' or '.join(stages)})" for key, stages in stages_of.items())
        raise ConfigError([f"has keys of different stages: {places}; keep those of one"])
    allowed = ", ".join(f"data.{inputs[stage]} ({stage})" for stage in fitting)
    wrong = f"may be a configuration of {' or '.join(fitting)}"
    raise ConfigError([f"{wrong}: allowed: one of {allowed}, or give --stage"])
