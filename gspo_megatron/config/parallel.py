"""The layout: the number of ranks for each axis of the model and the batch, and the section
`parallel`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from gspo_megatron.config.section import Positive, Section, Text, harmless
from gspo_megatron.errors import ConfigError, problem, suggest

if TYPE_CHECKING:
    from gspo_megatron.config.schema import RunConfig

# Short name -> key of the parallel section; the keys are Megatron-Core's own names.
LAYOUT_KEYS: dict[str, str] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
}
_SIZE = re.compile(r"0{0,9}[1-9][0-9]{0,8}")  # not longer: int() refuses thousands of digits


class ParallelSection(Section):
    """Over how many ranks each axis is split."""

    layout: Text | None = harmless(None, 'short form of the sizes below, as in "tp=2,pp=2,ep=2"')
    tensor_model_parallel_size: Positive = harmless(1, "tp: shards of every matrix")
    pipeline_model_parallel_size: Positive = harmless(1, "pp: stages of the layer stack")
    virtual_pipeline_model_parallel_size: Positive | None = harmless(
        None, "vpp: chunks of layers in each stage (interleaved schedule)"
    )
    expert_model_parallel_size: Positive = harmless(1, "ep: shards of the set of experts")
    expert_tensor_parallel_size: Positive | None = harmless(
        None,
        "etp: shards of every expert's matrices; null: 1 (the default of Megatron-Core is tp). "
        "Expert matrices are small: splitting them costs communication and saves nothing that ep "
        "does not save",
    )
    context_parallel_size: Positive = harmless(1, "cp: shards of every sequence")
    sequence_parallel: bool | None = harmless(None, "split activations over tp; null: on if tp > 1")
    data_parallel_size: Positive | None = harmless(
        None, "dp: copies of the model; null: world size / (tp * pp * cp)"
    )
    ddp: dict[str, Any] = harmless({}, "fields of the installed DistributedDataParallelConfig")

    @field_validator("virtual_pipeline_model_parallel_size")
    @classmethod
    def _one_chunk_is_none(cls, value: int | None) -> int | None:
        """Turn 1 into None: one chunk for each stage means no interleaving."""
        return None if value == 1 else value

    def uses_sequence_parallel(self) -> bool:
        """The value of `sequence_parallel` with its default filled in."""
        if self.sequence_parallel is None:
            return self.tensor_model_parallel_size > 1
        return self.sequence_parallel


@dataclass(frozen=True)
class Layout:
    """A layout in short form.

    None means 1 for etp, no interleaving for vpp, and as many replicas as the world size allows for
    dp.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    dp: int | None = None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `tp=2,pp=2,ep=2`, in any order, also with spaces. Raises ConfigError with all
        problems."""
        sizes, problems = parse_sizes(text, "layout")
        if problems:
            raise ConfigError(problems)
        return cls(**sizes)

    def __str__(self) -> str:
        """Return text that `parse` reads back. The text has only the values that differ from the
        defaults. If no value differs, it is `tp=1`."""
        sizes = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {name: size for name, size in sizes.items() if size != getattr(Layout, name)}
        return ",".join(f"{name}={size}" for name, size in changed.items()) or "tp=1"

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks that share one copy of the attention weights: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def expert_parallel_size(self) -> int:
        """The number of ranks that share one copy of all experts: etp * ep * pp."""
        return (self.etp or 1) * self.ep * self.pp

    @property
    def world_size(self) -> int:
        """The number of ranks; the smallest possible number if dp is None."""
        if self.dp is not None:
            return self.model_parallel_size * self.dp
        return math.lcm(self.model_parallel_size, self.expert_parallel_size)


@dataclass(frozen=True)
class ResolvedParallel:
    """The parallel section with all sizes, for one world size."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    context_parallel_size: int
    data_parallel_size: int
    expert_data_parallel_size: int
    sequence_parallel: bool
    world_size: int

    @property
    def layout(self) -> Layout:
        """The layout in short form, with all sizes."""
        return Layout(**{short: getattr(self, key) for short, key in LAYOUT_KEYS.items()})

    def __str__(self) -> str:
        return str(self.layout)

    def group_sizes(self) -> dict[str, int | None]:
        """Return the keyword arguments for `initialize_model_parallel` and TransformerConfig."""
        return {key: getattr(self, key) for short, key in LAYOUT_KEYS.items() if short != "dp"}


def parse_sizes(text: str, key: str) -> tuple[dict[str, int], list[str]]:
    """Return the sizes in a layout text, and its problems as lines about `key`."""
    sizes: dict[str, int] = {}
    wrong: list[str] = []
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            wrong.append(f"{part!r} is not KEY=SIZE; allowed: tp=2,pp=2,ep=2")
        elif name not in LAYOUT_KEYS:
            wrong.append(f"unknown key {name}; {suggest(name, list(LAYOUT_KEYS))}")
        elif not _SIZE.fullmatch(number):
            wrong.append(f"{name} is {number!r:.40}; allowed: an integer from 1 to 999999999")
        elif name in sizes:
            wrong.append(f"{name} is given twice; give it once")
        else:
            sizes[name] = int(number)
    return sizes, [problem(key, text, each) for each in wrong]


def expand_layout(section: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fill the keys of a raw parallel section from its `layout`.

    If `layout` and a key give different values for a size, this is a problem: neither of the two
    takes precedence.
    """
    values = dict(section)
    text = values.get("layout")
    if not isinstance(text, str):
        return values, []  # there is no layout, or the schema refuses its type
    sizes, problems = parse_sizes(text, "parallel.layout")
    for name, size in sizes.items():
        key = LAYOUT_KEYS[name]
        other = values.get(key)
        if other is None:
            values[key] = size
        elif other != size:
            wrong = f"{name} is {size} here and parallel.{key} is {other!r}; set one, or both alike"
            problems.append(problem("parallel.layout", text, wrong))
    return values, problems


def resolve_parallel(config: RunConfig, world_size: int) -> ResolvedParallel:
    """Return all sizes of a configuration that passed `check_config` at this world size."""
    layout = config.layout()
    sizes = {key: getattr(layout, short) for short, key in LAYOUT_KEYS.items()}
    sizes["expert_tensor_parallel_size"] = layout.etp or 1
    sizes["data_parallel_size"], left = divmod(world_size, layout.model_parallel_size)
    expert_data_parallel_size, experts_left = divmod(world_size, layout.expert_parallel_size)
    assert not (left or experts_left), "check_config comes first"
    return ResolvedParallel(
        **sizes,
        expert_data_parallel_size=expert_data_parallel_size,
        sequence_parallel=config.parallel.uses_sequence_parallel(),
        world_size=world_size,
    )


def apply_layout(config: RunConfig, layout: Layout) -> Any:
    """Return the configuration with another layout; sequence parallelism has its default again."""
    sizes = {key: getattr(layout, short) for short, key in LAYOUT_KEYS.items()}
    sizes |= {"layout": None, "sequence_parallel": None}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=sizes)})
