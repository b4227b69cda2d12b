"""The stream of weights holds one tensor at a time, however large the model is."""

from __future__ import annotations

import math

import pytest
import torch

from gspo_megatron.config import check_config, parse_config, resolve_parallel
from gspo_megatron.estimate.model import rank_model
from gspo_megatron.hf.export import stream_hf

VOCABULARY = 151_936


@pytest.mark.parametrize(("layers", "experts"), [(2, 16), (4, 32)])
def test_no_more_than_one_tensor_beside_the_model(layers: int, experts: int) -> None:
    """The test runs on the meta device, with the layer sizes of Qwen3-30B-A3B."""
    sizes = {"num_layers": layers, "num_moe_experts": experts}
    config = parse_config(
        {
            "model": {"preset": "qwen3-30b-a3b", "megatron": sizes},
            "data": {"tokenizer": "none"},
            "training": {"precision": "bf16"},
        }
    )
    check_config(config, 1)
    with rank_model(config, resolve_parallel(config, 1), 0, VOCABULARY) as model:
        trace = model.trace
        start = trace.live_bytes
        trace.start_peak()
        largest = total = 0
        for _, tensor in stream_hf(model.policy, dtype=torch.float32):
            assert tensor is not None
            largest, total = max(largest, tensor.nbytes), total + tensor.nbytes
            del tensor
        beside = trace.peak_bytes - start
    assert largest == math.prod((VOCABULARY, 2048)) * 4
    # At most the tensor itself and its bf16 source, which is half as large, are in memory.
    assert largest <= beside <= 1.5 * largest
    assert total > 2 * largest  # the largest tensor is less than half of all tensors
