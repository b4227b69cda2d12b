"""What `check` prints of an estimate: tables, notes, and one line of name=value pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from gspo_megatron.config import Config
from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig

if TYPE_CHECKING:
    from gspo_megatron.estimate.layout import LayoutEstimate
    from gspo_megatron.estimate.memory import RankMemory
    from gspo_megatron.estimate.suggest import Search

_GIB = 2**30
_PLAIN_WIDTH = 240  # where there is no terminal that has one: no text is broken


def console() -> Console:
    """Colours and the terminal's width on a terminal, plain text elsewhere."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def gib(num_bytes: float) -> str:
    """In GiB, to two places."""
    return f"{num_bytes / _GIB:,.2f}"


def show_layout(estimate: LayoutEstimate, modes: Mapping[str, int]) -> None:
    """The representative ranks, the worst of them in detail, traffic and bubble."""
    out = console()
    out.print(_stages(estimate), markup=False)
    out.print(_details(estimate.worst), markup=False)
    sent = estimate.most_traffic().items()
    rows = [
        ("counted", _counted(estimate)),
        ("micro-batch", _micro_batch(estimate)),
        (
            "recompute",
            "while training: "
            + ", ".join(f"{mode} {gib(total)} GiB" for mode, total in modes.items()),
        ),
        ("sent", _sent(sent)),
        ("bubble", f"{estimate.bubble:.1%} of the training time"),
    ]
    if estimate.worst.host:
        rows.append(("host", f"{gib(estimate.worst.host)} GiB of host memory a rank"))
    for name, text in rows:
        out.print(f"{name:<11} {text}", markup=False, soft_wrap=True)


def _micro_batch(estimate: LayoutEstimate) -> str:
    work, ranks = estimate.work, estimate.parallel.context_parallel_size
    size = f"{work.tokens:,} tokens over {ranks} cp ranks"
    prompt, response = work.lengths[0]
    if isinstance(estimate.config, PretrainingConfig):
        samples = f"{len(work.lengths)} samples of {response:,}"
        return f"{size} ({samples}); an update accumulates {work.micro_batches}"
    if isinstance(estimate.config, FineTuningConfig):
        examples = f"examples of {work.longest:,}, all learned but the first token"
        return f"{size} ({examples}); an update accumulates {work.micro_batches}"
    return (
        f"{size} (prompts of {prompt:,}, responses of {response:,}); {work.micro_batches} in each "
        f"of {work.mini_batches} mini-batches"
    )


def _counted(estimate: LayoutEstimate) -> str:
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in estimate.parameters.items() if count)
    return f"{estimate.parameters_total:,} parameters over all ranks: {kinds}"


def _sent(traffic: Iterable[tuple[str, int]]) -> str:
    texts = [f"{axis} {gib(num_bytes)}" for axis, num_bytes in traffic if num_bytes]
    return f"GiB a rank and step: {', '.join(texts)}" if texts else "nothing: there is one rank"


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")


def _stages(estimate: LayoutEstimate) -> Table:
    table = _table("GiB of a rank of each stage")
    names = ["rank", "layers", "in flight", "weights", "gradients", "optimizer", "activations"]
    has_rollouts = isinstance(estimate.config, Config)
    names += ["workspace", *(["replay", "rollout"] if has_rollouts else []), "worst moment"]
    for name in names:
        table.add_column(name, justify="right")
    worst = estimate.worst
    for rank in estimate.ranks:
        state = rank.state
        weights = sum(state.parameters.values()) + rank.fp8_copies + rank.reference
        figures = [weights, sum(state.gradients.values()), sum(state.optimizer.values())]
        figures += [rank.activations, rank.workspace]
        figures += [rank.replay, rank.sampling, rank.total] if has_rollouts else [rank.total]
        held = "+".join(str(count) for count in rank.in_flight)
        style = "bold" if rank is worst else None
        cells = (f"{rank.rank}", f"{rank.layers}", held, *map(gib, figures))
        table.add_row(*cells, style=style)
    return table


def _details(rank: RankMemory) -> Table:
    from gspo_megatron.estimate.memory import by_component

    title = f"worst rank: {rank.rank}, stage {rank.stage}"
    table = _table(title)
    table.add_column("component")
    table.add_column("GiB", justify="right")
    for name, num_bytes in by_component(rank).items():
        if num_bytes:
            table.add_row(name, gib(num_bytes))
    if rank.head:
        table.add_row("(log-prob head, part of the workspace)", gib(rank.head))
    table.add_row("worst moment", gib(rank.total), style="bold")
    return table


def figures(estimate: LayoutEstimate, gpu_bytes: float | None) -> dict[str, object]:
    """The name=value pairs of the last line; bytes as whole numbers."""
    worst = estimate.worst
    state = worst.state
    pairs: dict[str, object] = {
        "world_size": estimate.parallel.world_size,
        "parameters_total": estimate.parameters_total,
        **{f"parameters_{kind}": count for kind, count in estimate.parameters.items()},
        "worst_rank": worst.rank,
        "worst_stage": worst.stage,
        "worst_rank_bytes": worst.total,
        "weights_bytes": sum(state.parameters.values()),
        "gradients_bytes": sum(state.gradients.values()),
        "optimizer_bytes": sum(state.optimizer.values()),
        "fp8_copies_bytes": worst.fp8_copies,
        "reference_bytes": worst.reference,
        "activations_bytes": worst.activations,
        "workspace_bytes": worst.workspace,
        "head_bytes": worst.head,
        "replay_bytes": worst.replay,
        "kv_cache_bytes": worst.kv_cache,
        "rollout_bytes": worst.rollout,
        "host_bytes": worst.host,
        **{f"sent_{axis}_bytes": sent for axis, sent in estimate.most_traffic().items()},
        "bubble": f"{estimate.bubble:.4f}",
    }
    if gpu_bytes is not None:
        pairs["fits"] = "yes" if estimate.fits(gpu_bytes) else "no"
    return pairs


def show_search(search: Search, gpu_gb: float, left_out: str) -> None:
    """The suggestions, best first, and what to make of them."""
    out = console()
    table = _table("layouts that fit, best first")
    for name in ("s/step", "compute", "exchange", "bubble", "update", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("overrides", overflow="fold")
    for each in search.found:
        cost = each.cost
        times = (cost.total, cost.compute, cost.exchange, cost.bubble, cost.update)
        seconds = [f"{value:,.1f}" for value in times]
        table.add_row(*seconds, gib(each.estimate.worst.total), each.overrides)
    if search.found:
        out.print(table, markup=False)
    out.print(
        f"{search.legal:,} layouts (with recompute modes) pass the rules, {search.likely:,} may "
        f"fit into {gpu_gb:g} GB by a rough count; the {search.built} cheapest of them were built, "
        f"of which {len(search.found)} fit.",
        markup=False,
        soft_wrap=True,
    )
    out.print(
        f"The seconds are a model's, good for an order at most. It leaves out {left_out}.",
        markup=False,
        soft_wrap=True,
    )
