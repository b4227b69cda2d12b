"""examples/tiny_cpu: all stages by run.sh, the table of results, and the error if the earlier
stages are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.e2e.resuming import all_records
from tests.programs import ROOT, gspo, run_program

FOLDER = ROOT / "examples" / "tiny_cpu"
START = Path("runs/tiny_cpu_start/seed_2")

# Overrides for short stages, each in one process. The steps are enough for some right answers.
SMALL = "parallel.layout=tp=1 logging.plots=false training.evaluation_interval=0"
PRETRAIN = f"{SMALL} training.steps=20"
SFT = f"{SMALL} training.steps=120 training.batch_size=128 optimizer.learning_rate=2e-3"
RL = (*SMALL.split(), "training.steps=2", "training.seed=2")
RUN = Path("runs/tiny_cpu-layout=tp=1-plots=false-evaluation_interval=0-steps=2-seed=2")

# The test starts many processes, each of which may take a minute on a busy machine.
pytestmark = pytest.mark.timeout(1800)


def life(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run run.sh with `folder` as the current folder, in which it writes its runs."""
    environ |= forks.shell_environ()
    return run_program("bash", FOLDER / "run.sh", *words, environ=environ, cwd=folder, timeout=900)


def evaluations(run: Path, key: str) -> list[float]:
    return [record[key] for record in all_records(run) if key in record]


def accuracies(run: Path) -> list[float]:
    """Check the answers in answers.json. Returns the accuracy of the model of each stage."""
    answers = json.loads((run / "answers.json").read_text())
    rows = answers["prompts"]
    assert len(rows) == 256
    for model in answers["models"].values():
        pairs = zip(rows, model["answers"], strict=True)
        right = sum(row["answer"] == given for row, given in pairs)
        assert model["accuracy"] == right / len(rows)
    return [model["accuracy"] for model in answers["models"].values()]


def table(folder: Path, expect: int) -> str:
    runs = (START / "pretrain", START / "sft", RUN)
    table = (sys.executable, FOLDER / "table.py", *runs)
    return run_program(*table, expect=expect, cwd=folder).stdout


def test_a_short_life(tmp_path: Path) -> None:
    """All stages run, and each stage begins with the model of the stage before."""
    result = life(tmp_path, *RL, PRETRAIN=PRETRAIN, SFT=SFT)

    rl = tmp_path / RUN
    pretrained, tuned, trained = accuracies(rl)
    reported = evaluations(rl, "evaluation/accuracy")
    assert tuned > 0.02
    assert tuned == pytest.approx(reported[0], abs=0.02)
    assert trained == pytest.approx(reported[-1], abs=0.02)
    rows = {line.split("  ")[0]: line for line in result.stdout.splitlines()}
    before_rl = (("pre-training", "pretrain", pretrained), ("fine-tuning", "sft", tuned))
    for name, run, accuracy in before_rl:
        losses = evaluations(tmp_path / START / run, "evaluation/loss")
        assert losses[-1] < losses[0]
        assert f"{losses[0]:.2f} -> {losses[-1]:.2f}" in rows[name]
        assert f"{accuracy:.1%}" in rows[name]
    assert f"{trained:.1%}" in rows["GSPO"] and f"{reported[-1]:.1%}" in rows["GSPO"]

    assert result.stdout.endswith(table(tmp_path, expect=0))

    answers = json.loads((rl / "answers.json").read_text())
    answers["models"][str(RUN / "hf")]["accuracy"] = reported[-1] + 0.03
    (rl / "answers.json").write_text(json.dumps(answers))
    differs = "GSPO: transformers and the run differ by more than 2%"
    assert differs in table(tmp_path, expect=1)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp=1", "tp=2,pp=2,ep=2"])
def test_a_whole_life(tmp_path: Path, layout: str) -> None:
    """The results are equal to those in the example's README. The test takes minutes."""
    life(tmp_path, "training.seed=2", f"parallel.layout={layout}")
    _, tuned, trained = accuracies(tmp_path / f"runs/tiny_cpu-seed=2-layout={layout}")
    assert tuned < 0.45 and trained > 0.85


def test_without_the_earlier_stages_the_error_names_run_sh(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.yaml has relative paths, and the current folder is empty."""
    monkeypatch.chdir(tmp_path)
    advice = f"{FOLDER / 'run.sh'}: makes the files that this configuration needs; run it first"
    result = gspo("train", FOLDER / "config.yaml", expect=2, is_new=True)
    *missing, checkpoint, last = result.stderr.splitlines()
    assert last == advice
    no_start = "model.checkpoint_path = 'runs/tiny_cpu_start/seed_1/sft': no such folder"
    assert checkpoint == no_start
    for name, line in zip(("tokenizer", "train.jsonl", "test.jsonl"), missing, strict=True):
        assert line.startswith(f"runs/tiny_cpu_start/data/{name}: no such")

    result = gspo(
        "train",
        FOLDER / "config.yaml",
        f"data.prompts={toy / 'train.jsonl'}",
        f"data.eval_prompts={toy / 'test.jsonl'}",
        f"data.tokenizer={toy / 'tokenizer.model'}",
        expect=2,
    )
    assert result.stderr.splitlines() == [no_start, advice]
