"""examples/smollm2_moe/ratios.py: its figures against numpy, and its three ways to log-probs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_megatron.data.character_tokenizer import write_character_tokenizer
from gspo_megatron.platform.groups import stop_processes
from tests.unit.hf.published import write_model

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "smollm2_moe"))

import ratios


def test_figures_are_those_of_numpy() -> None:
    generator = torch.Generator().manual_seed(5)
    delta = 0.3 * torch.randn(7, 21, generator=generator, dtype=torch.float64)
    found = ratios.by_length(delta)
    assert [*found] == [8, 16]
    for length, row in found.items():
        part = delta.numpy()[:, :length]
        ratio = np.exp(part.mean(1))
        assert row["token"] == pytest.approx(part.std(ddof=1))
        assert row["sequence"] == pytest.approx(part.mean(1).std(ddof=1))
        assert row["predicted"] == pytest.approx(part.std(ddof=1) / np.sqrt(length))
        assert row["outside_run"] == np.mean((ratio < 0.96) | (ratio > 1.04))
        assert row["outside_paper"] == np.mean((ratio < 0.9997) | (ratio > 1.0004))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two models with other weights and the same tokenizer."""
    tokenizer = tmp_path / "tokenizer"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    write_character_tokenizer(tokenizer, ["Write a story."], 300, chat_template=template)
    folders = []
    for seed in (1, 2):
        folder = write_model(tmp_path / f"model_{seed}", "mixtral", seed=seed, vocab_size=300)
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
        folders.append(folder)
    return folders


def measure(old: Path, new: Path) -> dict[str, Any]:
    try:
        return ratios.measure(old, new, 16, "fp32")
    finally:
        stop_processes()


def test_only_another_model_changes_the_log_probs(folders: list[Path]) -> None:
    old, new = folders
    same, other = measure(old, old), measure(old, new)
    assert same["responses"] == len(ratios.TOPICS) * ratios.GROUP
    for length in (8, 16):
        # fp32: decoding and the forward pass differ by rounding only.
        assert same["engine"][length]["token"] < 1e-4
        assert same["engine"][length] == other["engine"][length]
        assert same["update"][length]["token"] == 0
        assert other["update"][length]["token"] > 0.01
