"""Arms, planned runs and what `ablate` does with them; the runs themselves are stand-ins."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gspo_megatron.cli import launch as launcher
from gspo_megatron.cli.arms import _TAKEN, Arm, baselines, choose_arms, override, plan_runs
from gspo_megatron.cli.main import main, parse
from gspo_megatron.config import Config, load_config, to_yaml
from gspo_megatron.errors import ConfigError, UserError

ConfigWriter = Callable[..., Path]
STEPS = 3
USUAL = ["grpo", "grpo+r2", "grpo+r3", "gspo", "gspo+r2", "gspo+r3"]


def config_of(path: Path, *overrides: str) -> Config:
    return load_config(path, overrides)


def names(arms: Sequence[Arm]) -> list[str]:
    return [arm.name for arm in arms]


class Trainer:
    """In the place of the launcher: writes what a run would have, or fails."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []  # folder, ranks
        self.codes: dict[str, int] = {}  # by a part of the folder's name

    def __call__(self, command: Sequence[str], world_size: int) -> int:
        words = parse(command[3:])  # after python -m gspo_megatron
        config = load_config(words.config, words.overrides)
        folder = Path(str(config.logging.dir))
        self.made.append((f"{folder.parent.name}/{folder.name}", world_size))
        code = next((c for part, c in self.codes.items() if part in str(folder)), 0)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.resolved.yaml").write_text(to_yaml(config))
        last = config.training.steps if code == 0 else 1
        records = [{"phase": "rl", "step": step, "reward/mean": 0.5} for step in range(1, last + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return code


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    stand_in = Trainer()
    monkeypatch.setattr(launcher, "launch", stand_in)
    return stand_in


def words_of(path: Path, out: Path, *more: str) -> list[str]:
    return ["ablate", str(path), f"training.steps={STEPS}", "-o", str(out), *more]


# --- arms -----------------------------------------------------------------------------------------


def test_the_usual_arms_are_both_objectives_by_replay(write_config: ConfigWriter) -> None:
    config = config_of(write_config(), "objective.clip_low=0.01", "objective.clip_high=0.02")
    arms = choose_arms([], config)
    assert names(arms) == USUAL
    made = {arm.name: config_of(write_config(), *arm.overrides) for arm in arms}
    assert {name: c.objective.name + " " + c.routing.replay for name, c in made.items()} == {
        "grpo": "grpo off",
        "grpo+r2": "grpo r2",
        "grpo+r3": "grpo r3",
        "gspo": "gspo off",
        "gspo+r2": "gspo r2",
        "gspo+r3": "gspo r3",
    }


def test_a_clip_range_is_for_the_objective_that_the_configuration_has(
    write_config: ConfigWriter, tmp_path: Path
) -> None:
    given = ["objective.clip_low=0.01", "objective.clip_high=0.02"]
    path = write_config()
    arms = choose_arms([], config_of(path, *given))
    clips = {
        run.arm.name: (run.config.objective.clip_low, run.config.objective.clip_high)
        for run in plan_runs(str(path), given, arms, [1], tmp_path)
    }
    assert clips["gspo+r2"] == (0.01, 0.02)
    assert clips["grpo+r2"] == (None, None)


def test_without_replay_nothing_is_set_that_would_not_be_read(write_config: ConfigWriter) -> None:
    config = config_of(write_config(), "routing.replay=r2", "routing.store_on_host=true")
    [plain, *_] = choose_arms(["gspo"], config)
    assert "routing.store_on_host=false" in plain.overrides


def test_the_reference_replays_in_every_arm_what_the_configuration_says(
    write_config: ConfigWriter, tmp_path: Path
) -> None:
    given = ["objective.kl=k3", "objective.kl_coefficient=0.1", "routing.reference_replay=r2"]
    given.append("routing.store_on_host=true")  # which the reference's routes read in every arm
    path = write_config()
    runs = plan_runs(str(path), given, choose_arms([], config_of(path, *given)), [1], tmp_path)
    assert all(run.config.routing.reference_replay == "r2" for run in runs)
    assert all(run.config.routing.store_on_host for run in runs)
    assert baselines(runs)["gspo+r3"] == "gspo"


def test_arms_are_chosen_by_name_in_the_order_given(write_config: ConfigWriter) -> None:
    config = config_of(write_config())
    assert names(choose_arms(["gspo+r3", "grpo", "gspo+r3"], config)) == ["gspo+r3", "grpo"]
    with pytest.raises(ConfigError, match=r"--arms gspo\+r4: no such arm; did you mean gspo\+r"):
        choose_arms(["grpo", "gspo+r4"], config)


def test_an_own_objective_has_no_usual_arms(write_config: ConfigWriter) -> None:
    config = config_of(write_config(), "objective.import_path=my.module:loss")
    with pytest.raises(UserError, match="arms of your own with --arms FILE"):
        choose_arms(["gspo"], config)


def test_arms_of_a_file_replace_the_usual_ones(write_config: ConfigWriter, tmp_path: Path) -> None:
    file = tmp_path / "arms.yaml"
    file.write_text(
        "wide: {objective.clip_low: 0.04, objective.clip_high: null}\n"
        'slow: {optimizer.learning_rate: 1e-7, rollout.stop: ["a, b"]}\n'
        "as_it_is: {}\n"
    )
    config = config_of(write_config())
    assert names(choose_arms([str(file)], config)) == ["wide", "slow", "as_it_is"]
    [slow, wide] = choose_arms([str(file), "slow", "wide"], config)
    made = config_of(write_config(), *slow.overrides)
    assert (made.optimizer.learning_rate, made.rollout.stop) == (1e-7, ["a, b"])
    assert config_of(write_config(), *wide.overrides).objective.clip_low == 0.04


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "must be a mapping of arms"),
        ("- gspo\n", "must be a mapping of arms"),
        ("gspo: objective.name=gspo\n", "arm gspo: 'objective.name=gspo'; the file must be"),
        ("../up: {}\n", "arm '../up': must be a name for a folder"),
        ("plots: {}\n", "arm plots: the report has that name; give the arm another"),
        ("report.html: {}\n", "arm report.html: the report has that name"),
        ("Report.md: {}\n", "arm Report.md: the report has that name"),
        ("a: {training.seed: 3}\n", "arm a: training.seed: set by `ablate` itself"),
        ("a: {}\na: {}\n", "a"),
    ],
)
def test_a_file_of_arms_that_makes_no_sense_is_refused(
    text: str, wrong: str, write_config: ConfigWriter, tmp_path: Path
) -> None:
    file = tmp_path / "arms.yml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        choose_arms([str(file)], config_of(write_config()))
    assert wrong in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        choose_arms([str(tmp_path / "absent.yaml")], config_of(write_config()))


@pytest.mark.parametrize(
    "value", ["gspo", "off", "null", "true", "1e-3", "1.5", "/a/b c", ".5", "x: y", 3, 0.1, None]
)
def test_an_override_is_read_back_as_it_was(value: object) -> None:
    from gspo_megatron.config.load import apply_overrides

    made, problems = apply_overrides({}, [override("section.key", value)])
    assert problems == []
    assert made == {"section": {"key": value}}


# --- planned runs ---------------------------------------------------------------------------------


def test_every_arm_of_a_seed_comes_before_the_next_seed(
    write_config: ConfigWriter, tmp_path: Path
) -> None:
    path = write_config()
    arms = choose_arms(["grpo", "gspo+r3"], config_of(path))
    runs = plan_runs(str(path), ["training.steps=7"], arms, [4, 5], tmp_path)
    assert [str(run.folder.relative_to(tmp_path)) for run in runs] == [
        "grpo/seed_4",
        "gspo+r3/seed_4",
        "grpo/seed_5",
        "gspo+r3/seed_5",
    ]
    for run in runs:
        assert run.config == load_config(path, run.overrides)
        assert run.config.training.seed == run.seed and run.config.training.steps == 7
        assert run.config.logging.dir == str(run.folder)
        assert run.config.routing.volatility


def test_volatility_is_not_asked_of_a_dense_model(
    write_config: ConfigWriter, tmp_path: Path
) -> None:
    path, dense = write_config(), ["model.megatron.num_moe_experts=null"]
    arms = choose_arms(["grpo", "gspo"], config_of(path, *dense))
    runs = plan_runs(str(path), dense, arms, [1], tmp_path)
    assert not any(run.config.routing.volatility for run in runs)


def test_a_baseline_is_the_same_arm_without_replay(
    write_config: ConfigWriter, tmp_path: Path
) -> None:
    path = write_config()
    arms = [
        *choose_arms(["gspo+r2", "grpo", "grpo+r3", "gspo"], config_of(path)),
        Arm("slow+r2", ("routing.replay=r2", "optimizer.learning_rate=1e-9")),
    ]
    runs = plan_runs(str(path), [], arms, [1, 2], tmp_path)
    assert baselines(runs) == {"gspo+r2": "gspo", "grpo+r3": "grpo"}


# --- the command ----------------------------------------------------------------------------------


def test_all_runs_are_made_and_then_none(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(write_config(), tmp_path / "out", "--arms", "grpo", "gspo", "--seeds", "2")
    assert main(words) == 0
    every = ["grpo/seed_1", "gspo/seed_1", "grpo/seed_2", "gspo/seed_2"]
    assert trainer.made == [(name, 1) for name in every]
    said = capsys.readouterr().out
    assert "2 arms x 2 seeds = 4 runs" in said and "run 4 of 4: gspo, seed 2" in said
    assert (tmp_path / "out" / "report.md").is_file()
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"grpo", "gspo", *_TAKEN}  # names that no arm may have
    assert main(words) == 0
    assert len(trainer.made) == 4
    assert "4 are finished and stay as they are" in capsys.readouterr().out


def test_more_seeds_add_to_those_that_are_there(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer
) -> None:
    path = write_config()
    for count in ("1", "3"):
        assert main(words_of(path, tmp_path / "out", "--arms", "gspo", "--seeds", count)) == 0
    assert [name for name, _ in trainer.made] == ["gspo/seed_1", "gspo/seed_2", "gspo/seed_3"]


def test_seeds_have_an_end(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(write_config(), tmp_path, "training.seed=2147483646", "--arms", "gspo")
    with pytest.raises(SystemExit):
        main([*words, "--seeds", "99999999999"])
    assert "--seeds: 99999999999: legal: 1 to 1000" in capsys.readouterr().err
    assert main([*words, "--seeds", "3"]) == 2
    assert "legal: seeds below 2^31, so begin with 2147483645 at most" in capsys.readouterr().err
    assert main([*words, "--seeds", "2"]) == 0 and len(trainer.made) == 2


def test_a_failed_run_does_not_stop_the_others_and_is_tried_again(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(write_config(), tmp_path / "out", "--arms", "grpo", "gspo", "--seeds", "1")
    trainer.codes = {"grpo": 137}
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "failed: grpo, seed 1 (exit code 137)" in said
    assert "grpo seed 1 (ends at step 1 of 3)" in said
    trainer.codes = {}
    assert main(words) == 0
    assert [name for name, _ in trainer.made] == ["grpo/seed_1", "gspo/seed_1", "grpo/seed_1"]


def test_no_report_is_made_of_nothing(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(write_config(), tmp_path / "out", "--arms", "grpo", "--seeds", "1")
    trainer.codes = {"grpo": 1}
    assert main(words) == 1
    assert "failed: grpo, seed 1" in capsys.readouterr().out
    assert not (tmp_path / "out" / "report.md").exists()
    assert main([*words, "--report-only"]) == 2
    assert "there is nothing to report" in capsys.readouterr().err


@pytest.mark.parametrize("code", [130, 129, 143])
def test_after_a_signal_no_further_run_is_started(
    code: int, write_config: ConfigWriter, tmp_path: Path, trainer: Trainer
) -> None:
    trainer.codes = {"gspo": code}
    words = words_of(write_config(), tmp_path / "out", "--arms", "grpo", "gspo", "gspo+r2")
    assert main(words) == code
    assert [name for name, _ in trainer.made] == ["grpo/seed_1", "gspo/seed_1"]


def test_a_finished_run_of_another_configuration_is_not_taken_for_this_one(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(write_config(), tmp_path / "out", "--arms", "gspo", "--seeds", "1")
    assert main(words) == 0
    assert main([*words, "logging.samples_per_step=1"]) == 0  # makes no other run
    other = [words[0], words[1], "training.steps=2", *words[3:], "optimizer.learning_rate=1e-5"]
    capsys.readouterr()
    assert main(other) == 2
    error = capsys.readouterr().err
    assert "gspo/seed_1: holds a finished run of another configuration" in error
    assert "optimizer.learning_rate: 1e-06 there" in error and "training.steps: 3 there" in error
    (tmp_path / "out" / "gspo" / "seed_1" / "config.resolved.yaml").unlink()
    assert main(words) == 2
    assert "config.resolved.yaml is missing" in capsys.readouterr().err
    assert len(trainer.made) == 1


def test_the_errors_of_all_arms_come_at_once_before_anything_runs(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(write_config(), tmp_path / "out", "rollout.group_size=1")
    assert main([*words, "objective.clip_low=0.5", "model.megatron.moe_router_fusion=true"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("rollout.group_size = 1") for line in lines)  # of all: said once
    gspo = "arms gspo, gspo+r2, gspo+r3: objective.clip_low = 0.5"
    assert any(line.startswith(gspo) for line in lines)
    replay = ("arms grpo+r2, gspo+r2: routing.replay", "arms grpo+r3, gspo+r3: routing.replay")
    assert all(any(line.startswith(start) for line in lines) for start in replay)
    assert trainer.made == []


def test_errors_of_a_file_of_arms_name_the_arm(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "arms.yaml"
    file.write_text("good: {}\nbad: {objective.clip_lo: 0.1, rollout.group_size: eight}\n")
    assert main(words_of(write_config(), tmp_path / "out", "--arms", str(file))) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("arm bad: ") for line in lines)
    assert trainer.made == []


def test_the_commands_of_the_runs_still_to_be_made(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write_config(), tmp_path / "with space"
    words = words_of(path, out, "--arms", "grpo", "gspo+r2", "--seeds", "2", "--nproc", "2")
    trainer.codes = {"seed_2": 1}
    assert main([*words]) == 1
    capsys.readouterr()
    assert main([*words, "--print-commands"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and len(trainer.made) == 4
    for line, arm in zip(lines, ("grpo", "gspo+r2"), strict=True):
        program, *command = shlex.split(line)
        parsed = parse(command)
        assert (program, command[0], parsed.nproc) == ("gspo-megatron", "train", 2)
        config = load_config(parsed.config, parsed.overrides)
        assert config.logging.dir == str(out / arm / "seed_2")
        assert config.training.seed == 2


def test_a_layout_for_a_cluster_has_commands_but_is_not_started_here(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(write_config(), tmp_path, "parallel.layout=pp=4,dp=64", "--arms", "gspo")
    assert main([*words, "--print-commands"]) == 0
    assert "--nproc" not in capsys.readouterr().out
    assert main(words) == 2
    assert "takes 256 ranks" in capsys.readouterr().err


def test_ranks_are_started_for_each_run(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer
) -> None:
    layout = "parallel.layout=tp=2,pp=2"
    assert main(words_of(write_config(), tmp_path, layout, "--arms", "gspo", "--seeds", "1")) == 0
    assert trainer.made == [("gspo/seed_1", 4)]


def test_it_is_no_rank_itself(
    write_config: ConfigWriter,
    tmp_path: Path,
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, text)
    assert main(words_of(write_config(), tmp_path)) == 2
    assert "outside torchrun and srun" in capsys.readouterr().err
    assert trainer.made == []


def test_the_folder_is_that_of_the_configuration_unless_given(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer
) -> None:
    words = ["ablate", str(write_config()), f"logging.dir={tmp_path}/runs", "--seeds", "1"]
    assert main([*words, "--arms", "gspo"]) == 0
    assert (tmp_path / "runs" / "gspo" / "seed_1" / "metrics.jsonl").is_file()
