"""A very small run as a Slurm job: its files, its submission, and a hold on it while it goes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from gspo_megatron.data.corpus_files import write_indexed
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.data.toy import write_toy_dataset
from tests.e2e.resuming import TINY_MODEL, assert_same_run, records
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
STAGE_STEPS = 60  # of pre-training and fine-tuning: seconds enough to stop a run in the middle
CALLS_PER_STEP = 16  # of the reward

# What is said of a response is arbitrary, and the same everywhere. While the file `hold` is there,
# the run stands still from the call that it names; in `calls`, a byte is a call.
_REWARD = """
import os, socket, time, zlib
from pathlib import Path
folder = Path(__file__).parent
def broken(*_, **__):
    raise ArithmeticError("a failure made for the test")
def held():
    try:
        call = int((folder / "hold").read_text() or 0)
    except FileNotFoundError:  # it may go at any moment
        return False
    return (folder / "calls").stat().st_size >= call
def reward(sample):
    with (folder / "calls").open("a") as file:
        file.write("x")
    fail = folder / "fail"
    while held():
        (folder / "holding").touch()
        time.sleep(0.02)
    if fail.exists() and os.environ["RANK"] == fail.read_text():
        from gspo_megatron.rl import loop
        loop.plan_step = broken  # a defect: what a reward raises is its author's mistake
    return zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 97 / 96
"""


@dataclass
class Run:
    """Everything of one run lies in `folder`; it has as many ranks on each of two nodes."""

    folder: Path
    ranks_per_node: int = 2
    script: str = "train_gspo"

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def submit(
        self,
        cluster: Cluster,
        *arguments: object,
        options: Sequence[str] = (),
        **environ: str,
    ) -> str:
        """sbatch of the script that users submit; returns the job's number."""
        usual = ["--nodes=2", f"--ntasks-per-node={self.ranks_per_node}", "--cpus-per-task=1"]
        usual += [f"--output={self.folder}/log-%j.out", f"--chdir={self.folder}"]
        return cluster.submit(
            ROOT / "slurm" / f"{self.script}.sbatch",
            self.config,
            *arguments,
            options=[*usual, *options],
            **self.environ(cluster),
            **environ,
        )

    def environ(self, cluster: Cluster) -> dict[str, str]:
        """Of jobs: which Python, where the reward is, and what a laptop's network needs."""
        path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        chosen = {"GSPO_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(path)}
        chosen["CUDA_VISIBLE_DEVICES"] = ""  # the cluster's nodes have none
        if not cluster.isolated:  # gloo asks for the address of the host's name
            chosen["GLOO_SOCKET_IFNAME"] = "lo"
        return chosen

    def calls(self) -> int:
        """How many responses have got their reward."""
        path = self.folder / "calls"
        return path.stat().st_size if path.exists() else 0

    def hold(self, calls: int) -> None:
        """Let the run stand still at its next reward after so many."""
        (self.folder / "holding").unlink(missing_ok=True)
        (self.folder / "hold").write_text(str(calls))

    def let_go(self) -> None:
        """The contrary."""
        (self.folder / "hold").unlink(missing_ok=True)

    def wait_until_held(self, cluster: Cluster, number: str, timeout: float = 300) -> None:
        """Until a rank stands still; the job is running then."""
        cluster.wait(number, lambda _: (self.folder / "holding").exists(), timeout)

    def assert_same_as(self, other: Run) -> None:
        """Metrics, samples, weights and the optimizer's state are equal, bit for bit."""
        assert [r["step"] for r in records(self.out) if r["phase"] == "rl"][-1] == STEPS
        assert_same_run(self.out, other.out, f"rl_{STEPS:08d}")


def make_run(folder: Path, *, ranks: int = 4, **sections: Mapping[str, object]) -> Run:
    """Write a run's configuration, data and reward into a folder. Two ranks start faster."""
    write_toy_dataset(folder / "toy", "mixed", train=64, test=8, seed=1)
    (folder / "slurm_test_reward.py").write_text(_REWARD)
    config: dict[str, dict[str, object]] = {
        "model": {"megatron": dict(TINY_MODEL)},
        # both axes cross nodes or stay inside one, whichever way ranks are put on nodes
        "parallel": {"layout": {4: "tp=2,dp=2,ep=2", 2: "dp=2,ep=2"}[ranks]},
        "data": {
            "prompts": str(folder / "toy" / "train.jsonl"),
            "tokenizer": str(folder / "toy" / "tokenizer.model"),
        },
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_response_tokens": 6},
        "reward": {"import_path": "slurm_test_reward:reward"},
        "objective": {"name": "gspo", "mini_batches": 2},
        "optimizer": {"learning_rate": 3e-3},
        "training": {"steps": STEPS, "precision": "fp32"},
        "checkpoint": {"interval": 1},
        "logging": {"dir": str(folder / "run"), "plots": False},
    }
    for section, values in sections.items():
        config[section] = {**config[section], **values}
    run = Run(folder, ranks // 2)
    run.config.write_text(yaml.safe_dump(config))
    return run


def make_stage_run(folder: Path, stage: str, *, ranks: int = 4) -> Run:
    """The same for pre-training or fine-tuning, without any reward: stage is sft or pretrain."""
    write_toy_dataset(folder / "toy", "mixed", train=64, test=8, seed=1)
    tokenizer = folder / "toy" / "tokenizer.model"
    data: dict[str, object] = {"tokenizer": str(tokenizer)}
    training: dict[str, object] = {"steps": STAGE_STEPS, "batch_size": 8, "precision": "fp32"}
    if stage == "sft":
        data["examples"] = str(folder / "toy" / "train.jsonl")
    else:
        data |= {"train": [str(_write_corpus(tokenizer, folder / "corpus"))], "sequence_length": 16}
    config = {
        "model": {"megatron": dict(TINY_MODEL)},
        "parallel": {"layout": {4: "tp=2,dp=2,ep=2", 2: "dp=2,ep=2"}[ranks]},
        "data": data,
        "optimizer": {"learning_rate": 3e-3},
        "training": {**training, "micro_batch_tokens": 64},
        "checkpoint": {"interval": STAGE_STEPS},
        "logging": {"dir": str(folder / "run"), "plots": False},
    }
    run = Run(folder, ranks // 2, stage)
    run.config.write_text(yaml.safe_dump(config))
    return run


def _write_corpus(tokenizer: Path, prefix: Path) -> Path:
    """Documents of random tokens."""
    loaded = load_tokenizer(tokenizer)
    source = np.random.default_rng(3)
    documents = [
        np.append(source.integers(loaded.vocab_size, size=length), loaded.eos_id)
        for length in source.integers(3, 40, size=50)
    ]
    files = [prefix.with_suffix(f".{kind}") for kind in ("bin", "idx")]
    write_indexed(documents, *files, loaded.vocab_size)
    return prefix


def wait_for(path: Path, timeout: float = 60) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path} after {timeout} s"
        time.sleep(0.1)


def find_task(run: Run, rank: int) -> int:
    """The process of a rank on this machine."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if str(run.config).encode() in command and b"gspo_megatron" in command:
                variables = (entry / "environ").read_bytes().split(b"\0")
                if f"SLURM_PROCID={rank}".encode() in variables and b"bash" not in command[0]:
                    return int(entry.name)
    raise AssertionError(f"no process is rank {rank} of {run.config}")
