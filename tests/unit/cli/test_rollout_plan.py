"""`check --rollout-plan`: its output, and the options that it refuses."""

from __future__ import annotations

import re

import pytest

from gspo_megatron.estimate.rollout_plan import (
    STEPS,
    ServerSpeed,
    Setting,
    best,
    log_normal_lengths,
    outcome,
)
from tests.unit.cli.conftest import Command, ConfigWriter

WORDS = ("--lengths=20,60", "--sequence-speed=10", "--server-speed=80", "--update-seconds=2")
PLAN = ("--rollout-plan", *WORDS, "--servers=8,4", "--train-seconds=20,10")
ROLLOUT = ("rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.max_response_tokens=100")


def test_it_compares_every_number_of_servers_with_every_bound(
    write_config: ConfigWriter, gspo: Command
) -> None:
    slots = "rollout.vllm.options={max-num-seqs: 5}"
    code, out, _ = gspo("check", write_config(), *ROLLOUT, slots, *PLAN, "--staleness=0,2")
    settings = [Setting(s, bound, t, 2) for s, t in ((4, 10), (8, 20)) for bound in (0, 2)]
    lengths = log_normal_lengths(20, 60, 100, (STEPS + 2, 32))
    outcomes = [outcome(lengths, ServerSpeed(10, 80, 5), setting) for setting in settings]
    rows = [line.split() for line in out.splitlines() if re.match(r" \d +\d ", line)]
    assert code == 0
    assert "32 responses a step" in out and "at most 5 at a time" in out
    for row, expected in zip(rows, outcomes, strict=True):
        setting = expected.setting
        assert row[:2] == [str(setting.servers), str(setting.max_staleness)]
        assert row[2:4] == [f"{expected.step_seconds:.1f}", f"{setting.train_seconds:.1f}"]
        assert row[4] == f"{expected.trainer_idle:.1%}"
        assert row[-2:] == [f"{expected.staleness_mean:.2f}", str(expected.staleness_max)]
    last = dict(pair.split("=", 1) for pair in out.splitlines()[-1].split())
    chosen = best(outcomes)
    assert chosen.setting == settings[1]
    assert (last["servers"], last["max_staleness"]) == ("4", "2")
    assert last["step_seconds"] == f"{chosen.step_seconds:.3f}"


def test_one_time_of_training_and_bounds_by_default(
    write_config: ConfigWriter, gspo: Command
) -> None:
    code, out, _ = gspo("check", write_config(), *ROLLOUT, *PLAN, "--train-seconds=9")
    rows = [line.split()[:4] for line in out.splitlines() if re.match(r" \d +\d ", line)]
    assert code == 0 and "at most 256 at a time" in out
    assert [[row[0], row[1], row[3]] for row in rows] == [
        [str(servers), str(bound), "9.0"] for servers in (4, 8) for bound in range(5)
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rollout-plan", *WORDS[1:]), "--servers, --train-seconds, --lengths: missing"),
        (("--servers=3", "--staleness=1"), "--servers, --staleness: only with --rollout-plan"),
        ((*PLAN, "--world-size=8", "--suggest"), "--world-size, --suggest: not with"),
        ((*PLAN, "--fresh"), "--fresh: not with --rollout-plan, which looks at no run folder"),
        (("--fresh", "--no-files"), "--fresh: not with --no-files, which looks at no run folder"),
        ((*PLAN, "--train-seconds=1,2,3"), "--train-seconds: give one value, or as many as"),
        ((*PLAN, "--lengths=60,20"), "--lengths: give MEDIAN,P90"),
        ((*PLAN, "--server-speed=9"), "--server-speed: must not be below --sequence-speed"),
        ((*PLAN, "--staleness=0,-1"), "argument --staleness: '-1' is not a positive integer"),
        ((*PLAN, "--sequence-speed=0"), "argument --sequence-speed: '0' is not a number above 0"),
        ((*PLAN, "rollout.vllm.options={max_num_seqs: 0}"), "max_num_seqs = 0: not a positive"),
        ((*PLAN, "rollout.group_size=0"), "rollout.group_size = 0: "),
    ],
)
def test_what_is_wrong_is_told(
    words: tuple[str, ...], told: str, write_config: ConfigWriter, gspo: Command
) -> None:
    code, out, err = gspo("check", write_config(), *words)
    assert (code, out) == (2, "")
    assert told in err and "Traceback" not in err
