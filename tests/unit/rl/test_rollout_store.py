"""What some data ranks wrote, read by another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gspo_megatron.rl.rollout_store import read_share
from gspo_megatron.rl.rollouts import Experience, Scores
from gspo_megatron.types import RolloutBatch

LAYERS = {0: [1, 4], 1: [], 2: [2, 3, 5]}  # of each pipeline stage
TOP_K = 2


def write(folder: Path, groups: list[list[int]], with_turns: bool, with_routes: bool) -> Experience:
    """Files of `len(groups)` data ranks with these groups of 3 responses each; returns what is in
    all of them together, data rank after data rank."""
    generator = torch.Generator().manual_seed(len(groups))

    def numbers(most: int, *size: int) -> Tensor:
        return torch.randint(most, size, generator=generator)

    def reals(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype)

    samples = torch.tensor([3 * group + n for own in groups for group in own for n in range(3)])
    count = len(samples)
    prompts, responses = numbers(5, count) + 1, numbers(7, count)
    turns = numbers(4, count) * with_turns
    num_tokens, num_turns = int((prompts + responses).sum()), int(turns.sum())
    batch = RolloutBatch(
        tokens=numbers(99, num_tokens),
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=reals(int(responses.sum()), torch.float32),
        truncated=numbers(2, count).bool(),
        sample_index=samples,
        group_index=samples // 3,
        mask=numbers(2, int(responses.sum())).bool() if with_turns else None,
        routes=numbers(8, num_tokens, 5, TOP_K).to(torch.uint8),
    )
    scores = Scores(reals(count), reals(count), turns, reals(num_turns), numbers(9, num_turns))
    whole = Experience(batch, scores)
    for data_rank, own in enumerate(groups):
        columns = columns_of(whole.of_groups(own))
        routes = columns.pop("routes")
        for stage, layers in LAYERS.items():
            tensors = {n: t for n, t in columns.items() if t is not None} if stage == 0 else {}
            if with_routes:
                chosen = [layer - 1 for layer in layers]
                tensors |= {"routes": routes[:, chosen], "layers": torch.tensor(layers)}
            if tensors:
                name = f"rank_{7 * data_rank + stage:05d}_data_{data_rank:05d}_stage_{stage:03d}"
                save_file(
                    {n: t.contiguous() for n, t in tensors.items()}, folder / f"{name}.safetensors"
                )
    return whole


def columns_of(experience: Experience) -> dict[str, Tensor | None]:
    return vars(experience.batch) | vars(experience.scores)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("groups", "with_turns", "with_routes"),
    [
        ([[0, 1, 2, 3, 4, 5, 6]], False, True),
        ([[0, 2, 4, 6], [1, 3, 5]], True, True),
        # what dynamic sampling may leave: gaps, unequal numbers, a rank with nothing
        ([[0, 9], [], [5, 8, 11]], True, True),
        ([[3, 6, 15], [1], [2, 5]], False, False),
    ],
)
def test_every_sequence_comes_back_once_to_the_rank_of_its_group(
    tmp_path: Path, groups: list[list[int]], with_turns: bool, with_routes: bool, size: int
) -> None:
    whole = write(tmp_path, groups, with_turns, with_routes)
    wanted = [3, 1]  # layers, of two stages
    for rank in range(size):
        found = columns_of(read_share(tmp_path, rank, size, lambda: wanted))
        mine = [group for own in groups for group in own if group % size == rank]
        expected = columns_of(whole.of_groups(mine))
        expected["routes"] = expected["routes"][:, [layer - 1 for layer in wanted]]
        assert (found["routes"] is not None) == with_routes
        for name, value in expected.items():
            if value is None:
                assert found[name] is None
            elif name != "routes" or with_routes:
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value), name


def test_a_stage_of_dense_layers_reads_no_routes(tmp_path: Path) -> None:
    whole = write(tmp_path, [[0, 1], [2]], False, True)
    routes = read_share(tmp_path, 0, 1, list).batch.routes
    assert routes.shape == (len(whole.batch.tokens), 0, TOP_K) and routes.dtype == torch.uint8


def test_a_layer_that_nobody_recorded_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, [[0, 1]], False, True)
    with pytest.raises(KeyError):
        read_share(tmp_path, 0, 1, lambda: [1, 6])
