"""The distributed optimizer's state as boxes of global tensors, independent of the layout.

Megatron-Core's formats depend on the layout. `dp_reshardable` keeps the layout of the optimizer's
buffers. The keys of `fully_reshardable` contain the number of optimizers, which
depends on EP; this format also gathers each buffer on one rank. Here every data-parallel rank
writes the ranges that it owns, and reads the ranges that it will own. The keys are
`optimizer.<param | exp_avg | exp_avg_sq>.<parameter>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from gspo_megatron.checkpoint.model_pieces import ModelPiece
from gspo_megatron.checkpoint.storage import Piece
from gspo_megatron.errors import DataError, UserError
from gspo_megatron.families.weight_map import is_vocabulary
from gspo_megatron.files import parse_json
from gspo_megatron.models.optimizer import Trainer
from gspo_megatron.platform.collectives import all_gather_objects

GROUPS_FILE = "groups.json"
# These values identify a group of parameters. Under expert parallelism the experts have a separate
# optimizer, but the same groups.
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_decoupled_lr")
_SCHEDULED = ("lr", "weight_decay")


@dataclass(frozen=True)
class OwnedRange:
    """The elements of a parameter whose state this rank holds."""

    optimizer: DistributedOptimizer
    parameter: torch.nn.Parameter
    start: int
    stop: int

    def tensors(self) -> dict[str, Tensor]:
        """Return the main parameter and the moments, each [stop - start] in fp32. They are copies
        if the optimizer keeps them in another precision, else the optimizer's own tensors."""
        found = self.optimizer._get_main_param_and_optimizer_states(self.parameter)
        states = {k: v for k, v in found.items() if torch.is_tensor(v) and v.dim()}
        for name, state in states.items():
            assert state.numel() == self.stop - self.start, f"{name} is not of the range's size"
        return {name: state.detach() for name, state in states.items()}

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Write the result of the method `tensors` to the optimizer, if its tensors are copies."""
        if self.optimizer.config.use_precision_aware_optimizer:
            self.optimizer._set_main_param_and_optimizer_states(self.parameter, tensors)


def trainer_state(trainer: Trainer) -> dict[str, Any]:
    """Return the position and shape of the learning-rate schedule, for JSON."""
    return {"scheduler": trainer.scheduler.state_dict()}


def load_trainer_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Continue the schedule at the position in `state`. The schedule's shape comes from the
    configuration: a changed peak, floor or length takes effect from here on."""
    scheduler = trainer.scheduler
    scheduler.num_steps = 0
    scheduler.step(increment=int(state["scheduler"]["num_steps"]))


def owned_ranges(optimizer: MegatronOptimizer) -> list[OwnedRange]:
    """List all ranges of this rank, in the optimizers of dense parameters and of experts. Raises
    UserError if an optimizer is not a DistributedOptimizer."""
    return [
        OwnedRange(part, parameter, ranges["param"].start, ranges["param"].end)
        for part in _parts(optimizer)
        for buffer in part.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    ]


def state_pieces(
    model: Sequence[ModelPiece], ranges: Sequence[OwnedRange], *, originals_only: bool
) -> Iterator[tuple[OwnedRange, dict[str, Tensor], list[Piece]]]:
    """Yield each range with its tensors and their pieces, which are views. With `originals_only`,
    leave out copies that another tensor- or pipeline-parallel rank writes."""
    places: dict[int, list[ModelPiece]] = {}
    for place in model:
        places.setdefault(id(place.tensor), []).append(place)
    for own in ranges:
        tensors = own.tensors()
        pieces, covered = [], 0
        for place in places[id(own.parameter)]:
            covered += max(0, min(own.stop, place.stop) - max(own.start, place.start))
            if is_vocabulary(place.key):  # its last rows may be padding, which is not stored
                padding = max(0, own.stop - max(own.start, place.stop))
                covered += padding
                if padding and not originals_only:
                    for state in tensors.values():
                        state[-padding:].zero_()
            first_instance = own.optimizer.distributed_optimizer_instance_id == 0
            if originals_only and not (place.is_original and first_instance):
                continue
            for name, state in tensors.items():
                pieces.extend(place.range_of(state, own.start, f"optimizer.{name}.{place.key}"))
        assert covered == own.stop - own.start, "a range without a place in the model"
        yield own, tensors, pieces


def prepare_state(optimizer: MegatronOptimizer) -> None:
    """Allocate the moments of an optimizer that has not stepped yet, as its first step would."""
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if _counts_by_parameter(part):
            for group in part.optimizer.param_groups:
                on_device = group.get("capturable") or group.get("fused")
                for parameter in group["params"]:
                    # torch's Adam allocates nothing for a parameter that has some state, so without
                    # "step" it raises KeyError
                    device = parameter.device if on_device else "cpu"
                    step = torch.zeros((), dtype=torch.float32, device=device)
                    part.optimizer.state[parameter].setdefault("step", step)


def groups_document(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return, for JSON, the number of updates so far, and the learning rate and weight decay of
    each group of parameters."""
    groups = []
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            values = {key: group.get(key) for key in (*_GROUP_KEYS, *_SCHEDULED)}
            values = {k: v.item() if torch.is_tensor(v) else v for k, v in values.items()}
            if values not in groups:
                groups.append(values)
    return {"step": _steps(optimizer), "groups": groups}


def read_groups(folder: Path) -> dict[str, Any]:
    """Read the document of groups_document from its file. Raises DataError."""
    path = folder / GROUPS_FILE
    try:
        document = parse_json(path.read_bytes())
        has_keys = [{*_GROUP_KEYS, *_SCHEDULED} <= group.keys() for group in document["groups"]]
        if not (isinstance(document["step"], int) and all(has_keys)):
            raise ValueError
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: not the groups of an optimizer") from None
    return document


def load_groups(optimizer: MegatronOptimizer, document: dict[str, Any], folder: Path) -> None:
    """Set the number of updates, and the values that the schedule changes. All other values come
    from the configuration. Raises DataError if the document lacks a group of parameters."""
    saved = {_identity(group): group for group in document["groups"]}
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if (values := saved.get(_identity(group))) is None:
                identity = dict(zip(_GROUP_KEYS, _identity(group)))
                raise DataError(f"{folder / GROUPS_FILE}: has no group with {identity}")
            for name in _SCHEDULED:
                group[name] = values[name]
            if not _counts_by_parameter(part):
                group["step"] = document["step"]
        if _counts_by_parameter(part):
            for state in part.optimizer.state.values():
                state["step"].fill_(document["step"])


def _parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    chained = isinstance(optimizer, ChainedOptimizer)
    parts = []
    for part in optimizer.chained_optimizers if chained else [optimizer]:
        if type(part) is not DistributedOptimizer:
            raise UserError(
                f"checkpoints support only Megatron's DistributedOptimizer, and this is a "
                f"{type(part).__name__}; set parallel.ddp.use_distributed_optimizer = true and "
                f"optimizer adam"
            )
        if not part.is_stub_optimizer:
            parts.append(part)
    return parts


def _counts_by_parameter(part: DistributedOptimizer) -> bool:
    """Whether the optimizer counts steps per parameter, like torch's Adam. Fused optimizers count
    them per group."""
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _steps(optimizer: MegatronOptimizer) -> int:
    """Return the number of updates so far, which is the same for all parameters of all ranks."""
    counts = set()
    for part in _parts(optimizer):
        if _counts_by_parameter(part):
            counts |= {int(state["step"]) for state in part.optimizer.state.values()}
        else:
            counts |= {int(g.get("step", 0)) for g in part.optimizer.param_groups if g["params"]}
    assert len(counts) <= 1, f"parameters with different numbers of updates: {counts}"
    counts_of_ranks = set().union(*all_gather_objects(counts))
    assert len(counts_of_ranks) == 1, f"ranks with different numbers of updates: {counts_of_ranks}"
    return counts_of_ranks.pop()


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in _GROUP_KEYS)
