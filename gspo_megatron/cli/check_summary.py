"""What `check` prints of a configuration that is sound: what it will train, on what, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gspo_megatron.config import ModelShape
from gspo_megatron.config.model_shape import experts_in_layers

if TYPE_CHECKING:
    from gspo_megatron.cli.check_inputs import AnyInputs, Checked

Rows = list[tuple[str, str]]

# Each adds parameters that the plain formula leaves out.
_NOT_COUNTED = (
    "add_bias_linear",
    "add_qkv_bias",
    "attention_output_gate",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
    "moe_latent_size",
    "mtp_num_layers",
    "multi_latent_attention",
)


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
    from gspo_megatron.config import resolve_parallel

    config: Any = checked.config
    inputs = checked.inputs
    shape, section = config.resolved_model(), config.model
    name = section.hf_path or section.preset or section.checkpoint_path
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


def count_parameters(shape: ModelShape, vocab_size: int) -> tuple[int, int] | None:
    """All parameters, and those that take part in one token; None for shapes beyond the formula.

    Counts the vocabulary as it is, without the rows that padding adds.
    """
    megatron = shape.megatron
    if megatron.get("normalization") != "RMSNorm" or any(map(megatron.get, _NOT_COUNTED)):
        return None
    hidden, head = shape.hidden_size, shape.kv_channels
    matrices = 3 if megatron.get("gated_linear_unit") else 2
    attention = hidden * head * 2 * (shape.num_attention_heads + shape.num_query_groups)
    norms = 2 * hidden + (2 * head if megatron.get("qk_layernorm") else 0)
    outside = hidden * vocab_size * (1 if shape.tie_embeddings else 2) + hidden
    total = active = outside + shape.num_layers * (attention + norms)
    for has_experts in experts_in_layers(shape):
        if not has_experts:
            total += (dense := matrices * hidden * shape.ffn_hidden_size)
            active += dense
            continue
        assert shape.num_moe_experts and shape.moe_router_topk and shape.moe_ffn_hidden_size
        expert = matrices * hidden * shape.moe_ffn_hidden_size
        shared = matrices * hidden * (shape.moe_shared_expert_intermediate_size or 0)
        router = hidden * shape.num_moe_experts
        total += router + shared + expert * shape.num_moe_experts
        active += router + shared + expert * shape.moe_router_topk
    return total, active
