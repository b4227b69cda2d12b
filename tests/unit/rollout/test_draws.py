"""The use of groups that an earlier start of the run has finished."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from aiohttp import web

from gspo_megatron.config import Config
from gspo_megatron.data.inputs import read_inputs
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.environments.episode import EpisodeLimits, EpisodeRunner
from gspo_megatron.errors import EpisodeError, RewardError, error_of
from gspo_megatron.rl.served_rollouts import origin_of_rollouts
from gspo_megatron.rollout.engine import RolloutRequest, Sampling
from gspo_megatron.rollout.store import read_groups
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.rollout.vllm.episodes import Scorers, ServedRequests
from tests.fleets import ScheduledFleet
from tests.unit.rollout.conftest import REWARD
from tests.unit.rollout.double import Double, fleet_of_doubles, plain, weights

T = TypeVar("T")
DRAW = RolloutRequest(
    name="step_00000001_0",
    key="data.prompts",
    rows=[3, 0, 5],
    first=0,
    per_prompt=2,
    sampling=Sampling(4),
    seed=1,
    version=0,
)


def beside(scorers: Scorers, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread. Meanwhile the main thread scores, as in the rollout service."""

    def run() -> T:
        try:
            return asyncio.run(work)
        finally:
            scorers.stop()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        scorers.work()
        return running.result()


def draw(
    config: Config,
    folder: Path,
    wanted: RolloutRequest = DRAW,
    asked: list[Any] | None = None,
    runner: EpisodeRunner | None = None,
) -> tuple[int, dict[int, RolloutGroup]]:
    """Generate a request in a new service. Returns the number of responses that the server gave,
    and the groups. `asked` collects the sampling settings of each request. runner: None for single
    turns. Raises the error that rank 0 would get."""
    scorers = Scorers(config, inputs := read_inputs(config))

    async def run() -> tuple[int, dict[str, Any]]:
        async with fleet_of_doubles() as (fleet, [double]):
            folder.mkdir(exist_ok=True)
            await fleet.update(weights(folder, 0))
            origin, bank = origin_of_rollouts(config), folder / "bank"
            draws = ServedRequests(fleet.scheduler, scorers, inputs.files, {}, bank, origin, runner)
            before = double.calls["/inference/v1/generate"]
            if asked is not None:
                double.faults["/inference/v1/generate"] = partial(listen, asked)
            running = draws.begin(wanted)
            assert running.task is not None
            await running.task
            await scorers.close()
            return double.calls["/inference/v1/generate"] - before, running.status()

    count, status = beside(scorers, run())
    assert status["done"]
    if (error := status["error"]) is not None:
        raise error_of(error["kind"], error["text"])
    return count, read_groups(folder / "bank" / f"{wanted.name}.groups")


def test_a_teacher_is_not_asked_about_responses_of_an_evaluation(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    config = configured(
        "data.eval_prompts=toy/test.jsonl",
        "objective.distillation.url=http://127.0.0.1:1/v1",  # nobody answers there
        "reward.retries=0",
    )
    name = "evaluation_00000001"
    _, groups = draw(config, tmp_path, replace(DRAW, name=name, key="data.eval_prompts", rows=[0]))
    assert groups[0].rewards.tolist() == [0.25, 0.25] and groups[0].teacher_logprobs is None


def test_groups_whose_teacher_is_away_are_dropped(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    config = configured(
        "objective.distillation.url=http://127.0.0.1:1/v1",  # nobody answers there
        "reward.retries=0",
        "reward.on_failure=drop_group",
    )
    _, groups = draw(config, tmp_path / "run", replace(DRAW, rows=[0]))
    assert groups[0].rewards.tolist() == [0.25, 0.25] and groups[0].failed == (1, 0, 0)
    assert np.isnan(groups[0].shaped).all() and np.isnan(groups[0].teacher_logprobs).all()


async def listen(asked: list[Any], request: web.Request, answer: Any) -> web.StreamResponse:
    """A server without faults that records its requests."""
    asked.append((await request.json())["sampling_params"])
    return await plain(request, answer)


def test_a_suite_is_drawn_with_its_own_sampling_and_judged_by_its_own_reward(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    suite = {
        "prompts": "toy/test.jsonl",
        "reward": {"import_path": "suite_test_reward:reward"},
        "top_p": 0.5,
        "top_k": 7,
        "temperature": 0.25,
    }
    (tmp_path / "suite_test_reward.py").write_text(REWARD.format(value=0.125))
    usual = ("reward.import_path=", "reward.name=exact_match")
    config = configured(*usual, f"evaluation.suites={json.dumps({'near': suite})}")
    sampling = Sampling(3, temperature=0.25, top_p=0.5, top_k=7)
    of_suite = replace(DRAW, name="evaluation_00000000_near", rows=[1, 0], sampling=sampling)
    of_suite = replace(of_suite, key="evaluation.suites.near")
    asked: list[Any] = []
    count, groups = draw(config, tmp_path / "run", of_suite, asked)
    assert count == 4 and groups.keys() == {0, 1}
    for given in asked:
        assert (given["temperature"], given["top_p"], given["top_k"]) == (0.25, 0.5, 7)
        assert given["max_tokens"] == 3
    assert {float(x) for each in groups.values() for x in each.rewards} == {0.125}
    changed = suite | {"reward": {"name": "exact_match"}}
    other = configured(*usual, f"evaluation.suites={json.dumps({'near': changed})}")
    assert origin_of_rollouts(other) != origin_of_rollouts(config)


def test_reasons_of_rewards_travel_with_their_groups(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "reasoned_reward.py").write_text(
        "from gspo_megatron.types import Reasoned\n"
        "def reward(sample):\n"
        "    return Reasoned(0.5, 'é\\nof ' + sample.row_id) if sample.row_id[-1] != '1' else 1.0\n"
    )
    config = configured("reward.import_path=reasoned_reward:reward")
    _, groups = draw(config, tmp_path / "run")
    found = [groups[number] for number in range(3)]  # the groups of the rows 3, 0 and 5
    joined = RolloutGroup.join(found)
    assert joined.reasons == [
        *["é\nof train.jsonl:4"] * 2, "", "", *["é\nof train.jsonl:6"] * 2
    ]  # fmt: skip
    assert joined.rewards.tolist() == [0.5, 0.5, 1.0, 1.0, 0.5, 0.5]


def test_groups_are_used_again_unless_what_decides_them_has_changed(
    configured: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*overrides: str) -> tuple[int, set[float]]:
        """Generate the request as a new process would do it. Returns the number of responses, and
        the rewards."""
        monkeypatch.delitem(sys.modules, "bank_test_reward", raising=False)
        count, groups = draw(configured(*overrides), tmp_path / "run")
        assert groups.keys() == {0, 1, 2}
        return count, {float(x) for each in groups.values() for x in each.rewards}

    assert drawn() == (6, {0.25})
    assert drawn() == (0, {0.25})
    assert drawn("parallel.layout=tp=2") == (0, {0.25})
    # With --change, the weights of later steps are other weights.
    assert drawn("optimizer.learning_rate=1e-4") == (6, {0.25})
    assert drawn() == (6, {0.25})
    (tmp_path / "bank_test_reward.py").write_text(REWARD.format(value=0.5))
    assert drawn() == (6, {0.5})
    assert drawn("reward.scale=2.0")[0] == 6


def test_groups_are_scored_again_when_a_reward_that_failed_works_again(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    """The code of the reward and all settings stay the same."""
    (tmp_path / "away_reward.py").write_text(
        "from pathlib import Path\n"
        "def reward(sample):\n"
        "    return float(Path(__file__).with_name('answer').read_text())\n"
    )
    config = configured(
        "reward.import_path=away_reward:reward",
        "reward.retries=0",
        "reward.on_failure=drop_group",
    )
    count, groups = draw(config, tmp_path / "run")
    assert count == 6 and all(np.isnan(each.shaped).all() for each in groups.values())
    (tmp_path / "answer").write_text("0.5")
    for drawn in (6, 0):
        count, groups = draw(config, tmp_path / "run")
        assert count == drawn and {float(x) for g in groups.values() for x in g.shaped} == {0.5}


def test_a_reward_that_ends_the_program_is_a_mistake_of_the_reward(
    configured: Callable[..., Config],
) -> None:
    config = configured()
    scorers = Scorers(config, read_inputs(config))
    with pytest.raises(RewardError, match=r"the reward function ended with SystemExit\(3\)"):
        beside(scorers, scorers.in_main(lambda: sys.exit(3)))


@pytest.mark.parametrize("error", ["UserError('no key')", "ConfigError(['no key'])"])
def test_any_error_of_this_package_in_a_reward_is_one_of_the_reward(
    configured: Callable[..., Config], tmp_path: Path, error: str
) -> None:
    """A run is saved after errors of rewards, and not after any UserError."""
    name = f"strict_{error.partition('(')[0]}"  # Python imports a module once
    (tmp_path / f"{name}.py").write_text(
        f"from gspo_megatron.errors import *\ndef reward(sample):\n    raise {error}\n"
    )
    with pytest.raises(RewardError, match="^no key$"):
        draw(configured(f"reward.import_path={name}:reward"), tmp_path / "run")


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_an_environment_that_ends_in_an_unusual_way_ends_the_draw_with_an_error(
    configured: Callable[..., Config], tmp_path: Path, error: type[BaseException]
) -> None:
    class Ending:
        async def rollout(self, *_: Any) -> None:
            raise error

    config, told = configured(), rf"environment Ending: rollout ended with {error.__name__}\(\)"
    runner = EpisodeRunner(Ending(), read_inputs(config).tokenizer, EpisodeLimits(1, 4))
    with pytest.raises(EpisodeError, match=told):
        draw(config, tmp_path / "run", runner=runner)


def test_what_decides_rollouts_is_told_apart(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    def origin(*overrides: Any) -> str:
        return origin_of_rollouts(configured(*overrides))

    first = origin()
    for same in (
        "logging.dir=elsewhere",
        "training.steps=7",
        "objective.reference_offload=true",
        "rollout.vllm.servers=2",
        "model.megatron.recompute_num_layers=1",
    ):
        assert origin(same) == first, same
    for other in (
        "training.seed=2",
        "reward.clip=1.0",
        "model.megatron.num_layers=2",
        # The responses of later steps are of weights that follow from these.
        "objective.name=grpo",
        "objective.advantage=group_mean",
        "optimizer.learning_rate=0.5",
    ):
        assert origin(other) != first, other
    # With gdpo, the stored rewards are advantages.
    gdpo = "objective.advantage=gdpo"
    assert len({first, origin(gdpo), origin(gdpo, "objective.advantage_std=population")}) == 3
    url = "objective.distillation.url"
    taught = origin(f"{url}=http://a/v1")
    assert taught not in (
        first,
        origin(f"{url}=http://a/v1", "objective.distillation.form=forward_kl_topk"),
    )
    assert origin(f"{url}=http://b/v1") == taught
    teachers = "objective.distillation.teachers={a: {url: 'http://%s/v1'}, b: {%s}}"
    field = "objective.distillation.field=teacher"
    several = origin(field, teachers % ("a", ""))
    assert origin(field, teachers % ("b", "")) == several
    assert origin(field, teachers % ("a", "url: 'http://b/v1'")) != several
    (tmp_path / "told_objective.py").write_text("def loss(inputs): ...\n")
    own = origin("objective.import_path=told_objective:loss")
    (tmp_path / "told_objective.py").write_text("def loss(inputs): return 1\n")
    assert origin("objective.import_path=told_objective:loss") not in (own, first)
    prompts = tmp_path / "toy" / "train.jsonl"
    moved = prompts.with_name("moved.jsonl")
    moved.write_bytes(prompts.read_bytes())
    assert origin(f"data.prompts={json.dumps(str(moved))}") == first
    moved.write_text(moved.read_text().replace("a", "e"))
    assert origin(f"data.prompts={json.dumps(str(moved))}") != first


# --- No bias. The server is a stand-in, because vLLM's time for a prompt cannot be set ------------

STEPS, BATCH, ROWS = 6, 4, 16


class Slow:
    """Prompts whose tokens have an odd sum take ten times as long. The server reports the first
    token after half of the time."""

    def __init__(self, double: Double) -> None:
        self.double = double
        double.counts = {}

    async def __call__(self, request: web.Request, answer: Any) -> web.StreamResponse:
        given, counts = await request.json(), self.double.counts
        if "request_id" in given:  # a probe has no request_id
            assert counts is not None
            half = (0.1 if sum(given["token_ids"]) % 2 else 0.01) / 2
            await asyncio.sleep(half)
            counts[given["request_id"]] = 1
            await asyncio.sleep(half)
            del counts[given["request_id"]]
        return await plain(request, answer)


def step_by_step(config: Config, folder: Path, ahead: int) -> tuple[list[list[int]], list[int]]:
    """Make the same requests as ReinforcementLoop. Returns the rows that each step trains on, in
    the order in which their groups were finished, and the ages of all tokens."""
    scorers = Scorers(config, inputs := read_inputs(config))
    rows_of = {tuple(p.token_ids): n for n, p in enumerate(inputs.files["data.prompts"])}
    assert len(rows_of) == ROWS
    trained: list[list[int]] = []
    ages: list[int] = []

    async def steps(fleet: ScheduledFleet) -> None:
        origin = origin_of_rollouts(config)
        draws = ServedRequests(fleet.scheduler, scorers, inputs.files, {}, folder / "bank", origin)
        loader = PromptLoader(ROWS, BATCH, seed=1)
        for step in range(1, STEPS + 1):
            await fleet.update(weights(folder, step - 1))
            numbers = range(step, min(step + ahead, STEPS) + 1)
            running = [
                draws.begin(
                    replace(DRAW, name=f"s{n}", rows=rows, seed=n, version=max(n - 1 - ahead, 0))
                )
                for n, rows in zip(numbers, loader.peek(len(numbers)), strict=True)
            ]
            loader.next()
            assert running[0].task is not None
            await running[0].task
            assert running[0].error is None
            trained.append([])
            for group in read_groups(draws.path(f"s{step}")).values():
                tokens = group.tokens[: group.prompt_lengths[0]]
                trained[-1].append(rows_of[tuple(tokens.tolist())])
                ages.extend((step - 1 - group.versions).tolist())

    async def run() -> None:
        async with fleet_of_doubles(max_staleness=ahead) as (fleet, [double]):
            double.faults["/inference/v1/generate"] = Slow(double)
            folder.mkdir()
            await steps(fleet)

    beside(scorers, run())
    assert len(trained) == STEPS
    return trained, ages


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_slow_prompts_are_trained_when_the_synchronous_run_trains_them(
    configured: Callable[..., Config], tmp_path: Path, ahead: int
) -> None:
    config = configured()
    trained, ages = step_by_step(config, tmp_path / "run", ahead)
    loader = PromptLoader(ROWS, BATCH, seed=1)
    assert [sorted(rows) for rows in trained] == [sorted(loader.next()) for _ in range(STEPS)]
    assert min(ages) >= 0 and max(ages) <= ahead
    assert ahead == 0 or max(ages) > 0
    # For comparison: a run that trained only on the half of each batch that is finished first would
    # be biased, because it would use hardly any slow prompts. For whole batches, the assertion
    # below would fail.
    prompts = read_inputs(config).files["data.prompts"]
    slow = {n for n, prompt in enumerate(prompts) if sum(prompt.token_ids) % 2}
    kept = [row for rows in trained for row in rows[: BATCH // 2]]
    slow_ones = [sum(row in slow for row in rows) for rows in trained]
    fewest = sum(max(0, count - BATCH // 2) for count in slow_ones)
    # A busy machine may delay one fast response, so one slow response more than the minimum is
    # accepted.
    assert sum(row in slow for row in kept) <= fewest + 1 < sum(slow_ones) / 2
