"""`gspo-megatron evaluate`: evaluates a run, a checkpoint, a Hugging Face folder or a server on
suites of problems."""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.cli import train
from gspo_megatron.cli.arguments import Commands, add_nproc, add_overrides, new_parser, positive
from gspo_megatron.errors import ConfigError, DataError, UserError
from gspo_megatron.files import folder_lacks
from gspo_megatron.hub import folder_of, name_of, parse_name, tokenizer_in, written


def add_parser(commands: Commands) -> None:
    text = "evaluate a run, a checkpoint, a Hugging Face folder or a server on suites of problems"
    parser = new_parser(commands, "evaluate", run, text, list_name="overrides")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a run folder (its newest checkpoint), a checkpoint, a Hugging Face folder, "
        "ORG/NAME[@REVISION] of the Hub, a configuration, or the URL of an OpenAI-compatible "
        "server, as http://host:port; OPENAI_API_KEY has its key",
    )
    add_overrides(parser, "replaces a value, for example evaluation.suites.aime24.samples=4")
    parser.add_argument(
        "--suite",
        metavar="FILE.yaml[:NAME]",
        action="append",
        default=[],
        help="suites instead of those that SOURCE has; may be given several times",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="the folder of the evaluation (default: RUN/evaluation for a run, else one in runs/)",
    )
    parser.add_argument(
        "--model", help="the name of the model on a server (default: its first model)"
    )
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="the number of requests that a server gets at the same time (default: 64)",
    )
    add_nproc(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate the source, and print a table of the suites. Raises UserError with all problems of
    the source, of the suites and of their files."""
    is_server = re.match(r"https?://", arguments.source) is not None
    unread = ("nproc",) if is_server else ("model", "requests")
    for name in unread:
        if getattr(arguments, name) is not None:
            kind = "SOURCE is a server" if is_server else "SOURCE is no server"
            arguments.parser.error(f"--{name}: nothing reads it: {kind}")
    suites = _suites(arguments.suite)
    if is_server:
        return _run_server(arguments, suites)
    from gspo_megatron.checkpoint.folder import CHECKPOINTS, positions
    from gspo_megatron.config.load import dump_yaml

    values, out = _values(folder_of(arguments.source, "SOURCE"), suites)
    values["logging"]["dir"] = out = arguments.output or out
    wrong = folder_lacks(Path(out))
    if positions(Path(out) / CHECKPOINTS):
        wrong = "holds the checkpoints of a run"
    if wrong is not None:
        raise DataError(f"--output {out}: {wrong}; give another folder")
    with tempfile.TemporaryDirectory(prefix="gspo-megatron-evaluate-") as folder:
        path = Path(folder) / "evaluation.yaml"
        path.write_text(dump_yaml(values), encoding="utf-8")
        options = {"config": str(path), "overrides": arguments.overrides, "fresh": False}
        return train.run("train", argparse.Namespace(**options, nproc=arguments.nproc))


def _suites(files: Sequence[str]) -> dict[str, Any]:
    """Return the suites of all files, by name. Raises ConfigError."""
    from gspo_megatron.config.load import suites_of_file

    all_suites: dict[str, Any] = {}
    problems = []
    for file in files:
        try:
            suites = suites_of_file(file)
        except ConfigError as error:
            problems += [f"--suite {line}" for line in error.problems]
            continue
        twice = sorted(all_suites.keys() & suites.keys())
        problems += [f"--suite {file}: {name} is in another file, too" for name in twice]
        all_suites |= suites
    if problems:
        raise ConfigError(problems)
    return all_suites


def _values(source: Path, suites: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a configuration that evaluates the source, and the default folder for the evaluation.
    Raises UserError."""
    if (source / "config.json").is_file():
        values = _of_hugging_face(source)
        name = name_of(str(source))
        named = source.resolve().name if name is None else name.repo.replace("/", "-")
        out = f"runs/evaluation-{named}"
    elif source.is_dir():
        values, out = _of_run(source)
    else:
        values, out = _in_first_phase(source), f"runs/{source.stem}-evaluation"
    values = _as_rl(values)
    for section in ("parallel", "data", "training", "evaluation", "checkpoint", "logging"):
        values[section] = dict(values.get(section) or {})
    # as many model replicas as --nproc allows
    values["parallel"] |= {"data_parallel_size": None, "layout": _without_dp(values["parallel"])}
    values["data"] |= {"prompts": None, "weights": None}
    values["training"] |= {"steps": 0, "evaluation_interval": 0, "phases": []}
    values["checkpoint"] |= {"interval": 0, "keep_best": 0}
    values["evaluation"]["interval"] = 0
    values["logging"] |= {"plots": False, "trackers": []}
    # An evaluation does not read these sections, and they may name Python code that this machine
    # lacks.
    values |= {"objective": None, "routing": None}
    if (values.get("reward") or {}).get("name") == "none":  # a distillation without a reward
        values["reward"] = None
    if suites:
        values["evaluation"]["suites"] = suites
        values["data"]["eval_prompts"] = values["reward"] = None
    if not (values["evaluation"].get("suites") or values["data"].get("eval_prompts")):
        raise UserError(f"{source}: names nothing to evaluate; allowed: --suite FILE.yaml")
    return values, out


def _without_dp(parallel: Mapping[str, Any]) -> Any:
    """Return the value of parallel.layout without dp."""
    layout = parallel.get("layout")
    if not isinstance(layout, str):
        return layout
    sizes = [each for each in layout.split(",") if each.partition("=")[0].strip() != "dp"]
    return ",".join(sizes) or None


def _of_run(folder: Path) -> tuple[dict[str, Any], str]:
    """Return a configuration that evaluates a run or one of its checkpoints, and the default folder
    for the evaluation."""
    from gspo_megatron.observe.metrics_files import changed_configs

    is_checkpoint = (folder / "config.yaml").is_file() and (folder / "model.json").is_file()
    path = folder / ("config.yaml" if is_checkpoint else "config.resolved.yaml")
    if not path.is_file() and (folder / "model.json").is_file():
        raise DataError(
            f"{folder}: a checkpoint without the configuration of a run; evaluate a configuration "
            f"with model.checkpoint_path={folder}"
        )
    if not path.is_file():
        raise DataError(
            f"{folder}: neither a run folder, nor a checkpoint, nor a Hugging Face folder: it has "
            "no config.resolved.yaml, config.yaml or config.json"
        )
    # the newest phase that the run has reached
    values = _read([path, *changed_configs(folder).values()][-1])
    model = dict(values.get("model") or {})
    if (model.get("lora") or {}).get("rank"):  # the checkpoints of this run hold adapters
        values["model"] = {**model, "lora": {**model["lora"], "checkpoint": str(folder)}}
    else:
        values["model"] = {**model, "checkpoint_path": str(folder), "hf_path": None}
    values["data"] = _with_tokenizer(dict(values.get("data") or {}), folder)
    run = folder.resolve().parents[1] if is_checkpoint else folder
    return values, str(run / "evaluation")


def _with_tokenizer(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the section `data` with a tokenizer that exists. The path in `data` may be relative to
    the folder in which the run was started. If no file has this path, relative to the current
    folder, use the tokenizer that the checkpoint names."""
    from gspo_megatron.checkpoint.resume import given_checkpoint
    from gspo_megatron.checkpoint.run_state import read_model

    named = data.get("tokenizer")
    if not isinstance(named, str) or Path(named).exists() or parse_name(named, "model"):
        return data
    # a damaged checkpoint is reported later, when it is loaded
    with contextlib.suppress(DataError):
        known = read_model(given_checkpoint(str(folder))).get("tokenizer")
        if isinstance(known, str) and Path(known).exists():
            return {**data, "tokenizer": known}
    return data


def _as_rl(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the configuration of a fine-tuning or pre-training run to an RL configuration with
    the same model, without the keys that RL does not know. RL configurations and invalid
    configurations are returned unchanged."""
    from gspo_megatron.config import Config
    from gspo_megatron.config.load import stage_of
    from gspo_megatron.config.section import keys_of

    try:
        stage = stage_of(values)
    except ConfigError:
        return values
    if stage == "rl":
        return values
    known = keys_of(Config)
    rl_values: dict[str, Any] = {}
    for name in ("model", "parallel", "data", "training", "logging"):
        section = values.get(name)
        keys = section if isinstance(section, dict) else {}
        rl_values[name] = {key: value for key, value in keys.items() if f"{name}.{key}" in known}
    data = values.get("data") or {}
    if stage == "sft" and data.get("messages_field") is not None:
        # SFT on conversations always uses the chat template.
        rl_values["data"]["chat_template"] = True
    return rl_values


def _of_hugging_face(folder: Path) -> dict[str, Any]:
    """Return a configuration for a Hugging Face folder. The folder may lack a tokenizer, because an
    override may name one."""
    from gspo_megatron.data.tokenizers import load_tokenizer

    tokenizer, has_template = tokenizer_in(folder), False
    with contextlib.suppress(UserError):
        has_template = load_tokenizer(str(tokenizer)).chat_template is not None
    return {
        "model": {"hf_path": written(str(folder))},
        "data": {
            "tokenizer": str(tokenizer) if name_of(str(folder)) is None else written(str(folder)),
            "chat_template": has_template,
        },
    }


def _in_first_phase(path: Path) -> dict[str, Any]:
    """Read a configuration. Its weights are those that training begins with, so the values of its
    first phase count."""
    from gspo_megatron.config.load import load_any_config
    from gspo_megatron.config.phases import at_step

    values = _read(path)
    if not (values.get("training") or {}).get("phases"):
        return values
    return dict(at_step(load_any_config(path), 1).model_dump())


def _read(path: Path) -> dict[str, Any]:
    from gspo_megatron.config.load import load_any_config, read_mapping

    values = read_mapping(path)
    if not all(isinstance(section, dict | None) for section in values.values()):
        load_any_config(path)  # reports all problems
    return values


def _run_server(arguments: argparse.Namespace, suites: dict[str, Any]) -> int:
    from gspo_megatron.evaluation.server import ServerEvaluation

    url = arguments.source.rstrip("/").removesuffix("/v1")
    named = re.sub(r"\W+", "-", url.partition("://")[2])
    out = Path(arguments.output or f"runs/evaluation-{named}")
    evaluation = ServerEvaluation(url, suites, arguments.overrides, out)
    evaluation.run(arguments.model, arguments.requests or 64)
    return 0
