"""The layers of pipeline stages: our rules accept the same divisions as Megatron-Core."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_megatron.config import Layout
from gspo_megatron.config.model_rules import (
    FIRST,
    LAST,
    WITH_EMBEDDING,
    WITH_LOSS,
    WRITTEN_OUT,
    stage_problems,
)


def problems(layers: int, layout: str, **megatron: Any) -> list[str]:
    found = stage_problems(layers, Layout.parse(layout), megatron)
    return [f"{key}: {wrong}" for key, wrong in found]


def megatron_takes(layers: int, layout: Layout, megatron: dict[str, Any]) -> bool:
    """Whether Megatron-Core accepts these stages. Megatron-Core checks a division into equal stages
    only when it builds the model, so no test asks about such a division."""
    with contextlib.suppress(ValueError, AssertionError, KeyError, ZeroDivisionError):
        TransformerConfig(
            num_layers=layers,
            hidden_size=16,
            num_attention_heads=2,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            pipeline_dtype=torch.float32,
            **megatron,
        )
        return True
    return False


def test_first_and_last_stage_are_judged_as_by_megatron_core() -> None:
    source = random.Random(1)
    for _ in range(60):
        layers, pp = source.randint(2, 12), source.randint(2, 4)
        layout = Layout(pp=pp, vpp=source.choice([None, 2]))
        names = source.choice([(FIRST,), (LAST,), (FIRST, LAST)])
        megatron = {name: source.randint(1, layers - 1) for name in names}
        found = list(stage_problems(layers, layout, megatron))
        # Megatron-Core accepts two stages that together have more layers than the model.
        takes = megatron_takes(layers, layout, megatron) and sum(megatron.values()) <= layers
        assert (not found) == takes, (layers, layout, megatron)


@pytest.mark.parametrize(("embedding", "loss"), [(True, False), (False, True), (True, True)])
def test_embedding_and_loss_as_layers_are_judged_as_by_megatron_core(
    embedding: bool, loss: bool
) -> None:
    for layers, pp, vpp in itertools.product(range(2, 9), (2, 3), (None, 2)):
        layout = Layout(pp=pp, vpp=vpp)
        megatron = {WITH_EMBEDDING: embedding, WITH_LOSS: loss}
        found = list(stage_problems(layers, layout, megatron))
        assert (not found) == megatron_takes(layers, layout, megatron), (layers, pp, vpp)


WRITTEN = ["Ett|ttL", "Et*3|tL", "E|t|tt|tL", "Ett|tt", "tEt|ttL", "Ett|tL", "Ex|ttttL",
           "Et|(t|)*2tL", "E(tt|)*2L", "EEt|tttL", "Ett|ttLL"]  # fmt: skip


@pytest.mark.parametrize("text", ["pp=2", "pp=4", "pp=2,vpp=2", "pp=3"])
def test_written_out_stages_are_judged_as_by_megatron_core(text: str) -> None:
    layout = Layout.parse(text)
    for written in WRITTEN:
        if layout.vpp is None and len(written.split("|")) > layout.pp:
            # Megatron-Core reads the additional stages as virtual stages, but our layout must name
            # virtual stages.
            continue
        found = problems(4, text, **{WRITTEN_OUT: written})
        takes = megatron_takes(4, layout, {WRITTEN_OUT: written})
        assert (not found) == takes, written


def test_messages_name_key_value_and_what_is_legal() -> None:
    assert problems(4, "pp=2", **{FIRST: 9}) == [f"model.megatron.{FIRST}: allowed: 1 to 3"]
    [line] = problems(4, "pp=2", **{FIRST: 1, LAST: 1})
    assert "leaves 2 of 4 layers for 0 other stages" in line
    [line] = problems(4, "pp=2", **{WRITTEN_OUT: "Et|tL"})
    assert line == f"model.megatron.{WRITTEN_OUT}: 2 layers; the model has 4"
    # In this division, the last stage does not contain the loss.
    [line] = problems(4, "pp=4", **{WRITTEN_OUT: "Ett||ttL|"})
    assert "one L, at the end" in line
    [line] = problems(4, "pp=2", **{WRITTEN_OUT: "Ett|ttL", FIRST: 2})
    assert "places the layers, as" in line
    [line] = problems(5, "pp=2,vpp=2")
    assert "5 layers do not split evenly into 2 * 2 chunks" in line
