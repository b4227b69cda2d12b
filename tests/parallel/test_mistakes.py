"""Ten mistakes, put in one by one: the comparison of the layout matrix notices each of them."""

from __future__ import annotations

import pytest

from gspo_megatron.verify.results import compare
from tests.parallel.matrix import Case
from tests.parallel.mistakes import MISTAKES, mistaken_update
from tests.parallel.models import VOCAB_SIZE
from tests.parallel.pool import Pool
from tests.parallel.updates import FP32_TOLERANCE, Updates

# Each with a case that catches it. Where the routers' losses are off the reference is the formulas,
# so that a mistake which all layouts share is caught too.
CAUGHT_BY = {
    "sequence_sums_not_reduced_over_cp": Case("cp=2"),
    "mean_of_micro_batch_means": Case("tp=1"),
    "divisor_of_one_data_rank": Case("dp=2"),
    "aux_loss_scaled_by_tokens_of_the_shard": Case("tp=2", router_losses=True),
    "shift_off_by_one": Case("tp=1"),
    "padding_mask_ignored": Case("tp=2", packing=False, router_losses=True),
    "sequence_index_of_the_packed_batch_lost": Case("tp=1"),
    "softmax_maximum_not_reduced_over_tp": Case("tp=2"),
    "virtual_stages_swapped": Case("pp=2,vpp=2"),
    "expert_gradients_reduced_over_the_wrong_ranks": Case("tp=2"),
}


@pytest.fixture(scope="module")
def updates(pool: Pool) -> Updates:
    return Updates(pool)


def test_every_mistake_has_a_case() -> None:
    assert MISTAKES.keys() == CAUGHT_BY.keys()


@pytest.mark.parametrize("mistake", CAUGHT_BY)
def test_mistake_shows_in_the_gradients(pool: Pool, updates: Updates, mistake: str) -> None:
    case = CAUGHT_BY[mistake]
    reference = updates.one_rank(case) if case.router_losses else updates.explicit(case)
    right = compare(reference.gradients, updates.run(case).gradients)
    assert right[0][1] <= FP32_TOLERANCE
    wrong = pool.run(
        case.world_size,
        mistaken_update,
        mistake=mistake,
        config=case.config(),
        vocab_size=VOCAB_SIZE,
        batch=case.batch(),
        cut=case.cut(),
    )
    name, error = compare(reference.gradients, wrong.gradients)[0]
    print(f"{mistake}: {case}: {name} off by {error:.1e}")
    assert error > 50 * FP32_TOLERANCE
