"""A family of published models: its config.json as TransformerConfig fields, and its tensors.

A `Family` is a table of keys of config.json, fields of TransformerConfig and names of tensors. The
configuration reads a model's shape with it before torch is imported. The package gspo_megatron.hf
takes the names of tensors from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gspo_megatron.errors import format_value, problem
from gspo_megatron.families.model_shape import (
    ModelPreset,
    ModelShape,
    delta_net_pattern,
    expert_pattern,
    experts_in_layers,
    windows_in_layers,
)
from gspo_megatron.families.rope import (
    RopeKinds,
    in_one_spelling,
    is_number,
    read_rope,
    write_rope,
)

REQUIRED = object()
FP8, MXFP4 = "fp8", "mxfp4"  # values of quant_method in quantization_config


@dataclass(frozen=True)
class Field:
    """A key of config.json and the field of TransformerConfig that it corresponds to. `default` is
    what transformers assumes if the key is missing."""

    hf: str
    ours: str
    default: Any = REQUIRED
    negated: bool = False  # key and field are flags of opposite meaning
    nullable: bool = False  # null is a value of its own, and not TransformerConfig's default


# Functions for the layers that have experts. ReadPattern turns config.json into one flag for each
# layer. WritePattern turns the flags into keys of config.json, or returns None if config.json
# cannot express them.
ReadPattern = Callable[[Mapping[str, Any]], list[bool]]
WritePattern = Callable[[list[bool]], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Family:
    """Models that share an architecture of transformers.

    `always`: fields of TransformerConfig that all models of the family share. `only`: keys of
    config.json with the values that are supported; the first value stands for a missing key.
    `spellings`: other names of keys that transformers accepts, and the usual name of each.
    `names`: the template of each tensor's name, by its role (families/weight_map.py).
    """

    model_type: str
    architecture: str
    fields: tuple[Field, ...]
    names: Mapping[str, str]
    other_model_types: tuple[str, ...] = ()  # values of model_type with this architecture
    renamed_types: tuple[str, ...] = ()  # of them, those that transformers does not know
    other_classes: tuple[str, ...] = ()  # other names in `architectures`
    normalizes: bool = True  # False: if a token has one expert, its weight is the sigmoid score
    always: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    rope: RopeKinds = RopeKinds()  # noqa: RUF009 (frozen)
    max_position_embeddings: int = 32_768
    tied: bool = False  # transformers' default of tie_word_embeddings
    joint_qk_norm: bool = False
    router_bias_is_row: bool = False  # published files have the bias as [1, experts]
    has_windows: bool = False  # `read_rest` and `check` read sliding windows
    quantizations: tuple[str, ...] = (FP8,)  # supported values of quant_method
    read_pattern: ReadPattern | None = None
    write_pattern: WritePattern | None = None
    # For relations that `fields` cannot express: a check of several keys together, and functions
    # for values that are made of several keys or fields.
    check: Callable[[Mapping[str, Any]], list[str]] = lambda hf: []
    read_rest: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda hf: {}
    write_rest: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda megatron: {}
    # The supported values in the list `layer_types` of config.json.
    layer_types: tuple[str, ...] = ("full_attention",)
    # model_type of a vision-language model with this language model.
    vision_model_type: str | None = None
    # Tensors in published files that are ignored, by the end of their names.
    unread: tuple[str, ...] = (".rotary_emb.inv_freq",)
    unread_starts: tuple[str, ...] = ()  # beginnings of names of tensors to ignore
    # The key for the number of extra layers that predict further tokens (MTP). They are left out,
    # and an export says that there are none.
    next_token_layers: str | None = None
    # Keys of config.json that vLLM needs and transformers does not read. Published files have them,
    # but files that transformers wrote do not. Our exports add them.
    vllm_keys: tuple[str, ...] = ()
    # The reason why vLLM 0.30 cannot serve the family, or serves it wrongly: on any device
    # (no_servers), or on CPUs only (no_cpu_servers). Empty if vLLM can serve it.
    no_servers: str = ""
    no_cpu_servers: str = ""

    @property
    def normalizes_one(self) -> bool:
        """Whether a router with sigmoid scores gives a token's only expert the weight 1."""
        return self.always.get("moe_router_score_function") == "sigmoid" and self.normalizes

    def preset(self, hf: Mapping[str, Any]) -> tuple[ModelPreset, list[str]]:
        """Return the model that a config.json describes, and a line for each setting that is not
        supported."""
        hf, problems = in_one_spelling(hf, self.spellings)
        for key, allowed in (_ONLY | dict(self.only)).items():
            if key in hf and hf[key] not in allowed:
                choices = " or ".join(map(format_value, allowed))
                problems.append(problem(key, hf[key], f"not supported; allowed: {choices}"))
        problems += [] if self.has_windows else _window_problems(hf, self.layer_types)
        problems += _quantization_problems(hf, self.quantizations)
        rope, rope_problems = read_rope(hf, self.rope)
        problems += rope_problems + _label_problems(hf)
        values, field_problems = self._read_fields(hf)
        problems += field_problems
        megatron = _ALWAYS | dict(self.always) | dict(rope.megatron) | values
        if not hf.get("vocab_size") or _wrong_size(hf["vocab_size"], 1):
            problems.append("vocab_size: required, and an integer from 1")
        problems += _count_problems(hf) + _group_problems(megatron)
        problems += self._expert_problems(megatron) + self.check(hf)
        if self.normalizes_one and megatron.get("moe_router_topk") == 1:
            wrong = "Megatron-Core does not give a single expert the weight 1; allowed: from 2"
            problems.append(problem("num_experts_per_tok", 1, wrong))
        rest = {} if problems else self.read_rest(hf)
        megatron |= {name: value for name, value in rest.items() if value is not None}
        if self.read_pattern is not None and not problems:
            megatron = _with_experts_in(self.read_pattern(hf), megatron)
        preset = ModelPreset(
            vocab_size=hf.get("vocab_size"),
            max_sequence_length=hf.get("max_position_embeddings") or self.max_position_embeddings,
            rotary_base=rope.base,
            tie_embeddings=bool(hf.get("tie_word_embeddings", self.tied)),
            megatron=MappingProxyType(megatron),
            joint_qk_norm=self.joint_qk_norm,
            rotary_percent=rope.percent,
            rotary_llama3_factor=rope.llama3_factor,
            scores=is_score_model(hf),
        )
        return preset, problems

    def _read_fields(self, hf: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of TransformerConfig in `fields`, and a line for each missing or wrong
        key of config.json."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        for entry in self.fields:
            value = hf.get(entry.hf, entry.default)
            if value is REQUIRED:
                problems.append(f"{entry.hf}: required and missing")
            elif (wrong := self._wrong_value(entry, value)) is not None:
                problems.append(problem(entry.hf, value, wrong))
            elif value is not None or entry.nullable:
                values[entry.ours] = not value if entry.negated else value
        return values, problems

    @property
    def score_architecture(self) -> str:
        """The class of the family's preference models. transformers lacks some of these classes.
        vLLM makes each of them from the class of the language model."""
        return self.architecture.replace("ForCausalLM", SCORE_CLASS)

    def score_keys(self) -> dict[str, Any]:
        """The keys of config.json that turn a language model into a preference model.

        transformers stores no num_labels: it is the length of id2label. With the problem type
        "regression" vLLM gives the score itself, without a sigmoid."""
        return {
            "architectures": [self.score_architecture],
            "id2label": {"0": "score"},
            "label2id": {"score": 0},
            "problem_type": "regression",
        }

    def is_left_out(self, name: str, hf: Mapping[str, Any]) -> bool:
        """Whether a tensor of a published file does not belong to the model that is trained."""
        if name.endswith(self.unread) or name.startswith(self.unread_starts):
            return True
        number = _LAYER_OF.match(name)
        layers = hf["num_hidden_layers"]
        extra = max((hf.get(key) or 0 for key in self.next_token_keys), default=0)
        return number is not None and layers <= int(number[1]) < layers + extra

    @property
    def next_token_keys(self) -> list[str]:
        """All spellings of `next_token_layers`."""
        usual = self.next_token_layers
        others = [other for other, name in self.spellings.items() if name == usual]
        return [] if usual is None else [usual, *others]

    def _wrong_value(self, entry: Field, value: Any) -> str | None:
        """Return what is wrong with the value of a field, or None. The default of a field decides
        the kind of its values."""
        kind = type(entry.default)
        if kind is float:
            return None if value is None or is_number(value) else "must be a number"
        if kind is bool:
            return None if value is None or isinstance(value, bool) else _NO_FLAG
        if kind is str:
            return None
        is_needed = entry.ours in _NEEDED.split()
        if entry.ours == "num_moe_experts" and self.read_pattern is None:
            is_needed = True  # all layers have experts
        return _wrong_size(value, int(is_needed))

    def _expert_problems(self, megatron: Mapping[str, Any]) -> list[str]:
        """Return a line if a token uses more experts than a layer has."""
        experts, chosen = (megatron.get(key) for key in ("num_moe_experts", "moe_router_topk"))
        if not experts or not chosen or chosen <= experts:
            return []
        names = {entry.ours: entry.hf for entry in self.fields}
        wrong = f"must be at most {names['num_moe_experts']} = {experts}"
        return [problem(names["moe_router_topk"], chosen, wrong)]

    def config(self, shape: ModelShape, vocab_size: int) -> dict[str, Any] | None:
        """The config.json of a model of this shape, in the form of published checkpoints; None if
        no model of the family can have this shape."""
        hf: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        hf |= self.score_keys() if shape.scores else {}
        for entry in self.fields:
            value = shape.megatron.get(entry.ours)
            if shape.num_moe_experts is None and entry.ours in _EXPERT_SIZES:
                value = 0
            if value is not None:
                hf[entry.hf] = not value if entry.negated else value
        hf |= {key: allowed[0] for key, allowed in self.only.items()}
        hf |= {
            "vocab_size": vocab_size,
            "max_position_embeddings": shape.max_sequence_length,
            **write_rope(shape, self.rope),
            "tie_word_embeddings": shape.tie_embeddings,
            "attention_dropout": 0.0,
        }
        if self.next_token_layers is not None:
            hf[self.next_token_layers] = 0
        hf |= self.write_rest(shape.megatron)
        if self.write_pattern is not None:
            pattern = self.write_pattern(experts_in_layers(shape))
            if pattern is None:
                return None
            hf |= pattern
        preset, problems = self.preset(hf)
        if problems or differences(shape, preset):
            return None
        return hf


# The end of the names of transformers' classes for preference models.
SCORE_CLASS = "ForSequenceClassification"


def is_score_model(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a preference model."""
    return any(str(name).endswith(SCORE_CLASS) for name in hf.get("architectures") or ())


def _with_experts_in(layers: list[bool], megatron: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of TransformerConfig, changed so that only the flagged layers have
    experts."""
    if not megatron.get("num_moe_experts"):
        layers = [False]
    if all(layers):
        return megatron
    if any(layers):
        return {**megatron, "moe_layer_freq": [int(flag) for flag in layers]}
    return {
        name: value
        for name, value in megatron.items()
        if not (name.startswith("moe_") or name == "num_moe_experts")
    }


def _count_problems(hf: Mapping[str, Any]) -> list[str]:
    """Check the counts and flags in config.json that are no `fields` of a family. Returns a line
    for each wrong value."""
    return [
        problem(key, hf[key], wrong)
        for least, keys in _COUNTS.items()
        for key in keys.split()
        if key in hf and (wrong := _wrong_size(hf[key], least))
    ] + [
        problem(key, hf[key], _NO_FLAG)
        for key in _FLAGS
        if hf.get(key) is not None and not isinstance(hf[key], bool)
    ]


def _group_problems(megatron: Mapping[str, Any]) -> list[str]:
    """Return a line if query heads cannot be divided evenly among the heads of keys and values."""
    heads, groups = (megatron.get(f"num_{key}") for key in ("attention_heads", "query_groups"))
    if not heads or not groups or heads % groups == 0:
        return []
    return [problem("num_key_value_heads", groups, f"must divide num_attention_heads = {heads}")]


def _label_problems(hf: Mapping[str, Any]) -> list[str]:
    """Return a problem if a preference model has several labels: only one, the score, is
    supported."""
    labels = hf.get("id2label")
    if not is_score_model(hf) or (isinstance(labels, Mapping) and len(labels) == 1):
        return []
    value = "2 labels" if labels is None else format_value(labels)  # transformers' default is 2
    return [f"id2label: {value}; a preference model has one label, the score"]


_LAYER_OF = re.compile(r"model\.layers\.(\d+)\.")

_ALWAYS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    # With dropout, old and new policy would differ by noise, and their ratio would be noisy, too.
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}

_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0.0,),
    "per_layer_config": (None, {}),
}


def sizes(epsilon: float) -> tuple[Field, ...]:
    """The fields that every family has: sizes and norms. epsilon: the default epsilon of the
    norms."""
    return (
        Field("num_hidden_layers", "num_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("intermediate_size", "ffn_hidden_size"),
        Field("rms_norm_eps", "layernorm_epsilon", epsilon),
        Field("hidden_act", "activation_func", "silu"),
    )


SIZES = sizes(1e-6)
# The sizes that are 0 in the config.json of a model whose layers are all dense.
_EXPERT_SIZES = (
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)


def key_value_heads(default: int | None) -> Field:
    """The number of key-value heads. The default None stands for the number of attention heads."""
    return Field("num_key_value_heads", "num_query_groups", default)


# Fields that most routers have in common.
LINEAR_ROUTER: dict[str, Any] = {
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
}

# Names of tensors, by their roles.
LAYER = "model.layers.{layer}."
EMBEDDINGS = {
    "embedding": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
}
NORMS = {
    "input_norm": f"{LAYER}input_layernorm.weight",
    "mlp_norm": f"{LAYER}post_attention_layernorm.weight",
}
ATTENTION = {part: f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo"}
ATTENTION_BIASES = {f"{part}_bias": f"{LAYER}self_attn.{part}_proj.bias" for part in "qkvo"}
QK_NORMS = {f"{part}_norm": f"{LAYER}self_attn.{part}_norm.weight" for part in "qk"}
MLP = ("gate", "up", "down")
DENSE = {part: f"{LAYER}mlp.{part}_proj.weight" for part in MLP}
ROUTER = {"router": f"{LAYER}mlp.gate.weight"}
EXPERTS = {f"expert_{part}": f"{LAYER}mlp.experts.{{expert}}.{part}_proj.weight" for part in MLP}


def shared_experts(module: str) -> dict[str, str]:
    """The names of the tensors of shared experts, which are the module `module` of the MLP."""
    return {f"shared_{part}": f"{LAYER}mlp.{module}.{part}_proj.weight" for part in MLP}


GATED_SHARED_EXPERT = {
    "shared_router": f"{LAYER}mlp.shared_expert_gate.weight",
    **shared_experts("shared_expert"),
}


def differences(shape: ModelShape, preset: ModelPreset) -> list[str]:
    """Return the fields of TransformerConfig that make a model and a preset compute different
    things."""
    ours, theirs = dict(shape.megatron), dict(preset.megatron)
    # the same pattern may be a number or a list of flags
    for fields, model in ((ours, shape), (theirs, preset)):
        fields["moe_layer_freq"] = expert_pattern(fields, shape.num_layers)
        frequency = fields.get("linear_attention_freq")
        fields["linear_attention_freq"] = delta_net_pattern(frequency, shape.num_layers)
        fields["window_size"] = windows_in_layers(fields, shape.num_layers)
        fields.pop("window_attn_skip_freq", None)
        for outer in ("joint_qk_norm", "rotary_percent", "rotary_llama3_factor"):
            fields[outer] = getattr(model, outer)
    # a config.json may lack these sizes; ModelShape has them all
    defaults = ["num_query_groups", "kv_channels"]
    if not shape.has_dense_layers:
        defaults.append("ffn_hidden_size")
    theirs = {name: ours.get(name) for name in defaults} | theirs
    neutral, starts = _NEUTRAL.split(), tuple(_NEUTRAL_STARTS.split())
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if (ours.get(name) or None) != (theirs.get(name) or None)
        and not (name in neutral or name.startswith(starts) or name.endswith("_fusion"))
    ]


# Fields that change how a model is sharded, trained or computed, but not its outputs.
_NEUTRAL = """
    attention_backend attention_softmax_in_fp32 apply_query_key_layer_scaling apply_rope_fusion
    barrier_with_L1_time batch_p2p_comm batch_p2p_sync deterministic_mode
    disable_bf16_reduced_precision_matmul gradient_accumulation_fusion hidden_dropout
    init_method_std attention_dropout moe_aux_loss_coeff moe_grouped_gemm moe_layer_recompute
    moe_router_bias_update_rate moe_router_dtype moe_router_load_balancing_type
    moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_shared_expert_overlap
    moe_token_dispatcher_type moe_z_loss_coeff num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split test_mode
"""
_NEUTRAL_STARTS = """
    cpu_offloading cuda_graph deallocate_ defer_embedding delay_wgrad distribute_saved
    enable_cuda_graph external_cuda_graph fine_grained_activation flash_decode fp8 inference_ log_
    microbatch_group_size moe_deepep moe_enable_deepep moe_flex moe_hybridep moe_pad_
    moe_per_layer_logging offload_ overlap_ recompute_ tp_comm_ tp_only_amax wgrad_deferral
"""


def _window_problems(hf: Mapping[str, Any], layer_types: tuple[str, ...]) -> list[str]:
    """Return a problem if the model has sliding-window attention, and a problem if it has other
    layers than the supported `layer_types`."""
    window = hf.get("sliding_window")
    has_window = hf.get("use_sliding_window", "sliding_window" in hf)
    problems = []
    if has_window and "sliding_window" not in hf:  # transformers then takes a default
        wrong = "there is no sliding_window; allowed: false, or sliding_window: null"
        problems.append(problem("use_sliding_window", has_window, wrong))
    if window is not None and has_window:
        allowed = "null, or use_sliding_window = false"
        problems.append(problem("sliding_window", window, f"not supported; allowed: {allowed}"))
    others = ", ".join(map(str, sorted(set(hf.get("layer_types") or ()) - set(layer_types))))
    if others:
        allowed = " or ".join(layer_types)
        problems.append(f"layer_types: {others}: not supported; allowed: {allowed}")
    return problems


def _quantization_problems(hf: Mapping[str, Any], methods: tuple[str, ...]) -> list[str]:
    """Return what is wrong with the quantization of the weights. Supported are FP8 with a scale for
    each block, and MXFP4 experts if the family has them."""
    config = hf.get("quantization_config")
    if config is None:
        return []
    if not isinstance(config, Mapping):
        return [problem("quantization_config", config, "must be a mapping")]
    blocks, method = config.get("weight_block_size"), config.get("quant_method")
    if method == MXFP4 and method in methods:
        return []
    is_fp8 = method == FP8 and method in methods and config.get("fmt", "e4m3") in _FP8_FORMATS
    if is_fp8 and isinstance(blocks, list) and len(blocks) == 2 and all(map(_is_block, blocks)):
        return []
    allowed = " or ".join(_QUANTIZED[each] for each in methods)
    return [problem("quantization_config", dict(config), f"not supported; allowed: {allowed}")]


_FP8_FORMATS = ("e4m3", "float8_e4m3fn")  # two names of one format


_QUANTIZED = {
    FP8: "quant_method = fp8, fmt = e4m3 and a weight_block_size of two numbers",
    MXFP4: "quant_method = mxfp4",
}


def _is_block(value: Any) -> bool:
    return type(value) is int and value > 0


def _wrong_size(value: Any, least: int) -> str | None:
    """Return what is wrong with a size in config.json, or None. If `least` is 0, the size is also
    allowed to be null: the model lacks this part, as a dense model lacks experts."""
    if (value is None and least == 0) or (type(value) is int and least <= value <= _LARGEST_SIZE):
        return None
    return f"must be an integer from {least} to {_LARGEST_SIZE:,}"


# If a family has one of these fields, the field must be set and above 0.
_NEEDED = """
    num_layers hidden_size num_attention_heads kv_lora_rank qk_head_dim qk_pos_emb_head_dim
    v_head_dim linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads
"""
# Keys with a count, such as a number of layers, by the smallest count that is allowed.
_COUNTS = {
    0: """
        max_position_embeddings n_shared_experts num_shared_experts moe_num_shared_experts
        first_k_dense_replace num_nextn_predict_layers num_mtp_modules mtp_num_hidden_layers
    """,
    1: "decoder_sparse_step full_attention_interval moe_layer_interval",
}

_FLAGS = ("tie_word_embeddings", "use_sliding_window")
_NO_FLAG = "must be true or false"

# An upper limit for every size in config.json, such as the number of layers.
_LARGEST_SIZE = 10_000_000
