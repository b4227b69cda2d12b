"""The results of PEFT with adapters on a model of transformers, computed in a separate process.

transformers keeps the gate and up projections of all experts as one tensor. For this tensor PEFT
has one pair of matrices of twice the rank. If the elements of B that would mix gate and up are
zero, this pair computes the same as one pair for gate and one for up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

RANK, ALPHA = 4, 6
RATE, CLIP, DECAY = 1e-2, 0.5, 0.1
EPSILON = 1e-3  # large, because Adam would amplify the rounding of a gradient that is nearly 0
_PREFIX = "base_model.model."


@dataclass
class Taught:
    """The results of a model with adapters, before and after updates of the adapters."""

    logits: Tensor  # [length, vocabulary]
    loss: float
    gradients: dict[str, Tensor]  # by their names in a PEFT file
    norm: float
    after: dict[int, dict[str, Tensor]]  # by the number of updates


def _model(folder: Path, targets: list[str], use_rslora: bool) -> Any:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=targets,
        use_rslora=use_rslora,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base, config)


def _pairs(model: Any) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (name of the module, A or B, parameter) for each adapter. An expert's name ends in
    base_layer or experts."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            stem, _, rest = name.partition(".lora_")
            yield stem, rest[0], parameter


def _of_file(stem: str, letter: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split A or B of an adapter into the tensors of a PEFT file, one for each matrix of each
    expert."""
    if not stem.endswith(("experts", "experts.base_layer")):
        yield f"{stem}.lora_{letter}.weight", value
        return
    start, is_down = stem.removesuffix(".base_layer"), stem.endswith("experts")
    rank = RANK if is_down else 2 * RANK
    # A is [experts * rank, in]. B is [out, rank * experts], and its columns alternate between the
    # experts.
    count = (value.shape[0] if letter == "A" else value.shape[1]) // rank
    if letter == "A":
        of_experts = value.view(count, rank, -1)
    else:
        of_experts = value.view(-1, rank, count).permute(2, 0, 1)
    for expert, matrix in enumerate(of_experts):
        parts = {"down_proj": matrix}
        if not is_down and letter == "A":
            parts = {"gate_proj": matrix[:RANK], "up_proj": matrix[RANK:]}
        elif not is_down:
            half = len(matrix) // 2
            parts = {"gate_proj": matrix[:half, :RANK], "up_proj": matrix[half:, RANK:]}
        for leaf, tensor in parts.items():
            yield f"{start}.{expert}.{leaf}.lora_{letter}.weight", tensor


def _between(stem: str, letter: str, value: Tensor) -> Tensor:
    """A mask of the elements of B that mix gate and up projection."""
    mixes = torch.zeros_like(value, dtype=torch.bool)
    if letter == "B" and stem.endswith("experts.base_layer"):
        half = len(value) // 2
        view = mixes.view(len(value), 2 * RANK, -1)
        view[:half, RANK:], view[half:, :RANK] = True, True
    return mixes


def _file(model: Any, part: str = "data") -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone().contiguous()
        for stem, letter, parameter in _pairs(model)
        for name, tensor in _of_file(stem, letter, getattr(parameter, part))
    }


def teach(folder: Path, out: Path, ids: list[int], targets: list[str], use_rslora: bool) -> Taught:
    """Write random adapters for the model in `folder` to `out`, and train them for five updates on
    the log-likelihood of `ids`."""
    model = _model(folder, targets, use_rslora).eval()
    generator = torch.Generator().manual_seed(11)
    for stem, letter, parameter in _pairs(model):
        drawn = 0.15 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(drawn.masked_fill(_between(stem, letter, drawn), 0.0))
    out.mkdir()
    start = _file(model)
    save_file(start, out / "adapter_model.safetensors", {"format": "pt"})
    leaves = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in start})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": leaves}
    config |= {"use_rslora": use_rslora, "base_model_name_or_path": str(folder), "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(config))

    trained = [parameter for _, _, parameter in _pairs(model)]
    optimizer = torch.optim.AdamW(
        trained, lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=DECAY
    )
    after, first = {}, None
    for update in range(1, 6):
        optimizer.zero_grad()
        logits = model(torch.tensor([ids])).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
        loss.backward()
        for stem, letter, parameter in _pairs(model):
            parameter.grad.masked_fill_(_between(stem, letter, parameter), 0.0)
        gradients = _file(model, "grad")
        norm = float(torch.nn.utils.clip_grad_norm_(trained, CLIP))
        first = first or Taught(logits.detach(), loss.item(), gradients, norm, after)
        optimizer.step()
        after[update] = _file(model)
    assert first is not None
    return first


def adapt_parameters(
    folder: Path, out: Path, ids: list[int], modules: list[str], parameters: list[str]
) -> Tensor:
    """Let PEFT write random adapters of some modules, and of parameters that contain all experts.
    Returns the logits [length, vocabulary] of the model with the adapters."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=modules,
        target_parameters=parameters,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config).eval()
    for _, _, parameter in _pairs(model):
        parameter.data.copy_(0.15 * torch.randn(parameter.shape))
    model.save_pretrained(out)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def logits_with(folder: Path, adapter: Path, ids: list[int]) -> Tensor:
    """The logits [length, vocabulary] of the model with an adapter that PEFT loads from a
    folder."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]
