"""`ablate` on real runs: killed after the first, continued, reported; and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo_megatron.cli.check_inputs import check_all
from gspo_megatron.cli.variants import choose_variants, plan_runs
from gspo_megatron.config import load_config
from tests.e2e.conftest import Command, command_environment

ROOT = Path(__file__).resolve().parents[2]
VARIANTS, SEEDS = ("grpo", "gspo+r3"), (1, 2)
STEPS = 2


def words(config_file: Path, out: Path) -> list[str]:
    seeds = str(len(SEEDS))
    noise = "routing.rollout_noise=0.2"
    return [
        "ablate",
        str(config_file),
        noise,
        "--variants",
        *VARIANTS,
        "--seeds",
        seeds,
        "-o",
        str(out),
    ]


def rl_records(folder: Path) -> list[dict[str, float]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["phase"] == "rl"]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)


@pytest.mark.slow
def test_an_ablation_is_killed_and_goes_on(
    gspo: Command, config_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ablation"
    first, second = (out / variant / "seed_1" for variant in VARIANTS)
    process = subprocess.Popen(
        [sys.executable, "-m", "gspo_megatron", *words(config_file, out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=command_environment(),
    )
    try:
        wait_for(second / "metrics.jsonl", process)  # the second run has begun
    finally:
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "the same command continues from here" in said
    assert not (out / "report.md").exists()
    untouched = (first / "metrics.jsonl").stat().st_mtime_ns

    result = gspo(*words(config_file, out))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 are finished and stay as they are" in result.stdout
    assert (first / "metrics.jsonl").stat().st_mtime_ns == untouched
    assert second.with_name("seed_1.1").is_dir()  # the run that was cut short is kept
    for variant in VARIANTS:
        for seed in SEEDS:
            records = rl_records(out / variant / f"seed_{seed}")
            assert [record["step"] for record in records] == [*range(STEPS + 1)]
            last = records[-1]
            assert "routing/volatility" in last and "routing/layer_01/volatility" in last
            assert ("replay/bytes" in last) == ("r3" in variant)
            assert last["mismatch/abs_mean"] > 1e-4  # noisy routers; 1e-6 without
    check_report(out)
    # nothing is left to be done
    assert gspo(*words(config_file, out), "--print-commands").stdout == ""


def check_report(out: Path) -> None:
    text = (out / "report.md").read_text()
    page = (out / "report.html").read_text()
    for part in ("| grpo |", "| gspo+r3 |", "| layer 1 | layer 2 | layer 3 | layer 4 |"):
        assert part in text
    assert "None of the 4 runs collapsed" in text
    assert page.count("data:image/png;base64,") == 2
    assert sorted(path.name for path in (out / "plots").iterdir()) == [
        "variants.png",
        "volatility.png",
    ]


def test_bad_input_is_refused_before_anything_runs(
    gspo: Command, config_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ablation"
    for more, named in (
        (("--variants", "grpo+r4"), "--variants grpo+r4: no such variant; did you mean"),
        (("--variants", "grpo", "--seeds", "0"), "'0' is not a positive integer"),
        (("objective.clip_lo=0.1",), "objective.clip_lo = 0.1: unknown key; did you mean"),
        (("rollout.group_size=1", "--seeds", "1"), "rollout.group_size = 1"),
        (("--report-only",), "there is nothing to report"),
    ):
        result = gspo("ablate", config_file, *more, "-o", out)
        assert result.returncode == 2, result.stdout + result.stderr
        assert named in result.stderr
        assert "Traceback" not in result.stderr
    assert not out.exists()


def test_the_example_is_sound(
    gspo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data, the model that all runs start from (after one step), and every variant on them."""
    example = ROOT / "examples" / "ablation"
    data = tmp_path / "runs" / "sorting"
    command = [sys.executable, example / "make_data.py", "-o", data]
    subprocess.run(command, check=True, env=command_environment())
    rows = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
    assert len(rows) == 256
    assert all(row["answer"] == "".join(sorted(row["prompt"][:-1])) for row in rows)
    monkeypatch.chdir(tmp_path)
    done = gspo("sft", example / "sft.yaml", "training.steps=1", "optimizer.warmup_steps=0")
    assert done.returncode == 0, done.stderr
    path = str(example / "config.yaml")
    for planned in plan_runs(path, [], choose_variants([], load_config(path)), [1], tmp_path):
        check_all(planned.config, 1)
