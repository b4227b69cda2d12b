"""What some data ranks wrote, read by another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gspo_megatron.rl.rollout_store import read_share

LAYERS = {0: [1, 4], 1: [], 2: [2, 3, 5]}  # of each pipeline stage
TOP_K = 2

# Per sequence: what is stored with its numbers, as plain lists.
Written = dict[int, dict[str, Tensor]]


def write(folder: Path, groups: list[list[int]], with_turns: bool, with_routes: bool) -> Written:
    """Files of `len(groups)` data ranks with these groups of 3 responses each; returns what every
    sequence has, by its number."""
    generator = torch.Generator().manual_seed(len(groups))

    def numbers(most: int, *size: int) -> Tensor:
        return torch.randint(most, size, generator=generator)

    written: Written = {}
    for data_rank, own in enumerate(groups):
        rows = []
        for group in own:
            for response in range(3):
                prompt, length = int(numbers(5, 1)) + 1, int(numbers(7, 1))
                tokens = prompt + length
                rows.append(
                    {
                        "prompt_lengths": torch.tensor([prompt]),
                        "response_lengths": torch.tensor([length]),
                        "truncated": numbers(2, 1).bool(),
                        "sample_index": torch.tensor([3 * group + response]),
                        "group_index": torch.tensor([group]),
                        "rewards": torch.randn(1, generator=generator, dtype=torch.float64),
                        "shaped": torch.randn(1, generator=generator, dtype=torch.float64),
                        "turns": torch.zeros(1, dtype=torch.long),
                        "turn_rewards": torch.zeros(0, dtype=torch.float64),
                        "turn_tokens": torch.zeros(0, dtype=torch.long),
                        "tokens": numbers(99, tokens),
                        "rollout_logprobs": torch.randn(length, generator=generator),
                        "routes": numbers(8, tokens, 5, TOP_K).to(torch.uint8),
                    }
                )
                if with_turns:
                    turns = int(numbers(4, 1))
                    rows[-1]["turns"] = torch.tensor([turns])
                    rows[-1]["turn_rewards"] = torch.randn(
                        turns, generator=generator, dtype=torch.float64
                    )
                    rows[-1]["turn_tokens"] = numbers(9, turns)
                written[3 * group + response] = rows[-1]
        whole = {
            name: torch.cat([row[name] for row in rows]) if rows else like[:0].clone()
            for name, like in _like().items()
        }
        routes = whole.pop("routes")
        for stage, layers in LAYERS.items():
            tensors = dict(whole) if stage == 0 else {}
            if with_routes:
                chosen = [layer - 1 for layer in layers]
                tensors |= {"routes": routes[:, chosen], "layers": torch.tensor(layers)}
            if tensors:
                name = f"rank_{7 * data_rank + stage:05d}_data_{data_rank:05d}_stage_{stage:03d}"
                save_file({n: t.contiguous() for n, t in tensors.items()},
                          folder / f"{name}.safetensors")  # fmt: skip
    return written


def _like() -> dict[str, Tensor]:
    """An element of each tensor."""
    long, real = torch.zeros(1, dtype=torch.long), torch.zeros(1)
    names = ("prompt_lengths", "response_lengths", "sample_index", "group_index", "tokens")
    like = dict.fromkeys((*names, "turns", "turn_tokens"), long) | {"truncated": long.bool()}
    like |= dict.fromkeys(("rewards", "shaped", "turn_rewards"), real.double())
    return like | {"rollout_logprobs": real, "routes": torch.zeros(1, 5, TOP_K, dtype=torch.uint8)}


def read(folder: Path, rank: int, size: int, layers: list[int]) -> dict[str, Tensor]:
    share = read_share(folder, rank, size, lambda: layers)
    return vars(share.batch) | vars(share.scores)


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
    written = write(tmp_path, groups, with_turns, with_routes)
    wanted = [3, 1]  # layers, of two stages
    found = []
    for rank in range(size):
        share = read(tmp_path, rank, size, wanted)
        assert (share["routes"] is not None) == with_routes
        lengths = (share["prompt_lengths"] + share["response_lengths"]).tolist()
        by_sequence = {
            **{n: share[n].split(lengths) for n in ("tokens", "routes")[: 1 + with_routes]},
            "rollout_logprobs": share["rollout_logprobs"].split(share["response_lengths"].tolist()),
            **{n: share[n].split(share["turns"].tolist()) for n in ("turn_rewards", "turn_tokens")},
        }
        for row, number in enumerate(share["sample_index"].tolist()):
            found.append(number)
            expected = written[number]
            assert int(expected["group_index"]) % size == rank
            for name, value in expected.items():
                if name == "routes":
                    if not with_routes:
                        continue
                    value = value[:, [layer - 1 for layer in wanted]]
                mine = by_sequence[name][row] if name in by_sequence else share[name][row : row + 1]
                assert mine.dtype == value.dtype
                assert torch.equal(mine, value), name
    assert sorted(found) == sorted(written)


def test_a_stage_of_dense_layers_reads_no_routes(tmp_path: Path) -> None:
    written = write(tmp_path, [[0, 1], [2]], False, True)
    share = read(tmp_path, 0, 1, [])
    tokens = sum(len(row["tokens"]) for row in written.values())
    assert share["routes"].shape == (tokens, 0, TOP_K)
    assert share["routes"].dtype == torch.uint8


def test_a_layer_that_nobody_recorded_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, [[0, 1]], False, True)
    with pytest.raises(KeyError):
        read(tmp_path, 0, 1, [1, 6])
