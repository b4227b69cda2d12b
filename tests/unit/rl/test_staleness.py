"""The responses of servers that a step reads from the store: the ages of tokens, the tokens that
are learnt from, and metrics. The expected values were counted by hand."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gspo_megatron.observe.collapse import CollapseWatch
from gspo_megatron.process.heartbeat import heard_by
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rl import served_rollouts
from gspo_megatron.rl.loop import update_policy
from gspo_megatron.rl.rollout_metrics import RolloutMetrics
from gspo_megatron.rl.run import collector_of
from gspo_megatron.rl.served_rollouts import ServedRollouts
from gspo_megatron.rollout.engine import RolloutRequest, RolloutShare, Sampling
from gspo_megatron.rollout.store import FOLDER, SUFFIX, RequestFile
from gspo_megatron.rollout.types import RolloutGroup
from gspo_megatron.types import Prompt
from tests.unit.models.one_rank import tiny_config, tiny_policy
from tests.unit.routing.steps import a_step, moe_policy, updater_for

pytestmark = pytest.mark.usefixtures("one_rank")

# the current version of the weights, and the largest age of a token in versions
VERSION, AHEAD = 7, 3
DRAW = RolloutRequest(
    "step_00000008_0", "data.prompts", [0, 1], 0, 2, Sampling(9), 1, VERSION - AHEAD
)
LAYERS, TOP_K = 2, 2


class Tokenizer:
    pad_id, eos_ids = 0, (2,)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@dataclass(frozen=True)
class Row:
    """One sequence.

    kinds: p is a token of a prompt, R is a token that the policy wrote, r is a token between turns.
    ages: the age of each token outside of prompts. lost: numbers of tokens for which the server
    returned no experts.
    """

    kinds: str
    ages: str
    lost: tuple[int, ...] = ()

    @property
    def response(self) -> str:
        return self.kinds.replace("p", "")


# Two groups of two responses. The policy wrote 14 tokens: 5 of age 0, 3 of age 1, 2 of age 2, 4 of
# age 3. Tokens between turns have the age of the next turn, and are not counted.
EPISODES = [
    [Row("ppRRrrRRpR", "0033330"), Row("pRRR", "012", lost=(1,))],
    # one branch with two turns; three branches
    [Row("pRrrrR", "13333"), Row("pRppRRprR", "13022", lost=(4, 7))],
]
# Two groups without tokens between turns.
SINGLE = [[Row("ppRRR", "330"), Row("pR", "2")], [Row("pRR", "10")] * 2]


def write(folder: Path, groups: list[list[Row]], *, episodes: bool, routes: bool) -> None:
    file = RequestFile(folder / FOLDER / f"{DRAW.name}{SUFFIX}", {})
    for number, sequences in enumerate(groups):
        kinds = "".join(each.kinds for each in sequences)
        response = "".join(each.response for each in sequences)
        ages = np.array([int(age) for each in sequences for age in each.ages], np.int32)
        assert len(ages) == len(response)
        group = RolloutGroup(
            tokens=np.arange(len(kinds), dtype=np.int32),
            prompt_lengths=np.array([each.kinds.count("p") for each in sequences]),
            response_lengths=np.array([len(each.response) for each in sequences]),
            rollout_logprobs=np.full(len(response), -1.0, np.float32),
            versions=VERSION - ages,
            truncated=np.zeros(len(sequences), bool),
            sample_index=np.arange(2) + 2 * number,
            group_index=np.full(2, number),
            rewards=np.arange(2.0),
            shaped=np.arange(2.0),
            turns=np.zeros(2, np.int64),
            turn_rewards=np.zeros(0),
            turn_tokens=np.zeros(0, np.int64),
            parts=np.zeros((2, 0)),
            part_names=(),
            failed_calls=np.array([number, 2, 0]),
            reward_seconds=np.full(1, 0.25),
        )
        if episodes:
            group.sampled = np.array([kind == "R" for kind in response])
            group.in_response = np.array([kind != "p" for kind in kinds])
        if routes:
            group.routes = np.concatenate([experts(each) for each in sequences])
        file.append(group)
    file.close()


def experts(sequence: Row) -> np.ndarray:
    """The experts [tokens, layers, k]. The last token of a branch has no experts, because it was
    never an input."""
    found = np.ones((len(sequence.kinds), LAYERS, TOP_K), np.uint8)
    found[list(sequence.lost)] = 0
    found[[n for n in range(len(found)) if sequence.kinds[n : n + 2] in ("Rp", "R", "r")]] = 0
    return found


def read(
    folder: Path,
    groups: list[list[Row]],
    bound: int | None = None,
    *,
    episodes: bool = True,
    routes: bool = False,
) -> tuple[RolloutShare, dict[str, float], ServedRollouts]:
    """The data that a step reads for these groups, and its metrics."""
    write(folder, groups, episodes=episodes, routes=routes)
    config = tiny_config(
        rollout={"engine": "vllm", "max_staleness": AHEAD, "vllm": {"servers": 1}},
        objective={"max_token_staleness": bound},
        routing={"replay": "r3"} if routes else {},
        logging={"dir": str(folder)},
    )
    prompts = [Prompt("p", "", f"f:{n}", {}, (0,)) for n in range(2)]
    inputs: Any = SimpleNamespace(tokenizer=Tokenizer(), files={"data.prompts": prompts})
    reward = Reward("none", lambda _: 0.0)
    source = ServedRollouts(config, inputs, tiny_policy(), torch.device("cpu"))
    source.version = VERSION
    collector = collector_of(config, inputs, source, reward, source.device)
    drawn, metrics = source.read(DRAW, [0, 1]), RolloutMetrics(collector)
    metrics.add(drawn)
    return drawn, metrics.reduce(), source


def staleness(metrics: dict[str, float]) -> dict[str, float]:
    prefix = "staleness/"
    return {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}


def test_ages_of_episodes_are_those_of_what_the_policy_wrote(tmp_path: Path) -> None:
    drawn, metrics, _ = read(tmp_path, EPISODES)
    assert drawn.staleness is not None
    ages = [0, 0, 3, 3, 0, 0, 1, 2, 1, 3, 1, 3, 0, 2]
    assert drawn.staleness.tolist() == ages
    assert staleness(metrics) == {
        "mean": pytest.approx(19 / 14),
        "max": 3,
        "tokens_older_than_1": pytest.approx(6 / 14),
    }
    # Without a limit of the age, a step learns from all tokens of the policy.
    assert drawn.group.learnt is not None
    assert drawn.group.learnt.tolist() == drawn.group.sampled.tolist()


@pytest.mark.parametrize(("bound", "masked"), [(0, 9), (1, 6), (2, 4)])
def test_tokens_of_episodes_beyond_the_bound_are_left_out(
    tmp_path: Path, bound: int, masked: int
) -> None:
    drawn, metrics, _ = read(tmp_path, EPISODES, bound)
    assert staleness(metrics)["masked"] == pytest.approx(masked / 14)
    kinds = "".join(each.response for group in EPISODES for each in group)
    ages = "".join(each.ages for group in EPISODES for each in group)
    wanted = [kind == "R" and int(age) <= bound for kind, age in zip(kinds, ages, strict=True)]
    assert drawn.group.learnt is not None
    assert drawn.group.learnt.tolist() == wanted and sum(wanted) == 14 - masked
    # The mask of the policy's tokens stays as it is, because turns are counted with it.
    assert drawn.group.sampled is not None and int(drawn.group.sampled.sum()) == 14


def test_ages_of_single_turns_are_those_of_all_tokens(tmp_path: Path) -> None:
    drawn, metrics, _ = read(tmp_path, SINGLE, 2, episodes=False)
    assert drawn.staleness is not None and drawn.group.sampled is None
    assert drawn.staleness.tolist() == [3, 3, 0, 2, 1, 0, 1, 0]
    assert drawn.group.learnt is not None
    assert drawn.group.learnt.tolist() == [False, False] + [True] * 6
    assert staleness(metrics) == {
        "mean": 10 / 8,
        "max": 3,
        "tokens_older_than_1": 3 / 8,
        "masked": 2 / 8,  # a token of age 2 is within the bound
    }


def test_tokens_at_one_age_exactly_are_not_older_than_it(tmp_path: Path) -> None:
    _, metrics, _ = read(tmp_path, [[Row("pRR", "11")] * 2] * 2, 1, episodes=False)
    assert staleness(metrics) == {"mean": 1, "max": 1, "tokens_older_than_1": 0, "masked": 0}


@pytest.mark.parametrize("name", ["gspo", "dapo"])
def test_a_step_of_tokens_that_are_all_too_old_is_no_collapse(name: str) -> None:
    """Such a step has no tokens to learn from. Its loss and its gradient are 0, and not NaN."""
    updater, step = updater_for(moe_policy(), {}, {"name": name}), a_step()
    step.sequences.mask = torch.zeros(sum(step.index.response_lengths))
    index = replace(step.index, masked_lengths=(0,) * len(step.index.lengths))
    plans = [replace(each, num_response_tokens=0) for each in step.plans]
    metrics = update_policy(updater, step.sequences, index, plans, torch.ones(len(index.lengths)))
    assert (metrics["loss"], metrics["grad_norm"]) == (0, 0)
    assert CollapseWatch().add(1, metrics | {"reward/mean": 1.0}) is None


def test_turns_and_branches_of_episodes_are_counted(tmp_path: Path) -> None:
    _, metrics, _ = read(tmp_path, EPISODES)
    assert metrics["environment/turns"] == (3 + 1 + 2 + 3) / 4
    assert metrics["environment/branches"] == (2 + 1 + 1 + 3) / 4
    assert metrics["environment/sampled_share"] == pytest.approx(14 / 20)


def test_missing_experts_are_counted_beside_the_last_token_of_each_branch(tmp_path: Path) -> None:
    """The 29 tokens are in seven branches, whose last tokens have no experts. The server returned
    no experts for three other tokens."""
    _, _, source = read(tmp_path, EPISODES, routes=True)
    assert sum(len(each.kinds) for group in EPISODES for each in group) == 29
    assert (source.counted["missing_routes"], source.counted["routes"]) == (3, 29 - 7)


def test_missing_experts_of_single_turns_are_counted(tmp_path: Path) -> None:
    groups = [[Row("pRRR", "000", lost=(0, 2)), Row("ppR", "0")]] * 2
    _, _, source = read(tmp_path, groups, episodes=False, routes=True)
    assert (source.counted["missing_routes"], source.counted["routes"]) == (4, 14 - 4)


@pytest.mark.parametrize(("restarts", "signs"), [(False, 1), (True, 3)])
def test_servers_that_restart_are_a_sign_of_life(
    tmp_path: Path, restarts: bool, signs: int
) -> None:
    """Nothing else moves while a server loads a large model, and the run must not end itself."""
    *_, found = read(tmp_path, SINGLE, episodes=False)
    source: Any = found
    counts = dict.fromkeys(("finished", "scoring", "tokens", "drawn", "heartbeats"), 0)
    told = {**counts, "is_restarting": restarts}
    source.service = SimpleNamespace(begin_request=lambda _: None, request_status=lambda _: told)
    heard: list[str] = []

    def three_times(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        with heard_by(lambda: heard.append("")):
            return [look() for _ in range(3)][-1]

    source.sync = SimpleNamespace(wait_for=three_times)
    scorer: Any = SimpleNamespace(adopt=lambda _: None)
    prompts = {number: Prompt("p", "", "s") for number in range(2)}
    source.take(DRAW, prompts, scorer, router_noise=False)
    assert len(heard) == signs


def test_tokens_of_weights_older_than_the_draw_may_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="outside of versions 4 to 7"):
        read(tmp_path, [[Row("pR", "4")] * 2] * 2, episodes=False)


@pytest.mark.parametrize(("ahead", "seconds"), [(0, 4.0), (AHEAD, 12.0)])
def test_the_speed_of_servers_is_that_of_the_time_in_which_they_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, seconds: float
) -> None:
    """Servers that generate ahead have worked since the last update, 12 seconds ago. Others have
    worked only while the ranks waited, which took 4 seconds."""
    groups = [[Row("pRRR", "000", lost=(0, 2)), Row("ppR", "0")]] * 2
    *_, found = read(tmp_path, groups, episodes=False, routes=True)
    rollout = {"engine": "vllm", "max_staleness": ahead, "vllm": {"servers": 1}}
    figures = {"kv_usage": 0.25, "restarts": 2.0, "resubmitted": 3.0}
    times = {"began": 0.0, "time": 16.0, "busy_seconds": 4.0, "working_seconds": 12.0}
    source: Any = found
    source.config = tiny_config(rollout=rollout)
    source.service = SimpleNamespace(figures=lambda: figures | times)
    source.sync = SimpleNamespace(send_weights=lambda version: {"sync/version": version})
    source.updated, now = 100.0, iter([112.0, 113.0])
    monkeypatch.setattr(served_rollouts, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    source.counted.update(tokens=300.0, seconds=4.0)
    assert source.take_weights(VERSION) == {
        "sync/version": VERSION,
        "engine/tokens_per_second": 300 / seconds,
        "engine/kv_usage": 0.25,
        "engine/restarts": 2.0,
        "rollout/resubmitted": 3.0,
        "engine/busy_share": 4 / 16,
        "perf/engines_idle_share": 1 - 12 / 16,
        "replay/missing_rows": 4 / 10,
    }
    again = source.take_weights(VERSION)  # nothing was generated since then
    assert again["engine/tokens_per_second"] == 0 and "replay/missing_rows" not in again


@pytest.mark.parametrize(("ahead", "tokens", "seconds"), [(0, 40, 1.0), (AHEAD, 70, 2.0)])
def test_a_suite_is_no_part_of_the_speed_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, tokens: int, seconds: float
) -> None:
    """The trainer needs no experts for its tokens, either. Servers that generate ahead are measured
    by all the time since the last update, in which they worked for the suite, too."""
    groups = [[Row("pRRR", "000", lost=(0, 2)), Row("ppR", "0")]] * 2
    *_, found = read(tmp_path, groups, episodes=False, routes=True)
    suite = replace(DRAW, name="evaluation_00000007_s", key="evaluation.suites.s")
    first, second = (tmp_path / FOLDER / f"{each.name}{SUFFIX}" for each in (DRAW, suite))
    shutil.copyfile(first, second)

    def status(name: str) -> dict[str, Any]:
        counts = dict.fromkeys(("finished", "scoring", "drawn", "heartbeats"), 0)
        return {**counts, "tokens": 40 if name == DRAW.name else 30, "is_restarting": False}

    rollout = {"engine": "vllm", "max_staleness": ahead, "vllm": {"servers": 1}}
    source: Any = found
    source.config = tiny_config(rollout=rollout)
    source.service = SimpleNamespace(begin_request=lambda _: None, request_status=status)
    source.sync = SimpleNamespace(wait_for=lambda look: look())
    source.counted.clear()
    now = itertools.count()  # each look at the clock takes a second
    clock = SimpleNamespace(perf_counter=lambda: float(next(now)))
    monkeypatch.setattr(served_rollouts, "time", clock)
    scorer: Any = SimpleNamespace(adopt=lambda _: None)
    prompts = {number: Prompt("p", "", "s") for number in range(2)}
    for request in (suite, DRAW):
        source.take(request, prompts, scorer, router_noise=False)
    assert (source.counted["tokens"], source.counted["seconds"]) == (tokens, seconds)
    assert (source.counted["missing_routes"], source.counted["routes"]) == (4, 14 - 4)
