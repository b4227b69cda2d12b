"""The command `ablate`: its variants, the runs that it plans, and what it does with the results of
runs. Stand-ins take the place of real runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gspo_megatron.cli.main import parse
from gspo_megatron.cli.variants import (
    REPORT_NAMES,
    PlannedRun,
    Variant,
    choose_variants,
    plan_runs,
)
from gspo_megatron.config import load_config, to_shown_yaml
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.process import launcher as launcher
from tests.unit.cli.conftest import Command, ConfigWriter

STEPS = 3
USUAL = ["grpo", "grpo+r2", "grpo+r3", "gspo", "gspo+r2", "gspo+r3"]
Choose = Callable[..., list[Variant]]
Plan = Callable[..., list[PlannedRun]]
Ablate = Callable[..., tuple[object, str]]


@pytest.fixture
def choose(write_config: ConfigWriter) -> Choose:
    """A function that returns the variants with these names, for a configuration with overrides."""
    path = write_config()
    return lambda words, *given: choose_variants(words, load_config(path, given))


@pytest.fixture
def plan(write_config: ConfigWriter, choose: Choose, tmp_path: Path) -> Plan:
    """A function that plans the runs of these variants in tmp_path."""
    path = str(write_config())

    def runs(words: Sequence[str], *given: str, seeds: Sequence[int] = (1,)) -> list[PlannedRun]:
        return plan_runs(path, given, choose(words, *given), seeds, tmp_path)

    return runs


def names(variants: Sequence[Variant]) -> list[str]:
    return [variant.name for variant in variants]


class Trainer:
    """Stands in for the launcher: writes the results of a run, or fails."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []  # (folder, number of ranks)
        self.codes: dict[str, int] = {}  # exit codes by a part of the folder's name

    def __call__(self, command: Sequence[str], world_size: int) -> int:
        words = parse(command[3:])  # without `python -m gspo_megatron`
        config = load_config(words.config, words.overrides)
        folder = Path(str(config.logging.dir))
        self.made.append((f"{folder.parent.name}/{folder.name}", world_size))
        code = next((c for part, c in self.codes.items() if part in str(folder)), 0)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.resolved.yaml").write_text(to_shown_yaml(config, {}))
        last = config.training.steps if code == 0 else 1
        records = [{"phase": "rl", "step": step, "reward/mean": 0.5} for step in range(1, last + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return code


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    stand_in = Trainer()
    monkeypatch.setattr(launcher, "launch", stand_in)
    return stand_in


@pytest.fixture
def ablate(write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, gspo: Command) -> Ablate:
    """Run the command with these arguments and the output folder tmp_path/out. Returns its exit
    code and output."""
    first = ("ablate", write_config(), f"training.steps={STEPS}", "-o", tmp_path / "out")

    def call(*words: str) -> tuple[object, str]:
        code, out, err = gspo(*first, *words)
        return code, out + err

    return call


# --- variants -----------------------------------------------------------------------------------


def test_the_default_variants_are_both_objectives_by_replay(plan: Plan) -> None:
    """Only the variants of the configured objective use the configured clip range."""
    runs = plan([], "objective.clip_low=0.01", "objective.clip_high=0.02")
    assert names([run.variant for run in runs]) == USUAL
    for run in runs:
        name, _, replay = run.variant.name.partition("+")
        section = run.config.objective
        assert (section.name, run.config.routing.replay) == (name, replay or "off")
        clip_range = (0.01, 0.02) if name == "gspo" else (None, None)
        assert (section.clip_low, section.clip_high) == clip_range


GAME = """
class Game:
    gives_rewards = True

    async def rollout(self, client, task): ...
"""


@pytest.mark.parametrize(
    ("given", "objectives"),
    [
        (["objective.name=cispo"], ["grpo", "gspo", "cispo"]),
        (["objective.name=gspo_token"], ["grpo", "gspo_token"]),
        (["environment.import_path=games:Game"], ["grpo", "gspo_token"]),
        (["environment.import_path=games:Game", "objective.name=dapo"], None),
    ],
)
def test_rewards_of_turns_and_the_own_objective_have_their_variants(
    plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    objectives: list[str] | None,
) -> None:
    """GSPO cannot use rewards of turns, so GSPO-token takes the place of GSPO. Only the variants of
    the configured objective use the configured clip range."""
    (tmp_path / "games.py").write_text(GAME)
    monkeypatch.syspath_prepend(tmp_path)
    runs = plan([], "objective.clip_low=0.01", "objective.clip_high=0.02", *given)
    expected = objectives or ["grpo", "gspo_token", "dapo"]
    assert names([run.variant for run in runs]) == [
        name + replay for name in expected for replay in ("", "+r2", "+r3")
    ]
    own = given[-1].partition("=")[2] if given[-1].startswith("objective") else "gspo_token"
    for run in runs:
        section = run.config.objective
        assert (section.clip_low == 0.01) is (section.name == own), section.name


def test_without_replay_nothing_is_set_that_would_not_be_read(choose: Choose) -> None:
    [plain] = choose(["gspo"], "routing.replay=r2", "routing.store_on_host=true")
    assert "routing.store_on_host=false" in plain.overrides


def test_the_reference_replays_in_every_variant_what_the_configuration_says(plan: Plan) -> None:
    given = ["objective.kl=k3", "objective.kl_coefficient=0.1", "routing.reference_replay=r2"]
    # Every variant needs this key for the routes of the reference.
    given.append("routing.store_on_host=true")
    runs = plan([], *given)
    assert all(run.config.routing.reference_replay == "r2" for run in runs)
    assert all(run.config.routing.store_on_host for run in runs)


def test_variants_are_chosen_by_name_in_the_order_given(choose: Choose) -> None:
    assert names(choose(["gspo+r3", "grpo", "gspo+r3"])) == ["gspo+r3", "grpo"]
    wrong = r"--variants gspo\+r4: no such variant; did you mean gspo\+r"
    with pytest.raises(ConfigError, match=wrong):
        choose(["grpo", "gspo+r4"])


def test_a_custom_objective_has_no_default_variants(choose: Choose) -> None:
    with pytest.raises(UserError, match="define other variants with --variants FILE"):
        choose(["gspo"], "objective.import_path=my.module:loss")


def test_variants_of_a_file_replace_the_default_ones(
    choose: Choose, write_config: ConfigWriter, tmp_path: Path
) -> None:
    file = tmp_path / "variants.yaml"
    file.write_text(
        "wide: {objective.clip_low: 0.04, objective.clip_high: null}\n"
        'slow: {optimizer.learning_rate: 1e-7, rollout.stop: ["a, b"]}\n'
        "as_it_is: {}\n"
    )
    assert names(choose([str(file)])) == ["wide", "slow", "as_it_is"]
    [slow, wide] = choose([str(file), "slow", "wide"])
    made = load_config(write_config(), slow.overrides)
    assert (made.optimizer.learning_rate, made.rollout.stop) == (1e-7, ["a, b"])
    assert load_config(write_config(), wide.overrides).objective.clip_low == 0.04


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "must be a mapping of variants"),
        ("- gspo\n", "must be a mapping of variants"),
        ("gspo: objective.name=gspo\n", "variant gspo: 'objective.name=gspo'; the file must be"),
        ("../up: {}\n", "variant '../up': must be a possible name of a folder"),
        ("plots: {}\n", "variant plots: the report uses this name; choose another"),
        ("report.html: {}\n", "variant report.html: the report uses this name"),
        ("Plots: {}\n", "variant Plots: the report uses this name"),
        ("a: {training.seed: 3}\n", "variant a: training.seed: set by `ablate` itself"),
        ("a: {}\na: {}\n", "a"),
    ],
)
def test_a_file_of_variants_that_makes_no_sense_is_refused(
    text: str, wrong: str, choose: Choose, tmp_path: Path
) -> None:
    file = tmp_path / "variants.yml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        choose([str(file)])
    assert wrong in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        choose([str(tmp_path / "absent.yaml")])


# --- planned runs ---------------------------------------------------------------------------------


def test_every_variant_of_a_seed_comes_before_the_next_seed(
    plan: Plan, write_config: ConfigWriter, tmp_path: Path
) -> None:
    runs = plan(["grpo", "gspo+r3"], "training.steps=7", seeds=[4, 5])
    folders = ["grpo/seed_4", "gspo+r3/seed_4", "grpo/seed_5", "gspo+r3/seed_5"]
    assert [str(run.folder.relative_to(tmp_path)) for run in runs] == folders
    for run in runs:
        assert run.config == load_config(write_config(), run.overrides)
        assert run.config.training.seed == run.seed and run.config.training.steps == 7
        assert run.config.logging.dir == str(run.folder)
        assert run.config.routing.volatility


def test_volatility_is_not_asked_of_a_dense_model(plan: Plan) -> None:
    runs = plan(["grpo", "gspo"], "model.megatron.num_moe_experts=null")
    assert not any(run.config.routing.volatility for run in runs)


# --- the command ----------------------------------------------------------------------------------


def test_all_runs_are_made_and_then_none(ablate: Ablate, tmp_path: Path, trainer: Trainer) -> None:
    words = ["--arms", "grpo", "gspo", "--seeds", "2"]  # the earlier name of --variants
    code, said = ablate(*words)
    assert code == 0
    every = ["grpo/seed_1", "gspo/seed_1", "grpo/seed_2", "gspo/seed_2"]
    assert trainer.made == [(name, 1) for name in every]
    assert "2 variants x 2 seeds = 4 runs" in said and "run 4 of 4: gspo, seed 2" in said
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"grpo", "gspo", *REPORT_NAMES}  # names that no variant may have
    code, said = ablate(*words)
    assert code == 0 and len(trainer.made) == 4
    assert "4 are finished and stay as they are" in said


def test_more_seeds_add_to_those_that_are_there(ablate: Ablate, trainer: Trainer) -> None:
    for count in ("1", "3"):
        assert ablate("--variants", "gspo", "--seeds", count)[0] == 0
    assert [name for name, _ in trainer.made] == ["gspo/seed_1", "gspo/seed_2", "gspo/seed_3"]


def test_seeds_have_an_end(ablate: Ablate, trainer: Trainer) -> None:
    words = ["training.seed=2147483646", "--variants", "gspo", "--seeds"]
    code, said = ablate(*words, "99999999999")
    assert code == 2 and "--seeds 99999999999: allowed: 1 to 1000" in said
    code, said = ablate(*words, "3")
    assert code == 2 and "training.seed = 2147483648" in said
    assert ablate(*words, "2")[0] == 0 and len(trainer.made) == 2


def test_a_report_of_what_is_there_finds_the_seeds(ablate: Ablate, tmp_path: Path) -> None:
    words = ["training.seed=4", "--variants", "grpo", "gspo"]
    assert ablate(*words, "--seeds", "2")[0] == 0
    (tmp_path / "out" / "gspo" / "seed_5" / "metrics.jsonl").unlink()
    (tmp_path / "out" / "gspo" / "seed_4.1").mkdir()  # the folder of an interrupted run
    code, said = ablate(*words, "--report-only")
    assert code == 0 and "Left out, because not finished: gspo, seed 5 (no run)." in said
    assert "None of the 3 runs collapsed" in said
    # more seeds than the default
    assert ablate(*words[1:], "--seeds", "5")[0] == 0
    code, said = ablate(*words[1:], "--report-only")
    assert code == 0 and "None of the 10 runs collapsed" in said


def test_a_failed_run_does_not_stop_the_others_and_is_tried_again(
    ablate: Ablate, trainer: Trainer
) -> None:
    words = ["--variants", "grpo", "gspo", "--seeds", "1"]
    trainer.codes = {"grpo": 137}
    code, said = ablate(*words)
    assert code == 1 and "failed: grpo, seed 1 (exit code 137)" in said
    assert "grpo, seed 1 (ends at step 1 of 3)" in said
    trainer.codes = {}
    assert ablate(*words)[0] == 0
    assert [name for name, _ in trainer.made] == ["grpo/seed_1", "gspo/seed_1", "grpo/seed_1"]


def test_no_report_is_made_of_nothing(ablate: Ablate, tmp_path: Path, trainer: Trainer) -> None:
    words = ["--variants", "grpo", "--seeds", "1"]
    trainer.codes = {"grpo": 1}
    code, said = ablate(*words)
    assert code == 1 and "failed: grpo, seed 1" in said
    assert not (tmp_path / "out" / "report.html").exists()
    code, said = ablate(*words, "--report-only")
    assert code == 2 and "there is nothing to report" in said


@pytest.mark.parametrize("code", [130, 129, 143])
def test_after_a_signal_no_further_run_is_started(
    code: int, ablate: Ablate, trainer: Trainer
) -> None:
    trainer.codes = {"gspo": code}
    assert ablate("--variants", "grpo", "gspo", "gspo+r2")[0] == code
    assert [name for name, _ in trainer.made] == ["grpo/seed_1", "gspo/seed_1"]


def test_a_finished_run_of_another_configuration_is_not_taken_for_this_one(
    ablate: Ablate, tmp_path: Path, trainer: Trainer
) -> None:
    words = ["--variants", "gspo", "--seeds", "1"]
    assert ablate(*words)[0] == 0
    # this key may change between starts of one run
    assert ablate(*words, "logging.samples_per_step=1")[0] == 0
    code, said = ablate(*words, "training.steps=2", "optimizer.learning_rate=1e-5")
    assert code == 2 and "gspo/seed_1: holds a finished run of another configuration" in said
    assert "optimizer.learning_rate: 1e-06 there" in said and "training.steps: 3 there" in said
    (tmp_path / "out" / "gspo" / "seed_1" / "config.resolved.yaml").unlink()
    code, said = ablate(*words)
    assert code == 2 and "config.resolved.yaml is missing" in said
    assert len(trainer.made) == 1


REWARDS = """
def one(sample):
    return 1.0


def other(sample):
    return 0.0
"""


@pytest.mark.parametrize("name", ["exact_match", "math"])
def test_a_finished_run_with_an_own_reward_stays_as_it_is(
    ablate: Ablate,
    tmp_path: Path,
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The run did not read reward.name, so its configuration shows no such value."""
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    words = [f"reward.name={name}", "--variants", "gspo", "--seeds", "1"]
    for _ in range(2):
        code, said = ablate("reward.import_path=own_rewards:one", *words)
        assert code == 0, said
    assert "1 are finished and stay as they are" in said and len(trainer.made) == 1
    code, said = ablate("reward.import_path=own_rewards:other", *words)
    assert code == 2 and "(reward.import_path: own_rewards:one there)" in said


def test_the_errors_of_all_variants_come_at_once_before_anything_runs(
    ablate: Ablate, trainer: Trainer
) -> None:
    wrong = ("objective.clip_low=0.5", "model.megatron.moe_router_fusion=true")
    code, said = ablate("rollout.group_size=1", *wrong)
    assert code == 2 and trainer.made == []
    for start in (
        "rollout.group_size = 1",  # wrong in all variants, but reported once
        "variant gspo, gspo+r2, gspo+r3: objective.clip_low = 0.5",
        "variant grpo+r2, gspo+r2: routing.replay",
        "variant grpo+r3, gspo+r3: routing.replay",
    ):
        assert sum(line.startswith(start) for line in said.splitlines()) == 1


def test_errors_of_a_file_of_variants_name_the_variant(
    ablate: Ablate, tmp_path: Path, trainer: Trainer
) -> None:
    file = tmp_path / "variants.yaml"
    file.write_text("good: {}\nbad: {objective.clip_lo: 0.1, rollout.group_size: eight}\n")
    code, said = ablate("--variants", str(file))
    lines = said.splitlines()
    assert len(lines) == 2 and all(line.startswith("variant bad: ") for line in lines)
    assert code == 2 and trainer.made == []


def test_the_commands_of_the_unfinished_runs(
    ablate: Ablate, tmp_path: Path, trainer: Trainer
) -> None:
    words = ["-o", str(tmp_path / "with space"), "--variants", "grpo", "gspo+r2", "--seeds", "2"]
    trainer.codes = {"seed_2": 1}
    assert ablate(*words, "--nproc", "2")[0] == 1
    code, said = ablate(*words, "--nproc", "2", "--print-commands")
    lines = said.splitlines()
    assert code == 0 and len(lines) == 2 and len(trainer.made) == 4
    for line, variant in zip(lines, ("grpo", "gspo+r2"), strict=True):
        program, *command = shlex.split(line)
        parsed = parse(command)
        assert (program, command[0], parsed.nproc) == ("gspo-megatron", "train", 2)
        config = load_config(parsed.config, parsed.overrides)
        assert config.logging.dir == str(tmp_path / "with space" / variant / "seed_2")
        assert config.training.seed == 2


def test_a_layout_for_a_cluster_has_commands_but_is_not_started_here(ablate: Ablate) -> None:
    words = ["parallel.layout=pp=4,dp=64", "--variants", "gspo"]
    code, said = ablate(*words, "--print-commands")
    assert code == 0 and "--nproc" not in said
    code, said = ablate(*words)
    assert code == 2 and "takes 256 ranks" in said


def test_ranks_are_started_for_each_run(ablate: Ablate, trainer: Trainer) -> None:
    assert ablate("parallel.layout=tp=2,pp=2", "--variants", "gspo", "--seeds", "1")[0] == 0
    assert trainer.made == [("gspo/seed_1", 4)]


def test_it_is_no_rank_itself(ablate: Ablate, trainer: Trainer) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    code, said = ablate()
    assert code == 2 and "outside torchrun and srun" in said
    assert trainer.made == []


def test_the_folder_is_that_of_the_configuration_unless_given(
    write_config: ConfigWriter, tmp_path: Path, trainer: Trainer, gspo: Command
) -> None:
    words = ("ablate", write_config(), f"logging.dir={tmp_path}/runs", "--seeds", 1)
    assert gspo(*words, f"training.steps={STEPS}", "--variants", "gspo")[0] == 0
    assert (tmp_path / "runs" / "gspo" / "seed_1" / "metrics.jsonl").is_file()
