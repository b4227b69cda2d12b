"""The supported model families of Hugging Face, and the named presets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_megatron.errors import ConfigError, problem
from gspo_megatron.families import (
    bailing,
    deepseek_v3,
    ernie,
    glm,
    gpt_oss,
    hunyuan,
    llama,
    minimax,
    mixtral,
    olmoe,
    qwen,
    qwen3_next,
)
from gspo_megatron.families.family import Family, differences, is_score_model
from gspo_megatron.families.model_shape import (
    ModelPreset,
    ModelShape,
    checkpoint_model_file,
    experts_in_layers,
    no_folder,
    read_model,
)
from gspo_megatron.files import WRONG_VALUES, object_in

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (qwen.QWEN3_MOE, qwen.QWEN3, qwen.QWEN2_MOE, qwen.QWEN2)
    + (deepseek_v3.FAMILY, glm.GLM4_MOE, glm.GLM4_MOE_LITE, hunyuan.FAMILY)
    + (bailing.FAMILY, minimax.FAMILY, ernie.FAMILY)
    + (llama.FAMILY, mixtral.FAMILY, olmoe.FAMILY, gpt_oss.FAMILY)
    + (qwen3_next.QWEN3_NEXT, qwen3_next.QWEN3_5_MOE, qwen3_next.QWEN3_5)
}
_OTHER_NAMES = {name: family for family in FAMILIES.values() for name in family.other_model_types}
_VISION_MODELS = {each.vision_model_type: each for each in FAMILIES.values()}

# Families that users ask for, and the reason why they are not supported.
_UNSUPPORTED = {
    "nemotron_h": "its Mamba layers (state spaces) belong to another model class of Megatron-Core",
}

_PRESET_KEYS = """
    num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size
    num_experts num_experts_per_tok moe_intermediate_size max_position_embeddings rope_theta
    vocab_size norm_topk_prob
"""
# The Qwen3 presets have the sizes of config.json in Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B.
PRESETS: Mapping[str, ModelPreset] = {
    name: qwen.QWEN3_MOE.preset(dict(zip(_PRESET_KEYS.split(), (*sizes, True))))[0]
    for name, sizes in {
        "tiny": (4, 64, 4, 2, 16, 256, 8, 2, 64, 128, 1e4, None),
        "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 6144, 128, 8, 768, 40_960, 1e6, 151_936),
        "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 12_288, 128, 8, 1536, 40_960, 1e6, 151_936),
    }.items()
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises ConfigError if the model is not supported."""
    hf_config = language_model(hf_config)
    architectures = hf_config.get("architectures") or []
    model_type = hf_config.get("model_type")
    families = {**FAMILIES, **_OTHER_NAMES}
    family = families.get(model_type) if isinstance(model_type, str) else None
    if family is not None:
        classes = (family.architecture, family.score_architecture, *family.other_classes)
        if architectures in ([], *([each] for each in classes)):
            return family
    known = ", ".join(family.architecture for family in FAMILIES.values())
    reason = _UNSUPPORTED.get(model_type) if isinstance(model_type, str) else None
    wrong = f"not supported{f', {reason}' if reason else ''}; supported: {known}"
    raise ConfigError([problem("architectures", architectures or model_type, wrong)])


def language_model(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model, if `hf_config` belongs to a vision-language model of a known
    family. The config of any other model is returned unchanged."""
    model_type, text = hf_config.get("model_type"), hf_config.get("text_config")
    family = _VISION_MODELS.get(model_type) if isinstance(model_type, str) else None
    if family is None or not isinstance(text, Mapping):
        return hf_config
    shared = {key: value for key, value in hf_config.items() if key in _SHARED_KEYS}
    outer = {key: value for key, value in hf_config.items() if key in _OUTER_KEYS}
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    if is_score_model(hf_config):
        names["architectures"] = [family.score_architecture]
    return {**shared, **text, **outer, **names}


# The text model takes these keys from the outer config if it lacks them itself.
_SHARED_KEYS = ("dtype", "torch_dtype", "quantization_config", "auto_map")
# If the outer config has these keys, those of the text model are not read, as in transformers.
_OUTER_KEYS = ("tie_word_embeddings", "id2label", "label2id", "problem_type")


def family_of_shape(shape: ModelShape) -> Family:
    """Return the first family that has models of this shape, for a dense model preferably a family
    without experts. If no family has such models, raises ConfigError, which says for each family
    what does not fit."""
    is_dense = shape.num_moe_experts is None
    for family in sorted(FAMILIES.values(), key=lambda each: is_dense and bool(each.read_pattern)):
        if family.config(shape, 1) is not None:
            return family
    lines = [f"{name}: {', '.join(_misfits(each, shape))}" for name, each in FAMILIES.items()]
    raise ConfigError(["no Hugging Face family has such models; what does not fit:", *lines])


def describe(hf_config: Mapping[str, Any]) -> ModelPreset:
    """The model of a config.json. Raises ConfigError with everything that is not supported."""
    family = family_of(hf_config)
    try:
        preset, problems = family.preset(language_model(hf_config))
    except WRONG_VALUES as error:
        raise ConfigError([f"a value of a wrong type: {error}"]) from None
    if problems:
        raise ConfigError(problems)
    return preset


def preset_of_folder(path: str) -> ModelPreset:
    """The model of a Hugging Face folder. Raises ConfigError."""
    file = Path(path) / "config.json"
    try:
        stat = file.stat()
    except OSError as error:
        wrong = f"{file}: {error.strerror}" if Path(path).is_dir() else no_folder(path)
        if checkpoint_model_file(path) is not None:
            wrong = "is a checkpoint of gspo-megatron; use model.checkpoint_path for it"
        raise ConfigError([problem("model.hf_path", path, wrong)]) from None
    return read_model("model.hf_path", file, describe, (stat.st_mtime_ns, stat.st_size))


def differs_in_folder(path: str) -> str | None:
    """Describe the contents of a Hugging Face folder, such as "weights in fp8", if the model in it
    differs from the trained model in more than the dtype. Otherwise return None."""
    config = object_in(Path(path) / "config.json")
    if language_model(config) is not config:
        return "a vision-language model"
    if isinstance(quantization := config.get("quantization_config"), Mapping):
        return f"weights in {quantization.get('quant_method')}"
    return None


def _misfits(family: Family, shape: ModelShape) -> list[str]:
    """Return the fields of TransformerConfig whose values in this shape no model of the family can
    have."""
    values = {entry.ours: shape.megatron.get(entry.ours) for entry in family.fields}
    if family.write_pattern is not None and family.write_pattern(experts_in_layers(shape)):
        values["moe_layer_freq"] = [int(flag) for flag in experts_in_layers(shape)]
    values = {name: value for name, value in values.items() if value is not None}
    preset, _ = family.preset({})
    preset = ModelPreset(1, 1, 1.0, False, {**preset.megatron, **values})
    return differences(shape, preset) or ["config.json cannot express it"]
