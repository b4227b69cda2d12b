"""Folders of preference models that transformers writes, and the scores that transformers computes
with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.unit.hf.published import write_model

PAD = 0


def write_score_model(path: Path, family: str, seed: int, **changes: Any) -> Path:
    """Write a folder of a model with random weights and a score head."""
    write_model(path, family, seed, files=1, **changes)
    file = path / "config.json"
    config = json.loads(file.read_text())
    name = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    config |= {
        "architectures": [name],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": PAD,
    }
    file.write_text(json.dumps(config))
    single = path / "model.safetensors"
    tensors = load_file(single)
    tensors.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed)
    size = (1, config["hidden_size"])
    embedding = tensors["model.embed_tokens.weight"]
    head = 0.2 * torch.randn(size, generator=generator)  # scores of about 1
    tensors["score.weight"] = head.to(embedding.dtype)
    save_file(tensors, single)
    return path


def scores_by_transformers(
    folder: Path, sequences: list[list[int]], pad: int = PAD
) -> tuple[str, dict, list]:
    """Return the class of the model, the complaints of transformers about its tensors, and the
    score of each sequence. The sequences are padded to one batch."""
    import transformers

    model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    model.eval()
    longest = max(map(len, sequences))
    ids = torch.full((len(sequences), longest), pad)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    assert logits.shape == (len(sequences), 1)
    return (
        type(model).__name__,
        {name: found for name, found in loading.items() if found},
        logits[:, 0].tolist(),
    )
