"""An update whose micro-batches hold each prompt once equals the update by the formulas, and the
update with a prompt for each response."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gspo_megatron.batching.packing import PackSpec, pack
from gspo_megatron.batching.plan import plan_step
from gspo_megatron.config.parallel import Layout
from gspo_megatron.verify.parity import Cut, decide_share_prompts
from gspo_megatron.verify.results import StepResult, compare
from gspo_megatron.verify.synthetic import SyntheticBatch
from tests.parallel.explicit import explicit_update
from tests.parallel.models import NO_ROUTER_LOSSES, VOCAB_SIZE, odd_moe
from tests.parallel.pool import Pool
from tests.parallel.test_replay import EXPERTS, LAYERS, TOP_K, watched_update
from tests.parallel.updates import (
    FP32_TOLERANCE,
    FP64_TOLERANCE,
    FP64_TOLERANCE_OF_ROUTERS,
    assert_norm_is_that_of_the_gradients,
    assert_same_gradients,
    assert_same_update,
    update,
)
from tests.unit.hf.policies import config_of
from tests.unit.hf.published import VOCABULARY, write_model

# Prompt tokens, and the response tokens of each response to this prompt.
GROUPS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (7, (5, 3, 9)),
    (1, (4, 1, 2)),  # the only prompt token predicts the first response token: nothing is shared
    (13, (1, 1, 6, 2)),
    (2, (8, 0, 5)),  # a response without tokens
    (17, (12,)),
    (17, (3, 7)),  # begins like the prompt before it
)


def grouped_batch(vocab_size: int = VOCAB_SIZE, *, branches: bool = False) -> SyntheticBatch:
    """Several responses to each prompt. Two responses of the first prompt begin alike. branches:
    the history of every second response was rewritten, so it has a second branch, which begins like
    the first one."""
    generator = torch.Generator().manual_seed(21)
    batch = SyntheticBatch([], [], [], [], branches=[] if branches else None, groups=[])
    prompt = torch.empty(0, dtype=torch.long)
    for group, (length, responses) in enumerate(GROUPS):
        begin = prompt[:11] if len(prompt) == length else prompt[:0]
        rest = torch.randint(vocab_size, (length - len(begin),), generator=generator)
        prompt = torch.cat([begin, rest])
        first = torch.empty(0, dtype=torch.long)
        for response in responses:
            number, counts = len(batch.tokens), [(length, response)]
            written = torch.randint(vocab_size, (response,), generator=generator)
            if len(batch.tokens) == 1:
                written[:2] = first[:2]
            first = written
            tokens = [prompt, written]
            if branches and number % 2 and response > 1:
                again = torch.randint(vocab_size, (6,), generator=generator)
                tokens += [prompt, written[:1], again]
                counts.append((length + 3, 4))
            if batch.branches is not None:
                batch.branches.append(counts)
            total = sum(own for _, own in counts)
            noise = 0.1 * torch.randn(total, generator=generator)
            shift = (-0.6, -2e-4, 2e-4, 0.6)[number % 4]
            batch.log_ratios.append(shift + noise - noise.mean() if total else noise)
            batch.tokens.append(torch.cat(tokens))
            batch.response_lengths.append(total)
            batch.groups.append(group)
            batch.advantages.append((1.5, -0.8, 0.4)[number % 3])
    return batch


# Two data-parallel shares of at least two micro-batches. Some groups are divided over several of
# them.
CUT = Cut(replicas=2, token_budget=60, multiple=2)
LAYOUTS = ("tp=1", "dp=2", "tp=2", "pp=2,vpp=2,ep=2", "tp=2,pp=2,ep=2")


@pytest.fixture(scope="module")
def explicit(pool: Pool) -> dict[bool, StepResult]:
    """The updates by the formulas, without and with branches."""
    config = odd_moe("tp=1", training={"precision": "fp64"}, **NO_ROUTER_LOSSES)
    return {
        branches: pool.on(
            config,
            explicit_update,
            vocab_size=VOCAB_SIZE,
            batch=grouped_batch(branches=branches),
        )
        for branches in (False, True)
    }


@pytest.mark.parametrize("branches", [False, True], ids=["one branch", "branches"])
def test_the_micro_batches_of_these_tests_share_many_tokens(branches: bool) -> None:
    batch = grouped_batch(branches=branches)
    lengths = [len(tokens) for tokens in batch.tokens]
    (plan,) = plan_step(
        lengths,
        batch.response_lengths,
        mini_batches=1,
        data_parallel_size=CUT.replicas,
        token_budget=CUT.token_budget,
        micro_batch_multiple=CUT.multiple,
        prompts=batch.prompts(),
    )
    offsets, spec = [0] * len(lengths), PackSpec(0, share_prompts=True)
    columns = batch.tokens, batch.response_lengths, offsets
    rows = 0
    for members in itertools.chain(*plan.micro_batches):
        if members:
            rows += pack(spec, *columns, members, branches=batch.branches).input_ids.numel()
    assert rows < 0.8 * sum(lengths)


# Any two values of two dimensions meet.
@pytest.mark.parametrize(
    ("layout", "branches", "recompute"),
    [
        (layout, branches, "full" if branches == bool(number % 2) else "none")
        for number, layout in enumerate(LAYOUTS)
        for branches in (False, True)
    ],
)
def test_the_update_follows_the_formulas(
    pool: Pool, explicit: dict[bool, StepResult], layout: str, branches: bool, recompute: str
) -> None:
    training = {"precision": "fp64", "share_prompts": True, "recompute": recompute}
    config = odd_moe(layout, training=training, **NO_ROUTER_LOSSES)
    result = update(pool, config, batch=grouped_batch(branches=branches), cut=CUT)
    assert_same_gradients(result, explicit[branches], FP64_TOLERANCE_OF_ROUTERS)
    assert result.metrics["loss"] == pytest.approx(
        explicit[branches].metrics["loss"], rel=FP64_TOLERANCE, abs=1e-12
    )
    assert_norm_is_that_of_the_gradients(result)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("olmoe", "tp=1"),
        ("deepseek_v3", "tp=2"),  # latent attention, YaRN
        ("deepseek_v3", "pp=2,ep=2"),
        ("gpt_oss", "tp=2"),  # windows and sinks
        ("minimax_m2", "tp=1"),  # rotary positions for half of each head
        ("ernie4_5_moe", "pp=2"),  # rotates neighbouring channels
    ],
)
def test_the_update_is_that_of_repeated_prompts(
    pool: Pool, tmp_path: Path, family: str, layout: str
) -> None:
    changes = {}
    if family == "deepseek_v3":
        yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 8}
        changes["rope_scaling"] = yarn | {"mscale": 1.0, "mscale_all_dim": 0.8}
    folder = write_model(tmp_path / family, family, seed=1, **changes)
    results = []
    for share in (False, True):
        config = config_of(folder, layout=layout, init_method_std=0.15, **NO_ROUTER_LOSSES)
        training = config.training.model_copy(update={"share_prompts": share})
        config = config.model_copy(update={"training": training})
        batch = grouped_batch(VOCABULARY)
        results.append(update(pool, config, batch=batch, vocab_size=VOCABULARY, cut=CUT))
    assert_same_update(results[1], results[0], FP32_TOLERANCE)


def test_router_losses_count_a_shared_prompt_once(pool: Pool) -> None:
    """So they show that the update really shares prompts."""
    results = []
    for share in (False, True):
        config = odd_moe("tp=1", training={"precision": "fp64", "share_prompts": share})
        results.append(update(pool, config, batch=grouped_batch(), cut=CUT))
    name, error = compare(results[0].gradients, results[1].gradients)[0]
    assert "router" in name and error > 1e-4


def routed_batch() -> SyntheticBatch:
    """The batch with a rollout's routes. They depend on the tokens up to their own only, so all
    responses to a prompt have the same routes for it."""
    batch = grouped_batch()
    generator = torch.Generator().manual_seed(4)
    known: dict[tuple[int, ...], torch.Tensor] = {}
    routes = []
    for tokens in batch.tokens:
        begins = [tuple(tokens[: end + 1].tolist()) for end in range(len(tokens))]
        for begin in begins:
            drawn = torch.rand((LAYERS, EXPERTS), generator=generator).topk(TOP_K).indices
            known.setdefault(begin, drawn.to(torch.uint8))
        routes.append(torch.stack([known[begin] for begin in begins]))
    return replace(batch, routes=routes)


@pytest.mark.parametrize(
    ("replay", "reference"), [("r2", "off"), ("r3", "off"), ("r2", "r3"), ("r3", "r2")]
)
def test_replay_gives_a_shared_prompt_its_experts(pool: Pool, replay: str, reference: str) -> None:
    results = []
    for share, on in ((False, "tp=1"), (True, "tp=2,pp=2")):
        config = odd_moe(
            on,
            {"name": "grpo", **({"kl": "k3", "kl_coefficient": 0.5} if reference != "off" else {})},
            training={"precision": "fp64", "share_prompts": share},
            routing={"replay": replay, "reference_replay": reference, "volatility": True},
            **NO_ROUTER_LOSSES,
        )
        batch = routed_batch() if "r3" in (replay, reference) else grouped_batch()
        watched = update(pool, config, watched_update, batch=batch, cut=CUT, mini_batches=3)
        assert watched.wrong == 0
        results.append(watched)
    repeated, shared = results
    # The compared gradients are those of the third mini-batch. Its weights are the result of the
    # first two updates, so all three updates must agree.
    assert_same_gradients(shared.result, repeated.result, FP64_TOLERANCE_OF_ROUTERS)
    assert shared.replayed < repeated.replayed


def test_verify_shares_prompts_on_all_layouts_or_on_none() -> None:
    config = odd_moe("tp=1", training={"share_prompts": None})
    for layouts, expected in ((["tp=1", "pp=2"], True), (["tp=1", "cp=2"], False)):
        alike = decide_share_prompts(config, [Layout.parse(layout) for layout in layouts])
        assert alike.training.share_prompts is expected
