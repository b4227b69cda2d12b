"""Calls a reward function for the responses of a rank: directly, as coroutines, or in workers. A
call of the function gets one response, all responses to one prompt, or all responses of the rank.

Failed calls are repeated. All results in a run must have the same form: numbers, or the same named
parts."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gspo_megatron.config.reward_model import PART, REWARD_MODEL
from gspo_megatron.config.schema import RewardSection
from gspo_megatron.errors import RewardError, UserError, printable, tell
from gspo_megatron.plugins import origin
from gspo_megatron.process.coroutines import BusySeconds, OwnLoop, outcome_of, run_together
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.process.workers import WorkerError
from gspo_megatron.rewards.registry import Reward
from gspo_megatron.rewards.values import NoRewardError, Score, checked, shorten
from gspo_megatron.rewards.workers import reward_workers
from gspo_megatron.types import Sample

if TYPE_CHECKING:
    from gspo_megatron.environments.episode import Episode

# The most concurrent calls of an async function on a rank. They keep the server of a judge busy,
# and stay below the limit of open files.
CONCURRENT_CALLS = 64
FIRST_WAIT_SECONDS = 0.5  # the wait before a call is repeated; it doubles with each repetition

PartNames = tuple[str, ...]  # sorted; () if the reward has no named parts


FAILED = object()  # stands for the result of a call or episode that failed and is not repeated


class FailedCalls(NamedTuple):
    """Numbers of failed calls, including those that were repeated later."""

    errors: int = 0  # calls that raised an error or ended their worker
    timeouts: int = 0
    episodes: int = 0  # episodes that failed, and so were not scored


@dataclass(frozen=True)
class Shaping:
    """Scales rewards, then clips them, then subtracts penalties: for overlong responses, and for
    responses that repeat themselves."""

    section: RewardSection
    max_response_tokens: int

    @property
    def is_on(self) -> bool:
        """Whether the configuration can change any reward."""
        section = self.section
        changes = section.scale != 1.0 or section.clip is not None
        return changes or section.overlong_buffer is not None or section.repetition_penalty > 0

    def __call__(self, rewards: np.ndarray, sample: Sample) -> np.ndarray:
        """Shape the rewards of one response. `rewards` and the result are [turns] float64, or [1]
        if the response has one reward.

        The reward of each turn is scaled and clipped. The penalties are subtracted from the reward
        of the last turn, because its tokens exceed the length, and because a repetition is a
        property of the whole response.
        """
        rewards = rewards * self.section.scale
        if self.section.clip is not None:
            rewards = rewards.clip(-self.section.clip, self.section.clip)
        if (buffer := self.section.overlong_buffer) is not None:
            # Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to
            # `max_response_tokens - overlong_buffer` tokens, then growing over the buffer to
            # `overlong_penalty`. A truncated response gets the full penalty.
            excess = sample.num_tokens - (self.max_response_tokens - buffer)
            share = 1.0 if sample.truncated else min(max(excess / buffer, 0.0), 1.0)
            rewards[-1] -= self.section.overlong_penalty * share
        if self.section.repetition_penalty > 0:
            text = sample.written or sample.response
            share = repeated_share(text, self.section.repetition_words)
            rewards[-1] -= self.section.repetition_penalty * share
        return rewards


def repeated_share(text: str, size: int) -> float:
    """Return the share of repeated word sequences in a text (arXiv 2502.03373, appendix C.2): of
    all sequences of `size` consecutive words, the share that occurs earlier in the text. Returns 0
    if the text has fewer words. Upper and lower case count as equal."""
    words = text.lower().split()
    runs = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return 1 - len({*runs}) / len(runs) if runs else 0.0


class Scorer:
    """Calls a reward function as the configuration section `reward` says."""

    def __init__(
        self, reward: Reward, section: RewardSection, *, needs_parts: bool = False
    ) -> None:
        """Prepare the calls. With `needs_parts`, a reward without named parts is an error."""
        self.reward, self.section, self.needs_parts = reward, section, needs_parts
        # The names are the same in the whole run. They are None until a rank has scored a response.
        self.part_names: PartNames | None = None
        self._busy = BusySeconds()
        # Of the current calls: when they began, how many they are, and how many are done.
        self._began, self._calls, self._done = 0.0, 0, 0
        self._printed_kinds: set[str] = set()  # kinds of failures that were printed
        # the clients of the function belong to this loop
        self._loop = OwnLoop()
        count = reward.workers if section.workers is None else section.workers
        slots = -(-CONCURRENT_CALLS // count) if count and reward.is_async else 1
        self.workers = reward_workers(reward, section, count, slots) if count else None

    def score(
        self, samples: Sequence[Sample], given: Sequence[Any] = ()
    ) -> tuple[list[Score | None], FailedCalls]:
        """Return the rewards in the order of the samples, and the numbers of failed calls.

        A reward is None if its call failed and `reward.on_failure` is drop_group.

        given: only for episodes. It has, for each sample, the environment's reward, or None if the
        function must score the episode, or FAILED if the episode failed.

        Raises RewardError with the reward's name, the prompt and the response if the last
        repetition failed, or if the result is not a reward. A UserError of the function is raised
        unchanged.
        """
        if self.workers is not None or self.reward.is_async:
            return self._loop.run(self.score_async(samples, given))
        failures: list[BaseException] = []
        arguments = self._arguments(_to_score(samples, given))
        with self._clock(len(arguments)):
            # The function is called in the main thread, because it may need signals, as the reward
            # `math` does for its time limit.
            values = [self._call(each, failures) for each in arguments]
        return self._checked(values, samples, given, failures)

    async def score_async(
        self, samples: Sequence[Sample], given: Sequence[Any] = ()
    ) -> tuple[list[Score | None], FailedCalls]:
        """Do the same as `score` in an event loop; a plain function needs workers for this.

        Call it always in the same loop, because workers and HTTP clients belong to this loop."""
        assert self.workers is not None or self.reward.is_async, "a plain function without workers"
        failures: list[BaseException] = []
        arguments = self._arguments(_to_score(samples, given))
        with self._clock(len(arguments)):
            slots = asyncio.Semaphore(CONCURRENT_CALLS)
            values = await run_together(
                self._call_async(each, slots, failures) for each in arguments
            )
        return self._checked(values, samples, given, failures)

    def given(self, ended: Sequence[Episode]) -> list[Any]:
        """Return the argument `given` of `score` for finished episodes.

        If `reward.on_failure` is stop, raises the EpisodeError of the first failed episode."""
        errors = [episode.error for episode in ended if episode.error is not None]
        if errors and self.section.on_failure == "stop":
            raise errors[0]
        for error in errors:
            self._tell_once(f"episode: {type(error.__cause__ or error).__name__}", str(error))
        return [FAILED if episode.error is not None else episode.given for episode in ended]

    def take_seconds(self) -> float:
        """Return the wall-clock seconds of scoring since the last call of this method.

        If several batches are scored at the same time, each second counts once."""
        return self._busy.take()

    def progress(self) -> str:
        """Return, as text, how many of the current calls are done, and how many a second.

        The text is empty if there are fewer than two calls."""
        if not self._busy.calls or self._calls < 2:
            return ""
        pace = self._done / max(time.perf_counter() - self._began, 1e-9)
        return f"rewards {self._done}/{self._calls}, {pace:.1f} a second"

    def close(self) -> None:
        """End the workers that `score` has started."""
        if self.workers is not None and self._loop.has_run:
            self._loop.run(self.workers.close())

    def adopt(self, names: PartNames) -> None:
        """Set the names of the parts for this run.

        Raises RewardError if `reward.weights` or a figure does not fit these names, or if there are
        no parts although the advantage needs parts."""
        weights, name = self.section.weights, self.reward.name
        self.part_names = names
        for figure in self.reward.figures:
            if figure in names:  # of a reward model, or of the function beside it
                raise RewardError(
                    f"reward {name!r}: its figure {figure!r} has the name of a part of the reward; "
                    f"both would be the metric reward/{figure}; give the figure another name"
                )
        if self.needs_parts and not names:
            raise RewardError(
                f"reward {name!r} returned no parts, and objective.advantage = gdpo normalises "
                "each part by itself; return named parts, or set another advantage"
            )
        for part in weights:
            if part not in names:
                raise RewardError(
                    f"reward.weights.{part} = {weights[part]}: reward {name!r} returns "
                    f"{describe(names)}; allowed: {'weights for these' if names else 'none'}"
                )
        if names and not any(weights.get(part, 1.0) for part in names):
            raise RewardError(
                f"reward.weights = {weights}: all parts of reward {name!r} have weight 0, and "
                "nothing is rewarded; allowed: a weight other than 0 for one of them"
            )

    # Calls of the function

    @contextlib.contextmanager
    def _clock(self, calls: int) -> Generator[None]:
        if not self._busy.calls:
            self._began = time.perf_counter()
            self._calls = self._done = 0
        self._calls += calls
        with self._busy.running():
            yield

    def _arguments(self, samples: Sequence[Sample]) -> list[Any]:
        """Return the argument of each call of the function."""
        if self.reward.of_group:
            return [*_groups(samples).values()]
        if not samples:
            return []
        return [list(samples)] if self.reward.of_batch else list(samples)

    def _call(self, given: Any, failures: list[BaseException]) -> Any:
        tries = 0
        while True:
            try:
                value = self.reward(given)
                self._done += 1
                return value
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 (of the user's code)
                tries += 1
                wait = self._wait_after(error, tries, given, failures)
            finally:
                heartbeat()  # a reward may take long, and all ranks wait for the slowest
            if wait is None:
                return FAILED
            time.sleep(wait)

    async def _call_async(
        self, given: Any, slots: asyncio.Semaphore, failures: list[BaseException]
    ) -> Any:
        tries, limit = 0, slots if self.workers is None else contextlib.nullcontext()
        function = self.reward if self.workers is None else self.workers.call
        while True:
            try:
                async with limit:
                    value, error = await outcome_of(lambda: function(given))
                if error is None:
                    self._done += 1
                    return value
                tries += 1
                wait = self._wait_after(error, tries, given, failures)
            finally:
                heartbeat()
            if wait is None:
                return FAILED
            await asyncio.sleep(wait)

    def _wait_after(
        self, error: BaseException, tries: int, given: Any, failures: list[BaseException]
    ) -> float | None:
        """Return the seconds until a failed call is repeated.

        Returns None if the call is not repeated and its group is dropped. Raises an error if the
        failure must end the run."""
        if isinstance(error, UserError):
            raise error
        failures.append(error)
        timed_out = isinstance(error, WorkerError) and error.timed_out
        if tries <= self.section.retries and not timed_out:
            self._print_first(error)
            return FIRST_WAIT_SECONDS * 2 ** (tries - 1)
        if self.section.on_failure == "drop_group":
            self._print_first(error)
            self._done += 1
            return None
        where = f" in the last of {tries} calls" if tries > 1 else ""
        text = f"reward {self.reward.name!r} {_described(error)}{where}; {_show(given)}"
        raise RewardError(text) from error

    def _print_first(self, error: BaseException) -> None:
        """Print the failure if it is the first failure of its kind."""
        kind = error.kind if isinstance(error, WorkerError) else type(error).__name__
        self._tell_once(kind, f"reward {self.reward.name!r} {_described(error)}")

    def _tell_once(self, kind: str, text: str) -> None:
        if kind not in self._printed_kinds:
            self._printed_kinds.add(kind)
            more = "more of this kind are only counted"
            tell(f"{printable(text)}; {more}")

    # Results of the function

    def _checked(
        self,
        values: list[Any],
        samples: Sequence[Sample],
        given: Sequence[Any],
        failures: Sequence[BaseException],
    ) -> tuple[list[Score | None], FailedCalls]:
        scored = _to_score(samples, given)
        if self.reward.of_batch and values:
            values = self._of_each(values[0], scored)
        if self.reward.of_group:
            groups = _groups(scored)
            split = map(self._of_each, values, groups.values())
            of_group = dict(zip(groups, map(iter, split), strict=True))
            values = [next(of_group[sample.group]) for sample in scored]
        if given:
            of_function = iter(values)
            values = [next(of_function) if each is None else each for each in given]
        scores = []
        for value, sample in zip(values, samples, strict=True):
            scores.append(None if value is FAILED else self._score(value, sample))
        late = sum(isinstance(each, WorkerError) and each.timed_out for each in failures)
        episodes = sum(each is FAILED for each in given)
        return scores, FailedCalls(len(failures) - late, late, episodes)

    def _of_each(self, returned: Any, samples: Sequence[Sample]) -> list[Any]:
        """Split the result for a batch or group into one value for each sample."""
        if returned is FAILED:
            return [FAILED] * len(samples)
        is_list = isinstance(returned, (list, tuple))
        if isinstance(returned, np.ndarray):
            is_list = returned.ndim > 0
        if is_list and len(returned) == len(samples):
            return list(returned)
        kind = f"{len(returned)} rewards" if is_list else f"a {type(returned).__name__}"
        raise RewardError(
            f"reward {self.reward.name!r} returned {kind} for a "
            f"{'group' if self.reward.of_group else 'batch'} of {len(samples)} samples; "
            "allowed: a list with one reward for each, in their order"
        )

    def _score(self, value: object, sample: Sample) -> Score:
        try:
            return self._weighted(checked(value, sample.num_tokens))
        except NoRewardError as error:
            text = f"reward {self.reward.name!r} returned {error}; {_show(sample)}"
            raise RewardError(text) from error

    def _weighted(self, score: Score) -> Score:
        """Check the names of figures and parts, and add the parts up. Raises NoRewardError."""
        if unknown := [name for name in score.figures if name not in self.reward.figures]:
            known = ", ".join(self.reward.figures) or "none"
            raise NoRewardError(
                f"the figure {unknown[0]!r}; its attribute `figures` names only: {known}"
            )
        if self.section.model.is_on:
            score = self._beside_model(score)
            names = tuple(sorted([*score.parts, PART]))
        else:
            names = tuple(score.parts)
        if self.part_names is None:
            self.adopt(names)
        elif names != self.part_names:
            raise NoRewardError(
                f"{describe(names)}, and {describe(self.part_names)} for an earlier response; "
                "the same names are wanted in every call"
            )
        if not names:
            return score
        weights = self.section.weights
        weighted = [weights.get(name, 1.0) * value for name, value in score.parts.items()]
        total = sum(weighted)
        if math.isfinite(total):  # rounded once, so that weights which add up to 1 give exactly 1
            total = math.fsum(weighted)
        if not math.isfinite(total):
            raise NoRewardError(f"parts that add up to {total}; a finite sum is wanted")
        return replace(score, rewards=np.array([total]))

    def _beside_model(self, score: Score) -> Score:
        """Return a function's score as parts of a reward. The reward model's score is added later,
        as one more part."""
        if score.ends is not None:
            raise NoRewardError(
                "rewards of turns; a reward model wants one number or named parts beside it"
            )
        if PART in score.parts:
            raise NoRewardError(
                f"a part named {PART!r}, as the part of reward.model; choose another name"
            )
        if score.parts:
            return score
        alone = self.section.name == REWARD_MODEL and self.section.import_path is None
        if alone:
            return replace(score, rewards=np.empty(0))
        parts = checked({own_part(self.section): float(score.rewards[0])}, 0).parts
        return replace(score, rewards=np.empty(0), parts=parts)


def own_part(section: RewardSection) -> str:
    """Return the name of the part of a function that returns a number, if there is also a reward
    model."""
    return section.name if section.import_path is None else section.import_path.rpartition(":")[2]


def _to_score(samples: Sequence[Sample], given: Sequence[Any]) -> list[Sample]:
    """Return the samples that the reward function has to score."""
    return [s for s, value in zip(samples, given or [None] * len(samples)) if value is None]


def _groups(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    """Return the samples of each prompt, by its number in the step."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return groups


def _described(error: BaseException) -> str:
    if isinstance(error, WorkerError):
        return str(error)
    return f"raised {type(error).__name__}: {error} ({origin(error)})"


def describe(names: PartNames) -> str:
    """Return part names as text for a message."""
    return f"the parts {', '.join(names)}" if names else "no parts"


def _show(given: Sample | Sequence[Sample]) -> str:
    if isinstance(given, Sample):
        return f"prompt {shorten(given.prompt)}, response {shorten(given.response)}"
    return f"a batch of {len(given)} samples, the first of them: {_show(given[0])}"
