"""The checks for a machine with GPUs, in one list. `visit.sh` runs the first checks of the list in
minutes. `tools/first_gpu_hour.sh` runs all checks in an hour."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

GSPO = (sys.executable, "-m", "gspo_megatron")
NOT_HERE = 69  # exit code of a step that this machine cannot do; this is not a failure
TOOLS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Step:
    """One check: a command, what it shows, and how long it may take."""

    name: str
    shows: str  # what the check shows when it has succeeded
    command: tuple[str, ...]
    seconds: int | None  # limit in a visit; None: a visit does not run this check
    minutes: int  # limit when all checks run
    needs: str | None = None  # the check is left out if this package is missing
    # metrics.jsonl of a run; the figures of the check are in its last line
    metrics: Path | None = None


@dataclass(frozen=True)
class Machine:
    """The values from which the commands of the steps are made."""

    out: Path  # folder for runs, data and logs
    gpus: int  # number of ranks to start
    seen: int  # number of GPUs that torch sees
    rehearsed: bool  # whether the GPU is rehearsed, so that small sizes are enough
    vllm_python: str | None  # interpreter of an environment with vLLM

    @property
    def config(self) -> Path:
        return self.out / "config.yaml"


def write_config(machine: Machine) -> None:
    """Write the configuration of the toy task that most steps run."""
    machine.out.mkdir(parents=True, exist_ok=True)
    data = machine.out / "data"
    machine.config.write_text(
        f"""\
data:
  prompts: {data}/train.jsonl
  eval_prompts: {data}/test.jsonl
  tokenizer: {data}/tokenizer.model
parallel: {{layout: dp={machine.gpus}}}
rollout: {{group_size: 8, prompts_per_step: {8 * machine.gpus}, max_response_tokens: 16}}
reward: {{name: per_character}}
training: {{steps: 2, precision: bf16}}
checkpoint: {{interval: 1}}
logging: {{dir: {machine.out}/bf16, plots: false}}
"""
    )


def all_steps(machine: Machine) -> list[Step]:
    """Return all checks, in the order of their importance."""
    return [*_visit(machine), *_with_transformer_engine(machine), *_hour_alone(machine)]


def _visit(machine: Machine) -> list[Step]:
    """Return the checks that need only torch and Megatron-Core."""
    out, config = machine.out, str(machine.config)
    layouts = ("tp=1",) if machine.gpus == 1 else ("tp=1", "tp=2")
    # The reference is computed on the CPU with the same weights, so the model must have layers that
    # a CPU can run, too.
    on_cpu = ("model.backend=torch_native", "--reference-on-cpu", "--tolerance", "1e-4")
    pytest = ("-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "tests/gpu")
    finite = "two steps, finite losses"
    return [
        Step("data", "nothing", _write_data(out), 20, 1),
        Step("doctor", "the GPUs by name, memory, precisions", (*GSPO, "doctor"), 40, 2),
        Step(
            "tests",
            "passed; skipped only what this GPU or a missing package cannot do",
            (sys.executable, *pytest),
            240,  # with Transformer Engine, nine tests start processes of their own
            15,
        ),
        Step(
            "verify",
            "equal=1; worst_error of 1e-5 or less where both compute in fp32",
            (*GSPO, "verify", config, *on_cpu, "--layouts", *layouts),
            75,
            10,
        ),
        _train(machine, "r2", finite, "routing.replay=r2"),
        _train(machine, "r3", finite, "routing.replay=r3"),
        Step(
            "throughput",
            "tokens/s, share of the measured ceilings, waits, launches, memory against `check`",
            _script("gpu_visit/throughput.py", *_size(machine)),
            150,
            10,
        ),
        _train(machine, "bf16", f"{finite}, a checkpoint each"),
        _train(machine, "resume", "the run goes on after step 2", "training.steps=3", run="bf16"),
    ]


def _with_transformer_engine(machine: Machine) -> list[Step]:
    """Return the checks of Transformer Engine's layers, in bf16 and FP8."""
    steps = [
        _train(machine, "engine", "two steps by its layers", "model.backend=transformer_engine"),
        _train(machine, "fp8", "two steps in FP8 by blocks", "training.precision=fp8-blockwise"),
        _train(machine, "fp8-delayed", "two steps in FP8", "training.precision=fp8-delayed"),
        Step(
            "engine-throughput",
            "the same figures as throughput, by its layers",
            _script("gpu_visit/throughput.py", *_size(machine), "--backend", "transformer_engine"),
            120,
            10,
        ),
    ]
    if machine.rehearsed:
        steps = [replace(step, command=_say("Transformer Engine needs a GPU")) for step in steps]
    return [replace(step, needs="transformer_engine") for step in steps]


def _hour_alone(machine: Machine) -> list[Step]:
    """Return the checks that are too long for a visit."""
    out = machine.out
    told = (*GSPO, "report", f"{out}/bf16", f"{out}/engine", "-o", f"{out}/compare")
    # fp32: torch's layers, and errors of NCCL are larger than rounding
    parallel = (*GSPO, "verify", str(machine.config))
    return [
        Step(
            "layouts",
            "equal=1; two ranks of each kind of parallelism agree with one rank",
            parallel if machine.gpus > 1 else _say("two GPUs are needed"),
            None,
            15,
        ),
        Step(
            "sync",
            "sync/version 1 to 2, sync/bytes above 0; or what is missing for it",
            _synchronise(machine),
            None,
            15,
        ),
        Step(
            "compare",
            "the same reward and loss to two digits in bf16 and engine",
            told,
            None,
            2,
            needs="transformer_engine",
        ),
    ]


def _train(machine: Machine, name: str, shows: str, *settings: str, run: str | None = None) -> Step:
    """Return the step that runs the toy task. The run's folder is `run`, or else `name`."""
    folder = machine.out / (run or name)
    words = ("--nproc", str(machine.gpus), f"logging.dir={folder}", *settings)
    command = (*GSPO, "train", str(machine.config), *words)
    return Step(name, shows, command, 75, 10, metrics=folder / "metrics.jsonl")


def _size(machine: Machine) -> tuple[str, ...]:
    return ("--rehearse",) if machine.rehearsed else ("--layers", "2")


def _script(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, str(TOOLS / name), *words)


def _write_data(out: Path) -> tuple[str, ...]:
    folder = str(out / "data")
    module = ("-m", "gspo_megatron.data.toy", "-o", folder)
    return (sys.executable, *module, "--task", "mixed", "--train", "256", "--test", "32")


def _synchronise(machine: Machine) -> tuple[str, ...]:
    """Return the command that trains with a vLLM server. A server is used with a weights version
    only after it has answered fixed prompts with the trainer's log-probs. So if the run ends
    without an error, this check has succeeded for each version."""
    if machine.vllm_python is None:
        return _say("set VLLM_PYTHON to the python of an environment with vLLM")
    ranks = min(machine.gpus, machine.seen - 1) if machine.seen else machine.gpus
    if ranks < 1:
        return _say("two GPUs are needed: one trains, one serves")
    return (
        *GSPO, "train", str(machine.config), "--nproc", str(ranks), f"parallel.layout=dp={ranks}",
        "model.megatron={kv_channels: 32}", "checkpoint.interval=0",
        f"logging.dir={machine.out}/sync", "rollout.engine=vllm", "rollout.vllm.servers=1",
        f"rollout.vllm.python={machine.vllm_python}", "rollout.vllm.weight_transport=nccl",
        "rollout.max_staleness=0",
    )  # fmt: skip


def _say(text: str) -> tuple[str, ...]:
    """Return a command that only says why the step cannot be done on this machine."""
    return (sys.executable, "-c", f"import sys; print({text!r}); sys.exit({NOT_HERE})")
