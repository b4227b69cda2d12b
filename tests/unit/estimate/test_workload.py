"""How large a step is taken to be."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_megatron.config import resolve_parallel
from gspo_megatron.estimate.workload import Workload, workload
from tests.unit.estimate.conftest import ConfigMaker


@pytest.fixture
def work_of(make_config: ConfigMaker) -> Any:
    def work(
        layout: str, world_size: int, longest_prompt: int | None = None, **keys: Any
    ) -> Workload:
        rollout = {"group_size": 4, "prompts_per_step": 10, "max_response_tokens": 70}
        training = {
            "micro_batch_tokens": keys.pop("budget", 250),
            "packing": keys.pop("packing", True),
        }
        config = make_config(
            "tiny",
            layout,
            rollout=rollout | keys,
            data={"max_prompt_tokens": 30},
            objective={"mini_batches": 2},
            training=training,
        )
        return workload(config, resolve_parallel(config, world_size), longest_prompt)

    return work


def test_a_micro_batch_is_filled_to_its_budget(work_of: Any) -> None:
    work = work_of("tp=1", 1)
    assert work.lengths == ((30, 70), (30, 70), (1, 49))
    assert work.tokens == 250
    assert work.longest == 100
    # 40 sequences in 2 mini-batches, 2 whole ones in a micro-batch
    assert (work.sequences, work.micro_batches, work.micro_batches_per_step) == (40, 10, 20)


def test_a_sequence_beyond_the_budget_is_a_micro_batch_of_its_own(work_of: Any) -> None:
    assert work_of("tp=1", 1, budget=64).lengths == ((30, 70),)
    assert work_of("tp=1", 1, budget=64).micro_batches == 20


def test_rows_of_a_padded_micro_batch_are_alike(work_of: Any) -> None:
    assert work_of("tp=1", 1, packing=False).lengths == ((30, 70), (30, 70))


def test_context_parallel_ranks_bring_their_budgets_together(work_of: Any) -> None:
    assert work_of("cp=2", 2).tokens == 500


def test_ranks_share_sequences_and_prompts(work_of: Any) -> None:
    work = work_of("dp=3", 3)
    assert work.micro_batches == 4  # 7 of 20 sequences, in twos
    assert (work.rollout_prompts, work.rollout_rows) == (4, 16)
    assert work_of("dp=3", 3, batch_size=9).rollout_rows == 8  # whole groups


def test_interleaved_schedules_have_whole_rounds(work_of: Any) -> None:
    assert work_of("pp=4,vpp=2", 4).micro_batches == 12  # not 10


def test_prompts_that_were_read_count_as_they_are(work_of: Any) -> None:
    assert work_of("tp=1", 1, longest_prompt=12).lengths[0] == (12, 70)
