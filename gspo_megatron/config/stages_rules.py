"""What several keys of a pre-training or fine-tuning run must satisfy together, and which of them
may differ when it goes on. What does not concern the stage alone are the rules of an RL run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gspo_megatron.config import rules
from gspo_megatron.config.changes import KINDS, Kind, schema_keys
from gspo_megatron.config.families import family_of_shape
from gspo_megatron.config.precision import tokens_multiple
from gspo_megatron.config.problems import problem
from gspo_megatron.config.rules import Plan, Rule
from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig, StageConfig
from gspo_megatron.errors import ConfigError

# Keys that an RL run has not, or that mean something else there.
_OWN_KINDS: dict[str, Kind] = {
    "data.examples": "contents",
    "data.eval_examples": "shown",
    "data.train": "contents",
    "data.evaluation": "shown",
    "data.messages_field": "shapes",
    "data.max_tokens": "shapes",
    "data.too_long": "shapes",
    "data.weights": "shapes",
    "data.evaluation_share": "shapes",
    "data.sequence_length": "shapes",
    "data.mask_end_of_document": "shapes",
    "optimizer.wsd_steps": "shapes",
    "optimizer.wsd_decay": "shapes",
    "training.epochs": "harmless",  # what it makes of training.steps counts
    "training.tokens": "harmless",
    "training.batch_size": "shapes",
    "training.evaluation_batches": "harmless",
    "export.hf_path": "harmless",
}


def stage_kinds(schema: type[StageConfig]) -> dict[str, Kind]:
    """Of every key of a stage's configuration: see config.changes."""
    return {key: _OWN_KINDS.get(key) or KINDS[key] for key in schema_keys(schema)}


def check_stage(config: StageConfig, world_size: int, *, here: bool = True) -> None:
    """Raise ConfigError with every problem the configuration has on `world_size` ranks; `here`
    includes what it needs of the packages that are installed."""
    shape, layout = config.resolved_model(), config.layout()
    plan = Plan(config, shape, layout, world_size, True, here)  # type: ignore[arg-type]
    own = _FINE_TUNING if isinstance(config, FineTuningConfig) else _PRETRAINING
    problems = [line for rule in (*_SHARED, *own) for line in rule(plan)]
    if problems:
        raise ConfigError(problems)


def dropout_is_off(plan: Plan) -> Iterator[str]:
    for name in ("hidden_dropout", "attention_dropout"):
        value = plan.config.model.megatron.get(name)
        if value:
            wrong = "its noise would depend on the layout, and the model with it; legal: 0.0"
            yield problem(f"model.megatron.{name}", value, wrong)


def decay_is_read(plan: Plan) -> Iterator[str]:
    optimizer, steps = plan.config.optimizer, plan.config.training.steps
    if optimizer.decay != "wsd":
        if optimizer.wsd_steps is not None:
            wrong = "nothing reads it without optimizer.decay = wsd; legal: null"
            yield problem("optimizer.wsd_steps", optimizer.wsd_steps, wrong)
        return
    if optimizer.wsd_steps is None:
        yield problem("optimizer.wsd_steps", None, "optimizer.decay = wsd needs it; legal: from 1")
    elif steps is not None and optimizer.warmup_steps + optimizer.wsd_steps > steps:
        most = max(steps - optimizer.warmup_steps, 0)
        yield problem(
            "optimizer.wsd_steps",
            optimizer.wsd_steps,
            f"with warmup_steps = {optimizer.warmup_steps} more than training.steps = {steps}; "
            f"legal: at most {most}",
        )


def warm_up_ends(plan: Plan) -> Iterator[str]:
    optimizer, steps = plan.config.optimizer, plan.config.training.steps
    if steps is not None and optimizer.warmup_steps > steps:
        wrong = f"longer than training.steps = {steps}; legal: at most that"
        yield problem("optimizer.warmup_steps", optimizer.warmup_steps, wrong)


def export_has_a_family(plan: Plan) -> Iterator[str]:
    path = plan.config.export.hf_path
    if path is None or plan.config.model.hf_path is not None:
        return
    try:
        family_of_shape(plan.shape)
    except ConfigError as error:
        yield problem("export.hf_path", path, f"{error}; legal: null")


def examples_are_given(plan: Plan) -> Iterator[str]:
    data, training = plan.config.data, plan.config.training
    if data.examples is None:
        yield problem("data.examples", None, "needed to train; legal: a .jsonl or .parquet file")
    if training.evaluation_interval and data.eval_examples is None:
        yield problem(
            "training.evaluation_interval",
            training.evaluation_interval,
            "there is nothing to evaluate on; legal: 0, or give data.eval_examples",
        )
    if data.messages_field is not None and data.chat_template:
        wrong = "data.messages_field uses the template anyway; legal: false"
        yield problem("data.chat_template", data.chat_template, wrong)


def examples_fit(plan: Plan) -> Iterator[str]:
    most, wanted = plan.shape.max_sequence_length, plan.config.data.max_tokens
    if wanted is not None and wanted > most:
        wrong = f"more than max_sequence_length = {most}; legal: at most that"
        yield problem("data.max_tokens", wanted, wrong)


def corpora_are_given(plan: Plan) -> Iterator[str]:
    data, training = plan.config.data, plan.config.training
    if not data.train:
        yield problem("data.train", data.train, "needed to train; legal: a list of prefixes")
    if training.steps is None and training.tokens is None:
        yield problem("training.steps", None, "needed to train, or training.tokens; legal: from 1")
    if data.weights is not None and len(data.weights) != len(data.train):
        wrong = f"{len(data.weights)} weights of {len(data.train)} prefixes; legal: one each"
        yield problem("data.weights", data.weights, wrong)
    for key, prefixes in (("data.train", data.train), ("data.evaluation", data.evaluation)):
        if len(set(prefixes)) < len(prefixes):
            yield problem(key, prefixes, "a prefix stands there twice; legal: once, with a weight")
    if data.evaluation and data.evaluation_share:
        wrong = "data.evaluation names data for it too; legal: 0, or leave that out"
        yield problem("data.evaluation_share", data.evaluation_share, wrong)
    if training.evaluation_interval and not (data.evaluation or data.evaluation_share):
        yield problem(
            "training.evaluation_interval",
            training.evaluation_interval,
            "there is nothing to evaluate on; legal: 0, or give data.evaluation or "
            "data.evaluation_share",
        )


def samples_fit(plan: Plan) -> Iterator[str]:
    most, layout = plan.shape.max_sequence_length, plan.layout
    length = plan.config.data.sequence_length or most
    if length > most:
        wrong = f"more than max_sequence_length = {most}; legal: at most that"
        yield problem("data.sequence_length", length, wrong)
    unit = sample_multiple(plan.config)
    if length % unit:
        yield problem(
            "data.sequence_length",
            length,
            f"cp = {layout.cp} and tp = {layout.tp} cut it; legal: multiples of {unit}",
        )


def batches_divide(plan: Plan) -> Iterator[str]:
    layout, size = plan.layout, plan.config.training.batch_size
    if plan.world_size % layout.model_parallel_size:
        return  # told already
    dp = plan.world_size // layout.model_parallel_size
    unit = dp * (layout.pp if layout.vpp is not None else 1)
    if size % unit:
        of_stages = f", in rounds of pp = {layout.pp}" if unit > dp else ""
        yield problem(
            "training.batch_size",
            size,
            f"does not fall evenly on {dp} data-parallel ranks{of_stages}; legal: multiples of "
            f"{unit}",
        )


def sample_multiple(config: StageConfig) -> int:
    """What the tokens of a sample must be a multiple of, so that no padding is needed."""
    layout = config.layout()
    multiple = layout.tp if config.parallel.uses_sequence_parallel() else 1
    multiple *= tokens_multiple(config.training.precision)
    return math.lcm(multiple * layout.cp, 2 * layout.cp if layout.cp > 1 else 1)


_SHARED: tuple[Rule, ...] = (
    rules.world_size_fits,
    rules.tensor_parallel_divides,
    rules.sequence_parallel_fits,
    rules.pipeline_divides,
    rules.experts_divide,
    rules.router_is_sound,
    dropout_is_off,
    rules.backend_is_installed,
    rules.precision_is_possible,
    rules.learning_rates_agree,
    warm_up_ends,
    decay_is_read,
    rules.weights_have_one_source,
    rules.hf_path_decides_the_shape,
    rules.checkpoints_can_be_kept,
    export_has_a_family,
)
_FINE_TUNING: tuple[Rule, ...] = (examples_are_given, examples_fit)
_PRETRAINING: tuple[Rule, ...] = (corpora_are_given, samples_fit, batches_divide)

assert set(_OWN_KINDS) <= {*schema_keys(FineTuningConfig), *schema_keys(PretrainingConfig)}
