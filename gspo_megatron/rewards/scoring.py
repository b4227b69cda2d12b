"""Calls a reward function for the responses of a rank: in threads, as coroutines or for a whole
batch, again where a call fails; and holds what it returns to one form for the whole run."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import RewardError, UserError
from gspo_megatron.observe.heartbeat import heartbeat
from gspo_megatron.plugins import origin
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.shaping import Shaping
from gspo_megatron.rewards.values import Score, checked, shorten
from gspo_megatron.types import Sample

# Calls of an async function under way at a time on a rank: enough to keep a server of judges busy,
# and fewer than the files a process may open.
CONCURRENT_CALLS = 64
FIRST_WAIT_SECONDS = 0.5  # before a call is repeated; doubled at each further time

PartNames = tuple[str, ...]  # sorted; () for a reward without parts


_FAILED = object()  # in place of the value of a call that failed for good


class Scorer:
    """A reward function as `reward` of the configuration wants it called."""

    def __init__(self, reward: Reward, section: RewardSection) -> None:
        self.reward, self.section = reward, section
        # Of the run. None until a response was scored, on this rank or another one.
        self.part_names: PartNames | None = None
        self._failures: list[Exception] = []  # of this `score`; threads append
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, samples: Sequence[Sample]) -> tuple[list[Score | None], int]:
        """The rewards in the order of the samples; None where the call failed and
        `reward.on_failure` is drop_group. And how many calls failed, repeated ones too.

        Raises RewardError, with the reward's name, prompt and response, where a call failed for
        good, or returned what is no reward. A UserError of the function is raised unchanged.
        """
        self._failures = []
        if not samples:
            return [], 0
        given = [list(samples)] if self.reward.of_batch else list(samples)
        values = self._call_all(given)
        if self.reward.of_batch:
            values = self._of_each(values[0], samples)
        scores = []
        for value, sample in zip(values, samples, strict=True):
            scores.append(None if value is _FAILED else self._score(value, sample))
        return scores, len(self._failures)

    def adopt(self, names: PartNames) -> None:
        """The parts that a response of this run has. Raises RewardError where `reward.weights` do
        not fit them."""
        weights, name = self.section.weights, self.reward.name
        self.part_names = names
        for part in weights:
            if part not in names:
                raise RewardError(
                    f"reward.weights.{part} = {weights[part]}: reward {name!r} returns "
                    f"{describe(names)}; legal: {'weights for these' if names else 'none'}"
                )
        if names and not any(weights.get(part, 1.0) for part in names):
            raise RewardError(
                f"reward.weights = {weights}: all parts of reward {name!r} have weight 0, and "
                "nothing is rewarded; legal: a weight other than 0 for one of them"
            )

    # How it is called

    def _call_all(self, given: Sequence[Any]) -> list[Any]:
        if self.reward.is_async:
            return self._run(self._gather(given))
        if self.section.workers == 1:
            # In the main thread: a function may rely on signals, as math-verify's time-outs do.
            return [self._call(each) for each in given]
        pool = ThreadPoolExecutor(self.section.workers)
        try:
            return list(pool.map(self._call, given))
        finally:
            pool.shutdown(cancel_futures=True)

    def _call(self, given: Any) -> Any:
        failures: list[Exception] = []
        while True:
            try:
                return self.reward(given)
            except Exception as error:  # noqa: BLE001 (the user's code may raise anything)
                wait = self._wait_after(error, failures)
            finally:
                heartbeat()  # a reward may take long, and all ranks wait for the last
            if wait is None:
                return self._give_up(given, failures)
            time.sleep(wait)

    async def _call_async(self, given: Any, slots: asyncio.Semaphore) -> Any:
        failures: list[Exception] = []
        while True:
            try:
                async with slots:
                    return await self.reward(given)
            except Exception as error:  # noqa: BLE001 (the user's code may raise anything)
                wait = self._wait_after(error, failures)
            finally:
                heartbeat()
            if wait is None:
                return self._give_up(given, failures)
            await asyncio.sleep(wait)

    def _wait_after(self, error: Exception, failures: list[Exception]) -> float | None:
        """Seconds until a call is repeated; None where it is not."""
        if isinstance(error, UserError):
            raise error
        failures.append(error)
        self._failures.append(error)
        again = len(failures) <= self.section.retries
        return FIRST_WAIT_SECONDS * 2 ** (len(failures) - 1) if again else None

    def _give_up(self, given: Any, failures: list[Exception]) -> object:
        if self.section.on_failure == "drop_group":
            return _FAILED
        error = failures[-1]
        where = f" in the last of {len(failures)} calls" if len(failures) > 1 else ""
        raise RewardError(
            f"reward {self.reward.name!r} raised {type(error).__name__}: {error} "
            f"({origin(error)}){where}; {_show(given)}"
        ) from error

    async def _gather(self, given: Sequence[Any]) -> list[Any]:
        slots = asyncio.Semaphore(CONCURRENT_CALLS)
        tasks = [asyncio.ensure_future(self._call_async(each, slots)) for each in given]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # the others, where one has failed for good
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Any) -> Any:
        """In one event loop for the whole run: a client that the function keeps belongs to it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop.run_until_complete(work)

    # What it returned

    def _of_each(self, returned: Any, samples: Sequence[Sample]) -> list[Any]:
        """The values of a batch, one for each sample."""
        if returned is _FAILED:
            return [_FAILED] * len(samples)
        is_list = isinstance(returned, (list, tuple, np.ndarray)) and np.ndim(returned) > 0
        if is_list and len(returned) == len(samples):
            return list(returned)
        found = f"{len(returned)} rewards" if is_list else f"a {type(returned).__name__}"
        raise RewardError(
            f"reward {self.reward.name!r} returned {found} for a batch of {len(samples)} samples; "
            "legal: a list with one reward for each, in their order"
        )

    def _score(self, value: object, sample: Sample) -> Score:
        def refuse(returned: str) -> NoReturn:
            raise RewardError(f"reward {self.reward.name!r} returned {returned}; {_show(sample)}")

        score = checked(value, sample.num_tokens, refuse)
        names = tuple(score.parts)
        if self.part_names is None:
            self.adopt(names)
        elif names != self.part_names:
            refuse(
                f"{describe(names)}, and {describe(self.part_names)} for an earlier response; "
                "the same names are wanted in every call"
            )
        if not names:
            return score
        weights = self.section.weights
        total = sum(weights.get(name, 1.0) * value for name, value in score.parts.items())
        if not math.isfinite(total):
            refuse(f"parts that add up to {total}; a finite sum is wanted")
        return Score(np.array([total]), parts=score.parts)


def reward_columns(
    found: Sequence[Score | None],
    samples: Sequence[Sample],
    groups: Sequence[int],
    num_parts: int,
    shaping: Shaping,
) -> tuple[np.ndarray, np.ndarray]:
    """[3 + parts, num_sequences]: reward, shaped reward, number of turns, then the parts;
    [2, turns]: shaped reward and tokens of each turn. Counts are exact in float64. Where a call
    failed (None) the reward is NaN, and the shaped reward is NaN in the whole group."""
    columns = np.zeros((3 + num_parts, len(samples)))
    turns = [np.zeros((2, 0))]
    failed = {group for group, score in zip(groups, found, strict=True) if score is None}
    for row, (score, sample, group) in enumerate(zip(found, samples, groups, strict=True)):
        if score is None:
            columns[[0, 1, *range(3, len(columns))], row] = np.nan
            continue
        shaped = shaping(score.rewards, sample)
        has_turns = score.ends is not None
        total = np.nan if group in failed else shaped.sum()
        columns[:3, row] = score.rewards.sum(), total, len(shaped) if has_turns else 0
        columns[3:, row] = list(score.parts.values())
        if has_turns:
            turns.append(np.stack([shaped, np.diff(score.ends, prepend=0)]))
    return columns, np.concatenate(turns, axis=1)


def describe(names: PartNames) -> str:
    """Part names in a message."""
    return f"the parts {', '.join(names)}" if names else "no parts"


def _show(given: Sample | Sequence[Sample]) -> str:
    if isinstance(given, Sample):
        return f"prompt {shorten(given.prompt)}, response {shorten(given.response)}"
    return f"a batch of {len(given)} samples, the first of them: {_show(given[0])}"
