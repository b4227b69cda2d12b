"""The results of transformers for a folder. They are computed in a separate process, without
Megatron-Core and without the package's substitutes for CUDA."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass
class Answer:
    """The results of a model that AutoModelForCausalLM has loaded."""

    architecture: str
    complaints: dict[str, Any]  # tensors that are missing, unexpected or of a wrong shape
    logits: Tensor  # [length, vocabulary]
    continuations: list[list[int]]  # the greedy continuation of each prompt


def ask(folder: Path, ids: list[int], prompts: list[list[int]], count: int) -> Answer:
    import transformers

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    model.eval()
    continuations = []
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            continuations.append(tokens[len(prompt) :])
    complaints = {name: found for name, found in loading.items() if found}
    return Answer(type(model).__name__, complaints, logits, continuations)


@contextlib.contextmanager
def transformers_process() -> Iterator[ProcessPoolExecutor]:
    """One process that runs `ask`."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        yield executor
