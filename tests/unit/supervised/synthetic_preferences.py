"""Preferences of random tokens, made without files and tokenizers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from gspo_megatron.config import parse_config
from gspo_megatron.config.stages import PreferenceConfig
from gspo_megatron.data.preferences import Preference, PreferenceCounts, PreferenceData
from tests.parallel.models import NO_ROUTER_LOSSES, ODD_MOE, VOCAB_SIZE

SOURCES = ("code", "chat")


def preferences(
    count: int, seed: int, *, ratings: bool = False, most: int = 3, prompt: int = 0
) -> PreferenceData:
    """`count` prompts. Each prompt has 1 to `most` rejected responses with margins, or rated
    responses. All responses to it begin with the same `prompt` tokens."""
    draw = random.Random(seed)

    def one(number: int) -> tuple[Preference, str]:
        others = 0 if ratings else draw.randint(1, most)
        lengths = [draw.randint(1, 14) for _ in range(1 + others)]
        same = [draw.randrange(1, VOCAB_SIZE) for _ in range(prompt)]
        tokens: list[int] = []
        for length in lengths:
            tokens += same + [draw.randrange(1, VOCAB_SIZE) for _ in range(length)]
        lengths = [prompt + length for length in lengths]
        values = [draw.uniform(-1, 1)] if ratings else [draw.random() for _ in range(others)]
        arrays = np.array(tokens, np.int32), np.array(lengths, np.int64), np.array(values)
        return Preference(*arrays, source=0), SOURCES[number % 2]

    return PreferenceData((one(number) for number in range(count)), PreferenceCounts())


def preference_config(
    layout: str = "tp=1",
    *,
    training: dict[str, Any] | None = None,
    preference: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **megatron: Any,
) -> PreferenceConfig:
    """The stage reward_model with the tiny MoE of the layout tests, in fp64 unless `training` sets
    another precision."""
    values = {
        "model": {"megatron": {**ODD_MOE, **NO_ROUTER_LOSSES, **megatron}, **(model or {})},
        "parallel": {"layout": layout},
        "data": {"tokenizer": "none"},
        "preference": preference or {},
        "training": {"precision": "fp64", "batch_size": 8, "micro_batch_tokens": 48}
        | (training or {}),
    }
    return parse_config(values, (), "config", PreferenceConfig)
