"""The faster functions for CPUs compute the same as stock Megatron-Core, and change nothing
else."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_megatron.platform.cpu import faster, needed, windows
from tests.programs import run_program

needs_substitutions = pytest.mark.skipif(
    not (faster.IS_ON and needed.is_needed()), reason="there is CUDA, or GSPO_CPU_FASTER=0"
)


@needs_substitutions
def test_a_rank_alone_sends_its_tokens_to_nobody() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    ours, alone = token_dispatcher.all_to_all, SimpleNamespace(size=lambda: 1)
    rows = torch.randn(6, 3, requires_grad=True)
    expected = ours.__wrapped__(alone, rows, None, [6])
    assert torch.equal(expected, rows) and expected.grad_fn.name() == "_AllToAllBackward"
    assert ours(alone, rows, None, [6]) is rows


STEPS = """
import sys
import gspo_megatron.platform
import torch
for kind, momentum in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.25, weight_decay=0.0, **momentum)
    for _ in range(2):
        optimizer.zero_grad()
        (2 * weight).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    print(*weight.tolist())
print("torch._dynamo" in sys.modules)
"""


@needs_substitutions
def test_optimizers_step_and_import_no_compiler() -> None:
    """With a constant gradient, each step of Adam is as large as the learning rate. In SGD, the
    momentum adds 0.9 of the first step to the second step."""
    adam, sgd, has_compiler = run_program(sys.executable, "-c", STEPS).stdout.splitlines()
    assert [float(each) for each in adam.split()] == pytest.approx([1 - 2 * 0.25] * 3)
    assert [float(each) for each in sgd.split()] == pytest.approx([1 - 2 * 0.25 * 2.9] * 3)
    assert has_compiler == "False"


@needs_substitutions
def test_the_second_sort_copies_only_what_it_moves() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    ours = token_dispatcher.sort_chunks_by_idxs
    rows, probs, sizes = torch.randn(6, 3), torch.randn(6), torch.tensor([1, 0, 3, 2])
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        expected = ours.__wrapped__(rows, sizes, torch.tensor(order), probs=probs)
        found = ours(rows, sizes, torch.tensor(order), probs=probs)
        assert all(map(torch.equal, found, expected))
        assert (found[0] is rows) == (order == sorted(order))
        assert expected[0] is not rows


@needs_substitutions
def test_gradients_are_clipped_in_place() -> None:
    from megatron.core.optimizer import clip_grads

    ours = clip_grads.multi_tensor_scale_impl
    gradients = [torch.randn(5, 3), torch.randn(7)]
    expected = [0.3 * gradient for gradient in gradients]
    places = [gradient.data_ptr() for gradient in gradients]
    ours(1, None, [gradients, gradients], 0.3)
    assert all(map(torch.equal, gradients, expected))
    assert [gradient.data_ptr() for gradient in gradients] == places
    others = [torch.zeros(5, 3), torch.zeros(7)]
    ours(1, None, [gradients, others], 2.0)
    assert all(torch.equal(other, 2.0 * own) for other, own in zip(others, gradients))
    assert all(map(torch.equal, gradients, expected))


@needs_substitutions
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_gradients_in_bf16_are_added_in_strips(
    monkeypatch: pytest.MonkeyPatch, is_contiguous: bool
) -> None:
    """The sum is the same as with stock Megatron-Core, which adds the whole gradient at once."""
    from megatron.core.distributed import DistributedDataParallel

    monkeypatch.setattr(faster, "STRIP", 8)
    gradient = torch.randn(7, 3).bfloat16()
    if not is_contiguous:
        gradient = gradient.t().contiguous().t()
    model = SimpleNamespace(
        param_to_bucket_group={},
        ddp_config=SimpleNamespace(overlap_grad_reduce=False),
    )
    ours = DistributedDataParallel._make_backward_post_hook
    sums = []
    for make_hook in (ours, ours.__wrapped__):
        parameter = torch.nn.Parameter(torch.zeros(7, 3, dtype=torch.bfloat16))
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones(7, 3), False
        model.param_to_bucket_group[parameter] = None
        hook = make_hook(model, parameter)
        for _ in range(2):  # two micro-batches
            parameter.grad = gradient.clone()
            with Additions() as additions:
                hook()
            assert parameter.grad is None
        assert not parameter.grad_added_to_main_grad
        sums.append((parameter.main_grad, max(additions.sizes)))
    (own_sum, own_size), (stock_sum, stock_size) = sums
    assert torch.equal(own_sum, stock_sum) and not torch.equal(own_sum, torch.ones(7, 3))
    assert stock_size == 21
    assert own_size == (8 if is_contiguous else 21)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_strips_cover_all_rows_and_on_the_meta_device_one_stands_for_all(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """`check` runs a model on the meta device. There, more strips would only take more time."""
    monkeypatch.setattr(faster, "STRIP", 8)
    tensor = torch.arange(21, device=device).view(7, 3)
    strips = list(faster.strips(tensor, tensor[:, :1]))
    lengths = [len(first) for first, _ in strips]
    assert lengths == ([2, 2, 2, 1] if device == "cpu" else [2])
    assert all(len(first) == len(second) for first, second in strips)
    if device == "cpu":
        assert torch.equal(torch.cat([first for first, _ in strips]), tensor)


class Additions(TorchDispatchMode):
    """Collects the numbers of elements that additions in place change."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten.add_.Tensor:
            self.sizes.append(result.numel())
        return result


@dataclass(frozen=True)
class Group:
    """A stand-in for a process group, without processes."""

    ranks: int
    number: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.number


@needs_substitutions
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(("turned", "mscale"), [(16, 1.0), (16, 0.7), (8, 1.0)])
def test_packed_sequences_turn_as_stock_turns_them(
    cp_size: int, cp_rank: int, turned: int, mscale: float
) -> None:
    rope_utils = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    native = rope_utils._apply_rotary_pos_emb_thd.__wrapped__
    fields = ("apply_rope_fusion", "rotary_interleaved", "multi_latent_attention")
    config = SimpleNamespace(**dict.fromkeys(fields, False))
    named = {"mscale": mscale, "cp_group": Group(cp_size, cp_rank)}
    boundaries = torch.tensor([0, 8, 8, 28, 32], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(20, 1, 1, turned // 2, generator=generator).repeat(1, 1, 1, 2)
    mixed = torch.randn(32 // cp_size, 3, 32, generator=generator)
    # The states are a slice of a projection, so they are not contiguous.
    states = mixed[..., 8:24].detach().requires_grad_()
    weights = torch.randn(states.shape, generator=generator)

    def ours() -> torch.Tensor:  # calls the function in the same way as Megatron-Core's attention
        return rope_utils.apply_rotary_pos_emb(
            states, angles, config=config, cu_seqlens=boundaries, **named
        )

    # The two supported versions of Megatron-Core name the arguments differently.
    def by_other_names() -> torch.Tensor:
        switches = dict.fromkeys(("multi_latent_attention", "mla_rotary_interleaved"), False)
        turn = rope_utils._apply_rotary_pos_emb_thd
        return turn(states, boundaries, angles, **named, **(switches if turned == 16 else {}))

    results = []
    for turn in (lambda: native(states, boundaries, angles, **named), ours, ours, by_other_names):
        out = turn()  # from the second call on, the cached tables are used
        results.append((out, *torch.autograd.grad((out * weights).sum(), states)))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], atol=1e-6, rtol=1e-6)
    assert len(vars(boundaries).get("rotary_tables", {})) == (turned == 16)


@needs_substitutions
def test_memory_that_is_freed_serves_the_next_update() -> None:
    # The program allocates and frees five blocks repeatedly. By default, glibc keeps at most 64 MiB
    # of freed memory and no block above 32 MiB, so the 50,176 pages of the blocks would be fetched
    # again in each repetition. Tensors would put small objects between the blocks, so the program
    # does not use them.
    program = """
import resource
import gspo_megatron.platform

for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(size * 2**20) for size in (24, 24, 24, 24, 100)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert int(output) < 500


FREEING = """
import sys
import gspo_megatron.platform
import psutil, torch
from gspo_megatron.platform.cpu import faster
faster._MUCH_FREE = int(sys.argv[1])
blocks = [torch.ones(2**18) for _ in range(400)]  # 1 MB each
last = blocks[-1]  # memory before a used block stays in the heap
del blocks
before = psutil.Process().memory_info().rss
faster.return_free_memory()
print((before - psutil.Process().memory_info().rss) >> 20)
"""


@needs_substitutions
@pytest.mark.parametrize(("limit", "returned"), [(2**28, range(350, 420)), (2**30, range(-5, 20))])
def test_much_free_memory_goes_back_to_the_system(limit: int, returned: range) -> None:
    done = run_program(sys.executable, "-c", FREEING, limit)
    assert int(done.stdout) in returned  # in MB


def test_a_window_that_a_killed_rank_has_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "MEMORY", str(tmp_path))
    forgotten, other = (Path(windows._new_file(2)) for _ in "ab")
    weights, foreign = tmp_path / "gspo-megatron-weights-1", tmp_path / "else"
    weights.mkdir()
    foreign.touch()
    hours_ago = time.time() - 7200
    for path in (forgotten, weights, foreign):
        os.utime(path, (hours_ago, hours_ago))
    newest = Path(windows._new_file(2))
    assert sorted(tmp_path.iterdir()) == sorted([other, weights, foreign, newest])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_windows_of_other_users_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "MEMORY", str(tmp_path))
    path = Path(windows._new_file(2))
    os.utime(path, (0, 0))
    os.chown(path, 12345, -1)
    windows._new_file(2)
    assert path.exists()
