"""The policy gets the pad_token_id of config.json, wherever its weights come from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_megatron.checkpoint import start
from gspo_megatron.checkpoint.resume import Start
from gspo_megatron.hf import load
from gspo_megatron.models.build import Policy

NO_LORA = SimpleNamespace(rank=0, checkpoint=None)


@pytest.mark.parametrize(
    ("hf", "token"),
    [
        ({"pad_token_id": 3}, 3),
        ({"pad_token_id": -1}, 36),
        ({"pad_token_id": None}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("source", ["hf_path", "checkpoint_path", "resumed"])
def test_it_is_that_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, hf: dict[str, Any], token: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf))
    monkeypatch.setattr(start, "damage_of", lambda *_: [])
    monkeypatch.setattr(start, "on_main", lambda _: tmp_path)
    for name in ("load_model", "load_rng"):
        monkeypatch.setattr(start, name, lambda *_, **__: tmp_path)
    monkeypatch.setattr(start, "read_model", lambda _: {"hf": hf})
    monkeypatch.setattr(load, "load_hf", lambda *_, **__: None)
    paths = {"hf_path": None, "checkpoint_path": None, source: str(tmp_path)}
    model = SimpleNamespace(**paths, lora=NO_LORA, ignore_custom_code=False)
    config: Any = SimpleNamespace(model=model)
    policy: Any = StubPolicy()
    beginning = Start(tmp_path if source == "resumed" else None)
    assert start.load_starting_weights(config, policy, beginning, None) == hf
    assert policy.models[0].padding_token == token


def test_random_weights_have_none() -> None:
    config: Any = SimpleNamespace(
        model=SimpleNamespace(hf_path=None, checkpoint_path=None, lora=NO_LORA)
    )
    policy: Any = StubPolicy()
    assert start.load_starting_weights(config, policy, Start(), None) is None
    assert policy.models[0].padding_token is None


class StubPolicy:
    vocab_size = 37
    shape = SimpleNamespace(scores=False)
    lora = None
    set_padding_token = Policy.set_padding_token

    def __init__(self) -> None:
        self.models = [SimpleNamespace(padding_token=None)]
