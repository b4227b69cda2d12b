"""`gspo-megatron check`: everything about a run that can be known without starting it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gspo_megatron.cli.arguments import Commands, add_config, new_parser, positive
from gspo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config
    from gspo_megatron.data.inputs import Inputs


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = new_parser(
        commands,
        "check",
        run,
        "check a configuration and its input files without starting a run",
        list_name="overrides",
    )
    add_config(parser)
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="ranks of the run; as many as the layout asks for unless given",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what the run will be. Raises ConfigError with everything that is wrong."""
    from gspo_megatron.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    world_size = arguments.world_size or config.world_size_hint()
    inputs = check_all(config, world_size)
    for name, text in summary(config, world_size, inputs):
        print(f"{name:<10} {text}")
    return 0


def check_all(config: Config, world_size: int) -> Inputs:
    """Check a loaded configuration with everything it names.

    Raises ConfigError with the problems of all parts: what keys must satisfy together, reward,
    an objective of the user's own, tokenizer, prompt files and their lengths.
    """
    from gspo_megatron.config import check_config
    from gspo_megatron.data.inputs import read_inputs
    from gspo_megatron.rewards.registry import get_reward

    problems: list[str] = []
    inputs = None
    with _gathered_in(problems):
        check_config(config, world_size, for_training=True)
    with _gathered_in(problems):
        get_reward(config.reward.name, config.reward.import_path, config.reward.options)
    with _gathered_in(problems):
        _check_own_objective(config)
    with _gathered_in(problems):
        inputs = read_inputs(config)
    if problems:
        raise ConfigError(problems)
    assert inputs is not None
    return inputs


def _check_own_objective(config: Config) -> None:
    """Load the user's own functions, which are written with torch; nothing else here needs it."""
    section = config.objective
    if section.import_path is None and section.advantage_import_path is None:
        return
    from gspo_megatron.objectives import build_objective

    build_objective(section, config.rollout.max_response_tokens)


@contextlib.contextmanager
def _gathered_in(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        problems.extend(str(error).splitlines())


def summary(config: Config, world_size: int, inputs: Inputs) -> list[tuple[str, str]]:
    """Names and texts that tell what a checked configuration will train, and how."""
    from gspo_megatron.cli.parameters import count_parameters
    from gspo_megatron.config import resolve_parallel

    shape = config.resolved_model()
    model = f"{config.model.preset}: {shape.num_layers} layers of {shape.hidden_size}"
    if shape.num_moe_experts is not None:
        model += f", {shape.moe_router_topk} of {shape.num_moe_experts} experts"
    counted = count_parameters(shape, shape.vocab_size or inputs.tokenizer.vocab_size)
    if counted is not None:
        total, active = counted
        model += f", {total:,} parameters"
        if active < total:
            model += f", {active:,} for each token"
    parallel = resolve_parallel(config, world_size)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    rollout, objective = config.rollout, config.objective
    sequences = rollout.prompts_per_step * rollout.group_size
    files = ", ".join(f"{len(prompts):,} in {key}" for key, prompts in inputs.files.items())
    longest = max(len(p.token_ids) for prompts in inputs.files.values() for p in prompts)
    return [
        ("model", model),
        ("layout", f"{config.layout()} on {ranks}, dp={parallel.data_parallel_size}"),
        ("tokenizer", f"{config.data.tokenizer}, {inputs.tokenizer.vocab_size:,} tokens"),
        ("prompts", files),
        (
            "lengths",
            f"prompts of at most {longest} tokens ({config.max_prompt_tokens()} "
            f"allowed), responses of at most {rollout.max_response_tokens}",
        ),
        (
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.group_size} responses = {sequences} "
            f"sequences, {objective.mini_batches} updates by "
            f"{objective.import_path or objective.name}",
        ),
        ("run", f"{config.training.steps:,} steps into {config.logging.dir}"),
    ]
