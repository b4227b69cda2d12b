"""Initial weights. Each weight is a piece of a global tensor, whose values depend only on the seed
and the tensor's name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gspo_megatron.models.build import Policy
from gspo_megatron.models.initialize import initialize_weights
from gspo_megatron.models.shards import Shard, parameter_shards
from tests.unit.models.one_rank import VOCABULARY, tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")

SHAPES = {
    "experts": {},
    "shared expert": {"moe_shared_expert_intermediate_size": 32},
    "dense": {
        "num_moe_experts": None,
        "moe_token_dispatcher_type": "alltoall",
        "ffn_hidden_size": 96,
    },
    "some dense layers": {"moe_layer_freq": [0, 1], "ffn_hidden_size": 96},
    "layer norm and biases": {"normalization": "LayerNorm", "add_qkv_bias": True},
}


def policy_of(name: str, seed: int = 1, **model: object) -> Policy:
    return tiny_policy(model={"megatron": SHAPES[name], **model}, training={"seed": seed})


def shards_of(policy: Policy) -> list[Shard]:
    return list(parameter_shards(policy.models[0]))


def values_of(policy: Policy) -> dict[str, Tensor]:
    """The values of every global tensor, joined from its pieces."""
    values: dict[str, Tensor] = {}
    for shard in shards_of(policy):
        whole = values.setdefault(shard.name, torch.full(shard.global_shape, math.nan))
        assert whole.shape == shard.global_shape, shard.name
        assert whole[shard.slices].isnan().all(), f"two pieces of {shard.name} overlap"
        whole[shard.slices] = shard.data.float()
    return values


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tied", [False, True])
def test_shards_cover_every_parameter_once(name: str, tied: bool) -> None:
    policy = policy_of(name, tie_embeddings=tied)
    counts = {id(p): torch.zeros_like(p) for p in policy.models[0].parameters()}
    for shard in shards_of(policy):
        shard.view(counts[id(shard.parameter)]).add_(1.0)
        assert torch.equal(shard.view(shard.parameter.detach().clone()), shard.data)
    for count in counts.values():
        assert count.unique().tolist() == [1.0]


def test_names_number_layers_and_experts() -> None:
    stacked = [shard for shard in shards_of(policy_of("experts")) if "experts.weight" in shard.name]
    assert len({shard.name for shard in stacked}) == len(stacked) == 2 * 2 * 8  # layers x experts
    shapes = {tuple(shard.data.shape) for shard in stacked}
    # the shapes of gate and up projection together, and of the down projection
    assert shapes == {(2, 64, 64), (64, 64)}


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_seed_gives_the_same_weights_whatever_ran_before(name: str) -> None:
    torch.manual_seed(1)
    first = values_of(policy_of(name))
    torch.manual_seed(99)
    torch.randn(17)
    second = values_of(policy_of(name))
    other_seed = values_of(policy_of(name, seed=2))
    assert first.keys() == second.keys() == other_seed.keys()
    for key, value in first.items():
        # An element that is never written is NaN, so the comparison would fail.
        assert torch.equal(value, second[key]), key
        if value.dim() >= 2:
            assert not torch.isclose(value[:VOCABULARY], other_seed[key][:VOCABULARY]).any(1).all()


def test_weights_do_not_depend_on_what_else_is_in_the_model() -> None:
    small = values_of(policy_of("experts"))
    deep = values_of(tiny_policy(model={"megatron": {"num_layers": 3}}))
    dense = values_of(policy_of("some dense layers"))
    compared = 0
    for name, value in small.items():
        # The initial values of these two kinds of weights depend on the number of layers.
        if "linear_proj" not in name and "weight2" not in name:
            assert torch.equal(value, deep[name]), name
        if name in dense:
            assert torch.equal(value, dense[name]), name
            compared += 1
    assert compared > 10


def test_every_matrix_is_drawn_apart() -> None:
    drawn = [value for value in values_of(policy_of("experts")).values() if value.dim() >= 2]
    starts = {tuple(value.flatten()[:4].tolist()) for value in drawn}
    assert len(starts) == len(drawn)


def test_spread_is_that_of_the_configuration() -> None:
    values = values_of(tiny_policy(model={"megatron": {"init_method_std": 0.05}}))
    for name, value in values.items():
        if value.dim() < 2:
            continue
        value = value[:VOCABULARY] if "embedding" in name or "output" in name else value
        residual = "linear_proj" in name or "weight2" in name
        # the factor is 1 / sqrt(2 * layers)
        expected = 0.05 / math.sqrt(2 * 2) if residual else 0.05
        # five times the standard error of the standard deviation of n samples
        error = 5.0 / math.sqrt(2 * value.numel())
        assert float(value.std()) == pytest.approx(expected, rel=error), name


def test_norms_start_at_one_and_biases_at_zero() -> None:
    for name, value in values_of(policy_of("layer norm and biases")).items():
        if value.dim() < 2:
            expected = 0.0 if name.split("[")[0].endswith("bias") else 1.0
            assert value.unique().tolist() == [expected], name


def test_vocabulary_padding_is_zero_and_does_not_shift_the_rest() -> None:
    policy = tiny_policy(vocab_size=37)
    model = policy.models[0]
    for weight in (model.embedding.word_embeddings.weight, model.output_layer.weight):
        assert weight.shape[0] == 48
        assert weight[37:].abs().max() == 0.0 and weight[:37].abs().min() > 0.0
    before = model.output_layer.weight.detach()[:37].clone()
    # With TP = 4, the padded vocabulary has 64 rows.
    wide = tiny_policy(vocab_size=64)
    initialize_weights(wide.models[0], wide.config, true_vocab_size=37, seed=1)
    assert torch.equal(wide.models[0].output_layer.weight[:37], before)
    assert wide.models[0].output_layer.weight[37:].abs().max() == 0.0


def test_bf16_weights_are_the_fp32_ones_rounded() -> None:
    full = values_of(policy_of("experts"))
    rounded = tiny_policy(training={"precision": "bf16"})
    for name, value in values_of(rounded).items():
        assert torch.equal(value, full[name].bfloat16().float()), name


def test_adapters_begin_as_pefts_do() -> None:
    """A is uniform between ±1 / sqrt(columns). B is zero, so the adapter changes nothing."""
    values = values_of(tiny_policy(model={"lora": {"rank": 16}}))
    adapters = {name: value for name, value in values.items() if ".lora." in name}
    first = [value for name, value in adapters.items() if name.split("[")[0].endswith(".a")]
    assert 0 < len(first) == len(adapters) / 2
    for name, value in adapters.items():
        if name.split("[")[0].endswith(".b"):
            assert not value.any(), name
            continue
        bound, count = value.shape[1] ** -0.5, value.numel()
        assert float(value.abs().max()) <= bound, name
        # five standard errors
        assert abs(float(value.mean())) < 5 * bound / math.sqrt(3 * count), name
        assert float(value.std()) == pytest.approx(bound / math.sqrt(3), rel=5 / count**0.5), name
