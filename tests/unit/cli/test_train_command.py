"""`train` as a program: launcher, ranks and the way of an error from a rank to the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gspo_megatron
from gspo_megatron.data.toy import write_toy_dataset

ROOT = Path(gspo_megatron.__file__).parents[1]

# A stand-in for the training itself, so that the whole command runs without Megatron-Core.
TRAIN = """
import os, sys, threading, types
import gspo_megatron
from gspo_megatron.errors import RewardError
run = types.ModuleType("gspo_megatron.rl.run")
def run_training(config, fresh):
    if os.environ["RANK"] == "1":
        raise RewardError(f"no reward at seed {config.training.seed}")
    threading.Event().wait()  # as in a collective that the other rank never joins
run.run_training = run_training
sys.modules["gspo_megatron.rl"] = types.ModuleType("gspo_megatron.rl")
sys.modules["gspo_megatron.rl.run"] = run
"""


def test_the_train_command_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TRAIN)  # imported by every interpreter
    config = tmp_path / "tiny.yaml"
    prompts, _, _, tokenizer = write_toy_dataset(tmp_path / "toy", train=64, test=8)
    config.write_text(f"data: {{tokenizer: {tokenizer}, prompts: {prompts}}}\n")
    words = ["train", str(config), "training.seed=11", "--nproc", "2"]
    outer = ("RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_STEP_ID")
    clean = {name: text for name, text in os.environ.items() if name not in outer}
    result = subprocess.run(
        [sys.executable, "-m", "gspo_megatron", *words],
        env={**clean, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "no reward at seed 11\n"
