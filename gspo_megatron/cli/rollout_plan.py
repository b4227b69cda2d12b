"""`gspo-megatron check --rollout-plan`: helps to choose the number of servers and
rollout.max_staleness."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gspo_megatron.cli.arguments import number, positive
from gspo_megatron.errors import UserError

if TYPE_CHECKING:
    from gspo_megatron.estimate.rollout_plan import StepFigures

_SLOTS = 256  # number of responses at a time, if rollout.vllm.options has no max_num_seqs
_above_0 = partial(number, wanted="a number above 0", least=1e-9)


def _bound(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _list_of(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(word) for word in text.split(",")]


# Each option's metavar, type and help. All options except the last one are required.
_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "servers": ("N,N", _list_of(positive), "numbers of servers to compare"),
    "train_seconds": (
        "SECONDS,SECONDS",
        _list_of(number),
        "seconds of a step, except for responses and new weights: one value, or one for each of "
        "--servers",
    ),
    "update_seconds": (
        "SECONDS",
        number,
        "seconds of an update of the servers' weights; trainer and servers wait for it",
    ),
    "lengths": (
        "MEDIAN,P90",
        _list_of(_above_0),
        "median and 90th percentile of the lengths of responses (response/length_p50 and "
        "length_p90 in metrics.jsonl); lengths are taken as log-normal",
    ),
    "sequence_speed": ("SPEED", _above_0, "tokens/s of one response on an idle server"),
    "server_speed": ("SPEED", _above_0, "tokens/s of a full server, all responses together"),
    "staleness": (
        "N,N",
        _list_of(_bound),
        "values of rollout.max_staleness to compare (default: 0,1,2,3,4)",
    ),
}
# Options of `check` that ask for a dry run.
_OF_DRY_RUN = ("memory", "world_size", "gpu_memory", "suggest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "rollout plan",
        "simulate steps whose responses servers generate, to choose the number of servers and "
        "rollout.max_staleness. CONFIG.yaml gives prompts_per_step, group_size and "
        "max_response_tokens of rollout, and max_num_seqs of rollout.vllm.options "
        f"({_SLOTS} if it is not set); nothing else of it is checked.",
    )
    group.add_argument(
        "--rollout-plan", action="store_true", help="simulate; the options below are its inputs"
    )
    for name, (metavar, read, text) in _OPTIONS.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, type=read, help=text)


def check_options(arguments: argparse.Namespace) -> None:
    """Raise SystemExit if options of the plan are missing, do not fit each other, or are given
    without --rollout-plan, or if --fresh or options of a dry run are given with it."""
    present = [name for name in _OPTIONS if getattr(arguments, name) is not None]
    unread = [name for name in _OF_DRY_RUN if getattr(arguments, name)]
    missing = [name for name in _OPTIONS if name not in present and name != "staleness"]
    if not arguments.rollout_plan:
        names, problem = present, "only with --rollout-plan"
    elif unread:
        names, problem = unread, "not with --rollout-plan, which makes no dry run"
    elif arguments.fresh:
        names, problem = ["fresh"], "not with --rollout-plan, which looks at no run folder"
    elif missing:
        names, problem = missing, "missing; --rollout-plan needs it"
    else:
        names, problem = _unfit(arguments)
    if names:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        arguments.parser.error(f"{options}: {problem}")


def _unfit(arguments: argparse.Namespace) -> tuple[list[str], str]:
    """Return the options that do not fit the other options, and why."""
    if len(arguments.train_seconds) not in (1, len(arguments.servers)):
        return ["train_seconds"], "give one value, or as many as --servers has"
    if len(arguments.lengths) != 2 or arguments.lengths[0] >= arguments.lengths[1]:
        return ["lengths"], "give MEDIAN,P90, the median and the larger 90th percentile"
    if arguments.server_speed < arguments.sequence_speed:
        return ["server_speed"], "must not be below --sequence-speed"
    return [], ""


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises UserError if the configuration is wrong."""
    from gspo_megatron.config.load import load_any_config
    from gspo_megatron.estimate import rollout_plan as plan

    config: Any = load_any_config(arguments.config, arguments.overrides, "rl")
    options = {name.replace("-", "_"): n for name, n in config.rollout.vllm.options.items()}
    slots = options.get("max_num_seqs", _SLOTS)
    if type(slots) is not int or slots < 1:
        raise UserError(f"rollout.vllm.options.max_num_seqs = {slots!r}: not a positive integer")
    seconds = arguments.train_seconds * (len(arguments.servers) // len(arguments.train_seconds))
    settings = [
        plan.Setting(servers, bound, trained, arguments.update_seconds)
        for servers, trained in sorted(zip(arguments.servers, seconds))
        for bound in arguments.staleness or range(5)
    ]
    responses = config.rollout.prompts_per_step * config.rollout.group_size
    bounds = {each.max_staleness for each in settings}
    draws = max(plan.steps_of(bound)[0] + bound for bound in bounds)
    most, first = max(map(plan.steps_of, bounds))  # large bounds need a few more steps
    steps = f"{plan.STEPS}{f' to {most}' * (most > plan.STEPS)}"
    warm_up = f"{plan.WARM_UP}{f' to {first}' * (first > plan.WARM_UP)}"
    lengths = plan.log_normal_lengths(
        *arguments.lengths, config.rollout.max_response_tokens, (draws, responses)
    )
    server = plan.ServerSpeed(arguments.sequence_speed, arguments.server_speed, slots)
    outcomes = [plan.outcome(lengths, server, setting) for setting in settings]
    print(
        f"{responses:,} responses a step, {lengths.mean():,.0f} tokens on average; at most {slots} "
        f"at a time on a server; {steps} steps, the first {warm_up} do not count"
    )
    _show(outcomes, plan.best(outcomes))
    return 0


def _show(outcomes: Sequence[StepFigures], chosen: StepFigures) -> None:
    """Print the table, and the best setting as name=value pairs for scripts."""
    from gspo_megatron.cli.check_tables import console, new_table

    columns = (">max_staleness", ">s/step", ">training", ">trainer idle", ">load")
    table = new_table(None, "servers", *columns, ">staleness mean", ">max")
    for each in outcomes:
        setting = each.setting
        table.add_row(
            str(setting.servers),
            str(setting.max_staleness),
            f"{each.step_seconds:.1f}",
            f"{setting.train_seconds:.1f}",
            f"{each.trainer_idle:.1%}",
            f"{each.servers_load:.1%}",
            f"{each.staleness_mean:.2f}",
            str(each.staleness_max),
            style="bold" if each is chosen else None,
        )
    console().print(table, markup=False)
    print("the best one; within 2% that with the least staleness, then with the fewest servers:")
    names = ("trainer_idle", "servers_load", "staleness_mean")
    figures = " ".join(f"{name}={getattr(chosen, name):.4f}" for name in names)
    print(
        f"servers={chosen.setting.servers} max_staleness={chosen.setting.max_staleness} "
        f"step_seconds={chosen.step_seconds:.3f} {figures} staleness_max={chosen.staleness_max}"
    )
