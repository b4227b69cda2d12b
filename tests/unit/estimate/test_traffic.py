"""The bytes that ranks send, and the size of the key/value cache, computed by hand for a layer of
known sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import Config, check_config, resolve_parallel
from gspo_megatron.estimate.cost import NETWORK_BYTES, NODE_BYTES, axis_rates
from gspo_megatron.estimate.layout import LayoutEstimate, estimate_layout
from gspo_megatron.models.attention import KeyValueCache
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine
from tests.unit.estimate.conftest import ConfigMaker
from tests.unit.hf.policies import config_of, policy_of
from tests.unit.hf.published import write_model
from tests.unit.models.one_rank import one_rank_groups

TOKENS, HIDDEN, LAYERS, TOPK = 96, 64, 4, 2
STEP: dict[str, Any] = {
    "rollout": {"group_size": 4, "prompts_per_step": 8, "max_response_tokens": 72},
    "data": {"max_prompt_tokens": 24, "tokenizer": "none"},
    "training": {"micro_batch_tokens": TOKENS},
}


def sent(config: Config, world_size: int) -> tuple[dict[str, int], LayoutEstimate]:
    check_config(config, world_size)
    found = estimate_layout(config, world_size, 99)
    return found.most_traffic(), found


DELTA_NETS = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_num_value_heads": 16,
}


def test_all_to_alls_of_the_experts(make_config: ConfigMaker) -> None:
    """Tokens go to the experts and back, in the forward and in the backward pass. The router's
    weights (fp32) go with them. A rank has 32 sequences in 8 micro-batches. The last 3 of 4
    mini-batches have one more forward pass."""
    traffic, found = sent(make_config("tiny", "ep=4,dp=4", **STEP), 4)
    assert found.work.micro_batches_per_step == 8
    rows = TOKENS * TOPK
    one_way = rows * HIDDEN * 2 * 2 + rows * 4
    expected = LAYERS * one_way * (2 * 8 + 6) * 3 / 4
    assert traffic["ep"] == pytest.approx(expected, rel=0.01)
    assert traffic["tp"] == traffic["cp"] == traffic["pp"] == traffic["etp"] == 0


def test_hidden_states_between_stages(make_config: ConfigMaker) -> None:
    traffic, found = sent(make_config("tiny", "pp=2", **STEP), 2)
    batches = found.work.micro_batches_per_step
    assert batches == 32
    hidden = TOKENS * HIDDEN * 2
    assert found.traffic[0]["pp"] == hidden * (batches + batches * 3 // 4)
    assert found.traffic[1]["pp"] == hidden * batches
    assert traffic["pp"] == found.traffic[0]["pp"]


def test_gradients_and_weights_over_data_parallel_ranks(make_config: ConfigMaker) -> None:
    """In an update, 4 bytes of gradient and 2 bytes of weight are communicated for each element. A
    rank sends the other rank half of the elements."""
    traffic, found = sent(make_config("tiny", "dp=2", **STEP), 2)
    # the padding of the vocabulary also counts
    elements = found.parameters.total() + (112 - 99) * 2 * HIDDEN
    both = traffic["dp"] + traffic["edp"]
    assert both == pytest.approx(4 * elements * 6 / 2, rel=0.01)


def test_only_adapters_are_sent_in_an_update(make_config: ConfigMaker) -> None:
    """Frozen weights have no gradients, and no rank needs them from another rank."""
    lora = {"rank": 8, "targets": ["q_proj", "head"]}
    own = STEP | {"model": {"vocab_size": 112, "lora": lora}}
    config = make_config("tiny", "dp=2", **own)
    check_config(config, 2)
    found = estimate_layout(config, 2, 112)
    # A and B of q in each layer (64 queries of 64 channels), and of the head
    elements = 8 * (LAYERS * (64 + HIDDEN) + HIDDEN + 112)
    plain = estimate_layout(make_config("tiny", "dp=2", **STEP | {"model": {}}), 2, 112)
    assert found.parameters.total() == plain.parameters.total() + elements
    traffic = found.most_traffic()
    assert traffic["dp"] == pytest.approx(4 * elements * 6 / 2, rel=0.02)
    assert traffic["edp"] == 0


def test_recomputation_sends_again(make_config: ConfigMaker) -> None:
    plain, _ = sent(make_config("tiny", "ep=2,dp=2", **STEP), 2)
    again = STEP | {"training": STEP["training"] | {"recompute": "full"}}
    full, _ = sent(make_config("tiny", "ep=2,dp=2", **again), 2)
    # With recomputation, an update has 3 passes instead of 2. With and without recomputation, 3 of
    # the 4 mini-batches have one more pass before the update.
    assert full["ep"] / plain["ep"] == pytest.approx(3.75 / 2.75, rel=0.01)


def test_groups_within_a_node_use_its_links(make_config: ConfigMaker) -> None:
    rates = axis_rates(resolve_parallel(make_config("tiny", "tp=4,pp=2,cp=4,ep=4"), 64))
    inside = {axis for axis, rate in rates.items() if rate == NODE_BYTES}
    assert inside == {"tp", "etp", "ep"}
    assert {rates[axis] for axis in rates.keys() - inside} == {NETWORK_BYTES}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_the_cache_is_the_rollout_engines(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    """The estimate adds one half of the cache, for the moment at which the cache shrinks. Keys and
    values of latent attention have different widths. Layers with windows keep no more keys than the
    window, and delta nets have a state of fixed size."""
    sizes = {"vocab_size": 99, "max_position_embeddings": 96}
    folder = write_model(tmp_path / "model", family, seed=1, **sizes)
    largest = 0
    native = KeyValueCache.start_token

    def watched(self: KeyValueCache, *args: Any) -> None:
        nonlocal largest
        held = sum(k.nbytes + v.nbytes for k, v in self._layers.values())
        largest = max(largest, held)
        native(self, *args)

    monkeypatch.setattr(KeyValueCache, "start_token", watched)
    with one_rank_groups():
        engine = MegatronEngine(policy_of(config_of(folder)), pad_id=0, eos_id=1)
        prompts = [tuple(range(2, 26))] * 8
        engine.generate(Requests(prompts, list(range(8)), 4), Sampling(max_tokens=72), seed=3)
    own = {"training": {"precision": "fp32"}, "model": {"hf_path": str(folder)}}
    _, found = sent(make_config("tiny", "tp=1", **STEP | own), 1)
    assert found.worst.kv_cache == largest * 3 // 2
