"""The losses and gradients of preference models, computed by transformers alone and by TRL's
RewardTrainer. These functions run in a separate process, without Megatron-Core and without the
package's substitutes for CUDA."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from tests.unit.hf.preference_folder import PAD
from tests.unit.hf.published import VOCABULARY

# (responses to a prompt, margins). The first response is the chosen one.
Group = tuple[list[list[int]], list[float]]
Step = tuple[float, dict[str, Tensor]]  # loss and gradients
NAMES = ["<pad>", "<eos>", *(f"t{n}" for n in range(2, VOCABULARY))]


def plain_step(folder: Path, groups: list[Group], center: float) -> Step:
    """The loss and gradients by the formulas, in float64, one sequence after the other."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped product does not support float64
        dtype=torch.float64,
    )
    # so the score is that of the last token, even if this is the padding token
    model.config.pad_token_id = None
    total = torch.zeros((), dtype=torch.float64)
    for responses, margins in groups:
        chosen, *rejected = (model(torch.tensor([ids])).logits[0, 0] for ids in responses)
        losses = [
            torch.log1p(torch.exp(-(chosen - other - margin))) + center * (chosen + other) ** 2
            for other, margin in zip(rejected, margins, strict=True)
        ]
        total = total + sum(losses) / len(losses)
    loss = total / len(groups)
    loss.backward()
    return float(loss), _gradients(model)


def trl_step(folder: Path, groups: list[Group], center: float, output: Path) -> Step:
    """The loss and gradients of TRL's trainer in fp32, with TRL's collator, padding and loss."""
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import RewardConfig, RewardTrainer

    words = Tokenizer(WordLevel({name: n for n, name in enumerate(NAMES)}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    rows = [
        {"chosen_ids": responses[0], "rejected_ids": responses[1], "margin": margins[0]}
        for responses, margins in groups
    ]
    arguments = RewardConfig(
        output_dir=str(output),
        per_device_train_batch_size=len(rows),
        center_rewards_coefficient=center,
        max_length=None,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
    )
    data = Dataset.from_list(rows)
    trainer = RewardTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert model.config.pad_token_id == PAD and math.isfinite(float(loss))
    return float(loss), _gradients(model)


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
