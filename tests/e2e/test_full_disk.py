"""A disk that is full when a step is written down ends the run in one line, on all ranks."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import write_config
from tests.e2e.resuming import checkpoint_names, make_small, records, train

# Once the file `full_disk` is there and a step is written down, the main rank can write no file
# larger than its metrics are then.
REWARD = """
import os, resource, zlib
from pathlib import Path
folder = Path(__file__).parent
metrics = folder / "run" / "metrics.jsonl"
def reward(sample):
    if os.environ.get("RANK") == "0" and (folder / "full_disk").exists():
        if metrics.exists() and metrics.stat().st_size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 10, -1))
    return zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 97 / 96
"""


def test_a_step_that_cannot_be_written_down(toy: Path, tmp_path: Path) -> None:
    steps = {"steps": 3}
    config = make_small(write_config(toy, tmp_path), training=steps, data={"eval_prompts": None})
    (tmp_path / "resuming_reward.py").write_text(REWARD)
    (tmp_path / "full_disk").touch()
    run = tmp_path / "run"
    result = train(config, "parallel.layout=dp=2", "logging.samples_per_step=0", expect=2)
    (told,) = [line for line in result.stderr.splitlines() if "cannot be written" in line]
    assert f"{run}/metrics.jsonl: cannot be written: File too large; " in told
    assert checkpoint_names(run)[-1] == "rl_00000001"

    (tmp_path / "full_disk").unlink()
    result = train(config, "parallel.layout=dp=2", "logging.samples_per_step=0")
    assert "resuming from" in result.stderr
    assert [record["step"] for record in records(run)] == [1, 2, 3]
