"""Advantages of responses, or of their turns, relative to the other responses to the same prompt.

`build_advantages` returns the estimator that a configuration asks for. The functions below it take
`rewards` and `group_index`, both [num_sequences]. All responses of a group must be given. The order
of responses and the numbers in `group_index` do not matter. The functions compute in float64 and
return float32 [num_sequences].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gspo_megatron.config.objectives import RECIPES, resolve_objective
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.errors import ConfigError, UserError, problem
from gspo_megatron.objectives.parts import segment_sum
from gspo_megatron.plugins import load_function, without_exit

# Rewards that differ only by float32 rounding count as equal. Otherwise, dividing by this tiny
# spread would give advantages of +-1.
_ROUNDING = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class AdvantageEstimator:
    """Computes the advantages that a configuration asks for."""

    section: ObjectiveSection
    of_sequences: Callable[[Tensor, Tensor], Tensor]  # takes rewards and group_index

    def of_step(
        self, rewards: Tensor, groups: Sequence[int], turns: Sequence[Tensor] | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the advantages of all sequences of a step, [num_sequences] float32, and those of
        the tokens of this rank's responses. With objective.kl_in = reward, the first value is None,
        because the penalty that is subtracted from the rewards is not known yet.

        rewards, groups: [num_sequences]; turns: the arguments of `of_turns` for this rank's
        responses. If it is None, turns have no rewards, and tokens have no advantages of their own.
        """
        of_tokens = None if turns is None else self.of_turns(*turns)
        if self.section.kl_in == "reward":
            return None, of_tokens
        return self.of_sequences(rewards, torch.tensor(groups)), of_tokens

    def of_turns(
        self, rewards: Tensor, turns: Tensor, tokens: Tensor, group_index: Tensor
    ) -> Tensor:
        """Return token advantages, [response tokens] float32, sequence after sequence.

        The advantage of a turn is its reward relative to all turns of all responses to the same
        prompt. Each token of the turn has this advantage.

        rewards, tokens: [turns of all sequences], sequence after sequence; the reward of each turn
        (float64) and the number of its response tokens (int64). turns [num_sequences] int64: the
        number of turns of each sequence. group_index [num_sequences] int64: the group of each
        sequence; groups must be complete.

        Raises ConfigError with all reasons if the objective cannot use rewards of turns. This
        method assumes that a custom objective reads `LossInputs.token_advantages`.
        """
        problems = list(_turn_problems(self.section))
        if problems:
            raise ConfigError(problems)
        assert rewards.shape == tokens.shape and turns.shape == group_index.shape, (
            f"turns {tuple(rewards.shape)}, {tuple(tokens.shape)}; "
            f"sequences {tuple(turns.shape)}, {tuple(group_index.shape)}"
        )
        advantages = self.of_sequences(rewards, group_index.repeat_interleave(turns))
        return advantages.repeat_interleave(tokens)


def build_advantages(section: ObjectiveSection) -> AdvantageEstimator:
    """The estimator of the configuration.

    Raises UserError if a custom function cannot be loaded. The estimator raises UserError if the
    function does not return finite advantages.
    """
    if section.advantage_import_path is not None:
        return AdvantageEstimator(section, custom_advantages(section.advantage_import_path))
    return AdvantageEstimator(
        section,
        {
            "group_mean_std": partial(group_mean_std, std=section.advantage_std),
            "batch_std": partial(batch_std, std=section.advantage_std),
            "group_mean": group_mean,
            "leave_one_out": leave_one_out,
            "max_rl": max_rl,
            # rollout/episodes.py has already normalised the parts of the reward and summed them
            "gdpo": lambda rewards, group_index: rewards.float(),
        }[resolve_objective(section).advantage],
    )


def custom_advantages(import_path: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The custom function of (rewards, group_index), wrapped so that its results are checked."""
    name = f"objective.advantage_import_path = {import_path}"
    function = load_function("objective.advantage_import_path", import_path)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise ConfigError(
            [f"{name}: it has to take two arguments, rewards and group_index"]
        ) from None
    except ValueError:  # a function in C has no signature to check
        pass

    def advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
        with without_exit(name):
            result = function(rewards, group_index)
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        if shape != tuple(rewards.shape):
            raise UserError(
                f"{name}: returned {shape}, not a tensor of shape {tuple(rewards.shape)}"
            )
        if not result.isfinite().all():
            raise UserError(f"{name}: returned numbers that are not finite")
        return result.detach().float()

    return advantages


def _turn_problems(section: ObjectiveSection) -> Iterator[str]:
    recipe = resolve_objective(section)

    def wrong(key: str, why: str, allowed: str, value: object = None) -> str:
        value = getattr(section, key) if value is None else value
        reason = f"there are rewards of turns, {why}; allowed: {allowed}"
        return problem(f"objective.{key}", value, reason)

    if section.import_path is None and recipe.terms != "token":
        why = "which an objective with one ratio for a whole response cannot use"
        if section.ratio is not None:
            yield wrong("ratio", why, "sequence_token, token")
        else:
            names = [name for name, each in RECIPES.items() if each.terms == "token"]
            yield wrong("name", why, f"{', '.join(names)}, or one reward for a whole response")
    if section.advantage_import_path is not None:
        yield wrong("advantage_import_path", "but the function judges whole responses", "null")
    elif recipe.advantage not in ("group_mean_std", "group_mean"):
        why, allowed = "for which it is not defined", "group_mean_std, group_mean"
        yield wrong("advantage", why, allowed, recipe.advantage)
    if section.kl_in == "reward":
        why = "but the divergence is subtracted from the reward of a whole response"
        yield wrong("kl_in", why, "loss")


def group_mean_std(
    rewards: Tensor, group_index: Tensor, std: Literal["sample", "population"] = "sample"
) -> Tensor:
    """(reward - mean of the group) / standard deviation of the group (GSPO paper, eq. 6).

    `std` "sample" divides by size - 1 (rewards 0.8, 0.4, 0.6 give 1, -1, 0), "population" by size
    (1.22, -1.22, 0). No epsilon is added. A group without spread has advantages of exactly 0.
    """
    groups, sizes, has_spread = _groups(rewards, group_index)
    centred = _centred(rewards, groups, sizes, has_spread)
    squares = segment_sum(centred.square(), groups, len(sizes))
    degrees = sizes - 1 if std == "sample" else sizes
    deviation = (squares / degrees.clamp_min(1)).sqrt()
    # `centred` is 0 already in groups without spread; dividing by 1 avoids 0/0 there
    return (centred / deviation.where(has_spread, 1.0)[groups]).float()


def group_mean(rewards: Tensor, group_index: Tensor) -> Tensor:
    """reward - mean of the group (Dr. GRPO, arXiv 2503.20783); exactly 0 without spread."""
    return _centred(rewards, *_groups(rewards, group_index)).float()


def has_spread(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Whether the rewards of each sequence's group differ, [num_sequences] bool."""
    groups, _, has_spread = _groups(rewards, group_index)
    return has_spread[groups]


def batch_std(
    rewards: Tensor, group_index: Tensor, std: Literal["sample", "population"] = "sample"
) -> Tensor:
    """(reward - mean of the group) / standard deviation of all rewards of the step. So groups with
    nearly equal rewards do not get large advantages (arXiv 2508.08221)."""
    centred = _centred(rewards, *_groups(rewards, group_index))
    if not centred.any():  # no group has a spread, so the deviation may be 0
        return centred.float()
    return (centred / rewards.double().std(correction=1 if std == "sample" else 0)).float()


def leave_one_out(rewards: Tensor, group_index: Tensor) -> Tensor:
    """reward - mean of the group's other rewards (RLOO, arXiv 2402.14740); exactly 0 without
    spread, and in a group of one."""
    groups, sizes, has_spread = _groups(rewards, group_index)
    factor = sizes / (sizes - 1).clamp_min(1)
    return (_centred(rewards, groups, sizes, has_spread) * factor[groups]).float()


def max_rl(rewards: Tensor, group_index: Tensor) -> Tensor:
    """(reward - mean of the group) / mean of the group (MaxRL, arXiv 2602.02710): rare successes
    weigh more. Exactly 0 without spread, and where the mean is not above 0."""
    groups, sizes, has_spread = _groups(rewards, group_index)
    means = segment_sum(rewards.double(), groups, len(sizes)) / sizes
    scale = torch.where(means > 0, 1.0 / means.where(means > 0, 1.0), 0.0)
    return (_centred(rewards, groups, sizes, has_spread) * scale[groups]).float()


def _groups(rewards: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each sequence the number of its group, counted from 0; and for each group its
    size, and whether its rewards have a spread."""
    assert rewards.dim() == 1 and rewards.shape == group_index.shape, (
        f"rewards {tuple(rewards.shape)}, group_index {tuple(group_index.shape)}"
    )
    numbers, groups, sizes = group_index.unique(return_inverse=True, return_counts=True)
    rewards = rewards.double()
    extremes = rewards.new_empty(len(numbers))
    highest = extremes.scatter_reduce(0, groups, rewards, "amax", include_self=False)
    lowest = extremes.scatter_reduce(0, groups, rewards, "amin", include_self=False)
    magnitude = torch.maximum(highest.abs(), lowest.abs())
    return groups, sizes.double(), highest - lowest > _ROUNDING * magnitude


def _centred(rewards: Tensor, groups: Tensor, sizes: Tensor, has_spread: Tensor) -> Tensor:
    """reward - mean of the group in float64; exactly 0 without spread."""
    rewards = rewards.double()
    means = segment_sum(rewards, groups, len(sizes)) / sizes
    return (rewards - means[groups]).where(has_spread[groups], 0.0)
