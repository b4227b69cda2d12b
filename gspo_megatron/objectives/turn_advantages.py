"""Advantages of turns, and so of tokens, where a reward function rewards turns.

Every turn is one observation of its group: its advantage is its reward relative to all turns of all
responses to the same prompt, and that of each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from gspo_megatron.config.objectives import RECIPES, resolve_objective
from gspo_megatron.config.problems import problem
from gspo_megatron.config.schema import ObjectiveSection
from gspo_megatron.errors import ConfigError
from gspo_megatron.objectives.advantages import group_mean, group_mean_std

# turn rewards, turns of each sequence, tokens of each turn, group index -> token advantages
TurnAdvantages = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def build_turn_advantages(section: ObjectiveSection) -> TurnAdvantages:
    """The function that the configuration asks for.

    Raises ConfigError, with all that stands against it, where the objective cannot use rewards of
    turns. An objective of the user's own is taken to read `LossInputs.token_advantages`.
    """
    problems = list(_problems(section))
    if problems:
        raise ConfigError(problems)
    if resolve_objective(section).advantage == "group_mean":
        return partial(turn_advantages, of_turns=group_mean)
    return partial(turn_advantages, of_turns=partial(group_mean_std, std=section.advantage_std))


def turn_advantages(
    rewards: Tensor,
    turns: Tensor,
    tokens: Tensor,
    group_index: Tensor,
    *,
    of_turns: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """[response tokens] float32, sequence after sequence.

    Args:
        rewards: [turns of all sequences] float64, sequence after sequence.
        turns: [num_sequences] int64, how many turns each has.
        tokens: [turns of all sequences] int64, how many response tokens each has.
        group_index: [num_sequences] int64; whole groups, in any order.
        of_turns: advantages of (rewards, group_index), as if each turn were a response.
    """
    assert rewards.shape == tokens.shape and turns.shape == group_index.shape, (
        f"turns {tuple(rewards.shape)}, {tuple(tokens.shape)}; "
        f"sequences {tuple(turns.shape)}, {tuple(group_index.shape)}"
    )
    advantages = of_turns(rewards, group_index.repeat_interleave(turns))
    return advantages.repeat_interleave(tokens)


def _problems(section: ObjectiveSection) -> Iterator[str]:
    reason = "the reward function returns rewards of turns"
    recipe = resolve_objective(section)
    if section.import_path is None and recipe.terms != "token":
        names = ", ".join(name for name, each in RECIPES.items() if each.terms == "token")
        by_ratio = section.ratio is not None
        yield problem(
            "objective.ratio" if by_ratio else "objective.name",
            recipe.ratio if by_ratio else section.name,
            f"{reason}, and its terms are of whole responses; "
            f"legal: {'sequence_token, token' if by_ratio else names}",
        )
    if section.advantage_import_path is not None:
        yield problem(
            "objective.advantage_import_path",
            section.advantage_import_path,
            f"{reason}, and it judges whole responses; legal: null",
        )
    elif recipe.advantage not in ("group_mean_std", "group_mean"):
        yield problem(
            "objective.advantage",
            recipe.advantage,
            f"{reason}, for which it is not defined; legal: group_mean_std, group_mean",
        )
    if section.kl_in == "reward":
        yield problem(
            "objective.kl_in",
            section.kl_in,
            f"{reason}, and the divergence is taken off that of a whole response; legal: loss",
        )
