"""A very small run as a Slurm job: its files, its submission, and a way to make it wait."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from gspo_megatron.data.toy import write_toy_dataset
from tests.e2e.resuming import TINY_MODEL, assert_same_run, records, write_corpus
from tests.programs import ROOT
from tests.slurm.cluster import Cluster

STEPS = 4
# the steps of pre-training and fine-tuning; they take long enough to stop a run in the middle
STAGE_STEPS = 60
CALLS_PER_STEP = 16  # calls of the reward

# The reward of a response is arbitrary but reproducible. A file `hold` holds the number of a call:
# this call and all later ones wait until the file is removed. Each call adds a byte to the file
# `calls`.
_REWARD = """
import os, socket, time, zlib
from pathlib import Path
folder = Path(__file__).parent
def broken(*_, **__):
    raise ArithmeticError("a failure made for the test")
def held():
    try:
        call = int((folder / "hold").read_text() or 0)
    except FileNotFoundError:  # a test may remove it at any moment
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
    """A run, with all its files in `folder`. Its ranks are divided equally between two nodes."""

    folder: Path
    ranks_per_node: int = 1
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
        """Submit the script that users submit. Returns the job's number."""
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
        """The environment of jobs: the Python program, the folder of the reward, and settings for
        the network of a single machine."""
        path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        chosen = {"GSPO_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(path)}
        chosen["CUDA_VISIBLE_DEVICES"] = ""  # the nodes of the cluster have no GPU
        if not cluster.isolated:  # gloo looks up the address of the host's name
            chosen["GLOO_SOCKET_IFNAME"] = "lo"
        return chosen

    def hold(self, calls: int) -> None:
        """Make the run wait after `calls` further calls of its reward."""
        (self.folder / "holding").unlink(missing_ok=True)
        (self.folder / "hold").write_text(str(calls))

    def let_go(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def wait_until_held(self, cluster: Cluster, number: str) -> None:
        """Wait until a rank is held. Then the job is running."""
        cluster.wait(number, lambda _: (self.folder / "holding").exists())

    def submit_held(self, cluster: Cluster, calls: int) -> str:
        """Submit the run, and wait until it is held after `calls` calls of its reward."""
        self.hold(calls)
        number = self.submit(cluster)
        self.wait_until_held(cluster, number)
        return number

    def assert_same_as(self, other: Run) -> None:
        """Check that metrics, samples, weights and optimizer state of two runs are equal, bit for
        bit."""
        assert [r["step"] for r in records(self.out) if r["phase"] == "rl"][-1] == STEPS
        assert_same_run(self.out, other.out, f"rl_{STEPS:08d}")


def make_run(folder: Path, *, ranks: int = 2, **sections: Mapping[str, object]) -> Run:
    """Write a run's configuration, data and reward into a folder. With four ranks the start is
    slower."""
    (folder / "slurm_test_reward.py").write_text(_REWARD)
    config = {
        **_base_config(folder, ranks),
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_response_tokens": 6},
        "reward": {"import_path": "slurm_test_reward:reward"},
        "objective": {"name": "gspo", "mini_batches": 2},
        "training": {"steps": STEPS, "precision": "fp32"},
        "checkpoint": {"interval": 1},
    }
    config["data"]["prompts"] = str(folder / "toy" / "train.jsonl")
    for section, values in sections.items():
        config[section] = {**config[section], **values}
    run = Run(folder, ranks // 2)
    run.config.write_text(yaml.safe_dump(config))
    return run


def make_stage_run(folder: Path, stage: str) -> Run:
    """Write a run of pre-training or fine-tuning, which has no reward. stage: sft or pretrain."""
    config = _base_config(folder, ranks=2)
    if stage == "sft":
        config["data"]["examples"] = str(folder / "toy" / "train.jsonl")
    else:
        write_corpus(folder / "toy" / "tokenizer.model", folder / "corpus")
        config["data"] |= {"train": [str(folder / "corpus")], "sequence_length": 16}
    training = {"steps": STAGE_STEPS, "batch_size": 8, "precision": "fp32"}
    config["training"] = {**training, "micro_batch_tokens": 64}
    config["checkpoint"] = {"interval": STAGE_STEPS}
    run = Run(folder, script=stage)
    run.config.write_text(yaml.safe_dump(config))
    return run


def _base_config(folder: Path, ranks: int) -> dict[str, dict[str, Any]]:
    write_toy_dataset(folder / "toy", "mixed", train=64, test=8, seed=1)
    return {
        "model": {"megatron": dict(TINY_MODEL)},
        # Each axis crosses nodes or stays inside one, depending on how ranks are placed.
        "parallel": {"layout": {4: "tp=2,dp=2,ep=2", 2: "dp=2,ep=2"}[ranks]},
        "data": {"tokenizer": str(folder / "toy" / "tokenizer.model")},
        "optimizer": {"learning_rate": 3e-3},
        "logging": {"dir": str(folder / "run"), "plots": False},
    }


def find_task(run: Run, rank: int) -> int:
    """The process id of a rank on this machine."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, variables = process.info["cmdline"] or [""], process.info["environ"] or {}
        is_task = {str(run.config), "gspo_megatron"} <= set(words) and "bash" not in words[0]
        if is_task and variables.get("SLURM_PROCID") == str(rank):
            return process.pid
    raise AssertionError(f"no process is rank {rank} of {run.config}")


# The disturbances of a job. Each function disturbs a run that is held, and lets it go on. It
# returns when Slurm has the job in its queue again, or has started it again.
Disturbance = Callable[[Cluster, Run, str], None]


def wait_for_line(cluster: Cluster, number: str, line: str, count: int = 1) -> None:
    """Wait until the job's log contains the line `count` times."""
    cluster.wait(number, lambda job: cluster.log(job).count(line) >= count, timeout=300)


def signalled(cluster: Cluster, run: Run, number: str) -> None:
    """Send SIGUSR1 to the batch script, as Slurm does some minutes before the time limit."""
    asked = cluster.log(cluster.job(number)).count("told to stop")
    cluster.run("scancel", "--batch", "--signal=USR1", number)
    wait_for_line(cluster, number, "told to stop", asked + 1)
    run.let_go()


def preempted(cluster: Cluster, run: Run, number: str) -> None:
    """Submit a job of a higher priority that needs both nodes."""
    asked = cluster.log(cluster.job(number)).count("told to stop")
    options = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    other = cluster.run("sbatch", "--parsable", *options, "--wrap", "sleep 1").strip()
    wait_for_line(cluster, number, "told to stop", asked + 1)
    run.let_go()
    cluster.finish(other)


def requeued(cluster: Cluster, run: Run, number: str) -> None:
    """Requeue the job, as an administrator or the user may. The job gets no time to save. The run
    is held until Slurm has ended the job, because otherwise the run could finish first."""
    before = cluster.restarts(number)
    cluster.run("scontrol", "requeue", number)
    cluster.wait(
        number,
        lambda job: int(job["Restarts"]) > before and job["JobState"] != "COMPLETING",
    )
    run.let_go()


def node_failed(cluster: Cluster, run: Run, number: str) -> None:
    """The second node suddenly fails and comes back later. The tasks on the first node fail
    immediately, long before Slurm notices."""
    before = cluster.restarts(number)
    cluster.kill(cluster.nodes[1])
    run.let_go()
    cluster.wait(number, lambda job: int(job["Restarts"]) > before)
    cluster.start_node(cluster.nodes[1])


def killed_late(cluster: Cluster, run: Run, number: str) -> None:
    """Kill the tasks. Slurm itself sometimes does so after a node has failed: signals to the tasks
    of the earlier start, which could not be delivered while the node was down, reach the tasks of
    the new start."""
    cluster.run("scancel", "--signal=KILL", f"{number}.0")
    run.let_go()


def second_node_killed_late(cluster: Cluster, run: Run, number: str) -> None:
    """Kill the task on the second node, as after a failure of that node alone. No process reports
    the kill. The task on the first node loses its connections and ends with an error of its own."""
    assert cluster.restarts(number) > 0, "late signals do not reach a first start"
    task = psutil.Process(find_task(run, rank=1))
    for process in (task.parent(), task):  # the shell that started the task, and the task
        process.kill()
    run.let_go()


def first_node_failed(cluster: Cluster, run: Run, number: str) -> None:
    """The node with the batch script fails, and Slurm marks it as down."""
    name = cluster.nodes[0]
    cluster.kill(name)
    cluster.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")
    run.let_go()
    cluster.start_node(name)


def disturb(cluster: Cluster, run: Run, number: str, disturbance: Disturbance) -> None:
    """Disturb the run when it is held. Returns when the job has been restarted."""
    run.wait_until_held(cluster, number)
    before = cluster.restarts(number)
    disturbance(cluster, run, number)
    cluster.wait(number, lambda job: int(job["Restarts"]) > before)
