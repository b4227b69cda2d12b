"""The log-prob head on the real model, also with padding of the vocabulary."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gspo_megatron.batching.micro_batches import MicroBatchBuilder
from gspo_megatron.models import specs
from gspo_megatron.models.build import Policy
from gspo_megatron.models.policy import HeadInputs
from gspo_megatron.models.reference import ReferencePolicy
from gspo_megatron.models.specs import choose_backend
from tests.unit.models.one_rank import (
    PAD,
    VOCABULARY,
    micro_batch,
    random_sequences,
    tiny_policy,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def policy(request: pytest.FixtureRequest, one_rank: None) -> Policy:
    # Large weights make the distributions far from uniform.
    return tiny_policy(
        model={"tie_embeddings": request.param, "megatron": {"init_method_std": 0.2}}
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_candidates_are_the_most_probable_tokens_at_the_temperature(
    policy: Policy, temperature: float
) -> None:
    """A teacher finds the candidates. The policy computes the log-probs of the same tokens."""
    model, generator = policy.models[0], torch.Generator().manual_seed(4)
    hidden, others = torch.randn(2, 11, 1, 64, generator=generator)
    labels = HeadInputs(torch.arange(11), torch.arange(11) * 5 % VOCABULARY, temperature, top_k=3)
    with torch.no_grad():
        for states in (hidden, others):
            _, _, is_greedy, *buckets = model.compute_language_model_loss(labels, states)
            labels.top_k = 0  # the second pass gets the candidates of the first one
            rows = (model.next_token_logits(states[:, 0]).double() / temperature).log_softmax(-1)
            if states is hidden:
                assert torch.equal(labels.candidates, rows.topk(3).indices)
            best = labels.candidates
            rest = rows.exp().scatter(1, best, 0.0).sum(1, keepdim=True).log()
            expected = torch.cat([rows.gather(1, best), rest], 1)
            found = torch.stack(buckets, 1).double()
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
            assert torch.equal(is_greedy.bool(), rows.argmax(1) == best[:, 0])


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_a_bf16_policy_are_not_rounded_to_bf16(tied: bool) -> None:
    low = tiny_policy(
        model={"tie_embeddings": tied, "megatron": {"init_method_std": 0.5}},
        training={"precision": "bf16"},
    )
    model = low.models[0]
    weight = model.head_weight.detach()
    assert weight.dtype == torch.bfloat16
    hidden = torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    targets = torch.arange(40) * 7 % VOCABULARY
    logits = model.next_token_logits(hidden[:, 0])
    labels = HeadInputs(torch.arange(40), targets)
    with torch.no_grad():
        logprobs, entropies = model.compute_language_model_loss(labels, hidden)
    expected = hidden[:, 0].double() @ weight[:VOCABULARY].double().t()
    assert logits.dtype == torch.float32 and float(expected.std()) > 3
    rows = torch.log_softmax(expected, dim=-1)
    # The tolerance for sums of 64 terms in fp32. Rounding to bf16 would change the sums by up to
    # 0.03.
    kind = {"atol": 2e-5, "rtol": 2e-6}
    torch.testing.assert_close(logits.double(), expected, **kind)
    torch.testing.assert_close(logprobs.double(), rows.gather(1, targets[:, None])[:, 0], **kind)
    torch.testing.assert_close(entropies.double(), -(rows.exp() * rows).sum(-1), **kind)


def test_train_and_eval_reach_every_chunk(policy: Policy) -> None:
    policy.eval()
    assert not any(m.training for m in policy.models[0].modules())
    policy.train()
    assert all(m.training for m in policy.models[0].modules())


FIND = "gspo_megatron.models.specs.importlib.util.find_spec"


def test_a_missing_backend_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, installed, missing in (
        (False, False, "a CUDA device"),
        (False, True, "a CUDA device"),
        (True, False, "the package transformer-engine"),
    ):
        monkeypatch.setattr(FIND, lambda _, it=installed: SimpleNamespace() if it else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda it=is_there: it)
        assert choose_backend("auto", "bf16") == "torch_native"
        assert choose_backend("torch_native", "bf16") == "torch_native"
        with pytest.raises(ValueError, match=f"{missing} is missing"):
            choose_backend("transformer_engine", "bf16")
    monkeypatch.setattr(FIND, lambda _: SimpleNamespace())
    for precision in ("bf16", "fp8-blockwise"):
        assert choose_backend("auto", precision) == "transformer_engine"
    # Transformer Engine lacks these precisions, at least in some layers
    for precision in ("fp32", "fp64"):
        assert choose_backend("auto", precision) == "torch_native"


LATENT = {"multi_latent_attention": True, "q_lora_rank": 18, "layernorm_epsilon": 1e-6}


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        (LATENT, "transformer_engine"),
        # Transformer Engine has one epsilon for all norms
        (LATENT | {"layernorm_epsilon": 1e-5}, "torch_native"),
        # Megatron-Core 0.19 normalises queries that have no latent
        (LATENT | {"q_lora_rank": None}, "torch_native"),
        ({"layernorm_epsilon": 1e-5}, "transformer_engine"),
        ({}, "transformer_engine"),
    ],
)
def test_auto_takes_the_layers_that_can_compute_the_attention(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], backend: str
) -> None:
    monkeypatch.setattr(FIND, lambda _: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(specs.MLASelfAttention, "_resolve_qk_norm_config", None, raising=False)
    assert choose_backend("auto", "bf16", fields) == backend
    # a choice of the user stays, and is refused with the reason when the layers are built
    assert choose_backend("transformer_engine", "bf16", fields) == "transformer_engine"


@pytest.mark.parametrize(
    ("recipe", "multiple"), [("delayed", 16), ("blockwise", 16), ("mxfp8", 32)]
)
def test_fp8_pads_micro_batches_to_what_its_matrix_products_take(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, recipe: str, multiple: int
) -> None:
    monkeypatch.setattr(policy.config, "fp8", "e4m3")
    monkeypatch.setattr(policy.config, "fp8_recipe", recipe)
    batch = micro_batch(MicroBatchBuilder(policy, PAD, 1.0), random_sequences(5, [(3, 4)]))
    assert batch.packed.input_ids.shape == (1, multiple)
    assert int(batch.packed.padding_mask.sum()) == multiple - 7


# --- The reference policy's weights in the policy's place, and back ------------------------------


@pytest.mark.parametrize("offload", [False, True])
def test_all_that_decides_the_output_changes_places(offload: bool) -> None:
    """The routers' biases, which balance the experts without an auxiliary loss, are exchanged, too,
    although they are not parameters."""
    balancing = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_aux_loss_coeff": 0.0,
    }
    policy = tiny_policy(model={"megatron": balancing})
    (model,) = policy.models
    tensors = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n.endswith("expert_bias")}
    assert len(tensors) > len(dict(model.named_parameters()))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    reference = ReferencePolicy(policy, offload=offload)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(1.0)
    with reference.in_place():
        assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert all(torch.equal(tensor, before[name] + 1.0) for name, tensor in tensors.items())
