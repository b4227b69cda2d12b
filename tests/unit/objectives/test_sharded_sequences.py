"""Sequences cut over several ranks give the loss, gradient and figures of the uncut ones."""

from __future__ import annotations

import pytest
import torch

from gspo_megatron.objectives import get_objective

EXACT = {"rtol": 1e-10, "atol": 1e-13}  # float64, other orders of additions


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


@pytest.mark.parametrize("num_shards", [2, 3, 4])
@pytest.mark.parametrize("kind", ["zigzag", "random", "one_shard_has_all"])
def test_shards_add_up_to_the_whole(kind, num_shards, name_and_spread, make_inputs, run_shards):
    name, spread = name_and_spread
    objective = get_objective(name)
    whole = make_inputs(7, spread=spread)
    expected = objective(whole)
    expected.loss.backward()
    owner = owners(kind, len(whole.mask), num_shards)

    shards = run_shards(whole, owner, objective)

    gradient = torch.zeros_like(whole.logprobs)
    for shard, (inputs, outputs) in enumerate(shards):
        outputs.loss.backward()
        gradient[owner == shard] = inputs.logprobs.grad
    torch.testing.assert_close(gradient, whole.logprobs.grad, **EXACT)
    for key, pair in expected.means.items():
        total = sum(outputs.means[key] for _, outputs in shards)
        torch.testing.assert_close(total, pair, **EXACT, msg=lambda text, key=key: f"{key}: {text}")
    for key, values in expected.values.items():
        joined = torch.cat([outputs.values[key] for _, outputs in shards])
        torch.testing.assert_close(joined.sort().values, values.sort().values, **EXACT)


def test_gspo_has_the_value_of_the_whole_loss_on_every_shard(make_inputs, run_shards):
    whole = make_inputs(8)
    expected = get_objective("gspo")(whole).loss
    owner = owners("zigzag", len(whole.mask), 3)
    for _, outputs in run_shards(whole, owner, get_objective("gspo")):
        torch.testing.assert_close(outputs.loss, expected, **EXACT)


def test_losses_of_token_means_are_parts_that_add_up(make_inputs, run_shards):
    whole = make_inputs(8, spread=0.4)
    owner = owners("zigzag", len(whole.mask), 3)
    for name in ("gspo_token", "grpo"):
        shards = run_shards(whole, owner, get_objective(name))
        total = sum(outputs.loss.detach() for _, outputs in shards)
        torch.testing.assert_close(total, get_objective(name)(whole).loss.detach(), **EXACT)


def test_a_shard_without_tokens_still_joins_the_backward(name_and_spread, make_inputs, run_shards):
    name, spread = name_and_spread
    whole = make_inputs(9, spread=spread)
    owner = owners("one_shard_has_all", len(whole.mask), 2)
    inputs, outputs = run_shards(whole, owner, get_objective(name))[0]
    assert len(inputs.logprobs) == 0
    assert outputs.loss.requires_grad and torch.isfinite(outputs.loss)
    outputs.loss.backward()
    assert inputs.logprobs.grad.shape == (0,)


def test_length_of_the_mean_is_that_of_the_whole_sequence(make_inputs, run_shards):
    # Even with an advantage and ratio of 1 everywhere, a shard-local length would weight the
    # shards of a sequence equally instead of its tokens.
    whole = make_inputs(10, lengths=(12,), spread=0.0)
    whole.mask.fill_(1)
    whole.sequence_lengths.fill_(12)
    whole.advantages.fill_(1)
    whole.global_num_sequences = 1
    owner = torch.tensor([0] * 3 + [1] * 9)
    for name in ("gspo", "gspo_token", "grpo"):
        for inputs, outputs in run_shards(whole, owner, get_objective(name)):
            outputs.loss.backward()
            torch.testing.assert_close(
                inputs.logprobs.grad, torch.full_like(inputs.logprobs, -1 / 12), **EXACT
            )
