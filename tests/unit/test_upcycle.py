"""tools/upcycle.py: transformers computes the same with a dense model and with the MoE that is made
from it."""

from __future__ import annotations

import math
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_megatron.errors import DataError
from gspo_megatron.families.model_shape import shape_of
from gspo_megatron.hf.files import HfFolder, checked_folder
from tests.programs import ROOT, peak_memory, run_program
from tests.unit.hf.preference_folder import write_score_model
from tests.unit.hf.published import VOCABULARY, read_folder, write_model
from tests.unit.hf.transformers_side import ask
from tools.upcycle import MOE_OF, Plan, upcycle

# The tolerance for fp32 logits of size 3 to 5 after four layers, because sums over experts have
# another order.
TOLERANCE = 2e-5
WHOLE = Plan(experts=4, top_k=2)
# transformers needs experts whose width is a multiple of 16 bytes.
VARIANTS: list[tuple[str, dict[str, Any], Plan]] = [
    ("llama", {"rope_scaling": None, "tie_word_embeddings": True}, WHOLE),
    (
        "llama",
        {"rope_scaling": None, "intermediate_size": 48},
        Plan(experts=12, top_k=8, granularity=4),
    ),
    ("qwen3", {}, WHOLE),
    ("qwen3", {"intermediate_size": 48}, Plan(experts=6, top_k=2, granularity=2)),
    ("qwen2", {}, WHOLE),
    ("qwen2", {}, Plan(experts=3, top_k=3, router_std=1.0)),
    ("qwen3_5_text", {}, WHOLE),
    ("qwen3_5_text", {}, Plan(experts=26, top_k=13, granularity=13)),
]


@pytest.mark.parametrize(("family", "changes", "plan"), VARIANTS, ids=str)
def test_without_noise_the_function_stays(
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    plan: Plan,
    transformers_side: ProcessPoolExecutor,
) -> None:
    dense = write_model(tmp_path / "dense", family, seed=6, **changes)
    upcycle(dense, tmp_path / "moe", plan)
    ids = random.Random(6).choices(range(VOCABULARY), k=40)
    before, after = (
        transformers_side.submit(ask, tmp_path / name, ids, [], 0).result()
        for name in ("dense", "moe")
    )
    assert not after.complaints
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=TOLERANCE)
    # The package also reads the model.
    folder = HfFolder(tmp_path / "moe")
    shape = shape_of(folder.describe())
    checked_folder(folder.path, shape, VOCABULARY)
    assert folder.config["model_type"] == MOE_OF[family]
    assert (shape.num_moe_experts, shape.moe_router_topk) == (plan.experts, plan.top_k)


def test_noise_makes_the_experts_differ(tmp_path: Path) -> None:
    dense = write_model(tmp_path / "dense", "qwen3", seed=6, torch_dtype="bfloat16")
    before = read_folder(dense)
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        upcycle(dense, tmp_path / name, Plan(experts=2, top_k=2, noise=0.1, seed=seed))
    one, same, other = (read_folder(tmp_path / name) for name in ("one", "same", "other"))
    assert all(torch.equal(one[name], same[name]) for name in one)
    layer = "model.layers.2.mlp."
    for part in ("gate", "up", "down"):
        old = before[f"{layer}{part}_proj.weight"].float()
        experts = [one[f"{layer}experts.{n}.{part}_proj.weight"].float() for n in range(2)]
        assert not torch.equal(*experts)
        for expert in experts:
            # The tensor has some 2,000 numbers, which are rounded to bf16.
            assert (expert - old).std() / old.std() == pytest.approx(0.1, rel=0.15)
    name = f"{layer}experts.0.up_proj.weight"
    assert one[name].dtype == torch.bfloat16 and not torch.equal(one[name], other[name])


def test_a_preference_model_keeps_its_head(tmp_path: Path) -> None:
    dense = write_score_model(tmp_path / "dense", "qwen3", seed=6)
    upcycle(dense, tmp_path / "moe", WHOLE)
    before, after = read_folder(dense), read_folder(tmp_path / "moe")
    assert torch.equal(after["score.weight"], before["score.weight"])
    folder = HfFolder(tmp_path / "moe")
    assert folder.config["architectures"] == ["Qwen3MoeForSequenceClassification"]
    checked_folder(folder.path, shape_of(folder.describe()), VOCABULARY)


def test_a_few_tensors_are_in_memory_at_one_time(tmp_path: Path) -> None:
    """Three tensors of 35 MB become twelve tensors of the same size. Memory that the process had
    before does not count."""
    dense = write_model(
        tmp_path / "dense", "qwen3", seed=6, intermediate_size=200_000, num_hidden_layers=1
    )
    script = str(ROOT / "tools" / "upcycle.py")
    start = peak_memory("-c", "import runpy; runpy.run_path(__import__('sys').argv[1])", script)
    sizes = ("--experts", "4", "--top-k", "2")
    peak = peak_memory(script, str(dense), str(tmp_path / "moe"), *sizes)
    written = sum(tensor.nbytes for tensor in read_folder(tmp_path / "moe").values())
    assert written > 420e6 and peak - start < written / 2, f"{(peak - start) / 1e6:.0f} MB"


@pytest.mark.parametrize(
    ("family", "plan", "message"),
    [
        ("qwen3_moe", WHOLE, "qwen3_moe is no dense family; allowed: llama, qwen2"),
        ("qwen3", Plan(4, 5), r"--top-k 5: must be from 2 to --experts 4"),
        ("qwen3", Plan(4, 1), r"--top-k 1: must be from 2 to --experts 4"),
        ("qwen3", Plan(4, 2, 3), r"--granularity 3: must divide the width of the MLP, 52"),
        ("qwen3", Plan(6, 2, 4), r"--experts 6: must be a multiple of --granularity 4"),
        ("qwen3", Plan(4, 3, 2), r"--top-k 3: must be a multiple of --granularity 2"),
        ("qwen3", Plan(4, 2, router_std=0.0), r"--router-std 0.0: must be a number above 0"),
        ("qwen3", Plan(4, 2, noise=math.nan), r"--noise nan: must be a number of at least 0"),
        ("llama", WHOLE, r"config.json: mixtral, its MoE family, has no such models"),  # llama3
    ],
    ids=str,
)
def test_what_cannot_be(tmp_path: Path, family: str, plan: Plan, message: str) -> None:
    dense = write_model(tmp_path / "dense", family, seed=6)
    with pytest.raises(DataError, match=message):
        upcycle(dense, tmp_path / "moe", plan)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]  # no partly written folder


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    script = [ROOT / "tools" / "upcycle.py", tmp_path / "dense", tmp_path / "moe"]
    sizes = ["--experts", "2", "--top-k", "2"]
    done = run_program(sys.executable, *script, *sizes, expect=2)
    assert done.stderr == f"{tmp_path / 'dense'}: no such folder\n"
    write_model(tmp_path / "dense", "qwen3", seed=6)
    done = run_program(sys.executable, *script, *sizes)
    assert done.stdout == f"{tmp_path / 'moe'}: 2 experts, 2 for each token\n"
    with pytest.raises(DataError, match="moe: has files in it already"):
        upcycle(tmp_path / "dense", tmp_path / "moe", Plan(experts=2, top_k=2))
