"""The responses of one step, and their way to the disk and back where a run stops after them.

Rollouts take most of a step. Each data rank writes what it sampled as flat tensors; a run on
another layout reads the sequences of its own groups out of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gspo_megatron.checkpoint.storage import raise_everywhere, write_file
from gspo_megatron.models.build import Policy
from gspo_megatron.rl.rollouts import Experience
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.types import RolloutBatch, Sample

FOLDER = "rollouts"
# Per sequence, per token, per response token.
_OF_SEQUENCES = (
    "prompt_lengths",
    "response_lengths",
    "truncated",
    "sample_index",
    "group_index",
    "rewards",
)
_OF_RESPONSES = ("logprobs", "token_advantages")


@dataclass
class RolloutBuffer:
    """This rank's share of the responses that a step trains on, and what is written of them."""

    batch: RolloutBatch
    rewards: Tensor  # [num_sequences] float64, shaped
    token_advantages: Tensor | None  # [response tokens] float32; on all ranks, or on none
    metrics: dict[str, float]
    num_tokens: int
    rollout_seconds: float
    samples: list[Sample]  # to be written down; on the main rank
    sample_rewards: list[float]

    @classmethod
    def of(cls, experience: Experience, samples: tuple[list[Sample], list[float]]) -> RolloutBuffer:
        """That of an experience; `samples` with their rewards."""
        return cls(
            experience.batch,
            experience.rewards,
            experience.token_advantages,
            experience.metrics,
            experience.num_tokens,
            experience.rollout_seconds,
            *samples,
        )

    def describe(self) -> dict[str, Any]:
        """What is no tensor, for JSON; the main rank's is saved."""
        return {
            "metrics": self.metrics,
            "num_tokens": self.num_tokens,
            "rollout_seconds": self.rollout_seconds,
            "samples": [dataclasses.asdict(s) | {"fields": {}} for s in self.samples],
            "sample_rewards": self.sample_rewards,
        }

    def write(self, folder: Path, policy: Policy) -> None:
        """Write this rank's tensors below `folder`; every rank calls it. Raises OSError."""
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            return  # the first has the same
        stage = parallel_state.get_pipeline_model_parallel_rank()
        tensors: dict[str, Tensor | None] = {}
        if stage == 0:
            batch = vars(self.batch) | {
                "rewards": self.rewards,
                "token_advantages": self.token_advantages,
            }
            tensors = {name: batch[name] for name in ("tokens", *_OF_SEQUENCES, *_OF_RESPONSES)}
        if self.batch.routes is not None:
            layers = attach_hooks(policy.models)
            tensors |= {"routes": self.batch.routes, "layers": torch.tensor(layers)}
        present = {n: t.detach().cpu().contiguous() for n, t in tensors.items() if t is not None}
        if not present:
            return
        data_rank = parallel_state.get_data_parallel_group(with_context_parallel=True).rank()
        name = f"rank_{dist.get_rank():05d}_data_{data_rank:05d}_stage_{stage:03d}.safetensors"
        path = folder / FOLDER / name
        path.parent.mkdir(exist_ok=True)
        write_file(path, save(present))

    @classmethod
    def read(cls, folder: Path, description: dict[str, Any], policy: Policy) -> RolloutBuffer:
        """What `write` and `describe` left, as this rank's share in the present layout; every rank
        calls it. Raises DataError, the same on all ranks."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        tensors: dict[str, Tensor] = {}
        error = None
        try:
            tensors = read_share(
                folder / FOLDER, group.rank(), group.size(), lambda: attach_hooks(policy.models)
            )
        except (OSError, SafetensorError, KeyError) as found:
            error = f"{folder / FOLDER}: cannot be read: {found}"
        raise_everywhere(error)
        device = torch.device(torch.cuda.current_device())
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        rewards, advantages = tensors.pop("rewards"), tensors.pop("token_advantages", None)
        return cls(
            RolloutBatch(**tensors),
            rewards,
            advantages,
            description["metrics"],
            description["num_tokens"],
            description["rollout_seconds"],
            [Sample(**sample) for sample in description["samples"]],
            description["sample_rewards"],
        )


def read_share(
    folder: Path, rank: int, size: int, layers: Callable[[], Sequence[int]]
) -> dict[str, Tensor]:
    """The tensors of the groups whose number leaves `rank` when divided by `size`, as rollouts deal
    them out; of the routes, if there are any, the numbered layers.

    Raises OSError, SafetensorError and KeyError where files are not as `RolloutBuffer.write` left
    them.
    """
    pieces: dict[str, list[Tensor]] = {}
    for path in sorted(folder.glob("*_stage_000.safetensors"), key=_data_rank):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            columns = {name: file.get_tensor(name) for name in _OF_SEQUENCES}
            mine = columns["group_index"] % size == rank
            for name, column in columns.items():
                pieces.setdefault(name, []).append(column[mine])
            lengths = columns["prompt_lengths"] + columns["response_lengths"]
            tokens = _runs(lengths, mine)
            pieces.setdefault("tokens", []).append(_cut(file, "tokens", tokens))
            responses = _runs(columns["response_lengths"], mine)
            for name in names.intersection(_OF_RESPONSES):
                pieces.setdefault(name, []).append(_cut(file, name, responses))
        if "routes" in names:
            pieces.setdefault("routes", []).append(_routes(path, tokens, layers()))
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def _routes(first_stage: Path, tokens: Sequence[tuple[int, int]], wanted: Sequence[int]) -> Tensor:
    """[tokens, wanted layers, k], from the files of all stages of one data rank."""
    data_rank = f"_data_{_data_rank(first_stage):05d}_"
    found: dict[int, Tensor] = {}
    nothing = None
    for path in first_stage.parent.glob(f"*{data_rank}*"):
        with safe_open(path, framework="pt") as file:
            layers = file.get_tensor("layers").tolist()
            if nothing is None or set(wanted).intersection(layers):
                routes = _cut(file, "routes", tokens)
                nothing = routes[:, :0]
                found |= {layer: routes[:, row] for row, layer in enumerate(layers)}
    assert nothing is not None, "no stage recorded routes"
    chosen = [found[layer] for layer in wanted]
    return torch.stack(chosen, dim=1) if chosen else nothing


def _data_rank(path: Path) -> int:
    return int(path.name.split("_")[3])


def _runs(lengths: Tensor, chosen: Tensor) -> list[tuple[int, int]]:
    """Where the chosen of consecutive pieces of these lengths lie; neighbours as one."""
    ends = lengths.cumsum(0).tolist()
    runs: list[tuple[int, int]] = []
    for end, length, wanted in zip(ends, lengths.tolist(), chosen.tolist(), strict=True):
        if wanted and runs and runs[-1][1] == end - length:
            runs[-1] = (runs[-1][0], end)
        elif wanted:
            runs.append((end - length, end))
    return runs


def _cut(file: Any, name: str, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Rows of a stored tensor, without reading others."""
    stored = file.get_slice(name)
    return torch.cat([stored[:0], *(stored[start:end] for start, end in runs)])
