"""`gspo-megatron check --rollout-plan`: how many servers, and which rollout.max_staleness."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo_megatron.errors import ConfigError, UserError, gathered_in

if TYPE_CHECKING:
    import numpy as np

    from gspo_megatron.estimate.rollout_plan import Outcome, Server, Setting

_SLOTS = 256  # where rollout.vllm.options has no max_num_seqs


# --- options --------------------------------------------------------------------------------------


def _matched(text: str, pattern: str) -> str:
    """Raises ValueError for a text of another form."""
    if not re.fullmatch(pattern, text, re.ASCII):
        raise ValueError(text)
    return text


def _number(text: str) -> float:
    return float(_matched(text, r"\d+(\.\d*)?|\.\d+"))


def _above_0(text: str) -> float:
    if not (value := _number(text)):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    return int(_matched(text, r"0*[1-9]\d*"))


def _nodes(text: str) -> int:
    if (value := _count(text)) < 2:
        raise ValueError(text)
    return value


def _counts(text: str) -> list[int]:
    return sorted({_count(word) for word in text.split(",")})


def _bounds(text: str) -> list[int]:
    return sorted({int(_matched(word, r"\d+")) for word in text.split(",")})


def _seconds(text: str) -> float | dict[int, float]:
    """Plain, or by the number of nodes."""
    if ":" not in text:
        return _number(text)
    pairs = [word.split(":") for word in text.split(",")]
    return {_count(nodes): _number(seconds) for nodes, seconds in pairs}


def _lengths(text: str) -> tuple[float, float] | str:
    """Median and 90th percentile, or the name of a file or folder."""
    if not re.fullmatch(r"[\d.]+,[\d.]+", text, re.ASCII):
        return _matched(text, ".+")
    median, p90 = map(_above_0, text.split(","))
    if median >= p90:
        raise ValueError(text)
    return median, p90


def _picture(text: str) -> Path:
    return Path(_matched(text, r".+\.(png|svg)"))


class _Option(NamedTuple):
    metavar: str
    read: Callable[[str], Any]  # raises ValueError
    help: str
    is_needed: bool = True


_OPTIONS = {
    "--nodes": _Option(
        "N", _nodes, "nodes to split between trainer and servers, 2 or more", is_needed=False
    ),
    "--servers": _Option(
        "N,N",
        _counts,
        "numbers of servers to compare; the trainer stays as it is",
        is_needed=False,
    ),
    "--lengths": _Option(
        "LENGTHS",
        _lengths,
        "of responses: a file with one a line; the folder of a run; or MEDIAN,P90 of a log-normal "
        "distribution, P90 the larger one (response/length_p50 and length_p90 in metrics.jsonl)",
    ),
    "--sequence-speed": _Option(
        "SPEED", _above_0, "tokens/s of a response that a server draws alone, above 0"
    ),
    "--server-speed": _Option(
        "SPEED",
        _above_0,
        "tokens/s of a server with as many responses as it takes at a time, all together, not "
        "below --sequence-speed",
    ),
    "--train-seconds": _Option(
        "SECONDS",
        _seconds,
        "of a step without responses and new weights. With --nodes as NODES:SECONDS: of one number "
        "of nodes (the time shrinks with 1 / nodes) or of several, as 2:310,3:215",
    ),
    "--update-seconds": _Option(
        "SECONDS", _number, "that new weights take, in which trainer and servers stand still"
    ),
    "--staleness": _Option(
        "N,N",
        _bounds,
        "values of rollout.max_staleness to compare (default: 0,1,2,3,4)",
        is_needed=False,
    ),
    "--picture": _Option(
        "FILE", _picture, "draw the comparison into this .png or .svg", is_needed=False
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Argparse takes any text for these: `run` tells all that is wrong with them at once."""
    group = parser.add_argument_group(
        "rollout plan",
        "simulate steps with responses by servers, to choose the number of servers and "
        "rollout.max_staleness. CONFIG.yaml gives prompts_per_step, group_size and "
        "max_response_tokens of rollout, and tensor_parallel_size and options.max_num_seqs of "
        f"rollout.vllm ({_SLOTS} if it is not set); nothing else of it is checked.",
    )
    group.add_argument("--rollout-plan", action="store_true", help="do this, with what follows")
    for name, option in _OPTIONS.items():
        group.add_argument(name, metavar=option.metavar, help=option.help)


def _text(arguments: argparse.Namespace, option: str) -> str | None:
    text: str | None = getattr(arguments, option.removeprefix("--").replace("-", "_"))
    return text


def refuse_options(arguments: argparse.Namespace) -> None:
    """Raises UserError where options of the plan are given without --rollout-plan."""
    given = [name for name in _OPTIONS if _text(arguments, name) is not None]
    if given:
        raise UserError("\n".join(f"{name}: only with --rollout-plan" for name in given))


def _read_options(arguments: argparse.Namespace, problems: list[str]) -> dict[str, Any]:
    """The values of the options that are given as they have to be."""
    values: dict[str, Any] = {}
    for name, option in _OPTIONS.items():
        text = _text(arguments, name)
        if text is not None:
            try:
                values[name] = option.read(text)
            except ValueError:
                problems.append(f"{name} {text}: wrong; {option.metavar}: {option.help}")
        elif option.is_needed:
            problems.append(f"{name} {option.metavar} is missing: {option.help}")
    alone, together = (values.get(name) for name in ("--sequence-speed", "--server-speed"))
    if alone and together and together < alone:
        problems.append(f"--server-speed {together:g}: wrong; below --sequence-speed {alone:g}")
    splits, seconds = arguments.nodes is not None, values.get("--train-seconds")
    if splits == (arguments.servers is not None):
        problems.append("give one of --nodes and --servers, and not both")
    elif seconds is not None and splits != isinstance(seconds, dict):
        form = "NODES:SECONDS with --nodes" if splits else "plain SECONDS with --servers"
        problems.append(f"--train-seconds {arguments.train_seconds}: wrong; legal: {form}")
    return values


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Comparison:
    """What is compared."""

    responses: int  # of a step
    lengths: np.ndarray  # [any number]; those of the responses are drawn from these
    server: Server
    nodes: int | None  # that are split; None: numbers of servers are compared
    servers_per_node: int
    settings: list[Setting]

    def rollout_nodes(self, setting: Setting) -> int:
        return setting.servers // self.servers_per_node


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigError with everything that is wrong."""
    from gspo_megatron.estimate.rollout_plan import best, plan

    compared = _read(arguments)
    outcomes = plan(compared.lengths, compared.responses, compared.server, compared.settings)
    chosen = best(outcomes)
    _show(compared, outcomes, chosen)
    if arguments.picture is not None:
        _draw(compared, outcomes, Path(arguments.picture))
    _print_figures(compared, chosen)
    return 0


def _read(arguments: argparse.Namespace) -> _Comparison:
    from gspo_megatron.config.load import load_config
    from gspo_megatron.estimate.rollout_plan import Server, log_normal_lengths, read_lengths
    from gspo_megatron.estimate.traffic import GPUS_PER_NODE

    problems: list[str] = []
    config: Any = None
    with gathered_in(problems):
        config = load_config(arguments.config, arguments.overrides)
    values = _read_options(arguments, problems)
    source, nodes = values.get("--lengths"), values.get("--nodes")
    lengths, per_node, slots = None, 1, _SLOTS
    if config is not None:
        longest, section = config.rollout.max_response_tokens, config.rollout.vllm
        with gathered_in(problems):
            if isinstance(source, str):
                lengths = read_lengths(source, longest)
            elif source is not None:
                lengths = log_normal_lengths(*source, longest)
        slots, size = section.options.get("max_num_seqs", _SLOTS), section.tensor_parallel_size
        if type(slots) is not int or slots < 1:
            problems.append(
                f"rollout.vllm.options.max_num_seqs = {slots!r}: is not a positive integer"
            )
        per_node = GPUS_PER_NODE // size
        if nodes is not None and per_node == 0:
            problems.append(
                f"rollout.vllm.tensor_parallel_size = {size}: --nodes takes {GPUS_PER_NODE} GPUs "
                "for a node, and a server does not span nodes"
            )
    if problems:
        raise ConfigError(problems)
    assert lengths is not None
    return _Comparison(
        config.rollout.prompts_per_step * config.rollout.group_size,
        lengths,
        Server(values["--sequence-speed"], values["--server-speed"], slots),
        nodes,
        per_node,
        _settings(values, per_node),
    )


def _settings(values: dict[str, Any], servers_per_node: int) -> list[Setting]:
    """Every number of servers with every bound on the staleness."""
    from gspo_megatron.estimate.rollout_plan import Setting, train_seconds

    given, nodes = values["--train-seconds"], values.get("--nodes")
    if nodes is None:
        trainers = dict.fromkeys(values["--servers"], given)
    else:
        trainers = {
            count * servers_per_node: train_seconds(given, nodes - count)
            for count in range(1, nodes)
        }
    return [
        Setting(servers, bound, seconds, values["--update-seconds"])
        for servers, seconds in trainers.items()
        for bound in values.get("--staleness", range(5))
    ]


# --- output ---------------------------------------------------------------------------------------


def _show(compared: _Comparison, outcomes: Sequence[Outcome], chosen: Outcome) -> None:
    from gspo_megatron.cli.check_tables import console, new_table, print_lines
    from gspo_megatron.estimate.rollout_plan import WARM_UP, steps_of
    from gspo_megatron.observe.progress import number, percent

    lengths, server = compared.lengths, compared.server
    shown = [each.setting for each in outcomes]
    counts = {steps_of(each, compared.responses) for each in shown}
    span = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    median, p90 = (number(float(value)) for value in _percentiles(lengths))
    rows = {
        "responses": f"{compared.responses:,} a step; median {median}, 90% up to {p90}, mean "
        f"{number(float(lengths.mean()))}, longest {number(float(lengths.max()))} tokens",
        "server": f"{number(server.sequence_speed)} tokens/s for a response alone, "
        f"{number(server.speed)} for {server.slots} together; it takes no more at a time",
        "simulated": f"{span} steps of each line; the first {WARM_UP} do not count",
    }
    if len(outcomes) < len(compared.settings):
        every, some = ({each.servers for each in of} for of in (compared.settings, shown))
        rows["compared"] = (
            f"{len(some)} of {len(every)} numbers of servers: all would take minutes; fewer values "
            "of --staleness leave room for more"
        )
    print_lines(rows.items(), 12)
    split = [] if compared.nodes is None else ["trainer + rollout nodes"]
    shares = (">trainer idle", ">servers idle", ">load")
    columns = (">max_staleness", ">s/step", ">training", *shares, ">staleness mean", ">max")
    table = new_table(None, *split, ">servers" if split else "servers", *columns)
    last = None
    for each in outcomes:
        setting = each.setting
        if last not in (None, setting.servers):
            table.add_section()
        last = setting.servers
        nodes = compared.rollout_nodes(setting)
        table.add_row(
            *([] if compared.nodes is None else [f"{compared.nodes - nodes} + {nodes}"]),
            str(setting.servers),
            str(setting.max_staleness),
            number(each.step_seconds),
            number(setting.train_seconds),
            *map(percent, (each.trainer_idle, each.servers_idle, each.servers_load)),
            f"{each.staleness_mean:.2f}",
            str(each.staleness_max),
            style="bold" if each is chosen else None,
        )
    console().print(table, markup=False)
    print_lines([("", _verdict(compared, outcomes, chosen))], 0)


def _percentiles(lengths: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.percentile(lengths, (50, 90))


def _verdict(compared: _Comparison, outcomes: Sequence[Outcome], chosen: Outcome) -> str:
    from gspo_megatron.observe.progress import number

    setting = chosen.setting
    servers = f"{setting.servers} server{'s' if setting.servers > 1 else ''}"
    if compared.nodes is not None:
        nodes = compared.rollout_nodes(setting)
        servers = f"{nodes} of {compared.nodes} nodes for rollouts ({servers})"
    text = (
        f"best: {servers} and rollout.max_staleness={setting.max_staleness}: "
        f"{number(chosen.step_seconds)} s a step"
    )
    synchronous = [each.step_seconds for each in outcomes if each.setting.max_staleness == 0]
    if synchronous and setting.max_staleness:
        gain = min(synchronous) / chosen.step_seconds
        text += f", {gain:.2f} times as fast as the best with max_staleness=0"
    return text


def _draw(compared: _Comparison, outcomes: Sequence[Outcome], path: Path) -> None:
    from gspo_megatron.observe.timing_plots import plot_plan

    panels = {
        "Time of a step": ("seconds", "step_seconds", False),
        "Trainer waits for responses": ("share of the time", "trainer_idle", True),
        "Load of the servers": ("share of their speed", "servers_load", True),
        "Staleness of a token": ("versions, on average", "staleness_mean", False),
    }
    if compared.nodes is None:
        unit, places = "servers", [each.setting.servers for each in outcomes]
    else:
        unit = f"rollout nodes of {compared.nodes}"
        places = [compared.rollout_nodes(each.setting) for each in outcomes]
    rows = [
        (place, f"max_staleness {each.setting.max_staleness}", vars(each))
        for place, each in zip(places, outcomes)
    ]
    try:
        plot_plan(path, unit, panels, rows)
    except OSError as error:
        raise UserError(f"--picture {path}: cannot be written: {error.strerror}") from error
    print(f"picture: {path}")


def _print_figures(compared: _Comparison, chosen: Outcome) -> None:
    """The best one as name=value pairs, for scripts."""
    pairs: dict[str, object] = {
        "servers": chosen.setting.servers,
        "max_staleness": chosen.setting.max_staleness,
    }
    if compared.nodes is not None:
        pairs["rollout_nodes"] = compared.rollout_nodes(chosen.setting)
    names = ("trainer_idle", "servers_idle", "servers_load", "staleness_mean")
    pairs["step_seconds"] = f"{chosen.step_seconds:.3f}"
    pairs |= {name: f"{getattr(chosen, name):.4f}" for name in names}
    pairs["staleness_max"] = chosen.staleness_max
    print("for scripts, the best one:")
    print(" ".join(f"{name}={value}" for name, value in pairs.items()))
