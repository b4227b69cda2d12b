"""Rules for the model, its layout and its precision that several keys must satisfy together."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gspo_megatron.config.megatron_fields import LAYER_PATTERNS
from gspo_megatron.config.parallel import Layout
from gspo_megatron.config.precision import FP8, engine_lacks
from gspo_megatron.errors import format_value
from gspo_megatron.families.adapter_map import adapted_weights_of
from gspo_megatron.families.model_shape import (
    ModelShape,
    delta_net_layers,
    delta_net_sizes,
    shape_conflicts,
)


@dataclass(frozen=True)
class Plan:
    """The input of the rules."""

    config: Any  # a configuration of the rule's stage
    world_size: int
    for_training: bool
    here: bool = True  # also check the packages that are installed on this machine

    @cached_property
    def shape(self) -> ModelShape:
        """The model. Raises ConfigError if the weights that define its shape cannot be read."""
        return self.config.resolved_model()

    @cached_property
    def layout(self) -> Layout:
        return self.config.layout()

    def value(self, key: str) -> Any:
        """Return the configuration's value of a dotted key."""
        if key == "world size":
            return self.world_size
        if key.startswith("model.megatron."):
            return self.shape.megatron.get(key.rpartition(".")[2])
        return value_at(self.config, key)


def value_at(section: Any, key: str) -> Any:
    """Return the value of a key of a section, such as "filter.field"."""
    for part in key.split("."):
        section = section.get(part) if isinstance(section, dict) else getattr(section, part)
    return section


# A rule yields a key and what is wrong with its value. The text ends with a semicolon and the
# allowed values.
Problems = Iterator[tuple[str, str]]
Rule = Callable[[Plan], Problems]


def unread(plan: Plan, section: str, names: Iterable[str], why: str) -> Problems:
    """Yield a problem for each key of a section that is set although nothing reads it."""
    return ((f"{section}.{name}", w) for name, w in plan.value(section).unread(names, why))


def world_size_fits(plan: Plan) -> Problems:
    layout, world = plan.layout, plan.world_size
    model, experts = layout.model_parallel_size, layout.expert_parallel_size
    allowed = f"allowed: multiples of {replace(layout, dp=None).world_size}"
    if world % model:
        sizes = f"{layout.tp} * {layout.pp} * {layout.cp}"
        yield "world size", f"not divisible by tp * pp * cp = {sizes} = {model}; {allowed}"
    if world % experts:
        sizes = f"{layout.etp or 1} * {layout.ep} * {layout.pp} = {experts}"
        wrong = f"not divisible by etp * ep * pp = {sizes}, the ranks that hold all experts"
        yield "world size", f"{wrong}; {allowed}"
    if layout.dp is not None and layout.dp * model != world:
        wrong = f"with tp * pp * cp = {model} that takes {layout.dp * model} ranks, not {world}"
        yield "parallel.data_parallel_size", f"{wrong}; allowed: null, which takes all ranks"


def tensor_parallel_fits(plan: Plan) -> Problems:
    section, tp = plan.config.parallel, plan.layout.tp
    key, sequence_key = "parallel.tensor_model_parallel_size", "parallel.sequence_parallel"
    if section.sequence_parallel and tp == 1:
        wrong = "splits over tensor-parallel ranks, and there is only one"
        yield sequence_key, f"{wrong}; allowed: null, or tp > 1"
    shape, groups = plan.shape, plan.shape.num_query_groups
    if section.sequence_parallel is False and tp > 1 and shape.num_moe_experts is not None:
        wrong = f"experts with tp = {tp} need it, or every token is routed tp times"
        yield sequence_key, f"{wrong}; allowed: null or true"
    elif section.sequence_parallel is False and tp > 1 and shape.has_latent_attention:
        yield sequence_key, f"latent attention with tp = {tp} needs it; allowed: null or true"
    if groups % tp and tp % groups:
        yield key, f"neither divides num_query_groups = {groups} nor is a multiple of it"
    elif groups % tp and shape.joint_qk_norm:
        wrong = f"keys are normalised over all {groups} heads of keys together"
        yield key, f"{wrong}; allowed: a divisor of that number"
    if shape.num_attention_heads % groups:
        wrong = _must_divide("num_attention_heads", shape.num_attention_heads)
        yield "model.megatron.num_query_groups", wrong
    sizes = ["num_attention_heads", "moe_shared_expert_intermediate_size"]
    sizes += ["hidden_size"] if section.uses_sequence_parallel() else []
    sizes += ["ffn_hidden_size"] if shape.has_dense_layers else []
    for name in sizes:
        size = getattr(shape, name)
        if size is not None and size % tp:
            yield key, _must_divide(name, size)


def experts_divide(plan: Plan) -> Problems:
    for kind, ranks, name in (
        ("model", plan.layout.ep, "num_moe_experts"),
        ("tensor", plan.layout.etp or 1, "moe_ffn_hidden_size"),
    ):
        size, key = getattr(plan.shape, name), f"parallel.expert_{kind}_parallel_size"
        if size is None and ranks > 1:
            yield key, "the model has no experts; allowed: 1"
        if size is not None and size % ranks:
            yield key, _must_divide(name, size)


def delta_nets_fit(plan: Plan) -> Problems:
    shape, layout, key = plan.shape, plan.layout, "parallel.tensor_model_parallel_size"
    if not any(delta_net_layers(shape)):
        return
    variant = shape.megatron.get("experimental_attention_variant")
    if variant != "gated_delta_net":
        wrong = "with linear_attention_freq; allowed: gated_delta_net"
        yield "model.megatron.experimental_attention_variant", wrong
    if layout.cp > 1:
        wrong = "the state of a delta net passes along the sequence: no rank can begin within it"
        yield "parallel.context_parallel_size", f"{wrong}; allowed: 1"
    sizes = delta_net_sizes(shape.megatron)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if sizes[name] % layout.tp:
            yield key, _must_divide(name, sizes[name])
    if layout.tp > 1 and plan.config.parallel.sequence_parallel is False:
        wrong = "delta nets with tp > 1 need it, for the gradient of their norms"
        yield "parallel.sequence_parallel", f"{wrong}; allowed: null or true"


def sharing_obstacle(config: Any, shape: ModelShape, layout: Layout) -> str | None:
    """Return why a micro-batch must repeat a prompt for each of its responses, or None if it need
    not repeat it."""
    if not config.training.packing:
        return "with training.packing = false each response has a row of its own"
    if layout.cp > 1:
        return f"with cp = {layout.cp} a rank holds only parts of a prompt"
    if any(delta_net_layers(shape)):
        return "the state of a delta net passes along the whole sequence"
    if shape.megatron.get("moe_token_dispatcher_type") == "allgather":
        return "the allgather dispatcher needs micro-batches of one length"
    return None


def shares_prompts(config: Any) -> bool:
    """Whether a micro-batch holds a prompt once. A checked configuration of RL or of a preference
    model decides.

    By default this is off if the routers' biases are trained. These biases depend on how many
    tokens each expert gets, and would count a prompt once.
    """
    shape, shares = config.resolved_model(), config.training.share_prompts
    if shares is None:
        rate = shape.megatron.get("moe_router_bias_update_rate")
        has_bias = bool(shape.megatron.get("moe_router_enable_expert_bias"))
        shares = not has_bias or rate == 0 or config.model.lora.rank > 0
    return shares and sharing_obstacle(config, shape, config.layout()) is None


def prompts_can_be_shared(plan: Plan) -> Problems:
    if plan.config.training.share_prompts:
        obstacle = sharing_obstacle(plan.config, plan.shape, plan.layout)
        if obstacle is not None:
            yield "training.share_prompts", f"{obstacle}; allowed: null or false"


def _must_divide(name: str, size: int) -> str:
    divisors = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
    return f"does not divide {name} = {size}; allowed: {divisors}{' ...' if size > 64 else ''}"


def windows_are_possible(plan: Plan) -> Problems:
    """Check the values for window attention; `window_size` counts the keys before the query's own
    key."""
    window = plan.shape.megatron.get("window_size")
    if window is None:
        return
    fits = isinstance(window, list) and len(window) == 2 and all(type(n) is int for n in window)
    if not fits or window[0] < 0 or window[1] != 0:
        yield "model.megatron.window_size", "allowed: [keys before a query's own, 0]"


def patterns_have_all_layers(plan: Plan) -> Problems:
    for name in LAYER_PATTERNS:
        flags, layers = plan.shape.megatron.get(name), plan.shape.num_layers
        if isinstance(flags, list) and len(flags) != layers:
            yield f"model.megatron.{name}", f"allowed: null, n, or {layers} flags"


def experts_have_biases(plan: Plan) -> Problems:
    etp = plan.layout.etp or 1
    if etp > 1 and plan.shape.num_moe_experts and plan.shape.megatron.get("add_bias_linear"):
        wrong = "the biases of experts cannot be split over ranks"
        yield "parallel.expert_tensor_parallel_size", f"{wrong}; allowed: 1"


def router_is_sound(plan: Plan) -> Problems:
    shape, key = plan.shape, "model.megatron.moe_router_topk"
    number, topk, megatron = shape.num_moe_experts, shape.moe_router_topk, shape.megatron
    if number is None or topk is None:
        if plan.config.model.megatron.get("moe_ffn_hidden_size") is not None:
            wrong = "the model has no experts; leave it out, or set model.megatron.num_moe_experts"
            yield "model.megatron.moe_ffn_hidden_size", wrong
        return
    if topk > number:
        yield key, f"there are {number} experts; allowed: 1 to {number}"
    uses_softmax = megatron.get("moe_router_score_function", "softmax") == "softmax"
    wrong = "a softmax over one expert has no gradient"
    if uses_softmax and megatron.get("moe_router_enable_expert_bias"):
        if topk == 1:  # the weight of the only expert is always 1
            yield key, f"{wrong}; allowed: 2 or more"
        # models/router.py first computes the softmax over all experts, and it has no groups of
        # experts
        wrong = "the softmax router with a bias supports nothing else; allowed"
        if not megatron.get("moe_router_pre_softmax"):
            yield "model.megatron.moe_router_pre_softmax", f"{wrong}: true"
        for name in ("moe_router_group_topk", "moe_router_fusion"):
            if megatron.get(name):
                yield f"model.megatron.{name}", f"{wrong}: leave it out"
    elif topk == 1 and uses_softmax and not megatron.get("moe_router_pre_softmax"):
        yield key, f"{wrong}; allowed: 2 or more, or model.megatron.moe_router_pre_softmax = true"


_NOISE = "its noise depends on the layout, and makes old and new policy differ"
# Fields with which a model or its loss depends on the layout, or is random.
_OF_LAYOUT = {
    "hidden_dropout": _NOISE,
    "attention_dropout": _NOISE,
    "moe_input_jitter_eps": _NOISE,
    "moe_router_force_load_balancing": "the experts are then random; for benchmarks of speed only",
    "moe_router_topk_limited_devices": "its groups of experts are the expert-parallel ranks; use "
    "moe_router_num_groups and moe_router_group_topk",
}
_BALANCING = {
    "global_aux_loss": "Megatron-Core's loss is too small by the number of data-parallel ranks, "
    "and depends on the micro-batches before",
    "sinkhorn": "it balances the tokens of one rank, and only in training",
}


def model_does_not_depend_on_the_layout(plan: Plan) -> Problems:
    fields = plan.config.model.megatron
    for name, wrong in _OF_LAYOUT.items():
        if fields.get(name):
            yield f"model.megatron.{name}", f"{wrong}; allowed: leave it out"
    name = "moe_router_load_balancing_type"
    kinds = fields.get(name)
    for kind, wrong in _BALANCING.items():
        if kind == kinds or (isinstance(kinds, list) and kind in kinds):
            yield f"model.megatron.{name}", f"{wrong}; allowed: aux_loss, seq_aux_loss or none"


# Fields of Megatron-Core that split the layers over pipeline stages. Without them, all stages have
# the same number of layers.
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
WITH_EMBEDDING = "account_for_embedding_in_pipeline_split"
WITH_LOSS = "account_for_loss_in_pipeline_split"
WRITTEN_OUT = "pipeline_model_parallel_layout"
_WAYS = ((FIRST, LAST), (WITH_EMBEDDING, WITH_LOSS), (WRITTEN_OUT,))
_PP = "parallel.pipeline_model_parallel_size"


def pipeline_divides(plan: Plan) -> Problems:
    layout = plan.layout
    if layout.vpp is not None and layout.pp == 1:
        wrong = "interleaving needs stages; allowed: null, or pipeline_model_parallel_size > 1"
        yield "parallel.virtual_pipeline_model_parallel_size", wrong
    else:
        yield from stage_problems(plan.shape.num_layers, layout, plan.shape.megatron)


def stage_problems(layers: int, layout: Layout, megatron: dict[str, Any]) -> Problems:
    """Check that `layers` layers fit the stages of `layout`, with the fields in `megatron`."""
    used = [way for way in _WAYS if any(megatron.get(name) for name in way)]
    chunks = layout.pp * (layout.vpp or 1)
    if len(used) > 1:
        names = [name for way in used for name in way if megatron.get(name)]
        wrong = f"places the layers, as {names[0]} does; allowed: only one of the two"
        yield f"model.megatron.{names[-1]}", wrong
    elif used == [(WRITTEN_OUT,)]:
        if (wrong := _written_out(layers, layout, megatron[WRITTEN_OUT])) is not None:
            yield f"model.megatron.{WRITTEN_OUT}", wrong
    elif used == [(FIRST, LAST)]:
        yield from _first_and_last(layers, layout, megatron)
    else:
        extra = bool(megatron.get(WITH_EMBEDDING)) + bool(megatron.get(WITH_LOSS))
        if (layers + extra) % chunks:
            all_of = f"{layers} layers" + (f" and {extra} for embedding and loss" if extra else "")
            wrong = f"{all_of} do not split evenly into {_chunks(layout)} chunks"
            allowed = f"allowed: pp * vpp that divides {layers + extra}"
            yield _PP, f"{wrong}; {allowed}, or {_uneven(layers, layout, bool(extra))}"


def uneven_stages(layers: int, layout: Layout) -> tuple[int, int] | None:
    """Return the number of layers of each stage before the last one, and that of the last stage.

    The largest stage is as small as possible. Among several such splits, the one with the fewest
    layers in the last stage is returned, because this stage also computes the loss. Both numbers
    are multiples of vpp. Returns None if there is no such split.
    """
    chunks = layout.vpp or 1
    splits = [
        (share, last)
        for share in range(chunks, layers, chunks)
        if (last := layers - share * (layout.pp - 1)) > 0 and last % chunks == 0
    ]
    return min(splits, key=lambda split: (max(split), split[1]), default=None)


def _uneven(layers: int, layout: Layout, replaces: bool) -> str:
    """Suggest the field that splits the layers unevenly.

    replaces: whether the configuration has fields that count embedding and loss as layers. The
    suggested field must replace these fields.
    """
    instead = f", without {WITH_EMBEDDING} and {WITH_LOSS}" if replaces else ""
    split = uneven_stages(layers, layout)
    if split is None:
        return f"model.megatron.{WRITTEN_OUT}, as in Et*3|t*4L{instead}"
    share, last = split
    return f"model.megatron.{LAST} = {last} ({share} layers in each other stage){instead}"


def _chunks(layout: Layout) -> str:
    return f"{layout.pp}" if layout.vpp is None else f"{layout.pp} * {layout.vpp}"


def _first_and_last(layers: int, layout: Layout, megatron: dict[str, Any]) -> Problems:
    counts = {name: megatron[name] for name in (FIRST, LAST) if megatron.get(name) is not None}
    chunks = layout.vpp or 1
    for name, count in counts.items():
        if not isinstance(count, int) or not 0 < count < layers or count % chunks:
            rule = f", a multiple of vpp = {chunks}" if chunks > 1 else ""
            yield f"model.megatron.{name}", f"allowed: 1 to {layers - 1}{rule}"
            return
    stages, left = layout.pp - len(counts), layers - sum(counts.values())
    if stages < 0 or (stages == 0 and left) or (stages and (left <= 0 or left % (stages * chunks))):
        wrong = f"leaves {left} of {layers} layers for {max(stages, 0)} other stages"
        allowed = "allowed: a number that leaves them equal shares"
        yield f"model.megatron.{next(iter(counts))}", f"{wrong}; {allowed}"


def _written_out(layers: int, layout: Layout, written: Any) -> str | None:
    """Return what is wrong with a pipeline layout that names every layer, such as Et*3|t*4L, or
    None. E is the embedding, t a layer, L the loss, and | begins the next stage."""
    if not isinstance(written, str):
        return "allowed: a text such as Et*3|t*4L"
    text = written.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):  # as Megatron-Core parses the text
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
    stages, expected = len(text.split("|")), layout.pp * (layout.vpp or 1)
    if re.search(r"[^EtL|]", text):
        return "allowed: E (embedding), t (a layer), L (loss), |, and t*3"
    if stages != expected:
        return f"{stages} stages; allowed: pp * vpp = {_chunks(layout)} = {expected}"
    if text.count("t") != layers:
        return f"{text.count('t')} layers; the model has {layers}"
    if not re.fullmatch(r"E[t|]*L", text):
        return "allowed: one E, at the start, and one L, at the end"
    return None


def weights_are_named_once(plan: Plan) -> Problems:
    """Check that hf_path, checkpoint_path and preset do not contradict each other."""
    model = plan.config.model
    if model.hf_path is None:
        return
    folder = f"model.hf_path = {format_value(model.hf_path)}"
    if model.checkpoint_path is not None:
        wrong = f"the weights would come from {folder} too; allowed: null, or model.hf_path = null"
        yield "model.checkpoint_path", wrong
    # A resolved configuration of an earlier version names the preset `tiny` beside hf_path.
    if model.preset not in (None, "tiny"):
        yield "model.preset", f"{folder} decides the shape; allowed: leave one of them out"
    for key, _, theirs in shape_conflicts(plan.shape, model.starting_shape()):
        wrong = f"the weights in {folder} have {format_value(theirs)}; allowed: leave it out"
        yield f"model.{key}", wrong


def adapters_fit(plan: Plan) -> Problems:
    """Check that the model has the matrices for the adapters, and weights to freeze."""
    model, lora = plan.config.model, plan.config.model.lora
    key = "model.lora.rank"
    if not lora.rank:
        wrong = "there are no adapters with model.lora.rank = 0"
        for name, told in unread(plan, "model.lora", type(lora).model_fields, wrong):
            yield name, f"{told}, or set model.lora.rank"
        return
    if plan.config.phase == "pretrain":
        yield key, "pre-training trains all weights; allowed: 0"
    elif plan.for_training and plan.here and (model.hf_path or model.checkpoint_path) is None:
        wrong = "the frozen weights would be random"
        yield key, f"{wrong}; allowed: 0, or set model.hf_path or model.checkpoint_path"
    if model.megatron.get("moe_router_bias_update_rate"):
        wrong = "routers of a frozen model stay as they are (model.lora.rank is above 0)"
        yield "model.megatron.moe_router_bias_update_rate", f"{wrong}; allowed: leave it out"
    if not lora.targets:
        wrong = "no matrix has an adapter, so nothing would be trained"
        yield "model.lora.targets", f"{wrong}; allowed: all, or a list of matrices"
    shape, tp = plan.shape, plan.layout.tp
    adapted = adapted_weights_of(model.family(shape), shape, lora.targets)
    mixed = any(len(each.matrices) > 1 and "linear_qkv" in each.owner for each in adapted.values())
    joint = "qkv" in model.family(shape).names
    if joint and tp > 1 and any("linear_qkv" in each.owner for each in adapted.values()):
        wrong = "the model's files have q, k and v in one matrix, whose adapter cannot be cut"
        allowed = "allowed: 1, or model.lora.targets without query_key_value"
        yield "parallel.tensor_model_parallel_size", f"{wrong}; {allowed}"
    elif mixed and tp > shape.num_query_groups:
        wrong = "adapters of q, k and v need whole query groups on each rank"
        allowed = f"allowed: at most num_query_groups = {shape.num_query_groups}, or other targets"
        yield "parallel.tensor_model_parallel_size", f"{wrong}; {allowed}"


_PRECISION = "training.precision"


def precision_is_possible(plan: Plan) -> Problems:
    """Check the precision as far as this needs no device. models.precision checks the device."""
    precision, backend = plan.config.training.precision, plan.config.model.backend
    if plan.here and backend == "transformer_engine" and importlib.util.find_spec(backend) is None:
        wrong = "the package transformer_engine is not installed; allowed: torch_native or auto"
        yield "model.backend", wrong
    if plan.for_training and precision == "fp64":
        wrong = "Megatron-Core's optimizers do not support float64, it is for `verify`"
        yield _PRECISION, f"{wrong}; allowed: fp32 or bf16"
    fp8 = FP8.get(precision)
    if fp8 is None:
        return
    if backend == "torch_native":
        wrong = "model.backend = torch_native has no FP8"
        yield _PRECISION, f"{wrong}; allowed: fp32 or bf16, or model.backend = transformer_engine"
    elif plan.here and (lacks := engine_lacks()) is not None:
        yield _PRECISION, f"{lacks}; allowed: fp32 or bf16"
    for name, (size, parts) in _fp8_sides(plan.shape, plan.layout).items():
        # Other rules report a size that is not divisible by the number of ranks.
        if size % parts == 0 and (size // parts) % fp8.multiple:
            split = f" over {parts} ranks is {size // parts} each" if parts > 1 else f" is {size}"
            wrong = f"{name}{split}; FP8 matrix products take multiples of {fp8.multiple}"
            yield _PRECISION, f"{wrong}; allowed: bf16"
    fields = plan.shape.megatron
    if fp8.recipe == "delayed":
        for name, reason in _NOT_DELAYED.items():
            if fields.get(name):
                wrong = f"not with training.precision = {precision}: {reason}; allowed: false"
                yield f"model.megatron.{name}", wrong
    elif fields.get("first_last_layers_bf16"):
        most = plan.shape.num_layers // plan.layout.pp
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if not 0 <= fields.get(name, 1) <= most:
                wrong = f"a pipeline stage has {most} layers; allowed: 0 to {most}"
                yield f"model.megatron.{name}", wrong


def _fp8_sides(shape: ModelShape, layout: Layout) -> dict[str, tuple[int, int]]:
    """Return the dimensions of the weight matrices in FP8 products. For each dimension, also return
    the number of ranks over which it is split.

    A dimension is 0 if the model has no weights with this dimension.
    """
    tp, groups = layout.tp, shape.num_query_groups
    channels = 0 if shape.has_latent_attention else shape.kv_channels
    sizes = delta_net_sizes(shape.megatron) if any(delta_net_layers(shape)) else {}
    keys, values = (
        sizes.get(f"linear_num_{kind}_heads", 0) * sizes.get(f"linear_{kind}_head_dim", 0)
        for kind in ("key", "value")
    )
    mixed = 2 * (keys + values + sizes.get("linear_num_value_heads", 0))
    return {
        "hidden_size": (shape.hidden_size, 1),
        "num_attention_heads * kv_channels": (shape.num_attention_heads * channels, tp),
        "num_query_groups * kv_channels": (groups * channels, min(tp, groups)),
        "ffn_hidden_size": (shape.ffn_hidden_size if shape.has_dense_layers else 0, tp),
        "moe_ffn_hidden_size": (shape.moe_ffn_hidden_size or 0, layout.etp or 1),
        "moe_shared_expert_intermediate_size": (shape.moe_shared_expert_intermediate_size or 0, tp),
        "linear_num_value_heads * linear_value_head_dim": (values, tp),
        "the input projection of delta nets": (mixed, tp),
    }


# Fields that delayed scaling does not support, and why.
_NOT_DELAYED = {
    "first_last_layers_bf16": "scales from earlier micro-batches cover all layers",
    "tp_only_amax_red": "every data-parallel rank would have scales of its own, and a checkpoint "
    "keeps only one set",
    **dict.fromkeys(
        ("fp8_dot_product_attention", "fp8_multi_head_attention"),
        "a checkpoint does not hold the scales of attention",
    ),
}


def attention_is_possible(plan: Plan) -> Problems:
    megatron = plan.shape.megatron
    softmax = megatron.get("softmax_type") or "vanilla"
    if softmax not in ("vanilla", "learnable"):
        yield "model.megatron.softmax_type", "not supported; allowed: vanilla or learnable"
    if not plan.shape.has_latent_attention:
        return
    if megatron.get("apply_rope_fusion"):
        # models/latent_attention.py takes the angles at positions of its own
        wrong = "latent attention does not support the fused kernel; allowed: false"
        yield "model.megatron.apply_rope_fusion", wrong
    if megatron.get("window_size") is not None or softmax != "vanilla":
        wrong = "latent attention has neither a window nor sinks"
        allowed = "allowed: without window_size and softmax_type"
        yield "model.megatron.multi_latent_attention", f"{wrong}; {allowed}"


MODEL_RULES: tuple[Rule, ...] = (
    world_size_fits,
    tensor_parallel_fits,
    pipeline_divides,
    experts_divide,
    delta_nets_fit,
    windows_are_possible,
    attention_is_possible,
    patterns_have_all_layers,
    experts_have_biases,
    router_is_sound,
    model_does_not_depend_on_the_layout,
    precision_is_possible,
    weights_are_named_once,
    adapters_fit,
)
