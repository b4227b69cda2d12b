"""The policy, compared with transformers' Qwen MoE models that have the same weights.

The package packs ragged sequences into one micro-batch and uses Megatron's schedule. transformers
computes one sequence at a time. The tests compare the log-probs of responses, the entropies over
the vocabulary, and the gradient of a weighted sum of the log-probs for every parameter.

This file has its own map of the weights, so that the two sides share no code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM

from gspo_megatron.batching.micro_batches import (
    MicroBatchBuilder,
    forward_backward,
    response_logprobs,
)
from gspo_megatron.models.build import Policy
from tests.unit.models.one_rank import PAD, micro_batch, random_sequences, tiny_policy

VOCABULARY_MULTIPLE = 16

# Sizes that a wrong map could confuse are all different. The sizes of the experts' matrices are
# multiples of 4, so that torch uses its grouped matmul in float32. Epsilon is so large that a wrong
# epsilon would change the results.
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 52,
    "moe_intermediate_size": 28,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64 where a model's code asks for float32 by name. This happens in
    norms, rotary angles, the softmax of attention, and the softmax of both routers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_widened(value) for value in args)
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def random_model(
    kind: type[PreTrainedModel], seed: int, dtype: torch.dtype, **config: Any
) -> PreTrainedModel:
    """A model of SIZES, with transformers' simplest implementations. Weights have a standard
    deviation of 0.25. Norms and biases differ from their initial values."""
    model = kind._from_config(
        kind.config_class(**SIZES | config),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.25 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + noise if name.endswith("norm.weight") else noise)
    return model.to(dtype)


@dataclass
class Outcome:
    """The results of a model for the tokens of all responses (one after the other), and the
    gradients of a weighted sum of their log-probs."""

    logprobs: Tensor  # [response tokens]
    entropies: Tensor  # [response tokens]
    gradients: dict[str, Tensor]  # with our names and in our layout


def run_reference(
    model: PreTrainedModel,
    sequences: Sequence[tuple[list[int], list[int]]],
    weights: Tensor,
    temperature: float,
) -> tuple[Outcome, float]:
    """Run `model` on each (prompt, response) separately, without padding. `weights` is [responses].

    Also returns how close the routers came to another choice: the smallest gap between the lowest
    logit of a chosen expert and the highest logit of an expert that was not chosen.
    """
    logprobs, entropies, gaps = [], [], []
    for prompt, response in sequences:
        output = model(input_ids=torch.tensor([prompt + response]), output_router_logits=True)
        logits = output.logits[0, len(prompt) - 1 : -1].double() / temperature
        rows = torch.log_softmax(logits, dim=-1)
        logprobs.append(rows.gather(1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1).detach())
        for router in output.router_logits:
            ordered = router.detach().sort(descending=True).values
            last = model.config.num_experts_per_tok
            gaps.append(float((ordered[:, last - 1] - ordered[:, last]).min()))
    joined = torch.cat(logprobs)
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad((weights * joined).sum(), parameters)
    ours = in_our_layout(dict(zip(names, gradients)), model.config)
    return Outcome(joined.detach(), torch.cat(entropies), ours), min(gaps)


def in_our_layout(
    tensors: Mapping[str, Tensor], config: PreTrainedConfig, padding: float = 0.0
) -> dict[str, Tensor]:
    """The parameters of a transformers model, or their gradients, with our names and in our shapes.

    `padding` is the value of the vocabulary's padding rows.
    """
    left = dict(tensors)
    ours = {
        "embedding.word_embeddings.weight": _pad(left.pop("model.embed_tokens.weight"), padding),
        "decoder.final_layernorm.weight": left.pop("model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        ours["output_layer.weight"] = _pad(left.pop("lm_head.weight"), padding)
    for number in range(config.num_hidden_layers):
        start = f"model.layers.{number}."
        layer = {
            name.removeprefix(start): left.pop(name)
            for name in list(left)
            if name.startswith(start)
        }
        renamed = _attention(layer, config.num_key_value_heads) | _mlp(layer)
        assert not layer, f"not mapped: {sorted(layer)}"
        ours |= {f"decoder.layers.{number}.{name}": value for name, value in renamed.items()}
    assert not left, f"not mapped: {sorted(left)}"
    return ours


def _pad(weight: Tensor, value: float) -> Tensor:
    rows = -len(weight) % VOCABULARY_MULTIPLE
    return torch.cat([weight, weight.new_full((rows, weight.shape[1]), value)])


def _attention(layer: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """Take the attention tensors out of `layer`, and return them in our layout, which has queries,
    key and value of each group together."""
    ours = {
        "input_layernorm.weight": layer.pop("input_layernorm.weight"),
        "pre_mlp_layernorm.weight": layer.pop("post_attention_layernorm.weight"),
        "self_attention.linear_proj.weight": layer.pop("self_attn.o_proj.weight"),
    }
    for kind in ("weight", "bias"):
        parts = [layer.pop(f"self_attn.{part}_proj.{kind}", None) for part in "qkv"]
        if parts[0] is not None:
            by_group = [part.unflatten(0, (groups, -1)) for part in parts]
            ours[f"self_attention.linear_qkv.{kind}"] = torch.cat(by_group, dim=1).flatten(0, 1)
    for part in "qk":
        norm = layer.pop(f"self_attn.{part}_norm.weight", None)
        if norm is not None:
            ours[f"self_attention.{part}_layernorm.weight"] = norm
    return ours


def _mlp(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the MLP tensors out of `layer`, and return them in our layout. These tensors belong to a
    dense MLP, or to experts and possibly a shared expert."""
    if "mlp.gate.weight" not in layer:
        return _dense(layer, "mlp.", "mlp.")
    ours = {
        "mlp.router.weight": layer.pop("mlp.gate.weight"),
        # From [experts, gate then up, hidden] to [experts, 2, expert width, hidden].
        "mlp.experts.weight1": layer.pop("mlp.experts.gate_up_proj").unflatten(1, (2, -1)),
        "mlp.experts.weight2": layer.pop("mlp.experts.down_proj"),
    }
    if "mlp.shared_expert_gate.weight" in layer:
        ours["mlp.shared_experts.gate_weight"] = layer.pop("mlp.shared_expert_gate.weight")
        ours |= _dense(layer, "mlp.shared_expert.", "mlp.shared_experts.")
    return ours


def _dense(layer: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    gate, up, down = (layer.pop(f"{theirs}{part}_proj.weight") for part in ("gate", "up", "down"))
    return {f"{ours}linear_fc1.weight": torch.cat([gate, up]), f"{ours}linear_fc2.weight": down}


# --- The policy against these models, with the same weights --------------------------------------

pytestmark = pytest.mark.usefixtures("one_rank")

FIGURES = ("logprobs", "entropies")  # every other result that is compared is a gradient
LENGTHS = [(3, 5), (1, 1), (9, 2), (2, 17), (4, 1), (6, 8)]


@dataclass(frozen=True)
class Case:
    """One model, as configured in transformers and in Megatron-Core."""

    theirs: dict[str, Any]
    experts_in_layer: list[int]  # 1 if the layer has experts, 0 if its MLP is dense
    tied: bool = False
    megatron: dict[str, Any] = field(default_factory=dict)
    kind: type[PreTrainedModel] = Qwen3MoeForCausalLM


@dataclass(frozen=True)
class Run:
    seed: int
    temperature: float
    padded: bool = False  # if True, each sequence is a padded row of the micro-batch

    def __str__(self) -> str:
        layout = "padded" if self.padded else "packed"
        return f"{layout}, temperature {self.temperature}, seed {self.seed}"


RUNS = [Run(1, 0.7), Run(3, 1.6), Run(4, 0.7, padded=True)]

CASES = {
    "qwen3 with a dense layer": Case(
        {"norm_topk_prob": True, "mlp_only_layers": [1], "pad_token_id": 5},
        experts_in_layer=[1, 0, 1],
    ),
    "qwen3 tied, experts in every second layer": Case(
        {"norm_topk_prob": True, "decoder_sparse_step": 2, "pad_token_id": 5},
        experts_in_layer=[0, 1, 0],
        tied=True,
    ),
    "qwen3 with a softmax over all experts": Case(
        {"norm_topk_prob": False},
        experts_in_layer=[1, 1, 1],
        megatron={"moe_router_pre_softmax": True},
    ),
    "qwen2 with a gated shared expert": Case(
        {"norm_topk_prob": True, "mlp_only_layers": [2], "shared_expert_intermediate_size": 36},
        experts_in_layer=[1, 1, 0],
        megatron={
            "moe_shared_expert_intermediate_size": 36,
            "moe_shared_expert_gate": True,
            "add_qkv_bias": True,
            "qk_layernorm": False,
        },
        kind=Qwen2MoeForCausalLM,
    ),
}


def policy_like(model: PreTrainedModel, case: Case, dtype: torch.dtype) -> Policy:
    """Our policy with the weights of `model`. The padding rows of the vocabulary are filled with
    ones."""
    policy = tiny_policy(
        SIZES["vocab_size"],
        training={"precision": "fp64" if dtype == torch.float64 else "fp32"},
        model={
            "backend": "torch_native",
            "rotary_base": SIZES["rope_parameters"]["rope_theta"],
            "tie_embeddings": case.tied,
            "megatron": {
                "num_layers": SIZES["num_hidden_layers"],
                "hidden_size": SIZES["hidden_size"],
                "num_attention_heads": SIZES["num_attention_heads"],
                "num_query_groups": SIZES["num_key_value_heads"],
                "kv_channels": SIZES["head_dim"],
                "ffn_hidden_size": SIZES["intermediate_size"],
                "moe_ffn_hidden_size": SIZES["moe_intermediate_size"],
                "num_moe_experts": SIZES["num_experts"],
                "moe_router_topk": SIZES["num_experts_per_tok"],
                "layernorm_epsilon": SIZES["rms_norm_eps"],
                "moe_layer_freq": case.experts_in_layer,
                **case.megatron,
            },
        },
    )
    ours = policy.models[0]
    rotary = ours.rotary_pos_emb.stock
    rotary.inv_freq = rotary.inv_freq.to(dtype)
    weights = in_our_layout(dict(model.named_parameters()), model.config, padding=1.0)
    assert weights.keys() == dict(ours.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name])
    policy.set_padding_token({"pad_token_id": model.config.pad_token_id})
    return policy


def run_ours(
    policy: Policy, sequences: list[tuple[list[int], list[int]]], weights: Tensor, run: Run
) -> Outcome:
    builder = MicroBatchBuilder(policy, PAD, run.temperature, padded=run.padded)
    batch = micro_batch(builder, sequences)
    [(logprobs, entropies)] = response_logprobs(policy, [batch])
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    forward_backward(
        policy, [batch], lambda _, new, __: ((weights * new).sum(), None), total_micro_batches=1
    )
    parameters = policy.models[0].named_parameters()
    gradients = {name: parameter.main_grad for name, parameter in parameters}
    return Outcome(logprobs, entropies, gradients)


def run_both(name: str, run: Run, dtype: torch.dtype) -> tuple[Outcome, Outcome]:
    """The results of both models, which have the same weights."""
    case = CASES[name]
    sequences = random_sequences(run.seed, LENGTHS, SIZES["vocab_size"])
    generator = torch.Generator().manual_seed(run.seed)
    weights = torch.randn(sum(response for _, response in LENGTHS), generator=generator)
    with InFloat64() if dtype == torch.float64 else contextlib.nullcontext():
        kind = {"tie_word_embeddings": case.tied, **case.theirs}
        model = random_model(case.kind, run.seed, dtype, **kind)
        theirs, closest = run_reference(model, sequences, weights, run.temperature)
        ours = run_ours(policy_like(model, case, dtype), sequences, weights, run)
    # If two logits of a router were nearly equal, rounding could change the router's choice, and
    # the results would differ.
    assert closest > 1e-4
    return ours, theirs


def errors(value: Outcome, exact: Outcome) -> dict[str, float]:
    """The largest differences: of log-probs and entropies in nats, of gradients relative to the
    largest element of each parameter."""
    found = {}
    for name in FIGURES:
        found[name] = float((getattr(value, name).double() - getattr(exact, name)).abs().max())
    assert value.gradients.keys() == exact.gradients.keys()
    for name, gradient in exact.gradients.items():
        size = float(gradient.abs().max())
        assert size > 1e-2, f"{name} has next to no gradient to compare"
        assert value.gradients[name].shape == gradient.shape, name
        found[name] = float((value.gradients[name].double() - gradient).abs().max()) / size
    return found


def assert_within(found: dict[str, float], figures: float, gradients: float) -> None:
    limits = {name: figures if name in FIGURES else gradients for name in found}
    too_large = {name: error for name, error in found.items() if not error < limits[name]}
    assert not too_large


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_policy_is_the_model_of_transformers(name: str, run: Run) -> None:
    ours, theirs = run_both(name, run, torch.float64)
    assert ours.logprobs.dtype == torch.float64
    # Only the order of additions differs, which gives 2e-14 at worst.
    assert_within(errors(ours, theirs), figures=1e-11, gradients=1e-11)

    ours_32, theirs_32 = run_both(name, run, torch.float32)
    assert ours_32.logprobs.dtype == torch.float32
    # In float32, the policy's results may be somewhat farther from the exact values than those of
    # transformers, because the order of sums differs. In the worst case the errors of both are
    # about 1e-5, and the policy's error is 1.5 times as large.
    rounding = errors(theirs_32, theirs)
    assert_within(
        errors(ours_32, theirs),
        figures=5 * max(rounding[name] for name in FIGURES),
        gradients=5 * max(error for name, error in rounding.items() if name not in FIGURES),
    )
