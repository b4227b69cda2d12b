"""The gated delta rule in torch. The state of a head is a matrix that maps keys to values. At each
token the state decays, and then changes so that it maps the token's key closer to the token's
value.

For each token, with its query q, key k [keys], value v [values], decay g <= 0 and rate b:

    state = exp(g) * state                        [keys, values]
    state = state + b * k (v - k @ state)
    output = q @ state / sqrt(keys)

The rule is computed for chunks of a sequence. Megatron-Core's function in torch solves each chunk
row by row. The function of this file solves each chunk as a triangular system, which is several
times faster on a CPU. Inputs in fp64 are computed in fp64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64


def normalized(heads: Tensor) -> Tensor:
    """Queries or keys [..., dim], scaled to vectors of length 1."""
    wide = widened(heads)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def widened(states: Tensor) -> Tensor:
    """The states in fp32, or in fp64 if they are fp64. Sums over a whole sequence need this
    precision."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule to whole sequences, from a state of zeros.

    query, key [sequences, length, heads, keys] of length 1; value [.., .., .., values]; decay, rate
    [sequences, length, heads]. Returns the outputs [sequences, length, heads, values], and the
    states after the last token [sequences, heads, keys, values]. A token with decay and rate 0
    leaves the state as it is.
    """
    if query.is_meta:
        return _Kernels.apply(query, key, value, decay, rate)
    length = query.shape[1]
    query = widened(query) * query.shape[-1] ** -0.5
    query, key, value = (_chunks(widened(each)) for each in (query, key, value))
    decay, rate = (_chunks(widened(each).unsqueeze(-1)) for each in (decay, rate))
    # [sequences, heads, chunks, CHUNK, 1]: the decay since the chunk began
    decay = decay.cumsum(dim=-2)
    # decay from each token to each later token of its chunk, [..., later, earlier]
    between = (decay - decay.transpose(-1, -2)).tril().exp().tril()
    # The change of the state at a token depends on the changes at earlier tokens of the chunk.
    # These equations are a triangular system. It is solved for two right-hand sides: the values,
    # and the factor of the state before the chunk.
    system = (rate * key @ key.transpose(-1, -2) * between).tril(-1)
    sides = torch.cat((rate * value, rate * key * decay.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    from_values, to_state = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    within = query @ key.transpose(-1, -2) * between
    query = query * decay.exp()
    last = decay[..., -1:, :]
    key = key * (last - decay).exp()
    last = last.exp()
    state = key.new_zeros((*key.shape[:2], key.shape[-1], value.shape[-1]))
    outputs = []
    for chunk in range(key.shape[2]):
        written = from_values[:, :, chunk] - to_state[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + within[:, :, chunk] @ written)
        state = state * last[:, :, chunk] + key[:, :, chunk].transpose(-1, -2) @ written
    joined = torch.stack(outputs, dim=2).flatten(2, 3)  # [sequences, heads, length, values]
    return joined[:, :, :length].transpose(1, 2), state


def _chunks(states: Tensor) -> Tensor:
    """[sequences, length, heads, dim] -> [sequences, heads, chunks, CHUNK, dim], padded with zeros
    at the end."""
    states = F.pad(states, (0, 0, 0, 0, 0, -states.shape[1] % CHUNK))
    return states.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


def delta_step(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor
) -> Tensor:
    """Apply the rule to one token of each sequence. Changes `state` [sequences, heads, keys,
    values] in place.

    query, key [sequences, heads, keys], value [.., .., values], decay, rate [sequences, heads].
    Returns the outputs [sequences, heads, values].
    """
    query, key, value, rate = (widened(each) for each in (query, key, value, rate))
    state.mul_(decay.exp()[..., None, None])
    known = (key.unsqueeze(-2) @ state).squeeze(-2)
    state.add_(key.unsqueeze(-1) * ((value - known) * rate.unsqueeze(-1)).unsqueeze(-2))
    return (query.unsqueeze(-2) @ state).squeeze(-2) * query.shape[-1] ** -0.5


class _Kernels(torch.autograd.Function):
    """Allocates the memory that fla's kernels would take. This is used on the meta device, where
    memory is estimated. The kernels save the solved systems of all chunks for the backward pass.
    Each pass also allocates the states between the chunks, and frees them at its end."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor
    ) -> tuple[Tensor, Tensor]:
        sequences, length, heads, keys = key.shape
        systems = value.new_empty((sequences, length, heads, CHUNK))
        ctx.save_for_backward(query, key, value, decay, rate, systems)
        ctx.states = sequences, -(-length // CHUNK), heads, keys, value.shape[-1]
        states = value.new_empty(ctx.states)
        return torch.empty_like(value), states[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors[:5]
        # the states and their gradients
        states = [gradient.new_empty(ctx.states) for _ in range(2)]
        gradients = tuple(torch.empty_like(each) for each in inputs)
        del states
        return gradients
