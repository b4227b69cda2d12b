"""A reward model's server in the process of the test. It answers like vLLM. The tests in tests/vllm
use a real server."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tests.unit.rollout.model_server import Answer, model_server


def score_of(ids: list[int]) -> float:
    """Return a made-up score that depends on all tokens and their order."""
    return sum((place + 3) * token for place, token in enumerate(ids)) % 41 / 7 - 3


def right(given: dict[str, Any]) -> dict[str, Any]:
    """Return the right answer to a request to /classify."""
    assert given["model"] == "scorer" and given["use_activation"] is False
    return {
        "data": [
            {"index": place, "label": "LABEL_0", "probs": [score_of(ids)], "num_classes": 1}
            for place, ids in enumerate(given["input"])
        ]
    }


def served(
    answer: Answer, tokens: list[int], keys: list[str | None] | None = None, longest: int = 4096
) -> AbstractContextManager[str]:
    """Serve a reward model. See `model_server`."""
    model = {"id": "scorer", "max_model_len": longest}
    return model_server(model, "/classify", answer, tokens, keys)
