"""Which keys may differ from those that a run was started with, when it goes on.

Every key of the schema is in the table. A key that shapes the run would make of its second half
another experiment than of the first, unnoticed: it is refused. The others change where and how fast
it runs, what is written down and how long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from gspo_megatron.config.problems import format_value, problem
from gspo_megatron.config.schema import Config
from gspo_megatron.config.stages import StageConfig

# shapes: refused. harmless: allowed. contents: a path, of which only the file's contents count.
# shown: likewise, and other contents are allowed too. steps: allowed where no decay depends on it.
# code: names a function; another name is refused, what its file holds may be mended.
Kind = Literal["shapes", "harmless", "contents", "shown", "steps", "code"]

_BY_KIND: dict[Kind, str] = {
    "harmless": """
        parallel.layout parallel.tensor_model_parallel_size parallel.pipeline_model_parallel_size
        parallel.virtual_pipeline_model_parallel_size parallel.expert_model_parallel_size
        parallel.expert_tensor_parallel_size parallel.context_parallel_size
        parallel.sequence_parallel parallel.data_parallel_size parallel.ddp
        rollout.batch_size
        objective.reference_offload
        routing.store_on_host routing.volatility
        training.micro_batch_tokens training.packing training.recompute
        training.evaluation_interval training.evaluation_prompts training.dump_batches
        training.hang_timeout_seconds training.stop_margin_seconds training.idle_restarts
        checkpoint.interval checkpoint.keep_last checkpoint.keep_best checkpoint.keep_every
        checkpoint.best_metric checkpoint.asynchronous
        logging.dir logging.trackers logging.samples_per_step logging.plots
    """,
    "contents": "data.prompts data.tokenizer training.warm_start.prompts",
    "shown": "data.eval_prompts",
    "steps": "training.steps",
    "code": "reward.import_path objective.import_path objective.advantage_import_path",
    "shapes": """
        model.preset model.hf_path model.checkpoint_path model.backend model.vocab_size
        model.max_sequence_length model.rotary_base model.tie_embeddings model.megatron
        data.prompt_field data.answer_field data.max_prompt_tokens data.chat_template data.shuffle
        rollout.engine rollout.group_size rollout.prompts_per_step rollout.max_response_tokens
        rollout.temperature rollout.top_p rollout.top_k rollout.stop rollout.dynamic_sampling
        rollout.max_refills
        reward.name reward.options reward.scale reward.clip
        reward.overlong_buffer reward.overlong_penalty
        objective.name objective.options objective.ratio objective.rule
        objective.aggregation objective.advantage objective.correction objective.clip_low
        objective.clip_high objective.allow_wide_clip objective.dual_clip objective.tau_positive
        objective.tau_negative objective.log_clip objective.correction_low
        objective.correction_high objective.off_policy_mask objective.old_logprobs
        objective.mini_batches objective.advantage_std objective.kl
        objective.kl_coefficient objective.kl_in objective.entropy_coefficient
        routing.replay routing.reference_replay routing.rollout_noise
        optimizer.learning_rate optimizer.min_learning_rate optimizer.warmup_steps optimizer.decay
        optimizer.weight_decay optimizer.beta1 optimizer.beta2 optimizer.epsilon
        optimizer.clip_grad optimizer.megatron
        training.seed training.precision training.warm_start.steps training.warm_start.batch_size
        training.warm_start.learning_rate training.warm_start.warmup_steps
        training.warm_start.target_accuracy
    """,
}
KINDS: dict[str, Kind] = {key: kind for kind, keys in _BY_KIND.items() for key in keys.split()}

# Fields below `model.megatron` that change where and how fast something is computed, and no result
# by more than rounding.
_HARMLESS_FIELDS = """
    moe_token_dispatcher_type moe_permute_fusion recompute_granularity recompute_method
    recompute_num_layers recompute_modules distribute_saved_activations cpu_offloading
    cpu_offloading_num_layers tp_comm_overlap overlap_p2p_comm batch_p2p_comm
    deallocate_pipeline_outputs barrier_with_L1_time num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
"""


@dataclass
class Changes:
    """What differs from a checkpoint's configuration: one line a key."""

    refused: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)  # without effect on what is learned
    told: list[str] = field(default_factory=list)  # allowed too, and perhaps with an effect


def find_changes(
    before: Mapping[str, Any], config: Config | StageConfig, same_contents: Mapping[str, bool]
) -> Changes:
    """Hold a configuration against the one that a run was started with.

    `before` is config.yaml of a checkpoint as plain data. `same_contents` tells by key whether an
    input file, or that of a function, still holds what it held then; a key that it lacks names none
    now or named none then.
    """
    then, now = dict(_leaves(before)), dict(_leaves(config.model_dump()))
    defaults = {key: info.default for key, info in schema_keys(type(config)).items()}
    kinds = _kinds(config)
    changes = Changes()
    for key in sorted({*then, *now, *same_contents}):
        top = _schema_key(key, kinds)
        if top not in kinds:
            changes.refused.append(f"{key}: was {format_value(then.get(key))} and is no key now")
            continue
        # A version that did not know the key yet did what its default says.
        fallback = None if key != top else defaults.get(top)
        old, new = then.get(key, fallback), now.get(key, fallback)
        kind = kinds[top]
        if kind in ("contents", "shown"):
            _compare_contents(changes, key, kind, (old, new), same_contents.get(key))
        elif old != new:
            _compare_values(changes, key, kind, old, new, config)
        elif kind == "code" and same_contents.get(key) is False:
            changes.told.append(f"{key}: the code of {format_value(new)}")
    return changes


def schema_keys(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, Any]:
    """Every key of the schema that is no section, dotted, with pydantic's description of it."""
    found: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= schema_keys(inner, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = info
    return found


def _compare_contents(
    changes: Changes, key: str, kind: Kind, paths: tuple[Any, Any], same: bool | None
) -> None:
    old, new = paths
    renamed = f"{key}: {format_value(old)} -> {format_value(new)}"
    if same:
        if old != new:
            changes.allowed.append(f"{renamed}, with the same contents")
    elif kind == "shown":
        if same is False or old != new:
            changes.allowed.append(renamed if old != new else f"{key}: its contents")
    elif old != new:
        changes.refused.append(problem(key, new, f"was {format_value(old)}, of other contents"))
    elif same is False:
        changes.refused.append(problem(key, new, "its contents are not what they were"))


def _compare_values(
    changes: Changes, key: str, kind: Kind, old: Any, new: Any, config: Config
) -> None:
    harmless = kind == "harmless" or key.rpartition(".")[2] in _HARMLESS_FIELDS.split()
    if kind == "steps":
        decay = config.optimizer.decay
        harmless = decay == "constant"
        if not harmless:
            reason = f"was {old}, and optimizer.decay = {decay} ends there"
            changes.refused.append(problem(key, new, reason))
            return
    if harmless:
        changes.allowed.append(f"{key}: {format_value(old)} -> {format_value(new)}")
    else:
        changes.refused.append(problem(key, new, f"was {format_value(old)}"))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values. Of a dict of Megatron's fields each field is a key of its own, of a
    dict of the user's (`options`) the whole is the value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and name != "options":
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _kinds(config: Config | StageConfig) -> Mapping[str, Kind]:
    if isinstance(config, Config):
        return KINDS
    from gspo_megatron.config.stages_rules import stage_kinds  # which adds to the table above

    return stage_kinds(type(config))


def _schema_key(key: str, kinds: Mapping[str, Kind]) -> str:
    """The key of the schema that a leaf belongs to."""
    parts = key.split(".")
    shorter = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
    return next((name for name in shorter if name in kinds), key)
