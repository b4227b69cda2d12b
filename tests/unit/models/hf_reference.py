"""Transformers' Qwen models as an independent reference for the policy, and their weights in ours.

The map of the weights is written out here once more on purpose: it shares nothing with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY_MULTIPLE = 16

# All sizes that a wrong map could confuse differ. 4 divides those of the experts' matrices, so that
# float32 takes torch's grouped matmul. Epsilon is large enough to matter.
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
    """Computes in float64 what a model's code wants in float32 by name: their norms, rotary angles
    and attention, the softmax of both routers."""

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
    """A model of SIZES with weights of order 1 over the square root of its width, norms and biases
    that differ from where they start, and the plainest of its implementations."""
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
    """What a model makes of the responses, flat, and of a weighted sum of their log-probs."""

    logprobs: Tensor  # [responses]
    entropies: Tensor  # [responses]
    gradients: dict[str, Tensor]  # in our layout and by our names


def run_reference(
    model: PreTrainedModel,
    sequences: Sequence[tuple[list[int], list[int]]],
    weights: Tensor,
    temperature: float,
) -> tuple[Outcome, float]:
    """Run `model` over one (prompt, response) after the other, unpadded; `weights` [responses].

    Also returns how near its routers were to another choice: the smallest gap between the last
    logit that was in and the first that was out.
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
    """Transformers' parameters, or their gradients, under the names and in the shapes of ours.

    `padding` is what the vocabulary's padding rows are filled with.
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
    """Takes what it maps out of `layer`: queries, key and value come group by group in ours."""
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
    """Takes what it maps out of `layer`: a dense MLP, or experts and perhaps a shared one."""
    if "mlp.gate.weight" not in layer:
        return _dense(layer, "mlp.", "mlp.")
    ours = {
        "mlp.router.weight": layer.pop("mlp.gate.weight"),
        # [experts, gate then up, hidden] -> [experts, 2, expert width, hidden]
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
