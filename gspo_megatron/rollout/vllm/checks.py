"""Checks a server before it gets any weights: its model, its tokenizer, and the abilities that the
run needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_megatron.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from gspo_megatron.errors import ConfigError, RolloutError, format_value
from gspo_megatron.families import describe, preset_of_folder
from gspo_megatron.families.family import differences
from gspo_megatron.families.model_shape import ModelShape, shape_conflicts, shape_of
from gspo_megatron.rollout.vllm.client import ServerClient, ServerRefused, malformed
from gspo_megatron.rollout.vllm.process import WORKER

_DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
# Each path that the run needs, with the setting that makes a server answer it.
_NEEDED_PATHS = {
    "/inference/v1/generate": "--enable-scale-out",
    "/server_info": _DEV_MODE,
    "/collective_rpc": _DEV_MODE,
    "/update_weight_version": f"{_DEV_MODE}, and vLLM 0.30 or newer",
}
# If two tokenizers give the same ids for this text, they almost surely belong to the same model.
_TEXT = "Let x1 = 3.14 · 10² km/h; if (a_b != NULL) {\n\treturn 'naïve';\n}  日本語, Привет 🙂 "


@dataclass(frozen=True)
class Tokenized:
    """A text, and its token ids by the trainer's tokenizer."""

    text: str
    ids: Sequence[int]
    is_needed: bool  # whether the servers need a tokenizer, to search for texts that end a response


def tokenized(tokenizer: Tokenizer, *, is_needed: bool) -> Tokenized | None:
    """Tokenize a text for a comparison with the servers' tokenizer.

    Returns None for sentencepiece tokenizers. vLLM does not support them, so the servers of such a
    run get and return only token ids.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    special = tokenizer.special_tokens
    text = _TEXT + "".join(sorted(each for each in special if special[each] in tokenizer.eos_ids))
    return Tokenized(text, tokenizer.encode_rendered(text).ids, is_needed)


@dataclass(frozen=True)
class Needs:
    """What a run needs from its servers."""

    max_model_len: int
    dtype: str  # vLLM's name of the data type
    with_routes: bool
    must_stream: bool = False  # whether rank 0 must be able to stream new weights to the server
    tokenized: Tokenized | None = None


@dataclass(frozen=True)
class Abilities:
    """Optional abilities of a server."""

    is_extended: bool = False  # whether it has our worker extension
    workers: int = 0  # number of processes that hold its weights; 0: it has more than one engine
    counts_tokens: bool = False  # whether it reports the number of tokens of responses in progress
    engines: int = 1  # number of engines among which it divides its requests
    # number of sequences that each engine works on at a time; 0: not reported
    sequences: int = 0
    gives_parts: bool = False  # whether it has our middleware, for requests for several responses

    @property
    def can_stream(self) -> bool:
        """Whether rank 0 can stream weights to the server."""
        return self.is_extended and self.workers > 0


async def check_server(
    client: ServerClient, needs: Needs, folder: str, *, seconds: float
) -> Abilities:
    """Check a server and return its abilities.

    folder: the trainer's weights; seconds: time limit for each call. Raises RolloutError, which
    lists in one line everything that the server lacks.
    """
    paths = await client.paths(seconds=seconds)
    lacks = [f"does not answer {p}: {how}" for p, how in _NEEDED_PATHS.items() if p not in paths]
    if "/server_info" not in paths:
        raise RolloutError("; ".join(lacks))
    found = await client.settings(seconds=seconds)
    with malformed():
        lacks += _lacks(found, needs)
        layout = found["parallel_config"]
        abilities = Abilities(
            layout.get("worker_extension_cls") == WORKER,
            layout["world_size"] if layout["data_parallel_size"] == 1 else 0,
            engines=_engines(layout),
            sequences=found.get("scheduler_config", {}).get("max_num_seqs", 0),
            gives_parts=await client.gives_parts(seconds=seconds),
        )
        is_on_cpu = str(found["device_config"]["device"]) == "cpu"
        has_tokenizer = not found["model_config"]["skip_tokenizer_init"]
    ours = shape_of(preset_of_folder(folder))
    if abilities.is_extended and "/collective_rpc" in paths:
        lacks += _differences(ours, await client.model(seconds=seconds))
        # the server may have an earlier version of the extension
        with contextlib.suppress(ServerRefused):
            counts = await client.response_tokens(seconds=seconds)
            # If a server has several engines, only the first one answers.
            is_whole = layout["data_parallel_size"] == 1
            abilities = replace(abilities, counts_tokens=is_whole and counts is not None)
    elif is_on_cpu and ours.num_moe_experts:
        lacks.append(f"never replaces its first experts on a CPU: --worker-extension-cls {WORKER}")
    if needs.must_stream and not abilities.can_stream:
        lacks.append(
            "takes no weights from rank 0 (weight_transport nccl): "
            f"--worker-extension-cls {WORKER}, and no data parallelism"
        )
    text = needs.tokenized
    if text is not None and has_tokenizer:
        if await client.tokenize(text.text, seconds=seconds) != list(text.ids):
            lacks.append("has another tokenizer than data.tokenizer: --tokenizer")
    elif text is not None and text.is_needed:
        lacks.append("has no tokenizer to find the texts of rollout.stop with: --tokenizer")
    if lacks:
        raise RolloutError("; ".join(lacks))
    return abilities


def _engines(layout: Mapping[str, Any]) -> int:
    """Return the number of engines behind a server. If something else divides the requests among
    several servers with data parallelism, each server has only its own engines."""
    is_part = layout.get("data_parallel_external_lb") or layout.get("data_parallel_hybrid_lb")
    return layout["data_parallel_size_local" if is_part else "data_parallel_size"]


def _lacks(found: Mapping[str, Any], needs: Needs) -> Iterator[str]:
    """Yield what the server lacks. found: the server's own configuration."""
    model = found["model_config"]
    if model["logprobs_mode"] != "processed_logprobs":
        yield f"gives {model['logprobs_mode']}: --logprobs-mode processed_logprobs"
    if needs.with_routes and not model["enable_return_routed_experts"]:
        yield "gives no experts (routing r3): --enable-return-routed-experts"
    if model["dtype"].removeprefix("torch.") != needs.dtype:
        yield f"computes in {model['dtype']}: --dtype {needs.dtype}"
    if found["max_model_len"] < needs.max_model_len:
        yield f"takes {found['max_model_len']} tokens: --max-model-len {needs.max_model_len}"


def _differences(ours: ModelShape, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between the trainer's model and the server's config.json."""
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get("rope_type") == "deepseek_yarn":
        # For latent attention, vLLM writes the name of its own rotary layer into the configuration.
        config = {**config, "rope_parameters": {**rope, "rope_type": "yarn"}}
    try:
        preset = describe(config)
    except ConfigError as error:
        yield f"serves another kind of model: {', '.join(error.problems)}"
        return
    theirs = shape_of(preset)
    different = list(shape_conflicts(ours, preset))
    if not different:  # The weights fit. But the models may still compute differently.
        different = [
            (f"megatron.{name}", ours.megatron.get(name), theirs.megatron.get(name))
            for name in differences(ours, preset)
        ]
        for name in ("rotary_base", "rotary_percent", "rotary_llama3_factor"):
            if getattr(ours, name) != getattr(theirs, name):
                different.append((name, getattr(ours, name), getattr(theirs, name)))
    for key, own, its in different:
        value, wanted = format_value(its), format_value(own)
        yield f"serves a model of model.{key} = {value}, the trainer's has {wanted}"
