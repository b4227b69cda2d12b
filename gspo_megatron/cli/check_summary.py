"""What `check` prints of a configuration that is sound: what it will train, on what, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo_megatron.cli.check_inputs import AnyInputs, Checked

Rows = list[tuple[str, str]]


def summary(checked: Checked, world_size: int) -> Rows:
    """Names and texts; of the files only where they were read."""
    from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig

    config: Any = checked.config
    inputs: Any = checked.inputs
    if isinstance(config, PretrainingConfig):
        of_stage = _of_pretraining(config, inputs)
    elif isinstance(config, FineTuningConfig):
        of_stage = _of_fine_tuning(config, inputs)
    else:
        of_stage = _of_reinforcement(config, inputs)
    rows = _of_model(checked, world_size)
    if inputs is not None:
        size = f"{inputs.tokenizer.vocab_size:,} tokens"
        rows.append(("tokenizer", f"{config.data.tokenizer}, {size}"))
    steps = config.training.steps
    length = "as many steps as the examples make" if steps is None else f"{steps:,} steps"
    return [*rows, *of_stage, ("run", f"{length} into {config.logging.dir}")]


def longest_of(inputs: AnyInputs | None) -> int | None:
    """Tokens of the longest prompt or example; None where that is not known, or not asked."""
    from gspo_megatron.data.inputs import FineTuningInputs, Inputs

    if isinstance(inputs, Inputs):
        return max(len(p.token_ids) for prompts in inputs.files.values() for p in prompts)
    if isinstance(inputs, FineTuningInputs):
        return int(inputs.train.lengths.max())
    return None


def _of_model(checked: Checked, world_size: int) -> Rows:
    from gspo_megatron.cli.parameters import count_parameters
    from gspo_megatron.config import resolve_parallel

    config: Any = checked.config
    inputs = checked.inputs
    shape, section = config.resolved_model(), config.model
    name = section.preset if section.hf_path is None else section.hf_path
    model = f"{name}: {shape.num_layers} layers of {shape.hidden_size}"
    if shape.num_moe_experts is not None:
        model += f", {shape.moe_router_topk} of {shape.num_moe_experts} experts"
    vocab_size = shape.vocab_size
    if vocab_size is None and inputs is not None:
        vocab_size = inputs.tokenizer.vocab_size
    counted = None if vocab_size is None else count_parameters(shape, vocab_size)
    if counted is not None:
        total, active = counted
        model += f", {total:,} parameters"
        if active < total:
            model += f", {active:,} for each token"
    weights = section.checkpoint_path or section.hf_path or "random"
    if checked.checkpoint is not None:
        weights = f"{checked.checkpoint}: the run goes on"
    parallel = resolve_parallel(config, world_size)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    rows = [
        ("model", model),
        ("layout", f"{config.layout()} on {ranks}, dp={parallel.data_parallel_size}"),
    ]
    return rows if inputs is None else [*rows, ("weights", weights)]


def _of_reinforcement(config: Any, inputs: Any) -> Rows:
    rollout, objective = config.rollout, config.objective
    sequences = rollout.prompts_per_step * rollout.group_size
    rows, allowed = [], config.max_prompt_tokens()
    lengths = f"prompts of at most {allowed} tokens"
    if inputs is not None:
        files = ", ".join(f"{len(prompts):,} in {key}" for key, prompts in inputs.files.items())
        rows.append(("prompts", files))
        rows += [("warning", line) for line in inputs.warnings]
        lengths = f"prompts of at most {longest_of(inputs)} tokens ({allowed} allowed)"
    return [
        *rows,
        ("lengths", f"{lengths}, responses of at most {rollout.max_response_tokens}"),
        (
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.group_size} responses = {sequences} "
            f"sequences, {objective.mini_batches} updates by "
            f"{objective.import_path or objective.name}",
        ),
    ]


def _of_fine_tuning(config: Any, inputs: Any) -> Rows:
    rows, lengths = [], f"examples of at most {config.max_tokens()} tokens"
    if inputs is not None:
        files = {"data.examples": inputs.train, "data.eval_examples": inputs.evaluation}
        found = {key: data for key, data in files.items() if data is not None}
        texts = [f"{len(data):,} in {key}" for key, data in found.items()]
        texts += [
            f"{count:,} of {key} {what}"
            for key, data in found.items()
            for what, count in (
                ("left out, too long", data.counts.dropped),
                ("cut, too long", data.counts.truncated),
            )
            if count
        ]
        rows.append(("examples", "; ".join(texts)))
        rows += [("warning", line) for line in inputs.warnings]
        lengths = f"examples of at most {longest_of(inputs)} tokens ({config.max_tokens()} allowed)"
    return [*rows, ("lengths", lengths), ("step", f"{config.training.batch_size} examples")]


def _of_pretraining(config: Any, inputs: Any) -> Rows:
    from gspo_megatron.data.inputs import corpus_tokens

    rows = []
    length, training = config.sequence_length(), config.training
    tokens = training.batch_size * length
    learned = f"{training.steps * tokens:,} tokens in all"
    if inputs is not None:
        sizes = [corpus_tokens(prefix) for prefix in config.data.train]
        corpora = "1 corpus" if len(sizes) == 1 else f"{len(sizes)} corpora"
        rows.append(("corpora", f"{sum(sizes):,} tokens in {corpora} of data.train"))
        learned += f", {training.steps * tokens / sum(sizes):.3g} times what there is"
    return [
        *rows,
        ("lengths", f"samples of {length:,} tokens"),
        ("step", f"{training.batch_size} samples = {tokens:,} tokens; {learned}"),
    ]
