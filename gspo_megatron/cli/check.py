"""`gspo-megatron check`: everything about a run that can be known without starting it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gspo_megatron.cli.arguments import Commands, add_config, new_parser, positive
from gspo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gspo_megatron.config import Config
    from gspo_megatron.data.tokenizers import Tokenizer
    from gspo_megatron.types import Prompt


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


@dataclass
class Inputs:
    """What the input files hold: prompts of each file, and the longest one, in tokens."""

    vocab_size: int = 0
    num_prompts: dict[str, int] = field(default_factory=dict)
    longest_prompt: int = 0


def check_all(config: Config, world_size: int) -> Inputs:
    """Check a loaded configuration with everything it names.

    Raises ConfigError with the problems of all parts: what keys must satisfy together, reward,
    tokenizer, prompt files and their lengths.
    """
    from gspo_megatron.config import check_config
    from gspo_megatron.data.tokenizers import load_tokenizer
    from gspo_megatron.rewards.registry import get_reward

    problems: list[str] = []
    inputs = Inputs()
    tokenizer = None
    with _gathered_in(problems):
        check_config(config, world_size, for_training=True)
    with _gathered_in(problems):
        get_reward(config.reward.name, config.reward.import_path, config.reward.options)
    with _gathered_in(problems):
        tokenizer = load_tokenizer(config.data.tokenizer)
        inputs.vocab_size = tokenizer.vocab_size
        problems += _vocabulary_problems(config, tokenizer)
    for key, path in prompt_files(config).items():
        with _gathered_in(problems):
            _check_prompts(config, key, path, tokenizer, inputs)
    if problems:
        raise ConfigError(problems)
    return inputs


def prompt_files(config: Config) -> dict[str, str]:
    """The prompt files that a run reads, by the key that names them."""
    files = {
        "data.prompts": config.data.prompts,
        "data.eval_prompts": config.data.eval_prompts,
        "training.warm_start.prompts": config.training.warm_start.prompts,
    }
    return {key: path for key, path in files.items() if path is not None}


def _check_prompts(
    config: Config, key: str, path: str, tokenizer: Tokenizer | None, inputs: Inputs
) -> None:
    from gspo_megatron.data.encode import encode_prompts
    from gspo_megatron.data.prompts import load_prompts

    data = config.data
    prompts = load_prompts(path, data.prompt_field, data.answer_field)
    inputs.num_prompts[key] = len(prompts)
    longest_allowed = config.max_prompt_tokens()
    if tokenizer is None or longest_allowed < 1:
        return  # a problem that was found before, and not one of every prompt
    encoded = encode_prompts(prompts, tokenizer, longest_allowed, data.chat_template)
    longest = max(len(prompt.token_ids) for prompt in encoded)
    inputs.longest_prompt = max(inputs.longest_prompt, longest)
    warm_start = config.training.warm_start
    supervised = "training.warm_start.prompts" if warm_start.prompts else "data.prompts"
    if warm_start.steps and key == supervised:
        _check_answers(config, encoded, tokenizer)


def _check_answers(config: Config, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
    """The warm start trains on prompt, answer and end of sequence."""
    from gspo_megatron.data.problems import Problems

    problems = Problems()
    longest = config.resolved_model().max_sequence_length
    for prompt in prompts:
        length = len(prompt.token_ids) + len(tokenizer.encode(prompt.answer)) + 1
        if length > longest:
            problems.add(
                prompt.source,
                f"prompt and answer have {length} tokens; the model holds {longest} "
                "(model.max_sequence_length)",
            )
    problems.raise_if_any()


def _vocabulary_problems(config: Config, tokenizer: Tokenizer) -> list[str]:
    wanted = config.resolved_model().vocab_size
    if wanted is None or wanted >= tokenizer.vocab_size:
        return []
    return [
        f"model.vocab_size = {wanted}: the tokenizer {config.data.tokenizer} has "
        f"{tokenizer.vocab_size} ids; legal: {tokenizer.vocab_size} or more"
    ]


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
    counted = count_parameters(shape, shape.vocab_size or inputs.vocab_size)
    if counted is not None:
        total, active = counted
        model += f", {total:,} parameters"
        if active < total:
            model += f", {active:,} for each token"
    parallel = resolve_parallel(config, world_size)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    rollout, objective = config.rollout, config.objective
    sequences = rollout.prompts_per_step * rollout.group_size
    files = ", ".join(f"{number:,} in {key}" for key, number in inputs.num_prompts.items())
    return [
        ("model", model),
        ("layout", f"{config.layout()} on {ranks}, dp={parallel.data_parallel_size}"),
        ("tokenizer", f"{config.data.tokenizer}, {inputs.vocab_size:,} tokens"),
        ("prompts", files),
        (
            "lengths",
            f"prompts of at most {inputs.longest_prompt} tokens ({config.max_prompt_tokens()} "
            f"allowed), responses of at most {rollout.max_response_tokens}",
        ),
        (
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.group_size} responses = {sequences} "
            f"sequences, {objective.mini_batches} updates by {objective.name}",
        ),
        ("run", f"{config.training.steps:,} steps into {config.logging.dir}"),
    ]
