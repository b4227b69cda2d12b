"""Sequences cut over several ranks give the loss, gradient and metrics of the uncut ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gspo_megatron.objectives import Objective
from gspo_megatron.types import LossInputs
from tests.unit.objectives.batches import (
    EVERY_OBJECTIVE,
    EXACT,
    choose,
    inputs_of,
    make_inputs,
    make_objective,
    run_shards,
)
from tests.unit.objectives.papers import SPREADS
from tests.unit.objectives.test_corrections import BOUNDS, legal, section


def owners(kind: str, tokens: int, num_shards: int) -> torch.Tensor:
    """The shard of each token."""
    if kind == "zigzag":  # as context parallelism cuts a sequence: chunk i and chunk 2n-1-i
        chunk = torch.arange(tokens) * 2 * num_shards // tokens
        return torch.minimum(chunk, 2 * num_shards - 1 - chunk)
    if kind == "random":
        generator = torch.Generator().manual_seed(num_shards)
        return torch.randint(num_shards, (tokens,), generator=generator)
    # All tokens on the last shard, none on the others.
    return torch.full((tokens,), num_shards - 1)


# Whose clip flags are one a sequence: the clip metrics of the others need the flags of all shards.
OF_SEQUENCES = ["gspo", "luspo", "reinforce_leave_one_out"]
KINDS = [("zigzag", 2), ("zigzag", 3), ("random", 4), ("one_shard_has_all", 2)]


def assert_shards_are(whole: LossInputs, objective: Objective, kind: str, num_shards: int) -> None:
    """Gradients, metrics and values of the shards together are those of the uncut sequences."""
    owner = owners(kind, len(whole.mask), num_shards)
    whole.logprobs.grad = whole.entropy.grad = None
    expected = objective(whole)
    expected.loss.backward()
    shards = run_shards(whole, owner, objective)
    gradients = {"logprobs": whole.logprobs.grad}
    if whole.entropy.grad is not None:
        gradients["entropy"] = whole.entropy.grad
    found = {key: torch.zeros_like(whole.logprobs) for key in gradients}
    for shard, (inputs, outputs) in enumerate(shards):
        assert torch.isfinite(outputs.loss)
        outputs.loss.backward()  # on a shard without tokens too
        for key in gradients:
            found[key][owner == shard] = getattr(inputs, key).grad
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key], gradient, **EXACT)
    for key, pair in expected.means.items():
        total = sum(outputs.means[key] for _, outputs in shards)
        torch.testing.assert_close(total, pair, **EXACT, msg=lambda text, key=key: f"{key}: {text}")
    for key, values in expected.values.items():
        joined = torch.cat([outputs.values[key] for _, outputs in shards])
        torch.testing.assert_close(joined.sort().values, values.sort().values, **EXACT)
    for _, outputs in shards:
        assert outputs.means.keys() == expected.means.keys()


def additions(name: str, kl: str) -> dict[str, float | str]:
    found = {"kl": kl, "kl_coefficient": 0.3, "entropy_coefficient": 0.2, "correction": "k3_mask"}
    return found | {"off_policy_mask": 0.3 * SPREADS[name]}


CASES = [
    *((name, {}, 0.1) for name in SPREADS),
    *((name, section(correction), BOUNDS[correction][1]) for name, correction in legal()),
    *((name, additions(name, kl), 0.03) for name in SPREADS for kl in ("k1", "k2", "k3")),
]


@pytest.mark.parametrize(("name", "keys", "mismatch"), CASES)
def test_shards_add_up_to_the_whole(name, keys, mismatch):
    whole = inputs_of(name, 7, mismatch=mismatch, with_reference="kl" in keys)
    for kind, num_shards in KINDS:
        assert_shards_are(whole, make_objective(name, **keys), kind, num_shards)


def sent_by(objective: Objective, inputs: LossInputs) -> list[Tensor]:
    """What one call hands to the collective, call by call."""
    sent = []

    def sum_over_shards(vector: Tensor) -> Tensor:
        sent.append(vector)
        return vector

    inputs.sum_over_shards = sum_over_shards
    objective(inputs).loss.backward()
    return sent


@pytest.mark.parametrize(
    ("correction", "sums"), [("none", 1), ("sequence_mask", 2), ("k3_mask", 2)]
)
@EVERY_OBJECTIVE
def test_bytes_a_sequence_whatever_its_length_and_the_additions(name, correction, sums):
    inputs = make_inputs(1, lengths=(50, 3, 20), dtype=torch.float32, with_reference=True)
    additions = {"kl": "k3", "kl_coefficient": 0.1, "entropy_coefficient": 0.1}
    objective = make_objective(name, correction=correction, off_policy_mask=0.1, **additions)
    sums += name == "gmpo"  # whose mean has limited log-ratios
    # one message of all sums; then outside, low and high where tokens have clip flags
    expected = [sums * 4] if name in OF_SEQUENCES else [sums * 4, 12]
    sent = sent_by(objective, inputs)
    assert [each.numel() * each.element_size() / 3 for each in sent] == expected


@EVERY_OBJECTIVE
def test_shards_without_tokens_send_as_often_as_the_others(name):
    inputs = inputs_of(name, 1, with_reference=True)
    empty = choose(inputs, torch.zeros(len(inputs.mask), dtype=torch.bool))
    objective = make_objective(name, kl="k3", kl_coefficient=0.1, off_policy_mask=0.1)
    assert len(sent_by(objective, empty)) == len(sent_by(objective, inputs))


@EVERY_OBJECTIVE
def test_a_shards_loss_is_the_whole_or_a_part_of_it(name):
    whole, objective = inputs_of(name, 8), make_objective(name)
    shards = run_shards(whole, owners("zigzag", len(whole.mask), 3), objective)
    found = torch.stack([outputs.loss.detach() for _, outputs in shards])
    expected = objective(whole).loss.detach()
    if name in (*OF_SEQUENCES, "gmpo"):
        torch.testing.assert_close(found, expected.expand(3), **EXACT)
    else:
        torch.testing.assert_close(found.sum(), expected, **EXACT)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo", "gmpo", "sapo"])
def test_length_of_the_mean_is_that_of_the_whole_sequence(name):
    # Even with an advantage and ratio of 1 everywhere, a shard-local length would weight the
    # shards of a sequence equally instead of its tokens.
    whole = make_inputs(10, lengths=(12,), spread=0.0)
    whole.mask.fill_(1)
    whole.sequence_lengths.fill_(12)
    whole.advantages.fill_(1)
    whole.global_num_sequences = 1
    owner = torch.tensor([0] * 3 + [1] * 9)
    for inputs, outputs in run_shards(whole, owner, make_objective(name)):
        outputs.loss.backward()
        expected = torch.full_like(inputs.logprobs, -1 / 12)
        torch.testing.assert_close(inputs.logprobs.grad, expected, **EXACT)
