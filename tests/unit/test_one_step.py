"""examples/one_step.py: its step learns, and its hand-written loss equals the package's."""

from __future__ import annotations

import sys

import pytest
import torch

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.objectives import build_objective
from gspo_megatron.types import LossInputs
from tests.programs import ROOT, module_at, run_program
from tests.unit.models.one_rank import PAD, micro_batch, random_sequences, tiny_policy

FILE = ROOT / "examples" / "one_step.py"


def test_the_reward_rises_and_the_file_is_short() -> None:
    lines = run_program(sys.executable, FILE, "--steps", 12).stdout.splitlines()
    rewards = [float(line.split("reward=")[1].split()[0]) for line in lines]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert len(FILE.read_text().splitlines()) <= 250


@pytest.mark.usefixtures("one_rank")
def test_the_loss_is_that_of_the_objective() -> None:
    module = module_at(FILE)
    lengths = [(3, 5), (1, 9), (6, 2), (4, 11), (2, 3)]
    batch = micro_batch(MicroBatchBuilder(tiny_policy(), PAD, 1.0), random_sequences(4, lengths))
    packed, generator = batch.packed, torch.Generator().manual_seed(2)
    logprobs = -torch.rand(len(packed.targets), generator=generator)
    batch.old_logprobs = logprobs + 0.3 * torch.randn(len(logprobs), generator=generator)
    advantages = torch.randn(len(lengths), generator=generator)
    mini_batch = MiniBatch((((0, 1, 2, 3, 4),),), len(lengths), len(logprobs))

    mine = logprobs.clone().requires_grad_()
    loss = module.GspoLoss(mini_batch, advantages)
    value, _ = loss(batch, mine, mine)
    value.backward()
    assert 0 < loss.clipped < len(lengths)

    section = ObjectiveSection(clip_low=module.CLIP_LOW, clip_high=module.CLIP_HIGH)
    theirs = logprobs.clone().requires_grad_()
    inputs = LossInputs(
        logprobs=theirs,
        old_logprobs=batch.old_logprobs,
        mask=torch.ones_like(logprobs),
        sequence_index=packed.sequence_index,
        advantages=advantages,
        sequence_lengths=packed.response_lengths.float(),
        global_num_sequences=len(lengths),
        global_num_tokens=len(logprobs),
        sum_over_shards=lambda values: values,
        is_primary_shard=True,
    )
    expected = build_objective(section, 16)(inputs).loss
    expected.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(mine.grad, theirs.grad)
