"""The size of a step, and the micro-batches in flight compared with Megatron-Core's own
schedules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from megatron.core.pipeline_parallel import schedules

from gspo_megatron.config import parse_config, resolve_parallel
from gspo_megatron.estimate.workload import (
    NOT_READ,
    DataSizes,
    Workload,
    bubble_share,
    in_flight,
    workload,
)
from gspo_megatron.platform.groups import set_up_model_parallel
from gspo_megatron.platform.megatron_meta import pretended_rank
from tests.unit.estimate.conftest import ConfigMaker


@pytest.fixture
def work_of(make_config: ConfigMaker) -> Any:
    def work(layout: str, world_size: int, sizes: DataSizes = NOT_READ, **keys: Any) -> Workload:
        objective = {"mini_batches": 2} | keys.pop("objective", {})
        routing, environment = keys.pop("routing", {}), keys.pop("environment", {})
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
            objective=objective,
            routing=routing,
            environment=environment,
            training=training,
        )
        return workload(config, resolve_parallel(config, world_size), sizes)

    return work


FILLED = ((30, 70), (30, 70), (1, 49))


# The step has 40 sequences in 2 mini-batches.
@pytest.mark.parametrize(
    ("layout", "keys", "lengths", "micro_batches"),
    [
        # a micro-batch: two whole sequences, and a part of a third sequence that fills the budget
        ("tp=1", {}, FILLED, 10),
        ("tp=1", {"budget": 64}, ((30, 70),), 20),  # one sequence exceeds the budget
        # without packing, all rows have the same length
        ("tp=1", {"packing": False}, ((30, 70), (30, 70)), 10),
        ("cp=2", {}, ((30, 70),) * 5, 4),  # two ranks have twice the budget
        # the number of micro-batches is a multiple of the number of stages
        ("pp=4,vpp=2", {}, FILLED, 12),
        # The longest prompt is shorter than data.max_prompt_tokens.
        ("tp=1", {"sizes": DataSizes(longest=12)}, ((12, 70),) * 3 + ((1, 3),), 7),
    ],
)
def test_a_micro_batch_is_filled_to_its_budget(
    work_of: Any, layout: str, keys: dict[str, Any], lengths: tuple, micro_batches: int
) -> None:
    ranks = {"tp=1": 1, "cp=2": 2}.get(layout, 4)
    work = work_of(layout, ranks, **keys)
    assert (work.lengths, work.micro_batches) == (lengths, micro_batches)
    assert (work.longest, work.tokens) == (sum(lengths[0]), sum(map(sum, lengths)))
    assert (work.sequences, work.micro_batches_per_step) == (40, 2 * micro_batches)


@pytest.mark.parametrize(
    ("layout", "keys", "computed"),
    [
        ("tp=1", {}, 170 / 200),  # two responses of 70 tokens to a prompt of 30
        ("tp=1", {"budget": 99}, 1.0),  # one response
        ("tp=1", {"budget": 600}, 480 / 600),  # four responses to a prompt, two to the next
        ("tp=1", {"budget": 9000}, 1550 / 2000),  # 20 responses to five prompts, a mini-batch
        ("tp=1", {"packing": False}, 1.0),
        ("cp=2", {}, 1.0),
    ],
)
def test_a_micro_batch_computes_a_prompt_once(
    work_of: Any, layout: str, keys: dict[str, Any], computed: float
) -> None:
    work = work_of(layout, 2 if layout == "cp=2" else 1, **keys)
    assert work.computed == pytest.approx(computed)


KL = {"kl": "k3", "kl_coefficient": 0.1}
TEACHER = {"distillation": {"teacher": "folder", "form": "reverse_kl"}}


# A mini-batch has 10 micro-batches, and a step 20.
@pytest.mark.parametrize(
    ("objective", "routing", "passes"),
    [
        ({"old_logprobs": "rollout"}, {}, 0),
        ({}, {}, 10),  # the first mini-batch needs no pass
        (KL, {}, 10 + 20),
        (KL | {"kl_in": "reward"}, {}, 20 + 20),
        (TEACHER, {}, 10 + 20),
        ({"old_logprobs": "rollout"}, {"volatility": True}, 10),
        (KL, {"reference_replay": "r2"}, 20 + 20),
    ],
)
def test_passes_before_the_updates(
    work_of: Any, objective: dict[str, Any], routing: dict[str, Any], passes: int
) -> None:
    assert work_of("tp=1", 1, objective=objective, routing=routing).forward_only == passes


def test_an_objective_of_ones_own_may_need_a_pass_of_the_reference(
    work_of: Any, own_objectives: str
) -> None:
    for path, passes in (
        (f"{own_objectives}:guarded", 10 + 20),
        (f"{own_objectives}:plain", 10),
        ("on_another_machine:guarded", 10),
    ):
        assert work_of("tp=1", 1, objective={"import_path": path}).forward_only == passes, path


def test_ranks_share_sequences_and_prompts(work_of: Any) -> None:
    work = work_of("dp=3", 3)
    assert work.micro_batches == 4  # a rank has 7 of 20 sequences, two in a micro-batch
    assert (work.rollout_rows, work.rollout_rounds, work.rollout_responses) == (16, 1, 16)
    work = work_of("dp=3", 3, batch_size=9)
    assert (work.rollout_rows, work.rollout_rounds, work.rollout_responses) == (9, 2, 16)
    # context-parallel ranks have prompts of their own: 5 prompts in two rounds of 16 responses
    assert work_of("cp=2", 2, batch_size=16).rollout_rounds == 2
    assert work_of("dp=3", 3, batch_size=99).rollout_rows == 16
    assert work_of("dp=3", 3, engine="vllm").rollout_rows == 0


AGENT = {"name": "agent"}


# A rank has four prompts of 30 tokens, with four responses of 70 tokens each.
@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ({}, 4 * 30),
        ({"sizes": DataSizes(longest=12)}, 4 * 12),
        ({"batch_size": 9}, 3 * 30),
        ({"budget": 64}, 64),
        ({"budget": 20}, 30),  # a prompt is not cut
        # an evaluation has a prompt for each response
        ({"sizes": DataSizes(evaluated=15)}, 5 * 30),
        ({"sizes": DataSizes(evaluated=1000)}, 250),
        # before its last turn, an episode may be nearly as long as prompt and response together
        ({"environment": AGENT, "budget": 9000}, 16 * 100),
        ({"environment": AGENT}, 250),
        ({"environment": AGENT, "budget": 64}, 100),
        ({"engine": "vllm"}, 0),
    ],
)
def test_a_pass_over_prompts_has_the_tokens_of_a_micro_batch_at_most(
    work_of: Any, keys: dict[str, Any], tokens: int
) -> None:
    assert work_of("dp=3", 3, **keys).prefill_tokens == tokens


@pytest.mark.parametrize(
    ("sizes", "keys", "rows", "responses"),
    [
        (NOT_READ, {}, 0, 16),
        (DataSizes(evaluated=7), {}, 3, 16),
        (DataSizes(evaluated=50), {}, 17, 17),
        (DataSizes(evaluated=50), {"batch_size": 9}, 9, 17),
        (DataSizes(evaluated=50, stretch=2.0), {"batch_size": 9}, 18, 34),
    ],
)
def test_the_responses_of_an_evaluation_are_shared_by_the_ranks(
    work_of: Any, sizes: DataSizes, keys: dict[str, Any], rows: int, responses: int
) -> None:
    work = work_of("dp=3", 3, sizes, **keys)
    assert (work.evaluation_rows, work.rollout_responses) == (rows, responses)
    assert work.rollout_rows == keys.get("batch_size", 16)


def held_by_the_schedule(stages: int, stage: int, chunks: int, micro_batches: int) -> list[int]:
    """For each chunk, the number of forward passes that a stage starts before its first backward
    pass, as Megatron-Core orders them."""
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
    # With 4 stages and 8 micro-batches, 3 of 11 slots are idle. A chunk of half the layers takes
    # half the time.
    assert bubble_share(4, 1, 8) == pytest.approx(3 / 11)
    assert bubble_share(4, 2, 8) == pytest.approx(1.5 / (8 + 1.5))
