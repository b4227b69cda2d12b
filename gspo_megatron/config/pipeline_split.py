"""How layers fall on pipeline stages: evenly, or as a field of Megatron-Core's says otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gspo_megatron.config.parallel import Layout
from gspo_megatron.config.problems import problem

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
WITH_EMBEDDING = "account_for_embedding_in_pipeline_split"
WITH_LOSS = "account_for_loss_in_pipeline_split"
WRITTEN_OUT = "pipeline_model_parallel_layout"
_WAYS = ((FIRST, LAST), (WITH_EMBEDDING, WITH_LOSS), (WRITTEN_OUT,))


def stage_problems(layers: int, layout: Layout, megatron: dict[str, Any]) -> Iterator[str]:
    """What is wrong with `layers` on the stages of `layout`, given the fields in `megatron`."""
    used = [way for way in _WAYS if any(megatron.get(name) for name in way)]
    if len(used) > 1:
        names = [name for way in used for name in way if megatron.get(name)]
        yield problem(
            f"model.megatron.{names[-1]}",
            megatron[names[-1]],
            f"another way to place layers than {names[0]}; legal: one of the two",
        )
    elif not used:
        yield from _even(layers, layout)
    elif WRITTEN_OUT in used[0]:
        yield from _written_out(layers, layout, megatron[WRITTEN_OUT])
    elif FIRST in used[0]:
        yield from _first_and_last(layers, layout, megatron)
    else:
        extra = bool(megatron.get(WITH_EMBEDDING)) + bool(megatron.get(WITH_LOSS))
        chunks = layout.pp * (layout.vpp or 1)
        if (layers + extra) % chunks:
            yield problem(
                "parallel.pipeline_model_parallel_size",
                layout.pp,
                f"{layers} layers and {extra} for embedding and loss do not split evenly into "
                f"{_chunks(layout)} chunks; legal: pp * vpp that divides {layers + extra}",
            )


def _chunks(layout: Layout) -> str:
    return f"{layout.pp}" if layout.vpp is None else f"{layout.pp} * {layout.vpp}"


def _even(layers: int, layout: Layout) -> Iterator[str]:
    if layers % (layout.pp * (layout.vpp or 1)):
        yield problem(
            "parallel.pipeline_model_parallel_size",
            layout.pp,
            f"{layers} layers do not split evenly into {_chunks(layout)} chunks; "
            f"legal: pp * vpp that divides {layers}",
        )


def _first_and_last(layers: int, layout: Layout, megatron: dict[str, Any]) -> Iterator[str]:
    given = {name: megatron[name] for name in (FIRST, LAST) if megatron.get(name) is not None}
    chunks = layout.vpp or 1
    for name, count in given.items():
        if not isinstance(count, int) or not 0 < count < layers or count % chunks:
            rule = f", a multiple of vpp = {chunks}" if chunks > 1 else ""
            yield problem(f"model.megatron.{name}", count, f"legal: 1 to {layers - 1}{rule}")
            return
    stages, left = layout.pp - len(given), layers - sum(given.values())
    name, count = next(iter(given.items()))
    if stages < 0 or (stages == 0 and left) or (stages and (left <= 0 or left % (stages * chunks))):
        yield problem(
            f"model.megatron.{name}",
            count,
            f"leaves {left} of {layers} layers for {max(stages, 0)} other stages; "
            "legal: what they can share evenly",
        )


def _written_out(layers: int, layout: Layout, written: Any) -> Iterator[str]:
    key = f"model.megatron.{WRITTEN_OUT}"
    if not isinstance(written, str):
        yield problem(key, written, "legal: a text such as Et*3|t*4L")
        return
    text = written.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):  # Megatron-Core's own grammar
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
    stages = text.split("|")
    wanted = layout.pp * (layout.vpp or 1)
    if re.search(r"[^EtL|]", text):
        yield problem(key, written, "legal: E (embedding), t (a layer), L (loss), |, and t*3")
    elif len(stages) != wanted:
        yield problem(
            key, written, f"{len(stages)} stages; legal: pp * vpp = {_chunks(layout)} = {wanted}"
        )
    elif text.count("t") != layers:
        yield problem(key, written, f"{text.count('t')} layers; the model has {layers}")
    elif not re.fullmatch(r"E[t|]*L", text):
        yield problem(key, written, "legal: one E, at the start, and one L, at the end")
