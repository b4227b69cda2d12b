"""Measure each objective's gradient at a policy that is k updates ahead of the sampling policy.

    python examples/evidence/gradients.py --length 32 --mismatch router_noise

A small MoE draws batches of responses. Then it is updated k times on other responses of the same
policy, as mini-batches do. At each k, the gradient of every objective contains each token's grad
log pi with a coefficient. The slopes of the log-probs along the direction of the policy gradient
are measured once for all objectives. Coefficients times slopes give each objective's step along
the policy gradient, for each response. This step is compared with the true slope of the reward,
which comes from new responses of the updated policy (estimators.py). One JSON line for each k is
added to the output. Lines that exist already are not measured again.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import records
import torch
from estimators import figures, mean_interval, ratio_figures
from laboratory import RESPONSES, WARM_UP, Batch, Laboratory, Setting, others_mean
from torch import Tensor

from gspo_megatron.config import parse_config
from gspo_megatron.objectives import Objective, build_objective
from gspo_megatron.platform.groups import stop_processes
from gspo_megatron.process.failures import run_script
from gspo_megatron.types import LossInputs

UPDATES = (1, 2, 4, 8, 16)
COSINE_BATCHES = 8  # the number of batches whose whole gradients are taken

UNCLIPPED = {"clip_low": 0.999, "clip_high": 1e9}
# All responses have the same length here, so means over tokens and over sequences are the same.
SAME_SCALE = {"aggregation": "sequence_mean", "advantage": "group_mean_std"}


@dataclass(frozen=True)
class Arm:
    """An objective, and its old policy."""

    section: Mapping[str, Any]  # keys of the section `objective`
    routes: str = "now"  # the experts of its gradient: now, r2 or r3
    # The source of its old log-probs. "off": the trainer with the trainer's experts; "r3": the
    # trainer with the engine's experts; "rollout": the engine.
    old: str = "off"


UNBIASED, BASE = "product unclipped", "gspo unclipped"
# A whole gradient takes a backward pass for each arm, so only these arms have a cosine.
WITH_COSINE = ("gspo", "gspo ±0.1/√L", "gspo unclipped", "grpo", "grpo unclipped", UNBIASED)


def arms_of(mismatch: str, length: int) -> dict[str, Arm]:
    """The objectives that are compared.

    The paper's clip range for GSPO is for thousands of tokens. GSPO is also measured with a range
    of 0.1/√L for L tokens, because the spread of the sequence ratio falls like 1/√L.
    """
    clip = 0.1 / math.sqrt(length)
    gspo = {"name": "gspo", "clip_low": clip, "clip_high": clip}
    product = {"name": "reinforce_leave_one_out", **UNCLIPPED, **SAME_SCALE}
    arms = {
        "gspo": Arm({"name": "gspo"}),
        "gspo ±0.1/√L": Arm(gspo),
        "gspo unclipped": Arm({"name": "gspo", **UNCLIPPED}),
        "gspo_token unclipped": Arm({"name": "gspo_token", **UNCLIPPED}),
        "grpo": Arm({"name": "grpo"}),
        "grpo unclipped": Arm({"name": "grpo", **UNCLIPPED}),
        "cispo": Arm({"name": "cispo", **SAME_SCALE}),
        "gmpo": Arm({"name": "gmpo"}),
        "minirl": Arm({"name": "minirl", **SAME_SCALE}),
        UNBIASED: Arm(product, old="rollout"),
        "gspo ±0.1/√L + r2": Arm(gspo, "r2"),
        "gspo unclipped + r2": Arm({"name": "gspo", **UNCLIPPED}, "r2"),
        "grpo + r2": Arm({"name": "grpo"}, "r2"),
        "grpo unclipped + r2": Arm({"name": "grpo", **UNCLIPPED}, "r2"),
    }
    if mismatch == "none":  # the rollout's and the recomputed log-probs are the same up to rounding
        return arms
    return arms | {
        "gspo ±0.1/√L + r3": Arm(gspo, "r3", "r3"),
        "gspo unclipped + r3": Arm({"name": "gspo", **UNCLIPPED}, "r3", "r3"),
        "grpo + r3": Arm({"name": "grpo"}, "r3", "r3"),
        "grpo unclipped + r3": Arm({"name": "grpo", **UNCLIPPED}, "r3", "r3"),
        "gspo, rollout": Arm({"name": "gspo"}, old="rollout"),
        "gspo ±0.1/√L, rollout": Arm(gspo, old="rollout"),
        "grpo, rollout": Arm({"name": "grpo"}, old="rollout"),
        "gspo ±0.1/√L, sequence_tis": Arm({**gspo, "correction": "sequence_tis"}),
        "grpo, token_tis": Arm({"name": "grpo", "correction": "token_tis"}),
        "grpo, icepop": Arm({"name": "grpo", "correction": "icepop"}),
    }


@dataclass(frozen=True)
class Sizes:
    """The numbers of batches. A batch has 64 responses."""

    own: int  # batches for the gradients of the objectives
    true: int  # batches for the slope of the reward
    direction: int = 8  # batches for the direction of the policy gradient


# With 64 responses the noise of the gradient is about a third of the gradient at any length, so 16
# batches have a noise of 10%. The cost of a token does not depend on the length.
SIZES = {8: Sizes(64, 16), 32: Sizes(32, 12), 128: Sizes(16, 8), 512: Sizes(6, 4, 4)}


def objective_of(section: Mapping[str, Any], length: int) -> Objective:
    """The objective of a run with this `objective` section."""
    config = parse_config({"objective": dict(section), "data": {"tokenizer": "none"}})
    return build_objective(config.objective, length)


def coefficients(
    objective: Objective, now: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor
) -> tuple[Tensor, float]:
    """The coefficients c_t of grad log pi_t in the objective's gradient, which is a mean over
    responses, and the share of tokens whose gradient is cut off. All arguments are [responses,
    length], except advantages [responses]."""
    count, length = now.shape
    logprobs = now.flatten().clone().requires_grad_()
    outputs = objective(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=old.flatten(),
            mask=torch.ones(count * length),
            sequence_index=torch.arange(count).repeat_interleave(length),
            advantages=advantages.float(),
            sequence_lengths=torch.full((count,), float(length)),
            global_num_sequences=count,
            global_num_tokens=count * length,
            sum_over_shards=lambda values: values,
            is_primary_shard=True,
            entropy=torch.zeros(count * length),
            rollout_logprobs=rollout.flatten(),
        )
    )
    (gradient,) = torch.autograd.grad(outputs.loss, logprobs)
    cut = outputs.means.get("clip/token/binding")
    share = 0.0 if cut is None else float(cut[0] / cut[1])
    scale = count / length if objective.name == "reinforce_leave_one_out" else count
    return -gradient.double().view(count, length) * scale, share


def response_advantages(batches: Sequence[Batch], deviation: float) -> Tensor:
    """The advantages [batches, responses] float64: the reward minus the mean of the other
    responses in the group, divided by a constant. Dividing by a group's standard deviation would
    change the expectation, which is the policy gradient."""
    rewards = torch.stack([batch.rewards for batch in batches])
    return (rewards - others_mean(rewards)) / deviation


def policy_gradient(
    laboratory: Laboratory, count: int, scale: float
) -> tuple[Tensor, float, float]:
    """The policy gradient on new responses: its estimate, the length of the true gradient, and the
    cosine between the two."""
    total, squares = 0.0, 0.0
    for _ in range(count):
        batch = laboratory.draw(exactly=True)
        wide, weights = laboratory.widened(batch)
        gradient = laboratory.gradient(wide, weights / scale)
        total, squares = total + gradient, squares + float(gradient.square().sum())
    # the mean of <g_a, g_b> over a != b has no bias from noise
    true = (float(total.square().sum()) - squares) / (count * (count - 1))
    mean = total / count
    true_length = max(true, 0.0) ** 0.5
    return mean, true_length, true_length / float(mean.norm())


def measure_updates(
    laboratory: Laboratory, kept: Sequence[Batch], sizes: Sizes, deviation: float
) -> dict[str, Any]:
    """All figures of the present policy, and of the arms' gradients at this policy."""
    length = laboratory.setting.length
    scale = deviation * length  # the objectives take the mean over a response's tokens
    direction, true_length, aligned = policy_gradient(laboratory, sizes.direction, scale)
    direction /= direction.norm()

    fresh = [laboratory.draw(exactly=True) for _ in range(sizes.true)]
    wide, weights = zip(*map(laboratory.widened, fresh), strict=True)
    steps = laboratory.slopes(wide, "now", direction) * torch.stack(weights) / scale
    true = groups(steps.sum(2))

    laboratory.record_routes(kept, "now")
    advantages = response_advantages(kept, deviation)
    arms = arms_of(laboratory.setting.mismatch, length)
    now, slopes = {}, {}
    for routes in sorted({arm.routes for arm in arms.values()}):
        now[routes] = laboratory.logprobs(kept, routes)
        slopes[routes] = laboratory.slopes(kept, routes, direction)
    old = {name: torch.stack([batch.old[name] for batch in kept]) for name in ("off", "r3")}
    old["rollout"] = torch.stack([batch.rollout for batch in kept])

    own, extra = {}, {}
    for name, arm in arms.items():
        tensors = (now[arm.routes], old[arm.old], old["rollout"])
        found, cut = coefficients(
            objective_of(arm.section, length),
            *(tensor.flatten(0, 1) for tensor in tensors),
            advantages.flatten(),
        )
        found = found.view_as(slopes[arm.routes])
        own[name] = groups((found * slopes[arm.routes]).sum(2))
        extra[name] = {"clipped_tokens": cut}
        if name in WITH_COSINE:
            whole = [
                laboratory.gradient(batch, c, arm.routes)
                for batch, c in zip(kept[:COSINE_BATCHES], found, strict=False)
            ]
            cosines = [float(direction @ g) / max(float(g.norm()), 1e-30) for g in whole]
            extra[name]["cosine"] = mean_interval(np.array(cosines) / aligned)
    measured = figures(
        {name: value.numpy() for name, value in own.items()},
        true.numpy(),
        base=BASE,
        unbiased=UNBIASED,
    )
    log_ratios = {"": now["now"] - old["off"], "r2_": now["r2"] - old["off"]}
    return {
        "reward": float(torch.stack([batch.rewards for batch in fresh]).mean()),
        "gradient_length": true_length,
        "direction_cosine": aligned,
        "changed_experts": changed_experts(kept, "r2", "now"),
        "ratios": {
            prefix + key: value
            for prefix, log_ratio in log_ratios.items()
            for key, value in ratio_figures(log_ratio.flatten(0, 1).double().numpy()).items()
        },
        "arms": {name: measured[name] | extra[name] for name in arms},
    }


def groups(values: Tensor) -> Tensor:
    """The means of the groups [groups], from values [batches, responses]."""
    return values.unflatten(1, (-1, 8)).mean(2).flatten()


def changed_experts(batches: Sequence[Batch], before: str, after: str) -> list[float]:
    """For each layer, the share of experts that were replaced by others."""
    shares = []
    for batch in batches:
        old, new = batch.routes[before], batch.routes[after]
        stays = (old.experts[..., None] == new.experts[..., None, :]).any(-1)
        stays = stays if old.known is None else stays[:, old.known]
        shares.append(1 - stays.double().mean((1, 2)))
    return torch.stack(shares).mean(0).tolist()


def mismatch_figures(kept: Sequence[Batch]) -> dict[str, Any]:
    """The trainer's log-probs compared with the engine's, before any update."""
    delta = torch.stack([batch.old["off"] - batch.rollout for batch in kept]).double()
    of_sequences = delta.mean(2).abs()
    return {
        "token_abs_mean": float(delta.abs().mean()),
        "sequence_abs_mean": float(of_sequences.mean()),
        "outside_paper_clip": float((of_sequences > 3.5e-4).double().mean()),
        "outside_0.04": float((of_sequences > 0.04).double().mean()),
        "changed_experts": changed_experts(kept, "r3", "r2"),
    }


def measure(setting: Setting, sizes: Sizes, updates: Sequence[int], path: Path) -> None:
    """Add the lines of a setting that the file lacks."""
    keys = asdict(setting)
    there = {
        line["updates"] for line in records.read(path) if Setting(**line["setting"]) == setting
    }
    missing = set(updates) - there
    if not missing:
        return
    start = time.monotonic()
    laboratory = Laboratory(setting)
    kept = [laboratory.draw() for _ in range(sizes.own)]
    spent = [laboratory.draw() for _ in range(max(updates))]  # batches for the updates
    laboratory.remember(kept + spent)
    mismatch = mismatch_figures(kept)
    deviation = float(torch.stack([batch.rewards for batch in kept]).std())
    grpo = objective_of({"name": "grpo"}, setting.length)
    for number, batch in enumerate(spent[: max(missing)], 1):
        laboratory.record_routes([batch], "now")
        now = laboratory.logprobs([batch], "now")[0]
        advantages = response_advantages([batch], deviation)[0]
        found, _ = coefficients(grpo, now, batch.old["off"], batch.rollout, advantages)
        laboratory.update(batch, found)
        if number not in missing:
            continue
        record = {
            "setting": keys,
            "updates": number,
            "responses": sizes.own * RESPONSES,
            "sizes": asdict(sizes),
            "warm_up": WARM_UP,
            "mismatch": mismatch,
            **measure_updates(laboratory, kept, sizes, deviation),
            "seconds": time.monotonic() - start,
            "processor_seconds": laboratory.processor_seconds(),
        }
        records.add(path, record)
        print(f"{keys}, {number} updates: {time.monotonic() - start:.0f} s", flush=True)
    laboratory.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=32, choices=SIZES)
    parser.add_argument("--mismatch", choices=records.MISMATCHES, default="none")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, nargs="+", default=list(UPDATES))
    parser.add_argument("--output", type=Path, default=records.RESULTS / "gradients.jsonl")
    parser.add_argument("--label", help="any word, to know the process by")
    arguments = parser.parse_args()
    setting = Setting(arguments.length, arguments.seed, arguments.mismatch, arguments.learning_rate)
    torch.set_num_threads(1)
    try:
        measure(setting, SIZES[setting.length], arguments.updates, arguments.output)
    finally:
        stop_processes()


if __name__ == "__main__":
    sys.exit(run_script(main))
