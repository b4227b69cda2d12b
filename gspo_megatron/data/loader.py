"""The order in which a run uses its prompts: seeded, resumable, the same on every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gspo_megatron.errors import DataError


class PromptLoader:
    """Chooses the indices of `prompts_per_step` prompts for each step, epoch after epoch.

    The order of an epoch is a permutation that depends only on `seed` and the epoch's number;
    without `shuffle` it is the file's order. If a step spans two epochs, a prompt that the step
    already has is deferred to the next step. So each epoch uses every prompt once, and no step has
    a prompt twice unless it is larger than the file. All ranks get the same indices.

    With several files, each file has its own epochs. The next prompt comes from the file that is
    furthest behind its share of all prompts so far. So each file always has its share, to within a
    few prompts.
    """

    def __init__(
        self,
        num_prompts: int | Sequence[int],
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Set up the order of one file or several files.

        num_prompts: size of the file or of each file. Indices count through all files.
        weights: relative share of each file; None means in proportion to its size.
        """
        sizes = [num_prompts] if isinstance(num_prompts, int) else list(num_prompts)
        weights = sizes if weights is None else weights
        assert sizes and min(sizes) > 0 and prompts_per_step > 0 and seed >= 0
        assert len(weights) == len(sizes) and min(weights) > 0
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._shares = [weight / sum(weights) for weight in weights]
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        self._files = [
            _FileOrder(size, start, seed, number, shuffle)
            for number, (size, start) in enumerate(zip(sizes, starts, strict=True))
        ]

    def next(self, count: int | None = None) -> list[int]:
        """Return the prompt indices of the next step: `count` of them, or `prompts_per_step`."""
        schedule = self._schedule(count or self._prompts_per_step)
        drawn = [iter(file.next(schedule.count(number))) for number, file in enumerate(self._files)]
        return [next(drawn[number]) for number in schedule]

    def peek(self, steps: int) -> list[list[int]]:
        """Return the prompt indices of the next steps without advancing."""
        before = self.state_dict()
        ahead = [self.next() for _ in range(steps)]
        self.load_state_dict(before)
        return ahead

    def rows_of_step(self, step: int, *, ahead: bool) -> Iterator[list[int]]:
        """Yield the prompt indices of the next step, then those of each of its refills.

        ahead: servers generate ahead, so the loader's next prompts belong to the next step, and the
        refills come from a loader of their own."""
        yield self.next()
        refills = self.for_refills(step) if ahead else self
        while True:
            yield refills.next()

    def for_refills(self, step: int) -> PromptLoader:
        """Return a loader of further prompts for this step, independent of other steps.

        The returned loader uses the same files and shares, in a random order that depends on seed
        and step."""
        words = np.random.SeedSequence((self._seed, step)).generate_state(1, np.uint64)
        sizes = [file.size for file in self._files]
        return PromptLoader(sizes, self._prompts_per_step, int(words[0]), weights=self._shares)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as numbers and short lists, which JSON can hold."""
        sizes, states = [file.size for file in self._files], [file.state() for file in self._files]
        common = {"seed": self._seed, "shuffle": self._shuffle}
        if len(sizes) == 1:  # the format of versions that supported only one file
            return {"num_prompts": sizes[0], **common, **states[0]}
        return {"num_prompts": sizes, **common, "shares": self._shares, "files": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, even with another `prompts_per_step`.

        Raises DataError if the state was made with other files, another seed or another order.
        """
        mine = self.state_dict()
        for key in ("num_prompts", "seed", "shuffle", "shares"):
            if state.get(key) != mine.get(key):
                raise DataError(
                    f"the checkpoint's prompt order was made with {key} = {state.get(key)}, this "
                    f"run has {key} = {mine.get(key)}; resume with the same prompt files and "
                    "settings"
                )
        for file, own in zip(self._files, state.get("files", [state]), strict=True):
            file.restore(own)

    def _schedule(self, count: int) -> list[int]:
        """Return the number of the file for each of the next `count` prompts."""
        drawn, schedule = [file.drawn for file in self._files], []
        for total in range(sum(drawn) + 1, sum(drawn) + count + 1):
            behind = [share * total - own for share, own in zip(self._shares, drawn)]
            schedule.append(behind.index(max(behind)))
            drawn[schedule[-1]] += 1
        return schedule


class _FileOrder:
    """The order of the prompts of one file, whose indices begin at `start`."""

    def __init__(self, size: int, start: int, seed: int, number: int, shuffle: bool) -> None:
        self.size, self._start = size, start
        # The seed as 32-bit words. The first file has the same words as in a run with one file.
        self._words, self._number = (seed % 2**32, seed // 2**32 % 2**32), number
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0  # position in this epoch's order
        self._deferred: list[int] = []  # prompts of this epoch that wait for the next step
        self._order = self._epoch_order()

    @property
    def drawn(self) -> int:
        """Number of prompts used so far."""
        return self._epoch * self.size + self._position - len(self._deferred)

    def next(self, count: int) -> list[int]:
        """Return the next indices; all are different unless `count` exceeds the file's size."""
        step, self._deferred = self._deferred[:count], self._deferred[count:]
        unique = count <= self.size
        taken = set(step)
        while len(step) < count:
            if self._position == self.size:
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
        return [self._start + index for index in step]

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "deferred": list(self._deferred),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._deferred = list(state["deferred"])
        self._order = self._epoch_order()

    def _epoch_order(self) -> np.ndarray:  # [size]
        if not self._shuffle:
            return np.arange(self.size)
        # RandomState is used because its streams never change. So a run resumes in the same order
        # with another NumPy version. The streams of `Generator` may change with the version.
        words = [*self._words, self._epoch, *([self._number] if self._number else [])]
        return np.random.RandomState(words).permutation(self.size)
