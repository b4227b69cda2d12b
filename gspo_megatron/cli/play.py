"""`gspo-megatron play`: prints some episodes of a configuration. It does not train, and writes no
files."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gspo_megatron.cli.arguments import (
    Commands,
    add_nproc,
    add_step,
    config_parser,
    in_phase,
    loading,
    positive,
)
from gspo_megatron.errors import ConfigError, DataError, printable
from gspo_megatron.process import ranks

if TYPE_CHECKING:
    from gspo_megatron.config import Config

USUAL_EPISODES = 4


def add_parser(commands: Commands) -> None:
    text = "generate some episodes with a configuration's model and environment, and print them"
    more = (
        ": who says what, the rewards, and why an episode failed. Nothing is trained, and no run "
        "folder is written or read. The model generates the responses itself, even if "
        "rollout.engine is vllm. Its weights are those of model.checkpoint_path or model.hf_path: "
        "model.checkpoint_path=runs/NAME plays what a run has learned."
    )
    parser = config_parser(commands, "play", run, text, more)
    parser.add_argument(
        "--episodes",
        type=positive,
        default=USUAL_EPISODES,
        metavar="N",
        help=f"the number of episodes, one for each of the first prompts (default: "
        f"{USUAL_EPISODES})",
    )
    add_step(parser, "the step of the weights if they are those of a run in logging.dir, else 1")
    add_nproc(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the episodes. Raises UserError with all problems of the configuration and its files."""
    from gspo_megatron.cli.check_inputs import all_problems, check_all
    from gspo_megatron.config import load_config
    from gspo_megatron.config.hub import fetch_weights

    env_size = ranks.world_size_of_rank(os.environ)
    reporting = contextlib.nullcontext() if env_size else all_problems(arguments.nproc, _check)
    with reporting:
        config = load_config(arguments.config, arguments.overrides)
    step = arguments.step or (_step_of_weights(config) if config.training.phases else None)
    config, phase = in_phase(config, step)
    config = _as_played(config)
    world_size = ranks.decide_world_size(config, arguments.nproc, env_size)
    if not (config.data.prompts or config.data.eval_prompts):
        raise ConfigError(["data.prompts, data.eval_prompts: null; allowed: prompts to play"])
    if env_size is None:
        check_all(config, world_size)
    fetch_weights(config)
    if env_size is None and world_size > 1:
        from gspo_megatron.process.launcher import launch

        command = [sys.executable, "-m", "gspo_megatron", "play", arguments.config]
        command += [*arguments.overrides, "--episodes", str(arguments.episodes)]
        command += [] if step is None else ["--step", str(step)]
        return launch(command, world_size)
    with loading():
        from gspo_megatron.rl.play import play
    if os.environ.get("RANK", "0") == "0":
        print(f"weights: {_weights(config)}", flush=True)
        if phase is not None:
            print(f"phase: {phase}", flush=True)
    records = play(config, arguments.episodes)
    if records:
        print("\n".join(lines_of(records)), flush=True)
    return 0


def _check(config: Config, world_size: int, value_problems: Sequence[str]) -> None:
    """Check the part of a configuration whose values are valid. value_problems: the problems of
    the values that are not valid."""
    from gspo_megatron.cli.check_inputs import check_all

    check_all(_as_played(config), world_size, value_problems=value_problems)


def _as_played(config: Config) -> Config:
    """Return the configuration for playing: the model itself generates, nothing is evaluated, and a
    failed episode is only shown."""
    from gspo_megatron.config.schema import RolloutSection

    usual = RolloutSection()
    changes: dict[str, dict[str, Any]] = {
        "rollout": {
            name: getattr(usual, name)
            for name in ("engine", "vllm", "max_staleness", "kv_after_update")
        },
        "objective": {"max_token_staleness": None},
        "reward": {"on_failure": "drop_group"},
        "training": {"evaluation_interval": 0, "phases": []},
        "evaluation": {"suites": {}, "interval": 0},
        "checkpoint": {"keep_best": 0},
    }
    sections = {name: getattr(config, name).model_copy(update=c) for name, c in changes.items()}
    return config.model_copy(update=sections)


def _step_of_weights(config: Config) -> int:
    """Return the step of the checkpoint to play if it is in the configured run folder, else 1."""
    from gspo_megatron.checkpoint.resume import given_checkpoint, run_folder
    from gspo_megatron.checkpoint.run_state import RunState
    from gspo_megatron.observe.metrics_files import RL

    path = config.model.lora.checkpoint or config.model.checkpoint_path
    if path is None:
        return 1
    with contextlib.suppress(DataError):  # `check_all` reports it
        checkpoint = given_checkpoint(path)
        if run_folder(config).resolve() in checkpoint.resolve().parents:
            state = RunState.read(checkpoint)
            return state.step if state.phase == RL and state.step else 1
    return 1


def _weights(config: Config) -> str:
    adapters = config.model.lora.checkpoint
    if adapters is not None:
        base = config.model.hf_path or config.model.checkpoint_path
        return f"{base} with the adapters of {adapters}"
    for key in ("checkpoint_path", "hf_path"):
        if (path := getattr(config.model, key)) is not None:
            return f"{path} (model.{key})"
    return "random, as model.checkpoint_path and model.hf_path are null"


def lines_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the episodes and a summary as lines to read."""
    from gspo_megatron.observe.report import conversation

    lines = []
    for number, record in enumerate(records, start=1):
        lines += ["", f"=== episode {number} of {len(records)}: row {record['row_id']}"]
        if record.get("turns") is not None:
            lines.append(conversation(record))
        else:
            lines += [f"prompt: {record['prompt']}", f"response: {record['response']}"]
        lines.append(f"--- {_outcome(record)}")
    rewards = [record["reward"] for record in records if record["reward"] is not None]
    mean = f"{statistics.fmean(rewards):.3f}" if rewards else "none"
    failed = len(records) - len(rewards)
    lines += ["", f"episodes: {len(records)}, mean reward {mean}, {failed} failed"]
    return [*map(printable, lines)]


def _outcome(record: Mapping[str, Any]) -> str:
    reward = "none" if record["reward"] is None else f"{record['reward']:g}"
    parts = "".join(f", {name} {value:g}" for name, value in record.get("parts", {}).items())
    answer = "" if record["answer"] is None else f", answer {record['answer']!r}"
    cut = ", cut off by a limit" if record["truncated"] else ""
    reason = f" ({record['reason']})" if record.get("reason") else ""
    return f"reward {reward}{reason}{parts}{answer}, {record['num_tokens']} tokens{cut}"
