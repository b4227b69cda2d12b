"""Rollouts by the training model itself, on whatever layout it is sharded.

No second copy of the weights, no transfer: after an optimizer step the next token is already drawn
from the new policy. Data-parallel (and context-parallel) ranks draw different responses; the ranks
of a model replica (TP x PP) work on the same ones.
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
from gspo_megatron.rollout.pipeline import PipelineForward
from gspo_megatron.rollout.router_noise import RouterNoise, RouterRandomness
from gspo_megatron.rollout.sampling import draw, uniforms
from gspo_megatron.routing.replay import expert_dtype
from gspo_megatron.types import RolloutBatch

# A context in which forward passes are recorded: the experts [tokens, k] of each layer, by number.
RecordRoutes = Callable[[], AbstractContextManager[Mapping[int, Tensor]]]

# How many tokens are drawn between two looks at which sequences have ended. A look costs a device
# synchronisation (and, with experts over several ranks, a collective); a token too many costs
# one decoding step.
LOOK_EVERY = 4


@dataclass
class _Responses:
    """The responses of one batch as they grow; rows are the batch's sequences."""

    tokens: Tensor  # [sequences, max_tokens] int64
    logprobs: Tensor  # [sequences, max_tokens] float32
    lengths: Tensor  # [sequences] int64, the end-of-sequence token included
    ended: Tensor  # [sequences] bool
    # [sequences, positions, MoE layers of this rank, k], prompts included; where they are recorded
    routes: Tensor | None = None

    def first(self, count: int) -> _Responses:
        """Of the first `count` sequences."""
        columns = {k: v if v is None else v[:count] for k, v in vars(self).items()}
        return _Responses(**columns)

    @classmethod
    def empty(cls, rows: int, max_tokens: int, pad_id: int, device: torch.device) -> _Responses:
        """Nothing drawn yet; a response that never ends has the full length."""
        return cls(
            tokens=torch.full((rows, max_tokens), pad_id, device=device),
            logprobs=torch.zeros((rows, max_tokens), device=device),
            lengths=torch.full((rows,), max_tokens, device=device),
            ended=torch.zeros(rows, dtype=torch.bool, device=device),
        )


class MegatronEngine:
    """The rollout engine `megatron`."""

    def __init__(
        self,
        policy: Policy,
        *,
        pad_id: int,
        eos_id: int,
        batch_size: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        record_routes: RecordRoutes | None = None,
        router_noise: RouterNoise | None = None,
    ) -> None:
        """batch_size: prompts' responses decoded together on a rank (None: all at once); decode:
        token ids to text, needed for stop strings; record_routes: the experts of every token are
        wanted with the responses; router_noise: on the scores while sampling. Greedy answers, those
        of an evaluation, stay the policy's own."""
        self.policy = policy
        self.pad_id, self.eos_id = pad_id, eos_id
        self.batch_size = batch_size
        self.decode = decode
        self.record_routes = record_routes
        self.router_noise = router_noise
        self.device = torch.device(torch.cuda.current_device())
        self.pipeline = PipelineForward(policy)
        self.replica, self.source = model_replica()
        modules = (module for model in policy.models for module in model.modules())
        self.num_routers = sum(isinstance(module, TopKRouter) for module in modules)
        # experts over several ranks of which not all work on the same responses
        tp = parallel_state.get_tensor_model_parallel_world_size()
        etp = parallel_state.get_expert_tensor_parallel_world_size()
        self.lockstep = parallel_state.get_expert_model_parallel_world_size() > 1 or tp % etp > 0
        # the allgather dispatcher wants as many tokens from every rank
        self.alike = self.lockstep and not policy.config.variable_seq_lengths

    def update_weights(self) -> None:
        """Nothing to do: the engine decodes with the trained weights themselves."""

    @torch.no_grad()
    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        """See RolloutEngine.generate."""
        self._finish_parameter_gather()
        self.policy.eval()
        per_prompt = requests.responses_per_prompt
        samples = torch.tensor(requests.sample_indices(), dtype=torch.long, device=self.device)
        prompts = [tuple(p) for p in requests.prompts]
        # ranks may differ in their number of prompts, but not in their number of batches
        most = self._agreed_maximum(len(prompts))
        size = max(1, self.batch_size // per_prompt if self.batch_size else most)
        starts = range(0, most, size)
        batches = []
        for start in starts:
            chosen = prompts[start : start + size]
            rows = slice(start * per_prompt, (start + len(chosen)) * per_prompt)
            count = min(size, most - start) if self.alike else max(1, len(chosen))
            batches.append(self._batch(chosen, count, per_prompt, samples[rows], sampling, seed))
        self.policy.train()
        joined = _join(prompts, samples, requests, batches, sampling.max_tokens)
        if self.record_routes is not None and not batches:
            joined.routes = self._no_routes(0, self.num_routers)
        return joined

    def _finish_parameter_gather(self) -> None:
        """Under overlap_param_gather a forward pass fetches the weights of the last update from the
        ranks that share them; here a rank without requests has no pass, and they would wait."""
        for chunk in self.policy.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _agreed_maximum(self, value: int) -> int:
        """Experts on other ranks need every rank to take part in every forward pass."""
        if not self.lockstep:
            return value
        agreed = torch.tensor([value], device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return int(agreed)

    def _batch(
        self,
        prompts: list[tuple[int, ...]],
        count: int,
        per_prompt: int,
        samples: Tensor,
        sampling: Sampling,
        seed: int,
    ) -> _Responses:
        """Responses to `prompts`, made up to `count` by prompts for the other ranks' sake."""
        rows, real = count * per_prompt, len(prompts) * per_prompt
        prompts = prompts + [(self.pad_id,)] * (count - len(prompts))
        samples = torch.cat([samples, samples.new_zeros(rows - real)])
        responses = _Responses.empty(rows, sampling.max_tokens, self.pad_id, self.device)
        responses.ended[real:] = True
        noise = uniforms(seed, samples, sampling.max_tokens)
        prompt_lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        longest = int(prompt_lengths.max())
        if self.alike:
            longest = self._agreed_maximum(longest)
        cache = self._cache(longest + sampling.max_tokens)
        sampled = self.router_noise is not None and sampling.temperature > 0
        randomness = RouterRandomness(seed, samples) if sampled else None
        of_prompts = randomness and randomness.at(slice(None, None, per_prompt))
        with decoding(self.policy.models, cache):
            hidden, routes = self._prefill(prompts, prompt_lengths, longest, cache, of_prompts)
            if routes is not None:
                size = (rows, longest + sampling.max_tokens, *routes.shape[2:])
                responses.routes = routes.new_zeros(size)
                responses.routes[:, :longest] = routes.repeat_interleave(per_prompt, 0)
            if per_prompt > 1:  # a group's responses share the work on their prompt
                cache.keep(
                    torch.arange(len(prompts), device=self.device).repeat_interleave(per_prompt)
                )
                prompt_lengths = prompt_lengths.repeat_interleave(per_prompt)
                hidden = hidden.repeat_interleave(per_prompt, 0) if hidden is not None else None
            self._decode(hidden, prompt_lengths, noise, cache, responses, sampling, randomness)
        return responses.first(real)

    def _cache(self, max_length: int) -> KeyValueCache:
        frequencies = rotary_frequencies(self.policy.models[0], max_length)
        return KeyValueCache(frequencies, max_length)

    def _prefill(
        self,
        prompts: list[tuple[int, ...]],
        lengths: Tensor,
        longest: int,
        cache: KeyValueCache,
        randomness: RouterRandomness | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fill the cache with the prompts; the last stage gets their last hidden states. Also the
        routes [prompts, longest, layers, k], where they are recorded."""
        ids = _padded(prompts, longest, self.pad_id, self.device)
        cache.start_prefill(longest)
        positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        hidden, routes = self._forward(ids, positions, randomness)
        if hidden is not None:
            hidden = hidden[torch.arange(len(prompts), device=self.device), lengths - 1]
        return hidden, routes

    def _forward(
        self, ids: Tensor, positions: Tensor, randomness: RouterRandomness | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """One pass through all stages; and [sequences, length, layers, k], where recorded."""
        with self._routers(positions, randomness) as experts:
            hidden = self.pipeline(ids, positions)
        if self.record_routes is None:
            return hidden, None
        sequences, length = ids.shape
        # routers see the first token of all sequences, then the second
        layers = [experts[n].view(length, sequences, -1) for n in sorted(experts)]
        if not layers:  # a stage of dense layers
            return hidden, self._no_routes(sequences, length, 0)
        return hidden, torch.stack(layers, dim=2).transpose(0, 1)

    def _routers(
        self, positions: Tensor, randomness: RouterRandomness | None
    ) -> AbstractContextManager[Mapping[int, Tensor]]:
        """What the routers of a forward pass do besides their work: be noisy, be recorded."""
        record = self.record_routes
        if randomness is not None:
            assert self.router_noise is not None
            return self.router_noise(randomness.numbers(positions), record=record is not None)
        return nullcontext({}) if record is None else record()

    def _no_routes(self, *sizes: int) -> Tensor:
        """[*sizes, k] without a token or without a layer."""
        config = self.policy.config
        dtype = expert_dtype(config.num_moe_experts)
        return torch.zeros((*sizes, config.moe_router_topk), dtype=dtype, device=self.device)

    def _decode(
        self,
        hidden: Tensor | None,
        positions: Tensor,
        noise: Tensor,
        cache: KeyValueCache,
        responses: _Responses,
        sampling: Sampling,
        randomness: RouterRandomness | None,
    ) -> None:
        """Draw token after token until every sequence has ended, here and on the ranks that need
        this one. Sequences that have ended leave the batch when they are more than half of it."""
        active = torch.arange(len(positions), device=self.device)  # rows of `responses`
        longest = int(positions.max())
        for step in range(sampling.max_tokens):
            tokens, logprobs = self._draw(hidden, sampling, noise[active, step])
            self._record(step, active, tokens, logprobs, responses, sampling)
            if step + 1 == sampling.max_tokens:
                return
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                ended = responses.ended[active]
                going = len(ended) - int(ended.sum())
                most = self._agreed_maximum(going)
                if most == 0:
                    return
                kept = most if self.alike else max(1, going)
                if 2 * kept <= len(active):
                    rows = ended.int().argsort(stable=True)[:kept]
                    cache.keep(rows)
                    active, tokens, positions = active[rows], tokens[rows], positions[rows]
            longest += 1
            cache.start_token(positions, longest)
            rest = randomness and randomness.at(active)
            hidden, routes = self._forward(tokens[:, None], positions[:, None], rest)
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

    def _record(
        self,
        step: int,
        active: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        responses: _Responses,
        sampling: Sampling,
    ) -> None:
        running = ~responses.ended[active]
        responses.tokens[active, step] = torch.where(running, tokens, self.pad_id)
        responses.logprobs[active, step] = torch.where(running, logprobs, 0.0)
        stops = tokens == self.eos_id
        if sampling.stop:
            stops = stops | self._hits_stop_string(step, active, responses, sampling.stop)
        ends = running & stops
        responses.lengths[active] = torch.where(ends, step + 1, responses.lengths[active])
        responses.ended[active] = ~running | ends

    def _hits_stop_string(
        self, step: int, active: Tensor, responses: _Responses, stop: tuple[str, ...]
    ) -> Tensor:
        """Whether each sequence's text now contains a stop string. A stop string lies within the
        last tokens, but one token's text may depend on those before: decode a short tail."""
        assert self.decode is not None, "stop strings need the tokenizer"
        tail = max(len(text) for text in stop) + 8
        rows = responses.tokens[active, max(0, step + 1 - tail) : step + 1].tolist()
        texts = [self.decode(row) for row in rows]
        hits = [any(text in decoded for text in stop) for decoded in texts]
        return torch.tensor(hits, dtype=torch.bool, device=self.device)


def _padded(
    prompts: list[tuple[int, ...]], longest: int, pad_id: int, device: torch.device
) -> Tensor:
    """[prompts, longest], padded on the right."""
    rows = [(*p, *(pad_id,) * (longest - len(p))) for p in prompts]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(prompts), longest)


def _join(
    prompts: list[tuple[int, ...]],
    samples: Tensor,
    requests: Requests,
    batches: list[_Responses],
    max_tokens: int,
) -> RolloutBatch:
    """Flatten batches of padded responses into one RolloutBatch."""
    device, per_prompt = samples.device, requests.responses_per_prompt
    if not batches:
        batches = [_Responses.empty(0, max_tokens, 0, device)]
    tokens, logprobs, lengths, ended = (
        torch.cat([getattr(batch, name) for batch in batches])
        for name in ("tokens", "logprobs", "lengths", "ended")
    )
    groups = torch.tensor(list(requests.group_index), dtype=torch.long, device=device)
    prompt_lengths = torch.tensor([len(p) for p in prompts], dtype=torch.long, device=device)
    prompt_lengths = prompt_lengths.repeat_interleave(per_prompt)
    longest = max((len(p) for p in prompts), default=0)
    prompt_tokens = _padded(prompts, longest, 0, device).repeat_interleave(per_prompt, 0)
    in_prompt = torch.arange(prompt_tokens.shape[1], device=device) < prompt_lengths[:, None]
    in_response = torch.arange(max_tokens, device=device) < lengths[:, None]
    sequences = torch.cat([prompt_tokens, tokens], dim=1)
    return RolloutBatch(
        tokens=sequences[torch.cat([in_prompt, in_response], dim=1)],
        prompt_lengths=prompt_lengths,
        response_lengths=lengths,
        logprobs=logprobs[in_response],
        truncated=~ended,
        sample_index=samples,
        group_index=groups.repeat_interleave(per_prompt),
        routes=_flat_routes(batches, prompt_lengths + lengths),
    )


def _flat_routes(batches: list[_Responses], lengths: Tensor) -> Tensor | None:
    """[tokens, layers, k] of all sequences, whole `lengths` [sequences] each."""
    flat, start = [], 0
    for batch in batches:
        if batch.routes is None:
            return None
        end = start + len(batch.routes)
        positions = torch.arange(batch.routes.shape[1], device=lengths.device)
        flat.append(batch.routes[positions < lengths[start:end, None]])
        start = end
    return torch.cat(flat)
