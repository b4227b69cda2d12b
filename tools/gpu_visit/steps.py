"""The checks of a machine with GPUs, in one list: `visit.sh` runs the first of them in minutes,
`tools/first_gpu_hour.sh` all of them in an hour."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

GSPO = (sys.executable, "-m", "gspo_megatron")
TOOLS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Step:
    """One check: a command, what it shows, and how long it may take."""

    name: str
    shows: str  # what a reader should see, or learn, when it is done
    command: tuple[str, ...]
    seconds: int | None  # limit in a visit; None: the visit leaves it out
    minutes: int  # limit in the first hour
    needs: str | None = None  # package without which the step is left out
    metrics: Path | None = None  # metrics.jsonl of a run, whose last line has the figures


@dataclass(frozen=True)
class Machine:
    """What the commands of the steps are made from."""

    out: Path  # folder of runs, data and logs
    gpus: int  # ranks to start
    seen: int  # GPUs that torch sees
    rehearsed: bool  # there are no kernels of a GPU: small sizes are enough
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
    """All checks, the most important first."""
    out, config, nproc = machine.out, str(machine.config), ("--nproc", str(machine.gpus))
    layouts = ("tp=1",) if machine.gpus == 1 else ("tp=1", "tp=2")

    def train(name: str, *settings: str) -> tuple[str, ...]:
        return (*GSPO, "train", config, *nproc, f"logging.dir={out}/{name}", *settings)

    def metrics(name: str) -> dict[str, Path]:
        return {"metrics": out / name / "metrics.jsonl"}

    def script(name: str, *words: str) -> tuple[str, ...]:
        return (sys.executable, str(TOOLS / name), *words)

    engine = {"needs": "transformer_engine"}
    # the layers that a CPU has, too: the same weights on both
    on_cpu = ("model.backend=torch_native", "--reference-on-cpu")
    head = ("--rows", "32768", "--dtype", "bfloat16", "--matmul", "high", "--rounds", "3")
    throughput = ("--rehearse",) if machine.rehearsed else ("--layers", "2")
    if machine.rehearsed:
        head = ("--rows", "256", "--vocab", "1000", "--dtype", "bfloat16", "--rounds", "1")
    return [
        Step("data", "nothing", _write_data(out), 20, 1),
        Step("doctor", "the GPUs by name, memory, precisions", (*GSPO, "doctor"), 40, 2),
        Step(
            "tests",
            "passed; skipped only what this GPU or a missing package cannot do",
            (sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "tests/gpu"),
            90,
            15,
        ),
        Step(
            "verify",
            "equal=1; worst_error of 1e-5 or less where both compute in fp32",
            (*GSPO, "verify", config, *on_cpu, "--tolerance", "1e-4", "--layouts", *layouts),
            75,
            10,
        ),
        Step(
            "r2",
            "two steps, finite losses",
            train("r2", "routing.replay=r2"),
            60,
            5,
            **metrics("r2"),
        ),
        Step(
            "r3",
            "two steps, finite losses",
            train("r3", "routing.replay=r3"),
            60,
            5,
            **metrics("r3"),
        ),
        Step(
            "throughput",
            "tokens/s, share of the measured ceilings, waits, launches, memory against `check`",
            script("gpu_visit/throughput.py", *throughput),
            150,
            10,
        ),
        Step(
            "head",
            "memory and time of the log-prob head beside all logits, hidden size 2,048",
            script("bench_logprob_head.py", "--hidden", "2048", *head),
            90,
            5,
        ),
        Step(
            "head-4096",
            "the same, hidden size 4,096",
            script("bench_logprob_head.py", "--hidden", "4096", *head),
            90,
            5,
        ),
        Step(
            "bf16",
            "two steps, finite losses, a checkpoint each",
            train("bf16"),
            60,
            5,
            **metrics("bf16"),
        ),
        Step(
            "resume",
            "the run goes on after step 2",
            train("bf16", "training.steps=3"),
            60,
            5,
            **metrics("bf16"),
        ),
        Step(
            "roundtrip",
            "checkpoint -> Hugging Face -> checkpoint: equal tensors",
            script("gpu_visit/round_trip.py", str(out / "bf16"), str(out / "roundtrip")),
            75,
            5,
        ),
        Step(
            "engine",
            "two steps by Transformer Engine",
            train("engine", "model.backend=transformer_engine"),
            75,
            5,
            **engine,
            **metrics("engine"),
        ),
        Step(
            "fp8",
            "two steps in FP8, and their mismatch",
            train("fp8", "training.precision=fp8-blockwise"),
            75,
            10,
            **engine,
            **metrics("fp8"),
        ),
        Step(
            "fp8-delayed",
            "two steps in FP8 with delayed scaling, and their mismatch",
            train("fp8-delayed", "training.precision=fp8-delayed"),
            75,
            10,
            **engine,
            **metrics("fp8-delayed"),
        ),
        Step(
            "engine-throughput",
            "the same figures as throughput, by Transformer Engine",
            script("gpu_visit/throughput.py", *throughput, "--backend", "transformer_engine"),
            120,
            10,
            **engine,
        ),
        # The rest is for the first hour alone.
        Step(
            "preflight",
            "memory, matmul and collectives of each GPU, and no unfit host",
            (*GSPO, "preflight", config, *nproc),
            None,
            5,
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
            (*GSPO, "report", f"{out}/bf16", f"{out}/engine", "-o", f"{out}/compare"),
            None,
            2,
            **engine,
        ),
        Step(
            "rollout",
            "a last line of name=value",
            script("bench_rollout.py"),
            None,
            10,
        ),
    ]


def _write_data(out: Path) -> tuple[str, ...]:
    folder = str(out / "data")
    module = ("-m", "gspo_megatron.data.toy", "-o", folder)
    return (sys.executable, *module, "--task", "mixed", "--train", "256", "--test", "32")


def _synchronise(machine: Machine) -> tuple[str, ...]:
    """Train with a vLLM server. The server serves nothing before the sums of its tensors and its
    log-probs of a probe are the trainer's: a run that ends has shown it for each version."""
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
    """A command that only says why the step cannot be done here, with exit code 2."""
    return (sys.executable, "-c", f"import sys; print({text!r}); sys.exit(2)")
