"""Rules about adapters on servers (rollout.vllm.lora)."""

from __future__ import annotations

from gspo_megatron.config.model_rules import Plan, Problems
from gspo_megatron.config.servers import SERVED_RANKS
from gspo_megatron.families import differs_in_folder
from gspo_megatron.families.adapter_map import adapted_weights_of

ADAPTER_OPTIONS = {"enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype"}
_KEY = "rollout.vllm.lora"
_MERGED = "allowed: merged"


def adapters_are_served(plan: Plan) -> Problems:
    """Check that vLLM applies the adapters as the trainer does. This check is needed because vLLM
    silently ignores many adapters that it does not support."""
    config = plan.config
    model, rollout, servers = config.model, config.rollout, config.rollout.vllm
    if rollout.engine != "vllm" or not servers.takes_adapters:
        return
    rank = model.lora.rank
    if not rank:
        yield _KEY, f"there are no adapters with model.lora.rank = 0; {_MERGED}"
        return
    if rank > SERVED_RANKS[-1]:
        wrong = f"vLLM takes adapters of rank {SERVED_RANKS[-1]} at most"
        yield _KEY, f"{wrong}, not model.lora.rank = {rank}; {_MERGED}"
    if servers.urls:
        yield _KEY, f"is for servers that the run starts, not for rollout.vllm.urls; {_MERGED}"
    if servers.weight_transport == "nccl":
        wrong = "adapters go to servers as files (rollout.vllm.lora = adapter)"
        yield "rollout.vllm.weight_transport", f"{wrong}; allowed: auto or disk"
    if rollout.kv_after_update != "recompute":
        wrong = "a response ends with the adapter that it began with (rollout.vllm.lora = adapter)"
        yield "rollout.kv_after_update", f"{wrong}; allowed: recompute"
    if "r3" in config.routing.modes:
        yield _KEY, f"the routes of vLLM (r3) were never tried with adapters; {_MERGED}"
    if model.hf_path is None:
        yield _KEY, f"servers load the base from model.hf_path; {_MERGED}, or set model.hf_path"
    elif (how := differs_in_folder(model.hf_path)) is not None:
        wrong = "servers load model.hf_path, which is not the model that is trained"
        yield _KEY, f"{wrong} ({how}); {_MERGED}"
    yield from _matrices_are_served(plan)


def _matrices_are_served(plan: Plan) -> Problems:
    """Check that vLLM's layers apply the adapters of all target matrices."""
    model, shape = plan.config.model, plan.shape
    adapted = adapted_weights_of(model.family(shape), shape, model.lora.targets)
    routers = {m.leaf for n, each in adapted.items() if ".router." in n for m in each.matrices}
    outer = {m.leaf for n, each in adapted.items() if ".layers." not in n for m in each.matrices}
    for kind, names in (("routers", routers), ("output layer", outer)):
        if names:
            named = ", ".join(sorted(names))
            wrong = f"vLLM does not apply adapters of the {kind} ({named})"
            yield _KEY, f"{wrong}; {_MERGED}"
    family = model.family(shape)
    is_joint = any(f"{part}_gate_up" in family.names for part in ("interleaved", "experts"))
    if is_joint and any(".mlp.experts." in name for name in adapted):
        wrong = "all experts of a layer are one tensor in its files, and vLLM's form for that has"
        yield _KEY, f"{wrong} no adapters of gate and up projection; {_MERGED}"
    if shape.has_latent_attention and any(".self_attention." in name for name in adapted):
        wrong = "vLLM multiplies latent attention's matrices with each other, without adapters"
        yield _KEY, f"{wrong}; {_MERGED}, or other model.lora.targets"
