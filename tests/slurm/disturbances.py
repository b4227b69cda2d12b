"""What may happen to a job. Each function does it to a run that stands still, lets the run go on,
and returns once Slurm has the job in its queue again, or has started it again."""

from __future__ import annotations

from collections.abc import Callable

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Run

Disturbance = Callable[[Cluster, Run, str], None]


def restarts(cluster: Cluster, number: str) -> int:
    """How often Slurm has put the job back into the queue."""
    return int(cluster.job(number)["Restarts"])


def wait_for_line(cluster: Cluster, number: str, line: str, count: int = 1) -> None:
    """Until the job's log has it so many times."""
    cluster.wait(number, lambda job: cluster.log(job).count(line) >= count, timeout=90)


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
    before = restarts(cluster, number)
    cluster.run("scontrol", "requeue", number)
    cluster.wait(
        number,
        lambda job: int(job["Restarts"]) > before and job["JobState"] != "COMPLETING",
    )
    run.let_go()


def node_failed(cluster: Cluster, run: Run, number: str) -> None:
    """The second node is gone from one moment to the next, and comes back later. The tasks of the
    first one fail at once, long before Slurm notices."""
    before = restarts(cluster, number)
    cluster.kill_node(cluster.nodes[1])
    run.let_go()
    cluster.wait(number, lambda job: int(job["Restarts"]) > before)
    cluster.start_node(cluster.nodes[1])


def killed_late(cluster: Cluster, run: Run, number: str) -> None:
    """What Slurm does by itself at times, in a start after one whose node was gone: signals to that
    one's tasks, which could not be delivered then, reach those of this one."""
    cluster.run("scancel", "--signal=KILL", f"{number}.0")
    run.let_go()


def first_node_failed(cluster: Cluster, run: Run, number: str) -> None:
    """The node with the batch script is gone; Slurm has noticed."""
    name = cluster.nodes[0]
    cluster.kill_node(name)
    cluster.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")
    run.let_go()
    cluster.start_node(name)


def disturb(cluster: Cluster, run: Run, number: str, disturbance: Disturbance) -> None:
    """Do it once the run stands still; returns when the job has been restarted."""
    run.wait_until_held(cluster, number)
    before = restarts(cluster, number)
    disturbance(cluster, run, number)
    cluster.wait(number, lambda job: int(job["Restarts"]) > before)
