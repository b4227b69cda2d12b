"""Rollouts by the training model itself, on whatever layout it is sharded.

There is no second copy of the weights. Data-parallel and context-parallel ranks draw different
responses; the ranks of a model replica (TP x PP) work on the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from gspo_megatron.models.attention import KeyValueCache, decoding, rotary_frequencies
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.groups import model_replica
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.sampling import (
    RouterRandomness,
    StopStrings,
    draw,
    uniforms,
    with_special_tokens,
)
from gspo_megatron.routing.noise import noisy_routers
from gspo_megatron.routing.replay import no_routes, recorded
from gspo_megatron.types import RolloutBatch

# How many tokens are drawn between two checks of which sequences have ended. A check synchronises
# with the device (and, with experts over several ranks, runs a collective); a token drawn in vain
# costs one decoding step.
CHECK_INTERVAL = 4


@dataclass
class _Responses:
    """The responses of one batch as they grow; rows are the batch's sequences. What stands after
    the end of a response is void."""

    tokens: Tensor  # [sequences, max_tokens] int64
    logprobs: Tensor  # [sequences, max_tokens] float32
    lengths: Tensor  # [sequences] int64, with the end token; max_tokens until a response ends
    ended: Tensor  # [sequences] bool
    # [sequences, positions, MoE layers of this rank, k], with the prompts; where they are recorded
    routes: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, max_tokens: int, device: torch.device) -> _Responses:
        return cls(
            tokens=torch.zeros((rows, max_tokens), dtype=torch.long, device=device),
            logprobs=torch.zeros((rows, max_tokens), device=device),
            lengths=torch.full((rows,), max_tokens, device=device),
            ended=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def first(self, count: int) -> _Responses:
        """The first `count` sequences."""
        columns = {k: v if v is None else v[:count] for k, v in vars(self).items()}
        return _Responses(**columns)


@dataclass
class _Draws:
    """What decides the tokens of one batch, besides the weights and the prompts."""

    sampling: Sampling
    uniforms: Tensor  # [sequences, max_tokens] float64
    router_randomness: RouterRandomness | None  # None: no noise on the routers
    end_ids: Tensor  # [end ids] int64, the tokens that end a response
    stop_strings: list[StopStrings]


class MegatronEngine:
    """The rollout engine `megatron`."""

    def __init__(
        self,
        policy: Policy,
        *,
        pad_id: int,
        eos_id: int | Sequence[int],
        batch_size: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        special_tokens: Mapping[str, int] | None = None,
        record_routes: bool = False,
        router_noise: float = 0.0,
    ) -> None:
        """eos_id: one or several; batch_size: responses decoded together on a rank, in whole groups
        (None: all at once); decode: token ids to text, needed for stops; special_tokens: their ids
        by name, for stops that name one; record_routes: return the experts of every token with the
        responses; router_noise: its standard deviation on the routers' scores while sampling;
        greedy decoding has none, so that an evaluation measures the policy itself."""
        self.policy = policy
        self.pad_id = pad_id
        self.eos_ids = (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)
        self.batch_size = batch_size
        self.decode, self.special_tokens = decode, special_tokens or {}
        self.record_routes = record_routes
        self.router_noise = router_noise
        self.device = torch.device(torch.cuda.current_device())
        self.pipeline = _PipelineForward(policy)
        self.replica, self.source = model_replica()
        modules = (module for model in policy.models for module in model.modules())
        self.num_routers = sum(isinstance(module, TopKRouter) for module in modules)
        # Are experts spread over ranks that work on different responses? Then all these ranks must
        # run the same number of forward passes.
        tp = parallel_state.get_tensor_model_parallel_world_size()
        etp = parallel_state.get_expert_tensor_parallel_world_size()
        self.lockstep = parallel_state.get_expert_model_parallel_world_size() > 1 or tp % etp > 0
        # The allgather dispatcher needs the same number of tokens from every rank.
        self.equal_batches = self.lockstep and not policy.config.variable_seq_lengths

    def update_weights(self) -> None:
        """Nothing to do: the engine decodes with the trained weights themselves."""

    @torch.no_grad()
    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        """See RolloutEngine.generate."""
        # a rank without requests runs no forward pass, and the others would wait for its weights
        self.policy.finish_parameter_gather()
        self.policy.eval()
        per_prompt = requests.responses_per_prompt
        samples = torch.tensor(requests.sample_indices(), dtype=torch.long, device=self.device)
        prompts = [tuple(p) for p in requests.prompts]
        end_ids, stop_strings = self._split_stops(sampling.stop)
        with_noise = self.router_noise > 0 and sampling.temperature > 0
        # Ranks may differ in their number of prompts, but not in their number of batches.
        most = self._agreed_maximum(len(prompts))
        size = max(1, self.batch_size // per_prompt if self.batch_size else most)
        batches = []
        for start in range(0, most, size):
            chosen = prompts[start : start + size]
            count = min(size, most - start) if self.equal_batches else max(1, len(chosen))
            # Dummy prompts, with sample index 0, fill the batch up to `count`.
            indices = samples.new_zeros(count * per_prompt)
            real = len(chosen) * per_prompt
            indices[:real] = samples[start * per_prompt :][:real]
            draws = _Draws(
                sampling,
                uniforms(seed, indices, sampling.max_tokens),
                RouterRandomness(seed, indices) if with_noise else None,
                end_ids,
                stop_strings,
            )
            filled = chosen + [(self.pad_id,)] * (count - len(chosen))
            batches.append(self._generate_batch(filled, per_prompt, real, draws).first(real))
        self.policy.train()
        if not batches:
            batches = [_Responses.empty(0, sampling.max_tokens, self.device)]
            if self.record_routes:
                batches[0].routes = no_routes(
                    self.policy.config, 0, 0, self.num_routers, device=self.device
                )
        return _join(prompts, samples, requests, batches)

    def _split_stops(self, stop: Sequence[str]) -> tuple[Tensor, list[StopStrings]]:
        """The ids of all tokens that end a response [end ids], and the stops to find in its text.
        Decoding leaves special tokens out: a stop that is one of them goes by its id, and those
        with such tokens inside are looked for in a text that has these tokens."""
        assert not stop or self.decode is not None, "stop strings need the tokenizer"
        special = [self.special_tokens[text] for text in stop if text in self.special_tokens]
        texts = [text for text in stop if text not in self.special_tokens]
        names = [name for name in self.special_tokens if any(name in text for text in texts)]
        mixed = [text for text in texts if any(name in text for name in names)]
        plain = [text for text in texts if text not in mixed]
        found = [StopStrings(plain, self.decode)] if plain else []
        if mixed:
            named = {self.special_tokens[name]: name for name in names}
            found.append(StopStrings(mixed, with_special_tokens(self.decode, named)))
        return torch.tensor([*self.eos_ids, *special], device=self.device), found

    def _agreed_maximum(self, value: int) -> int:
        """The largest value of all ranks, where every rank must join every forward pass."""
        if not self.lockstep:
            return value
        agreed = torch.tensor([value], device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return int(agreed)

    def _generate_batch(
        self, prompts: Sequence[tuple[int, ...]], per_prompt: int, real: int, draws: _Draws
    ) -> _Responses:
        """Responses to `prompts`; all but the first `real` are dummies, which end at once."""
        max_tokens, randomness = draws.sampling.max_tokens, draws.router_randomness
        rows = len(prompts) * per_prompt
        responses = _Responses.empty(rows, max_tokens, self.device)
        responses.ended[real:], responses.lengths[real:] = True, 0
        prompt_lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        longest = int(prompt_lengths.max())
        if self.equal_batches:
            longest = self._agreed_maximum(longest)
        frequencies = rotary_frequencies(self.policy.models[0], longest + max_tokens)
        cache = KeyValueCache(frequencies, longest + max_tokens)
        with decoding(self.policy.models, cache):
            # A group's responses share the work on their prompt.
            of_prompts = randomness and randomness.at(slice(None, None, per_prompt))
            ids = _padded(prompts, longest, self.pad_id, self.device)
            cache.start_prefill(longest)
            positions = torch.arange(longest, device=self.device).expand_as(ids)
            hidden, routes = self._forward(ids, positions, of_prompts)
            of_row = torch.arange(len(prompts), device=self.device)
            if hidden is not None:  # of the prompts' last tokens, [prompts, hidden]
                hidden = hidden[of_row, prompt_lengths - 1]
            if routes is not None:
                responses.routes = routes.new_zeros((rows, longest + max_tokens, *routes.shape[2:]))
                responses.routes[:, :longest] = routes.repeat_interleave(per_prompt, 0)
            if per_prompt > 1:
                cache.keep(of_row.repeat_interleave(per_prompt))
                prompt_lengths = prompt_lengths.repeat_interleave(per_prompt)
                hidden = hidden.repeat_interleave(per_prompt, 0) if hidden is not None else None
            self._decode(hidden, prompt_lengths, cache, responses, draws)
        return responses

    def _decode(
        self,
        hidden: Tensor | None,
        positions: Tensor,
        cache: KeyValueCache,
        responses: _Responses,
        draws: _Draws,
    ) -> None:
        """Draw token after token until every sequence has ended, here and on the ranks that need
        this one. Sequences that have ended leave the batch when they are half of it or more.

        hidden [sequences, hidden], positions [sequences]: of the next token."""
        max_tokens, randomness = draws.sampling.max_tokens, draws.router_randomness
        active = torch.arange(len(positions), device=self.device)  # rows of `responses`
        longest = int(positions.max())
        for step in range(max_tokens):
            tokens, logprobs = self._draw(hidden, draws.sampling, draws.uniforms[active, step])
            responses.tokens[active, step] = tokens
            responses.logprobs[active, step] = logprobs
            ended = responses.ended[active]
            ends = ~ended & (tokens[:, None] == draws.end_ids).any(1)
            responses.lengths[active] = torch.where(ends, step + 1, responses.lengths[active])
            responses.ended[active] = ended | ends
            is_last, is_check = step + 1 == max_tokens, (step + 1) % CHECK_INTERVAL == 0
            if is_last or is_check:
                for stop_strings in draws.stop_strings:
                    _end_at_stop_strings(responses, step + 1, active, stop_strings)
            if is_last:
                return
            if is_check:
                ended = responses.ended[active]
                running = len(ended) - int(ended.sum())
                most = self._agreed_maximum(running)
                if most == 0:
                    return
                kept = most if self.equal_batches else max(1, running)
                if 2 * kept <= len(active):
                    rows = ended.int().argsort(stable=True)[:kept]
                    cache.keep(rows)
                    active, tokens, positions = active[rows], tokens[rows], positions[rows]
            longest += 1
            cache.start_token(positions, longest)
            of_active = randomness and randomness.at(active)
            hidden, routes = self._forward(tokens[:, None], positions[:, None], of_active)
            if routes is not None:
                responses.routes[active, positions] = routes[:, 0]
            hidden = hidden[:, 0] if hidden is not None else None
            positions = positions + 1

    def _draw(
        self, hidden: Tensor | None, sampling: Sampling, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next token of each sequence and its log-prob, the same on the whole replica."""
        drawn = torch.empty((2, len(uniform)), dtype=torch.float64, device=self.device)
        if hidden is not None:
            logits = self.policy.models[-1].next_token_logits(hidden)
            tokens, logprobs = draw(logits, sampling, uniform)
            drawn[0], drawn[1] = tokens, logprobs  # exact: token ids are far below 2^53
        if self.replica.size() > 1:
            dist.broadcast(drawn, src=self.source, group=self.replica)
        return drawn[0].long(), drawn[1].float()

    def _forward(
        self, ids: Tensor, positions: Tensor, randomness: RouterRandomness | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """One pass of ids [sequences, length] through all stages. Returns, on the last stage, the
        hidden states [sequences, length, hidden], and the routes [sequences, length, layers, k] if
        they are recorded."""
        watched: AbstractContextManager[Mapping[int, Tensor]] = nullcontext({})
        if randomness is not None:
            numbers = randomness.numbers(positions)
            watched = noisy_routers(self.router_noise, numbers, record=self.record_routes)
        elif self.record_routes:
            watched = recorded()
        with watched as experts:  # the chosen ones, [tokens, k] by layer number
            hidden = self.pipeline(ids, positions)
        if not self.record_routes:
            return hidden, None
        sequences, length = ids.shape
        # Routers see the first token of all sequences, then the second.
        layers = [experts[n].view(length, sequences, -1) for n in sorted(experts)]
        if not layers:  # a stage of dense layers
            return hidden, no_routes(self.policy.config, sequences, length, 0, device=self.device)
        return hidden, torch.stack(layers, dim=2).transpose(0, 1)


class _PipelineForward:
    """One forward pass through all pipeline stages (and virtual stages).

    Decoding sends one small message a stage and token. Megatron's training schedules are made for
    many micro-batches with gradients and are of no use here.
    """

    def __init__(self, policy: Policy) -> None:
        self.models = policy.models
        self.dtype = policy.config.params_dtype
        self.hidden_size = policy.config.hidden_size
        self.group = parallel_state.get_pipeline_model_parallel_group()
        self.size, self.rank = self.group.size(), self.group.rank()
        ranks = dist.get_process_group_ranks(self.group)
        self.previous = ranks[(self.rank - 1) % self.size]
        self.following = ranks[(self.rank + 1) % self.size]

    def __call__(self, input_ids: Tensor, position_ids: Tensor) -> Tensor | None:
        """input_ids [sequences, length] -> hidden [sequences, length, hidden] on the last stage,
        None elsewhere."""
        output = None
        for chunk, model in enumerate(self.models):
            if chunk > 0 or self.rank > 0:
                model.set_input_tensor(self._receive(input_ids))
            output = model(input_ids=input_ids, position_ids=position_ids, attention_mask=None)
            if chunk < len(self.models) - 1 or self.rank < self.size - 1:
                self._send(output)
                output = None
        return output

    def _receive(self, input_ids: Tensor) -> Tensor:
        if self.size == 1:
            return self._passed
        sequences, length = input_ids.shape
        shape = (length, sequences, self.hidden_size)
        buffer = torch.empty(shape, dtype=self.dtype, device=input_ids.device)
        dist.recv(buffer, src=self.previous, group=self.group)
        return buffer

    def _send(self, output: Tensor) -> None:
        if self.size == 1:
            self._passed = output  # virtual stages of a single rank
        else:
            dist.send(output.contiguous(), dst=self.following, group=self.group)


def _end_at_stop_strings(
    responses: _Responses, drawn: int, active: Tensor, stop_strings: StopStrings
) -> None:
    """End the responses among the `active` rows whose text contains a stop string now that `drawn`
    tokens are there. The tokens after it are void. Reads from the device once."""
    searched = (drawn - 1) // CHECK_INTERVAL * CHECK_INTERVAL  # tokens, at the check before
    first = max(0, searched + 1 - stop_strings.window)
    rows = torch.cat([active[:, None], responses.lengths[active, None]], dim=1)
    rows = torch.cat([rows, responses.tokens[active, first:drawn]], dim=1).tolist()
    found = {}
    for row, length, *ids in rows:
        if length > searched:  # had not ended at the check before
            end = stop_strings.end(ids[: length - first], searched - first)
            if end is not None:
                found[row] = first + end
    if found:
        ended = torch.tensor(list(found), device=active.device)
        responses.lengths[ended] = torch.tensor(list(found.values()), device=active.device)
        responses.ended[ended] = True


def _padded(
    prompts: Sequence[tuple[int, ...]], longest: int, pad_id: int, device: torch.device
) -> Tensor:
    """[prompts, longest], padded on the right."""
    rows = [(*p, *(pad_id,) * (longest - len(p))) for p in prompts]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(prompts), longest)


def _join(
    prompts: list[tuple[int, ...]],
    samples: Tensor,
    requests: Requests,
    batches: list[_Responses],
) -> RolloutBatch:
    """Flatten batches of padded responses into one RolloutBatch."""
    device, per_prompt = samples.device, requests.responses_per_prompt
    tokens, logprobs, lengths, ended = (
        torch.cat([getattr(batch, name) for batch in batches])
        for name in ("tokens", "logprobs", "lengths", "ended")
    )
    groups = torch.tensor(list(requests.group_index), dtype=torch.long, device=device)
    prompt_lengths = torch.tensor([len(p) for p in prompts], dtype=torch.long, device=device)
    prompt_lengths = prompt_lengths.repeat_interleave(per_prompt)
    longest = max((len(p) for p in prompts), default=0)
    prompt_tokens = _padded(prompts, longest, 0, device).repeat_interleave(per_prompt, 0)
    in_prompt = torch.arange(longest, device=device) < prompt_lengths[:, None]
    in_response = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
    routes = None
    if batches[0].routes is not None:
        ends = (prompt_lengths + lengths).split([len(batch.lengths) for batch in batches])
        routes = torch.cat(
            [
                batch.routes[torch.arange(batch.routes.shape[1], device=device) < end[:, None]]
                for batch, end in zip(batches, ends)
            ]
        )
    return RolloutBatch(
        tokens=torch.cat([prompt_tokens, tokens], 1)[torch.cat([in_prompt, in_response], 1)],
        prompt_lengths=prompt_lengths,
        response_lengths=lengths,
        rollout_logprobs=logprobs[in_response],
        truncated=~ended,
        sample_index=samples,
        group_index=groups.repeat_interleave(per_prompt),
        routes=routes,
    )
