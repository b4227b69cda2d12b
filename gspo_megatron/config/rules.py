"""Rules that several keys must satisfy together, checked before any process group exists.

Megatron-Core also finds most of these problems. But it reports one problem at a time, on all ranks,
minutes after the start. The rules for model, layout and precision are in model_rules.py, and those
for servers in server_rules.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_megatron.config.model_rules import (
    MODEL_RULES,
    Plan,
    Problems,
    Rule,
    prompts_can_be_shared,
    unread,
)
from gspo_megatron.config.objectives import (
    learns_from_parts,
    may_have_reference,
    objective_problems,
    resolve_objective,
)
from gspo_megatron.config.precision import tokens_multiple
from gspo_megatron.config.schema import NEEDS_PYTHON, SINGLE_TURN, STEP_BITS, Config
from gspo_megatron.config.scorer import reward_model_divides, reward_model_fits
from gspo_megatron.config.server_rules import (
    adapters_are_served,
    rollout_nodes_are_used,
    servers_are_there,
    servers_do_what_the_trainer_does,
    staleness_fits,
    temperatures_are_served,
)
from gspo_megatron.config.stages import (
    AnyConfig,
    FineTuningConfig,
    PreferenceConfig,
    PretrainingConfig,
    StageConfig,
)
from gspo_megatron.config.suite_rules import suites_fit
from gspo_megatron.errors import (
    ConfigError,
    DataError,
    UnknownValueError,
    did_you_mean,
    gathered_in,
    nearest,
    problem,
)
from gspo_megatron.families.model_shape import MODEL_FILE
from gspo_megatron.files import SIDE_FILES, copied_as


def check_config(
    config: AnyConfig, world_size: int, for_training: bool = False, *, here: bool = True
) -> None:
    """Raise ConfigError with every problem of a configuration of any stage on `world_size` ranks.

    for_training: also check what only an RL training run needs, such as prompts; here: also check
    the packages that are installed on this machine.
    """
    is_rl = isinstance(config, Config)
    plan = Plan(config, world_size, for_training or not is_rl, here)
    problems: list[str] = []
    for rule in (*MODEL_RULES, *_RULES[type(config)]):
        try:
            problems.extend(problem(key, plan.value(key), wrong) for key, wrong in rule(plan))
        except ConfigError as error:
            # The model has no known shape. Other rules may not need the shape.
            problems.extend(error.problems)
    if is_rl:
        with gathered_in(problems):
            reads_std = False
            with contextlib.suppress(UnknownValueError):  # of reward.model.normalize
                reads_std = config.reward.model.normalize == "group"
            problems.extend(objective_problems(config.objective, reads_std=reads_std))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def inputs_are_given(plan: Plan) -> Problems:
    data, (learned, evaluated) = plan.config.data, plan.config.inputs
    learns = plan.config.training.steps != 0
    if plan.for_training and learns and not getattr(data, learned):
        allowed = "a list of prefixes" if learned == "train" else "a .jsonl or .parquet file"
        yield f"data.{learned}", f"needed to train; allowed: {allowed}"
    names = [name for name in (evaluated, "evaluation_share") if hasattr(data, name)]
    has_data = any(getattr(data, name) for name in names)
    suites = isinstance(plan.config, Config) and bool(plan.config.evaluation.suites)
    if plan.config.training.evaluation_interval and not has_data:
        keys = " or ".join(f"data.{name}" for name in names)
        wrong = f"there is nothing to evaluate on; allowed: 0, or give {keys}"
        yield "training.evaluation_interval", wrong
    if plan.for_training and not learns and not (has_data or suites):
        wrong = "evaluates only, and there is nothing to evaluate on; allowed: from 1, or give "
        yield "training.steps", f"{wrong}data.{evaluated} or evaluation.suites"


def checkpoints_can_be_kept(plan: Plan) -> Problems:
    """Check that the run can be saved, and that its best checkpoints can be found."""
    section, training = plan.config.checkpoint, plan.config.training
    if section.interval:
        # A checkpoint holds the moments of Megatron's distributed Adam, by parameter.
        optimizer, ddp = plan.config.optimizer.megatron, plan.config.parallel.ddp
        lost = "its state cannot be saved; allowed: {}, or checkpoint.interval = 0"
        if optimizer.get("optimizer", "adam") not in (None, "adam"):
            yield "optimizer.megatron.optimizer", lost.format("adam")
        if ddp.get("use_distributed_optimizer") not in (None, True):
            yield "parallel.ddp.use_distributed_optimizer", lost.format("true")
    elif training.steps != 0 and (does := getattr(training, "on_collapse", "warn")) != "warn":
        wrong = "without checkpoints, a run that collapses can be neither saved nor rolled back"
        allowed = f"from 1, or training.on_collapse = warn in place of {does}"
        yield "checkpoint.interval", f"{wrong}; allowed: {allowed}"
    if getattr(training, "on_collapse", "warn") == "rollback" and training.steps >> STEP_BITS:
        wrong = "in so many steps, two rollbacks would draw the same samples"
        yield "training.steps", f"{wrong}; allowed: below {1 << STEP_BITS}, or on_collapse = stop"
    if not section.keep_best:
        return
    yield from _best_metric_is_measured(plan)
    if not section.best_metric.startswith("evaluation/"):
        return
    if training.steps == 0:  # nothing is saved
        return
    key, evaluated = plan.config.evaluated_every(section.best_metric)
    saved, steps = section.interval, training.steps
    if evaluated == 0:
        wrong = f"no checkpoint before the last has {section.best_metric}"
        yield "checkpoint.keep_best", f"{wrong}; allowed: 0, or set {key}"
    # A stage may not know its number of steps yet.
    elif saved and steps is not None and math.lcm(evaluated, saved) >= steps:
        yield (
            "checkpoint.keep_best",
            f"no step before the last is both saved (checkpoint.interval = {saved}) and evaluated "
            f"({key} = {evaluated}), as {section.best_metric} needs; allowed: "
            f"0, or intervals with a common multiple below training.steps = {steps}",
        )


# The names of a suite's figures. They are repeated here, because config cannot import
# evaluation.scores.
_SUITE_FIGURES = ["mean", "ci_low", "ci_high", "length", "problems"]


def _best_metric_is_measured(plan: Plan) -> Problems:
    """Check that an evaluation has the metric of checkpoint.best_metric.

    A metric of a step is not checked. The metrics of steps are known only when a step runs, because
    the user's rewards may have parts, and the user's objectives may have metrics of their own.
    """
    name = plan.config.checkpoint.best_metric
    if isinstance(plan.config, Config):
        allowed = ["evaluation/accuracy", "evaluation/reward"]
        for suite, section in plan.config.evaluation.suites.items():
            powers = {1 << n for n in range(section.samples.bit_length())} | {section.samples}
            figures = [*_SUITE_FIGURES, *(f"pass_at_{k}" for k in sorted(powers))]
            figures += [f"maj_at_{section.samples}"] * (section.samples > 1)
            allowed += [f"evaluation/{suite}/{figure}" for figure in figures]
    else:
        allowed = ["evaluation/logprob"]
        if isinstance(plan.config, PreferenceConfig):
            regression = plan.config.preference.loss == "regression"
            allowed = ["evaluation/correlation" if regression else "evaluation/accuracy"]
    figure = name.rpartition("/")[2]
    if name.startswith("evaluation/") and figure in ("loss", "failed", "left_out", "truncated"):
        wrong = "lower is better, and the checkpoints with the highest are kept"
        yield "checkpoint.best_metric", f"{wrong}; allowed: {allowed[0]}"
        return
    first, slash, _ = name.partition("/")
    without = {each.partition("/")[2]: each for each in allowed}
    meant = nearest(name, allowed)
    if first != "evaluation":  # the first word is misspelt or missing
        is_slip = nearest(first, ["evaluation"]) if slash else meant or nearest(name, without)
        if not is_slip or first == "selection" or name in ("loss", "reward/mean"):
            return
        meant = meant or [without[each] for each in nearest(name, without)]
    beside = [f"evaluation/{figure}" for figure in ("accuracy_low", "accuracy_high", "prompts")]
    if name not in allowed + beside:
        hint = did_you_mean(meant) if meant else f"allowed: {', '.join(allowed[:8])}"
        yield "checkpoint.best_metric", f"no evaluation of this run has it; {hint}"


def run_folder_is_apart(plan: Plan) -> Problems:
    """Check that the run folder is not inside a folder of weights, because a run cleans its folder,
    and not inside the folder of its export, which must be empty. Also check that it is no folder of
    the system."""
    model, folder = plan.config.model, str(plan.config.logging.dir)
    place = Path(os.path.realpath(folder))
    if place == Path("/") or any(map(place.is_relative_to, ("/proc", "/sys"))):
        yield "logging.dir", "a folder of the system; allowed: a folder for this run alone"
    for key, given in (("hf_path", model.hf_path), ("checkpoint_path", model.checkpoint_path)):
        if given is None or (key == "checkpoint_path" and not Path(given, MODEL_FILE).is_file()):
            continue  # a run folder may contain another run
        if place.is_relative_to(os.path.realpath(given)):
            yield "logging.dir", f"lies in model.{key} = {given}; allowed: a folder outside of it"
    export = plan.config.export.hf_path if isinstance(plan.config, StageConfig) else None
    if export is not None and place.is_relative_to(os.path.realpath(export)):
        yield "export.hf_path", f"logging.dir = {folder} lies in it; allowed: another folder"


def learning_rates_fit(plan: Plan) -> Problems:
    optimizer, steps, key = plan.config.optimizer, plan.config.training.steps, "optimizer.wsd_steps"
    if optimizer.decay == "constant" and steps != 0:  # a run of no steps has no learning rates
        wrong = "nothing reads it with optimizer.decay = constant"
        yield from unread(plan, "optimizer", ["min_learning_rate"], wrong)
    elif optimizer.min_learning_rate > optimizer.learning_rate:
        wrong = f"above the peak; allowed: at most learning_rate = {optimizer.learning_rate}"
        yield "optimizer.min_learning_rate", wrong
    if not isinstance(plan.config, StageConfig):
        return
    if steps is not None and optimizer.warmup_steps > steps:
        yield (
            "optimizer.warmup_steps",
            f"longer than training.steps = {steps}; allowed: at most that",
        )
    if optimizer.decay != "wsd":
        wrong = "nothing reads it without optimizer.decay = wsd"
        yield from unread(plan, "optimizer", ["wsd_steps", "wsd_decay"], wrong)
    elif optimizer.wsd_steps is None:
        yield key, "optimizer.decay = wsd needs it; allowed: from 1"
    elif steps is not None and optimizer.warmup_steps + optimizer.wsd_steps > steps:
        both = f"warmup_steps = {optimizer.warmup_steps} and this"
        wrong = f"{both} are together more than training.steps = {steps}"
        most = steps - optimizer.warmup_steps
        legal = f"at most {most}" if most > 0 else "from 1, with fewer warmup_steps"
        yield key, f"{wrong}; allowed: {legal}"


def rollouts_fit(plan: Plan) -> Problems:
    rollout, prompt = plan.config.rollout, plan.config.data.max_prompt_tokens
    if rollout.group_size < 2:
        wrong = "the advantage compares the responses of a group; allowed: from 2"
        yield "rollout.group_size", wrong
    sequences = rollout.prompts_per_step * rollout.group_size
    if plan.config.objective.mini_batches > sequences:
        wrong = f"more than the prompts_per_step * group_size = {sequences} sequences of a step"
        yield "objective.mini_batches", f"{wrong}; allowed: 1 to {sequences}"
    if not rollout.dynamic_sampling:
        wrong = "nothing reads it without rollout.dynamic_sampling"
        yield from unread(plan, "rollout", ["max_refills"], wrong)
    longest, response = plan.shape.max_sequence_length, rollout.max_response_tokens
    if response >= longest:
        wrong = f"leaves no room for a prompt in max_sequence_length = {longest}"
        yield "rollout.max_response_tokens", f"{wrong}; allowed: at most {longest - 1}"
    elif prompt is not None and prompt + response > longest:
        wrong = f"max_response_tokens = {response} and this are together more than "
        wrong += f"max_sequence_length = {longest}"
        yield "data.max_prompt_tokens", f"{wrong}; allowed: at most {longest - response}"


def environment_is_one(plan: Plan) -> Problems:
    """Check that only one key names the environment, that verifiers has an interpreter, and that a
    limit of turns is set only if there may be several."""
    section, key = plan.config.environment, "environment.python"
    if not section.has_episodes:
        wrong = "nothing reads it with environment.name = single_turn"
        yield from unread(plan, "environment", ["max_turns"], wrong)
    named = [name for name in ("import_path", "verifiers") if getattr(section, name) is not None]
    if section.name != SINGLE_TURN:
        named.insert(0, "name")
    for name in named[1:] if "verifiers" in named else ():
        yield (
            f"environment.{name}",
            f"environment.{named[0]} is set, too; allowed: only one of them",
        )
    if section.verifiers is None:
        if section.python is not None:
            yield key, "nothing reads it without environment.verifiers; allowed: null"
    elif section.python is None:
        yield key, NEEDS_PYTHON
    elif plan.here and shutil.which(section.python) is None:
        yield key, "no such program; allowed: the interpreter of an environment that has verifiers"


def rewards_are_shaped(plan: Plan) -> Problems:
    reward, longest = plan.config.reward, plan.config.rollout.max_response_tokens
    if reward.overlong_buffer is None:
        wrong = "nothing reads it without reward.overlong_buffer"
        yield from unread(plan, "reward", ["overlong_penalty"], wrong)
    elif reward.overlong_buffer >= longest:
        wrong = f"leaves no response of max_response_tokens = {longest} without a penalty"
        yield "reward.overlong_buffer", f"{wrong}; allowed: null, or below {longest}"
    if not reward.repetition_penalty:
        wrong = "nothing reads it without reward.repetition_penalty"
        yield from unread(plan, "reward", ["repetition_words"], wrong)
    if reward.name == "none" and reward.import_path is None:
        if not plan.config.objective.distillation.is_on:
            wrong = "there is nothing to learn from without objective.distillation.teacher or url"
            yield "reward.name", f"{wrong}; allowed: another reward"
        if plan.config.rollout.dynamic_sampling:
            wrong = "with reward none, all responses have the same reward; allowed: false"
            yield "rollout.dynamic_sampling", wrong
    if learns_from_parts(plan.config.objective):
        wrong = "objective.advantage = gdpo normalises each part of the reward by itself"
        yield from unread(plan, "reward", ("scale", "clip"), wrong)


def frozen_models_fit(plan: Plan) -> Problems:
    """Check that teachers fit the adapters and the sampling, and that there is a copy of the
    reference to keep in host memory."""
    lora, objective = plan.config.model.lora, plan.config.objective
    distillation = objective.distillation
    for number in distillation.folders if lora.rank else ():
        wrong = "with adapters, a teacher's weights cannot be loaded; allowed with model.lora: null"
        yield distillation.key_of(number, "teacher"), wrong
    for number, url in distillation.urls.items():
        if not re.fullmatch(r"https?://[^/\s]\S*", url):
            yield distillation.key_of(number, "url"), "allowed: http://host:port/v1"
    if distillation.urls and plan.config.rollout.temperature != 1.0:
        wrong = "a teacher's server gives log-probs at temperature 1; allowed: 1.0, or a teacher "
        yield "rollout.temperature", f"{wrong}in a folder, which uses rollout.temperature"
    if may_have_reference(objective) and lora.rank and lora.checkpoint is None:
        wrong = "the reference is the policy without its adapters, of which there is no copy"
        yield from unread(plan, "objective", ["reference_offload"], wrong)


# Keys that change or record the routers' choice of experts -> the value that turns each off.
_IDLE = {"replay": "off", "reference_replay": "off", "volatility": False, "rollout_noise": 0.0}


def routing_can_be_replayed(plan: Plan) -> Problems:
    routing, shape = plan.config.routing, plan.shape
    for name, idle in _IDLE.items():
        if getattr(routing, name) == idle:
            continue
        if shape.num_moe_experts is None:
            reasons = [f"the model has no experts; allowed: {str(idle).lower()}"]
        else:
            reasons = _unreplayable(shape.megatron, name.endswith("replay"))
        for reason in reasons:
            yield f"routing.{name}", reason
    if not routing.modes:
        wrong = "nothing reads it with replay = off and reference_replay = off"
        yield from unread(plan, "routing", ["store_on_host"], wrong)
    if routing.reference_replay != "off" and not may_have_reference(plan.config.objective):
        wrong = "there is no reference with objective.kl = none; allowed: off, or another kl"
        yield "routing.reference_replay", f"{wrong} (kl_coefficient = 0.0 only measures it)"


def _unreplayable(megatron: Mapping[str, Any], replays: bool) -> list[str]:
    """Return the problems of settings that bypass the routers' hooks, or drop replayed tokens."""
    problems = []  # (problem, what is allowed together with the routing key)
    hook = "the hook that replays experts"
    if megatron.get("moe_router_fusion"):
        problems.append((f"a fused router does not call {hook}", "{}moe_router_fusion = false"))
    if "quantile_balancing" in str(megatron.get("moe_router_load_balancing_type")):
        wrong = f"quantile balancing does not call {hook}"
        problems.append((wrong, "another {}moe_router_load_balancing_type"))
    for name in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"):
        if megatron.get(name, "none") not in (None, False, "none"):
            problems.append((f"a captured CUDA graph calls {hook} only once", f"no {{}}{name}"))
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if replays and megatron.get(name) is not None:
            wrong = "full experts drop tokens after the choice, so the experts that are used would "
            problems.append((f"{wrong}not be those that are replayed", f"{{}}{name} = null"))
    return [
        f"{wrong}; allowed with it: {allowed.format('model.megatron.')}"
        for wrong, allowed in problems
    ]


def export_has_a_family(plan: Plan) -> Problems:
    if plan.config.export.hf_path is None:
        return
    try:
        family = plan.config.model.family(plan.shape)
    except ConfigError as error:
        yield "export.hf_path", f"{error}; allowed: null"
        return
    if family.config(plan.shape, 1) is None:
        wrong = f"a config.json of the family {family.model_type} cannot describe this model"
        yield "export.hf_path", f"{wrong}; allowed: null"
    for folder in (plan.config.data.tokenizer, plan.config.model.hf_path) if plan.here else ():
        for file in (Path(str(folder), name) for name in SIDE_FILES if folder is not None):
            try:
                copied_as(file)
            except DataError as error:
                yield "export.hf_path", f"{error}"


def examples_are_sound(plan: Plan) -> Problems:
    data = plan.config.data
    if data.messages_field is not None:
        if data.chat_template:
            wrong = "data.messages_field uses the template anyway"
            yield "data.chat_template", f"{wrong}; allowed: false"
        wrong = "data.messages_field holds whole conversations"
        yield from unread(plan, "data", ("template", "prompt_field", "answer_field"), wrong)
    elif data.template is not None and data.prompt_field != "prompt":
        yield "data.prompt_field", "data.template makes the prompt; allowed: prompt"
    if data.max_tokens is not None and data.max_tokens > (most := plan.shape.max_sequence_length):
        yield "data.max_tokens", f"more than max_sequence_length = {most}; allowed: at most that"


def preferences_are_sound(plan: Plan) -> Problems:
    """Check that no key is set that the loss or the data format does not use, and that the model's
    head can be trained."""
    data, preference = plan.config.data, plan.config.preference
    regression = preference.loss == "regression"
    of_ratings, of_pairs = ("response_field", "rating_field"), ("chosen_field", "rejected_field")
    idle = of_pairs if regression else of_ratings
    reason = f"nothing reads it with preference.loss = {preference.loss}"
    if regression:
        yield from unread(plan, "data", ("margin_field",), reason)
    if data.format is not None:
        idle = (*of_ratings, *of_pairs, "prompt_field")
        reason = f"data.format = {data.format} names the fields"
    yield from unread(plan, "data", idle, reason)
    if data.format is not None and (data.format == "helpsteer") != regression:
        allowed = "helpsteer" if regression else "another format"
        wrong = f"its rows are {'pairs' if regression else 'ratings'}"
        of_loss = f"preference.loss = {preference.loss}"
        yield "data.format", f"{wrong}; allowed with {of_loss}: {allowed}"
    if regression and preference.center_coefficient:
        wrong = "the ratings already fix the level of the scores"
        yield "preference.center_coefficient", f"{wrong}; allowed with loss = regression: 0.0"
    if data.max_tokens is not None and data.max_tokens > (most := plan.shape.max_sequence_length):
        yield "data.max_tokens", f"more than max_sequence_length = {most}; allowed: at most that"
    if plan.config.model.lora.rank:
        wrong = "a preference model trains all weights: its new head has no place in an adapter"
        yield "model.lora.rank", f"{wrong}; allowed: 0"


def model_gives_tokens(plan: Plan) -> Problems:
    """Check that the model is a language model. A preference model gives scores and no tokens."""
    if plan.shape.scores:
        key = "hf_path" if plan.config.model.hf_path is not None else "checkpoint_path"
        wrong = "holds a preference model, which gives scores and no tokens"
        yield f"model.{key}", f"{wrong}; allowed: a model that ends in ForCausalLM"


def prompts_are_sound(plan: Plan) -> Problems:
    data = plan.config.data
    yield from weights_fit(data.weights, data.prompts or [], "files in data.prompts")
    for key, paths in (("data.prompts", data.prompts), ("data.eval_prompts", data.eval_prompts)):
        if len({os.path.realpath(path) for path in paths or ()}) < len(paths or ()):
            yield key, "a file is listed twice; allowed: once, with a weight"
    if data.format is not None:
        wrong = f"data.format = {data.format} names it"
        yield from unread(plan, "data", ("prompt_field", "answer_field"), wrong)
    if data.template is not None and data.format is None and data.prompt_field != "prompt":
        yield "data.prompt_field", "data.template makes the prompt; allowed: prompt"


def selection_fits(plan: Plan) -> Problems:
    """Check that the statistics by which data.selection chooses exist, and that no other key orders
    the prompts."""
    data, reward = plan.config.data, plan.config.reward
    yield from data.selection.problems()
    if not data.selection.is_on:
        return
    wrong = "nothing reads it with data.selection.by = pass_rate"
    yield from unread(plan, "data", ("weights", "shuffle"), wrong)
    if reward.name == "none" and reward.import_path is None:
        wrong = "with reward none no response is solved; allowed: uniform"
        yield "data.selection.by", wrong


def weights_fit(weights: list[float] | None, weighted: list[str], words: str) -> Problems:
    if weights is not None and len(weights) != len(weighted):
        yield (
            "data.weights",
            f"{len(weights)} weights for {len(weighted)} {words}; allowed: one for each",
        )


def corpora_are_sound(plan: Plan) -> Problems:
    data, training = plan.config.data, plan.config.training
    if training.steps is None and training.tokens is None:
        yield "training.steps", "needed to train, unless training.tokens is set; allowed: from 1"
    yield from weights_fit(data.weights, data.train, "prefixes")
    for key, prefixes in (("data.train", data.train), ("data.evaluation", data.evaluation)):
        if len(set(prefixes)) < len(prefixes):
            yield key, "a prefix is listed twice; allowed: once, with a weight"
    if data.evaluation and data.evaluation_share:
        wrong = "data.evaluation names evaluation data, too; allowed: 0, or no data.evaluation"
        yield "data.evaluation_share", wrong


def sample_multiple(config: StageConfig) -> int:
    """Return the number of which each sample's tokens must be a multiple, so that no padding is
    needed."""
    layout = config.layout()
    multiple = layout.tp if config.parallel.uses_sequence_parallel() else 1
    multiple *= tokens_multiple(config.training.precision)
    return math.lcm(multiple * layout.cp, 2 * layout.cp if layout.cp > 1 else 1)


def samples_and_batches_divide(plan: Plan) -> Problems:
    config, layout = plan.config, plan.layout
    dp, left = divmod(plan.world_size, layout.model_parallel_size)
    unit = dp * (layout.pp if layout.vpp is not None else 1)
    if not left and config.training.batch_size % unit:  # if `left`, world_size_fits reports it
        of_stages = f", in rounds of pp = {layout.pp}" if unit > dp else ""
        wrong = f"does not split evenly over {dp} data-parallel ranks{of_stages}"
        yield "training.batch_size", f"{wrong}; allowed: multiples of {unit}"
    most, key = plan.shape.max_sequence_length, "data.sequence_length"
    length, unit = config.data.sequence_length or most, sample_multiple(config)
    if length > most:
        yield key, f"more than max_sequence_length = {most}; allowed: at most that"
    if length % unit:
        wrong = f"{length} tokens do not split over cp = {layout.cp} and tp = {layout.tp}"
        yield key, f"{wrong}; allowed: multiples of {unit}"


_SHARED: tuple[Rule, ...] = (
    inputs_are_given,
    learning_rates_fit,
    checkpoints_can_be_kept,
    run_folder_is_apart,
)
_STAGE = (*_SHARED, export_has_a_family)
_RULES: dict[type[AnyConfig], tuple[Rule, ...]] = {
    Config: (
        *_SHARED,
        prompts_can_be_shared,
        model_gives_tokens,
        prompts_are_sound,
        selection_fits,
        rollouts_fit,
        environment_is_one,
        staleness_fits,
        servers_are_there,
        servers_do_what_the_trainer_does,
        temperatures_are_served,
        adapters_are_served,
        rollout_nodes_are_used,
        rewards_are_shaped,
        frozen_models_fit,
        reward_model_fits,
        reward_model_divides,
        suites_fit,
        routing_can_be_replayed,
    ),
    PreferenceConfig: (*_STAGE, prompts_can_be_shared, preferences_are_sound),
    FineTuningConfig: (*_STAGE, model_gives_tokens, examples_are_sound),
    PretrainingConfig: (*_STAGE, model_gives_tokens, corpora_are_sound, samples_and_batches_divide),
}


def recomputes_old_logprobs(config: Config) -> bool:
    """Return whether the trainer recomputes old log-probs. `objective.old_logprobs` says so, and
    this function decides if its value is `auto`.

    If the training model itself generates in fp32, its log-probs equal the log-probs of a trainer's
    pass up to rounding (1e-6), so `auto` does not recompute them.
    """
    section, routing = config.objective, config.routing
    is_exact = (
        config.rollout.engine == "megatron"
        and config.training.precision == "fp32"
        and not (routing.modes or routing.volatility or routing.rollout_noise)
        # With a capacity factor, experts drop tokens.
        and config.model.megatron.get("moe_expert_capacity_factor") is None
        and not resolve_objective(section).corrections  # a correction needs both log-probs
    )
    return section.old_logprobs == "recompute" or (section.old_logprobs == "auto" and not is_exact)
