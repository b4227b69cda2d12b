"""Facts that only a GPU can show: its support for FP8, the time and memory of the log-prob head,
and the kind of memory in which routes are kept."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gspo_megatron.config.precision import FP8, device_lacks
from gspo_megatron.errors import UserError
from gspo_megatron.models.logprob_head import logprob_and_entropy, multiply
from gspo_megatron.models.transformer_config import refuse_impossible
from gspo_megatron.platform.devices import built_for_cuda
from gspo_megatron.routing.replay import RouteTable
from tests.gpu.conftest import need

pytestmark = pytest.mark.gpu
ROWS, HIDDEN, VOCABULARY = 4096, 2048, 151_936  # the sizes of Qwen3-30B-A3B's head


def test_transformer_engine_says_the_same_of_this_gpu() -> None:
    need("bf16", engine=True)
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Manager

    theirs = {
        "fp8-delayed": Manager.is_fp8_available(),
        "fp8-blockwise": Manager.is_fp8_block_scaling_available(),
        "mxfp8": Manager.is_mxfp8_available(),
    }
    capability, cuda = torch.cuda.get_device_capability(), built_for_cuda()
    ours = {name: device_lacks(name, capability, cuda) is None for name in FP8}
    assert ours == {name: available for name, (available, _) in theirs.items()}


def test_what_this_gpu_cannot_do_is_refused_with_its_name() -> None:
    need("bf16", engine=True)
    capability, cuda = torch.cuda.get_device_capability(), built_for_cuda()
    impossible = [name for name in FP8 if device_lacks(name, capability, cuda)]
    if not impossible:
        pytest.skip("this GPU can do all of them")
    for name in impossible:
        with pytest.raises(UserError, match=torch.cuda.get_device_name()):
            refuse_impossible(name, "transformer_engine")


def test_fp8_without_its_layers_is_refused() -> None:
    with pytest.raises(UserError, match="allowed: fp32 or bf16"):
        refuse_impossible("fp8-delayed", "torch_native")


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The log-probs [rows], computed from all logits."""
    rows = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
    return rows.gather(1, targets[:, None])[:, 0]


def cost(work: Callable[[], Tensor]) -> tuple[float, float]:
    """The seconds that a forward and a backward pass take, and the additional memory in GiB."""
    work().sum().backward()  # the first pass also loads the kernels, so it is not measured
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    work().sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 2**30


def test_the_head_needs_less_memory_than_all_logits(
    record_property: Callable[[str, object], None],
) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 16 * 2**30:
        pytest.skip("the naive head needs 16 GiB")
    generator = torch.Generator("cuda").manual_seed(1)
    kind = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    hidden = torch.randn(ROWS, HIDDEN, **kind).requires_grad_()
    weight = (0.02 * torch.randn(VOCABULARY, HIDDEN, **kind)).requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS,), device="cuda", generator=generator)
    with torch.no_grad():
        ours = logprob_and_entropy(hidden, weight, targets)[0]
        torch.testing.assert_close(ours, naive(hidden, weight, targets), atol=0.02, rtol=0.01)
    figures = {
        "head": cost(lambda: logprob_and_entropy(hidden, weight, targets)[0]),
        "naive": cost(lambda: naive(hidden, weight, targets)),
    }
    for name, (seconds, gib) in figures.items():
        record_property(f"{name}_seconds", round(seconds, 4))
        record_property(f"{name}_gib", round(gib, 2))
        print(f"{name}: {seconds * 1e3:.1f} ms, {gib:.2f} GiB on {torch.cuda.get_device_name()}")
    assert figures["head"][1] < figures["naive"][1] / 2


def test_logits_of_bf16_are_not_rounded_to_bf16() -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    kind = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    # The sizes are not multiples of a power of two, the logits have a standard deviation of 5.7,
    # and the head needs several tiles.
    hidden, weight = torch.randn(701, 1024, **kind), torch.randn(20_011, 1024, **kind) * 0.178
    targets = torch.randint(20_011, (701,), device="cuda", generator=generator)
    logits = hidden.double() @ weight.double().t()
    product = multiply(hidden, weight, torch.empty(701, 20_011, device="cuda"))
    # The tolerance is for sums of 1,024 terms in fp32. Rounding to bf16 would change the sums by up
    # to 0.06.
    torch.testing.assert_close(product.double(), logits, atol=1e-3, rtol=0.0)
    rows = torch.log_softmax(logits, dim=-1)
    expected = rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)
    for figure, exact in zip(logprob_and_entropy(hidden, weight, targets), expected, strict=True):
        torch.testing.assert_close(figure.double(), exact, atol=1e-3, rtol=0.0)


def test_routes_wait_in_pinned_host_memory() -> None:
    experts = torch.randint(8, (2, 5, 2), dtype=torch.uint8, device="cuda")
    table = RouteTable((1, 2), experts, None).moved(on_host=True)
    assert table.experts.is_pinned() and table.num_bytes == 20
    assert torch.equal(table.of_layer(2, torch.device("cuda")), experts[1].long())
