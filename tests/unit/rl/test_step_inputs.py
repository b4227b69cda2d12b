"""Files that some data-parallel ranks wrote, read by another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from gspo_megatron.rl.step_inputs import read_share
from gspo_megatron.rollout.types import COLUMNS, RolloutGroup

LAYERS = {0: [1, 4], 1: [], 2: [2, 3, 5]}  # the MoE layers of each pipeline stage
TOP_K = 2


def a_group(groups: list[list[int]], *, with_turns: bool, with_routes: bool) -> RolloutGroup:
    """Groups of 3 responses, with all columns. `groups` has the numbers of the groups of each
    data-parallel rank."""
    draws = np.random.default_rng(len(groups))
    samples = np.array([3 * number + n for own in groups for number in own for n in range(3)])
    count = len(samples)
    prompts, responses = draws.integers(1, 6, count), draws.integers(0, 7, count)
    turns = draws.integers(0, 4, count) * with_turns
    tokens, written = int((prompts + responses).sum()), int(responses.sum())
    return RolloutGroup(
        tokens=draws.integers(0, 99, tokens),
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=draws.random(written).astype(np.float32),
        truncated=draws.random(count) < 0.5,
        sample_index=samples,
        group_index=samples // 3,
        rewards=draws.random(count),
        shaped=draws.random(count),
        turns=turns,
        turn_rewards=draws.random(int(turns.sum())),
        turn_tokens=draws.integers(1, 9, int(turns.sum())),
        sampled=draws.random(written) < 0.5 if with_turns else None,
        in_response=draws.random(tokens) < 0.5 if with_turns else None,
        mask=draws.random(written) < 0.3 if with_turns else None,
        versions=draws.integers(0, 9, written).astype(np.int32),
        routes=draws.integers(0, 8, (tokens, 5, TOP_K)).astype(np.uint8) if with_routes else None,
        layers=np.arange(1, 6) if with_routes else None,
        parts=draws.random((count, 2)),
        part_names=("even", "late"),
        reasons=[f"é\nof {n}" for n in samples],
        records=[{"turns": [{"text": f"of {n}", "reward": None}]} for n in samples],
        failed_calls=np.array([1, 2, 3]),
        reward_seconds=np.array([0.5]),
    ).checked()


def write(folder: Path, whole: RolloutGroup, groups: list[list[int]]) -> None:
    """Write the files of `len(groups)` data-parallel ranks, each with its groups."""
    for data_rank, own in enumerate(groups):
        share = whole.of_prompts(own)
        for stage, layers in LAYERS.items():
            if stage and share.routes is None:
                continue
            content = share.of_layers(layers).save(routes_only=stage > 0)
            name = f"rank_{7 * data_rank + stage:05d}_data_{data_rank:05d}_stage_{stage:03d}"
            (folder / f"{name}.safetensors").write_bytes(content)


def assert_same(found: RolloutGroup, expected: RolloutGroup) -> None:
    for name in COLUMNS:
        one, other = getattr(found, name), getattr(expected, name)
        # These two fields are sums over all files that were read.
        if name not in ("failed_calls", "reward_seconds"):
            assert type(one) is type(other), name
            np.testing.assert_equal(one, other, name)
            assert not isinstance(one, np.ndarray) or one.dtype == other.dtype, name


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("groups", "with_turns", "with_routes"),
    [
        ([[0, 1, 2, 3, 4, 5, 6]], False, True),
        ([[0, 2, 4, 6], [1, 3, 5]], True, True),
        # Dynamic sampling leaves gaps in the numbers, ranks with different numbers of groups, and
        # ranks without groups.
        ([[0, 9], [], [5, 8, 11]], True, True),
        ([[3, 6, 15], [1], [2, 5]], False, False),
    ],
)
def test_every_sequence_comes_back_once_to_the_rank_of_its_group(
    tmp_path: Path, groups: list[list[int]], with_turns: bool, with_routes: bool, size: int
) -> None:
    whole = a_group(groups, with_turns=with_turns, with_routes=with_routes)
    write(tmp_path, whole, groups)
    for rank in range(size):
        mine = [number for own in groups for number in own if number % size == rank]
        found = read_share(tmp_path, rank, size, lambda: [3, 1])  # layers 3 and 1 are of two stages
        assert_same(found, whole.of_prompts(mine).of_layers([3, 1]))


def test_a_stage_of_dense_layers_reads_no_routes(tmp_path: Path) -> None:
    whole = a_group([[0, 1], [2]], with_turns=False, with_routes=True)
    write(tmp_path, whole, [[0, 1], [2]])
    routes = read_share(tmp_path, 0, 1, list).routes
    assert routes.shape == (len(whole.tokens), 0, TOP_K) and routes.dtype == np.uint8


def test_a_layer_that_nobody_recorded_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, a_group([[0, 1]], with_turns=False, with_routes=True), [[0, 1]])
    with pytest.raises(KeyError):
        read_share(tmp_path, 0, 1, lambda: [1, 6])


@pytest.mark.parametrize("with_turns", [True, False])
def test_files_of_the_version_before_are_read(tmp_path: Path, with_turns: bool) -> None:
    """Such files have 64-bit token ids, fewer columns, and only the rewards that are trained on."""
    groups = [[0, 2], [1]]
    whole = a_group(groups, with_turns=with_turns, with_routes=True)
    write(tmp_path, whole, groups)
    gone = ("versions", "sampled", "parts", "part_names", "failed_calls", "reward_seconds")
    for path in tmp_path.glob("*_stage_000.safetensors"):
        columns = load(path.read_bytes())
        for name in (*gone, "reasons", "records", "record_lengths"):
            columns.pop(name, None)
        path.write_bytes(save({**columns, "tokens": columns["tokens"].astype(np.int64)}))
    lacking = dict.fromkeys((*gone, "reasons", "records"))
    expected = replace(whole.of_prompts([0, 2, 1]), **lacking)
    assert_same(read_share(tmp_path, 0, 1, lambda: [*range(1, 6)]), expected)
