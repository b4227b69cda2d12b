"""The command `train` with real ranks, from a file of prompts to a run folder."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.resuming import all_records
from tests.programs import gspo

_RATIOS = [("ratio", name) for name in ("min", "p01", "p50", "p99", "max")]
_RATIOS += [("clip", name) for name in ("binding", "outside", "low", "high")]
# The keys that every RL step writes.
KEYS = [
    *("step", "loss", "grad_norm", "lr", "policy/entropy", "kl/k1", "kl/k3"),
    *(f"reward/{name}" for name in ("mean", "std", "zero_spread_groups")),
    *(f"{kind}/{of}/{name}" for of in ("sequence", "token") for kind, name in _RATIOS),
    "ratio/noise_floor",
    *(f"mismatch/{name}" for name in ("abs_mean", "k1", "k3", "over_ln2", "max")),
    *("response/length_mean", "response/truncated"),
    *(f"perf/{name}_seconds" for name in ("step", "rollout", "logprob", "train", "sync")),
    *("perf/tokens_per_second", "perf/peak_memory_bytes"),
]


def test_a_run_leaves_the_whole_run_folder_and_warns_once(config_file: Path) -> None:
    """With the same weights, rollout and trainer differ by fp32 rounding of about 1e-7. If the clip
    range is as small as this noise, the run gives a warning."""
    clip = ("objective.clip_low=1e-10", "objective.clip_high=1e-10")
    result = gspo("train", config_file, *clip, "logging.plots=true", is_new=True)
    run = config_file.parent / "run"
    _, *records = all_records(run, "rl")  # the first record is an evaluation
    assert [r["step"] for r in records] == [1, 2]
    assert not [key for key in KEYS if key not in records[0]]
    assert all(r["mismatch/max"] < 1e-4 for r in records)  # in fp32, engine and trainer agree
    for name in ("config.resolved.yaml", "environment.json", "samples.jsonl", "report.html"):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "plots").glob("*.png"))
    assert str(run) in result.stdout
    assert "Warning" not in result.stderr
    said = [line for line in result.stderr.splitlines() if "noise of the sequence ratio" in line]
    assert len(said) == 1 and "ratio/noise_floor" in said[0]
