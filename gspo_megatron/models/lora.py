"""LoRA: small trained matrices beside the frozen ones of Megatron-Core's linear layers.

With an adapter, a layer that computed W x computes W x + scale * B (A x). In a column-parallel
layer, B is divided by rows over the tensor-parallel ranks, and every rank has the whole A. In a
row-parallel layer, A is divided by columns, and every rank has the whole B. The ranks exchange only
tensors [tokens, rank of the adapter]. Only the class of a linear layer decides how its adapter is
divided. So a new kind of attention or MLP can have adapters, too, if `kind_of_layer` knows the
classes of its linear layers.

An adapter is a module beside its layer. The layer is unchanged: a forward hook adds the output of
the adapter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gspo_megatron.errors import UserError
from gspo_megatron.families.adapter_map import Adapted, Matrix, matrices_of, merge
from gspo_megatron.families.weight_map import WeightMap, native_name
from gspo_megatron.models.experts import GroupedExperts, grouped_linear
from gspo_megatron.models.norms import sum_gradients_over_tp
from gspo_megatron.models.shards import Shard, parameter_shards

COLUMN, ROW, COPIED = "column", "row", "copied"  # how a layer's weight is divided over TP ranks


@dataclass
class Lora:
    """The adapters of a policy on this rank."""

    rank: int
    scale: float
    adapted: Mapping[str, Adapted]
    # Whether B was zero at the start, so that the policy at the start was equal to its base. The
    # value is False if adapters were loaded.
    starts_as_base: bool = True
    base: Mapping[str, str] | None = None  # the frozen model's path and fingerprint
    enabled: bool = True
    pairs: dict[str, Pair] = field(default_factory=dict)  # by the matrix's name in HF files
    # Inside `unchanged`: the joined matrices of adapters, by (adapter, name). Outside: None.
    joined: dict[tuple[Adapter, str], Tensor] | None = None

    @contextlib.contextmanager
    def off(self) -> Generator[None]:
        """Switch the adapters off while the context lasts. Then the policy computes the same as its
        base, bit for bit."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    @contextlib.contextmanager
    def unchanged(self) -> Generator[None]:
        """Join the matrices of each adapter only once while the context lasts, not at each forward
        pass. Inside the context, the adapters must not change and no gradients are computed. A pass
        in decoding has few tokens, so joining would take longer than the products of the adapters.
        """
        self.joined = {}
        try:
            yield
        finally:
            self.joined = None

    def once(self, adapter: Adapter, name: str, join: Callable[[], Tensor]) -> Tensor:
        """Return `join()`, or its earlier result inside `unchanged`."""
        if self.joined is None:
            return join()
        if (adapter, name) not in self.joined:
            self.joined[adapter, name] = join()
        return self.joined[adapter, name]

    @torch.no_grad()
    def merged(self, data: Tensor, name: str, at: Sequence[int]) -> Tensor:
        """Return a block [rows, columns] of the matrix `name` with its adapter added. The block
        begins at row and column `at`. The base is not changed, so rounding errors do not accumulate
        over the weights versions."""
        pair = self.pairs.get(name)
        if pair is None:
            return data
        row, column = at[0] - pair.row, at[1] - pair.column
        a = pair.matrix("a")[:, column : column + data.shape[1]]
        b = pair.matrix("b")[row : row + data.shape[0]]
        return merge(data, a, b, self.scale)


class AdapterPart(torch.nn.Module):
    """A and B of one matrix. For experts, A and B have one more axis, with one entry for each local
    expert."""

    def __init__(self, a: torch.nn.Parameter, b: torch.nn.Parameter) -> None:
        super().__init__()
        self.a, self.b = a, b


@dataclass(frozen=True)
class Pair:
    """Where A and B of one matrix are on this rank."""

    part: AdapterPart
    expert: int | None  # the expert's number on this rank; None: not a matrix of an expert
    row: int  # the index, in the whole B, of this rank's first row of B
    column: int  # the index, in the whole A, of this rank's first column of A

    def matrix(self, name: str) -> Tensor:
        """Return A [rank, columns] if `name` is "a", B [rows, rank] if it is "b"."""
        found: Tensor = getattr(self.part, name).detach()
        return found if self.expert is None else found[self.expert]


class Adapter(torch.nn.Module):
    """The adapters of one module, with the place of their tensors in the whole model."""

    layer: Any

    def __init__(self, lora: Lora, layer: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.lora = lora
        # The layer does not become a submodule, because the layer is a module of the model already.
        vars(self)["layer"] = layer
        self._places: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {}

    def add_matrix(
        self,
        matrix: Matrix,
        kind: str,
        like: Tensor,
        rows: tuple[int, int],
        columns: tuple[int, int],
        ranks: tuple[int, int],
        experts: tuple[int, int, int] | None = None,
    ) -> AdapterPart:
        """Add A and B of one matrix, or of the same matrix of all local experts.

        kind: how the ranks divide the matrix; like: a tensor of the dtype and device to use; rows:
        the first row of the matrix on this rank, and the number of its rows on this rank; columns:
        the same for columns; ranks: this rank's numbers in the group of ranks that divide the
        matrix, and in the data-parallel group; experts: the number of all experts, the first local
        expert, and the number of local experts."""
        rank = self.lora.rank
        every, first, local = ((), (), ()) if experts is None else ((each,) for each in experts)
        a, b = like.new_zeros(*local, rank, columns[1]), like.new_zeros(*local, rows[1], rank)
        part = AdapterPart(torch.nn.Parameter(a), torch.nn.Parameter(b))
        self.add_module(matrix.leaf, part)
        cut, whole = (0, 0, ranks[1]), (0, *ranks)
        self._places[f"{matrix.leaf}.a"] = (
            (*every, rank, matrix.columns),
            (*first, 0, columns[0]),
            cut if kind == ROW else whole,
        )
        self._places[f"{matrix.leaf}.b"] = (
            (*every, matrix.rows, rank),
            (*first, rows[0], 0),
            cut if kind == COLUMN else whole,
        )
        if experts is None:
            self.lora.pairs[matrix.name] = Pair(part, None, rows[0], columns[0])
        return part

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Describe each tensor as a piece of its global tensor, as Megatron-Core's modules do."""
        assert not sharded_offsets, "layers that differ are not stacked"
        found = {}
        for name, parameter in self.named_parameters():
            shape, offset, replica = self._places[name]
            found[prefix + name] = ShardedTensor(
                key=prefix + name,
                data=parameter,
                dtype=parameter.dtype,
                local_shape=tuple(parameter.shape),
                global_shape=shape,
                global_offset=offset,
                axis_fragmentations=None,
                replica_id=replica,
            )
        return found


def _joined_b(parts: Sequence[AdapterPart], order: Tensor | None) -> Tensor:
    """Join the B matrices [..., out, rank] to one block-diagonal matrix, whose columns have the
    same order as the rows of the joined A matrices. Its rows are put in the order of the layer's
    rows. If a matrix has no adapter, its rows are zeros."""
    count, rank = len(parts), parts[0].b.shape[-1]
    joined: Tensor = parts[0].b
    if count > 1:
        padded = [F.pad(p.b, (n * rank, (count - 1 - n) * rank)) for n, p in enumerate(parts)]
        joined = torch.cat(padded, dim=-2)
    return joined if order is None else F.pad(joined, (0, 0, 0, 1)).index_select(-2, order)


class LinearAdapter(Adapter):
    """The adapters of a linear layer."""

    order: Tensor | None

    def __init__(self, lora: Lora, layer: torch.nn.Module, kind: str) -> None:
        super().__init__(lora, layer)
        self.kind = kind
        self.parts: list[AdapterPart] = []
        # [local rows]: for each row of the layer's weight, the number of its row in the joined B
        # matrices
        self.register_buffer("order", None, persistent=False)

    def forward(self, states: Tensor, output: Tensor) -> Tensor:
        """Return the layer's output [..., out] plus the output of the adapters. states: the layer's
        input [..., in]."""
        normed = _normed(self.layer, states)
        a = self.lora.once(self, "a", lambda: torch.cat([part.a for part in self.parts]))
        up = self.lora.once(self, "b", lambda: _joined_b(self.parts, self.order))
        down = F.linear(normed, a.to(normed.dtype))
        down, up = self._exchanged(down).to(output.dtype), up.to(output.dtype)
        sum_ = torch.addmm(
            output.flatten(0, -2), down.flatten(0, -2), up.t(), alpha=self.lora.scale
        )
        return sum_.view(output.shape)

    def _exchanged(self, down: Tensor) -> Tensor:
        """Return A x [tokens, ..., rank] after the exchange with the other tensor-parallel
        ranks."""
        layer = self.layer
        # Megatron-Core exchanges the tokens of some layers itself: those of experts, and those of
        # shared experts that overlap with messages (Transformer Engine's, without parallel_mode).
        has_own = getattr(layer, "explicit_expert_comm", False)
        if self.kind == COPIED or has_own or getattr(layer, "parallel_mode", "") is None:
            return down
        group = tensor_parallel_group(layer)
        if group.size() == 1:
            return down
        if self.kind == COLUMN:
            if layer.sequence_parallel:
                return gather_from_sequence_parallel_region(
                    down, tensor_parallel_output_grad=True, group=group
                )
            return copy_to_tensor_model_parallel_region(down, group=group)
        if layer.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(down, group=group)
        return reduce_from_tensor_model_parallel_region(down, group=group)


def _normed(layer: Any, states: Tensor) -> Tensor:
    """Return the input of the layer's matrix. A layer of Transformer Engine may contain the norm
    before its matrix. Then this function computes the norm a second time."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return states
    scale = weight.float() + float(getattr(layer, "zero_centered_gamma", False))
    bias, size = getattr(layer, "layer_norm_bias", None), (states.shape[-1],)
    if getattr(layer, "normalization", "RMSNorm") == "LayerNorm":
        bias = None if bias is None else bias.float()
        return F.layer_norm(states.float(), size, scale, bias, layer.eps).to(states.dtype)
    return F.rms_norm(states.float(), size, scale, layer.eps).to(states.dtype)


class HeadAdapter(Adapter):
    """The adapter of the output layer. The log-prob head, which multiplies the hidden states by
    that layer's weight (models/policy.py), computes with the adapter, too."""

    def __init__(self, lora: Lora, layer: torch.nn.Module, shard: Shard, matrix: Matrix) -> None:
        super().__init__(lora, layer)
        weight, ranks = shard.parameter, _ranks(tensor_parallel_group(layer))
        rows, columns = (shard.offset[0], len(weight)), (0, matrix.columns)
        padded = replace(matrix, rows=shard.global_shape[0])  # rows for padding of the vocabulary
        self.part = self.add_matrix(padded, COLUMN, weight, rows, columns, ranks)
        set_tensor_model_parallel_attributes(self.part.b, is_parallel=True, dim=0, stride=1)

    def extended(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Append the adapter's columns to hidden [rows, in] and weight [vocabulary / TP, in], so
        that the product of the two results is the logits with the adapter. The product of B and A
        is not added to the weight, because rounding of the sum could lose small products."""
        return (
            torch.cat([hidden, self.down(hidden)], dim=1),
            torch.cat([weight, self.part.b.to(weight.dtype)], dim=1),
        )

    def down(self, hidden: Tensor) -> Tensor:
        """Return the product of A and `hidden`, [rows, rank], which is then multiplied by B."""
        a: Tensor = self.part.a
        group = tensor_parallel_group(self.layer)
        if group.size() > 1:  # sum the gradients from all parts of the vocabulary
            a = copy_to_tensor_model_parallel_region(a, group=group)
        return F.linear(hidden, a.to(hidden.dtype)) * self.lora.scale


class ExpertsAdapter(Adapter):
    """The adapters of all experts of a rank. The adapters need no communication of their own: the
    dispatcher gives every expert-tensor-parallel rank the tokens of all expert-tensor-parallel
    ranks, and sums their outputs."""

    def __init__(self, lora: Lora) -> None:
        super().__init__(lora)
        self.parts: dict[str, list[AdapterPart]] = {"1": [], "2": []}  # by the number of the weight
        for number in self.parts:  # for each weight, a buffer like LinearAdapter.order
            self.register_buffer(f"order{number}", None, persistent=False)

    def add(
        self, number: str, output: Tensor, states: Tensor, counts: Tensor, ends: Tensor
    ) -> Tensor:
        """Return `output` plus the output of the adapters. The experts' weight1 or weight2
        (`number`) computed `output` [rows, out] from `states` [rows, in]. counts, ends: as in
        grouped_linear."""
        parts = self.parts[number]
        if not parts or not self.lora.enabled:
            return output
        order = getattr(self, f"order{number}")
        a = self.lora.once(self, f"a{number}", lambda: torch.cat([part.a for part in parts], 1))
        up = self.lora.once(self, f"b{number}", lambda: _joined_b(parts, order))
        down = grouped_linear(states, a, counts, ends)
        return torch.add(output, grouped_linear(down, up, counts, ends), alpha=self.lora.scale)


def tensor_parallel_group(layer: Any) -> dist.ProcessGroup:
    """The group of ranks over which a layer's weight is divided."""
    group = getattr(layer, "tp_group", None)
    return parallel_state.get_tensor_model_parallel_group() if group is None else group


def kind_of_layer(module: torch.nn.Module) -> str | None:
    """Return how a linear layer is divided over TP ranks; None for other modules. The class of the
    layer decides this, also for layers of Transformer Engine such as TERowParallelLinear.
    Megatron-Core clears their `parallel_mode` for shared experts that overlap with messages."""
    kinds = [kind.__name__ for kind in type(module).__mro__]
    for end, found in (("ColumnParallelLinear", COLUMN), ("RowParallelLinear", ROW)):
        if any(kind.endswith(end) for kind in kinds):
            return found
    is_copied = "ReplicatedLinear" in kinds or "Router" in kinds
    is_copied |= hasattr(module, "parallel_mode") and hasattr(module, "weight")
    return COPIED if is_copied else None


def attach_adapters(model: Any, lora: Lora, weights: WeightMap) -> None:
    """Freeze a model chunk and put adapters beside its layers."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    shards: dict[int, list[Shard]] = {}
    for shard in parameter_shards(model):
        shards.setdefault(id(shard.parameter), []).append(shard)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, leaf = modules[name.rpartition(".")[0]], name.rpartition(".")[2]
        if name.endswith(".mlp.experts"):
            _attach_to_experts(module, lora, weights, shards)
            continue
        kind = kind_of_layer(module)
        weight = getattr(module, "weight", None)
        if kind is None or weight is None or id(weight) not in shards:
            continue
        own = shards[id(weight)]
        adapted = lora.adapted.get(native_name(own[0].name))
        if adapted is not None and name == "output_layer":
            vars(module)["lora"] = HeadAdapter(lora, module, own[0], adapted.matrices[0])
            model.add_module("output_layer_lora", module.lora)
        elif adapted is not None:
            adapter = _linear_adapter(module, kind, own, adapted, weights, lora, model.config)
            parent.add_module(f"{leaf}_lora", adapter)
            _attach(module, adapter)
    if model.pre_process:
        model.embedding.register_forward_hook(_start_graph)


def _attach(module: Any, adapter: LinearAdapter) -> None:
    vars(module)["lora"] = adapter
    if isinstance(module, Router):
        logits_of = module.gating

        def gating(states: Tensor) -> Tensor:
            logits = logits_of(states)
            return adapter(states.to(logits.dtype), logits) if adapter.lora.enabled else logits

        module.gating = gating
        return

    def add(_: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> Any:
        if not adapter.lora.enabled:
            return output
        return adapter(inputs[0], output[0]), *output[1:]

    module.register_forward_hook(add)


def _start_graph(_module: Any, _inputs: Any, output: Tensor) -> None:
    """Make the output of a frozen embedding require a gradient, because recomputed layers and
    pipeline stages need an input that requires one."""
    if torch.is_grad_enabled() and output.is_leaf:
        output.requires_grad_()


def _linear_adapter(
    module: Any,
    kind: str,
    shards: Sequence[Shard],
    adapted: Adapted,
    weights: WeightMap,
    lora: Lora,
    config: TransformerConfig,
) -> LinearAdapter:
    adapter = LinearAdapter(lora, module, kind)
    weight, group = module.weight, tensor_parallel_group(module)
    ranks, chosen = _ranks(group), {matrix.name: matrix for matrix in adapted.matrices}
    places: dict[str, list[tuple[int, int, int, int, int]]] = {}
    for shard in shards:
        first = (shard.data.storage_offset() - weight.storage_offset()) // weight.shape[1]
        for box in weights[shard.name].cut(shard.slices):
            row, column = box.source
            place = (row, column, first + box.target[0], box.size[0], box.size[1])
            places.setdefault(box.name, []).append(place)
    order = torch.full((weight.shape[0],), -1, dtype=torch.long)
    used = 0
    for name, boxes in sorted(places.items(), key=lambda item: min(p[2] for p in item[1])):
        matrix = chosen.get(name)
        if matrix is None:
            continue
        boxes.sort()
        row, column, _, _, columns = boxes[0]
        rows = 0
        for start, _, local, count, _ in boxes:
            if start != row + rows:
                raise UserError(
                    f"model.lora: the rows of {name} on a rank are not contiguous; allowed: "
                    "tensor_model_parallel_size that divides the number of query groups"
                )
            order[local : local + count] = torch.arange(used + rows, used + rows + count)
            rows += count
        used += rows
        part = adapter.add_matrix(matrix, kind, weight, (row, rows), (column, columns), ranks)
        adapter.parts.append(part)
        for tensor, axis in ((part.a, 1), (part.b, 0)):
            if kind == (COLUMN, ROW)[axis]:
                set_tensor_model_parallel_attributes(tensor, is_parallel=True, dim=axis, stride=1)
            else:  # under sequence parallelism each rank has the gradient of its own tokens only
                sum_gradients_over_tp([tensor], config)
    _set_order(adapter, "order", order, used)
    return adapter


def _set_order(adapter: Adapter, name: str, order: Tensor, used: int) -> None:
    """Keep `order` in the adapter, unless it is the identity. order: see LinearAdapter, but with -1
    for rows without an adapter; used: the number of rows of the joined B matrices."""
    order[order < 0] = used
    if not torch.equal(order, torch.arange(len(order))):
        setattr(adapter, name, order.to(torch.cuda.current_device()))


def _ranks(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return this rank's numbers in the TP group `group` and in the DP group of a dense weight."""
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group.rank(), data.rank()


def _attach_to_experts(
    experts: Any, lora: Lora, weights: WeightMap, shards: Mapping[int, list[Shard]]
) -> None:
    """Attach adapters to all local experts at once, on either backend."""
    like, found = None, {}
    for parameter in experts.parameters():
        for shard in shards.get(id(parameter), ()):
            like, name = parameter, native_name(shard.name)
            if name in lora.adapted:
                number, index = re.findall(r"\.weight([12])\[(\d+)\]$", name)[0]
                found[number, int(index)] = name
    if not found:
        return
    adapter = ExpertsAdapter(lora)
    for number in adapter.parts:
        indices = sorted(index for each, index in found if each == number)
        if indices:
            names = [found[number, index] for index in indices]
            _add_expert_parts(adapter, number, indices[0], names, weights, like)
    experts.lora = adapter
    if not isinstance(experts, GroupedExperts):  # the experts are those of Transformer Engine
        for number in adapter.parts:
            layer = getattr(experts, f"linear_fc{number}")
            layer.register_forward_hook(functools.partial(_add_to_grouped, adapter, number))


def _add_to_grouped(
    adapter: ExpertsAdapter, number: str, _: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]
) -> tuple[Any, ...]:
    """A forward hook of a grouped linear layer, whose inputs are the states and the number of
    tokens of each expert."""
    counts = torch.as_tensor(inputs[1])
    ends = counts.cumsum(0, dtype=torch.int32).to(inputs[0].device, non_blocking=True)
    return adapter.add(number, output[0], inputs[0], counts, ends), *output[1:]


def _add_expert_parts(
    adapter: ExpertsAdapter,
    number: str,
    first: int,
    names: Sequence[str],
    weights: WeightMap,
    like: Any,
) -> None:
    """Add the adapters of one weight (1 or 2) of all local experts; first: the number of the first
    local expert in the model."""
    etp = parallel_state.get_expert_tensor_parallel_group()
    ranks = etp.rank(), parallel_state.get_expert_data_parallel_group().rank()
    lora = adapter.lora
    weight = names[0].rpartition("[")[0]
    total = next(n for n in itertools.count() if f"{weight}[{n}]" not in weights.recipes)
    chosen = {matrix.leaf for matrix in lora.adapted[names[0]].matrices}
    kind = COLUMN if number == "1" else ROW
    order, used = [], 0
    for matrix in matrices_of(weights.recipes[names[0]]):
        rows, columns = matrix.rows, matrix.columns
        if kind == COLUMN:
            rows //= etp.size()
        else:
            columns //= etp.size()
        if matrix.leaf not in chosen:
            order.append(torch.full((rows,), -1))
            continue
        order.append(torch.arange(used, used + rows))
        used += rows
        row, column = (etp.rank() * rows, 0) if kind == COLUMN else (0, etp.rank() * columns)
        experts = total, first, len(names)
        place = (row, rows), (column, columns)
        part = adapter.add_matrix(matrix, kind, like, *place, ranks, experts)
        for tensor, is_cut in ((part.a, kind == ROW), (part.b, kind == COLUMN)):
            # The gradient norm counts a parameter with this mark on every rank that has the
            # parameter.
            set_tensor_model_parallel_attributes(tensor, is_parallel=True, dim=2, stride=1)
            if not is_cut:
                vars(tensor)["sum_over_expert_tp"] = True
                if etp.rank() > 0:  # this rank has a copy, which the gradient norm must not count
                    vars(tensor)["shared"] = True
        adapter.parts[number].append(part)
        for expert, name in enumerate(names):
            for each in lora.adapted[name].matrices:
                if each.leaf == matrix.leaf:
                    lora.pairs[each.name] = Pair(part, expert, row, column)
    _set_order(adapter, f"order{number}", torch.cat(order), used)


def sum_expert_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Sum gradients of the experts' adapters over the expert-tensor-parallel ranks. Only matrices
    that are whole on each of these ranks need this sum, because each rank computes only a part of
    their gradient. Call this function after the data-parallel sums."""
    group = parallel_state.get_expert_tensor_parallel_group()
    if group.size() == 1:
        return
    parameters: list[Any] = [parameter for chunk in chunks for parameter in chunk.parameters()]
    grads = [p.main_grad for p in parameters if getattr(p, "sum_over_expert_tp", False)]
    if grads:
        joined = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(joined, group=group)
        for grad, summed in zip(grads, joined.split([grad.numel() for grad in grads])):
            grad.copy_(summed.view_as(grad))
