"""The biases of routers in bf16 models must never be rounded. Here they are near 7, and the next
bf16 number is 7.03. If they were rounded, all would be 7, and tokens would go to other experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from gspo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from gspo_megatron.checkpoint.tensors import load_model, save_tensors
from gspo_megatron.config import resolve_parallel
from gspo_megatron.families import family_of
from gspo_megatron.hf.export import export_hf, stream_hf
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.routing.replay import recorded
from tests.unit.hf.policies import config_of, logits_of, policy_of
from tests.unit.hf.published import (
    VOCABULARY,
    assert_same_bits,
    model_config,
    random_tensors,
    read_folder,
    write_folder,
)

pytestmark = pytest.mark.usefixtures("one_rank")
FAMILIES = ("deepseek_v3", "glm4_moe", "hy_v3", "minimax_m2", "bailing_moe_v2", "ernie4_5_moe")
IDS = list(range(VOCABULARY))


def is_bias(name: str) -> bool:
    return name.endswith(("e_score_correction_bias", "expert_bias"))


def folder_of(path: Path, family: str) -> Path:
    config = model_config(family, dtype="bfloat16")
    tensors = random_tensors(config, seed=8)
    generator = torch.Generator().manual_seed(8)
    for name, tensor in tensors.items():
        if is_bias(name):
            tensors[name] = 6.986 + 0.028 * torch.rand(tensor.shape, generator=generator)
            assert set(tensors[name].bfloat16().flatten().tolist()) == {7.0}
        elif name.endswith(".gate.weight"):
            tensor *= 0.05  # the scores differ as little as the biases
    return write_folder(path, config, tensors)


def routers(policy: Policy) -> list[TopKRouter]:
    return [m for m in policy.models[0].modules() if isinstance(m, TopKRouter)]


def empty_policy(folder: Path) -> Policy:
    config = config_of(folder, "bfloat16")
    return build_policy(config, resolve_parallel(config, 1), VOCABULARY)


def chosen(policy: Policy) -> Tensor:
    """The sorted experts of each token: [layers, tokens, k]."""
    attach_hooks(policy.models)
    with recorded() as experts:
        logits_of(policy, IDS)
    return torch.stack([experts[layer].long().sort(-1).values for layer in sorted(experts)])


@pytest.mark.parametrize("family", FAMILIES)
def test_no_way_rounds_them(tmp_path: Path, family: str) -> None:
    source = folder_of(tmp_path / "source", family)
    published = read_folder(source)
    hf = json.loads((source / "config.json").read_text())
    policy = policy_of(config_of(source, "bfloat16"))
    assert all(router.weight.dtype is torch.bfloat16 for router in routers(policy))
    right = chosen(policy)

    # First, the weights that are streamed to servers.
    stream = {n: t.clone() for n, t in stream_hf(policy, family=family_of(hf)) if t is not None}
    assert_same_bits(stream, published)
    # Then an export, loaded into a model that has already computed.
    export_hf(policy, tmp_path / "export", hf_config=hf)
    assert_same_bits(read_folder(tmp_path / "export"), published)
    load_hf(tmp_path / "export", policy)
    # Then a checkpoint, loaded into a model that has not computed yet.
    save_tensors(tmp_path / "checkpoint", policy, None, asynchronous=False).result()
    loaded = empty_policy(source)
    load_model(tmp_path / "checkpoint", loaded)
    # Last, a conversion of files, without a model.
    hf_to_megatron(source, tmp_path / "converted")
    megatron_to_hf(tmp_path / "converted", tmp_path / "back")
    assert_same_bits(read_folder(tmp_path / "back"), published)
    for each in (policy, loaded):
        assert all(router.expert_bias.dtype is torch.float32 for router in routers(each))
        assert torch.equal(chosen(each), right)

    for router in routers(policy):
        router.expert_bias = router.expert_bias.bfloat16().float()
    assert (chosen(policy) != right).any(-1).float().mean() > 0.1, "the test says little"
