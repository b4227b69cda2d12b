"""Faults that only a GPU shows, planted one at a time. The rehearsal detects each of them. A run on
CPUs detects none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.cuda_rehearsal.conftest import MakeConfig
from tests.cuda_rehearsal.faults import Fault, with_fault
from tests.cuda_rehearsal.host import Host
from tests.cuda_rehearsal.tasks import measure, save, train
from tests.cuda_rehearsal.test_synchronisations import BUDGET, MOST_DOUBLES, RUN
from tests.cuda_rehearsal.test_training import assert_close
from tests.parallel.checkpoints import run_config
from tests.parallel.pool import Pool, RankError

DEVICES = "same device"  # a part of torch's message
RACE = "no event orders the two"
# If the host touches memory that a copy is filling, the process dies with a message on stderr.
DIED = "the process died"


@dataclass(frozen=True)
class Case:
    name: str
    fault: Fault
    message: str
    run: dict[str, Any] = field(default_factory=dict)
    task: Callable[..., Any] = train
    is_like_another: bool = False  # the check that detects another case detects this one


def of(function: str, old: str, new: str) -> Fault:
    return Fault(function, old, new)


PACK = "gspo_megatron.batching.packing:PackedBatch.to"
SPLIT = "gspo_megatron.batching.redistribute"
MAXIMA = "gspo_megatron.platform.collectives:maxima"
COPIES = "gspo_megatron.checkpoint.tensors:_copies"
DISPATCHER = (
    "megatron.core.transformer.moe.token_dispatcher:"
    "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"
)
BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
SAVING = {"checkpoint__interval": 1}
DP2 = {"parallel__layout": "dp=2"}
OVERLAP = DP2 | {"parallel__ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}

# A fault: all tensors of a type share one pinned buffer. The device waits for each copy, but the
# host does not.
_STAGED = """
    buffers, side = {}, torch.cuda.Stream()
    def staged(value):
        pinned = device.type == "cuda"
        whole = torch.empty(4096, dtype=value.dtype, pin_memory=pinned)
        buffer = buffers.setdefault(value.dtype, whole)[: value.numel()].view(value.shape)
        buffer.copy_(value)
        with torch.cuda.stream(side):
            copy = buffer.to(device, non_blocking=True, copy=True)
        torch.cuda.current_stream().wait_stream(side)
        return copy
    self = PackedBatch(**{
        name: staged(value) if isinstance(value, Tensor) else value
        for name, value in vars(self).items()
    })
    """
_COPY = """
        copied.append(replace(piece, data=host.copy_(piece.data, non_blocking=pinned)))
    torch.cuda.synchronize()
"""
_COPY_ASIDE = """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copied.append(replace(piece, data=host.copy_(piece.data, non_blocking=pinned)))
    torch.cuda.current_stream().synchronize()
"""

CASES = (
    # Tensors on the wrong device.
    Case(
        "an index stays on the host",
        of(
            PACK,
            "isinstance(value, Tensor) else",
            'isinstance(value, Tensor) and name != "targets" else',
        ),
        DEVICES,
        is_like_another=True,
    ),
    Case(
        "a constant is not moved to the device",
        of(
            "gspo_megatron.platform.reduce_metrics:StepMetrics.__init__",
            "_EDGES.to(device, non_blocking=True)",
            "_EDGES",
        ),
        DEVICES,
    ),
    Case(
        "a tensor is made on the host",
        of(
            "gspo_megatron.rollout.megatron.rows:Responses.batch",
            "requests.prompts], dtype=torch.long, device=device",
            "requests.prompts], dtype=torch.long",
        ),
        DEVICES,
        is_like_another=True,
    ),
    Case(
        "a mask's positions stay on the host",
        of(
            "gspo_megatron.models.core_attention:cut_into_tiles",
            "of_queries.to(device, non_blocking=True)",
            "of_queries",
        ),
        DEVICES,
        {"parallel__layout": "cp=2"},
        is_like_another=True,
    ),
    Case(
        "a column is not brought to the host",
        of(f"{SPLIT}:gather_index", "torch.cat(columns, dim=1).cpu()", "torch.cat(columns, dim=1)"),
        "indices should be either on cpu",
    ),
    Case(
        "an order is not brought to the host",
        of(
            f"{SPLIT}:redistribute",
            "torch.argsort(batch.sample_index).cpu()",
            "torch.argsort(batch.sample_index)",
        ),
        DEVICES,
        is_like_another=True,
    ),
    Case(
        "numpy looks at memory of the device",
        of(MAXIMA, "tensor.tolist()", "tensor.numpy()"),
        "can't convert cuda",
        DP2 | SAVING,
    ),
    Case(
        "every rank takes the first GPU",
        of("gspo_megatron.platform.devices:_own_gpu", "return rank", "return 0"),
        "this rank's device is cuda:1",
        DP2,
        is_like_another=True,
    ),
    Case(
        "a buffer is on the first GPU whatever the rank",
        of(
            "gspo_megatron.rollout.megatron.engine:_Generation.__init__",
            "sample_indices(), dtype=torch.long, device=device",
            'sample_indices(), dtype=torch.long, device="cuda:0"',
        ),
        "this rank's device is cuda:1",
        DP2,
    ),
    # Collectives.
    Case(
        "gloo is given a tensor of the device",
        of(
            MAXIMA,
            "dist.ReduceOp.MAX, group=group",
            'dist.ReduceOp.MAX, group=dist.new_group(backend="gloo")',
        ),
        "over gloo with a tensor of a device",
        DP2 | SAVING,
    ),
    Case(
        "NCCL is given a tensor of the host",
        of(MAXIMA, ", device=torch.device(torch.cuda.current_device())", ""),
        "No backend type associated with device type cpu",
        DP2 | SAVING,
    ),
    # The order of operations.
    Case(
        "routes are copied to memory that is not pinned",
        of("gspo_megatron.routing.replay:to_host", "pin_memory=True", "pin_memory=False"),
        "not pinned",
        {"routing__replay": "r2", "routing__store_on_host": True},
        is_like_another=True,
    ),
    Case(
        "weights are copied to memory that is not pinned",
        of(COPIES, "pin_memory=pinned", "pin_memory=False"),
        "not pinned",
        task=save,
    ),
    Case(
        "a checkpoint is written before another stream has copied the weights",
        of(COPIES, _COPY, _COPY_ASIDE),
        DIED,
        task=save,
    ),
    Case(
        "a pinned buffer is filled again while another stream copies it",
        of(PACK, "moved = {", _STAGED + "moved = {"),
        DIED,
        is_like_another=True,
    ),
    Case(
        "the thread that writes a checkpoint is on the first GPU",
        of("gspo_megatron.checkpoint.tensors:start_work", "torch.cuda.set_device(device)", "pass"),
        "this rank's device is cuda:1",
        DP2,
        task=save,
    ),
    Case(
        "the side stream does not wait for the split sizes",
        of(DISPATCHER, "self.cuda_dtoh_stream.wait_stream(torch.cuda.current_stream())", "pass"),
        RACE,
        {"parallel__layout": "ep=2"},
    ),
    Case(
        "the host does not wait for the split sizes",
        of(DISPATCHER, "self.d2h_event.synchronize()", "pass"),
        DIED,
        {"parallel__layout": "ep=2"},
        is_like_another=True,
    ),
    Case(
        "another stream waits for gathered parameters",
        of(
            f"{BUCKETS}.finish_param_sync",
            "self.param_gather_handle.wait()",
            "with torch.cuda.stream(torch.cuda.Stream()): self.param_gather_handle.wait()",
        ),
        RACE,
        OVERLAP,
    ),
    Case(
        "gradients are reduced before they are there",
        of(
            f"{BUCKETS}.start_grad_sync",
            "stream_context = nullcontext()",
            "stream_context = torch.cuda.stream(torch.cuda.Stream())",
        ),
        RACE,
        OVERLAP,
        is_like_another=True,
    ),
)


def config_of(case: Case, make_config: MakeConfig) -> Any:
    if case.task is save:
        return run_config(case.run.get("parallel__layout", "tp=1"))
    return make_config(**case.run)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.full] * case.is_like_another, id=case.name)
        for case in CASES
    ],
)
def test_the_rehearsal_catches(host: Host, make_config: MakeConfig, case: Case) -> None:
    with pytest.raises(RankError, match=case.message):
        config = config_of(case, make_config)
        host.on(config, with_fault, fault=case.fault, task=case.task)


@pytest.mark.full  # shows why the rehearsal is needed, but tests nothing of the package
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cpus_do_not(cpus: Pool, make_config: MakeConfig, case: Case) -> None:
    expected = cpus.on(config_of(case, make_config), case.task)
    found = cpus.on(config_of(case, make_config), with_fault, fault=case.fault, task=case.task)
    if case.task is save:
        assert found == expected
    else:
        assert_close(found, expected)


# Faults that change no result but cost time. Each value names the part of a run, and the fault.
COSTS = {
    "the host reads every token": (
        "generation",
        of(
            "gspo_megatron.rollout.megatron.engine:_Generation._sample_tokens",
            "self.spans.grow(self.max_length)",
            "self.spans.grow(max(self.max_length, int(tokens.max())))",
        ),
    ),
    "tokens are drawn in float64": (
        "generation",
        of(
            "gspo_megatron.models.policy:PolicyModel.next_token_logits",
            "self.true_vocab_size].float()",
            "self.true_vocab_size].double()",
        ),
    ),
    "every sequence is copied alone": (
        "packing",
        of(f"{SPLIT}:redistribute", "move_tokens(batch.tokens).cpu()", "move_tokens(batch.tokens)"),
    ),
    "the host reads every loss": (
        "training",
        of(
            "gspo_megatron.batching.micro_batches:forward_backward",
            "return value * total_micro_batches, no_tokens",
            "return value * total_micro_batches * bool(value.isfinite()), no_tokens",
        ),
    ),
    "losses are computed in float64": (
        "training",
        of(
            "gspo_megatron.batching.micro_batches:forward_backward",
            "loss_function(micro_batch, *output[:2], *beyond)",
            "loss_function(micro_batch, *(each.double() for each in output[:2]), *beyond)",
        ),
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_what_costs_time_is_over_the_budget(host: Host, make_config: MakeConfig, name: str) -> None:
    part, fault = COSTS[name]
    figures = host.on(make_config(**RUN), with_fault, fault=fault, task=measure)[part]
    is_slow = figures.ours() > BUDGET[part][0]
    assert is_slow or figures.doubles > MOST_DOUBLES[part] * figures.size, figures


@pytest.mark.full  # shows why the rehearsal is needed, but tests nothing of the package
@pytest.mark.parametrize("name", COSTS)
def test_results_do_not_tell_what_it_costs(cpus: Pool, make_config: MakeConfig, name: str) -> None:
    _, fault = COSTS[name]
    expected = cpus.on(make_config(), train)
    assert_close(cpus.on(make_config(), with_fault, fault=fault, task=train), expected)


def test_a_fault_names_one_place() -> None:
    with pytest.raises(AssertionError, match="is not one place"), of(PACK, "name", "x").planted():
        pass
