"""New weights while responses are in progress. Each token must have the version of the weights that
generated it. transformers computes the log-probs with each version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response
from tests.fleets import ScheduledFleet
from tests.vllm.servers import Sample, Server
from tests.vllm.test_facts import SAME, TEMPERATURE, WRONG, reference_logprobs
from tests.vllm.test_weights import VOCABULARY, served, weights

# These tests are `full`: responses must still be in progress at the second update, and on a busy
# machine they are not.
pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1800)]
LENGTHS = (3, 20, 60, 300)  # the numbers of tokens of the prompts
TOKENS = 1500  # far more tokens than are generated before the updates


def prompts() -> list[list[int]]:
    draws = np.random.default_rng(7)
    return [draws.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]


def errors(
    prompt: Sequence[int], response: Response, folder: Path, replay_from: int = 0
) -> np.ndarray:
    """The difference of each log-prob from the log-prob by transformers with these weights, in
    nats: [tokens]. From row `replay_from` on, the server's experts are used."""
    logprobs, routes = response.logprobs.tolist(), response.routes[:-1]
    sample = Sample(list(prompt), response.token_ids.tolist(), logprobs, routes)
    expected = reference_logprobs(folder, sample, replay_from)
    return (expected - torch.tensor(logprobs)).abs().numpy()


async def draw(fleet: ScheduledFleet, version: int) -> list[Response]:
    sampling = {"temperature": TEMPERATURE, "max_tokens": TOKENS, "ignore_eos": True}
    calls = [
        fleet.generate(prompt, {**sampling, "seed": seed}, version)
        for seed, prompt in enumerate(prompts())
    ]
    return await asyncio.gather(*calls)


async def have_begun(
    fleet: ScheduledFleet, drawing: asyncio.Task[list[Response]], tokens: int
) -> None:
    """Wait until the server has generated a given number of further tokens."""
    client = fleet.servers[0].client
    before = None
    while True:
        found = (await client.figures(seconds=9)).get("generation_tokens_total", 0.0)
        before = found if before is None else before
        if found - before >= tokens:
            return
        assert not drawing.done(), "all responses ended before the next update"
        await asyncio.sleep(0.05)


def updated(
    server: Server, folders: Sequence[Path], *, keeps: bool = False, counts: bool = True
) -> tuple[list[Response], list[Response]]:
    """Responses during which the weights were updated, and later responses to the same prompts.
    folders: the folder of each version."""

    versions = [weights(version, folder) for version, folder in enumerate(folders)]

    async def work(fleet: ScheduledFleet) -> tuple[list[Response], list[Response]]:
        fleet.change_settings(max_staleness=2, keeps_kv=keeps)
        await fleet.update(versions[0])
        able = fleet.servers[0].abilities
        assert able.counts_tokens and able.sequences == 64
        fleet.servers[0].abilities = replace(able, counts_tokens=counts)
        drawing = asyncio.create_task(draw(fleet, 0))
        for newest in versions[1:]:
            await have_begun(fleet, drawing, 150)
            await fleet.update(newest)
            assert fleet.servers[0].version == newest.version
        found = await drawing
        assert fleet.scheduler.resubmitted == 0 and not fleet.problems()
        return found, await draw(fleet, len(folders) - 1)

    return served([server], work)


@pytest.fixture
def folders(tiny_qwen3_moe: Callable[[int], Path]) -> list[Path]:
    """The folders of three versions. The first and the third version have equal weights. The
    weights of the second version give another log-prob for every token."""
    return [tiny_qwen3_moe(seed) for seed in (0, 1, 0)]


@pytest.mark.parametrize("keeps", [False, True], ids=["recompute", "keep"])
def test_each_token_has_the_version_that_drew_it(
    vllm_server: Server, folders: list[Path], keeps: bool
) -> None:
    found, after = updated(vllm_server, folders, keeps=keeps)
    for prompt, response in zip(prompts(), found, strict=True):
        versions = response.versions
        assert len(versions) == len(response.token_ids) == TOKENS
        assert (np.diff(versions) >= 0).all() and set(versions) == {0, 1, 2}
        first, second = (int((versions < version).sum()) for version in (1, 2))
        old = errors(prompt, response, folders[0])
        # The first weights have generated all tokens before the first update, but none of the later
        # tokens.
        assert old[:first].max() < SAME
        assert old[first] > 10 * SAME and old[first : first + 20].max() > WRONG
        if not keeps:
            # All keys and values come from the second weights. test_facts explains why the median
            # is tested.
            row = len(prompt) + first - 1
            new = errors(prompt, response, folders[1], row)[first:]
            assert np.median(new[: second - first]) < WRONG
            assert np.median(new[second - first :]) > WRONG
    # The server must not use its old cache of these prompts.
    for prompt, response in zip(prompts(), after, strict=True):
        assert set(response.versions) == {2}
        assert errors(prompt, response, folders[2]).max() < SAME


def test_a_server_that_cannot_count_ends_responses_first(
    vllm_server: Server, folders: list[Path]
) -> None:
    for version, responses in enumerate(updated(vllm_server, folders[:2], counts=False)):
        for prompt, response in zip(prompts(), responses, strict=True):
            assert set(response.versions) == {version}
            assert errors(prompt, response, folders[version]).max() < SAME
