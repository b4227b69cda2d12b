"""Decoding with a cache and plain layers, compared with full forward passes of Megatron-Core: for
each family, and for the options of routers and norms in fp32 and bf16."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from gspo_megatron.config import resolve_parallel
from gspo_megatron.models.attention import (
    COPY_COST,
    KeyValueCache,
    Spans,
    rotary_factor,
    rotary_frequencies,
)
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.decoding import (
    LocalExperts,
    LocalLayer,
    LocalLinear,
    _choose_by_stock_router,
    decoding,
)
from gspo_megatron.models.transformer_config import changed
from tests.unit.hf.policies import config_of
from tests.unit.hf.published import CONFIGS, VOCABULARY, write_model
from tests.unit.models.one_rank import hidden_states, random_sequences, tiny_policy

SEQUENCES = [prompt for prompt, _ in random_sequences(3, [(9, 0), (14, 0), (6, 0)])]
TOKENS = 4  # the number of decoded tokens of each sequence, after its prompt
# Layer options that no family sets.
PARTS = {
    "biases": {"num_moe_experts": None, "add_bias_linear": True, "add_qkv_bias": True},
    "layernorm": {"normalization": "LayerNorm"},
    "gated shared expert": {
        "moe_shared_expert_intermediate_size": 36,
        "moe_shared_expert_gate": True,
    },
    "allgather": {"moe_token_dispatcher_type": "allgather"},
}


@pytest.fixture(scope="module", params=[*CONFIGS, *PARTS])
def policy(
    request: pytest.FixtureRequest, one_rank: None, tmp_path_factory: pytest.TempPathFactory
) -> Policy:
    """A policy of each family, and of the tiny preset with each option."""
    name = request.param
    if name in PARTS:
        policy = tiny_policy(model={"megatron": {"init_method_std": 0.15, **PARTS[name]}})
    else:
        folder = write_model(tmp_path_factory.mktemp("models") / name, name, seed=1)
        config = config_of(folder, init_method_std=0.15)
        policy = build_policy(config, resolve_parallel(config, 1), VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.models[0].named_parameters():
            # These parameters begin as zeros or ones.
            if any(part in name for part in ("bias", "norm", "softmax_offset")):
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return policy


@torch.no_grad()
def decoded(policy: Policy, spans: Spans, long_rows: list[int]) -> Tensor:
    """The hidden states [sequences, TOKENS, hidden] of the last tokens of SEQUENCES, decoded one
    token a pass."""
    model = policy.models[0]
    prompts = [sequence[:-TOKENS] for sequence in SEQUENCES]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    padded = torch.zeros((len(prompts), int(lengths.max())), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return model(input_ids=ids, position_ids=positions, attention_mask=None)

    frequencies, factor = rotary_frequencies(model, 20), rotary_factor(model.config)
    cache = KeyValueCache(frequencies, len(rows), 20, factor)
    outputs = []
    with decoding(policy.models, cache):
        states = cache.start_prefill(padded.shape[1], lengths)
        forward(padded, torch.arange(padded.shape[1]).expand_as(padded))
        cache.place(states, rows, rows, lengths)
        for number in range(TOKENS):
            positions = lengths + number
            cache.start_token(positions, spans, torch.tensor(long_rows, dtype=torch.long))
            ids = torch.tensor([s[p] for s, p in zip(SEQUENCES, positions.tolist())])[:, None]
            outputs.append(forward(ids, positions[:, None]))
            spans.grow(20)
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def full_pass(policy: Policy) -> Tensor:
    """The same hidden states, from full forward passes."""
    return torch.stack([hidden_states(policy, sequence)[-TOKENS:] for sequence in SEQUENCES])


@pytest.mark.parametrize(
    ("spans", "long_rows"), [((0, 11, 11), []), ((1, 11, 6), [1]), ((2, 11, 3), [1, 0])], ids=str
)
def test_hidden_states_are_those_of_the_full_forward_pass(
    policy: Policy, spans: tuple[int, int, int], long_rows: list[int]
) -> None:
    policy.eval()
    found = decoded(policy, Spans(*spans), long_rows)
    # Both results are fp32 and differ only by the order of sums.
    torch.testing.assert_close(found, full_pass(policy), atol=1e-5, rtol=1e-5)


def test_plain_parts_are_in_use_while_decoding_and_gone_afterwards(policy: Policy) -> None:
    def parts() -> list[type]:
        return [type(module) for module in model.modules()]

    [model] = policy.models
    before, keys = parts(), list(model.state_dict())
    cache = KeyValueCache(rotary_frequencies(model, 20), 3, 20)
    with decoding(policy.models, cache):
        inside = parts()
        assert inside.count(LocalLayer) == before.count(TransformerLayer) > 0
        assert inside.count(LocalExperts) == before.count(MoELayer)
        assert inside.count(LocalLinear) > 0
        # While decoding, the model contains none of the layers of training.
        assert not set(inside) & {ColumnParallelLinear, RowParallelLinear, MoELayer}
    assert parts() == before and list(model.state_dict()) == keys


def test_decoding_leaves_no_tensor_that_training_cannot_use(policy: Policy) -> None:
    """Decoding runs in inference mode. A tensor that a module or cache keeps must not be created in
    that mode."""
    assert not inference_tensors()
    with torch.no_grad():
        found = decoded(policy, Spans(1, 11, 6), [1])
    assert not found.is_inference() and not inference_tensors()


def inference_tensors() -> list[Tensor]:
    gc.collect()
    tensors = (each for each in gc.get_objects() if isinstance(each, Tensor))
    return [tensor for tensor in tensors if tensor.is_inference()]


def test_spans_read_the_fewest_keys() -> None:
    source = random.Random(2)
    for _ in range(200):
        lengths = [round(source.lognormvariate(3, 1)) for _ in range(source.randrange(1, 12))]
        lengths = [length if source.random() < 0.8 else 0 for length in lengths]
        spans = Spans.of(lengths)

        def cost(limit: int, lengths: list[int] = lengths) -> int:
            above = sum(length > limit for length in lengths)
            return len(lengths) * limit + COPY_COST * above * max(lengths)

        assert spans.long_rows == sum(length > spans.others for length in lengths)
        assert spans.longest >= max(lengths) and spans.others >= 1
        assert cost(spans.others) == min(cost(max(limit, 1)) for limit in [*lengths, 1])


# --- The options of routers and norms -------------------------------------------------------------

SIGMOID = {"moe_router_score_function": "sigmoid"}
BIASED = {**SIGMOID, "moe_router_enable_expert_bias": True}
# Each token gets four experts from two groups of four. A plain top 4 would choose other experts.
GROUPS = {"moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax of all": {"moe_router_pre_softmax": True},
    "softmax, scaled": {"moe_router_topk_scaling_factor": 2.5},
    "softmax of all, scaled": {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 0.4,
    },
    "softmax, groups": {**GROUPS},
    "top 1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "top 3": {"moe_router_topk": 3},
    "sigmoid": SIGMOID,
    "sigmoid, scaled": {**SIGMOID, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid, expert bias": BIASED,
    "sigmoid, expert bias, groups, scaled": {
        **BIASED,
        **GROUPS,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "losses": {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
}
DTYPES = [None, "fp32", "fp64"]  # dtypes of routers; None: the dtype of the states
NORMS: dict[str, dict[str, Any]] = {
    "RMSNorm": {"normalization": "RMSNorm", "qk_layernorm": False},
    "RMSNorm, of heads": {"normalization": "RMSNorm", "qk_layernorm": True},
    "RMSNorm, around zero": {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": False,
    },
    "RMSNorm, around zero, of heads": {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
    },
    "LayerNorm": {"normalization": "LayerNorm", "qk_layernorm": False},
    "LayerNorm, of heads": {"normalization": "LayerNorm", "qk_layernorm": True},
    "LayerNorm, around zero": {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
    },
    "epsilon": {"normalization": "RMSNorm", "qk_layernorm": True, "layernorm_epsilon": 0.5},
}


def policy_with(precision: str, **megatron: Any) -> Policy:
    """A policy in which the weights of norms and biases are far from their initial values."""
    policy = tiny_policy(
        model={"megatron": {"init_method_std": 0.15, **megatron}}, training={"precision": precision}
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        named = [*policy.models[0].named_parameters(), *policy.models[0].named_buffers()]
        for name, values in named:
            if ("bias" in name or "norm" in name) and values.is_floating_point():
                values += 0.2 * torch.randn(values.shape, generator=generator).to(values.dtype)
    policy.models[0].eval()
    return policy


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.usefixtures("one_rank")
def test_experts_and_weights_are_those_of_the_stock_router(name: str, precision: str) -> None:
    """Experts and weights are equal bit for bit, because one additional rounding of a weight could
    change sampled tokens."""
    policy = policy_with(precision, num_layers=1, **ROUTERS[name])
    mlp = policy.models[0].decoder.layers[0].mlp
    router, experts = mlp.router, LocalExperts(mlp)
    generator = torch.Generator().manual_seed(2)
    size = (40, 3, policy.config.hidden_size)
    states = torch.randn(size, generator=generator).to(policy.config.params_dtype)
    for dtype in DTYPES:
        with torch.no_grad(), changed([(router.config, "moe_router_dtype", dtype)]):
            expected = _choose_by_stock_router(router, states)
            for own, stock in zip(experts.choose(router, states), expected, strict=True):
                assert torch.equal(own, stock), dtype


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "options", ["softmax of all, scaled", "sigmoid, expert bias, groups, scaled", *NORMS]
)
@pytest.mark.usefixtures("one_rank")
def test_hidden_states_with_options_are_those_of_the_full_pass(
    options: str, precision: str
) -> None:
    """Two layers are enough, because the test above compares the choices of every router."""
    policy = policy_with(precision, **{**ROUTERS, **NORMS}[options])
    found, expected = decoded(policy, Spans(1, 11, 6), [1]).float(), full_pass(policy).float()
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)  # [sequences, tokens]
    # The order of sums differs, and in bf16 every operation rounds by up to 2^-9. Where two experts
    # are about equally probable, decoding may choose the other one. That happens for a few tokens.
    largest = error.flatten().sort(descending=True).values
    if precision == "fp32":
        assert largest[0] < 2e-6
    else:
        assert largest[2] < 0.03 and largest[len(largest) // 2] < 0.01
