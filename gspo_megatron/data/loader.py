"""The order in which prompts are drawn: seeded, resumable, the same on every layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from gspo_megatron.errors import DataError


class PromptLoader:
    """Draws the indices of `prompts_per_step` prompts for each step, epoch after epoch.

    The order of an epoch is a permutation that depends on `seed` and the epoch's number only (or
    the file's order without `shuffle`). Where two epochs meet in a step, a prompt that the step has
    already is deferred to the next step. So each epoch draws every prompt once, and no step has a
    prompt twice unless it is larger than the file. All ranks get the same indices.
    """

    def __init__(
        self, num_prompts: int, prompts_per_step: int, seed: int, shuffle: bool = True
    ) -> None:
        assert num_prompts > 0 and prompts_per_step > 0 and seed >= 0
        self._num_prompts = num_prompts
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0  # in the order of this epoch
        self._deferred: list[int] = []  # prompts of this epoch, for the next step
        self._order = self._epoch_order()

    def next(self, count: int | None = None) -> list[int]:
        """The prompt indices of the next step: `count` of them, or `prompts_per_step`."""
        wanted = count or self._prompts_per_step
        step, self._deferred = self._deferred[:wanted], self._deferred[wanted:]
        unique = wanted <= self._num_prompts
        taken = set(step)
        while len(step) < wanted:
            if self._position == self._num_prompts:
                self._epoch += 1
                self._position = 0
                self._order = self._epoch_order()
            index = int(self._order[self._position])
            self._position += 1
            if unique and index in taken:
                self._deferred.append(index)
            else:
                step.append(index)
                taken.add(index)
        return step

    def state_dict(self) -> dict[str, Any]:
        """Numbers and a short list, which JSON can hold."""
        return {
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "deferred": list(self._deferred),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`, even with another `prompts_per_step`.

        Raises DataError if the state is of another file, seed or order.
        """
        mine = self.state_dict()
        for key in ("num_prompts", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise DataError(
                    f"the checkpoint's prompt order was made with {key} = {state[key]}, this run "
                    f"has {key} = {mine[key]}; resume with the same prompt file and settings"
                )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._deferred = list(state["deferred"])
        self._order = self._epoch_order()

    def _epoch_order(self) -> np.ndarray:  # [num_prompts]
        if not self._shuffle:
            return np.arange(self._num_prompts)
        # A run must resume in the same order under another version of NumPy: RandomState's streams
        # never change, Generator's may. The seed is given in words of 32 bits.
        words = [self._seed % 2**32, self._seed // 2**32 % 2**32, self._epoch]
        return np.random.RandomState(words).permutation(self._num_prompts)
