"""The gated delta net of Megatron-Core, for packed sequences and decoding on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor

from gspo_megatron.models.attention import KeyValueCache
from gspo_megatron.models.core_attention import plan_of, take_rows
from gspo_megatron.models.delta_rule import delta_rule, delta_step, normalized, widened
from gspo_megatron.platform.megatron_fixes import has_delta_rule_kernels

# Parameters that stay fp32 in a bf16 model, because small errors of the decay grow along a
# sequence.
_WIDE = ("A_log", "dt_bias")


class CachedDeltaNet(GatedDeltaNet):
    """Megatron-Core's GatedDeltaNet, which decodes while a cache is attached.

    The stock module needs the package fla, supports packed sequences only from Megatron-Core 0.19
    on, and keeps no states for decoding. If fla can compute packed sequences, the stock forward
    pass runs. Otherwise the two projections get the packed tokens as they are, and the computation
    between the projections gets sequences of similar lengths as padded rows. Padding comes after
    the tokens of a sequence. So padding changes no result, because no token sees later tokens.
    """

    key_value_cache: KeyValueCache | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in _WIDE:
            parameter = getattr(self, name)
            parameter.data = widened(parameter.data)

    def _setup_variant_attrs(self) -> None:
        """Use `delta_rule` if Megatron-Core 0.19 finds no kernel. This is the case if fla is not
        installed."""
        super()._setup_variant_attrs()
        self.gated_delta_rule = self.gated_delta_rule or delta_rule

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> CachedDeltaNet:
        """Keep the parameters in _WIDE in fp32 when Float16Module turns all parameters into
        bf16."""
        before = {name: getattr(self, name).data for name in _WIDE}
        super()._apply(fn, *args, **kwargs)
        for name, values in before.items():
            parameter = getattr(self, name)
            if parameter.element_size() < values.element_size():
                parameter.data = values.to(parameter.device)
        return self

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[length, sequences, hidden] or packed [tokens, 1, hidden] -> the same shape, and no bias.
        Under sequence parallelism these are only the tokens of this rank."""
        cache, packed = self.key_value_cache, packed_seq_params
        if cache is None and has_delta_rule_kernels(hidden_states, self.config):
            return super().forward(hidden_states, *args, packed_seq_params=packed, **kwargs)
        mixed, _ = self.in_proj(hidden_states)
        mixed = mixed.transpose(0, 1)  # [sequences, length, channels]
        if cache is not None:
            out = self._prefilled(mixed, cache) if cache.is_prefill else self._decoded(mixed, cache)
        elif packed is not None:
            out = self._packed(mixed[0], packed).unsqueeze(0)
        else:
            out, _ = self._mix(mixed)
        return self.out_proj(out.transpose(0, 1).contiguous())

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that decoding keeps for one sequence."""
        channels = (2 * self.qk_dim + self.v_dim) // self.tp_size
        window = (self.conv_kernel_dim - 1) * channels * self.conv1d.weight.element_size()
        state = self.num_v_heads_local_tp * self.key_head_dim * self.value_head_dim
        return window + state * self.A_log.element_size()

    def _packed(self, mixed: Tensor, packed: PackedSeqParams) -> Tensor:
        """[tokens, channels] -> [tokens, values of all heads]."""
        if mixed.is_meta:  # for estimates: fla's kernels take packed sequences and need no rows
            return self._mix(mixed.unsqueeze(0))[0][0]
        plan = plan_of(packed, self.pg_collection.cp, mixed.device)
        if plan.whole is not None:
            return self._mix(mixed.unflatten(0, plan.whole))[0].flatten(0, 1)
        assert plan.restore is not None
        outputs = [self._mix(take_rows(mixed, b.query_rows))[0].flatten(0, 1) for b in plan.blocks]
        return take_rows(torch.cat(outputs), plan.restore)

    def _mix(self, mixed: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Compute everything between the two projections: [sequences, length, channels] ->
        [sequences, length, values of all heads]. lengths [sequences]: if the sequences are padded,
        their lengths without padding. With lengths, also return the states after the last tokens,
        in the form that the cache keeps; otherwise None."""
        qkv, gate, decay, rate = self._cut(mixed)
        taps = self.conv_kernel_dim - 1
        qkv = F.pad(qkv, (0, 0, taps, 0))  # zeros before each sequence
        windows = qkv.unfold(1, taps + 1, 1)  # [sequences, length, channels, taps + 1], a view
        heads = self._heads(self._convolved(windows))
        if lengths is not None:
            is_padding = torch.arange(mixed.shape[1], device=mixed.device) >= lengths[:, None]
            decay, rate = (each.masked_fill(is_padding[..., None], 0.0) for each in (decay, rate))
        out, state = delta_rule(*heads, decay, rate)
        states = None
        if lengths is not None:
            rows = lengths[:, None] + torch.arange(taps, device=mixed.device)
            last = qkv.take_along_dim(rows[..., None], dim=1)
            states = last.unsqueeze(1), state
        return self._gated(out, gate), states

    def _cut(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the convolution, the output gate, and each head's decay and rate."""
        keys, values = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        heads = self.num_v_heads_local_tp
        qkv, gate, rate, decay = mixed.split((2 * keys + values, values, heads, heads), dim=-1)
        decay = -widened(self.A_log).exp() * F.softplus(widened(decay) + self.dt_bias)
        return qkv, gate, decay, widened(rate).sigmoid()

    def _convolved(self, windows: Tensor) -> Tensor:
        """[..., channels, taps + 1] -> [..., channels]; each channel has its own weights."""
        taps = self.conv1d.weight[:, 0].unbind(-1)
        out = sum(part * weight for part, weight in zip(windows.unbind(-1), taps, strict=True))
        return self.act_fn(out if self.conv1d.bias is None else out + self.conv1d.bias)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., channels] -> query, key, value [..., heads, dim]; several value heads share one key
        head."""
        keys, values = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        query, key, value = qkv.split((keys, keys, values), dim=-1)
        shared = self.num_value_heads // self.num_key_heads
        query, key = (
            normalized(each.unflatten(-1, (-1, self.key_head_dim))).repeat_interleave(shared, -2)
            for each in (query, key)
        )
        return query, key, value.unflatten(-1, (-1, self.value_head_dim))

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """[..., heads, dim] -> [..., heads * dim] of the gate's dtype."""
        normed = self.out_norm(out.to(gate.dtype))
        gates = self.act_fn(widened(gate)).unflatten(-1, normed.shape[-2:])
        return (normed * gates).to(gate.dtype).flatten(-2)

    def _prefilled(self, mixed: Tensor, cache: KeyValueCache) -> Tensor:
        out, states = self._mix(mixed, cache.prompt_lengths(len(mixed), mixed.shape[1]))
        cache.remember(self.layer_number, states)
        return out

    def _decoded(self, mixed: Tensor, cache: KeyValueCache) -> Tensor:
        """One token of each sequence, [sequences, 1, channels] -> [.., 1, values of all heads]."""
        qkv, gate, decay, rate = self._cut(mixed[:, 0])
        taps, heads = self.conv_kernel_dim - 1, self.num_v_heads_local_tp
        sizes = (1, taps, qkv.shape[-1]), (heads, self.key_head_dim, self.value_head_dim)
        before, state = cache.recurrent(self.layer_number, sizes, (qkv.dtype, decay.dtype))
        window = torch.cat((before[:, 0], qkv.unsqueeze(1)), dim=1)  # [sequences, taps + 1, ...]
        before[:, 0] = window[:, 1:]
        heads = self._heads(self._convolved(window.transpose(1, 2)))
        out = delta_step(state, *heads, decay, rate)
        return self._gated(out, gate).unsqueeze(1)
