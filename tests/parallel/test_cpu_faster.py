"""GSPO_CPU_FASTER=0 changes the speed on a CPU, not the results."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.platform.cpu import faster, host_collectives
from gspo_megatron.platform.cpu.host_collectives import COLLECTIVES
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.verify.results import StepResult
from tests.parallel.models import odd_moe
from tests.parallel.pool import Pool
from tests.parallel.updates import (
    FP32_TOLERANCE,
    METRIC_TOLERANCE,
    assert_norm_is_that_of_the_gradients,
    assert_same_update,
    update,
)
from tests.unit.models.one_rank import one_rank_groups, tiny_policy

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ("tp=1", "pp=2,cp=2", "tp=2,etp=2,ep=2,dp=2")


def updates(pool: Pool) -> dict[str, StepResult]:
    """The results of a policy update on each layout."""
    return {layout: update(pool, odd_moe(layout, {"name": "gspo"})) for layout in LAYOUTS}


def responses() -> list[torch.Tensor]:
    """The tokens and log-probs of greedy responses to prompts of several lengths."""
    with one_rank_groups():
        engine = MegatronEngine(tiny_policy(), pad_id=0, eos_id=1)
        prompts = Requests([[3, 4], [5, 6, 7, 8, 9], [10]], [0, 1, 2])
        batch = engine.generate(prompts, Sampling(12, temperature=0.0), 1)
    return [batch.tokens, batch.rollout_logprobs]


def compute(path: Path) -> None:
    """Save the results of this process, and the names of the collectives that `faster` has
    replaced."""
    pool = Pool()
    ours = host_collectives.__file__
    replaced = [name for name in COLLECTIVES if inspect.getfile(getattr(dist, name)) == ours]
    torch.save((faster.IS_ON, replaced, updates(pool), responses()), path)
    pool.close()


def test_the_switch_changes_no_result(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "without"
    subprocess.run(
        [sys.executable, "-m", "tests.parallel.test_cpu_faster", path],
        cwd=ROOT,
        env=os.environ | {"GSPO_CPU_FASTER": "0"},
        check=True,
    )
    is_on, replaced, without, (tokens, logprobs) = torch.load(path, weights_only=False)
    assert (is_on, replaced) == (False, [])
    for layout, result in updates(pool).items():
        # The result without `faster` is compared with two other results: tp=1 without `faster`, and
        # the same layout with `faster`.
        for reference in (without["tp=1"], result):
            assert_same_update(without[layout], reference, FP32_TOLERANCE)
        assert_norm_is_that_of_the_gradients(without[layout])
    own_tokens, own_logprobs = responses()
    assert torch.equal(tokens, own_tokens)
    assert logprobs.flatten().tolist() == pytest.approx(
        own_logprobs.flatten().tolist(), rel=METRIC_TOLERANCE, abs=1e-6
    )


if __name__ == "__main__":
    compute(Path(sys.argv[1]))
