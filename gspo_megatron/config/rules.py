"""What several keys must satisfy together, checked before any process group exists.

A rule looks at the whole configuration and yields one line a problem. Megatron-Core refuses most of
these too, but one at a time, on a thousand ranks, minutes after the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gspo_megatron.config.checkpoint_rules import checkpoint_problems
from gspo_megatron.config.hf_rules import hf_problems
from gspo_megatron.config.objectives import objective_problems
from gspo_megatron.config.parallel import Layout
from gspo_megatron.config.pipeline_split import stage_problems
from gspo_megatron.config.precision_rules import backend_problems, precision_problems
from gspo_megatron.config.problems import problem
from gspo_megatron.config.routing_rules import routing_problems
from gspo_megatron.config.schema import Config
from gspo_megatron.config.shape import ModelShape
from gspo_megatron.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """What the rules look at."""

    config: Config
    shape: ModelShape
    layout: Layout
    world_size: int
    for_training: bool
    here: bool = True  # with what is installed where the rules are asked


Rule = Callable[[Plan], Iterator[str]]


def check_config(
    config: Config, world_size: int, for_training: bool = False, *, here: bool = True
) -> None:
    """Raise ConfigError with every problem the configuration has on `world_size` ranks.

    `for_training` adds what only a training run needs, such as prompts; `here`, what it needs of
    the packages that are installed.
    """
    plan = Plan(config, config.resolved_model(), config.layout(), world_size, for_training, here)
    problems = [line for rule in RULES for line in rule(plan)]
    if problems:
        raise ConfigError(problems)


def world_size_fits(plan: Plan) -> Iterator[str]:
    layout, world = plan.layout, plan.world_size
    model, experts = layout.model_parallel_size, layout.expert_parallel_size
    smallest = replace(layout, dp=None).world_size
    if world % model:
        yield (
            f"world size = {world}: not divisible by tp * pp * cp = {layout.tp} * {layout.pp} * "
            f"{layout.cp} = {model}; legal: multiples of {smallest}"
        )
    if world % experts:
        yield (
            f"world size = {world}: not divisible by etp * ep * pp = {layout.etp or 1} * "
            f"{layout.ep} * {layout.pp} = {experts}, the ranks that hold all experts; "
            f"legal: multiples of {smallest}"
        )
    if layout.dp is not None and layout.dp * model != world:
        yield problem(
            "parallel.data_parallel_size",
            layout.dp,
            f"with tp * pp * cp = {model} that takes {layout.dp * model} ranks, not {world}; "
            "legal: null, which takes all ranks",
        )


def tensor_parallel_divides(plan: Plan) -> Iterator[str]:
    shape, tp = plan.shape, plan.layout.tp
    key = "parallel.tensor_model_parallel_size"
    if shape.num_attention_heads % tp:
        yield problem(key, tp, _must_divide("num_attention_heads", shape.num_attention_heads))
    groups = shape.num_query_groups
    if groups % tp and tp % groups:
        yield problem(
            key, tp, f"neither divides num_query_groups = {groups} nor is a multiple of it"
        )
    if shape.num_attention_heads % groups:
        yield problem(
            "model.megatron.num_query_groups",
            groups,
            _must_divide("num_attention_heads", shape.num_attention_heads),
        )
    if plan.config.parallel.uses_sequence_parallel() and shape.hidden_size % tp:
        yield problem(key, tp, _must_divide("hidden_size", shape.hidden_size))
    if shape.has_dense_layers and shape.ffn_hidden_size % tp:
        yield problem(key, tp, _must_divide("ffn_hidden_size", shape.ffn_hidden_size))
    shared = shape.moe_shared_expert_intermediate_size
    if shared is not None and shared % tp:
        yield problem(key, tp, _must_divide("moe_shared_expert_intermediate_size", shared))


def sequence_parallel_fits(plan: Plan) -> Iterator[str]:
    said = plan.config.parallel.sequence_parallel
    if said and plan.layout.tp == 1:
        yield problem(
            "parallel.sequence_parallel",
            said,
            "splits over the tensor-parallel ranks, of which there is one; legal: null, or tp > 1",
        )
    if said is False and plan.layout.tp > 1 and plan.shape.num_moe_experts is not None:
        yield problem(
            "parallel.sequence_parallel",
            said,
            f"experts with tp = {plan.layout.tp} need it, or every token is routed tp times; "
            "legal: null or true",
        )


def pipeline_divides(plan: Plan) -> Iterator[str]:
    layout, layers = plan.layout, plan.shape.num_layers
    if layout.vpp is not None and layout.pp == 1:
        yield problem(
            "parallel.virtual_pipeline_model_parallel_size",
            layout.vpp,
            "interleaving needs stages; legal: null, or pipeline_model_parallel_size > 1",
        )
    else:
        yield from stage_problems(layers, layout, plan.shape.megatron)


def experts_divide(plan: Plan) -> Iterator[str]:
    shape, layout = plan.shape, plan.layout
    etp = layout.etp or 1
    if shape.num_moe_experts is None:
        for key, size in (("expert_model", layout.ep), ("expert_tensor", etp)):
            if size > 1:
                yield problem(
                    f"parallel.{key}_parallel_size", size, "the model has no experts; legal: 1"
                )
        return
    if shape.num_moe_experts % layout.ep:
        wrong = _must_divide("num_moe_experts", shape.num_moe_experts)
        yield problem("parallel.expert_model_parallel_size", layout.ep, wrong)
    assert shape.moe_ffn_hidden_size is not None
    if shape.moe_ffn_hidden_size % etp:
        wrong = _must_divide("moe_ffn_hidden_size", shape.moe_ffn_hidden_size)
        yield problem("parallel.expert_tensor_parallel_size", etp, wrong)


def router_is_sound(plan: Plan) -> Iterator[str]:
    shape = plan.shape
    if shape.num_moe_experts is None:
        given = plan.config.model.megatron.get("moe_ffn_hidden_size")
        if given is not None:
            yield problem(
                "model.megatron.moe_ffn_hidden_size",
                given,
                "the model has no experts; leave it out, or set model.megatron.num_moe_experts",
            )
        return
    topk = shape.moe_router_topk
    assert topk is not None
    if topk > shape.num_moe_experts:
        yield problem(
            "model.megatron.moe_router_topk",
            topk,
            f"there are {shape.num_moe_experts} experts; legal: 1 to {shape.num_moe_experts}",
        )
    megatron = shape.megatron
    softmax_after = not megatron.get("moe_router_pre_softmax")
    scores_softmax = megatron.get("moe_router_score_function", "softmax") == "softmax"
    if topk == 1 and scores_softmax and softmax_after:
        yield problem(
            "model.megatron.moe_router_topk",
            topk,
            "a softmax over one expert has no gradient; "
            "legal: 2 or more, or model.megatron.moe_router_pre_softmax = true",
        )


def dropout_is_off(plan: Plan) -> Iterator[str]:
    for name in ("hidden_dropout", "attention_dropout"):
        value = plan.config.model.megatron.get(name)
        if value:
            yield problem(
                f"model.megatron.{name}",
                value,
                "old and new policy would differ by noise, and their ratio with it; legal: 0.0",
            )


def backend_is_installed(plan: Plan) -> Iterator[str]:
    if plan.here:
        yield from backend_problems(plan.config)


def precision_is_possible(plan: Plan) -> Iterator[str]:
    precision, training = plan.config.training.precision, plan.for_training
    yield from precision_problems(
        precision, plan.config, plan.shape, plan.layout, for_training=training, here=plan.here
    )


def lengths_fit(plan: Plan) -> Iterator[str]:
    config = plan.config
    longest = plan.shape.max_sequence_length
    response = config.rollout.max_response_tokens
    prompt = config.data.max_prompt_tokens
    if response >= longest:
        yield problem(
            "rollout.max_response_tokens",
            response,
            f"leaves no room for a prompt in max_sequence_length = {longest}; "
            f"legal: at most {longest - 1}",
        )
    elif prompt is not None and prompt + response > longest:
        yield problem(
            "data.max_prompt_tokens",
            prompt,
            f"with max_response_tokens = {response} that is more than max_sequence_length = "
            f"{longest}; legal: at most {longest - response}",
        )


def batches_fit(plan: Plan) -> Iterator[str]:
    rollout, objective = plan.config.rollout, plan.config.objective
    if rollout.group_size < 2:
        yield problem(
            "rollout.group_size",
            rollout.group_size,
            "the advantage compares the responses of a group; legal: from 2",
        )
    sequences = rollout.prompts_per_step * rollout.group_size
    if objective.mini_batches > sequences:
        yield problem(
            "objective.mini_batches",
            objective.mini_batches,
            f"a step has prompts_per_step * group_size = {sequences} sequences and each "
            f"mini-batch needs one; legal: 1 to {sequences}",
        )


def objective_is_sound(plan: Plan) -> Iterator[str]:
    yield from objective_problems(plan.config.objective)


def rewards_are_shaped(plan: Plan) -> Iterator[str]:
    reward, longest = plan.config.reward, plan.config.rollout.max_response_tokens
    if reward.overlong_buffer is None:
        if reward.overlong_penalty != 1.0:
            yield problem(
                "reward.overlong_penalty",
                reward.overlong_penalty,
                "nothing reads it without reward.overlong_buffer; legal: 1.0",
            )
    elif reward.overlong_buffer >= longest:
        yield problem(
            "reward.overlong_buffer",
            reward.overlong_buffer,
            f"leaves no response of max_response_tokens = {longest} without a penalty; "
            f"legal: null, or below {longest}",
        )


def refills_are_read(plan: Plan) -> Iterator[str]:
    rollout = plan.config.rollout
    usual = type(rollout).model_fields["max_refills"].default
    if not rollout.dynamic_sampling and rollout.max_refills != usual:
        yield problem(
            "rollout.max_refills",
            rollout.max_refills,
            f"nothing reads it without rollout.dynamic_sampling; legal: {usual}",
        )


def learning_rates_agree(plan: Plan) -> Iterator[str]:
    optimizer = plan.config.optimizer
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield problem(
            "optimizer.min_learning_rate",
            optimizer.min_learning_rate,
            f"above the peak; legal: at most learning_rate = {optimizer.learning_rate}",
        )


def prompts_are_given(plan: Plan) -> Iterator[str]:
    data = plan.config.data
    if plan.for_training and data.prompts is None:
        yield problem("data.prompts", None, "needed to train; legal: a .jsonl or .parquet file")
    interval = plan.config.training.evaluation_interval
    if interval and data.eval_prompts is None:
        yield problem(
            "training.evaluation_interval",
            interval,
            "there is nothing to evaluate on; legal: 0, or give data.eval_prompts",
        )
    target = plan.config.training.warm_start.target_accuracy
    if target and data.eval_prompts is None:
        yield problem(
            "training.warm_start.target_accuracy",
            target,
            "there is nothing to evaluate on; legal: null, or give data.eval_prompts",
        )


def routing_can_be_replayed(plan: Plan) -> Iterator[str]:
    yield from routing_problems(plan.config, plan.shape)


def weights_have_one_source(plan: Plan) -> Iterator[str]:
    model = plan.config.model
    if model.checkpoint_path is not None and model.hf_path is not None:
        yield problem(
            "model.checkpoint_path",
            model.checkpoint_path,
            f"the weights would come from model.hf_path = {model.hf_path!r} too; legal: null, or "
            "leave model.hf_path out",
        )


def hf_path_decides_the_shape(plan: Plan) -> Iterator[str]:
    yield from hf_problems(plan.config.model, plan.shape)


def checkpoints_can_be_kept(plan: Plan) -> Iterator[str]:
    yield from checkpoint_problems(plan.config)


def _must_divide(name: str, size: int) -> str:
    divisors = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
    return f"does not divide {name} = {size}; legal: {divisors}{' ...' if size > 64 else ''}"


RULES: tuple[Rule, ...] = (
    world_size_fits,
    tensor_parallel_divides,
    sequence_parallel_fits,
    pipeline_divides,
    experts_divide,
    router_is_sound,
    dropout_is_off,
    backend_is_installed,
    precision_is_possible,
    lengths_fit,
    batches_fit,
    objective_is_sound,
    rewards_are_shaped,
    refills_are_read,
    learning_rates_agree,
    prompts_are_given,
    routing_can_be_replayed,
    weights_have_one_source,
    hf_path_decides_the_shape,
    checkpoints_can_be_kept,
)
