"""A very small run as a Slurm job: its files, its submission, and a hold on it while it goes."""

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

    def hold(self, calls: int) -> None:
        """Let the run stand still at its next reward after so many."""
        (self.folder / "holding").unlink(missing_ok=True)
        (self.folder / "hold").write_text(str(calls))

    def let_go(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def wait_until_held(self, cluster: Cluster, number: str) -> None:
        """Until a rank stands still; the job is running then."""
        cluster.wait(number, lambda _: (self.folder / "holding").exists())

    def submit_held(self, cluster: Cluster, calls: int) -> str:
        """Submit it and wait until it stands still at its next reward after so many."""
        self.hold(calls)
        number = self.submit(cluster)
        self.wait_until_held(cluster, number)
        return number

    def assert_same_as(self, other: Run) -> None:
        """Metrics, samples, weights and the optimizer's state are equal, bit for bit."""
        assert [r["step"] for r in records(self.out) if r["phase"] == "rl"][-1] == STEPS
        assert_same_run(self.out, other.out, f"rl_{STEPS:08d}")


def make_run(folder: Path, *, ranks: int = 2, **sections: Mapping[str, object]) -> Run:
    """Write a run's configuration, data and reward into a folder. Four ranks start more slowly."""
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
    """The same for pre-training or fine-tuning, without any reward: stage is sft or pretrain."""
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
        # both axes cross nodes or stay inside one, whichever way ranks are put on nodes
        "parallel": {"layout": {4: "tp=2,dp=2,ep=2", 2: "dp=2,ep=2"}[ranks]},
        "data": {"tokenizer": str(folder / "toy" / "tokenizer.model")},
        "optimizer": {"learning_rate": 3e-3},
        "logging": {"dir": str(folder / "run"), "plots": False},
    }


def find_task(run: Run, rank: int) -> int:
    """The process of a rank on this machine."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, variables = process.info["cmdline"] or [""], process.info["environ"] or {}
        is_task = {str(run.config), "gspo_megatron"} <= set(words) and "bash" not in words[0]
        if is_task and variables.get("SLURM_PROCID") == str(rank):
            return process.pid
    raise AssertionError(f"no process is rank {rank} of {run.config}")


# What may happen to a job. Each function does it to a run that stands still, lets the run go on,
# and returns once Slurm has the job in its queue again, or has started it again.
Disturbance = Callable[[Cluster, Run, str], None]


def wait_for_line(cluster: Cluster, number: str, line: str, count: int = 1) -> None:
    """Until the job's log has it so many times."""
    cluster.wait(number, lambda job: cluster.log(job).count(line) >= count, timeout=300)


def signalled(cluster: Cluster, run: Run, number: str) -> None:
    """SIGUSR1 to the batch script, as some minutes before the end of the job's time."""
    asked = cluster.log(cluster.job(number)).count("told to stop")
    cluster.run("scancel", "--batch", "--signal=USR1", number)
    wait_for_line(cluster, number, "told to stop", asked + 1)
    run.let_go()


def preempted(cluster: Cluster, run: Run, number: str) -> None:
    """A job of a higher priority wants both nodes."""
    asked = cluster.log(cluster.job(number)).count("told to stop")
    options = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    other = cluster.run("sbatch", "--parsable", *options, "--wrap", "sleep 1").strip()
    wait_for_line(cluster, number, "told to stop", asked + 1)
    run.let_go()
    cluster.finish(other)


def requeued(cluster: Cluster, run: Run, number: str) -> None:
    """An administrator, or the user, wants it to start again; it gets no time to save anything: let
    go at once, it could come to its end while Slurm waits to kill it."""
    before = cluster.restarts(number)
    cluster.run("scontrol", "requeue", number)
    cluster.wait(
        number,
        lambda job: int(job["Restarts"]) > before and job["JobState"] != "COMPLETING",
    )
    run.let_go()


def node_failed(cluster: Cluster, run: Run, number: str) -> None:
    """The second node is gone from one moment to the next, and comes back later. The tasks of the
    first one fail at once, long before Slurm notices."""
    before = cluster.restarts(number)
    cluster.kill(cluster.nodes[1])
    run.let_go()
    cluster.wait(number, lambda job: int(job["Restarts"]) > before)
    cluster.start_node(cluster.nodes[1])


def killed_late(cluster: Cluster, run: Run, number: str) -> None:
    """What Slurm does by itself at times, in a start after one whose node was gone: signals to that
    one's tasks, which could not be delivered then, reach those of this one."""
    cluster.run("scancel", "--signal=KILL", f"{number}.0")
    run.let_go()


def second_node_killed_late(cluster: Cluster, run: Run, number: str) -> None:
    """The same where only the second node was gone. Nothing is left there to say who was killed;
    the tasks of the first node lose their connections and end with an error of their own."""
    assert cluster.restarts(number) > 0, "late signals do not reach a first start"
    task = psutil.Process(find_task(run, rank=1))
    for process in (task.parent(), task):  # the shell of the task, too
        process.kill()
    run.let_go()


def first_node_failed(cluster: Cluster, run: Run, number: str) -> None:
    """The node with the batch script is gone; Slurm has noticed."""
    name = cluster.nodes[0]
    cluster.kill(name)
    cluster.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")
    run.let_go()
    cluster.start_node(name)


def disturb(cluster: Cluster, run: Run, number: str, disturbance: Disturbance) -> None:
    """Do it once the run stands still; returns when the job has been restarted."""
    run.wait_until_held(cluster, number)
    before = cluster.restarts(number)
    disturbance(cluster, run, number)
    cluster.wait(number, lambda job: int(job["Restarts"]) > before)
