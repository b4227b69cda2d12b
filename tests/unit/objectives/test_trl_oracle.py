"""The objectives against TRL's GRPO loss: value, gradient, clip fractions and entropy.

The code that computes the loss on the other side is TRL's own, `GRPOTrainer._compute_loss`; only
the model in it is replaced, by one that returns given log-probs.
"""

from __future__ import annotations

import importlib.util
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives import build_objective
from gspo_megatron.types import LossInputs, LossOutputs

# Not importorskip: a TRL that is installed and does not import is to fail here.
if importlib.util.find_spec("trl") is None:
    pytest.skip("trl, one of the dev requirements, is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")

# Our name and TRL's importance_sampling_level. With one advantage a sequence, GSPO and GSPO-token
# are the same thing: each has to agree with both of TRL's.
PAIRS = [
    ("gspo", "sequence"),
    ("gspo", "sequence_token"),
    ("gspo_token", "sequence"),
    ("gspo_token", "sequence_token"),
    ("grpo", "token"),
]

CLIP_RANGES = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "grpo": {"clip_low": 0.2, "clip_high": 0.27},
}
# The size of the log-ratios at which these bind for a part of them.
SPREADS = {"gspo": 1e-3, "gspo_token": 1e-3, "grpo": 0.4}

# Float64 on both sides: only the order of additions differs.
EXACT = {"rtol": 1e-11, "atol": 1e-14}
# TRL counts with float32 flags.
FRACTION = 1e-6

MakeInputs = Callable[..., LossInputs]


@dataclass
class TrlResult:
    loss: Tensor  # scalar
    gradient: Tensor  # [tokens], in the flat order of the inputs
    metrics: dict[str, float]


def our_loss(name: str, inputs: LossInputs) -> LossOutputs:
    section = ObjectiveSection(name=name, **CLIP_RANGES[name])
    return build_objective(section, max_response_tokens=40)(inputs)


def trl_loss(
    level: str, inputs: LossInputs, accumulation_steps: int = 1, **clip: float
) -> TrlResult:
    """One micro-batch of `accumulation_steps` through TRL, in its layout [sequences, longest]."""
    index = inputs.sequence_index
    starts = torch.searchsorted(index, torch.arange(len(inputs.advantages)))
    places = (index, torch.arange(len(index)) - starts[index])
    shape = (len(starts), int(places[1].max()) + 1)

    def padded(vector: Tensor, filling: float) -> Tensor:
        return torch.full(shape, filling, dtype=torch.float64).index_put(places, vector)

    flat = inputs.logprobs.detach().clone().requires_grad_()
    # Padding has ratios far out of the range: it must not show.
    logprobs, entropies = padded(flat, -1.0), padded(inputs.entropy, 7.0)
    advantages = inputs.advantages
    if inputs.token_advantages is not None:
        advantages = padded(inputs.token_advantages, 5.0)
    trainer = _trainer(level, logprobs, entropies, accumulation_steps, **clip)
    mask = padded(inputs.mask, 0.0)
    loss = trainer._compute_loss(
        None,
        {
            "prompt_ids": torch.zeros(shape[0], 2, dtype=torch.long),
            "prompt_mask": torch.ones(shape[0], 2),
            "completion_ids": torch.zeros(shape, dtype=torch.long),
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": padded(inputs.old_logprobs, -4.0),
        },
    )
    (gradient,) = torch.autograd.grad(loss, flat)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return TrlResult(loss.detach(), gradient, metrics)


def _trainer(
    level: str,
    logprobs: Tensor,
    entropies: Tensor,
    accumulation_steps: int,
    clip_low: float,
    clip_high: float,
) -> Any:
    """A trainer with no more than what its loss reads, on one process."""
    if level == "sequence_token":
        from trl.experimental.gspo_token import GRPOTrainer
    else:
        from trl.trainer.grpo_trainer import GRPOTrainer
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    vars(trainer).update(
        importance_sampling_level=level,
        loss_type="grpo",
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        current_gradient_accumulation_steps=accumulation_steps,
        beta=0.0,  # no KL term
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        args=SimpleNamespace(delta=None),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            gather=lambda value: value, reduce=lambda value, reduction: value
        ),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
    )
    return trainer


def ragged(make_inputs: MakeInputs, name: str, seed: int, **options: Any) -> LossInputs:
    """24 sequences of 1 to 40 tokens, with ratios to both sides of the objective's clip range."""
    rng = random.Random(seed)
    lengths = tuple(rng.randint(1, 40) for _ in range(24))
    inputs = make_inputs(seed, lengths, spread=SPREADS[name], **options)
    inputs.global_num_sequences = len(lengths)
    return inputs


def assert_same_loss(name: str, level: str, inputs: LossInputs, steps: int = 1) -> TrlResult:
    theirs = trl_loss(level, inputs, steps, **CLIP_RANGES[name])
    ours = our_loss(name, inputs)
    ours.loss.backward()
    torch.testing.assert_close(ours.loss.detach(), theirs.loss, **EXACT)
    torch.testing.assert_close(inputs.logprobs.grad, theirs.gradient, **EXACT)
    assert float(theirs.gradient.abs().max()) > 1e-4  # the comparison is not of zeros
    return theirs


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_loss_and_gradient_are_those_of_trl(name, level, seed, make_inputs):
    inputs = ragged(make_inputs, name, seed)
    theirs = assert_same_loss(name, level, inputs)
    # Both bounds bind, and what is neither of the two is compared as well.
    low, high = theirs.metrics["clip_ratio/low_mean"], theirs.metrics["clip_ratio/high_mean"]
    assert low > 0 and high > 0 and low + high < 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_clip_fractions_and_entropy_are_those_of_trl(name, level, seed, make_inputs):
    inputs = ragged(make_inputs, name, seed)
    theirs = trl_loss(level, inputs, **CLIP_RANGES[name]).metrics
    means = our_loss(name, inputs).means
    # TRL counts sequences where its ratio has one value a sequence, tokens elsewhere.
    ours = "clip/sequence" if level == "sequence" else "clip/token"
    pairs = {"low": "low_mean", "high": "high_mean", "binding": "region_mean"}
    for key, their_key in pairs.items():
        numerator, denominator = means[f"{ours}/{key}"].tolist()
        expected = pytest.approx(theirs[f"clip_ratio/{their_key}"], rel=FRACTION)
        assert numerator / denominator == expected, key
    numerator, denominator = means["policy/entropy"].tolist()
    assert numerator / denominator == pytest.approx(theirs["entropy"], rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "level"), [("gspo_token", "sequence_token"), ("grpo", "token")])
def test_advantages_of_single_tokens(name, level, seed, make_inputs):
    assert_same_loss(name, level, ragged(make_inputs, name, seed, with_token_advantages=True))


@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_one_micro_batch_of_several(name, level, make_inputs):
    # TRL divides by the number of equal micro-batches, we by the sequences of the mini-batch.
    inputs = ragged(make_inputs, name, seed=6)
    inputs.global_num_sequences *= 3
    assert_same_loss(name, level, inputs, steps=3)


@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_a_sequence_without_tokens_counts_in_the_mean(name, level, make_inputs):
    inputs = ragged(make_inputs, name, seed=7)
    inputs.mask[inputs.sequence_index == 5] = 0.0
    inputs.sequence_lengths[5] = 0.0
    assert_same_loss(name, level, inputs)
