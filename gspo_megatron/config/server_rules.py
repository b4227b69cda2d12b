"""Rules about vLLM servers (rollout.engine: vllm): that there are servers, that they do what the
trainer does, and that they apply its adapters."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

from gspo_megatron.addresses import ROLLOUT_NODES, rollout_nodes
from gspo_megatron.config.model_rules import Plan, Problems
from gspo_megatron.config.schema import suite_key
from gspo_megatron.config.servers import SERVED_RANKS
from gspo_megatron.errors import ConfigError
from gspo_megatron.families import differs_in_folder, family_of_shape
from gspo_megatron.families.adapter_map import adapted_weights_of

# Options of a server that the run itself decides.
_OWN_OPTIONS = {
    "model", "host", "port", "served_model_name", "dtype", "max_model_len", "logprobs_mode",
    "tensor_parallel_size", "tokenizer", "worker_extension_cls",
    "middleware",  # it asks for the token of the run
}  # fmt: skip
_ADAPTER_OPTIONS = {"enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype"}


def staleness_fits(plan: Plan) -> Problems:
    """Check that keys for stale responses are set only if responses can be stale."""
    rollout, bound = plan.config.rollout, plan.config.objective.max_token_staleness
    if rollout.kv_after_update != "recompute" and not rollout.staleness:
        wrong = "with max_staleness = 0 no response runs during an update; allowed: recompute"
        yield "rollout.kv_after_update", wrong
    if bound is not None and bound >= rollout.staleness:
        wrong = f"no token is more than {rollout.staleness} updates old; allowed: null"
        below = f", or 0 to {rollout.staleness - 1}" if rollout.staleness else ""
        yield "objective.max_token_staleness", f"{wrong}{below}"
    if rollout.engine != "vllm" and rollout.max_staleness:
        wrong = "the model that is trained draws the responses itself; allowed: 0, or engine = vllm"
        yield "rollout.max_staleness", wrong


def servers_are_there(plan: Plan) -> Problems:
    """Check that a run with rollout.engine: vllm starts servers or names running servers. With
    another engine, check that no key of servers is set."""
    engine, servers = plan.config.rollout.engine, plan.config.rollout.vllm
    why = f"nothing reads it with rollout.engine = {engine}"
    set_keys = dict(servers.unread(type(servers).model_fields, why))
    if engine != "vllm":
        yield from ((f"rollout.vllm.{n}", f"{w}, or engine = vllm") for n, w in set_keys.items())
        return
    if bool(servers.servers) == bool(servers.urls):
        wrong = "rollout.vllm.urls names running ones" if servers.urls else "there are no servers"
        yield "rollout.vllm.servers", f"{wrong}; allowed: from 1, or 0 with rollout.vllm.urls"
    for url in servers.urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield "rollout.vllm.urls", f"{url}: allowed: http://host:port"
    for url, count in Counter(url.rstrip("/").lower() for url in servers.urls).items():
        if count > 1:
            yield "rollout.vllm.urls", f"{url} is listed {count} times; allowed: each server once"
    for name in ("tensor_parallel_size", "python", "options") if servers.urls else ():
        if name in set_keys:
            wrong = "is for servers that the run starts; allowed: leave it out"
            yield f"rollout.vllm.{name}", wrong
    if plan.here and servers.python is not None and shutil.which(servers.python) is None:
        wrong = "no such program; allowed: the interpreter of an environment that has vLLM"
        yield "rollout.vllm.python", wrong
    own = _OWN_OPTIONS | (_ADAPTER_OPTIONS if servers.takes_adapters else set())
    for name in sorted(own & {key.replace("-", "_") for key in servers.options}):
        yield f"rollout.vllm.options.{name}", "the run sets it itself; allowed: leave it out"


def servers_do_what_the_trainer_does(plan: Plan) -> Problems:
    """Check that the settings of vLLM match the trainer's.

    vLLM must sample from the distribution for which the trainer computes log-probs, and must
    support the features that the configuration uses.
    """
    rollout = plan.config.rollout
    if rollout.engine != "vllm":
        return
    for name, usual in (("top_p", 1.0), ("top_k", 0)):
        if getattr(rollout, name) != usual:
            wrong = "vLLM normalizes log-probs over the tokens that are left, the trainer over all"
            yield f"rollout.{name}", f"{wrong}; allowed with engine = vllm: {usual}"
    if rollout.batch_size is not None:
        wrong = (
            "nothing reads it with engine = vllm; allowed: null, and max_num_seqs in vllm.options"
        )
        yield "rollout.batch_size", wrong
    if rollout.stop and not Path(plan.config.data.tokenizer).is_dir():
        wrong = "to find texts, vLLM needs a Hugging Face tokenizer folder as data.tokenizer"
        yield "rollout.stop", f"{wrong}; allowed: []"
    if plan.config.routing.rollout_noise:
        wrong = "is for the in-process engine; allowed with rollout.engine = vllm: 0.0"
        yield "routing.rollout_noise", wrong
    shape = plan.shape
    try:
        family_of_shape(shape)
    except ConfigError as error:
        yield "rollout.engine", f"servers need a Hugging Face model: {error.problems[0]}"


# The temperatures at which vLLM samples. It raises a lower one to the first, and refuses a request
# with a higher one than the second.
_TEMPERATURES = (0.01, 2.0)


def temperatures_are_served(plan: Plan) -> Problems:
    """Check that vLLM samples at the temperatures of steps and suites."""
    if plan.config.rollout.engine != "vllm":
        return
    least, most = _TEMPERATURES
    wrong = f"vLLM samples at {least} or above, and refuses more than {most}"
    legal = f"allowed with engine = vllm: {least} to {most}"
    if not least <= plan.config.rollout.temperature <= most:
        yield "rollout.temperature", f"{wrong}; {legal}"
    for name, suite in plan.config.evaluation.suites.items():
        if suite.temperature and not least <= suite.temperature <= most:
            yield f"{suite_key(name)}.temperature", f"{wrong}; {legal}, or 0.0"


def rollout_nodes_are_used(plan: Plan) -> Problems:
    """Check that the nodes that only serve rollouts have servers, the same number on each."""
    names = rollout_nodes() if plan.here else []
    rollout = plan.config.rollout
    count, given = rollout.vllm.servers, f"of {ROLLOUT_NODES} = {','.join(names)}"
    if names and rollout.engine != "vllm":
        yield "rollout.engine", f"nothing runs on the nodes {given}; allowed with them: vllm"
    elif len(set(names)) < len(names):
        wrong = f"one of the nodes {given} is named twice; allowed: each node once"
        yield "rollout.vllm.servers", wrong
    elif names and (count == 0 or count % len(names)):
        wrong = f"does not spread evenly over the {len(names)} nodes {given}"
        yield "rollout.vllm.servers", f"{wrong}; allowed: multiples of {len(names)}"


_LORA = "rollout.vllm.lora"
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
        yield _LORA, f"there are no adapters with model.lora.rank = 0; {_MERGED}"
        return
    if rank > SERVED_RANKS[-1]:
        wrong = f"vLLM takes adapters of rank {SERVED_RANKS[-1]} at most"
        yield _LORA, f"{wrong}, not model.lora.rank = {rank}; {_MERGED}"
    if servers.urls:
        yield _LORA, f"is for servers that the run starts, not for rollout.vllm.urls; {_MERGED}"
    if servers.weight_transport == "nccl":
        wrong = "adapters go to servers as files (rollout.vllm.lora = adapter)"
        yield "rollout.vllm.weight_transport", f"{wrong}; allowed: auto or disk"
    if rollout.kv_after_update != "recompute":
        wrong = "a response ends with the adapter that it began with (rollout.vllm.lora = adapter)"
        yield "rollout.kv_after_update", f"{wrong}; allowed: recompute"
    if "r3" in config.routing.modes:
        yield _LORA, f"the routes of vLLM (r3) were never tried with adapters; {_MERGED}"
    if model.hf_path is None:
        yield _LORA, f"servers load the base from model.hf_path; {_MERGED}, or set model.hf_path"
    elif (how := differs_in_folder(model.hf_path)) is not None:
        wrong = "servers load model.hf_path, which is not the model that is trained"
        yield _LORA, f"{wrong} ({how}); {_MERGED}"
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
            yield _LORA, f"{wrong}; {_MERGED}"
    family = model.family(shape)
    is_joint = any(f"{part}_gate_up" in family.names for part in ("interleaved", "experts"))
    if is_joint and any(".mlp.experts." in name for name in adapted):
        wrong = "all experts of a layer are one tensor in its files, and vLLM's form for that has"
        yield _LORA, f"{wrong} no adapters of gate and up projection; {_MERGED}"
    if shape.has_latent_attention and any(".self_attention." in name for name in adapted):
        wrong = "vLLM multiplies latent attention's matrices with each other, without adapters"
        yield _LORA, f"{wrong}; {_MERGED}, or other model.lora.targets"
