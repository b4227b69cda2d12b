"""The output of `check`: the summary of a valid configuration, and the tables of an estimate."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from gspo_megatron.config import Config, ModelShape, resolve_parallel
from gspo_megatron.config.objectives import narrow_clip_warnings
from gspo_megatron.config.phases import at_step, phase_configs, phase_end, phases_of
from gspo_megatron.config.resume import differences
from gspo_megatron.config.schema import suite_key
from gspo_megatron.config.stages import FineTuningConfig, PreferenceConfig, PretrainingConfig
from gspo_megatron.data.inputs import ExampleInputs, Inputs, corpus_tokens
from gspo_megatron.errors import ConfigError
from gspo_megatron.families import family_of_shape
from gspo_megatron.families.adapter_map import adapted_weights_of
from gspo_megatron.families.model_shape import experts_in_layers
from gspo_megatron.families.weight_map import weight_map
from gspo_megatron.hub import lacks_weights, written
from gspo_megatron.observe.progress import number

if TYPE_CHECKING:
    from gspo_megatron.cli.check_inputs import AnyInputs, Checked
    from gspo_megatron.config.stages import AnyConfig
    from gspo_megatron.estimate.layout import LayoutEstimate
    from gspo_megatron.estimate.memory import RankMemory
    from gspo_megatron.estimate.suggest import Search
    from gspo_megatron.estimate.workload import DataSizes

Rows = list[tuple[str, str]]

# Each of these settings adds parameters that the plain formula leaves out.
_NOT_COUNTED = """
    add_bias_linear add_qkv_bias attention_output_gate moe_router_enable_expert_bias
    moe_shared_expert_gate moe_latent_size mtp_num_layers multi_latent_attention
"""
_PLAIN_WIDTH = 240  # width of output that does not go to a terminal; no line is longer
_LABEL_WIDTH, _STAGE_WIDTH = 42, 12  # columns of the table of stages
_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def summary(checked: Checked, world_size: int) -> Rows:
    """Return the summary as names and texts. The summary describes the input files only if they
    were read."""
    config: Any = checked.config
    inputs: Any = checked.inputs
    rows = _of_model(checked, world_size)
    if inputs is not None:
        rows.append(
            ("tokenizer", f"{config.data.tokenizer}, {inputs.tokenizer.vocab_size:,} tokens")
        )
    if isinstance(config, PretrainingConfig):
        rows += _of_pretraining(config, inputs)
    elif isinstance(config, FineTuningConfig):
        rows += _of_fine_tuning(config, inputs)
    elif isinstance(config, PreferenceConfig):
        rows += _of_preferences(config, inputs)
    else:
        rows += _of_reinforcement(at_step(config, 1), inputs)
    steps = config.training.steps
    length = "as many steps as the epochs take" if steps is None else f"{steps:,} steps"
    rows.append(("run", f"{length} into {config.logging.dir}"))
    if steps != 0 and config.checkpoint.interval == 0:
        rows.append(("saved", "no checkpoint, as checkpoint.interval = 0"))
    return [*rows, *_of_collapse(config), *_of_phases(config)]


def _of_collapse(config: Any) -> Iterator[tuple[str, str]]:
    """Yield what the run does after a collapse, if it does more than warn."""
    does = getattr(config.training, "on_collapse", "warn")
    if does == "stop":
        yield "collapse", "the run is saved and ends"
    elif does == "rollback":
        most, interval = config.training.max_rollbacks, config.checkpoint.interval
        yield (
            "collapse",
            f"the run goes back to the last healthy checkpoint, at most {most:,} times; a "
            f"checkpoint is saved every {interval:,} steps, and two more checkpoints are kept",
        )


def _of_phases(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Yield each phase with its steps and the values that it changes, or nothing without phases."""
    first, before = 1, None
    for place, phase in enumerate(phase_configs(config) if phases_of(config) else (), 1):
        last = phase_end(config, first)
        changed = [] if before is None else differences(before, phase)
        yield f"phase {place}", f"steps {first:,} to {last:,}: {'; '.join(changed) or 'as above'}"
        first, before = last + 1, phase


def show_phases(phases: Sequence[tuple[AnyConfig, LayoutEstimate]], vocab_size: int) -> None:
    """Print the phases of a run, each with its estimate."""
    from gspo_megatron.estimate.cost import run_cost

    names = (">phase", ">from step", ">sequences", ">response tokens", ">GB", ">s/step")
    table, first = new_table(None, *names), 1
    for place, (config, estimate) in enumerate(phases, 1):
        counts = count_parameters(config.resolved_model(), vocab_size)
        cost = run_cost(estimate, counts[1] if counts else estimate.parameters.total())
        assert cost is not None, "only RL runs have phases"
        rollout: Any = getattr(config, "rollout")  # noqa: B009 (only RL runs have phases)
        sequences = rollout.prompts_per_step * rollout.group_size
        sizes = (place, first, sequences, rollout.max_response_tokens)
        memory = _gb(estimate.worst.total, 2 if estimate.worst.total >= 1e9 else 5)
        table.add_row(*(f"{size:,}" for size in sizes), memory, f"{cost.train_seconds:.3g}")
        first = phase_end(config, first) + 1
    print("\nphases: the most that a rank needs, and the training time of a step")
    console().print(table, markup=False)


def longest_of(inputs: AnyInputs | None) -> int | None:
    """Return the number of tokens of the longest prompt or example. Returns None if this number is
    not known, and for pre-training."""
    if isinstance(inputs, Inputs):
        return max(len(p.token_ids) for prompts in inputs.files.values() for p in prompts)
    return int(inputs.train.lengths.max()) if isinstance(inputs, ExampleInputs) else None


def sizes_of(checked: Checked) -> DataSizes:
    """Return what the estimates need to know about the input files."""
    from gspo_megatron.estimate.workload import DataSizes

    config, inputs = checked.config, checked.inputs
    longest = None if phases_of(config) else longest_of(inputs)  # phases may have other prompts
    if not isinstance(inputs, Inputs) or not isinstance(config, Config):
        return DataSizes(longest)
    most, own = config.training.evaluation_prompts, config.rollout.max_response_tokens
    counts, response = [min(len(inputs.evaluation), most)], own
    for name, suite in config.evaluation.suites.items():
        counts.append(suite.samples * len(inputs.files.get(suite_key(name), ())))
        response = max(response, suite.max_response_tokens or own)
    return DataSizes(longest, max(counts), response / own)


def vocab_size_of(checked: Checked) -> int | None:
    """Return the configured size of the vocabulary. If no size is configured, return the size of
    the tokenizer, or None if the tokenizer was not read."""
    size, inputs = checked.config.resolved_model().vocab_size, checked.inputs
    return inputs.tokenizer.vocab_size if size is None and inputs is not None else size


def _of_model(checked: Checked, world_size: int) -> Rows:
    config: Any = checked.config
    shape, section = config.resolved_model(), config.model
    name = written(section.hf_path or section.preset or section.checkpoint_path or "")
    model = f"{name}: {shape.num_layers} layers of {shape.hidden_size}"
    if shape.num_moe_experts is not None:
        model += f", {shape.moe_router_topk} of {shape.num_moe_experts} experts"
    vocab_size = vocab_size_of(checked)
    counted = None if vocab_size is None else count_parameters(shape, vocab_size)
    if counted is not None:
        total, active = counted
        model += f", {total:,} parameters"
        model += f", {active:,} for each token" if active < total else ""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    dp = resolve_parallel(config, world_size).data_parallel_size
    rows = [("model", model), ("layout", f"{config.layout()} on {ranks}, dp={dp}")]
    if section.lora.rank:
        rows += _of_adapters(config, shape)
    if checked.start is not None:
        resumed = checked.start.checkpoint
        source = written(section.checkpoint_path or section.hf_path or "random")
        if missing := lacks_weights(section.hf_path or ""):
            source += f", {len(missing)} files of {sum(missing) / 1e9:,.1f} GB not downloaded yet"
        rows.append(("weights", source if resumed is None else f"{resumed}: the run is resumed"))
    return rows


# The lowest learning rates of adapters without a warning, in RL and in the other stages. Lower
# rates are meant for the training of all weights. Adapters need about ten times as much:
# docs/lora.md.
_LEAST_RATE, _LEAST_RATE_OF_STAGES = 5e-6, 5e-5


def _of_adapters(config: Any, shape: ModelShape) -> Rows:
    lora, rate = config.model.lora, config.optimizer.learning_rate
    adapted = adapted_weights_of(config.model.family(shape), shape, lora.targets).values()
    count = sum(lora.rank * (m.rows + m.columns) for each in adapted for m in each.matrices)
    leaves = sorted({matrix.leaf for each in adapted for matrix in each.matrices})
    text = f"{count:,} parameters of rank {lora.rank}, times {lora.scale:g}, beside "
    rows = [("adapters", text + ", ".join(leaves))]
    least = _LEAST_RATE if isinstance(config, Config) else _LEAST_RATE_OF_STAGES
    if rate < least:
        note = f"optimizer.learning_rate = {rate:g} is one for training all weights; adapters need "
        rows.append(("warning", f"{note}about ten times as much: start with {10 * rate:g}"))
    return rows


def _of_reinforcement(config: Any, inputs: Any) -> Rows:
    rollout, objective = config.rollout, config.objective
    rows, allowed = [], config.max_prompt_tokens()
    lengths = f"prompts of at most {allowed} tokens"
    if inputs is not None:
        files = ", ".join(f"{len(prompts):,} in {key}" for key, prompts in inputs.files.items())
        rows = [("prompts", files), *(("warning", line) for line in inputs.warnings)]
        lengths = f"prompts of at most {longest_of(inputs)} tokens ({allowed} allowed)"
    step = (
        f"{rollout.prompts_per_step} prompts x {rollout.group_size} responses = "
        f"{rollout.prompts_per_step * rollout.group_size} sequences, {objective.mini_batches} "
        f"updates by {objective.import_path or objective.name}"
    )
    lengths += f", responses of at most {rollout.max_response_tokens}"
    rows += [("lengths", lengths), ("step", step)]
    rows += [("warning", line) for line in narrow_clip_warnings(objective)]
    if config.reward.model.is_on:
        model, ranks = config.reward.model, "on the training ranks"
        where = ranks if model.url is None else f"at {model.url}"
        rows.append(
            ("scores", f"{model.folder or model.tokenizer} {where}, {_NORMALIZED[model.normalize]}")
        )
    return rows


_NORMALIZED = {
    "none": "not normalised",
    "running": "normalised by all scores of the run",
    "group": "normalised in each group",
}


def _of_fine_tuning(config: Any, inputs: Any) -> Rows:
    rows, step = [], config.training.batch_size
    lengths = f"examples of at most {config.max_tokens()} tokens"
    if inputs is not None:
        texts, left_out = [], []
        for key, data in (("examples", inputs.train), ("eval_examples", inputs.evaluation)):
            if data is None:
                continue
            texts.append(f"{len(data):,} in data.{key}")
            counts = {"left out": data.counts.dropped, "cut": data.counts.truncated}
            left_out += [f"{n:,} of data.{key} {how}, too long" for how, n in counts.items() if n]
        step = config.examples_of_step(len(inputs.train))
        rows = [("examples", "; ".join([*texts, *left_out]))]
        rows += [("warning", line) for line in inputs.warnings]
        lengths = f"examples of at most {longest_of(inputs)} tokens ({config.max_tokens()} allowed)"
    return [*rows, ("lengths", lengths), ("step", f"{step} examples")]


def _of_preferences(config: Any, inputs: Any) -> Rows:
    rows, step = [], config.training.batch_size
    lengths = f"prompts with a response of at most {config.max_tokens()} tokens"
    what = "ratings" if config.preference.loss == "regression" else "pairs"
    if inputs is not None:
        step = config.examples_of_step(len(inputs.train))
        texts, files = [], (("preferences", inputs.train), ("eval_preferences", inputs.evaluation))
        for key, data in files:
            if data is not None:
                texts.append(f"{data.pairs:,} {what} of {len(data):,} prompts in data.{key}")
                texts += [f"left out of data.{key}: {line}" for line in data.left_out()]
        rows = [(what, "; ".join(texts)), *(("warning", line) for line in inputs.warnings)]
        lengths += f" ({longest_of(inputs)} tokens in data.preferences)"
    step = f"{step} prompts, with all {what} of each"
    return [*rows, ("lengths", lengths), ("step", step)]


def _of_pretraining(config: Any, inputs: Any) -> Rows:
    rows, length, training = [], config.sequence_length(), config.training
    tokens = training.batch_size * length
    step = f"{training.batch_size} samples = {tokens:,} tokens"
    step += f"; {training.steps * tokens:,} tokens in all"
    if inputs is not None:
        sizes = [corpus_tokens(prefix) for prefix in config.data.train]
        corpora = "1 corpus" if len(sizes) == 1 else f"{len(sizes)} corpora"
        rows = [("corpora", f"{sum(sizes):,} tokens in {corpora} of data.train")]
        step += f", {training.steps * tokens / sum(sizes):.3g} passes over the data"
    return [*rows, ("lengths", f"samples of {length:,} tokens"), ("step", step)]


def count_parameters(shape: ModelShape, vocab_size: int) -> tuple[int, int] | None:
    """Count all parameters, and the parameters that are active for one token. Rows that pad the
    vocabulary are not counted.

    If the model belongs to a family, the numbers come from the family's tensors. Otherwise a
    formula gives the numbers. Returns None if the model belongs to no family and has parts that the
    formula leaves out.
    """
    with contextlib.suppress(ConfigError):
        tensors = weight_map(family_of_shape(shape), shape, vocab_size).recipes
        sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
        sizes = {name: size for name, size in sizes.items() if not name.endswith("expert_bias")}
        routed = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
        idle = routed - routed * (shape.moe_router_topk or 0) // (shape.num_moe_experts or 1)
        return sum(sizes.values()), sum(sizes.values()) - idle
    megatron = shape.megatron
    if megatron.get("normalization") != "RMSNorm" or any(map(megatron.get, _NOT_COUNTED.split())):
        return None
    hidden, head = shape.hidden_size, shape.kv_channels
    matrices = 3 if megatron.get("gated_linear_unit") else 2
    attention = hidden * head * 2 * (shape.num_attention_heads + shape.num_query_groups)
    norms = 2 * hidden + (2 * head if megatron.get("qk_layernorm") else 0)
    has_one = shape.tie_embeddings or shape.scores
    outside = hidden * vocab_size * (1 if has_one else 2) + hidden * (2 if shape.scores else 1)
    experts, with_experts = shape.num_moe_experts or 0, sum(experts_in_layers(shape))
    shared = matrices * (shape.moe_shared_expert_intermediate_size or 0)
    always = outside + shape.num_layers * (attention + norms)
    always += (shape.num_layers - with_experts) * matrices * hidden * shape.ffn_hidden_size
    always += with_experts * hidden * (experts + shared)  # router and shared expert
    expert = with_experts * matrices * hidden * (shape.moe_ffn_hidden_size or 0)
    return always + expert * experts, always + expert * (shape.moe_router_topk or 0)


def console() -> Console:
    """Return a console with the terminal's width and colours. If there is no terminal, the console
    writes wide plain text."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    # a path may have brackets, or colons around the name of an emoji
    return Console(highlight=False, markup=False, emoji=False, width=width)


def new_table(title: str | None, *columns: str) -> Table:
    """Make an empty table. A column whose name starts with ">" is aligned to the right. Lines are
    not broken in these columns and in the first column. In all other columns lines are broken
    between words."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for place, name in enumerate(columns):
        right = name.startswith(">")
        side = "right" if right else "left"
        whole = right or place == 0
        table.add_column(name.lstrip(">"), justify=side, overflow="fold", no_wrap=whole)
    return table


def print_lines(rows: Iterable[tuple[str, str]], indent: int) -> None:
    """Print names and texts. Texts begin at column `indent`. On a terminal, lines break between
    words."""
    width = console().width if sys.stdout.isatty() else sys.maxsize
    for name, text in rows:
        print(fill(f"{name:<{indent}}{text}", width, subsequent_indent=" " * indent, **_WHOLE))


def _gb(num_bytes: float, decimals: int = 2) -> str:
    return f"{num_bytes / 1e9:,.{decimals}f}"


def show_layout(estimate: LayoutEstimate, modes: Mapping[str, int]) -> None:
    """Print the memory of one rank of each pipeline stage by component, the traffic and the
    bubble."""
    worst, out = estimate.worst, console()
    # with 2 decimals, most numbers of a tiny model would be 0.00
    decimals = 2 if worst.total >= 1e9 else 5
    at_once = max(1, (out.width - _LABEL_WIDTH) // _STAGE_WIDTH)
    for first in range(0, len(estimate.ranks), at_once):
        shown = estimate.ranks[first : first + at_once]
        out.print(_stages(shown, isinstance(estimate.config, Config), decimals), markup=False)
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in estimate.parameters.items() if count)
    sent = ", ".join(
        f"{axis} {_gb(size, decimals)}" for axis, size in estimate.most_traffic().items() if size
    )
    rows = {
        "most": f"rank {worst.rank} (stage {worst.stage}): {_gb(worst.total, decimals)} GB",
        "counted": f"{estimate.parameters.total():,} parameters over all ranks: {kinds}",
        "micro-batch": _micro_batch(estimate),
        "recompute": _recompute(estimate, modes, decimals),
        "sent": f"GB per rank and step: {sent}" if sent else "nothing: there is one rank",
        "bubble": f"the pipeline is idle for {estimate.bubble:.1%} of the training time",
    }
    if worst.host:
        rows["host"] = f"{_gb(worst.host, decimals)} GB of host memory per rank"
    print_lines(rows.items(), 12)


def show_cost(
    phases: Sequence[tuple[AnyConfig, LayoutEstimate]], vocab_size: int
) -> dict[str, object]:
    """Print the estimated time of a run, and return it as name=value pairs. Returns {} if the time
    is not known. phases: each with its estimate; a run without phases is one."""
    from gspo_megatron.estimate.cost import run_cost

    counts = count_parameters(phases[0][0].resolved_model(), vocab_size)
    if counts is None:
        return {}
    cost, done = None, 0
    for config, estimate in phases:
        end = phase_end(config, done + 1)
        of_phase = run_cost(estimate, counts[1], end - done if len(phases) > 1 else None)
        if of_phase is None:
            return {}
        cost, done = of_phase if cost is None else cost.and_then(of_phase), end
    if cost is None:
        return {}
    pairs: dict[str, object] = {"train_step_seconds": _short(cost.train_seconds)}
    step = f"{_short(cost.train_seconds)} s of training"
    if cost.generate_seconds is not None:
        pairs["generate_step_seconds"] = _short(cost.generate_seconds)
        step += f" and {pairs['generate_step_seconds']} s of generation"
    mean = " (mean of the phases)" if len(phases) > 1 else ""
    pairs |= {"run_hours": _short(cost.hours), "run_gpu_hours": _short(cost.gpu_hours)}
    text = (
        f"at least {step} a step{mean}; {pairs['run_hours']} hours, {pairs['run_gpu_hours']} "
        f"GPU-hours for {cost.steps} steps with responses of full length, on H100s (speeds are "
        "assumed)"
    )
    print_lines([("time", text)], 12)
    return pairs


def _short(value: float) -> str:
    """Write a number with three digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _recompute(estimate: LayoutEstimate, modes: Mapping[str, int], decimals: int) -> str:
    """Describe the memory of training under each recompute mode. Selective recompute may save no
    memory, and then the text says why: by default it recomputes attention, but fused attention
    keeps no scores."""
    from gspo_megatron.estimate.layout import saves_little

    config = estimate.config
    text = ", ".join(f"{mode} {_gb(total, decimals)} GB" for mode, total in modes.items())
    text = f"while training rank {estimate.worst.rank} needs: {text}"
    if saves_little(modes["selective"], modes["none"]):
        text += "; selective saves little or nothing here"
        if config.model.megatron.get("recompute_modules") is None:
            text += (
                ": it recomputes attention, and fused attention keeps no scores anyway "
                "(model.megatron.recompute_modules names other parts, such as [moe])"
            )
    return text


def _micro_batch(estimate: LayoutEstimate) -> str:
    work, ranks = estimate.work, estimate.parallel.context_parallel_size
    prompt, response = work.lengths[0]
    times = f"an update accumulates {work.micro_batches}"
    if isinstance(estimate.config, PretrainingConfig):
        what = f"{len(work.lengths)} samples of {response:,}"
    elif isinstance(estimate.config, PreferenceConfig):
        what = f"responses of {work.longest:,} with their prompts, each with one score"
    elif isinstance(estimate.config, FineTuningConfig):
        what = f"examples of {work.longest:,}, all learned but the first token"
    else:
        what = f"prompts of {prompt:,}, responses of {response:,}"
        times = f"{work.micro_batches} in each of {work.mini_batches} mini-batches"
    over = f" over {ranks} cp ranks" if ranks > 1 else ""
    return f"{work.tokens:,} tokens{over} ({what}); {times}"


def _stages(ranks: Sequence[RankMemory], has_rollouts: bool, decimals: int) -> Table:
    """Make a table with a column for each rank. Rows of zeros are left out."""
    from gspo_megatron.estimate.memory import by_component

    heads = [f">stage {rank.stage}\nrank {rank.rank}" for rank in ranks]
    table = new_table("GB (10^9 bytes) of a rank of each pipeline stage", "", *heads)
    held = ["+".join(map(str, rank.in_flight)) for rank in ranks]  # a number for each model chunk
    table.add_row("layers", *(str(rank.layers) for rank in ranks))
    table.add_row("micro-batches kept at once", *held)

    def add(name: str, sizes: Iterable[int], style: str | None = None) -> None:
        if any(sizes := list(sizes)):
            table.add_row(name, *(_gb(size, decimals) for size in sizes), style=style)

    components = [by_component(rank) for rank in ranks]
    for name in components[0]:
        add(name, (of_rank[name] for of_rank in components))
    if has_rollouts:
        table.add_section()
        add("while training", (rank.while_training for rank in ranks))
        add("while sampling", (rank.while_sampling for rank in ranks))
    add("most at one time", (rank.total for rank in ranks), "bold")
    return table


def figures(estimate: LayoutEstimate) -> dict[str, object]:
    """Return the name=value pairs of the last line. Bytes are whole numbers."""
    worst, state = estimate.worst, estimate.worst.state
    sums = ("activations", "workspace", "head", "replay", "kv_cache", "rollout", "host")
    return {
        "world_size": estimate.parallel.world_size,
        "parameters_total": estimate.parameters.total(),
        **{f"parameters_{kind}": count for kind, count in estimate.parameters.items()},
        "worst_rank": worst.rank,
        "worst_stage": worst.stage,
        "worst_rank_bytes": worst.total,
        "weights_bytes": sum(state.parameters.values()),
        "gradients_bytes": sum(state.gradients.values()),
        "optimizer_bytes": sum(state.optimizer.values()),
        **{
            f"{name}_bytes": getattr(worst, name)
            for name in ("fp8_copies", "reference", "scorer", *sums)
        },
        **{f"sent_{axis}_bytes": sent for axis, sent in estimate.most_traffic().items()},
        "bubble": f"{estimate.bubble:.4f}",
    }


def show_search(search: Search, gpu_gb: float, left_out: str, has_rollouts: bool) -> None:
    """Print the suggestions, the fastest first, and how they were found."""
    names = (">", ">s/step", ">compute", ">exchange", ">bubble", ">update", ">GB")
    table = new_table(None, *names)
    most = max((each.estimate.worst.total for each in search.suggestions), default=0)
    for place, each in enumerate(search.suggestions, 1):
        cost = each.cost
        times = (cost.total, cost.compute, cost.exchange, cost.bubble, cost.update)
        seconds = [number(value) for value in times]
        memory = _gb(each.estimate.worst.total, 2 if most >= 1e9 else 5)
        table.add_row(f"{place}", *seconds, memory)
    if search.suggestions:
        rollout = " (the rollout's is not estimated)" if has_rollouts else ""
        print(f"\nlayouts that fit, ordered by the time of training{rollout}")
        console().print(table, markup=False)
        print("overrides for the command line:")
        print_lines(
            ((f"{n:>2}", each.overrides) for n, each in enumerate(search.suggestions, 1)), 4
        )
        print()
    notes = [
        f"{search.num_valid:,} layouts (with recompute modes) pass the rules. By a rough count "
        f"{search.num_likely:,} of them may fit into {gpu_gb:g} GB; the {search.num_built} "
        f"cheapest of these were built, and {len(search.suggestions)} fit.",
        "Seconds: a cost model of the training part of a step, which serves to order the layouts. "
        f"It leaves out {left_out}.",
        "GB: the most that a rank needs at one time"
        + (", rollout (its key-value cache) included." if has_rollouts else "."),
    ]
    print_lines((("", note) for note in notes), 0)
