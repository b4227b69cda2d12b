"""The in-process rollout engine: the training model generates responses, on any layout.

There is no second copy of the weights. Data-parallel and context-parallel ranks generate different
responses; the ranks of a model replica (TP x PP) work on the same responses.
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

from gspo_megatron.models.attention import (
    KeyValueCache,
    PromptStates,
    Spans,
    rotary_factor,
    rotary_frequencies,
)
from gspo_megatron.models.build import Policy
from gspo_megatron.models.decoding import decoding
from gspo_megatron.platform.collectives import maxima
from gspo_megatron.platform.groups import model_replica
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.rows import Responses, Rows, padded
from gspo_megatron.rollout.megatron.sampling import (
    RouterRandomness,
    StopStrings,
    sample_tokens,
    with_special_tokens,
)
from gspo_megatron.routing.noise import noisy_routers
from gspo_megatron.routing.replay import no_routes, recorded
from gspo_megatron.types import RolloutBatch

# Tokens per row between two checks. A check finds the responses that have ended. The check
# synchronises with the device (and, if ranks share experts, runs a collective). A late check costs
# useless decoding steps for rows that have ended.
CHECK_INTERVAL = 4

# New responses start once this share of the rows is free, so that several prompts share one
# forward pass.
REFILL_SHARE = 1 / 16

# If no response is queued and at most this share of the rows is still needed, ended rows leave the
# batch. This copies the cache of the rows that stay, which is about as much data as two passes
# read.
KEEP_SHARE = 7 / 8


class MegatronEngine:
    """The rollout engine `megatron`."""

    def __init__(
        self,
        policy: Policy,
        *,
        pad_id: int,
        eos_id: int | Sequence[int],
        batch_size: int | None = None,
        prefill_tokens: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        special_tokens: Mapping[str, int] | None = None,
        record_routes: bool = False,
        router_noise: float = 0.0,
    ) -> None:
        """eos_id: one or several ids; batch_size: number of responses that a rank decodes together
        (None: all); when a response ends, the next one starts in its row; prefill_tokens: the most
        tokens of prompts in one forward pass, if a prompt is not longer (None: no limit); decode:
        token ids to text, needed for stops; special_tokens: ids by name, for stops that are or
        contain special tokens; record_routes: return the experts of every token with the responses;
        router_noise: standard deviation of the noise on the routers' scores. Greedy decoding has no
        noise, so that an evaluation measures the policy itself."""
        self.policy = policy
        self.pad_id = pad_id
        self.eos_ids = (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)
        self.batch_size, self.prefill_tokens = batch_size, prefill_tokens
        self.decode, self.special_tokens = decode, special_tokens or {}
        self.record_routes = record_routes
        self.router_noise = router_noise
        self.device = torch.device(torch.cuda.current_device())
        self.pipeline = _PipelineForward(policy)
        self.replica, self.source = model_replica()
        modules = (module for model in policy.models for module in model.modules())
        self.num_routers = sum(isinstance(module, TopKRouter) for module in modules)
        # If ranks that work on different responses share experts, all of them must run the same
        # number of forward passes.
        tp = parallel_state.get_tensor_model_parallel_world_size()
        etp = parallel_state.get_expert_tensor_parallel_world_size()
        self.lockstep = parallel_state.get_expert_model_parallel_world_size() > 1 or tp % etp > 0
        # The allgather dispatcher needs the same number of tokens from every rank.
        self.equal_batches = self.lockstep and not policy.config.variable_seq_lengths

    def update_weights(self) -> None:
        """Do nothing: the engine decodes with the trained weights themselves."""

    @torch.no_grad()
    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        """See RolloutEngine.generate."""
        # A rank without requests may run no forward pass. Without this call, the other ranks would
        # then wait for this rank's part of the weights.
        self.policy.finish_parameter_gather()
        self.policy.eval()
        generation = _Generation(self, requests, sampling, seed)
        lora = self.policy.lora
        with nullcontext() if lora is None else lora.unchanged():
            generation.run()
        self.policy.train()
        return generation.responses.batch(requests, generation.samples)

    def _split_stops(self, stop: Sequence[str]) -> tuple[Tensor, list[StopStrings]]:
        """Return the ids of all tokens that end a response [end ids], and the stops to search for.

        Decoding leaves special tokens out. So a stop that is a special token is found by its id,
        and stops that contain special tokens are searched for in a text that includes special
        tokens.
        """
        if not stop:
            return torch.tensor(self.eos_ids, device=self.device), []
        assert self.decode is not None, "stop strings need the tokenizer"
        special = [self.special_tokens[text] for text in stop if text in self.special_tokens]
        texts = [text for text in stop if text not in self.special_tokens]
        names = [name for name in self.special_tokens if any(name in text for text in texts)]
        mixed = [text for text in texts if any(name in text for name in names)]
        plain = [text for text in texts if text not in mixed]
        searches = [StopStrings(plain, self.decode)] if plain else []
        if mixed:
            named = {self.special_tokens[name]: name for name in names}
            searches.append(StopStrings(mixed, with_special_tokens(self.decode, named)))
        return torch.tensor([*self.eos_ids, *special], device=self.device), searches

    def _agreed_maxima(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each value over all ranks, if all ranks run the same number of
        passes. Otherwise return the values of this rank."""
        return maxima(values) if self.lockstep else list(values)

    def _sample_tokens(
        self, hidden: Tensor | None, sampling: Sampling, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the next token of each sequence and its log-prob, on all ranks of the replica."""
        sampled = torch.empty((2, len(uniform)), dtype=torch.float64, device=self.device)
        if hidden is not None:
            logits = self.policy.models[-1].next_token_logits(hidden)
            tokens, logprobs = sample_tokens(logits, sampling, uniform)
            sampled[0], sampled[1] = tokens, logprobs  # exact: token ids are far below 2^53
        if self.replica.size() > 1:
            dist.broadcast(sampled, src=self.source, group=self.replica)
        return sampled[0].long(), sampled[1].float()

    def _forward(
        self, ids: Tensor, positions: Tensor, randomness: RouterRandomness | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run ids [sequences, length] through all stages.

        Returns the hidden states [sequences, length, hidden] on the last stage, and the routes
        [sequences, length, layers, k] if they are recorded.
        """
        watched: AbstractContextManager[Mapping[int, Tensor]] = nullcontext({})
        if randomness is not None:
            numbers = randomness.numbers(positions)
            watched = noisy_routers(self.router_noise, numbers, record=self.record_routes)
        elif self.record_routes:
            watched = recorded()
        with watched as experts:  # the chosen experts, [tokens, k] by layer number
            hidden = self.pipeline(ids, positions)
        if not self.record_routes:
            return hidden, None
        sequences, length = ids.shape
        # Routers get the first token of all sequences, then the second.
        layers = [experts[n].view(length, sequences, -1) for n in sorted(experts)]
        if not layers:  # a pipeline stage without MoE layers
            return hidden, no_routes(self.policy.config, sequences, length, 0, device=self.device)
        return hidden, torch.stack(layers, dim=2).transpose(0, 1)


@dataclass
class _Plan:
    """The work of all ranks until the next check."""

    rows: int  # rows of the batch; 0: every rank is finished
    starts: int  # responses that this rank starts in free rows
    prompts: int  # rows to prefill; 0: no rank runs a prefill
    passes: int  # forward passes that prefill them
    longest_prompt: int  # tokens of a prefill row
    steps: int  # tokens to sample until the next check


@dataclass
class _Prefilled:
    """Results of a prefill."""

    states: PromptStates
    lengths: Tensor  # [prompts] int64
    hidden: Tensor | None  # [prompts, hidden] of the prompts' last tokens, on the last stage
    routes: Tensor | None  # [prompts, length, layers, k]; None: not recorded

    def only(self, number: int) -> _Prefilled:
        """Return a copy of the results of one prompt, so that the memory of the other prompts'
        results can be freed."""

        def cut(values: Tensor) -> Tensor:
            return values[number : number + 1].clone()

        return _Prefilled(
            {layer: (cut(key), cut(value)) for layer, (key, value) in self.states.items()},
            cut(self.lengths),
            None if self.hidden is None else cut(self.hidden),
            None if self.routes is None else cut(self.routes),
        )


class _Generation:
    """One call of generate: the queue of responses, and the rows of the batch that generate them.

    `run` loops over the four states of a response:

        admit    it gets a free row, in the order of the queue (`_admit`)
        prefill  its prompt goes through the model, once for all responses of a group (`_prefill`).
                 Keys and values of the prompt are kept until all responses of the group start
        decode   its row gets a token (`_sample_tokens`), which goes through the model (`_decode`)
        retire   at a check, its row has ended: by a token, a stop string or the limit. The row is
                 free for another response or leaves the batch (`_retire`)

    In `_plan`, the ranks agree on the work that must be the same on all of them until the next
    check.
    """

    def __init__(
        self, engine: MegatronEngine, requests: Requests, sampling: Sampling, seed: int
    ) -> None:
        self.engine, self.sampling, self.seed = engine, sampling, seed
        self.prompts, self.per_prompt = requests.prompts, requests.responses_per_prompt
        device = self.device = engine.device
        self.samples = torch.tensor(requests.sample_indices(), dtype=torch.long, device=device)
        has_noise = engine.router_noise > 0 and requests.router_noise
        self.with_noise = has_noise and sampling.temperature > 0
        self.end_ids, self.stop_strings = engine._split_stops(sampling.stop)
        limits = requests.max_tokens or [sampling.max_tokens] * len(self.prompts)
        self.limits = torch.tensor(limits, dtype=torch.long, device=device)
        totals = (len(prompt) + most for prompt, most in zip(self.prompts, limits, strict=True))
        self.max_length = max(totals, default=1 + sampling.max_tokens)
        if engine.equal_batches:
            [self.max_length] = engine._agreed_maxima([self.max_length])
        count, routes = len(self.samples), None
        if engine.record_routes:
            sizes = (count + 1, self.max_length, engine.num_routers)
            routes = no_routes(engine.policy.config, *sizes, device=device)
        self.responses = Responses.empty(count, sampling.max_tokens, routes, device)
        self.next = 0  # the first response that has not started
        self.prefilled: _Prefilled | None = None  # kept while a group starts
        self.spans, self.long_rows = Spans.of([]), self.samples[:0]

    def run(self) -> None:
        """Generate all responses of this rank, and join the forward passes of the other ranks."""
        models, count = self.engine.policy.models, len(self.samples)
        self.rows = Rows.idle(min(self.engine.batch_size or count, count), self.responses)
        plan = self._plan()
        if not plan.rows:
            return
        self.rows = Rows.idle(plan.rows, self.responses)
        frequencies = rotary_frequencies(models[0], self.max_length)
        factor = rotary_factor(models[0].config)
        self.cache = KeyValueCache(frequencies, plan.rows, self.max_length, factor)
        with decoding(models, self.cache):
            hidden = self._admit(None, plan)
            while True:
                searched = self.rows.lengths.clone()
                for step in range(plan.steps):
                    if step > 0:
                        hidden = self._decode()
                    self._sample_tokens(hidden)
                plan = self._retire(searched)
                if not plan.rows:
                    return
                hidden = self._admit(self._decode(), plan)

    def _retire(self, searched: Tensor) -> _Plan:
        """End the rows whose text has a stop string, store all lengths, and agree on the next plan.

        searched [rows]: the lengths up to which stop strings have been searched for.
        """
        for stop_strings in self.stop_strings:
            self.rows.end_at_stop_strings(stop_strings, searched, CHECK_INTERVAL, self.responses)
        self.rows.store(self.responses)
        plan = self._plan()
        if plan.rows:
            if plan.rows <= KEEP_SHARE * len(self.rows):
                self.cache.keep(self.rows.keep(plan.rows))
            self.long_rows = self.rows.longest(self.spans.long_rows)
        return plan

    def _plan(self) -> _Plan:
        """Agree on the use of free rows, and on the forward passes until the next check.

        Reads from the device once. If ranks share experts, every rank uses the maxima, over all
        ranks, of seven numbers:

            needed   rows for the responses in progress or queued; 0: all responses are finished
            is_time  whether enough rows are free to start responses in them; 0: no rank starts any
            prompts  prompts to prefill; 0: no rank runs a prefill
            passes   forward passes for these prompts
            longest  tokens of the longest of these prompts
            left     the most tokens that a response in progress may still get
            starts   responses to start; if it is above 0, `max_tokens` replaces `left`

        If all ranks need passes of the same shape, `needed`, `prompts` and `longest` are that
        shape. Otherwise a rank without work runs a pass of one dummy row.
        """
        engine, rows, max_tokens = self.engine, len(self.rows), self.sampling.max_tokens
        lengths, left = self.rows.progress() if rows else ([], 0)
        self.spans = Spans.of(lengths)
        running = sum(length > 0 for length in lengths)
        queued = len(self.samples) - self.next
        needed = min(rows, running + queued)
        starts = min(rows - running, queued)
        is_time = starts > 0 and rows - running >= REFILL_SHARE * rows
        new = self.prompts[
            self._prompts_before(self.next) : self._prompts_before(self.next + starts)
        ]
        longest = max(map(len, new), default=1)
        passes = self._passes(len(new), longest)
        most, any_is_time, prompts, longest_of_all, left, any_starts, passes = (
            engine._agreed_maxima([needed, is_time, len(new), longest, left, starts, passes])
        )
        if not any_is_time:
            starts = any_starts = prompts = passes = 0
        if engine.equal_batches:
            passes = self._passes(prompts, longest_of_all)
        else:
            # a rank without work runs a pass of one dummy row
            most, prompts = most and max(1, needed), prompts and max(1, len(new))
            longest_of_all = longest
        steps = min(CHECK_INTERVAL, max_tokens if any_starts else left)
        return _Plan(most, starts, prompts, passes, longest_of_all, steps)

    def _passes(self, prompts: int, longest: int) -> int:
        """Return the number of forward passes for prompts of at most `longest` tokens."""
        limit = self.engine.prefill_tokens
        return min(prompts, 1) if limit is None else -(-prompts // max(1, limit // longest))

    def _prompts_before(self, response: int) -> int:
        """Return the number of prompts that must be prefilled for all responses before this one."""
        return -(-response // self.per_prompt)

    def _admit(self, hidden: Tensor | None, plan: _Plan) -> Tensor | None:
        """Start the next responses in free rows.

        Returns `hidden` [rows, hidden] on the last stage. The started rows now hold the hidden
        states of their prompts' last tokens.
        """
        first, last = self.next, self.next + plan.starts
        started, prefilled = self._prompts_before(first), self._prompts_before(last)
        free = self.rows.free(plan.starts)
        # responses of a group that has started
        known = min(last, started * self.per_prompt) - first
        if known:
            assert self.prefilled is not None, "its group has started"
            hidden = self._start(free[:known], first, self.prefilled, hidden)
        begun, share = first + known, -(-plan.prompts // max(1, plan.passes))
        for number in range(started, started + plan.passes * share, max(1, share)):
            # the ranks agree on the number of passes, so a rank may have no prompt for the last one
            numbers = range(min(number, prefilled), min(number + share, prefilled))
            prefills = self._prefill(numbers, share, plan.longest_prompt)
            until = min(last, numbers.stop * self.per_prompt)
            hidden = self._start(free[begun - first : until - first], begun, prefills, hidden)
            begun = until
            if numbers and numbers.stop == prefilled:  # dummies may follow the last prompt
                self.prefilled = prefills.only(len(numbers) - 1)
            del prefills  # the next pass needs the memory
        if last % self.per_prompt == 0:
            self.prefilled = None  # the whole group has started
        self.next = last
        lengths = map(len, self.prompts[first // self.per_prompt : prefilled])
        self.spans.others = max(self.spans.others, max(lengths, default=1))
        return hidden

    def _start(
        self, rows: Tensor, first: int, prefilled: _Prefilled, hidden: Tensor | None
    ) -> Tensor | None:
        """Start the n responses from number `first` on in `rows` [n].

        The first of the prefilled prompts is the prompt of response `first`. Returns `hidden`
        [rows, hidden], as `_admit` does.
        """
        if hidden is None and prefilled.hidden is not None:
            hidden = prefilled.hidden.new_zeros((len(self.rows), prefilled.hidden.shape[1]))
        if len(rows) == 0:
            return hidden
        responses = torch.arange(first, first + len(rows), device=self.device)
        prompts = responses // self.per_prompt - first // self.per_prompt
        lengths = prefilled.lengths[prompts]
        self.cache.place(prefilled.states, prompts, rows, lengths)
        limits = self.limits[responses // self.per_prompt]
        self.rows.start(rows, responses, self.samples[responses], limits, lengths, self.seed)
        if hidden is not None:
            assert prefilled.hidden is not None, "the stage is the last one"
            hidden[rows] = prefilled.hidden[prompts]
        if prefilled.routes is not None:
            assert self.responses.routes is not None
            width = prefilled.routes.shape[1]
            self.responses.routes[responses, :width] = prefilled.routes[prompts]
        return hidden

    def _prefill(self, numbers: range, share: int, longest: int) -> _Prefilled:
        """Run the prompts `numbers`, padded to `longest` tokens, through the model.

        Dummy prompts of one token, with sample index 0, fill a batch without a prompt, or the batch
        up to `share` prompts if all ranks need passes of the same shape.
        """
        dummies = (share if self.engine.equal_batches else max(1, len(numbers))) - len(numbers)
        prompts = [*(self.prompts[n] for n in numbers), *[(self.engine.pad_id,)] * dummies]
        # One copy to the device has the lengths and the ids, so the host waits only once.
        rows = [(len(prompt), *prompt) for prompt in prompts]
        table = padded(rows, longest + 1, self.engine.pad_id, self.device)
        lengths, ids = table[:, 0], table[:, 1:].contiguous()
        samples = self.samples.new_zeros(len(prompts))
        samples[: len(numbers)] = self.samples[:: self.per_prompt][numbers.start : numbers.stop]
        states = self.cache.start_prefill(longest, lengths)
        positions = torch.arange(longest, device=self.device).expand_as(ids)
        hidden, routes = self.engine._forward(ids, positions, self._randomness(samples))
        if hidden is not None:
            hidden = hidden[torch.arange(len(prompts), device=self.device), lengths - 1]
        return _Prefilled(states, lengths, hidden, routes)

    def _sample_tokens(self, hidden: Tensor | None) -> None:
        """Sample a token in every row from `hidden` [rows, hidden]."""
        tokens, logprobs = self.engine._sample_tokens(hidden, self.sampling, self.rows.uniform())
        self.rows.add(tokens, logprobs, self.end_ids, self.responses)
        self.spans.grow(self.max_length)

    def _decode(self) -> Tensor | None:
        """Run the last sampled tokens through the model -> [rows, hidden] on the last stage."""
        rows, positions = self.rows, self.rows.positions
        self.cache.start_token(positions, self.spans, self.long_rows)
        randomness = self._randomness(rows.samples)
        hidden, routes = self.engine._forward(rows.tokens[:, None], positions[:, None], randomness)
        if routes is not None:
            assert self.responses.routes is not None
            owners = torch.where(rows.going, rows.response, self.responses.spare)
            self.responses.routes[owners, positions] = routes[:, 0]
        return hidden[:, 0] if hidden is not None else None

    def _randomness(self, samples: Tensor) -> RouterRandomness | None:
        return RouterRandomness(self.seed, samples) if self.with_noise else None


class _PipelineForward:
    """Runs one forward pass through all pipeline stages (and virtual stages).

    Decoding sends one small message for each stage and token. Megatron's training schedules are
    made for many micro-batches with gradients and do not fit here.
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
        """Run the pass. input_ids [sequences, length] -> hidden [sequences, length, hidden] on the
        last stage, None elsewhere."""
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
            self._passed = output  # for the next virtual stage of this rank
        else:
            dist.send(output.contiguous(), dst=self.following, group=self.group)
