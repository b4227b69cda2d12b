"""Rollouts with the sharded model. The responses are the same on all layouts, and their log-probs
equal those of training."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from gspo_megatron.batching.micro_batches import MicroBatchBuilder, response_logprobs
from gspo_megatron.batching.plan import plan_step
from gspo_megatron.batching.redistribute import gather_index, redistribute
from gspo_megatron.config import Config
from gspo_megatron.config.parallel import Layout
from gspo_megatron.models.build import Policy
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import RolloutBatch
from tests.parallel.models import VOCAB_SIZE, build_on_ranks, odd_moe
from tests.parallel.pool import Pool

LAYOUTS = [
    "tp=2",
    "pp=2",
    "dp=2",
    "dp=2,ep=2",
    "cp=2",
    "tp=2,etp=2",
    "pp=2,vpp=2",
    "tp=2,pp=2,ep=2",
]
PER_PROMPT = 3
SAMPLED = Sampling(max_tokens=14, temperature=0.7)
# Another order of sums changes fp32 logits of size 10 by 1e-6. A wrong position or token changes
# them by 0.1.
TOLERANCE = 1e-5


PAD_ID, EOS_ID = 0, 2


def spelled(token_ids: Sequence[int]) -> str:
    """The tokens as a text, with one character for each token."""
    return "".join(map(chr, token_ids))


@dataclass
class Response:
    """One response, as one rank returned it."""

    data_rank: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    truncated: bool
    routes: list[Any] | None = None  # [tokens, layers of the rank, k]


def prompts(count: int = 5) -> list[list[int]]:
    draw = random.Random(5)
    lengths = [(5, 1, 8, 3, 6)[n % 5] for n in range(count)]
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def sample_on_ranks(
    policy: Policy,
    sampling: Sampling,
    per_prompt: int = PER_PROMPT,
    count: int = 5,
    **options: Any,
) -> RolloutBatch:
    """Sample responses on ranks. Prompt n goes to data rank n modulo the number of data ranks.
    `options` are for the engine."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    numbers = range(group.rank(), count, group.size())
    attach_hooks(policy.models)
    engine = MegatronEngine(policy, pad_id=PAD_ID, eos_id=EOS_ID, decode=spelled, **options)
    requests = Requests([prompts(count)[n] for n in numbers], list(numbers), per_prompt)
    return engine.generate(requests, sampling, seed=11)


def generate(config: Config, **options: Any) -> dict[int, Response]:
    """The responses of this rank, by the number of their sample."""
    batch = sample_on_ranks(build_on_ranks(config), **options)
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    rows = batch.tokens.split(lengths)
    routes = None if batch.routes is None else batch.routes.split(lengths)
    logprobs = batch.rollout_logprobs.split(batch.response_lengths.tolist())
    found = {}
    for number, sample in enumerate(batch.sample_index.tolist()):
        parts = rows[number].tensor_split([batch.prompt_lengths[number]])
        lists = [part.tolist() for part in (*parts, logprobs[number])]
        found[sample] = Response(data_rank, *lists, bool(batch.truncated[number]))
        if routes is not None:
            found[sample].routes = routes[number].tolist()
    return found


def mismatch(config: Config) -> list[float]:
    """The differences between the log-probs of the engine and those of the trainer's packed forward
    pass, for all tokens for which this rank has both log-probs."""
    policy = build_on_ranks(config)
    batch = sample_on_ranks(policy, SAMPLED)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    cp = config.parallel.context_parallel_size
    nothing = torch.zeros(len(batch.sample_index), dtype=torch.float64)
    index = gather_index(batch, nothing, group)
    plans = plan_step(
        index.lengths,
        index.response_lengths,
        mini_batches=1,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        token_budget=60,
        micro_batch_multiple=config.parallel.pipeline_model_parallel_size,
    )
    sequences = redistribute(batch, index, plans, group, context_parallel_size=cp)
    builder = MicroBatchBuilder(policy, PAD_ID, SAMPLED.temperature)
    [micro_batches] = builder.build_step(plans, sequences, index)
    trained = response_logprobs(policy, micro_batches)
    pairs = [(m.rollout_logprobs, logprobs) for m, (logprobs, _) in zip(micro_batches, trained)]
    return [each for one, other in pairs for each in (one - other).abs().tolist()]


def responses(
    pool: Pool,
    layout: str,
    sampling: Sampling,
    ddp: dict[str, Any] | None = None,
    megatron: dict[str, Any] | None = None,
    **options: Any,
) -> dict[int, list[Response]]:
    """For each sample, the response as each rank of a model replica returned it."""
    config = odd_moe(layout, ddp=ddp, **(megatron or {}))
    by_rank = pool.each(config, generate, sampling=sampling, **options)
    samples = sorted({sample for found in by_rank for sample in found})
    return {sample: [found[sample] for found in by_rank if sample in found] for sample in samples}


@pytest.fixture(scope="module")
def of_one_rank(pool: Pool) -> dict[int, list[Response]]:
    return responses(pool, "tp=1", SAMPLED)


@pytest.fixture(scope="module")
def together(pool: Pool) -> Callable[..., dict[int, list[Response]]]:
    """A function that returns the responses on a layout, with their routes. All responses are
    generated at once, and once for all tests."""

    @functools.cache
    def draw(layout: str, **megatron: Any) -> dict[int, list[Response]]:
        return responses(pool, layout, SAMPLED, megatron=megatron, record_routes=True)

    return draw


def test_responses_of_one_rank_differ_end_and_are_cut_off(
    of_one_rank: dict[int, list[Response]],
) -> None:
    every = [copies[0] for copies in of_one_rank.values()]
    assert sorted(of_one_rank) == list(range(5 * PER_PROMPT))
    assert len({tuple(r.tokens) for r in every}) == len(every)
    assert {r.truncated for r in every} == {True, False}
    assert all((r.tokens[-1] == EOS_ID) != r.truncated for r in every)
    assert all(EOS_ID not in r.tokens[:-1] for r in every)


@pytest.mark.parametrize("layout", [*LAYOUTS, "tp=2,pp=2,ep=2,dp=2"])
def test_sampled_responses_are_those_of_one_rank(
    together: Callable[..., dict[int, list[Response]]],
    of_one_rank: dict[int, list[Response]],
    layout: str,
) -> None:
    found = together(layout)
    assert found.keys() == of_one_rank.keys()
    for sample, copies in found.items():
        expected = of_one_rank[sample][0]
        for response in copies:
            assert response.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
            own = {"data_rank": response.data_rank, "logprobs": response.logprobs}
            assert response == replace(expected, **own, routes=response.routes)


@pytest.mark.parametrize("layout", ["tp=1", "cp=2", "pp=2,vpp=2", "tp=2,pp=2,ep=2"])
def test_log_probs_of_the_engine_are_those_of_the_trainer(pool: Pool, layout: str) -> None:
    differences = list(itertools.chain(*pool.each(odd_moe(layout), mismatch)))
    assert len(differences) // Layout.parse(layout).tp > 5 * PER_PROMPT
    assert max(differences) <= TOLERANCE


@pytest.mark.parametrize(("layout", "sources"), [("dp=2", 2), ("cp=2", 2), ("tp=2,cp=2,dp=2", 4)])
def test_data_ranks_draw_responses_to_different_prompts(
    together: Callable[..., dict[int, list[Response]]], layout: str, sources: int
) -> None:
    found = together(layout)
    for sample, copies in found.items():
        assert {r.data_rank for r in copies} == {sample // PER_PROMPT % sources}
    replica = Layout.parse(layout).world_size // sources
    assert {len(copies) for copies in found.values()} == {replica}


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp=1", {"batch_size": 4}),
        ("dp=2,ep=2", {"batch_size": 4}),
        # A data rank without prompts takes part if it has experts.
        ("dp=4,ep=4", {"count": 1}),
        ("dp=2,etp=2", {"count": 1}),
        # A data rank without prompts also takes part if ranks still wait for the weights of an
        # update.
        ("dp=2", {"count": 1, "ddp": OVERLAP}),
    ],
)
def test_engine_batches_and_ranks_without_prompts_do_not_change_tokens(
    pool: Pool, of_one_rank: dict[int, list[Response]], layout: str, options: dict[str, Any]
) -> None:
    count = options.get("count", 5)
    expected = {s: of_one_rank[s][0].tokens for s in range(count * PER_PROMPT)}
    found = responses(pool, layout, SAMPLED, **options)
    assert {s: copies[0].tokens for s, copies in found.items()} == expected


ALLGATHER = {"moe_token_dispatcher_type": "allgather"}


@pytest.mark.parametrize(
    ("layout", "rows", "megatron"),
    [
        *((layout, 4, {}) for layout in ["tp=1", *LAYOUTS]),
        ("dp=2,ep=2", 2, {}),
        # All ranks need the same number of rows and of prefilled prompts, so some ranks get
        # dummies.
        ("dp=2,ep=2", 4, ALLGATHER),
        ("dp=4,ep=4", 2, ALLGATHER),
    ],
)
def test_refilled_rows_draw_the_same_responses(
    pool: Pool,
    of_one_rank: dict[int, list[Response]],
    together: Callable[..., dict[int, list[Response]]],
    layout: str,
    rows: int,
    megatron: dict[str, Any],
) -> None:
    """A rank has fewer rows than responses, and in most cases the number of rows is no multiple of
    the group size. The routes are compared with the routes of the same layout when it generates all
    responses at once."""
    options = {"megatron": megatron, "record_routes": True}
    at_once = together(layout, **megatron)
    refilled = responses(pool, layout, SAMPLED, batch_size=rows, **options)
    assert refilled.keys() == of_one_rank.keys()
    for sample, copies in refilled.items():
        expected = of_one_rank[sample][0]
        for found, whole in zip(copies, at_once[sample], strict=True):
            assert (found.tokens, found.truncated) == (expected.tokens, expected.truncated)
            assert found.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
            assert found.routes[:-1] == whole.routes[:-1]  # the last token has no routes
            assert len(found.routes) == len(found.prompt) + len(found.tokens)


@pytest.mark.parametrize(
    ("layout", "prefill_tokens", "megatron"),
    [
        # Rank 0 has prompts of 5, 8 and 6 tokens and runs a pass for each. Rank 1 has two prompts,
        # and none for the last pass.
        ("dp=2,ep=2", 8, {}),
        ("dp=2,ep=2", 8, ALLGATHER),
        ("dp=2,ep=2", 16, ALLGATHER),  # two prompts in a pass, with dummies in the last one
        # Only rank 0 has a second prompt.
        ("dp=4,ep=4", 6, {}),
        ("dp=4,ep=4", 6, ALLGATHER),
        ("tp=2,pp=2,ep=2", 8, {}),
    ],
)
def test_prompts_in_several_passes_draw_the_same_responses(
    pool: Pool,
    of_one_rank: dict[int, list[Response]],
    layout: str,
    prefill_tokens: int,
    megatron: dict[str, Any],
) -> None:
    options: dict[str, Any] = {"prefill_tokens": prefill_tokens, "megatron": megatron}
    for rows in (None, 4):
        found = responses(pool, layout, SAMPLED, batch_size=rows, **options)
        assert found.keys() == of_one_rank.keys()
        for sample, copies in found.items():
            expected = of_one_rank[sample][0]
            for response in copies:
                own = {"data_rank": response.data_rank, "logprobs": response.logprobs}
                assert response == replace(expected, **own)
                assert response.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_a_group_that_starts_in_parts_beside_dummies_keeps_its_prompt(pool: Pool) -> None:
    """With the allgather dispatcher all ranks prefill equally many prompts. A rank that has fewer
    fills up with dummies, and later starts the rest of its last group."""
    options: dict[str, Any] = {"count": 24, "per_prompt": 4}
    alone = responses(pool, "tp=1", SAMPLED, **options)
    found = responses(pool, "dp=2,ep=2", SAMPLED, batch_size=10, megatron=ALLGATHER, **options)
    assert {s: copies[0].tokens for s, copies in found.items()} == {
        s: copies[0].tokens for s, copies in alone.items()
    }


@pytest.mark.parametrize("layout", ["tp=2,pp=2", "dp=4,ep=4"])
def test_stop_strings_end_the_same_responses(
    pool: Pool, of_one_rank: dict[int, list[Response]], layout: str
) -> None:
    stop = spelled(of_one_rank[0][0].tokens[1:3])
    sampling = replace(SAMPLED, stop=(stop,))
    for sample, copies in responses(pool, layout, sampling, count=3).items():
        whole = spelled(of_one_rank[sample][0].tokens)
        expected = whole[: whole.index(stop) + 2] if stop in whole else whole
        assert {spelled(r.tokens) for r in copies} == {expected}
