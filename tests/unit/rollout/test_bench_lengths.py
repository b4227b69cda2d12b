"""The RL-step benchmark asks our engine for responses of planned lengths, and gets the batch that
the loop expects."""

from __future__ import annotations

import sys

import pytest
import torch

from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from tests.programs import ROOT
from tests.unit.models.one_rank import PAD, VOCABULARY, tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")


def test_responses_have_their_planned_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools" / "bench_peers"), *sys.path])
    from our_step import PlannedLengths
    from workload import Workload

    work = Workload(prompts=4, group=3, longest=9, median=4.0)
    engine = MegatronEngine(tiny_policy(), pad_id=PAD, eos_id=VOCABULARY)
    planned = PlannedLengths(engine, work)
    planned.step = 2
    prompts, groups = [(1, 2), (3, 4, 5)], (1, 3)  # of one of two ranks
    requests, sampling = Requests(prompts, groups, 3), Sampling(max_tokens=9)
    batch, whole = (each.generate(requests, sampling, seed=1) for each in (planned, engine))
    lengths = work.lengths(2)
    assert len(set(lengths)) > 2
    assert batch.response_lengths.tolist() == [lengths[n] for n in (3, 4, 5, 9, 10, 11)]
    assert torch.equal(batch.sample_index, whole.sample_index)
    assert torch.equal(batch.group_index, whole.group_index)
    assert torch.equal(batch.prompt_lengths, whole.prompt_lengths)
    ends = (batch.prompt_lengths + batch.response_lengths).tolist()
    whole_ends = (whole.prompt_lengths + whole.response_lengths).tolist()
    both = zip(batch.tokens.split(ends), whole.tokens.split(whole_ends), strict=True)
    assert all(torch.equal(short, long[: len(short)]) for short, long in both)
