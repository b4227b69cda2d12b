"""Facts about vLLM on which the rollouts rely. If a newer vLLM breaks one of them, a test fails.

The reference is transformers with the same weights, in fp32. It shares no code with vLLM.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.hooks import RemovableHandle
from transformers import Qwen3MoeForCausalLM

from tests.vllm.servers import Sample, Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the first test may have to make vLLM's environment
]
TEMPERATURE = 0.7
VOCABULARY = 257
SAME = 1e-5  # in nats: the largest difference between two fp32 implementations
WRONG = 1e-2  # in nats: a thousand times as much
# In a few rows two experts have nearly equal weights and may be exchanged, so this share of equal
# rows is enough.
SAME_EXPERTS = 0.999
LAYERS, TOP_K = 4, 2
OLD, NEW = 0, 1  # the seeds of two sets of weights; the server starts with OLD
FIRST_VERSION = "default"  # the version of a server before any update


@dataclass(frozen=True)
class Policy:
    """The server, and sets of weights that can be given to it."""

    server: Server
    folder_of: Callable[[int], Path]
    draws: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def prompt(self, length: int) -> list[int]:
        return self.draws.integers(0, VOCABULARY, length).tolist()

    def start_sample(self, prompt: list[int], tokens: int) -> Callable[[], Sample]:
        seed = int(self.draws.integers(2**31))
        return self.server.start_sample(prompt, tokens, temperature=TEMPERATURE, seed=seed)

    def sample(self, prompt: list[int], tokens: int) -> Sample:
        return self.start_sample(prompt, tokens)()

    def update(
        self, seed: int, *, forget: bool = True, pack: bool = True, clear: bool = True
    ) -> None:
        """Give the running server other weights. Without `forget` or `pack`, some weights keep
        their old values."""
        server = self.server
        # vLLM's documentation says that mode "keep" ignores `clear_cache`. The tests show that this
        # is wrong.
        server.post("/pause", mode="keep", clear_cache=str(clear).lower())
        if forget:
            assert server.call_workers("forget_prepacked_experts") == [str(LAYERS)]
        server.call_workers("reload_weights", weights_path=str(self.folder_of(seed)))
        if pack:
            assert server.call_workers("pack_tied_output_layer") == ["1"]
        version = version_of(seed) if forget and pack and clear else "mixture"
        server.post("/update_weight_version", {"new_version": version})
        if clear:
            assert server.post("/reset_prefix_cache") == {"success": True}
        server.post("/resume")

    def errors(self, sample: Sample, seed: int, replay_from: int = 0) -> torch.Tensor:
        """The difference of each log-prob from the log-prob by transformers, in nats: [response
        tokens]."""
        expected = reference_logprobs(self.folder_of(seed), sample, replay_from)
        return (expected - torch.tensor(sample.logprobs)).abs()

    def error(self, sample: Sample, seed: int) -> float:
        return float(self.errors(sample, seed).max())


def version_of(seed: int) -> str:
    return f"seed {seed}"


@functools.cache
def reference(folder: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logprobs(folder: Path, sample: Sample, replay_from: int) -> torch.Tensor:
    """The log-probs [response tokens] by transformers, in float32 and at the sample's temperature.
    From row `replay_from` on, the server's experts are used. Otherwise two experts of nearly equal
    weight could change places, which would change all later log-probs. Another test checks the
    server's choice of experts."""

    def replay(layer: int, result: Any) -> Any:
        logits, weights, experts = result
        experts = experts.clone()
        experts[replay_from:] = torch.tensor(sample.experts[replay_from:, layer].astype(np.int64))
        weights = torch.softmax(logits, dim=-1).gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    with gate_hooks(reference(folder), replay) as model:
        logits = model(torch.tensor([sample.prompt + sample.tokens[:-1]])).logits[0]
    logprobs = torch.log_softmax(logits[len(sample.prompt) - 1 :] / TEMPERATURE, dim=-1)
    return logprobs.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]


@torch.no_grad()
def reference_experts(folder: Path, sample: Sample) -> np.ndarray:
    """The experts that the routers of transformers choose, (prompt + response - 1, layers, k)."""
    chosen = []
    with gate_hooks(reference(folder), lambda _, result: chosen.append(result[2])) as model:
        model(torch.tensor([sample.prompt + sample.tokens[:-1]]))
    return torch.stack(chosen, dim=1).numpy()


@contextlib.contextmanager
def gate_hooks(
    model: Qwen3MoeForCausalLM, hook: Callable[[int, Any], Any]
) -> Iterator[Qwen3MoeForCausalLM]:
    """Call `hook(layer, (logits, weights, experts))` after each router. If the hook returns a value
    other than None, this value replaces the router's result."""

    def register(number: int, gate: torch.nn.Module) -> RemovableHandle:
        return gate.register_forward_hook(lambda _gate, _inputs, result: hook(number, result))

    handles = [register(n, layer.mlp.gate) for n, layer in enumerate(model.model.layers)]
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()


def same_experts(sample: Sample, folder: Path) -> np.ndarray:
    """Return (prompt + response - 1, layers) booleans: True where the server's experts are the same
    as those of transformers, in any order."""
    expected = np.sort(reference_experts(folder, sample), axis=-1)
    return (np.sort(sample.experts, axis=-1) == expected).all(axis=-1)


@pytest.fixture(scope="module")
def shared_policy(vllm_server: Server, tiny_qwen3_moe: Callable[[int], Path]) -> Policy:
    return Policy(vllm_server, tiny_qwen3_moe)


@pytest.fixture
def policy(shared_policy: Policy) -> Policy:
    """The server with the old weights and an empty cache, whatever earlier tests did."""
    version = shared_policy.server.get("/weight_info")["weight_version"]
    if version not in (FIRST_VERSION, version_of(OLD)):
        shared_policy.update(OLD)
    return shared_policy


def test_logprobs_are_those_of_the_tempered_distribution(policy: Policy) -> None:
    for length in (1, 7, 60):
        sample = policy.sample(policy.prompt(length), 48)
        assert len(sample.tokens) == len(sample.logprobs) == 48
        assert policy.error(sample, OLD) < SAME


def test_routed_experts_are_the_choice_of_the_routers(policy: Policy) -> None:
    same = []
    for length in (1, 5, 20, 40, 60, 100, 200, 300):
        sample = policy.sample(policy.prompt(length), 100)
        assert sample.experts.shape == (length + 100 - 1, LAYERS, TOP_K)
        # Each row has k different experts.
        assert (np.diff(np.sort(sample.experts, axis=-1), axis=-1) > 0).all()
        same.append(same_experts(sample, policy.folder_of(OLD)))
    rows = np.concatenate(same)
    assert rows.size > 5000
    assert rows.mean() >= SAME_EXPERTS


def test_more_tokens_than_one_pass_takes_are_no_trouble_for_seeds(policy: Policy) -> None:
    """A pass takes 2,048 tokens. If vLLM on CPUs split prompts into chunks, it would crash because
    of the requests' seeds."""
    calls = [policy.start_sample(policy.prompt(300), 4) for _ in range(20)]
    assert all(policy.error(call(), OLD) < SAME for call in calls)


def test_a_running_server_takes_new_weights(policy: Policy) -> None:
    prompt = policy.prompt(30)
    assert policy.error(policy.sample(prompt, 48), NEW) > WRONG  # the two sets of weights differ
    policy.update(NEW)
    assert policy.error(policy.sample(prompt, 48), NEW) < SAME
    assert policy.server.get("/weight_info") == {"weight_version": version_of(NEW)}


def test_without_our_worker_the_server_keeps_old_experts(policy: Policy) -> None:
    policy.update(NEW, forget=False)
    error = policy.error(policy.sample(policy.prompt(30), 48), NEW)
    superfluous = "vLLM packs the experts again by itself: GspoWorker has become superfluous"
    assert error > WRONG, superfluous


def test_without_our_worker_the_server_keeps_a_tied_output_layer(policy: Policy) -> None:
    policy.update(NEW, pack=False)
    error = policy.error(policy.sample(policy.prompt(30), 48), NEW)
    superfluous = "vLLM packs the layer again by itself: its method has become superfluous"
    assert error > WRONG, superfluous


def test_without_a_reset_a_known_prompt_has_the_old_cache(policy: Policy) -> None:
    prompt = policy.prompt(300)
    policy.sample(prompt, 8)
    policy.update(NEW, clear=False)
    assert policy.error(policy.sample(prompt, 48), NEW) > WRONG
    # For other prompts, the new weights are used.
    assert policy.error(policy.sample(policy.prompt(300), 48), NEW) < SAME
    assert policy.server.post("/reset_prefix_cache") == {"success": True}
    assert policy.error(policy.sample(prompt, 48), NEW) < SAME


def test_a_response_in_flight_goes_on_with_the_new_weights_alone(policy: Policy) -> None:
    """With clear_cache, a pause drops the keys and values of responses in progress. The server
    computes the keys and values of the earlier tokens again with the new weights. The old log-probs
    and experts of these tokens do not change."""
    prompt, folder_of = policy.prompt(100), policy.folder_of
    finish = policy.start_sample(prompt, 1500)
    # This response works as a clock, because it is generated in the same batches.
    policy.server.sample(prompt[:1], 60)
    policy.update(NEW)
    sample = finish()
    # A single token may have unexpected log-probs, if two experts have nearly equal weights.
    looks_old = torch.where(policy.errors(sample, OLD) < SAME, 1, -1)
    first_new = int(looks_old.cumsum(0).argmax()) + 1
    assert 0 < first_new < 1500, "the update came before the response or after it"
    row = len(prompt) + first_new - 1  # the row from which the first new token was sampled
    # The server does not return the experts of rows that it computes again. If one of these experts
    # differs, all later log-probs change a little. So the median of the differences is tested. With
    # old keys and values the median would be 1.
    assert policy.errors(sample, NEW, replay_from=row)[first_new:].median() < WRONG
    assert same_experts(sample, folder_of(OLD))[:row].mean() >= SAME_EXPERTS
    assert same_experts(sample, folder_of(NEW))[row:].mean() >= SAME_EXPERTS
