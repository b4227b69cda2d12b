"""The installed Megatron-Core still needs each substitution for the CPU.

If an upgrade makes a line of platform/cpu/needed.py unnecessary, a test fails, and the line can be
removed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gspo_megatron.platform.cpu import needed
from tests.unit.platform import stock

ROOT = Path(__file__).resolve().parents[3]

needs_substitutions = pytest.mark.skipif(
    not needed.is_needed(), reason="there is CUDA: nothing is substituted"
)

# Parts of Megatron-Core that the package does not use. Their calls need no substitution.
FOREIGN = ("inference/", "datasets/", "export/", "ssm/", "models/", "distributed/fsdp/", "mimo/")
OURS_AFTER_ALL = ("models/common/", "models/gpt/", "models/backends.py")


@functools.cache
def sources() -> tuple[str, ...]:
    names = sorted(path.relative_to(stock.CORE).as_posix() for path in stock.CORE.rglob("*.py"))
    found = [n for n in names if not n.startswith(FOREIGN) or n.startswith(OURS_AFTER_ALL)]
    assert len(found) > 100
    return tuple(found)


@functools.cache
def calls() -> dict[str, list[ast.Call]]:
    """All calls in Megatron-Core, by the dotted name of the called function."""
    found: dict[str, list[ast.Call]] = {}
    for call in (call for file in sources() for call in stock.calls(file)):
        found.setdefault(ast.unparse(call.func), []).append(call)
    return found


@functools.cache
def dotted_names() -> frozenset[str]:
    """Every name `torch.cuda...` that Megatron-Core uses."""
    nodes = (node for file in sources() for node in ast.walk(stock.tree(file)))
    return frozenset(ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))


def asks_for_cuda(call: ast.Call) -> bool:
    """Whether the call names a CUDA device literally, or pins memory. A device from
    `torch.cuda.current_device()` is already the CPU."""
    return any(
        keyword.arg == "pin_memory"
        or (keyword.arg == "device" and "'cuda'" in ast.unparse(keyword.value))
        for keyword in call.keywords
    )


def test_the_redirected_factories_are_those_that_are_called_with_cuda() -> None:
    factories = {name for name in calls() if name.startswith("torch.") and name.count(".") == 1}
    with_cuda = {name for name in factories if any(map(asks_for_cuda, calls()[name]))}
    assert with_cuda == {f"torch.{name}" for name in needed.FACTORIES}


@needs_substitutions
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), 0])
def test_a_redirected_factory_creates_on_the_cpu(device: object) -> None:
    for name in ("empty", "zeros", "ones"):
        tensor = getattr(torch, name)(2, 3, device=device, pin_memory=True)
        assert tensor.device.type == "cpu" and tensor.shape == (2, 3)
    assert torch.tensor([1.5], device=device).tolist() == [1.5]
    assert torch.empty(2, device="meta").is_meta  # only CUDA devices are replaced


def test_the_optimizer_sorts_parameters_by_cuda_type_names() -> None:
    source = stock.source("optimizer/distrib_optimizer.py")
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor"):
        assert f"'torch.cuda.{name}'" in source
    assert ".type()" in source


@needs_substitutions
def test_a_torch_device_context_still_finds_the_factories() -> None:
    with torch.device("meta"):
        assert torch.empty(2).is_meta and torch.ones(2).is_meta and torch.tensor([1.0]).is_meta
    assert not torch.empty(2).is_meta


@needs_substitutions
def test_type_names_of_tensors() -> None:
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1, dtype=torch.long).type() == "torch.LongTensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64
    assert torch.ones(1).type("torch.IntTensor").dtype == torch.int32


RUNTIME = (
    "current_device set_device synchronize Stream Event current_stream default_stream stream "
    "nvtx.range_push nvtx.range_pop get_rng_state set_rng_state random.get_rng_state manual_seed"
)


def test_the_cuda_runtime_is_called() -> None:
    assert {f"torch.cuda.{name}" for name in RUNTIME.split()} - dotted_names() == set()
    for method in ("cuda", "record_stream"):  # methods of tensors
        assert any(name.endswith(f".{method}") for name in calls())


@needs_substitutions
def test_streams_are_inert_and_alike() -> None:
    stream = torch.cuda.Stream()
    assert stream == torch.cuda.current_stream() == torch.cuda.default_stream()
    assert (stream != torch.cuda.Stream(device="cuda")) is False
    assert stream.record_event().synchronize() == stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
    assert torch.cuda.current_device() == torch.device("cpu")


@needs_substitutions
def test_the_rng_tracker_forks_the_cpus_generator() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("dropout", 7)
    torch.manual_seed(1)
    expected_outside = torch.rand(3)
    torch.manual_seed(7)
    expected_inside = torch.rand(5)
    torch.manual_seed(1)
    with tracker.fork("dropout"):
        inside = torch.rand(5)
    assert torch.equal(inside, expected_inside)
    assert torch.equal(torch.rand(3), expected_outside)
    with tracker.fork("dropout"):
        # After the block, the generator continues where it was before.
        assert not torch.equal(torch.rand(5), expected_inside)


# These two stock functions use shares of different sizes, which gloo refuses. Tests with several
# processes run their substitutes.
GATHER, SCATTER = "_gather_along_first_dim", "_reduce_scatter_along_first_dim"
MAPPINGS = "tensor_parallel/mappings.py"
RANDOM, MOE_UTILS = "tensor_parallel/random.py", "transformer/moe/moe_utils.py"


@pytest.mark.parametrize(
    ("file", "name", "words"),
    [
        (RANDOM, "_set_cuda_rng_state", ["torch.cuda.default_generators", "_lazy_call"]),
        (MOE_UTILS, "maybe_move_tensor_to_cpu", ["tensor.is_cuda", "as_numpy"]),
        (MAPPINGS, GATHER, ["torch.distributed.all_gather(", "output_split_sizes"]),
        (MAPPINGS, SCATTER, ["torch.distributed.reduce_scatter(", "input_split_sizes"]),
    ],
)
def test_a_replaced_function_does_what_no_cpu_can(file: str, name: str, words: list[str]) -> None:
    source = stock.function(file, name)
    assert all(word in source for word in words)


def test_importing_megatron_core_compiles_functions() -> None:
    assert "torch.compile" in stock.source("jit.py")
    assert sum(stock.source(file).count("@jit_fuser\n") for file in sources()) > 5
    # The import leaves torch.compile unchanged.
    assert (torch.compile.__module__, torch.compile.__qualname__) == ("torch", "compile")


def run_python(code: str, **environ: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a new Python process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_packages_for_gpus_are_not_found_where_there_is_none(tmp_path: Path) -> None:
    """The packages are installed, but there is no visible GPU. Megatron-Core would use their
    kernels if it found the packages."""
    for name in needed.GPU_PACKAGES:
        (tmp_path / name).mkdir()
        broken = 'raise SystemExit("a package for GPUs was imported")'
        (tmp_path / name / "__init__.py").write_text(broken)
    script = (
        "import gspo_megatron.platform, importlib.util\n"
        "import megatron.core.optimizer, megatron.core.extensions.transformer_engine\n"
        "from gspo_megatron.platform.cpu.needed import GPU_PACKAGES\n"
        "assert [importlib.util.find_spec(name) for name in GPU_PACKAGES] == [None] * 3\n"
    )
    environ = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    assert run_python(script, **environ) == (0, "", "")


def test_the_dispatcher_leaves_split_sizes_of_cpu_tensors_as_tensors() -> None:
    assert "as_numpy=True" in stock.source("transformer/moe/token_dispatcher.py")
    source = stock.function(MOE_UTILS, "maybe_move_tensor_to_cpu")
    namespace: dict[str, object] = {"torch": torch}
    # The function on disk is executed alone, so the names in its annotations are not needed.
    exec(f"from __future__ import annotations\n{source}", namespace)
    native = namespace["maybe_move_tensor_to_cpu"]
    assert torch.is_tensor(native(torch.tensor([1, 2]), as_numpy=True))


@needs_substitutions
def test_split_sizes_come_as_ints() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu
    splits = move(torch.tensor([3, 0, 2]), as_numpy=True)
    assert splits == [3, 0, 2] and isinstance(splits, list)
    assert splits.tolist() == [3, 0, 2]
    assert move(None, as_numpy=True) is None
    counts = torch.tensor([1, 2])
    assert move(counts, record_stream=True) is counts


@needs_substitutions
def test_wrapped_collectives_take_what_the_native_ones_take() -> None:
    from megatron.core.tensor_parallel import mappings

    for name in (GATHER, SCATTER):
        wrapped = getattr(mappings, name)
        # functools.wraps shows the signature of the native function
        native = inspect.signature(wrapped)
        assert list(native.parameters)[:2] == ["input_", "group"]
        third = list(native.parameters)[2]
        assert third in ("input_split_sizes", "output_split_sizes")
        tensor, group = torch.arange(6.0), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        for splits in (None, [6]):
            assert wrapped(tensor, group, **{third: splits}) is tensor
            assert wrapped(tensor, group, splits) is tensor


INERT = """
import torch
import torch._dynamo  # megatron.core imports it, and it wraps torch.manual_seed
torch.cuda.is_available = lambda: True
def state():
    owners = {"torch": torch, "cuda": torch.cuda, "Tensor": torch.Tensor,
              "random": torch.cuda.random, "nvtx": torch.cuda.nvtx}
    return {(o, n): v for o, owner in owners.items() for n, v in vars(owner).items()}
before = state()
from gspo_megatron.platform.cpu import needed
assert not needed.is_needed()
needed.install()
after = state()
changed = [key for key, value in before.items() if after[key] is not value]
assert changed == [], changed
"""


def test_install_is_inert_where_there_is_cuda() -> None:
    code, _, errors = run_python(INERT)
    assert code == 0, errors


# A small run has a rollout, log-probs, gradients and an update.
STEP = """
import torch
from gspo_megatron.config.schema import OptimizerSection
from gspo_megatron.models.optimizer import Schedule, build_trainer, zero_gradients
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.batching import micro_batches as batches
from tests.unit.models.one_rank import micro_batch, one_rank_groups, tiny_policy
with one_rank_groups():
    policy = tiny_policy()
    MegatronEngine(policy, pad_id=0, eos_id=1).generate(Requests([[3, 4]], [0]), Sampling(4), 1)
    batch = [micro_batch(batches.MicroBatchBuilder(policy, 0, 1.0), [([1, 2], [3, 4])])]
    batches.response_logprobs(policy, batch)
    schedule = Schedule(1e-3, 0.0, 0, 10, "constant")
    trainer = build_trainer(policy, OptimizerSection(), schedule)
    zero_gradients(policy.chunks, trainer.optimizer)
    loss = lambda _, logprobs, entropies: (logprobs.sum(), None)
    batches.forward_backward(policy, batch, loss, 1)
    trainer.update()
"""


@pytest.mark.parametrize(
    "code", ["import gspo_megatron.models.build", STEP], ids=["import", "step"]
)
def test_nothing_is_printed(code: str) -> None:
    assert run_python(code) == (0, "", "")
