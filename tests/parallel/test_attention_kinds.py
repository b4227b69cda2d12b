"""The update is the same on every layout for all kinds of attention, positions and experts, and for
padding tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.verify.parity import run_update
from gspo_megatron.verify.results import StepResult
from tests.parallel.pool import Pool
from tests.parallel.updates import (
    FP32_TOLERANCE,
    assert_same_gradients,
    assert_same_update,
    update,
    update_from_folder,
)
from tests.unit.hf.policies import config_of
from tests.unit.hf.published import DELTA_NETS, VOCABULARY, write_model

# Some families have special kinds of attention: latent attention with YaRN from 8 tokens on;
# rotary positions for half of each head, with biases; and gated delta nets beside attention with an
# output gate.
YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 8}
# The tolerance is that of fp32 even in fp64: Megatron-Core computes output gates' sigmoid in fp32.
FP32_GATES = 1e-7
MODELS: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "deepseek_v3": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    "glm4_moe": {},
    "minimax_m2": {},  # has norms over all heads; half of each head has rotary positions
    # Rotates neighbouring channels, and has the package's own router.
    "ernie4_5_moe": {"tie_word_embeddings": True},
    "llama": {},
    "qwen3_next": {"num_attention_heads": 8, "hidden_size": 48},
    "qwen3_5_moe_text": {"num_attention_heads": 8, "hidden_size": 48},
    "gpt_oss": {},  # windows of 6 tokens, sinks, biases of experts
    "qwen3_5_text": {"num_attention_heads": 8, "hidden_size": 48},
}


def _update(pool: Pool, folder: Path, layout: str, function: Any = run_update) -> StepResult:
    # The gradient of a delta net's decay is a sum of terms that nearly cancel. In fp32 its rounding
    # would hide mistakes.
    dtype = "float64" if folder.name in DELTA_NETS else "float32"
    # The weights are large, because mistakes hardly change the results of a model with usual
    # initial weights.
    config = config_of(folder, dtype, layout=layout, init_method_std=0.15)
    return update(pool, config, function, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models. The weights are random, and the same on every layout."""
    root = tmp_path_factory.mktemp("models")
    for family, changes in MODELS.items():
        write_model(root / family, family, seed=1, **changes)
    return root


@pytest.fixture(scope="module")
def references(pool: Pool, folders: Path) -> dict[str, StepResult]:
    return {name: _update(pool, folders / name, "tp=1") for name in MODELS}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("olmoe", "tp=2"),
        pytest.param("olmoe", "tp=2,pp=2,ep=2", marks=pytest.mark.full),
        pytest.param("olmoe", "cp=2", marks=pytest.mark.full),
        ("deepseek_v3", "tp=2"),
        ("deepseek_v3", "cp=2"),
        ("deepseek_v3", "tp=2,pp=2,ep=2"),
        pytest.param("deepseek_v3", "tp=2,cp=2", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "pp=2,vpp=2", marks=pytest.mark.full),
        ("glm4_moe", "tp=2,pp=2,ep=2"),
        pytest.param("glm4_moe", "cp=2", marks=pytest.mark.full),
        ("minimax_m2", "tp=2,pp=2,ep=2"),
        ("minimax_m2", "cp=2"),
        ("ernie4_5_moe", "tp=2,pp=2,ep=2"),
        ("ernie4_5_moe", "cp=2"),
        pytest.param("llama", "tp=2,cp=2", marks=pytest.mark.full),
        ("qwen3_next", "tp=2"),
        ("qwen3_next", "tp=2,pp=2,ep=2"),
        pytest.param("qwen3_5_moe_text", "tp=2,pp=2,ep=2", marks=pytest.mark.full),
        pytest.param("qwen3_5_text", "tp=2", marks=pytest.mark.full),
        pytest.param("qwen3_next", "pp=2,vpp=2", marks=pytest.mark.full),
        ("gpt_oss", "tp=2,pp=2,ep=2"),
        ("gpt_oss", "cp=2"),
        pytest.param("gpt_oss", "tp=2,cp=2,ep=2", marks=pytest.mark.full),
    ],
)
def test_the_update_is_that_of_one_rank(
    pool: Pool, folders: Path, references: dict[str, StepResult], family: str, layout: str
) -> None:
    result = _update(pool, folders / family, layout)
    tolerance = FP32_GATES if family in DELTA_NETS else FP32_TOLERANCE
    assert_same_update(result, references[family], tolerance)


def test_more_ranks_than_query_groups_share_the_gates_of_a_group(
    pool: Pool, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 8, "hidden_size": 48, "num_key_value_heads": 2}
    sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    folder = write_model(tmp_path / "qwen3_next", "qwen3_next", seed=1, **sizes)
    alone, shared = (_update(pool, folder, layout) for layout in ("tp=1", "tp=4"))
    assert_same_update(shared, alone, FP32_GATES)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_padding_token_gives_the_embedding_no_gradient(
    pool: Pool, tmp_path: Path, tied: bool
) -> None:
    """The token is the pad_token_id of config.json. Its row may be on any shard of the
    vocabulary."""
    padding = 7
    changes = {"pad_token_id": padding, "tie_word_embeddings": tied}
    folder = write_model(tmp_path / "model", "qwen3_moe", seed=1, **changes)
    alone = _update(pool, folder, "tp=1", update_from_folder)
    row = alone.gradients["embedding.word_embeddings.weight"][padding]
    assert bool(row.any()) == tied  # a tied row gets the gradient of the output layer
    for layout in ("tp=2", "pp=2,cp=2"):
        result = _update(pool, folder, layout, update_from_folder)
        assert_same_gradients(result, alone, FP32_TOLERANCE)
