"""Rules about model.lora in combination with other keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config.lora import LoraSection
from gspo_megatron.errors import ConfigError
from tests.unit.config.configs import config_with, problems_of
from tests.unit.hf.published import write_model

KL = ("objective.kl=k3", "objective.kl_coefficient=0.1")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.lora.checkpoint=somewhere"], "there are no adapters with model.lora.rank = 0"),
        *(
            ([f"model.lora.{word}"], "= 0; allowed: " + allowed + ", or set model.lora.rank")
            for word, allowed in (
                ("alpha=8.0", "null"),
                ("targets=attention", "['all']"),
                ("use_rslora=true", "false"),
            )
        ),
        (["model.lora.rank=4", "model.lora.targets=q_porj"], "no such matrices"),
        (["model.lora.rank=4", "model.lora.targets=[]"], "targets = []: no matrix has an adapter"),
        (
            ["model.lora.rank=4", "model.lora.targets=[attention, mlp]"],
            "model.lora.targets = 'mlp'",
        ),
        (["model.lora.rank=4", "parallel.layout=tp=4"], "need whole query groups on each rank"),
        (
            ["model.lora.rank=4", "model.megatron.moe_router_bias_update_rate=0.001"],
            "routers of a frozen model stay as they are",
        ),
        (
            ["model.lora.rank=4", "model.megatron.moe_shared_expert_intermediate_size=32"],
            "no Hugging Face family has such models",
        ),
        (
            ["model.lora.rank=4", *KL, "objective.reference_offload=true"],
            "objective.reference_offload = true: the reference is the policy without its adapters",
        ),
        (["model.lora.rank=-1"], "model.lora.rank"),
        (["model.lora.rank=4", "model.lora.alpha=0"], "model.lora.alpha"),
    ],
)
def test_what_does_not_fit_is_told(overrides: list[str], told: str) -> None:
    try:
        lines = problems_of(4, *overrides)
    except ConfigError as error:  # the schema refuses the value before the rules are used
        lines = error.problems
    assert any(told in line for line in lines), lines


def test_the_frozen_weights_of_a_run_are_not_random() -> None:
    lines = problems_of(1, "model.lora.rank=4", for_training=True)
    assert any("the frozen weights would be random" in line for line in lines)
    # `verify` and estimates work with random weights
    assert not problems_of(1, "model.lora.rank=4")


def test_a_copy_of_given_adapters_may_stay_in_host_memory() -> None:
    words = ("model.lora.rank=4", *KL, "objective.reference_offload=true")
    assert problems_of(1, *words, "model.lora.checkpoint=somewhere") == []


def test_other_targets_take_more_tensor_parallelism() -> None:
    assert not problems_of(
        4, "model.lora.rank=4", "parallel.layout=tp=4", "model.lora.targets=o_proj"
    )


def test_an_adapter_of_q_k_and_v_together_is_not_cut(tmp_path: Path) -> None:
    """The files of Ling have queries, keys and values in one matrix."""
    ling = write_model(tmp_path / "ling", "bailing_moe_v2", seed=1)
    words = (f"model.hf_path={ling}", "model.lora.rank=4")
    for targets in ("all", "attention", "query_key_value"):
        own = (*words, f"model.lora.targets={targets}")
        assert problems_of(1, *own) == []
        [line] = problems_of(2, *own, "parallel.layout=tp=2")
        assert line.startswith("parallel.tensor_model_parallel_size = 2: ")
        assert "q, k and v in one matrix, whose adapter cannot be cut; allowed: 1, or " in line
    others = "model.lora.targets=[dense, experts]"
    assert problems_of(2, *words, "parallel.layout=tp=2", others) == []


def test_the_scale_and_one_target_or_several() -> None:
    assert LoraSection(rank=16).scale == 1.0
    assert LoraSection(rank=16, alpha=32.0).scale == 2.0
    assert LoraSection(rank=16, alpha=32.0, use_rslora=True).scale == 8.0
    section = config_with("model.lora.targets=attention").model.lora
    assert section.targets == ["attention"]
    assert section.model_dump()["targets"] == "attention"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.lora.rank=0"], "there are no adapters with model.lora.rank = 0; allowed: merged"),
        (["model.lora.rank=513"], "vLLM takes adapters of rank 512 at most"),
        (
            ["rollout.vllm.servers=0", "rollout.vllm.urls=[http://a:1]"],
            "is for servers that the run starts, not for rollout.vllm.urls",
        ),
        (["rollout.vllm.weight_transport=nccl"], "adapters go to servers as files"),
        (
            ["rollout.kv_after_update=keep", "rollout.max_staleness=1"],
            "a response ends with the adapter that it began with",
        ),
        (["routing.replay=r3"], "(r3) were never tried with adapters; allowed: merged"),
        (["model.hf_path=null"], "servers load the base from model.hf_path; allowed: merged, or "),
        (
            ["model.lora.targets=[all, router]"],
            "vLLM does not apply adapters of the routers (gate); allowed: merged",
        ),
        (
            ["model.lora.targets=[attention, head]"],
            "vLLM does not apply adapters of the output layer (lm_head); allowed: merged",
        ),
        (["rollout.vllm.options.max_loras=9"], "the run sets it itself; allowed: leave it out"),
        (["rollout.engine=megatron"], "nothing reads it with rollout.engine = megatron"),
    ],
)
def test_adapters_that_servers_cannot_take(tmp_path: Path, overrides: list[str], told: str) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe", seed=1)
    served = ["rollout.engine=vllm", "rollout.vllm.servers=1", "rollout.vllm.lora=adapter"]
    served += [f"model.hf_path={model}", "model.lora.rank=4"]
    assert problems_of(1, *served) == []
    lines = problems_of(1, *served, *overrides)
    assert any(told in line for line in lines), lines


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("deepseek_v3", {}, "vLLM multiplies latent attention's matrices with each other"),
        ("gpt_oss", {}, "all experts of a layer are one tensor in its files"),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}},
            "load model.hf_path, which is not the model that is trained (weights in fp8)",
        ),
    ],
)
def test_models_whose_adapters_servers_do_not_apply(
    tmp_path: Path, family: str, changes: dict[str, Any], told: str
) -> None:
    model = write_model(tmp_path / "model", family, seed=1, **changes)
    served = ["rollout.engine=vllm", "rollout.vllm.servers=1", "model.lora.rank=4"]
    served += [f"model.hf_path={model}"]
    assert problems_of(1, *served) == []
    lines = problems_of(1, *served, "rollout.vllm.lora=adapter")
    assert [told in line for line in lines] == [True], lines
