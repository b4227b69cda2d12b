"""An ablation as an array of jobs, and its report as a job that depends on them."""

from __future__ import annotations

import os
import sys

import pytest

from tests.programs import ROOT, run_program
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Run

pytestmark = pytest.mark.timeout(1200)


def test_two_arms_and_their_report(cluster: Cluster, run: Run) -> None:
    out = run.folder / "ablation"
    environ = cluster.environ | run.environ(cluster)
    environ["PYTHONPATH"] += os.pathsep + str(ROOT)
    variants = ["--variants", "gspo", "grpo+r2", "--seeds", "1"]
    words = ["parallel.layout=dp=2", "training.steps=2", "-o", str(out), "--slurm=--nodes=2"]
    program = (sys.executable, "-m", "gspo_megatron", "ablate", run.config, *variants, *words)
    done = run_program(*program, environ=environ, cwd=run.folder)
    array, report = (line.split()[1].rstrip(":") for line in done.stdout.splitlines())
    assert cluster.job(report)["Dependency"].startswith(f"afterany:{array}")
    job = cluster.finish(report, timeout=600)
    logs = {path.name: path.read_text() for path in (out / ".slurm" / "1").glob("*.log")}
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), logs
    assert set(logs) == {"0.log", "1.log", "report.log"}
    for variant in ("gspo", "grpo+r2"):
        folder = out / variant / "seed_1"
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
        assert '"nodes": "2"' in (folder / "environment.json").read_text()
    text = (out / "report.html").read_text()
    assert "gspo" in text and "grpo+r2" in text
