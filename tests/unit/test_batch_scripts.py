"""The arguments and settings of the batch scripts. Stand-ins for Slurm's programs and for Python
record their calls. tests/slurm uses a real cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.programs import ROOT, wait_until

# Runs the words after srun's options as two tasks. If one task fails, the other task goes on.
_SRUN = """
echo "srun $*" >>"$CALLS"
limits="${SRUN_CPUS_PER_TASK-all} ${SLURM_CPUS_PER_TASK-all} ${SLURM_TRES_PER_TASK-all}"
echo "cpus $limits $*" >>"$CALLS"
[ "${!#}" != true ] || exit "${PROBE:-0}"
while [ "$1" != bash ] && [ "$1" != python ]; do shift; done
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
trap 'pkill -USR1 -P $first; pkill -USR1 -P $second' USR1
code=0
for task in $first $second; do
    while kill -0 $task 2>/dev/null; do wait $task; done
    wait $task || code=143
done
exit $code
"""
_SCONTROL = """
echo "scontrol $*" >>"$CALLS"
if [ -s "$CALLS.away" ]; then
    sed -i 1d "$CALLS.away"
    exit 1
fi
case "$1 ${2:-}" in
"show hostnames") printf '%s\\n' n1 n2 n3 ;;
show*)
    echo "   JobState=$JOB_STATE Reason=None"
    echo "   Command=$COMMAND"
    echo "   StdOut=${STDOUT:-/dev/null}"
    ;;
requeue*) ;;
esac
"""
# The command "check" ends with the exit code $CHECK. The ranks end with $TASK_0 and $TASK_1. The
# rank $SLOW ends later than the other rank. If $AWAY is set, scontrol then fails three times.
_PYTHON = """
echo "python $*" >>"$CALLS"
case "$3" in
check) exit "${CHECK:-0}" ;;
train | sft | pretrain | reward-model)
    eval "code=\\${TASK_$SLURM_PROCID:-0}"
    [ -z "${AWAY:-}" ] || printf '%s\\n' 1 2 3 >"$CALLS.away"
    [ "$SLURM_PROCID" != "${SLOW:-}" ] || sleep 0.5
    [ -z "${WAIT_FOR_USR1:-}" ] || exec python3 -c "$WAIT_FOR_USR1"
    exit "$code" ;;
esac
"""
_APPTAINER = """
echo "apptainer $*" >>"$CALLS"
echo "variables $APPTAINERENV_PYTHONPATH ${APPTAINERENV_CUDA_VISIBLE_DEVICES:-none}" >>"$CALLS"
while [ "$1" != python ]; do shift; done
"$@"
"""
_NVIDIA_SMI = """
echo "nvidia-smi $*" >>"$CALLS"
[ -n "${MEMORY:-}" ] || exit 9
printf '%b' "$MEMORY"
"""


@dataclass
class Job:
    """A folder with the stand-ins, and the environment of a batch script."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def start(self, *words: str, script: str = "train_gspo") -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(ROOT / "slurm" / f"{script}.sbatch"), *words],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, *words: str, script: str = "train_gspo") -> tuple[int, str]:
        """Run a script. Returns the exit code and the output."""
        process = self.start(*words, script=script)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def run(self, *words: str, expect: int = 0, script: str = "train_gspo") -> str:
        """Run a script and check its exit code. Returns the output."""
        code, out = self.end(*words, script=script)
        assert code == expect, out
        return out

    def calls(self, program: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(f"{program} ")]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folder = tmp_path / "my jobs"
    programs = folder / "bin"
    programs.mkdir(parents=True)
    stand_ins = {
        "srun": _SRUN,
        "scontrol": _SCONTROL,
        "python": _PYTHON,
        "apptainer": _APPTAINER,
        "nvidia-smi": _NVIDIA_SMI,  # as on a host without a GPU, unless MEMORY is set
        # Shortens the waits of one second between the script's looks at its tasks.
        "sleep": f"exec {shutil.which('sleep')} 0.1",
    }
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}")
        (programs / name).chmod(0o755)
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "COMMAND": f"{ROOT}/slurm/train_gspo.sbatch CONFIG a=1",
        "JOB_STATE": "RUNNING",
        "GSPO_PYTHON": "python",
        "GSPO_GRACE_SECONDS": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_NTASKS": "2",
        "SLURMD_NODENAME": "n1",
    }
    return Job(folder, environ)


CHECK = "python -m gspo_megatron check c.yaml a=1 --stage rl --world-size 2"
TRAIN = "python -m gspo_megatron train c.yaml a=1"


def test_the_check_comes_first_and_then_two_tasks(job: Job) -> None:
    job.run("c.yaml", "a=1")
    assert job.calls("python") == [CHECK, TRAIN, TRAIN]
    (srun,) = job.calls("srun")
    assert srun.startswith("srun --kill-on-bad-exit=1 --label --cpu-bind=cores bash -c")
    assert not list(job.folder.glob(".gspo-megatron*"))


@pytest.mark.parametrize("stage", ["sft", "pretrain", "reward_model"])
def test_the_other_stages_are_checked_as_what_they_are(job: Job, stage: str) -> None:
    job.run("c.yaml", "a=1", script=stage)
    command = f"python -m gspo_megatron {stage.replace('_', '-')} c.yaml a=1"
    check = CHECK.replace("--stage rl", f"--stage {stage}")
    assert job.calls("python") == [check, command, command]
    job.environ["CHECK"] = "2"
    job.run("c.yaml", "a=1", script=stage, expect=2)
    assert len(job.calls("python")) == 4 and len(job.calls("srun")) == 1


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("2", ("c.yaml", "a=1")),
        ("2", ("--check-only", "c.yaml", "a=1")),
        ("0", ("c.yaml", "a=1", "--check-only")),
    ],
)
def test_nothing_starts_with_check_only_and_where_the_check_fails(
    job: Job, check: str, words: tuple[str, ...]
) -> None:
    job.environ |= {"CHECK": check, "SLURM_RESTART_COUNT": "3"}
    job.run(*words, expect=int(check))
    assert job.calls("python") == [CHECK] and not job.calls("srun")


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        # The script converts MiB to GB of 10^9 bytes, and takes the smallest GPU.
        ({"MEMORY": "81559\\n40960\\n81559\\n"}, " --gpu-memory 42"),
        ({"MEMORY": "[N/A]\\n 81559\\n"}, " --gpu-memory 85"),
        ({"MEMORY": "[N/A]\\n"}, ""),
        ({"MEMORY": "81559\\n", "GSPO_GPU_MEMORY": "141"}, " --gpu-memory 141"),
        ({"MEMORY": "81559\\n", "GSPO_GPU_MEMORY": "0"}, ""),
        ({"MEMORY": "81559\\n", "GSPO_GPU_MEMORY": "none"}, ""),
        ({"MEMORY": "81559\\n", "CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"MEMORY": "81559\\n", "CUDA_VISIBLE_DEVICES": "-1"}, ""),
        ({}, ""),
    ],
)
def test_the_check_knows_the_memory_of_a_gpu(
    job: Job, changes: dict[str, str], options: str
) -> None:
    job.environ |= changes
    job.run("c.yaml", "a=1", "--check-only")
    assert job.calls("python") == [CHECK + options]
    query = "nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits"
    is_asked = not {"GSPO_GPU_MEMORY", "CUDA_VISIBLE_DEVICES"} & set(changes)
    assert job.calls("nvidia-smi") == [query] * is_asked


def test_a_host_without_nvidia_smi(job: Job) -> None:
    (job.folder / "bin" / "nvidia-smi").unlink()
    if shutil.which("nvidia-smi") is not None:
        pytest.skip("this machine has one")
    out = job.run("c.yaml", "a=1", "--check-only")
    assert "nvidia-smi" not in out and job.calls("python") == [CHECK]


def test_the_check_and_fresh_are_for_the_first_start(job: Job) -> None:
    words = ("c.yaml", "a=1", "--fresh")
    job.environ |= {"TASK_0": "75", "TASK_1": "75"}
    job.run(*words, expect=75)
    job.environ |= {"SLURM_RESTART_COUNT": "1", "TASK_0": "0", "TASK_1": "0"}
    job.run(*words)
    fresh, check = f"{TRAIN} --fresh", CHECK.replace("--stage", "--fresh --stage")
    assert job.calls("python") == [check, fresh, fresh, TRAIN, TRAIN]
    assert not list(job.folder.glob(".gspo-megatron*"))


def test_a_job_that_was_requeued_before_its_check_is_checked(job: Job) -> None:
    job.environ |= {"SLURM_RESTART_COUNT": "1", "CHECK": "2"}
    job.run("c.yaml", "a=1", "--fresh", expect=2)
    assert job.calls("python") == [CHECK.replace("--stage", "--fresh --stage")]
    job.environ["CHECK"] = "0"
    job.run("c.yaml", "a=1")
    assert job.calls("python")[1:] == [CHECK, TRAIN, TRAIN]


@pytest.mark.parametrize(
    ("words", "told"), [((), "no configuration"), (("c.yaml", "--nproc"), "--nproc: not known")]
)
def test_a_call_that_makes_no_sense(job: Job, words: tuple[str, ...], told: str) -> None:
    assert told in job.run(*words, expect=2)
    assert not job.calls("python")


STOPPED = {"TASK_0": "75", "TASK_1": "75"}
TWO_NODES = {"SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("changes", "codes", "text", "is_requeued"),
    [
        (STOPPED, {75}, "back in the queue", True),
        ({**STOPPED, "JOB_STATE": "CANCELLED"}, {75}, "the job is CANCELLED", False),
        ({**STOPPED, "GSPO_REQUEUE": "0"}, {75}, "GSPO_REQUEUE", False),
        ({"TASK_1": "3"}, {3}, 'first in task 1 on n1, whose lines begin with "1: "', False),
        # A task that has lost another task may report before the other task does.
        (
            {"TASK_0": "76", "TASK_1": "3", "SLOW": "1"},
            {3},
            "exit code 3, first in task 1 on n1",
            False,
        ),
        ({"TASK_0": "76", "TASK_1": "76"}, {76}, "failed with exit code 76, first in task", False),
        # One task fails after another task has saved.
        ({"TASK_0": "75", "TASK_1": "3"}, {3, 143}, "failed with exit code", False),
        # After a failure on two nodes, either all nodes answer, or one node does not.
        ({**TWO_NODES, "TASK_0": "1", "PROBE": "0"}, {1}, "failed with exit code 1", False),
        ({**TWO_NODES, "TASK_0": "1", "PROBE": "1"}, {75}, "does not answer", True),
        # A user's mistake does not depend on nodes.
        ({**TWO_NODES, "TASK_0": "2", "TASK_1": "2"}, {2}, "failed with exit code 2", False),
    ],
)
def test_how_a_job_ends(
    job: Job, changes: dict[str, str], codes: set[int], text: str, is_requeued: bool
) -> None:
    job.environ |= changes
    code, out = job.end("c.yaml")
    assert code in codes and text in out
    assert ("does not answer" in out) is (text == "does not answer")
    assert ("scontrol requeue 7" in job.calls("scontrol")) is is_requeued
    # The user may requeue a cancelled job, which was checked before its first start.
    is_known = is_requeued or changes.get("JOB_STATE") == "CANCELLED"
    left = [path.name for path in job.folder.glob(".gspo-megatron*")]
    assert left == [".gspo-megatron-7-checked"] * is_known
    probes = job.calls("srun")[1:]
    assert len(probes) == ("PROBE" in changes)
    assert all("--overlap --nodes=2 --ntasks=2 --ntasks-per-node=1" in call for call in probes)


def test_a_task_that_was_saved_is_not_blamed_for_another_that_failed(job: Job) -> None:
    """Task 1 fails after task 0 has written its code."""
    waits = 'until [ -s "$GSPO_STATE/first" ]; do sleep 1; done'
    python = job.folder / "bin" / "python"
    python.write_text(python.read_text().replace("|| sleep 0.5", f"|| {waits}"))
    job.environ |= {"TASK_0": "75", "TASK_1": "3", "SLOW": "1"}
    out = job.run("c.yaml", expect=143)  # the stand-in of srun returns this code
    assert out.splitlines()[-1] == "slurm: failed with exit code 143"


THREE_NODES = {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "6", "SLURM_CPUS_PER_TASK": "4"}


@pytest.mark.parametrize("words", [("--rollout-nodes", "2"), ("--rollout-nodes=2",)])
def test_the_last_nodes_serve(job: Job, words: tuple[str, ...]) -> None:
    job.environ |= THREE_NODES
    out = job.run("c.yaml", *words, "a=1")
    assert "2 tasks on 1 nodes; rollout servers on n2,n3" in out
    agents = sorted(call for call in job.calls("srun") if "--join" in call)
    (tasks,) = set(job.calls("srun")) - set(agents)
    assert "--nodes=1 --ntasks=2 --nodelist=n1 bash -c" in tasks
    for node, call in zip(("n2", "n3"), agents, strict=True):
        assert call == (
            f"srun --overlap --nodes=1 --ntasks=1 --nodelist={node} --cpu-bind=none python "
            f"-m gspo_megatron serve --join c.yaml a=1 --name {node}"
        )
    assert job.calls("python")[0] == CHECK


def test_an_agent_gets_all_cpus_of_its_node(job: Job) -> None:
    job.environ |= {**THREE_NODES, "SLURM_TRES_PER_TASK": "cpu=4"}
    job.run("c.yaml", "--rollout-nodes=2")
    limits = [("--join" in call, *call.split()[1:4]) for call in job.calls("cpus")]
    tasks, agent = (False, "4", "4", "cpu=4"), (True, "all", "all", "all")
    assert sorted(limits) == [tasks, agent, agent]


@pytest.mark.parametrize("number", ["0x2", "3", "-1", "none"])
def test_nodes_that_cannot_serve(job: Job, number: str) -> None:
    job.environ |= THREE_NODES
    out = job.run("c.yaml", "--rollout-nodes", number, expect=2)
    assert f"--rollout-nodes {number}: allowed in train_gspo.sbatch: less than the 3 nodes" in out
    job.environ["SLURM_NTASKS"] = "7"
    assert "allowed: --ntasks-per-node" in job.run("c.yaml", "--rollout-nodes=1", expect=2)
    assert "less than the" in job.run("c.yaml", "--rollout-nodes=1", expect=2, script="sft")
    assert not job.calls("python")


@pytest.mark.parametrize(
    ("components", "words", "script"),
    [("2", ("--rollout-nodes=1",), "train_gspo"), ("3", (), "train_gspo"), ("2", (), "sft")],
)
def test_components_that_cannot_serve(
    job: Job, components: str, words: tuple[str, ...], script: str
) -> None:
    job.environ |= {**THREE_NODES, "SLURM_HET_SIZE": components}
    told = f"a heterogeneous job of {components} components: allowed: 2, in train_gspo.sbatch, "
    out = job.run("c.yaml", *words, expect=2, script=script)
    assert f"{told}without --rollout-nodes" in out
    assert not job.calls("python")


def test_a_run_without_servers_is_continued_where_their_node_is_gone(job: Job) -> None:
    job.environ |= {**THREE_NODES, "TASK_0": "2", "TASK_1": "2"}
    assert "failed with exit code 2" in job.run("c.yaml", "--rollout-nodes=1", expect=2)
    job.environ["PROBE"] = "1"
    assert "does not answer" in job.run("c.yaml", "--rollout-nodes=1", expect=75)
    assert "scontrol requeue 7" in job.calls("scontrol")


def test_a_controller_that_is_away_for_a_while_does_not_cost_the_requeue(job: Job) -> None:
    job.environ |= {**STOPPED, "AWAY": "1"}
    assert "back in the queue" in job.run("c.yaml", expect=75)
    assert job.calls("scontrol")[-5:] == ["scontrol show job 7"] * 4 + ["scontrol requeue 7"]


def test_a_task_of_an_array_does_not_stop_the_others(job: Job) -> None:
    """The last task has the number of the array, which means all tasks to scontrol."""
    job.environ |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "TASK_0": "75"}
    job.run("c.yaml", expect=75)
    assert {call.split()[-1] for call in job.calls("scontrol")[1:]} == {"7_3"}
    job.environ["SLURM_JOB_ID"] = "8"
    job.run("c.yaml", expect=75)
    assert job.calls("scontrol")[-1] == "scontrol requeue 8"


def test_a_start_that_is_killed_brings_the_job_back_unless_it_is_the_first(job: Job) -> None:
    def killed(start: int) -> tuple[int, bool]:
        job.environ |= {"SLURM_RESTART_COUNT": str(start), "TASK_0": "137", "TASK_1": "143"}
        before = len(job.calls("scontrol"))
        code, _ = job.end("c.yaml")
        return code, "scontrol requeue 7" in job.calls("scontrol")[before:]

    assert killed(0) in [(137, False), (143, False)]
    assert not list(job.folder.glob(".gspo-megatron*"))
    assert [killed(start) for start in range(1, 4)] == [(75, True)] * 3
    job.environ |= {"TASK_0": "75", "TASK_1": "75"}  # a restart after a saved run does not count
    job.run("c.yaml", expect=75)
    assert [killed(start) for start in range(5, 10)] == [(75, True)] * 5
    assert killed(10) in [(137, False), (143, False)]
    assert not list(job.folder.glob(".gspo-megatron*"))


def test_a_signal_reaches_the_tasks(job: Job) -> None:
    # The program that waits must be a Python program, because a shell would ignore this signal.
    job.environ["WAIT_FOR_USR1"] = (
        "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); "
        "time.sleep(60)"
    )
    process = job.start("c.yaml")
    wait_until(lambda: len(job.calls("python")) >= 3)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert "told to stop" in out
    assert "scontrol requeue 7" in job.calls("scontrol")


def test_apptainer(job: Job) -> None:
    job.environ |= {"GSPO_CONTAINER": "image.sif", "GSPO_CONTAINER_MOUNTS": "/a:/b"}
    job.run("c.yaml", "a=1")
    mounts = f"--bind {ROOT}:{ROOT},{job.folder}:{job.folder},/a:/b"
    before = f"apptainer exec --nv {mounts} --pwd {job.folder} image.sif "
    assert job.calls("apptainer") == [before + CHECK, before + TRAIN, before + TRAIN]
    assert job.calls("python") == [CHECK, TRAIN, TRAIN]


@pytest.mark.parametrize("image", ["box", "docker://python:3.12", "oras://host/image:1"])
def test_other_images_of_apptainer_and_the_cache_of_the_hub(job: Job, image: str) -> None:
    (job.folder / "box").mkdir()  # takes the place of an unpacked image
    hub = job.folder / "hub"
    hub.mkdir()
    job.environ |= {"GSPO_CONTAINER": image, "HF_HOME": str(hub)}
    job.run("c.yaml", "a=1", "--check-only")
    mounts = f"--bind {ROOT}:{ROOT},{job.folder}:{job.folder},{hub}:{hub}"
    before = f"apptainer exec --nv {mounts} --pwd {job.folder} {image} "
    assert job.calls("apptainer") == [before + CHECK]
    [variables] = job.calls("variables")
    assert variables.split()[1].split(":")[0] == str(ROOT) and variables.endswith(" none")


def test_what_earlier_starts_wrote_is_kept_apart(job: Job) -> None:
    log = job.folder / "slurm-gspo-7.out"
    first = "slurm: job 7, restart 0: 2 tasks\none\n"
    second = "slurm: job 7, restart 1: 2 tasks\ntwo\n"
    log.write_text(first + second)
    job.environ |= {"SLURM_RESTART_COUNT": "2", "STDOUT": str(log)}
    for _ in range(2):
        job.run("c.yaml", "--check-only")
        assert Path(f"{log}.1").read_text() == second
        assert not Path(f"{log}.2").exists()
    assert Path(f"{log}.0").read_text() == first


def test_pyxis(job: Job) -> None:
    job.environ |= {"GSPO_CONTAINER": "image.sqsh", "GSPO_SRUN_OPTIONS": "--mem-bind=local -v"}
    job.environ |= {"HF_TOKEN": "secret", "GSPO_CONTAINER_ENV": "MY_OWN,ANOTHER"}
    job.environ |= {"MY_OWN": "1", "ANOTHER": "2"}
    job.run("c.yaml", "a=1", "--check-only")
    image = (
        f"--container-image=image.sqsh --container-mounts={ROOT}:{ROOT},{job.folder}:{job.folder}"
    )
    (once,) = job.calls("srun")
    before, _, rest = once.partition(" --container-env=")
    assert before == f"srun --nodes=1 --ntasks=1 {image} --container-workdir={job.folder}"
    names, _, rest = rest.partition(" ")
    assert rest == CHECK
    # The script sets some of these variables, and the user sets the other variables.
    wanted = {"PYTHONPATH", "PYTHONNOUSERSITE", "OMP_NUM_THREADS", "NCCL_DEBUG", "GSPO_HOME"}
    assert wanted | {"GSPO_STATE", "HF_TOKEN", "MY_OWN", "ANOTHER"} <= set(names.split(","))
    assert "PATH" not in names.split(",")
    job.run("c.yaml", "a=1")
    last = job.calls("srun")[-1]
    assert image in last and "--mem-bind=local -v bash -c" in last


def test_the_settings_of_a_cluster_are_read_first(job: Job) -> None:
    site = job.folder / "site.sh"
    site.write_text("[ -n $NEVER_SET ]\nGSPO_CPU_BIND=none\n")  # as `module load` may read it
    job.environ["GSPO_SITE"] = str(site)
    job.run("c.yaml")
    assert "--cpu-bind=none" in job.calls("srun")[0]
    job.environ["GSPO_SITE"] = str(job.folder / "missing")
    assert "no such file" in job.run("c.yaml", expect=2)


def test_tasks_are_counted_where_slurm_does_not_say(job: Job) -> None:
    del job.environ["SLURM_NTASKS"]
    job.environ |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NUM_NODES": "3"}
    job.run("c.yaml", "--check-only")
    assert job.calls("python") == [CHECK.replace("a=1 ", "").replace("size 2", "size 12")]


def test_a_run_of_an_array_has_its_arguments_in_a_file(job: Job) -> None:
    (job.folder / "4").write_text("c.yaml\0a=1\0")
    (job.folder / "report").write_text("c.yaml\0b='two\nlines'\0--report-only\0")
    job.environ["SLURM_ARRAY_TASK_ID"] = "4"
    job.run(str(job.folder), script="ablation")
    assert job.calls("python") == [CHECK, TRAIN, TRAIN]
    job.run(str(job.folder), "report", script="ablation")
    report = "python -m gspo_megatron ablate c.yaml b='two\nlines' --report-only\n"
    assert (job.folder / "calls").read_text().endswith(report)
