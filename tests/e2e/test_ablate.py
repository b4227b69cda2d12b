"""`ablate` on real runs. It is killed after the first run, continues, and writes a report."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from gspo_megatron.cli.check_inputs import check_all
from gspo_megatron.cli.variants import choose_variants, plan_runs
from gspo_megatron.config import load_config
from tests.e2e.resuming import all_records
from tests.programs import ROOT, command_environment, gspo, run_program, start_program, wait_until

VARIANTS, SEEDS = ("grpo", "gspo+r3"), (1, 2)
STEPS = 2


@pytest.mark.slow
def test_an_ablation_is_killed_and_goes_on(config_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "ablation"
    words = ["ablate", str(config_file), "routing.rollout_noise=0.2", "--variants", *VARIANTS]
    words += ["--seeds", str(len(SEEDS)), "-o", str(out)]
    first, second = (out / variant / "seed_1" for variant in VARIANTS)
    program = (sys.executable, "-m", "gspo_megatron", *words)
    with (tmp_path / "said").open("w") as file:
        process = start_program(*program, environ=command_environment(), out=file, err=file)
    try:
        # The second run has begun.
        assert wait_until((second / "metrics.jsonl").exists, process, seconds=200)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    said = (tmp_path / "said").read_text()
    assert process.returncode == 143, said
    assert "the same command continues from here" in said
    assert not (out / "report.html").exists()
    untouched = (first / "metrics.jsonl").stat().st_mtime_ns

    result = gspo(*words)
    assert "1 are finished and stay as they are" in result.stdout
    assert (first / "metrics.jsonl").stat().st_mtime_ns == untouched
    assert second.with_name("seed_1.1").is_dir()  # the interrupted run is kept under this name
    for variant in VARIANTS:
        for seed in SEEDS:
            records = all_records(out / variant / f"seed_{seed}", "rl")
            assert [record["step"] for record in records] == [*range(STEPS + 1)]
            last = records[-1]
            assert "routing/volatility" in last and "routing/layer_01/volatility" in last
            assert ("replay/bytes" in last) == ("r3" in variant)
            # the routers are noisy; without noise this is 1e-6
            assert last["mismatch/abs_mean"] > 1e-4
    # All runs are finished.
    assert gspo(*words, "--print-commands", is_new=True).stdout == ""

    text = (out / "report.html").read_text()
    for part in ("gspo+r3", "volatility", "With 2 seeds no difference is tested"):
        assert part in text
    assert "None of the 4 runs collapsed" in text
    assert text.count("data:image/png;base64,") == 1
    assert [path.name for path in (out / "plots").iterdir()] == ["variants.png"]


def test_the_example_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test covers the example's data, the model from which all runs start (trained for one
    step), and every variant."""
    example = ROOT / "examples" / "ablation"
    data = tmp_path / "runs" / "sorting"
    run_program(sys.executable, example / "make_data.py", "-o", data)
    rows = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
    assert len(rows) == 256
    assert all(row["answer"] == "".join(sorted(row["prompt"][:-1])) for row in rows)
    monkeypatch.chdir(tmp_path)
    gspo("sft", example / "sft.yaml", "training.steps=1", "optimizer.warmup_steps=0")
    path = str(example / "config.yaml")
    for planned in plan_runs(path, [], choose_variants([], load_config(path)), [1], tmp_path):
        check_all(planned.config, 1)
