"""The loss of fine-tuning, packed and padded, compared with transformers on the same batch and
weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeForCausalLM

from gspo_megatron.config import check_config, parse_config, resolve_parallel
from gspo_megatron.config.stages import FineTuningConfig
from gspo_megatron.data.examples import Counts, Example, SupervisedData
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import build_policy
from gspo_megatron.models.optimizer import Schedule, build_trainer
from gspo_megatron.supervised.batches import FineTuningBatches
from gspo_megatron.supervised.loop import SupervisedUpdater
from tests.unit.models.test_transformers_oracle import SIZES, random_model

pytestmark = pytest.mark.usefixtures("one_rank")

Theirs = tuple[PreTrainedModel, Path]
IGNORED = -100  # transformers' label for tokens without a loss


def random_examples(seed: int, lengths: Sequence[int], share: float = 0.4) -> list[Example]:
    """Examples whose masks have holes, as in conversations of several turns. A mask may contain the
    first token."""
    source = np.random.default_rng(seed)
    examples = []
    for number, length in enumerate(lengths):
        mask = source.random(length) < share
        mask[source.integers(length)] = True
        tokens = source.integers(SIZES["vocab_size"], size=length, dtype=np.int32)
        examples.append(Example(tokens, mask, f"file:{number + 1}"))
    return examples


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    model = random_model(Qwen3MoeForCausalLM, 5, torch.float32, norm_topk_prob=True)
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return model, folder


def stage(folder: Path, **training: object) -> FineTuningConfig:
    config = parse_config(
        {
            "model": {
                "hf_path": str(folder),
                "backend": "torch_native",
                "megatron": {"moe_aux_loss_coeff": 0.0},
            },
            "data": {"tokenizer": "unused", "examples": "unused"},
            "training": {"precision": "fp32", "steps": 1, **training},
        },
        schema=FineTuningConfig,
    )
    check_config(config, 1)
    return config


def reference(model: PreTrainedModel, examples: Sequence[Example]) -> tuple[float, float]:
    """The loss and gradient norm of one padded batch, by transformers alone."""
    longest = max(len(example.token_ids) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    attention = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        length = len(example.token_ids)
        tokens = torch.from_numpy(example.token_ids.astype(np.int64))
        ids[row, :length], attention[row, :length] = tokens, 1
        labels[row, :length] = torch.where(torch.from_numpy(example.loss_mask), tokens, IGNORED)
    model.zero_grad()
    loss = model(input_ids=ids, attention_mask=attention, labels=labels).loss
    loss.backward()
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), float(torch.stack(norms).norm())


def mean_entropy(model: PreTrainedModel, examples: Sequence[Example]) -> float:
    """The mean entropy of the distributions of all learned tokens, by transformers alone."""
    found: list[float] = []
    for example in examples:
        ids = torch.from_numpy(example.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        found += entropies[torch.from_numpy(example.loss_mask[1:])].tolist()
    return sum(found) / len(found)


def ours(
    folder: Path, examples: Sequence[Example], **training: object
) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of an evaluation in batches of `batch_size`, and of one update on all
    examples."""
    config = stage(folder, **training)
    policy = build_policy(config, resolve_parallel(config, 1), SIZES["vocab_size"])
    load_hf(config.model.hf_path, policy)
    data = SupervisedData(iter(examples), Counts())
    batches = FineTuningBatches(config, policy, 0, data, data)
    schedule = Schedule(1e-3, 0.0, 0, 1, "constant")
    updater = SupervisedUpdater(policy, build_trainer(policy, config.optimizer, schedule))
    evaluated = updater.evaluate(batches.evaluation())
    return evaluated, updater.update(batches.batch(examples))


@pytest.mark.parametrize(("packing", "budget"), [(True, 4096), (True, 30), (False, 60)])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_loss_is_transformers(theirs: Theirs, seed: int, packing: bool, budget: int) -> None:
    """Different orders of sums in fp32 change the loss by about 1e-6, and the gradient norm by
    about 1e-6 of its size. The tolerances 1e-5 and 1e-4 leave room."""
    model, folder = theirs
    examples = random_examples(seed, [13, 5, 29, 2, 17, 8, 1 + seed])
    loss, norm = reference(model, examples)
    evaluated, updated = ours(folder, examples, packing=packing, micro_batch_tokens=budget)
    assert updated["loss"] == pytest.approx(loss, abs=1e-5)
    assert evaluated["evaluation/loss"] == pytest.approx(loss, abs=1e-5)
    assert evaluated["evaluation/logprob"] == -evaluated["evaluation/loss"]
    assert updated["grad_norm"] == pytest.approx(norm, rel=1e-4)
    entropy = mean_entropy(model, examples)
    assert updated["policy/entropy"] == pytest.approx(entropy, abs=1e-5)


def test_a_mask_that_slips_by_one_token_shows(theirs: Theirs) -> None:
    """The comparison with transformers notices a wrong mask."""
    model, folder = theirs
    examples = random_examples(1, [13, 5, 29])
    loss, _ = reference(model, examples)
    slipped = [Example(e.token_ids, np.roll(e.loss_mask, 1), e.source) for e in examples]
    evaluated, _ = ours(folder, slipped)
    assert abs(evaluated["evaluation/loss"] - loss) > 1e-2


def test_the_evaluation_is_a_mean_over_tokens_of_all_batches(theirs: Theirs) -> None:
    model, folder = theirs
    examples = random_examples(7, [3, 31, 6, 12, 9])
    found, _ = ours(folder, examples, batch_size=2)
    assert found["evaluation/loss"] == pytest.approx(reference(model, examples)[0], abs=1e-5)


def test_examples_of_which_no_token_is_predicted_do_no_harm(theirs: Theirs) -> None:
    """In a truncated example, only the first token may be left to learn. No token comes before it,
    so it is not predicted."""
    model, folder = theirs
    first_only = Example(np.array([3, 4], np.int32), np.array([True, False]), "file:1")
    examples = [first_only, *random_examples(3, [9])]
    _, updated = ours(folder, examples)
    assert updated["loss"] == pytest.approx(reference(model, examples)[0], abs=1e-5)
    _, updated = ours(folder, [first_only])
    assert updated["grad_norm"] == 0.0
