"""Published models on 1,024 ranks: `check` accepts each run and finds that it fits into 80 GB."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from gspo_megatron.config import check_config, load_config
from gspo_megatron.families import FAMILIES, family_of, language_model
from tests.unit.cli.conftest import Command
from tests.unit.cli.test_check_estimate import pairs
from tests.unit.families.test_published_sizes import PUBLISHED

RANKS = 1024
# The options of `check`: two layouts for most models, and a table for models that need another
# layout or unequal stages.
EXPERTS = ("parallel.layout=tp=2,ep=4",)
DENSE = ("parallel.layout=tp=2",)
LAST = "model.megatron.num_layers_in_last_pipeline_stage"
WORDS: dict[str, tuple[str, ...]] = {
    "DeepSeek-V3": ("parallel.layout=tp=8,pp=8,ep=32", f"{LAST}=5"),
    "Kimi-K2": ("parallel.layout=tp=8,pp=8,ep=32", f"{LAST}=5"),
    "GLM-4.5": ("parallel.layout=tp=4,pp=4,ep=32",),
    "GLM-4.6": ("parallel.layout=tp=4,pp=4,ep=32",),
    "GLM-4.5-Air": ("parallel.layout=tp=4,pp=2,ep=16",),
    "GLM-4.7-Flash": ("parallel.layout=tp=4,ep=8,pp=2", f"{LAST}=23"),
    "Qwen3-235B-A22B": ("parallel.layout=tp=4,pp=2,ep=32",),
    "Qwen3-Coder-480B-A35B": ("parallel.layout=tp=8,pp=2,ep=32",),
    "Hy3-preview": ("parallel.layout=tp=8,pp=2,ep=32",),
    "Mixtral-8x22B": ("parallel.layout=tp=8,pp=4,ep=8",),
    "Mixtral-8x22B-Instruct": ("parallel.layout=tp=8,pp=4,ep=8",),
    "Qwen2-57B-A14B": ("parallel.layout=tp=4,ep=8",),
    "Mixtral-8x7B": ("parallel.layout=tp=4,ep=8",),
    "Llama-3.1-70B": ("parallel.layout=tp=8,pp=2",),
    "Qwen2.5-72B": ("parallel.layout=tp=8,pp=2",),
    "Qwen3-32B": ("parallel.layout=tp=8",),
    "MiniMax-M2": ("parallel.layout=tp=4,pp=2,ep=32",),
    "Ling-flash-2.0": ("parallel.layout=tp=4,pp=2,ep=16",),
    "Ling-1T": ("parallel.layout=tp=8,pp=8,ep=32",),
    "ERNIE-4.5-21B-A3B": EXPERTS,
    "ERNIE-4.5-300B-A47B": ("parallel.layout=tp=8,pp=2,ep=32",),
    "Qwen3-Next-80B-A3B": ("parallel.layout=tp=2,pp=4,ep=32",),
    "Qwen3-Next-80B-A3B-FP8": ("parallel.layout=tp=2,pp=4,ep=32",),
    "Qwen3-Coder-Next": ("parallel.layout=tp=2,pp=4,ep=32",),
    "Qwen3.5-122B-A10B": ("parallel.layout=tp=2,pp=4,ep=32",),
    "Qwen3.5-397B-A17B": ("parallel.layout=tp=2,pp=4,ep=64",),
    "Qwen3.5-27B": ("parallel.layout=tp=4,pp=2",),
    "gpt-oss-120b": ("parallel.layout=tp=4,pp=2,ep=32",),
}
CONFIG = """
data: {tokenizer: far, prompts: far.jsonl, max_prompt_tokens: 2048}
rollout: {group_size: 8, prompts_per_step: 1024, max_response_tokens: 4096, batch_size: 32}
reward: {name: math}
training: {steps: 200, precision: bf16, micro_batch_tokens: 8192, recompute: full}
model: {max_sequence_length: 6144}
"""
QUICK = ("Moonlight-16B-A3B",)
# Families with fewer than three different published config.json: later versions of their models
# (MiniMax-M2.5, Hy3, OLMoE of 2025) have the same sizes.
FEWER = {
    "qwen2_moe": 2,
    "glm4_moe_lite": 1,
    "hy_v3": 1,
    "minimax_m2": 1,
    "ernie4_5_moe": 2,
    "olmoe": 1,
    "gpt_oss": 2,
}


def words_of(name: str, folder: Path) -> list[str]:
    """The words of `check` for a published model. Its config.json is written to the folder."""
    hf, *_ = PUBLISHED[name]
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "run.yaml").write_text(CONFIG)
    has_experts = any("experts_per_tok" in key and n for key, n in language_model(hf).items())
    words = WORDS.get(name, EXPERTS if has_experts else DENSE)
    return [str(folder / "run.yaml"), f"model.hf_path={folder}", *words]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layout_is_legal(name: str, tmp_path: Path) -> None:
    config = load_config(*split(words_of(name, tmp_path)))
    check_config(config, RANKS, here=False)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in PUBLISHED],
)
def test_a_rank_of_each_stage_fits(name: str, tmp_path: Path, gspo: Command) -> None:
    """All ranks together have the number of parameters of the model card, without the layers that
    predict further tokens."""
    words = ("--no-files", f"--world-size={RANKS}", "--gpu-memory=80")
    code, out, err = gspo("check", *words_of(name, tmp_path), *words)
    assert (code, err) == (0, "")
    said = pairs(out)
    assert said["fits"] == "yes"
    assert int(said["parameters_total"]) / 1e9 == pytest.approx(PUBLISHED[name][1], rel=0.005)


def split(words: list[str]) -> tuple[Path, list[str]]:
    return Path(words[0]), words[1:]


def test_each_family_has_three_published_models() -> None:
    found = Counter(family_of(hf).model_type for hf, *_ in PUBLISHED.values())
    assert found == dict.fromkeys(FAMILIES, 3) | FEWER


def test_layers_that_no_number_of_stages_divides(tmp_path: Path, gspo: Command) -> None:
    """DeepSeek-V3 has 61 layers. `check` names the field that sets the layers of a stage, and
    accepts its value."""
    path, *words = words_of("DeepSeek-V3", tmp_path)
    words = ["check", path, "--no-files", f"--world-size={RANKS}", *words[:-1]]
    code, _, err = gspo(*words)
    assert code == 2
    assert err == (
        "parallel.pipeline_model_parallel_size = 8: 61 layers do not split evenly into 8 chunks; "
        f"allowed: pp * vpp that divides 61, or {LAST} = 5 (8 layers in each other stage)\n"
    )
    advised = err.partition(" or ")[2].partition(" (")[0].replace(" ", "")
    assert advised == WORDS["DeepSeek-V3"][1]
    of_both = [f"model.megatron.account_for_{part}_in_pipeline_split=true" for part in ("loss",)]
    _, _, err = gspo(*words, *of_both)
    assert f"or {LAST} = 5 (8 layers in each other stage), without " in err
    _, _, err = gspo(*words, "parallel.layout=tp=8,pp=8,vpp=2,ep=32")
    assert "or model.megatron.pipeline_model_parallel_layout, as in Et*3|t*4L" in err
