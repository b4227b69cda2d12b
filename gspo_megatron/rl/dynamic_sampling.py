"""Dynamic sampling: a step trains on groups whose rewards differ (DAPO, arXiv 2503.14476, 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class DynamicSampling:
    """The groups that a step trains on, out of those sampled so far.

    Groups whose rewards are all the same have no gradient: further prompts take their places. All
    ranks know which groups have a spread, so that the choice is the same on every layout."""

    wanted: int  # groups
    max_refills: int  # further draws of prompts
    enabled: bool = True  # False: the groups of one draw, whatever their rewards
    draws: int = 0
    has_spread: list[bool] = field(default_factory=list)  # by the groups' numbers in the step
    has_failed: list[bool] = field(default_factory=list)  # no reward: never trained on

    def add(self, has_spread: Sequence[bool], has_failed: Sequence[bool] | None = None) -> None:
        """One more draw of groups, in their order. One that has failed has no spread."""
        self.draws += 1
        self.has_spread += has_spread
        self.has_failed += has_failed or [False] * len(has_spread)

    @property
    def wants_more(self) -> bool:
        """Whether prompts are to be drawn, for the first time or again."""
        if self.draws == 0 or not self.enabled:
            return self.draws == 0
        return sum(self.has_spread) < self.wanted and self.draws <= self.max_refills

    @property
    def num_groups(self) -> int:
        """Sampled so far; the number of the next draw's first group."""
        return len(self.has_spread)

    def candidates(self, first: int) -> list[int]:
        """The groups from number `first` on that may still be chosen; the others need no memory.
        The first draw stays whole: see `groups`."""
        return [n for n in range(first, self.num_groups) if first == 0 or self.has_spread[n]]

    def groups(self) -> list[int]:
        """The numbers of the chosen groups: the first `wanted` with spread, or fewer if there are
        no more. If none has a spread, those of the first draw: a step needs some sequences. None
        at all where these have all failed."""
        chosen = [number for number, has in enumerate(self.has_spread) if has]
        if self.enabled and chosen:
            return chosen[: self.wanted]
        return [number for number in range(self.wanted) if not self.has_failed[number]]

    def metrics(self) -> dict[str, float]:
        """`rollout/no_spread` is 1 for a step in which no group had a spread: it learns nothing."""
        if not self.enabled:
            return {}
        return {
            "rollout/refills": float(self.draws - 1),
            "rollout/groups_dropped": float(self.num_groups - len(self.groups())),
            "rollout/no_spread": float(not any(self.has_spread)),
        }
