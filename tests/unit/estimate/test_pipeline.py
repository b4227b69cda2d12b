"""Micro-batches in flight and the bubble, against Megatron-Core's own schedules."""

from __future__ import annotations

from collections import Counter

import pytest
from megatron.core.pipeline_parallel import schedules

from gspo_megatron.config import parse_config, resolve_parallel
from gspo_megatron.estimate.workload import bubble_share, in_flight
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.platform.megatron_meta import pretended_rank


def held_by_the_schedule(stages: int, stage: int, chunks: int, micro_batches: int) -> list[int]:
    """Forward passes that a stage starts before its first backward pass, by chunk, as Megatron-Core
    counts and orders them."""
    vpp = f",vpp={chunks}" if chunks > 1 else ""
    config = parse_config(
        {"parallel": {"layout": f"pp={stages}{vpp}"}, "data": {"tokenizer": "none"}}
    )
    with pretended_rank(stage, stages):
        set_up_model_parallel(resolve_parallel(config, stages), seed=0)
        total, _, warm_up, _ = schedules.get_pp_rank_microbatches(
            num_microbatches=micro_batches,
            num_model_chunks=chunks,
            microbatch_group_size_per_vp_stage=stages,
        )
    table = schedules.get_schedule_table(micro_batches, chunks, stages)
    started = Counter(chunk for _, chunk in table[: min(warm_up + 1, total)])
    return [started[chunk] for chunk in range(chunks)]


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"),
    [(2, 1, 1), (2, 1, 5), (4, 1, 3), (4, 1, 9), (2, 2, 2), (2, 3, 8), (4, 2, 4), (4, 3, 12)],
)
def test_micro_batches_in_flight_are_those_of_the_schedule(
    stages: int, chunks: int, micro_batches: int
) -> None:
    for stage in range(stages):
        expected = held_by_the_schedule(stages, stage, chunks, micro_batches)
        assert list(in_flight(stages, stage, chunks, micro_batches)) == expected, stage


def test_a_single_stage_holds_one_micro_batch_and_has_no_bubble() -> None:
    assert in_flight(1, 0, 1, 7) == (1,)
    assert bubble_share(1, 1, 7) == 0.0


def test_the_bubble_of_both_schedules() -> None:
    # 4 stages, 8 micro-batches: 3 of 11 slots idle; chunks of half the layers take half the time
    assert bubble_share(4, 1, 8) == pytest.approx(3 / 11)
    assert bubble_share(4, 2, 8) == pytest.approx(1.5 / (8 + 1.5))
