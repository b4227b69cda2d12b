"""The objectives compared with TRL's GRPO loss: value, gradient, clip fractions and entropy.

TRL's side is `GRPOTrainer._compute_loss`, in which only the model is replaced. TRL is imported only
inside the function `_trainer`. Some names have another meaning in TRL, and tests show these
differences:

- CISPO: TRL's `epsilon_high` is the cap itself; here the cap is 1 + clip_high. TRL counts only
  tokens with a positive advantage as clipped, although the cap changes other weights, too.
- Two-sided clip: TRL's `delta` is our dual_clip if it is at least 1 + clip_high. With a
  smaller `delta`, TRL also lowers the upper bound for positive advantages, and clip_high limits the
  ratios of negative advantages.
- Off-policy mask: TRL uses the rollout's log-probs if it has them, so the mismatch of the engines
  counts as drift. We use the log-probs of the trainer's old policy.
- Sequence corrections: TRL's are products over all tokens. Ours are geometric means, except
  sequence_product_tis. TRL's sequence_mask gives a kept sequence this product as its weight, ours
  gives it the weight 1.
- Entropy bonus: TRL's is a mean over the tokens of the micro-batch, ours over the mini-batch.
"""

from __future__ import annotations

import importlib.util
import random
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.types import LossInputs, LossOutputs
from tests.unit.objectives.batches import (
    as_mini_batch,
    inputs_of,
    make_objective,
    without_tokens,
)
from tests.unit.objectives.papers import PAPERS

# The settings of each objective in TRL. In CISPO, `epsilon_high` is the cap itself, not its
# distance from 1.
SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "gspo_token": {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "grpo": {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.27},
    "dapo": {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "cispo": {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "luspo": {"loss_type": "luspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "vespo": {"loss_type": "vespo", "epsilon_low": 0.2, "epsilon_high": 0.2},
}


@dataclass
class TrlResult:
    loss: Tensor  # a scalar
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
    """Compute one of the `steps` micro-batches of a mini-batch with TRL.

    `settings` are attributes of the trainer or of its arguments. `importance_sampling_ratio`
    [tokens] or [num_sequences] is the ratio that TRL computes when it samples with vLLM.
    """
    index = inputs.sequence_index
    starts = torch.searchsorted(index, torch.arange(len(inputs.advantages)))
    places = (index, torch.arange(len(index)) - starts[index])
    shape = (len(starts), int(places[1].max()) + 1)

    def padded(vector: Tensor, filling: float) -> Tensor:
        return torch.full(shape, filling, dtype=torch.float64).index_put(places, vector)

    flat = inputs.logprobs.detach().clone().requires_grad_()
    entropy = inputs.entropy.detach().clone().requires_grad_()
    # Ratios of padding are far outside the clip range, so the result shows whether padding counts.
    batch = {
        "prompt_ids": torch.zeros(shape[0], 2, dtype=torch.long),
        "prompt_mask": torch.ones(shape[0], 2),
        "completion_ids": torch.zeros(shape, dtype=torch.long),
        "completion_mask": padded(inputs.mask, 0.0),
        "advantages": inputs.advantages,
        "old_per_token_logps": padded(inputs.old_logprobs, -4.0),
        # The number of tokens of the whole generation batch, which has one micro-batch for each
        # accumulation step.
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
    """A trainer with only the attributes that its loss reads, in one process."""
    if level == "sequence_token":
        from trl.experimental.gspo_token import GRPOTrainer
    else:
        from trl.trainer.grpo_trainer import GRPOTrainer
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "steps_per_generation": steps,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "sapo_temperature_pos": 1.0,
        # close to 1.05, which TRL's float32 does not represent exactly
        "sapo_temperature_neg": 1.0625,
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


# --- The comparison ------------------------------------------------------------------------------

# pytest.importorskip would also skip if TRL is installed but broken. Then the test must fail.
if importlib.util.find_spec("trl") is None:
    pytest.skip("trl, one of the dev requirements, is not installed", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")

# Our name, and TRL's importance_sampling_level. With one advantage for each sequence, GSPO and
# GSPO-token are the same. So each is compared with both levels of TRL.
PAIRS = [
    ("gspo", "sequence"),
    ("gspo", "sequence_token"),
    ("gspo_token", "sequence"),
    ("gspo_token", "sequence_token"),
    ("grpo", "token"),
    ("dapo", "token"),
    ("dr_grpo", "token"),
    ("cispo", "token"),
    ("sapo", "token"),
    ("luspo", "sequence"),
    ("vespo", "token"),
]
OF_TOKENS = [("gspo_token", "sequence_token"), *[pair for pair in PAIRS if pair[1] == "token"]]
# Pairs of TRL's main trainer. TRL's experimental trainer for GSPO-token lacks some features.
MAIN = [pair for pair in PAIRS if pair[1] != "sequence_token"]
CLIPPED = [pair for pair in PAIRS if pair[0] not in ("cispo", "sapo", "vespo")]

# Both sides compute in float64, so only the order of additions differs.
EXACT = {"rtol": 1e-11, "atol": 1e-14}
# Tolerance for clip fractions, which TRL counts in float32.
FRACTION = 1e-6


def our_loss(name: str, inputs: LossInputs, **keys: Any) -> LossOutputs:
    if name == "sapo":
        keys["tau_negative"] = 1.0625  # see _trainer
    return make_objective(name, **keys)(inputs)


def ragged(name: str, seed: int, **options: Any) -> LossInputs:
    """24 sequences of 1 to 40 tokens, with ratios on both sides of the objective's clip range."""
    rng = random.Random(seed)
    lengths = tuple(rng.randint(1, 40) for _ in range(24))
    return as_mini_batch(inputs_of(name, seed, lengths=lengths, **options))


def assert_same_loss(ours: LossOutputs, theirs: TrlResult, inputs: LossInputs) -> None:
    inputs.entropy.grad = None
    ours.loss.backward()
    torch.testing.assert_close(ours.loss.detach(), theirs.loss, **EXACT)
    torch.testing.assert_close(inputs.logprobs.grad, theirs.gradient, **EXACT)
    assert float(theirs.gradient.abs().max()) > 1e-4  # at least one gradient is not 0
    if inputs.entropy.grad is not None:
        torch.testing.assert_close(inputs.entropy.grad, theirs.entropy_gradient, **EXACT)


def mean(pair: Tensor) -> float:
    return float(pair[0] / pair[1])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_loss_gradient_entropy_and_clip_fractions_are_those_of_trl(name, level, seed):
    inputs = ragged(name, seed)
    theirs, ours = trl_loss(name, level, inputs), our_loss(name, inputs)
    assert_same_loss(ours, theirs, inputs)
    assert mean(ours.means["policy/entropy"]) == pytest.approx(theirs.metrics["entropy"], rel=1e-12)
    if (name, level) in CLIPPED:
        # With the ratio of a sequence, TRL counts sequences, otherwise tokens.
        counted = "clip/sequence" if level == "sequence" else "clip/token"
        pairs = {"low": "low_mean", "high": "high_mean", "binding": "region_mean"}
        found = {key: theirs.metrics[f"clip_ratio/{pair}"] for key, pair in pairs.items()}
        # Some values are clipped at the low bound, some at the high bound, and some not at all.
        assert found["low"] > 0 and found["high"] > 0 and found["low"] + found["high"] < 1
        for key, expected in found.items():
            ours_too = mean(ours.means[f"{counted}/{key}"])
            assert ours_too == pytest.approx(expected, rel=FRACTION), key


KL = {"kl": "k3", "kl_coefficient": 0.3}  # TRL's beta
OFF_POLICY = {name: {"off_policy_mask": 0.2 * paper.spread} for name, paper in PAPERS.items()}
# Objective and level, our keys, TRL's settings, and options of the batch.
WITH_MORE: list[tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    *((*pair, {}, {}, {"with_token_advantages": True}) for pair in OF_TOKENS),
    *((*pair, KL, {"beta": 0.3}, {"with_reference": True}) for pair in PAIRS),
    # TRL multiplies k3 by the ratio of its surrogate, while we multiply by the token's ratio.
    *(
        (*pair, KL | {"kl": "k3_unbiased"}, {"beta": 0.3, "use_bias_correction_kl": True},
         {"with_reference": True})
        for pair in MAIN if pair[1] == "token"
    ),
    *(
        (*pair, {"entropy_coefficient": 0.2},
         {"_entropy_bonus_enabled": True, "entropy_coef": 0.2}, {})
        for pair in MAIN
    ),
    *(
        (name, level, {"rule": "dual_clip", "dual_clip": bound}, {"delta": bound}, {})
        for name, level, bound in (
            ("grpo", "token", 1.5), ("dapo", "token", 2.0), ("gspo", "sequence", 1.001)
        )
    ),
    *(
        (name, level, OFF_POLICY[name] | KL,
         {"off_policy_mask_threshold": OFF_POLICY[name]["off_policy_mask"], "beta": 0.3},
         {"with_reference": True})
        for name, level in MAIN
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "level", "keys", "settings", "options"), WITH_MORE)
def test_additions_are_those_of_trl(name, level, keys, settings, options):
    for seed in (8, 11):
        inputs = ragged(name, seed, **options)
        theirs, ours = trl_loss(name, level, inputs, **settings), our_loss(name, inputs, **keys)
        assert_same_loss(ours, theirs, inputs)
        assert not settings or theirs.loss != trl_loss(name, level, inputs).loss, "has no effect"
        if keys.get("kl") == "k3":
            expected = pytest.approx(theirs.metrics["kl"], rel=1e-10)
            assert mean(ours.means["kl/reference_k3"]) == expected
            # With an aggregation over tokens, the penalty is the mean that TRL reports.
            if name in ("dapo", "cispo"):
                assert mean(ours.means["kl/penalty"]) == expected


@pytest.mark.parametrize("mode", ["token_tis", "icepop", "sequence_product_tis"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "cispo", "sapo"])
def test_corrections_of_tokens_and_of_products(name, mode):
    """TRL's names are token_truncate, token_mask and sequence_truncate. TRL computes the weights by
    these formulas when it samples, and multiplies its loss by them."""
    inputs = ragged(name, seed=10, mismatch=0.4, with_reference=True)
    logs = (inputs.old_logprobs - inputs.rollout_logprobs) * inputs.mask
    if mode == "sequence_product_tis":
        sums = torch.zeros_like(inputs.advantages).index_add(0, inputs.sequence_index, logs)
        weights = sums.exp().clamp(max=2.0)
    elif mode == "token_tis":
        weights = logs.exp().clamp(max=2.0)
    else:
        ratio = logs.exp()
        weights = ratio.masked_fill((ratio < 0.5) | (ratio > 5.0), 0.0)
    # The KL penalty is not multiplied by these weights.
    theirs = trl_loss(name, "token", inputs, beta=0.3, importance_sampling_ratio=weights)
    assert_same_loss(our_loss(name, inputs, correction=mode, **KL), theirs, inputs)


@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_a_micro_batch_of_several_and_a_sequence_without_tokens(name, level):
    # TRL divides by the number of micro-batches, which are equal. We divide by the sequences or
    # tokens of the mini-batch.
    inputs = ragged(name, seed=6)
    inputs.global_num_sequences *= 3
    inputs.global_num_tokens *= 3
    assert_same_loss(our_loss(name, inputs), trl_loss(name, level, inputs, steps=3), inputs)
    inputs = as_mini_batch(without_tokens(ragged(name, seed=7), 5))
    assert_same_loss(our_loss(name, inputs), trl_loss(name, level, inputs), inputs)


# --- Names that have another meaning in TRL ------------------------------------------------------


def test_trl_counts_capped_tokens_of_positive_advantages_alone():
    inputs = ragged("cispo", seed=1)
    theirs = trl_loss("cispo", "token", inputs).metrics["cispo_clip_ratio"]
    ours = mean(our_loss("cispo", inputs).means["clip/token/high"])
    assert 0 < theirs < ours


def test_two_sided_clip_inside_the_range_is_another_thing_in_trl():
    inputs = ragged("grpo", seed=11)
    inputs.advantages.abs_()
    theirs = trl_loss("grpo", "token", inputs, delta=1.1)
    ours = our_loss("grpo", inputs, rule="dual_clip", dual_clip=1.1)
    torch.testing.assert_close(ours.loss.detach(), our_loss("grpo", inputs).loss.detach(), **EXACT)
    # Here TRL clips positive advantages at 1.1 and not at 1.27.
    assert ours.loss < theirs.loss


def test_off_policy_mask_of_trl_takes_the_mismatch_of_the_engines_for_drift():
    inputs = ragged("grpo", seed=13, mismatch=0.3)
    settings = {"off_policy_mask_threshold": 0.1, "rollout_for_mask": True}
    theirs = trl_loss("grpo", "token", inputs, **settings)
    assert theirs.loss != our_loss("grpo", inputs, off_policy_mask=0.1).loss
    # Both sides agree with objective.old_logprobs = rollout, which uses the rollout's log-probs as
    # the old log-probs.
    inputs.old_logprobs = inputs.rollout_logprobs
    theirs = trl_loss("grpo", "token", inputs, **settings)
    assert_same_loss(our_loss("grpo", inputs, off_policy_mask=0.1), theirs, inputs)
