"""Gradients through Megatron's schedule. The given loss is not scaled, and the routers' own losses
are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import router as router_module
from torch import Tensor

from gspo_megatron.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    forward_backward,
    response_logprobs,
    run_chunk,
)
from gspo_megatron.config.schema import OptimizerSection
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from tests.unit.models.one_rank import (
    PAD,
    micro_batch,
    random_sequences,
    tiny_config,
    tiny_policy,
)
from tests.unit.routing.steps import a_step, moe_policy, update, updater_for

pytestmark = pytest.mark.usefixtures("one_rank")

AUX, Z = 0.3, 0.05
EXPERTS, TOP_K = 8, 2
BATCHES = [
    random_sequences(1, [(3, 5), (1, 9), (6, 2)]),
    random_sequences(2, [(4, 11), (2, 1)]),
]


class Setting:
    """A policy with an optimizer, which Megatron needs to complete gradients."""

    def __init__(self, **megatron: object) -> None:
        model = {"megatron": {"init_method_std": 0.15, **megatron}}
        self.policy: Policy = tiny_policy(model=model)
        self.trainer: Trainer = build_trainer(
            self.policy, OptimizerSection(), Schedule(1e-3, 0.0, 0, 10, "constant")
        )

    def micro_batches(self, multiple: int = 1) -> list[MicroBatch]:
        builder = MicroBatchBuilder(self.policy, PAD, 1.0)
        builder.spec = replace(builder.spec, multiple=multiple)
        return [micro_batch(builder, sequences) for sequences in BATCHES]

    def gradients(
        self, micro_batches: Sequence[MicroBatch], weight: float = 1.0
    ) -> dict[str, Tensor]:
        """The gradients that the schedule computes, for `weight` times the sum of all log-probs."""
        zero_gradients(self.policy.chunks, self.trainer.optimizer)

        def loss(_: MicroBatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, int]:
            return weight * logprobs.sum(), logprobs.numel()

        full = sum(bool(batch.packed.members) for batch in micro_batches)
        figures = forward_backward(self.policy, micro_batches, loss, full)
        assert figures == [m.packed.targets.numel() for m in micro_batches]
        parameters = self.policy.models[0].named_parameters()
        return {name: p.main_grad.clone() for name, p in parameters}


def explicit_gradients(
    setting: Setting, micro_batches: Sequence[MicroBatch], *, weight: float, aux: float, z: float
) -> dict[str, Tensor]:
    """The gradients that autograd computes from the formulas. The loss is summed over
    micro-batches, and the routers' losses are averaged."""
    model = setting.policy.models[0]
    total = torch.zeros(())
    for batch in micro_batches:
        logits: list[Tensor] = []
        routers = [layer.mlp.router for layer in model.decoder.layers]
        for router in routers:
            router.gating = recording(router.gating, logits)
        packed = batch.packed
        logprobs = run_chunk(model, batch)[0]
        for router in routers:
            del router.gating
        real = torch.ones(packed.input_ids.shape[1], dtype=torch.bool)
        if packed.padding_mask is not None:
            real = ~packed.padding_mask[0]
        assert len(logits) == len(routers) == 2
        total = total + weight * logprobs.sum()
        for layer in logits:
            losses = router_losses(layer.flatten(0, 1)[real], aux, z)
            total = total + losses / len(micro_batches)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(named.items(), gradients, strict=True)
    }


def recording(gating: object, seen: list[Tensor]) -> object:
    def record(hidden: Tensor) -> Tensor:
        seen.append(gating(hidden))
        return seen[-1]

    return record


def router_losses(logits: Tensor, aux: float, z: float) -> Tensor:
    """The losses for the logits [tokens, experts] of one layer: load balancing (Fedus et al. 2021,
    equation 4, with top-k), and z loss (Zoph et al. 2022, equation 5)."""
    probabilities = torch.softmax(logits, dim=-1)
    chosen = logits.topk(TOP_K).indices
    shares = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
    balance = EXPERTS * (shares * probabilities.mean(0)).sum()
    return aux * balance + z * (torch.logsumexp(logits, dim=-1) ** 2).mean()


@pytest.fixture(scope="module")
def plain(one_rank: None) -> Setting:
    """A model with the weights of `balanced`, but without losses of the routers."""
    return Setting()


@pytest.fixture(scope="module")
def balanced(one_rank: None) -> Setting:
    return Setting(moe_aux_loss_coeff=AUX, moe_z_loss_coeff=Z)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        # The two results differ by fp32 rounding, because they sum over tokens in different orders.
        scale = float(expected[name].abs().max())
        difference = float((gradient - expected[name]).abs().max())
        assert difference <= 2e-5 * scale + 1e-7, name


@pytest.mark.parametrize("multiple", [1, 16], ids=["tight", "padded"])
@pytest.mark.parametrize("chosen", [[0], [1], [0, 1]], ids=str)
def test_the_losss_gradient_is_the_sum_over_micro_batches(
    plain: Setting, chosen: list[int], multiple: int
) -> None:
    micro_batches = [plain.micro_batches(multiple)[i] for i in chosen]
    expected = explicit_gradients(plain, micro_batches, weight=0.4, aux=0.0, z=0.0)
    assert_same(plain.gradients(micro_batches, weight=0.4), expected)


@pytest.mark.parametrize("multiple", [1, 16], ids=["tight", "padded"])
@pytest.mark.parametrize("chosen", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("weight", [0.0, 0.02])
def test_the_routers_losses_are_averaged_over_micro_batches(
    plain: Setting, balanced: Setting, chosen: list[int], multiple: int, weight: float
) -> None:
    own = [balanced.micro_batches(multiple)[i] for i in chosen]
    by_hand = [plain.micro_batches(multiple)[i] for i in chosen]
    expected = explicit_gradients(plain, by_hand, weight=weight, aux=AUX, z=Z)
    got = balanced.gradients(own, weight=weight)
    assert_same(got, expected)
    router = "decoder.layers.0.mlp.router.weight"
    # The gradient is large enough to come from the routers' losses and not from rounding.
    assert float(got[router].abs().max()) > 1e-3


def test_one_loss_alone(plain: Setting) -> None:
    for aux, z in ((AUX, 0.0), (0.0, Z)):
        setting = Setting(moe_aux_loss_coeff=aux, moe_z_loss_coeff=z or None)
        expected = explicit_gradients(plain, plain.micro_batches(), weight=0.0, aux=aux, z=z)
        assert_same(setting.gradients(setting.micro_batches(), weight=0.0), expected)


def test_an_empty_micro_batch_adds_nothing(plain: Setting, balanced: Setting) -> None:
    for setting in (plain, balanced):
        empty = micro_batch(MicroBatchBuilder(setting.policy, PAD, 1.0), [])
        expected = setting.gradients(setting.micro_batches())
        assert_same(setting.gradients([*setting.micro_batches(), empty]), expected)


def test_megatron_divides_by_the_tokens_of_an_empty_micro_batch() -> None:
    """The stock function returns a count of 0. For this reason, platform.megatron_fixes returns at
    least 1. If this test fails, the fix can be removed."""
    nobody = torch.zeros(4, EXPERTS, dtype=torch.bool)
    mended = router_module.get_tokens_per_expert_and_token_count
    group = parallel_state.get_tensor_model_parallel_group()
    arguments = {"reduce_group": group, "topk": TOP_K, "with_padding_mask": True}
    assert mended.__wrapped__(routing_map=nobody, **arguments)[2] == 0
    assert mended(routing_map=nobody, **arguments)[2] == 1


def test_the_log_prob_pass_leaves_gradients_and_mode_alone(plain: Setting) -> None:
    micro_batches = plain.micro_batches()
    before = plain.gradients(micro_batches)
    collected = response_logprobs(plain.policy, micro_batches)
    after = {n: p.main_grad for n, p in plain.policy.models[0].named_parameters()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(module.training for module in plain.policy.models[0].modules())
    for batch, (logprobs, entropies) in zip(micro_batches, collected, strict=True):
        assert logprobs.shape == entropies.shape == batch.packed.targets.shape
        assert not logprobs.requires_grad


def test_the_log_prob_pass_agrees_with_the_training_pass(balanced: Setting) -> None:
    micro_batches = balanced.micro_batches()
    seen: list[Tensor] = []

    def loss(_: MicroBatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, None]:
        seen.append(logprobs.detach().clone())
        return 0.0 * logprobs.sum(), None

    forward_backward(balanced.policy, micro_batches, loss, len(micro_batches))
    collected = response_logprobs(balanced.policy, micro_batches)
    # Before the first update, the ratio is exactly 1.
    for trained, (logprobs, _) in zip(seen, collected, strict=True):
        assert torch.equal(trained, logprobs)


# --- Learning rates: the configuration counts steps, and the schedule counts updates -------------

PEAK, STEPS, MINI_BATCHES, WARMUP = 1e-3, 5, 3, 2


def rate_of(number: int) -> float:
    """The rate of optimizer update `number`, which counts from 0. It rises over WARMUP steps, and
    then falls linearly to 0."""
    warmup, total = WARMUP * MINI_BATCHES, STEPS * MINI_BATCHES
    if number < warmup:
        return PEAK * (number + 1) / warmup
    return PEAK * (total - number) / (total - warmup)


def test_the_rate_of_a_step_is_that_of_its_last_update() -> None:
    config = tiny_config(
        objective={"mini_batches": MINI_BATCHES},
        optimizer={"learning_rate": PEAK, "warmup_steps": WARMUP, "decay": "linear"},
        training={"steps": STEPS},
    )
    policy = moe_policy()
    updater = updater_for(policy, {})
    updater.trainer = build_trainer(
        policy, config.optimizer, Schedule.of(config.optimizer, STEPS, MINI_BATCHES)
    )
    rates = [update(updater)["lr"] for _ in range(STEPS)]
    last = [rate_of(step * MINI_BATCHES + MINI_BATCHES - 1) for step in range(STEPS)]
    assert rates == pytest.approx(last, rel=1e-6)


@pytest.mark.parametrize("source", ["recompute", "auto", "rollout"])
def test_where_old_log_probs_come_from(source: str) -> None:
    updater, step = updater_for(moe_policy(), {}, {"old_logprobs": source}), a_step()
    # With "auto", the updater would use the exact log-probs of the engine.
    updater.recomputes = source == "recompute"
    mini_batches = updater.build_micro_batches(step.plans, step.sequences, step.index)
    updater.compute_old_logprobs(mini_batches)
    for number, batch in enumerate(mini_batches):
        for each in batch:
            old, drawn = each.old_logprobs, each.rollout_logprobs
            if number == 0 and source != "rollout":
                assert old is None  # the training pass computes the old log-probs itself
            else:
                assert torch.equal(old, drawn) == (source != "recompute")


def test_adam_updates_all_parameters_by_one_operation(plain: Setting) -> None:
    groups = plain.trainer.optimizer.param_groups
    assert [group["fused"] for group in groups if group["params"]] == [True] * len(groups)
    stock = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    # If torch fused the update by default, the option would be unnecessary.
    assert not stock.param_groups[0]["fused"]


def test_no_bias_has_weight_decay(one_rank: None) -> None:
    """The biases of experts have several axes, so Megatron-Core would take them for matrices."""
    policy = tiny_policy(model={"megatron": {"add_bias_linear": True}})
    schedule = Schedule(1e-3, 1e-3, 0, 1, "constant")
    optimizer = build_trainer(policy, OptimizerSection(weight_decay=0.1), schedule).optimizer
    groups = [group for group in optimizer.param_groups if group["wd_mult"]]
    decayed = sum(parameter.numel() for group in groups for parameter in group["params"])
    matrices = [
        parameter.numel()
        for name, parameter in policy.models[0].named_parameters()
        if parameter.dim() > 1 and "bias" not in name
    ]
    assert decayed == sum(matrices)
