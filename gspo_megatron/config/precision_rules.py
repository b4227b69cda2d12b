"""What `training.precision` asks of the other keys."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from gspo_megatron.config.megatron_fields import installed_literals
from gspo_megatron.config.parallel import Layout
from gspo_megatron.config.precision import FP8, Fp8, engine_lacks
from gspo_megatron.config.problems import problem
from gspo_megatron.config.schema import RunConfig
from gspo_megatron.config.shape import ModelShape

KEY = "training.precision"


def backend_problems(config: RunConfig) -> Iterator[str]:
    """A layer backend that is not there."""
    backend = config.model.backend
    if backend != "transformer_engine":
        return
    if importlib.util.find_spec("transformer_engine") is None:
        yield problem(
            "model.backend",
            backend,
            "the package transformer_engine is not installed; legal: torch_native or auto",
        )


def precision_problems(
    precision: str,
    config: RunConfig,
    shape: ModelShape,
    layout: Layout,
    *,
    for_training: bool,
    here: bool,
) -> Iterator[str]:
    """All that can be known without the device; models.transformer_config checks the device. What
    is installed counts for a run that is to be `here`."""
    if for_training and precision == "fp64":
        yield problem(
            KEY,
            precision,
            "Megatron-Core's optimizers know no float64, it is for `verify`; legal: fp32 or bf16",
        )
    fp8 = FP8.get(precision)
    if fp8 is None:
        return
    if config.model.backend == "torch_native":
        yield problem(
            KEY,
            precision,
            "model.backend = torch_native has no FP8; legal: fp32 or bf16, or "
            "model.backend = transformer_engine",
        )
    elif here and (lacks := engine_lacks()) is not None:
        yield problem(KEY, precision, f"{lacks}; legal: fp32 or bf16")
    recipes = installed_literals("fp8_recipe")
    if recipes is not None and fp8.recipe not in recipes:
        yield problem(
            KEY,
            precision,
            f"the installed megatron-core has no fp8_recipe {fp8.recipe!r}; legal: bf16",
        )
    yield from _features(precision, fp8, shape, layout)
    yield from _fields(precision, fp8, shape, layout)


def _features(precision: str, fp8: Fp8, shape: ModelShape, layout: Layout) -> Iterator[str]:
    """The sides of every weight on a rank that FP8 multiplies by."""
    tp, etp = layout.tp, layout.etp or 1
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    sides = {"hidden_size": (shape.hidden_size, 1)}
    if not shape.megatron.get("multi_latent_attention"):
        channels = shape.kv_channels
        sides["num_attention_heads * kv_channels"] = (heads * channels, tp)
        sides["num_query_groups * kv_channels"] = (groups * channels, min(tp, groups))
    if shape.has_dense_layers:
        sides["ffn_hidden_size"] = (shape.ffn_hidden_size, tp)
    if shape.moe_ffn_hidden_size is not None and shape.num_moe_experts is not None:
        sides["moe_ffn_hidden_size"] = (shape.moe_ffn_hidden_size, etp)
    if shape.moe_shared_expert_intermediate_size is not None:
        sides["moe_shared_expert_intermediate_size"] = (
            shape.moe_shared_expert_intermediate_size,
            tp,
        )
    for name, (size, parts) in sides.items():
        if size % parts == 0 and (size // parts) % fp8.multiple:  # what does not divide is told
            split = f" over {parts} ranks is {size // parts} each" if parts > 1 else f" is {size}"
            yield problem(
                KEY,
                precision,
                f"{name}{split}; its matrix products take multiples of {fp8.multiple}; legal: bf16",
            )


def _fields(precision: str, fp8: Fp8, shape: ModelShape, layout: Layout) -> Iterator[str]:
    """Fields below model.megatron that this recipe cannot do."""
    given = shape.megatron
    if fp8.recipe == "delayed":
        wrong = {
            "first_last_layers_bf16": "scales by earlier micro-batches are those of all layers",
            "tp_only_amax_red": "every data-parallel rank would have scales of its own, of which a "
            "checkpoint keeps one set",
            "fp8_dot_product_attention": "a checkpoint does not hold the scales of attention",
            "fp8_multi_head_attention": "a checkpoint does not hold the scales of attention",
        }
        for name, reason in wrong.items():
            if given.get(name):
                yield problem(
                    f"model.megatron.{name}",
                    given[name],
                    f"not with training.precision = {precision}: {reason}; legal: false",
                )
    elif given.get("first_last_layers_bf16"):
        most = shape.num_layers // layout.pp
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if not 0 <= given.get(name, 1) <= most:
                yield problem(
                    f"model.megatron.{name}",
                    given[name],
                    f"a pipeline stage has {most} layers; legal: 0 to {most}",
                )
