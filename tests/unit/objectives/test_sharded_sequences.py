"""Sequences cut over several ranks give the loss, gradient and metrics of the uncut ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo_megatron.objectives import Objective
from gspo_megatron.objectives.parts import segment_sum, sequence_sums
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
from tests.unit.objectives.test_parts import BOUNDS, legal, section


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


# --- Sums by sequence against numpy in float64 ---------------------------------------------------

# tokens and sequences: nothing at all, more sequences than tokens, odd numbers, a long response
SIZES = [(0, 0), (0, 3), (1, 1), (1, 5), (7, 4), (23, 6), (1001, 17), (70_001, 1)]


def random_sums(tokens: int, sequences: int, dtype: torch.dtype, rows: tuple[int, ...] = ()):
    """Values and their sequences; most are in runs, as packing has them, cut as zig-zag cuts."""
    generator = torch.Generator().manual_seed(tokens)
    values = torch.randn(*rows, tokens, generator=generator, dtype=torch.float64).to(dtype)
    index = torch.randint(max(sequences, 1), (tokens,), generator=generator).sort().values
    return values, torch.cat([index[::2], index[1::2]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize(("tokens", "sequences"), SIZES)
def test_sums_are_those_of_numpy_with_the_same_bits_at_each_call(tokens, sequences, rows, dtype):
    values, index = random_sums(tokens, sequences, dtype, rows)
    expected = np.zeros((*rows, sequences))
    for row in np.ndindex(*rows):
        np.add.at(expected[row], index.numpy(), values[row].double().numpy())
    sums = segment_sum(values, index, sequences)
    assert sums.dtype == torch.promote_types(dtype, torch.float32)  # bfloat16 would stop at 256
    precision = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(
        sums.double().numpy(), expected, rtol=precision, atol=precision * tokens**0.5
    )
    assert torch.equal(sums, segment_sum(values, index, sequences))
    assert not sums[..., torch.bincount(index, minlength=sequences) == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_gathered(dtype):
    values, index = random_sums(9, 4, dtype, (2,))
    values.requires_grad_()
    weights = torch.arange(8.0).reshape(2, 4)
    (segment_sum(values, index, 4) * weights).sum().backward()
    assert torch.equal(values.grad, weights[:, index].to(dtype))
    double = values.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: segment_sum(v, index, 4), double)


def test_no_tokens_at_all_keep_the_graph():
    values = torch.zeros(0, requires_grad=True)
    segment_sum(values, torch.zeros(0, dtype=torch.long), 3).sum().backward()
    assert values.grad.shape == (0,)


@pytest.mark.parametrize(
    ("values", "index", "error"),
    [
        (torch.ones(4, 1), [0, 0, 0, 0], AssertionError),  # would broadcast
        (torch.ones(2), [0, 1], RuntimeError),  # of one sequence
        (torch.ones(2), [0, -1], RuntimeError),
    ],
)
def test_what_belongs_to_no_sequence_is_refused(values, index, error):
    with pytest.raises(error):
        segment_sum(values, torch.tensor(index), 1)


def test_shared_sums_have_the_value_of_all_shards_and_the_gradient_of_this_one():
    inputs = make_inputs(0, lengths=(1, 2, 1))
    values = torch.tensor([1.0, 2.0, 4.0, 0.0], requires_grad=True)

    def reduce_in_place(sums: torch.Tensor) -> torch.Tensor:
        assert not sums.requires_grad
        return sums.add_(torch.tensor([[100.0, 200.0, 400.0]]))

    inputs.sum_over_shards = reduce_in_place
    sums = sequence_sums(inputs, values)
    (sums * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert sums.tolist() == [[101.0, 206.0, 400.0]]
    assert values.grad.tolist() == [1.0, 10.0, 10.0, 100.0]


class Operators(TorchDispatchMode):
    """Notes the operators that get tensors of floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.is_floating_point() for x in tensors):
            self.seen.add(function._opname.rstrip("_"))
        return function(*args, **(kwargs or {}))


@EVERY_OBJECTIVE
def test_no_loss_or_gradient_adds_in_the_random_order_of_gpu_threads(name):
    inputs = inputs_of(name, 0, with_reference=True)
    objective = make_objective(
        name, kl="k3", kl_coefficient=0.1, correction="k3_mask", off_policy_mask=0.1
    )
    with Operators() as operators:
        objective(inputs).loss.backward()
    assert "segment_reduce" in operators.seen
    atomic = {"index_add", "scatter_add", "scatter_reduce", "index_put", "bincount", "cumsum"}
    assert not operators.seen & atomic
