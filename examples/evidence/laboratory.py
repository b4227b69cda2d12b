"""One small MoE, and the operations that the measurements need: sample, update, compute log-probs
and slopes.

The task: a response token is right if its sum with the token before it is a multiple of 3. The
reward is the share of right tokens, so a response may have any length. The probability that the
next token is right is known: the sum of the probabilities of all right tokens. So the policy
gradient can be estimated with far less noise than any objective has (`Laboratory.widened`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from vllm_engine import VllmEngine, VllmProcess, vllm_python

from gspo_megatron.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    forward_backward,
    response_logprobs,
)
from gspo_megatron.config import Config, parse_config, resolve_parallel
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from gspo_megatron.models.policy import HeadInputs
from gspo_megatron.platform.groups import set_up_model_parallel, start_processes
from gspo_megatron.rollout.engine import Requests, RolloutEngine, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from gspo_megatron.routing.hooks import attach_hooks
from gspo_megatron.routing.replay import Recording, Replaying, RouteTable

VOCABULARY, PAD = 32, 0
PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 4
RESPONSES = PROMPTS * GROUP  # number of responses in a batch
WARM_UP = 0.6  # the reward that supervised updates reach before any measurement
# the standard deviation of noise on the routers' scores, for an engine with router noise
ROUTER_NOISE = 0.1
STEP = 0.02  # rms change of a token's log-prob in each direction when a slope is measured


@dataclass(frozen=True)
class Setting:
    """The properties in which laboratories differ."""

    length: int  # the tokens of every response
    seed: int
    # how the sampling engine differs from the trainer: one of records.MISMATCHES
    mismatch: str = "none"
    learning_rate: float = 1e-3
    experts: int = 32
    layers: int = 2


@dataclass
class Batch:
    """Sixty-four responses. Tensors of tokens are [responses, length]."""

    micro_batch: MicroBatch
    tokens: Tensor  # int64, with the tokens of the prompt
    rollout: Tensor  # the engine's log-probs
    # Key "r2": the routes of the trainer. Key "r3": the routes of the engine.
    routes: dict[str, RouteTable] = field(default_factory=dict)
    # Log-probs of the trainer. Key "r3": the log-probs with the routes of the engine.
    old: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rewards(self) -> Tensor:
        """The share of right tokens: [responses] float64."""
        return right_tokens(self.tokens).mean(1)


class Laboratory:
    """A policy that has been warmed up."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        config = configuration(setting)
        ranks = start_processes()
        parallel = resolve_parallel(config, ranks.world_size)
        set_up_model_parallel(parallel, setting.seed)
        self.policy: Policy = build_policy(config, parallel, VOCABULARY)
        self.layers = attach_hooks(self.policy.models)
        self.config = config
        self.start_training(setting.learning_rate)
        self.builder = MicroBatchBuilder(self.policy, PAD, temperature=1.0)
        self.exact_engine = self._engine()
        self.engine: RolloutEngine = self.exact_engine
        if setting.mismatch == "router_noise":
            self.engine = self._engine(ROUTER_NOISE)
        self.parameters = [p for model in self.policy.models for p in model.parameters()]
        self.vllm: VllmProcess | None = None
        self._draws = 0
        while float(self.draw(exactly=True).rewards.mean()) < WARM_UP:
            self.imitate()
        if setting.mismatch == "bf16_vllm":
            self.vllm = VllmProcess(vllm_python(), "bfloat16", PROMPT_TOKENS + setting.length)
            self.engine = VllmEngine(self.policy, self.vllm, end_ids=())
        self.engine.update_weights()

    def _engine(self, router_noise: float = 0.0) -> MegatronEngine:
        # the token VOCABULARY is never sampled, so all responses have their full length
        own = {"pad_id": PAD, "eos_id": VOCABULARY, "record_routes": True}
        return MegatronEngine(self.policy, **own, router_noise=router_noise)

    def close(self) -> None:
        """End the vLLM process, if there is one."""
        if self.vllm is not None:
            self.vllm.close()

    def processor_seconds(self) -> float:
        """The processor seconds of this process and of vLLM's."""
        return time.process_time() + (0.0 if self.vllm is None else self.vllm.seconds)

    def start_training(self, rate: float, weights: Sequence[Tensor] | None = None) -> None:
        """Begin with a new optimizer. If `weights` are given, the policy gets them."""
        if weights is not None:
            self._set(weights)
        schedule = Schedule(rate, rate, 0, 1, "constant")
        self.trainer: Trainer = build_trainer(self.policy, self.config.optimizer, schedule)

    def weights(self) -> list[Tensor]:
        """A copy of the weights."""
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.copy_(weight)

    def _seed(self) -> int:
        self._draws += 1
        return (self.setting.seed << 20) + self._draws

    def draw(self, *, exactly: bool = False) -> Batch:
        """Generate a new batch with the present policy. `exactly`: the engine has no mismatch with
        the trainer."""
        seed = self._seed()
        generator = torch.Generator().manual_seed(seed)
        shape = (PROMPTS, PROMPT_TOKENS)
        prompts = torch.randint(1, VOCABULARY, shape, generator=generator).tolist()
        requests = Requests(prompts, group_index=range(PROMPTS), responses_per_prompt=GROUP)
        sampling = Sampling(self.setting.length)
        engine: RolloutEngine = self.exact_engine if exactly else self.engine
        drawn = engine.generate(requests, sampling, seed=seed)
        tokens = drawn.tokens.view(RESPONSES, -1)
        batch = self.batch_of(tokens, drawn.rollout_logprobs.view(RESPONSES, -1))
        # the last token was never fed to the engine, so the trainer's router chooses for it
        known = torch.ones(tokens.shape, dtype=torch.bool)
        known[:, -1] = False
        experts = drawn.routes.permute(1, 0, 2).contiguous()
        batch.routes["r3"] = RouteTable(tuple(self.layers), experts, known.flatten())
        return batch

    def imitate(self) -> None:
        """One supervised update on right responses."""
        generator = torch.Generator().manual_seed(self._seed())
        tokens = right_sequences(RESPONSES, self.setting.length, generator)
        batch = self.batch_of(tokens, torch.zeros(RESPONSES, self.setting.length))
        self.update(batch, torch.full_like(batch.rollout, 1 / self.setting.length))

    def batch_of(self, tokens: Tensor, rollout: Tensor) -> Batch:
        """A batch of tokens [responses, prompt and response tokens] and rollout log-probs
        [responses, length]."""
        length = self.setting.length
        offsets = [length * n for n in range(RESPONSES)]
        micro_batch = self.builder.build(
            range(RESPONSES), list(tokens), [length] * RESPONSES, offsets
        )
        return Batch(micro_batch, tokens, rollout)

    def widened(self, batch: Batch) -> tuple[Batch, Tensor]:
        """A batch with more tokens: at each place of a response, the sampled token and all tokens
        that would have been right there. Also returns coefficients c, [responses, length * columns]
        float64. With them, the mean of sum c grad log pi is the gradient of the mean reward.

        Let p_t be the probability that token t is right. The terms of the right tokens add up to
        the derivative of p_t. The coefficient of the sampled token is the sum of p at the later
        tokens, minus the mean of this sum over the other responses of the group.
        """
        length = self.setting.length
        before = batch.tokens[:, PROMPT_TOKENS - 1 : -1, None]
        right = -before % 3 + torch.arange(0, VOCABULARY, 3)  # [responses, length, right tokens]
        exists = right < VOCABULARY
        head = batch.micro_batch.head
        targets = torch.cat(
            [head.targets[:, None], right.clamp(max=VOCABULARY - 1).flatten(0, 1)], 1
        )
        rows = head.rows.repeat_interleave(targets.shape[1])
        micro_batch = replace(batch.micro_batch, head=HeadInputs(rows, targets.flatten()))
        wide = Batch(micro_batch, batch.tokens, batch.rollout)
        self.record_routes([wide], "now")
        logprobs = self.logprobs([wide], "now")[0].double().view(RESPONSES, length, -1)
        chances = logprobs[..., 1:].exp() * exists
        p = chances.sum(-1)
        later = p.flip(1).cumsum(1).flip(1) - p
        credit = later - others_mean(later[None])[0]
        return wide, torch.cat([credit[..., None], chances], dim=-1).flatten(1) / length

    def remember(self, batches: Sequence[Batch]) -> None:
        """Keep the old log-probs and routes of the present policy."""
        self.record_routes(batches, "r2")
        for name, routes in (("off", "r2"), ("r3", "r3")):
            for batch, old in zip(batches, self.logprobs(batches, routes), strict=True):
                batch.old[name] = old

    def record_routes(self, batches: Sequence[Batch], name: str) -> None:
        """Keep the present experts of the batches' tokens under a name."""
        recordings = [Recording(num_layers=len(self.layers)) for _ in batches]
        for batch, recording in zip(batches, recordings, strict=True):
            batch.micro_batch.routes = recording
        response_logprobs(self.policy, [batch.micro_batch for batch in batches])
        for batch, recording in zip(batches, recordings, strict=True):
            batch.micro_batch.routes, batch.routes[name] = None, recording.table()

    def logprobs(self, batches: Sequence[Batch], routes: str) -> Tensor:
        """The log-probs [batches, responses, length] float32, with the experts that `routes`
        names."""
        with replayed(batches, routes):
            found = response_logprobs(self.policy, [batch.micro_batch for batch in batches])
        return torch.stack([logprobs.view(RESPONSES, -1) for logprobs, _ in found])

    def slopes(self, batches: Sequence[Batch], routes: str, direction: Tensor) -> Tensor:
        """The derivatives of all log-probs along a direction [parameters] with fixed experts, by a
        central difference: [batches, responses, length] float64."""
        size = 1e-3 / direction.norm()
        for _ in range(2):  # the second pass corrects the step size of the first pass
            with replayed(batches[:1], routes):
                found = self._difference(batches[:1], routes, direction, size)
            size *= STEP / (found.square().mean().sqrt() * size)
        return self._difference(batches, routes, direction, size)

    def _difference(
        self, batches: Sequence[Batch], routes: str, direction: Tensor, size: Tensor
    ) -> Tensor:
        sides = []
        for sign in (1, -1):
            with self._moved(sign * size * direction):
                sides.append(self.logprobs(batches, routes).double())
        return (sides[0] - sides[1]) / (2 * float(size))

    @contextlib.contextmanager
    def _moved(self, by: Tensor) -> Iterator[None]:
        kept = self.weights()
        parts = by.split([weight.numel() for weight in kept])
        self._set([weight + part.view_as(weight) for weight, part in zip(kept, parts, strict=True)])
        try:
            yield
        finally:
            self._set(kept)

    def gradient(self, batch: Batch, coefficients: Tensor, routes: str | None = None) -> Tensor:
        """The mean over responses of sum_t c_t grad log pi_t: [parameters] float32."""
        weights = coefficients.flatten() / RESPONSES

        def loss(_: MicroBatch, logprobs: Tensor, __: Tensor) -> tuple[Tensor, None]:
            return -(weights.to(logprobs.dtype) * logprobs).sum(), None

        with replayed([batch], routes):
            zero_gradients(self.policy.chunks, self.trainer.optimizer)
            forward_backward(self.policy, [batch.micro_batch], loss, 1)
        return torch.cat([-p.main_grad.flatten() for p in self.parameters])

    def update(self, batch: Batch, coefficients: Tensor) -> None:
        """One optimizer step along the gradient."""
        self.gradient(batch, coefficients)
        self.trainer.update()


@contextlib.contextmanager
def replayed(batches: Sequence[Batch], routes: str | None) -> Iterator[None]:
    """In this context, passes use the experts that are recorded under the name `routes`. With None,
    each router chooses."""
    for batch in batches:
        table = None if routes is None else Replaying(batch.routes[routes])
        batch.micro_batch.routes = table
    try:
        yield
    finally:
        for batch in batches:
            batch.micro_batch.routes = None


def right_tokens(tokens: Tensor) -> Tensor:
    """Which response tokens are right: [sequences, response tokens] float64, from [sequences,
    prompt and response tokens]."""
    response, before = tokens[:, PROMPT_TOKENS:], tokens[:, PROMPT_TOKENS - 1 : -1]
    return ((response + before) % 3 == 0).double()


def right_sequences(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random sequences in which every response token is right: [count, prompt and response
    tokens]."""
    tokens = torch.randint(1, VOCABULARY, (count, PROMPT_TOKENS + length), generator=generator)
    for place in range(PROMPT_TOKENS, tokens.shape[1]):
        tokens[:, place] -= (tokens[:, place] + tokens[:, place - 1]) % 3
        # 0 is the padding token. A token that is higher by 3 is also right.
        tokens[:, place] += 3 * (tokens[:, place] < 1)
    return tokens


def others_mean(values: Tensor) -> Tensor:
    """For each response, the mean over the other responses of its group.

    values: [batches, responses, ...].
    """
    grouped = values.unflatten(1, (PROMPTS, GROUP))
    means = (grouped.sum(2, keepdim=True) - grouped) / (GROUP - 1)
    return means.flatten(1, 2)


def configuration(setting: Setting) -> Config:
    """The configuration of a laboratory. A token uses 4 experts."""
    return parse_config(
        {
            "model": {
                "preset": "tiny",
                "vocab_size": VOCABULARY,
                "max_sequence_length": PROMPT_TOKENS + setting.length,
                "megatron": {
                    "num_layers": setting.layers,
                    "kv_channels": 16,
                    "num_moe_experts": setting.experts,
                    "moe_router_topk": 4,
                    "moe_ffn_hidden_size": 32,
                    "moe_aux_loss_coeff": 0.0,
                },
            },
            "data": {"tokenizer": "none"},
            "rollout": {
                "group_size": GROUP,
                "prompts_per_step": PROMPTS,
                "max_response_tokens": setting.length,
            },
            "optimizer": {"learning_rate": setting.learning_rate},
            "training": {"precision": "fp32"},
        }
    )
