"""`check --rollout-plan`: what it prints and draws, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gspo_megatron.estimate.rollout_plan import (
    Server,
    Setting,
    best,
    log_normal_lengths,
    plan,
    read_lengths,
)
from tests.unit.cli.conftest import Command, ConfigWriter

WORDS = ("--lengths=20,60", "--sequence-speed=10", "--server-speed=80", "--update-seconds=2")
ROLLOUT = ("rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.max_response_tokens=100")


def pairs(text: str) -> dict[str, str]:
    """The name=value pairs of the last line."""
    return dict(pair.split("=", 1) for pair in text.splitlines()[-1].split())


def test_it_compares_every_split_of_the_nodes_with_every_bound(
    write_config: ConfigWriter, gspo: Command
) -> None:
    """2 GPUs a server: 4 on a node of 8."""
    options = ("rollout.vllm.tensor_parallel_size=2", "rollout.vllm.options={max_num_seqs: 5}")
    seconds = ("--nodes=3", "--train-seconds=2:10", "--staleness=0,2")
    command = ("check", write_config(), "--rollout-plan", *ROLLOUT, *options, *WORDS, *seconds)
    code, out, _ = gspo(*command)
    settings = [Setting(s, bound, t, 2) for s, t in ((4, 10), (8, 20)) for bound in (0, 2)]
    outcomes = plan(log_normal_lengths(20, 60, 100), 32, Server(10, 80, 5), settings)
    rows = [line.split() for line in out.splitlines() if re.match(r" \d \+ \d ", line)]
    assert code == 0
    assert [row[:5] for row in rows] == [
        ["2", "+", "1", "4", "0"],
        ["2", "+", "1", "4", "2"],
        ["1", "+", "2", "8", "0"],
        ["1", "+", "2", "8", "2"],
    ]
    for row, expected in zip(rows, outcomes, strict=True):
        assert float(row[5]) == pytest.approx(expected.step_seconds, rel=5e-3)
        assert row[6] == f"{expected.setting.train_seconds:.1f}"
        assert row[7] == f"{expected.trainer_idle:.1%}"
        assert row[-2:] == [f"{expected.staleness_mean:.2f}", str(expected.staleness_max)]
    said, chosen = pairs(out), best(outcomes)
    assert (int(said["servers"]), int(said["max_staleness"])) == (4, 2)
    assert chosen.setting == settings[1] and said["rollout_nodes"] == "1"
    assert float(said["step_seconds"]) == pytest.approx(chosen.step_seconds, abs=1e-3)
    gain = outcomes[0].step_seconds / chosen.step_seconds
    assert "best: 1 of 3 nodes for rollouts (4 servers) and rollout.max_staleness=2: " in out
    assert f" {gain:.2f} times as fast as the best with max_staleness=0" in out


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")])
def test_it_compares_numbers_of_servers_and_draws_that(
    name: str, start: bytes, write_config: ConfigWriter, gspo: Command, tmp_path: Path
) -> None:
    lengths, picture = tmp_path / "lengths", tmp_path / "new" / name
    lengths.write_text("10\n50\n500\n")
    words = (*WORDS[1:], f"--lengths={lengths}", f"--picture={picture}", "--train-seconds=9")
    code, out, _ = gspo(
        "check", write_config(), *ROLLOUT, "--rollout-plan", "--servers=2,1", *words
    )
    numbers = [line.split()[:2] for line in out.splitlines() if re.match(r" \d +\d ", line)]
    assert code == 0
    assert numbers == [[str(s), str(bound)] for s in (1, 2) for bound in range(5)]
    assert "32 a step; median 50.0" in out and "longest 100 tokens" in out
    settings = [Setting(s, bound, 9, 2) for s in (1, 2) for bound in range(5)]
    chosen = best(plan(read_lengths(str(lengths), 100), 32, Server(10, 80, 256), settings))
    assert pairs(out)["step_seconds"] == f"{chosen.step_seconds:.3f}"
    assert f"picture: {picture}" in out
    assert picture.read_bytes().startswith(start)


def test_all_that_is_wrong_is_told_at_once(
    write_config: ConfigWriter, gspo: Command, tmp_path: Path
) -> None:
    path = write_config()
    wrong = {
        "--nodes": "1",
        "--lengths": "60,20",
        "--sequence-speed": "0",
        "--server-speed": "fast",
        "--train-seconds": "3:10,x:4",
        "--staleness": "0,-1",
        "--picture": "plan.pdf",
    }
    words = [f"{name}={text}" for name, text in wrong.items()]
    code, out, told = gspo("check", path, "--rollout-plan", "rollout.group_size=0", *words)
    lines = told.splitlines()
    assert code == 2 and out == ""
    assert lines[0].startswith("rollout.group_size = 0: ")
    for (name, text), line in zip(wrong.items(), [*lines[1:6], *lines[7:]], strict=True):
        assert line.startswith(f"{name} {text}: wrong; "), told
    assert lines[6].startswith("--update-seconds SECONDS is missing: ")
    assert len(lines) == 9

    good = ("check", path, "--rollout-plan", *WORDS)
    code, _, told = gspo(*good, "--train-seconds=5", "--servers=1", "--nodes=2")
    assert (code, told) == (2, "give one of --nodes and --servers, and not both\n")
    code, _, told = gspo(*good, "--train-seconds=5", "--nodes=2")
    form = "NODES:SECONDS with --nodes"
    assert (code, told) == (2, f"--train-seconds 5: wrong; legal: {form}\n")
    code, _, told = gspo(*good, "--train-seconds=1:5", "--servers=2")
    assert code == 2 and told.endswith("legal: plain SECONDS with --servers\n")
    code, _, told = gspo(*good, "--train-seconds=5", "--servers=2", "--server-speed=9")
    assert (code, told) == (2, "--server-speed 9: wrong; below --sequence-speed 10\n")
    large = "rollout.vllm.tensor_parallel_size=16"
    code, _, told = gspo(*good, "--train-seconds=1:5", "--nodes=2", large)
    assert code == 2 and told.startswith("rollout.vllm.tensor_parallel_size = 16: ")
    none = "rollout.vllm.options={max_num_seqs: 0}"
    code, _, told = gspo(*good, "--train-seconds=1:5", "--nodes=2", none)
    assert code == 2 and told.startswith("rollout.vllm.options.max_num_seqs = 0: ")
    missing = tmp_path / "lengths"
    code, _, told = gspo(*good, "--train-seconds=5", "--servers=2", f"--lengths={missing}")
    assert (code, told) == (2, f"{missing}: cannot be read: No such file or directory\n")


def test_its_options_need_it(write_config: ConfigWriter, gspo: Command) -> None:
    code, out, told = gspo("check", write_config(), "--nodes=3", "--staleness=1")
    assert (code, out) == (2, "")
    assert told == "--nodes: only with --rollout-plan\n--staleness: only with --rollout-plan\n"


def test_a_picture_that_cannot_be_written(
    write_config: ConfigWriter, gspo: Command, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    words = (*WORDS, "--train-seconds=5", "--servers=2", f"--picture={tmp_path}/file/plan.png")
    code, _, told = gspo("check", write_config(), *ROLLOUT, "--rollout-plan", *words)
    assert code == 2 and told.startswith(f"--picture {tmp_path}/file/plan.png: cannot be written: ")


def test_it_draws_every_curve(tmp_path: Path) -> None:
    """Pixels of each curve's colour are in the picture."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    from gspo_megatron.observe.plots import PALETTE
    from gspo_megatron.observe.timing_plots import plot_plan

    rows = [(n, f"bound {b}", {"seconds": 10 / n + b}) for n in (1, 2) for b in range(3)]
    path = plot_plan(tmp_path / "p.png", "servers", {"Time": ("s", "seconds", False)}, rows)
    pixels = imread(path)[..., :3].reshape(-1, 3)
    for color in PALETTE[:3]:
        assert (np.abs(pixels - to_rgb(color)).max(1) < 0.01).sum() > 200
