"""The rules of an ablation on synthetic runs: collapse, comparison, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo_megatron.errors import DataError
from gspo_megatron.observe import ablation
from gspo_megatron.observe.ablation import Arm, LoadedArm, is_finished, load_arms
from gspo_megatron.observe.ablation_findings import findings
from gspo_megatron.observe.runs import Run
from gspo_megatron.observe.sinks import MetricsWriter

Figures = dict[str, float]


def run_of(rewards: Sequence[float | None], **others: Sequence[float | None]) -> Run:
    """A run in memory; None is a figure that was not finite."""
    records = [
        {"step": step, "reward/mean": reward, "loss": 0.0, "grad_norm": 1.0}
        for step, reward in enumerate(rewards, start=1)
    ]
    for key, values in others.items():
        for record, value in zip(records, values, strict=True):
            record[key] = value
    return Run(Path("run"), "run", "run", tuple(records))


def write_run(
    folder: Path, steps: int, accuracy: float, seconds: float = 1.0, **more: float
) -> Path:
    with MetricsWriter(folder) as metrics:
        metrics.write({"phase": "rl", "step": 0, "evaluation/accuracy": 0.25})
        for step in range(1, steps + 1):
            record = {
                "phase": "rl",
                "step": step,
                "reward/mean": 0.5,
                "loss": 0.0,
                "grad_norm": 1.0,
                "clip/token/binding": 0.1,
                "mismatch/abs_mean": 0.01,
                "routing/volatility": 0.04,
                "routing/layer_02/volatility": 0.05,
                "routing/layer_10/volatility": 0.03,
                "perf/step_seconds": seconds,
                "perf/peak_memory_bytes": 2**30,
                **more,
            }
            if step == steps:
                record["evaluation/accuracy"] = accuracy
            metrics.write(record)
    return folder


def arm(folder: Path, name: str, accuracies: Sequence[float], **more: float) -> Arm:
    """Writes an arm's runs, seeds from 1."""
    baseline, _, replay = name.partition("+")
    folders = {
        seed: write_run(folder / name / f"seed_{seed}", 20, accuracy, **more)
        for seed, accuracy in enumerate(accuracies, start=1)
    }
    settings = [f"objective.name={baseline}", f"routing.replay={replay or 'off'}"]
    return Arm(name, settings, 20, folders, baseline if replay else None)


# --- collapse -------------------------------------------------------------------------------------

RISING = [0.2 + 0.01 * n for n in range(50)]


@pytest.mark.parametrize(
    ("rewards", "collapsed"),
    [
        (RISING, False),
        ([0.5] * 50, False),
        (RISING[:40] + [0.1] * 10, True),  # fell and stayed down
        (RISING[:20] + [0.1] * 10 + RISING[20:40], False),  # fell and came back
        (RISING[:48] + [0.0] * 2, False),  # two bad steps are no window
        (RISING[:45] + [0.0] * 5, True),
        ([0.6] * 45 + [0.31] * 5, False),  # just above half
        ([0.6] * 45 + [0.29] * 5, True),
        ([-0.5] * 40 + [-2.0] * 10, False),  # half of a negative reward means nothing
        ([0.0] * 50, False),
        ([0.9] * 5 + [0.1] * 4, False),  # shorter than two windows
        ([0.9] * 5 + [0.1] * 5, True),
        ([], False),
    ],
)
def test_the_collapse_rule(rewards: list[float], collapsed: bool) -> None:
    assert (ablation.collapse(run_of(rewards)) is not None) == collapsed


def test_the_window_grows_with_the_run() -> None:
    """Of 200 steps the last 20 count: half as many bad ones are not enough."""
    assert ablation.collapse(run_of([0.8] * 190 + [0.1] * 10)) is None
    assert ablation.collapse(run_of([0.8] * 180 + [0.1] * 20)) is not None


@pytest.mark.parametrize("key", ["reward/mean", "loss", "grad_norm"])
def test_a_figure_that_is_not_finite_is_a_collapse(key: str) -> None:
    run = run_of([0.5] * 8, **{key: [0.5, 0.5, None, 0.5, 0.5, 0.5, 0.5, 0.5]})
    assert ablation.collapse(run) == f"{key} is not finite at step 3"


def test_the_largest_fall_is_from_the_best_so_far() -> None:
    rewards = [0.2] * 10 + [0.8] * 10 + [0.5] * 10 + [0.9] * 20
    assert ablation.largest_fall(run_of(rewards)) == pytest.approx(0.3)
    assert ablation.largest_fall(run_of(RISING)) == 0.0
    assert ablation.largest_fall(run_of([])) is None


# --- what counts as a run -------------------------------------------------------------------------


def test_only_runs_that_reached_their_last_step_count(tmp_path: Path) -> None:
    whole = arm(tmp_path, "gspo", [0.5, 0.6])
    folders = {**whole.folders, 3: tmp_path / "absent", 4: write_run(tmp_path / "cut", 7, 0.9)}
    [loaded] = load_arms([Arm("gspo", [], 20, folders)])
    assert sorted(loaded.runs) == [1, 2]
    assert loaded.unfinished == {3: "no run", 4: "ends at step 7 of 20"}
    [first, *_] = findings([loaded])
    assert "gspo seed 3 (no run); gspo seed 4 (ends at step 7 of 20)" in first


def test_a_half_written_last_step_is_not_the_last_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 4, 0.5)
    assert is_finished(folder, 4)
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert not is_finished(folder, 4)
    path.write_bytes(b"damaged\n" + path.read_bytes())
    assert not is_finished(folder, 3)
    assert not is_finished(tmp_path / "absent", 1)


def test_a_warm_start_of_as_many_steps_is_no_finished_run(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.write({"phase": "warm_start", "step": step, "loss": 1.0})
    assert not is_finished(tmp_path, 5)


# --- comparison -----------------------------------------------------------------------------------


def loaded_with(
    name: str, values: Sequence[float | None], baseline: str | None = None
) -> LoadedArm:
    runs = {
        seed: run_of([0.5] * 2, **{"evaluation/accuracy": [0.1, value]})
        for seed, value in enumerate(values, start=1)
        if value is not None
    }
    return LoadedArm(Arm(name, [], 2, {}, baseline), runs)


ACCURACY = ablation.last("evaluation/accuracy")


def test_the_interval_is_students_over_paired_seeds() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t = 4.303 with 2 degrees of freedom."""
    one, other = loaded_with("a", [0.5, 0.7, 0.4]), loaded_with("b", [0.4, 0.5, 0.1])
    found = ablation.difference(one, other, ACCURACY)
    assert found is not None
    assert (found.arm, found.other, found.seeds) == ("a", "b", 3)
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert not found.told_apart  # 0.2 lies inside 0.248


def test_seeds_that_one_arm_lacks_are_left_out() -> None:
    one, other = loaded_with("a", [0.5, None, 0.5, 0.5]), loaded_with("b", [0.4, 0.0, 0.4, 0.4])
    found = ablation.difference(one, other, ACCURACY)
    assert found is not None and found.seeds == 3
    assert found.mean == pytest.approx(0.1) and found.told_apart
    assert ablation.difference(one, loaded_with("c", []), ACCURACY) is None


def test_one_seed_tells_nothing_apart() -> None:
    found = ablation.difference(loaded_with("a", [0.9]), loaded_with("b", [0.1]), ACCURACY)
    assert found is not None and found.half_width is None and not found.told_apart
    said = findings([loaded_with("b", [0.1]), loaded_with("a", [0.9])])
    assert "With one seed nothing can be said about differences." in said


def test_every_arm_is_compared_to_the_first_and_replay_to_its_own_baseline() -> None:
    names = ["grpo", "grpo+r2", "gspo", "gspo+r2", "gspo+r3"]
    arms = [loaded_with(n, [0.5], n.split("+")[0] if "+" in n else None) for n in names]
    found = [(one.name, other.name) for one, other in ablation.pairs(arms)]
    assert found == [
        ("grpo+r2", "grpo"),
        ("gspo", "grpo"),
        ("gspo+r2", "grpo"),
        ("gspo+r3", "grpo"),
        ("gspo+r2", "gspo"),
        ("gspo+r3", "gspo"),
    ]


def test_it_is_said_when_nothing_differs() -> None:
    arms = [loaded_with("grpo", [0.50, 0.60, 0.55]), loaded_with("gspo", [0.56, 0.52, 0.60])]
    said = " ".join(findings(arms))
    assert "By held-out accuracy at the end, none of the 1 pairs compared is told apart" in said
    assert "no evidence that the arms are equal" in said
    assert "None of the 6 runs collapsed" in said


def test_it_is_said_what_differs_and_what_does_not() -> None:
    arms = [
        loaded_with("grpo", [0.50, 0.60, 0.55]),
        loaded_with("gspo", [0.70, 0.81, 0.75]),
        loaded_with("cispo", [0.40, 0.70, 0.55]),
    ]
    said = " ".join(findings(arms))
    assert "of 2 pairs told apart: gspo above grpo by 20.3 points (± 1.4)" in said
    assert "The other one is not." in said


def test_collapsed_runs_are_named() -> None:
    fallen = LoadedArm(Arm("grpo", [], 50, {}), {2: run_of([0.8] * 40 + [0.1] * 10)})
    said = " ".join(findings([fallen]))
    assert (
        "Collapsed, 1 of 1 runs: grpo seed 2 (reward 0.100 at the end, 0.800 at its best)" in said
    )


# --- cost -----------------------------------------------------------------------------------------


def test_the_cost_of_replay_is_against_the_same_seed_without(tmp_path: Path) -> None:
    plain = arm(tmp_path, "gspo", [0.5, 0.5], seconds=2.0)
    replayed = arm(tmp_path, "gspo+r2", [0.5, 0.5], seconds=2.1, **{"replay/bytes": 4096.0})
    without, with_replay = load_arms([plain, replayed])
    found = ablation.cost(with_replay, without)
    assert found is not None
    assert found.time == pytest.approx([0.05, 0.05])
    assert (found.memory, found.bytes_stored) == ([0.0, 0.0], 4096.0)
    assert found.step_seconds == pytest.approx(2.1)
    assert ablation.cost(with_replay, LoadedArm(plain)) is None


# --- curves ---------------------------------------------------------------------------------------


def test_a_band_is_over_the_steps_that_all_runs_have() -> None:
    runs = {1: run_of([0.1, 0.2, 0.3]), 2: run_of([0.3, 0.4])}
    found = ablation.band(LoadedArm(Arm("a", [], 2, {}), runs), "reward/mean")
    assert found is not None
    assert found.steps == [1, 2]
    assert found.means == pytest.approx([0.2, 0.3])
    assert found.deviations == pytest.approx([0.1 * math.sqrt(2)] * 2)


def test_damaged_metrics_are_an_error_with_their_place(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3, 0.5)
    path = folder / "metrics.jsonl"
    path.write_text("damaged\n" + path.read_text())
    with pytest.raises(DataError, match=r"metrics.jsonl:1"):
        load_arms([Arm("a", [], 3, {1: folder})])


def test_figures_that_are_not_finite_are_told_and_break_nothing() -> None:
    broken = LoadedArm(
        Arm("a", [], 4, {}),
        {1: run_of([0.5, 0.5, 0.5, None], **{"evaluation/accuracy": [0.2, 0.2, 0.2, None]})},
    )
    broken.runs[2] = run_of([0.5] * 4, **{"evaluation/accuracy": [0.2, 0.2, 0.2, 0.4]})
    found = ablation.band(broken, "reward/mean")
    assert found is not None and math.isnan(found.means[3]) and math.isnan(found.deviations[3])
    said = " ".join(findings([broken, loaded_with("b", [0.5, 0.6])]))
    assert "a seed 1 (reward/mean is not finite at step 4)" in said
    assert "55.0%" in said
