"""Storage for responses in progress, and the rows of the batch that generates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_megatron.rollout.engine import Requests
from gspo_megatron.rollout.megatron.sampling import StopStrings, uniforms
from gspo_megatron.types import RolloutBatch


@dataclass
class Responses:
    """All responses of a rank. Values after the end of a response mean nothing.

    There is one spare response and one spare token. They take the tokens of rows that have no
    response in progress.
    """

    tokens: Tensor  # [responses + 1, max_tokens + 1] int64
    logprobs: Tensor  # [responses + 1, max_tokens + 1] float32
    lengths: Tensor  # [responses + 1] int64, with the end token
    ended: Tensor  # [responses + 1] bool; false: cut off at max_tokens
    # [responses + 1, positions of prompt and response, MoE layers of this rank, k]; None: not
    # recorded
    routes: Tensor | None

    @classmethod
    def empty(
        cls, count: int, max_tokens: int, routes: Tensor | None, device: torch.device
    ) -> Responses:
        return cls(
            tokens=torch.zeros((count + 1, max_tokens + 1), dtype=torch.long, device=device),
            logprobs=torch.zeros((count + 1, max_tokens + 1), device=device),
            lengths=torch.zeros(count + 1, dtype=torch.long, device=device),
            ended=torch.zeros(count + 1, dtype=torch.bool, device=device),
            routes=routes,
        )

    @property
    def spare(self) -> int:
        """The number of the spare response."""
        return len(self.lengths) - 1

    @property
    def max_tokens(self) -> int:
        return self.tokens.shape[1] - 1

    def batch(self, requests: Requests, samples: Tensor) -> RolloutBatch:
        """Return all responses as one flat batch. samples [responses]: their sample indexes."""
        device, per_prompt = samples.device, requests.responses_per_prompt
        tokens, logprobs, lengths, ended = (
            values[: self.spare]
            for values in (self.tokens, self.logprobs, self.lengths, self.ended)
        )
        groups = torch.tensor(list(requests.group_index), dtype=torch.long, device=device)
        longest = max(map(len, requests.prompts), default=0)
        prompts = padded(requests.prompts, longest, 0, device).repeat_interleave(per_prompt, 0)
        prompt_lengths = torch.tensor(
            [len(p) for p in requests.prompts], dtype=torch.long, device=device
        ).repeat_interleave(per_prompt)
        in_prompt = _before(prompt_lengths, longest)
        in_response = _before(lengths, tokens.shape[1])
        routes = self.routes
        if routes is not None:
            routes = routes[: self.spare][_before(prompt_lengths + lengths, routes.shape[1])]
        return RolloutBatch(
            tokens=torch.cat([prompts, tokens], 1)[torch.cat([in_prompt, in_response], 1)],
            prompt_lengths=prompt_lengths,
            response_lengths=lengths,
            rollout_logprobs=logprobs[in_response],
            truncated=~ended,
            sample_index=samples,
            group_index=groups.repeat_interleave(per_prompt),
            routes=routes,
        )


def _before(ends: Tensor, length: int) -> Tensor:
    """Return [rows, length] bool, True on positions before the rows' `ends` [rows]."""
    return torch.arange(length, device=ends.device) < ends[:, None]


def padded(
    prompts: Sequence[Sequence[int]], longest: int, pad_id: int, device: torch.device
) -> Tensor:
    """Return the prompts, padded on the right: [prompts, longest]."""
    rows = [(*p, *(pad_id,) * (longest - len(p))) for p in prompts]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(prompts), longest)


@dataclass
class Rows:
    """The rows of the running batch. Each row generates one response after another.

    The tokens of a row that is not `going` are discarded. The first dimension of all tensors is
    [rows].
    """

    response: Tensor  # int64: the number of the response
    samples: Tensor  # int64: the sample index of the response
    limits: Tensor  # int64: the largest number of tokens of the response
    prompt_lengths: Tensor  # int64
    lengths: Tensor  # int64: tokens of the response so far
    going: Tensor  # bool: the row has a response in progress
    ended: Tensor  # bool: ended by an end token or a stop string
    tokens: Tensor  # int64: the last sampled token
    uniforms: Tensor  # [rows, max_tokens + 1] float64: the random numbers of the response

    @classmethod
    def idle(cls, count: int, responses: Responses) -> Rows:
        """Return rows without a response, with the values of sample 0 and of a prompt of one
        token."""
        device = responses.tokens.device

        def full(value: int | bool) -> Tensor:
            return torch.full((count,), value, device=device)

        return cls(
            response=full(responses.spare),
            samples=full(0),
            limits=full(1),
            prompt_lengths=full(1),
            lengths=full(0),
            going=full(False),
            ended=full(False),
            tokens=full(0),
            uniforms=torch.zeros(
                (count, responses.max_tokens + 1), dtype=torch.float64, device=device
            ),
        )

    def __len__(self) -> int:
        return len(self.response)

    @property
    def positions(self) -> Tensor:
        """[rows]: the positions of the last sampled tokens."""
        return self.prompt_lengths + self.lengths - 1

    def start(
        self,
        rows: Tensor,
        response: Tensor,
        samples: Tensor,
        limits: Tensor,
        prompt_lengths: Tensor,
        seed: int,
    ) -> None:
        """Start new responses in `rows` [n]; the other tensors [n] describe these responses."""
        self.response[rows], self.samples[rows] = response, samples
        self.limits[rows] = limits
        self.prompt_lengths[rows], self.lengths[rows] = prompt_lengths, 0
        self.going[rows], self.ended[rows] = True, False
        self.uniforms[rows] = uniforms(seed, samples, self.uniforms.shape[1])

    def free(self, count: int) -> Tensor:
        """Return the numbers [count] of the first rows that are not going."""
        return self.going.int().argsort(stable=True)[:count]

    def keep(self, count: int) -> Tensor:
        """Keep `count` rows and drop the others; rows without a response are dropped first.
        Returns the numbers of the kept rows."""
        rows = self.going.logical_not().int().argsort(stable=True)[:count]
        vars(self).update({name: values[rows] for name, values in vars(self).items()})
        return rows

    def uniform(self) -> Tensor:
        """Return the random numbers of the next tokens, [rows] float64."""
        return self.uniforms.gather(1, self.lengths[:, None])[:, 0]

    def add(self, tokens: Tensor, logprobs: Tensor, end_ids: Tensor, responses: Responses) -> None:
        """Add the next token of each row [rows] and its log-prob."""
        # the values of rows that are not going mean nothing
        responses.tokens[self.response, self.lengths] = tokens
        responses.logprobs[self.response, self.lengths] = logprobs
        self.tokens, self.lengths = tokens, self.lengths + self.going
        ends = self.going & (tokens[:, None] == end_ids).any(1)
        self.ended = self.ended | ends
        self.going = self.going & ~ends & (self.lengths < self.limits)

    def end_at_stop_strings(
        self, stop_strings: StopStrings, searched: Tensor, most_new: int, responses: Responses
    ) -> None:
        """End the responses whose text contains a stop string; cuts off the tokens after it.

        searched [rows]: how many tokens of each row were searched already. At most `most_new`
        tokens follow the searched tokens; rows without new tokens are skipped. Reads from the
        device once.
        """
        width = stop_strings.window + most_new
        columns = self.lengths[:, None] - width + torch.arange(width, device=searched.device)
        ids = responses.tokens[self.response[:, None], columns.clamp(min=0)]
        table = torch.cat([self.lengths[:, None], searched[:, None], ids], dim=1).tolist()
        ends = {}
        for row, (length, searched_length, *last_ids) in enumerate(table):
            first = max(0, searched_length + 1 - stop_strings.window)
            if length > searched_length:
                end = stop_strings.end(last_ids[width - length + first :], searched_length - first)
                if end is not None:
                    ends[row] = first + end
        if ends:
            rows = torch.tensor(list(ends), device=searched.device)
            self.lengths[rows] = torch.tensor(list(ends.values()), device=searched.device)
            self.ended[rows], self.going[rows] = True, False

    def store(self, responses: Responses) -> None:
        """Store how long the responses are, and which have ended."""
        responses.lengths[self.response] = self.lengths
        responses.ended[self.response] = self.ended

    def progress(self) -> tuple[list[int], int]:
        """Return the sequence length of each row, and the most tokens that any row may still get.

        The length includes the prompt; it is 0 for a row that is not going. Reads from the device
        once.
        """
        going = self.going
        lengths = torch.where(going, self.prompt_lengths + self.lengths, 0)
        longest_rest = torch.where(going, self.limits - self.lengths, 0).max()
        *of_rows, longest_rest = torch.cat([lengths, longest_rest[None]]).tolist()
        return of_rows, longest_rest

    def longest(self, count: int) -> Tensor:
        """Return the numbers [count] of the going rows with the longest sequences."""
        return torch.where(self.going, self.prompt_lengths + self.lengths, 0).topk(count).indices
