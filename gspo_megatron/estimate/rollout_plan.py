"""Simulates trainer and vLLM servers, event by event, to estimate the time of a step.

Draw t (from 1) is the batch of responses for step t. Its generation may start when the servers have
weights version >= t - 1 - max_staleness. Batches are trained in order. During a weight update, both
sides stop: the servers pause with responses in flight, and the trainer waits for the check of the
new weights. Times are in seconds, lengths in tokens, speeds in tokens per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

WARM_UP = 10  # the first steps are not counted, because nothing is in flight at the start
_COUNTED = 60  # the smallest number of counted steps after the warm-up
STEPS = WARM_UP + _COUNTED  # the smallest number of simulated steps
_AS_GOOD = 1.02  # a step up to 2% longer than the fastest counts as equally fast


@dataclass(frozen=True)
class ServerSpeed:
    """The speed of a server.

    A forward pass generates one token of each response. Its time grows linearly with the number of
    responses, so two speeds define it. A response beyond `slots` waits."""

    sequence_speed: float  # speed with a single response
    speed: float  # total speed with `slots` responses
    slots: int

    def token_seconds(self) -> list[float]:
        """Return the seconds of a pass with 0, 1, … `slots` responses."""
        alone, full = 1 / self.sequence_speed, self.slots / self.speed
        each_more = max(0.0, full - alone) / max(1, self.slots - 1)
        return [alone + each_more * (n - 1) for n in range(self.slots + 1)]


@dataclass(frozen=True)
class Setting:
    """One way to run: the user's choices, and the resulting times of the trainer."""

    servers: int
    max_staleness: int
    train_seconds: float  # time of a step without waiting and without the weight update
    update_seconds: float  # time of the weight update


def steps_of(max_staleness: int) -> tuple[int, int]:
    """Return how many steps to simulate, and how many of them do not count.

    Steps may come in bunches of max_staleness + 1. So the warm-up has at least one bunch, and only
    whole bunches are counted after it."""
    bunch = max_staleness + 1
    warm_up = max(WARM_UP, bunch)
    return warm_up + bunch * math.ceil(_COUNTED / bunch), warm_up


@dataclass(frozen=True)
class StepFigures:
    """The figures of a setting's steps after the warm-up."""

    setting: Setting
    step_seconds: float
    trainer_idle: float  # share of the time in which the trainer waits for responses
    servers_load: float  # tokens per second, as a share of the speed with all slots in use
    staleness_mean: float  # mean over tokens: version at training minus version at generation
    staleness_max: int


class _Servers:
    """The servers of a simulation.

    Each server has a clock that counts forward passes. Each pass gives every running response one
    token. So when a response starts, the clock value at which it will end is known."""

    def __init__(self, lengths: np.ndarray, servers: int, server: ServerSpeed) -> None:
        self.slots, self.token_seconds = server.slots, server.token_seconds()
        self.per_draw = lengths.shape[1]
        self.lengths: list[float] = lengths.ravel().tolist()
        self.next = 0  # the response that starts next
        self.allowed = 0  # number of responses that may start
        self.unfinished = [self.per_draw] * len(lengths)  # responses of each draw
        # For each server: a heap of its running responses, (clock value at the end, draw); its last
        # clock value, and the time of this value.
        self.running: list[list[tuple[float, int]]] = [[] for _ in range(servers)]
        self.clock, self.at = [0.0] * servers, [0.0] * servers
        self.tokens = [0.0] * len(lengths)  # tokens of each draw since the last update
        self.ends: list[tuple[float, int]] = []  # heap of (time of a server's next end, server)

    def start(self, now: float, draws: int) -> None:
        """Start generating, or continue after a pause. Only responses of the first `draws` draws
        may start."""
        self.allowed = min(draws * self.per_draw, len(self.lengths))
        self.at = [now] * len(self.at)
        self.ends = []
        self._fill(range(len(self.running)))
        for server in range(len(self.running)):
            self._await_end(server, now)

    def _fill(self, servers: Iterable[int]) -> None:
        """Send waiting responses to these servers, each to the server with the fewest responses."""
        free = [(n, s) for s in servers if (n := len(self.running[s])) < self.slots]
        heapq.heapify(free)
        while free and self.next < self.allowed:
            count, server = heapq.heappop(free)
            draw, clock = self.next // self.per_draw, self.clock[server]
            heapq.heappush(self.running[server], (clock + self.lengths[self.next], draw))
            self.tokens[draw] -= clock
            self.next += 1
            if count + 1 < self.slots:
                heapq.heappush(free, (count + 1, server))

    def _await_end(self, server: int, now: float) -> None:
        running = self.running[server]
        if running:
            wait = (running[0][0] - self.clock[server]) * self.token_seconds[len(running)]
            heapq.heappush(self.ends, (now + wait, server))

    def run(self, until: float, last_draw: int = -1) -> float:
        """Generate until the time `until` or until the draw `last_draw` is complete.

        Returns the time of the end."""
        while self.ends and self.ends[0][0] <= until:
            now, server = heapq.heappop(self.ends)
            clock, draw = heapq.heappop(self.running[server])
            self.clock[server], self.at[server] = clock, now
            self.tokens[draw] += clock
            self.unfinished[draw] -= 1
            self._fill((server,))
            self._await_end(server, now)
            if draw == last_draw and not self.unfinished[draw]:
                return now
        return until

    def pause(self, now: float) -> list[float]:
        """Stop at `now`. Returns the tokens of each draw since the last pause."""
        before = [0.0] * len(self.unfinished)
        for server, running in enumerate(self.running):
            if not running:
                continue
            self.clock[server] += (now - self.at[server]) / self.token_seconds[len(running)]
            for _, draw in running:
                before[draw] -= self.clock[server]
        generated = [so_far - rest for so_far, rest in zip(self.tokens, before)]
        self.tokens = before
        return generated


def simulate(
    lengths: np.ndarray, server: ServerSpeed, setting: Setting, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Simulate steps 1 to `steps`.

    lengths: [draws, responses of a step], with at least steps + max_staleness draws, so that the
    servers always have work.

    Returns times [steps, 3] and tokens [steps, draws]. The three times of a step: the trainer has
    the whole batch; training ends and the weight update begins; the servers have the new version.
    The tokens are the numbers of tokens that each version generated for each draw."""
    assert len(lengths) >= steps + setting.max_staleness
    assert lengths.min() > 0
    servers = _Servers(lengths, setting.servers, server)
    ahead = 1 + setting.max_staleness
    now, times, tokens = 0.0, [], []
    servers.start(now, ahead)
    for step in range(1, steps + 1):
        ready = servers.run(math.inf, step - 1) if servers.unfinished[step - 1] else now
        trained = ready + setting.train_seconds
        servers.run(trained)
        tokens.append(servers.pause(trained))
        now = trained + setting.update_seconds
        servers.start(now, step + ahead)
        times.append((ready, trained, now))
    return np.array(times), np.array(tokens)


def outcome(lengths: np.ndarray, server: ServerSpeed, setting: Setting) -> StepFigures:
    """Return the figures of the simulated steps after the warm-up, see `steps_of`."""
    steps, first = steps_of(setting.max_staleness)
    times, tokens = simulate(lengths[: steps + setting.max_staleness], server, setting, steps)
    starts, _, ends = times.T
    seconds = ends[-1] - ends[first - 1]
    waits = starts[first:] - ends[first - 1 : -1]
    # [steps, steps - first]: by version from 0, and by draw from `first`. Draw d is trained on
    # version d.
    tokens = np.maximum(tokens[:, first:steps], 0.0)
    draws, versions = np.arange(first, steps), np.arange(steps)[:, None]
    staleness = np.where(tokens > 1e-6 * lengths.mean(), draws - versions, 0)
    most = setting.servers * server.slots / server.token_seconds()[-1]
    return StepFigures(
        setting=setting,
        step_seconds=float(seconds / (steps - first)),
        trainer_idle=float(waits.sum() / seconds),
        servers_load=float(lengths[first:steps].sum() / seconds / most),
        staleness_mean=float((tokens * staleness).sum() / tokens.sum()),
        staleness_max=int(staleness.max()),
    )


def best(outcomes: Sequence[StepFigures]) -> StepFigures:
    """Return the outcome with the least staleness among those within 2% of the fastest step. If
    several have the same staleness, return the one with the fewest servers."""
    limit = _AS_GOOD * min(each.step_seconds for each in outcomes)
    good = [each for each in outcomes if each.step_seconds <= limit]
    return min(good, key=lambda each: (each.setting.max_staleness, each.setting.servers))


def log_normal_lengths(median: float, p90: float, longest: int, shape: Sequence[int]) -> np.ndarray:
    """Return random lengths from a log-normal distribution, clipped to 1 … `longest`."""
    scale = math.log(p90 / median) / NormalDist().inv_cdf(0.9)
    normal = np.random.default_rng(0).standard_normal(shape)
    return np.clip(np.ceil(median * np.exp(scale * normal)), 1, longest)
