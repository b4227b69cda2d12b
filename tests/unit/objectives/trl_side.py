"""TRL's loss of a micro-batch of ours: `GRPOTrainer._compute_loss`, with only its model replaced.

TRL lays responses out as [sequences, longest]; it is imported when it is called.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.types import LossInputs

# How each objective reads in TRL. `epsilon_high` of CISPO is the cap itself, not its distance to 1.
SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "gspo_token": {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "grpo": {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.27},
    "dapo": {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "cispo": {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "luspo": {"loss_type": "luspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
}


@dataclass
class TrlResult:
    loss: Tensor  # scalar
    gradient: Tensor  # [tokens], in the flat order of the inputs
    entropy_gradient: Tensor | None  # [tokens]
    metrics: dict[str, float]


def trl_loss(
    name: str,
    level: str,
    inputs: LossInputs,
    *,
    steps: int = 1,
    longest: int = 40,
    importance_sampling_ratio: Tensor | None = None,
    rollout_for_mask: bool = False,
    **settings: Any,
) -> TrlResult:
    """One micro-batch of `steps` through TRL.

    `settings` are attributes of the trainer or of its arguments; `importance_sampling_ratio`
    [tokens] or [num_sequences] is what TRL computes when it samples with vLLM.
    """
    index = inputs.sequence_index
    starts = torch.searchsorted(index, torch.arange(len(inputs.advantages)))
    places = (index, torch.arange(len(index)) - starts[index])
    shape = (len(starts), int(places[1].max()) + 1)

    def padded(vector: Tensor, filling: float) -> Tensor:
        return torch.full(shape, filling, dtype=torch.float64).index_put(places, vector)

    flat = inputs.logprobs.detach().clone().requires_grad_()
    entropy = inputs.entropy.detach().clone().requires_grad_()
    # Padding has ratios far out of the range: it must not show.
    batch = {
        "prompt_ids": torch.zeros(shape[0], 2, dtype=torch.long),
        "prompt_mask": torch.ones(shape[0], 2),
        "completion_ids": torch.zeros(shape, dtype=torch.long),
        "completion_mask": padded(inputs.mask, 0.0),
        "advantages": inputs.advantages,
        "old_per_token_logps": padded(inputs.old_logprobs, -4.0),
        # over the generation batch, which is as many micro-batches as are accumulated
        "num_items_in_batch": torch.tensor(float(inputs.global_num_tokens)),
    }
    if inputs.token_advantages is not None:
        batch["advantages"] = padded(inputs.token_advantages, 5.0)
    if inputs.reference_logprobs is not None:
        batch["ref_per_token_logps"] = padded(inputs.reference_logprobs, -3.0)
    if rollout_for_mask:
        batch["sampling_per_token_logps"] = padded(inputs.rollout_logprobs, -2.0)
    if importance_sampling_ratio is not None:
        by_token = importance_sampling_ratio.shape == index.shape
        batch["importance_sampling_ratio"] = (
            padded(importance_sampling_ratio, 9.0)
            if by_token
            else importance_sampling_ratio[:, None]
        )
        settings |= {"use_vllm": True, "vllm_importance_sampling_correction": True}
    outputs = padded(flat, -1.0), padded(entropy, 7.0), None
    trainer = _trainer(level, outputs, steps, longest, SETTINGS[name] | settings)
    loss = trainer._compute_loss(None, batch)
    gradient, of_entropy = torch.autograd.grad(loss, (flat, entropy), allow_unused=True)
    metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    return TrlResult(loss.detach(), gradient, of_entropy, metrics)


def _trainer(
    level: str, outputs: tuple[Any, ...], steps: int, longest: int, settings: dict[str, Any]
) -> Any:
    """A trainer with no more than what its loss reads, on one process."""
    if level == "sequence_token":
        from trl.experimental.gspo_token import GRPOTrainer
    else:
        from trl.trainer.grpo_trainer import GRPOTrainer
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "steps_per_generation": steps,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.0625,  # its own 1.05 in float32, whatever the rest is: not exact
    }
    own = {
        "importance_sampling_level": level,
        "current_gradient_accumulation_steps": steps,
        "max_completion_length": longest,
        "beta": 0.0,  # no KL term
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
    }
    arguments |= {key: value for key, value in settings.items() if key in arguments}
    own |= {key: value for key, value in settings.items() if key not in arguments}
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    vars(trainer).update(
        own,
        args=SimpleNamespace(**arguments),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
            num_processes=1,
            sync_gradients=True,
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: outputs,
    )
    return trainer
