"""convert.sbatch in both directions: as a job, and as a job that depends on another job."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.programs import ROOT
from tests.slurm.cluster import Cluster
from tests.unit.hf.published import assert_same_bits, read_folder, write_model

SCRIPT = ROOT / "slurm" / "convert.sbatch"


def test_a_model_is_converted_there_and_back_and_a_mistake_is_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "source", "qwen3_moe", seed=1)
    checkpoint, back, nothing = (tmp_path / name for name in ("checkpoint", "back", "nothing"))

    def submit(*words: object, options: tuple[str, ...] = ()) -> str:
        usual = (f"--output={tmp_path}/log-%j.out", f"--chdir={tmp_path}")
        return cluster.submit(
            SCRIPT, *words, options=[*usual, *options], GSPO_PYTHON=sys.executable
        )

    wrong = submit("hf-to-megatron", nothing, tmp_path / "out")

    first = submit("hf-to-megatron", source, checkpoint)
    last = submit("megatron-to-hf", checkpoint, back, options=(f"--dependency=afterok:{first}",))
    for number in (first, last):
        assert "written from" in cluster.ended(number, "COMPLETED 0:0")
    log = cluster.ended(wrong, "FAILED 2:0")
    assert str(nothing) in log and "Traceback" not in log
    assert_same_bits(read_folder(back), read_folder(source))
    assert not list(tmp_path.glob(".gspo-megatron*"))
