"""How long a step takes with rollouts by servers: trainer and servers, simulated event by event.

Batch t (from 1) is the t-th draw. Its generation may start once the servers hold version
>= t - 1 - max_staleness; batches are trained in their order. In an update both sides stand still:
the servers pause, with responses in flight, and the trainer waits for the proof of the new weights.
Times are in seconds, lengths in tokens, speeds in tokens per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

WARM_UP = 10  # steps that do not count: at the start nothing is in flight
STEPS = WARM_UP + 60  # simulated; steps may come in bunches of max_staleness + 1, which divides 60
_AS_GOOD = 1.02  # a step may be this much longer for less staleness, or fewer servers


@dataclass(frozen=True)
class Server:
    """A pass of the model gives each response one token, and its time grows evenly with their
    number: two speeds tell it. A response beyond `slots` waits."""

    sequence_speed: float  # of one response alone
    speed: float  # of `slots` responses, all together
    slots: int

    def token_seconds(self) -> list[float]:
        """Seconds of a pass with 0, 1, … `slots` responses."""
        alone, full = 1 / self.sequence_speed, self.slots / self.speed
        each_more = max(0.0, full - alone) / max(1, self.slots - 1)
        return [alone + each_more * (n - 1) for n in range(self.slots + 1)]


@dataclass(frozen=True)
class Setting:
    """One way to run: what may be chosen, and the trainer that is left then."""

    servers: int
    max_staleness: int
    train_seconds: float  # of a step: everything but waiting and the update
    update_seconds: float


@dataclass(frozen=True)
class Outcome:
    """A setting, and its steps once they are alike."""

    setting: Setting
    step_seconds: float
    trainer_idle: float  # share of the time in which it waits for responses
    servers_load: float  # tokens per second / what servers with all slots taken would generate
    staleness_mean: float  # of trained tokens: versions between the generating and the trained one
    staleness_max: int


class _Servers:
    """The servers of a simulation. Each has a clock: the tokens that one response would have if it
    had run there since the start. So every response ends when the clock shows a fixed number."""

    def __init__(self, lengths: np.ndarray, servers: int, server: Server) -> None:
        self.slots, self.token_seconds = server.slots, server.token_seconds()
        self.per_draw = lengths.shape[1]
        self.lengths: list[float] = lengths.ravel().tolist()
        self.next = 0  # the response that starts next
        self.allowed = 0  # responses of the draws that may start
        self.left = [self.per_draw] * len(lengths)  # unfinished responses of each draw
        # of each server: (clock at the end, draw) of its responses, as a heap; its clock, and the
        # time when that was so
        self.running: list[list[tuple[float, int]]] = [[] for _ in range(servers)]
        self.clock, self.at = [0.0] * servers, [0.0] * servers
        self.tokens = [0.0] * len(lengths)  # of each draw since the last update
        self.ends: list[tuple[float, int]] = []  # (time of its next end, server), as a heap

    def start(self, now: float, draws: int) -> None:
        """Begin, or go on after a pause; the first `draws` draws may start."""
        self.allowed = min(draws * self.per_draw, len(self.lengths))
        self.at = [now] * len(self.at)
        self.ends = []
        self._fill(range(len(self.running)))
        for server in range(len(self.running)):
            self._await_end(server, now)

    def _fill(self, servers: Iterable[int]) -> None:
        """Send waiting responses to these servers, each to the one with the fewest."""
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

    def run(self, until: float, wanted: int = -1) -> float:
        """Generate until this time, or until the draw `wanted` is whole; returns when that was."""
        while self.ends and self.ends[0][0] <= until:
            now, server = heapq.heappop(self.ends)
            clock, draw = heapq.heappop(self.running[server])
            self.clock[server], self.at[server] = clock, now
            self.tokens[draw] += clock
            self.left[draw] -= 1
            self._fill((server,))
            self._await_end(server, now)
            if draw == wanted and not self.left[draw]:
                return now
        return until

    def pause(self, now: float) -> list[float]:
        """Stop at `now`. Returns the tokens of each draw since the last pause."""
        before = [0.0] * len(self.left)
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
    lengths: np.ndarray, server: Server, setting: Setting, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Steps 1 to `steps` on draws of `lengths` [draws, responses of a step]: at least
    steps + max_staleness draws, so that the servers never run out of them.

    Returns times [steps, 3] (the trainer has the whole batch; training ends, the update begins; the
    servers hold the new version) and the tokens [steps, draws] that each version generated."""
    assert len(lengths) >= steps + setting.max_staleness
    assert lengths.min() > 0
    servers = _Servers(lengths, setting.servers, server)
    ahead = 1 + setting.max_staleness
    now, times, tokens = 0.0, [], []
    servers.start(now, ahead)
    for step in range(1, steps + 1):
        ready = servers.run(math.inf, step - 1) if servers.left[step - 1] else now
        trained = ready + setting.train_seconds
        servers.run(trained)
        tokens.append(servers.pause(trained))
        now = trained + setting.update_seconds
        servers.start(now, step + ahead)
        times.append((ready, trained, now))
    return np.array(times), np.array(tokens)


def outcome(lengths: np.ndarray, server: Server, setting: Setting) -> Outcome:
    """The steps of `simulate` after the first WARM_UP."""
    times, tokens = simulate(lengths[: STEPS + setting.max_staleness], server, setting, STEPS)
    starts, _, ends = times.T
    seconds = ends[-1] - ends[WARM_UP - 1]
    waits = starts[WARM_UP:] - ends[WARM_UP - 1 : -1]
    # [STEPS, STEPS - WARM_UP]: of version and draw, from 0; draw d is trained on version d
    tokens = np.maximum(tokens[:, WARM_UP:STEPS], 0.0)
    draws, versions = np.arange(WARM_UP, STEPS), np.arange(STEPS)[:, None]
    staleness = np.where(tokens > 1e-6 * lengths.mean(), draws - versions, 0)
    most = setting.servers * server.slots / server.token_seconds()[-1]
    return Outcome(
        setting=setting,
        step_seconds=float(seconds / (STEPS - WARM_UP)),
        trainer_idle=float(waits.sum() / seconds),
        servers_load=float(lengths[WARM_UP:STEPS].sum() / seconds / most),
        staleness_mean=float((tokens * staleness).sum() / tokens.sum()),
        staleness_max=int(staleness.max()),
    )


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest; of those that are as good within 2%, that with the least staleness, and of these
    that with the fewest servers."""
    limit = _AS_GOOD * min(each.step_seconds for each in outcomes)
    good = [each for each in outcomes if each.step_seconds <= limit]
    return min(good, key=lambda each: (each.setting.max_staleness, each.setting.servers))


def log_normal_lengths(median: float, p90: float, longest: int, shape: Sequence[int]) -> np.ndarray:
    """Lengths drawn from a log-normal distribution; longer ones are cut to `longest`."""
    scale = math.log(p90 / median) / NormalDist().inv_cdf(0.9)
    normal = np.random.default_rng(0).standard_normal(shape)
    return np.clip(np.ceil(median * np.exp(scale * normal)), 1, longest)
