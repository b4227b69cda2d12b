"""How long a step takes with rollouts by servers: trainer and servers, simulated event by event.

Batch t (from 1) is the t-th draw. Its generation may start once the servers hold version
>= t - 1 - max_staleness; batches are trained in their order. In an update both sides stand still:
the servers pause, with responses in flight, and the trainer waits for the proof of the new weights.
Times are in seconds, lengths in tokens, speeds in tokens per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from gspo_megatron.errors import DataError
from gspo_megatron.observe.metrics_files import read_metrics, series

WARM_UP = 10  # steps that do not count: at the start nothing is in flight
STEPS = WARM_UP + 60  # simulated. Steps may come in bunches of max_staleness + 1, which divides 60
# Of steps with more responses fewer are simulated: chance weighs less in them.
MANY_RESPONSES = 4096
_FEWER_STEPS = 20
# Responses that are simulated at most, in all: some 4 microseconds each. Beyond it not every number
# of servers is compared, but never fewer than _LEAST_NUMBERS.
BUDGET = 12_000_000
_LEAST_NUMBERS = 3
_AS_GOOD = 1.02  # a step may be this much longer for less staleness, or fewer servers
_LAST_STEPS = 20  # of a run, whose lengths count: they change while it learns
_LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 0.9995}  # of response/length_*


@dataclass(frozen=True)
class Server:
    """A pass of the model gives each response one token, and its time grows evenly with their
    number: two speeds tell it. A response beyond `slots` waits."""

    sequence_speed: float  # of one response alone
    speed: float  # of `slots` responses, all together
    slots: int

    def token_seconds(self) -> list[float]:
        """Of a pass with 0, 1, … `slots` responses, so for a token of each."""
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
class Trace:
    """What happened in steps 1 to S; draws D >= S. Row 0 of a step is the first one's."""

    starts: np.ndarray  # [S] when the trainer had the whole batch
    trained: np.ndarray  # [S] when training ended, and the update began
    ends: np.ndarray  # [S] when the servers held the new version
    tokens: np.ndarray  # [S, D] drawn of each draw under versions 0 to S - 1
    idle: np.ndarray  # [S] seconds so far without any response, of all servers, outside of updates


@dataclass(frozen=True)
class Outcome:
    """A setting, and its steps once they are alike."""

    setting: Setting
    step_seconds: float
    tokens_per_second: float  # response tokens of a step / step_seconds
    trainer_idle: float  # share of the time in which it waits for responses
    servers_idle: float  # share of the time without any response and outside of updates
    servers_load: float  # tokens_per_second / what servers with all slots taken would draw
    staleness_mean: float  # of trained tokens: versions between the drawing and the trained one
    staleness_max: int


class _Servers:
    """The servers of a simulation. Each has a clock: tokens that one response would have if it had
    run there since the start. So all that run there end at a fixed clock."""

    def __init__(self, lengths: np.ndarray, servers: int, server: Server) -> None:
        self.slots, self.token_seconds = server.slots, server.token_seconds()
        self.per_draw = lengths.shape[1]
        self.lengths: list[float] = lengths.ravel().tolist()
        self.next = 0  # response that starts next
        self.allowed = 0  # responses of the draws that may start
        self.left = [self.per_draw] * len(lengths)  # responses of each draw that have not ended
        # of each server: (clock at its end, draw) of those that run, as a heap; clock, and when it
        # was so; since when nothing runs
        self.running: list[list[tuple[float, int]]] = [[] for _ in range(servers)]
        self.clock, self.at = [0.0] * servers, [0.0] * servers
        self.idle_since = [0.0] * servers
        self.idle = 0.0
        self.tokens = [0.0] * len(lengths)  # of each draw since the last update
        self.ends: list[tuple[float, int]] = []  # (time of the next end, server), as a heap

    def start(self, now: float, draws: int) -> None:
        """Begin, or go on after a pause; the first `draws` draws may start. Each waiting response
        goes to the server with the fewest."""
        self.allowed = min(draws * self.per_draw, len(self.lengths))
        free = [(len(r), s) for s, r in enumerate(self.running) if len(r) < self.slots]
        heapq.heapify(free)
        for s, responses in enumerate(self.running):
            self.at[s] = now
            if not responses:
                self.idle_since[s] = now
        while free and self.next < self.allowed:
            count, s = free[0]
            draw = self.next // self.per_draw
            heapq.heappush(self.running[s], (self.clock[s] + self.lengths[self.next], draw))
            self.tokens[draw] -= self.clock[s]
            self.next += 1
            if count + 1 < self.slots:
                heapq.heapreplace(free, (count + 1, s))
            else:
                heapq.heappop(free)
        self.ends = [
            (now + (responses[0][0] - self.clock[s]) * self.token_seconds[len(responses)], s)
            for s, responses in enumerate(self.running)
            if responses
        ]
        heapq.heapify(self.ends)

    def run(self, until: float, wanted: int = -1) -> float:
        """Draw until this time, or until the draw `wanted` is whole; returns when that was."""
        ends, lengths, tokens, left = self.ends, self.lengths, self.tokens, self.left
        while ends and ends[0][0] <= until:
            now, s = ends[0]
            responses = self.running[s]
            clock, draw = responses[0]
            self.clock[s], self.at[s] = clock, now
            tokens[draw] += clock
            left[draw] -= 1
            if self.next < self.allowed:
                following = self.next // self.per_draw
                heapq.heapreplace(responses, (clock + lengths[self.next], following))
                tokens[following] -= clock
                self.next += 1
            else:
                heapq.heappop(responses)
            if responses:
                wait = (responses[0][0] - clock) * self.token_seconds[len(responses)]
                heapq.heapreplace(ends, (now + wait, s))
            else:
                heapq.heappop(ends)
                self.idle_since[s] = now
            if draw == wanted and not left[draw]:
                return now
        return until

    def pause(self, now: float) -> list[float]:
        """Stop at `now`. Returns the tokens of each draw since the last pause."""
        before = [0.0] * len(self.left)
        for s, responses in enumerate(self.running):
            if not responses:
                self.idle += now - self.idle_since[s]
                continue
            self.clock[s] += (now - self.at[s]) / self.token_seconds[len(responses)]
            for _, draw in responses:
                before[draw] -= self.clock[s]
        drawn = [so_far - rest for so_far, rest in zip(self.tokens, before)]
        self.tokens = before
        return drawn


def simulate(lengths: np.ndarray, server: Server, setting: Setting, steps: int) -> Trace:
    """Steps 1 to `steps` on draws of `lengths` [draws, responses of a step]: at least
    steps + max_staleness draws, so that the servers never run out of them."""
    assert len(lengths) >= steps + setting.max_staleness
    assert lengths.min() > 0
    servers = _Servers(lengths, setting.servers, server)
    ahead = 1 + setting.max_staleness
    now, times, tokens, idle = 0.0, [], [], []
    servers.start(now, ahead)
    for step in range(1, steps + 1):
        ready = servers.run(math.inf, step - 1) if servers.left[step - 1] else now
        trained = ready + setting.train_seconds
        servers.run(trained)
        tokens.append(servers.pause(trained))
        now = trained + setting.update_seconds
        servers.start(now, step + ahead)
        times.append((ready, trained, now))
        idle.append(servers.idle)
    starts, trainings, ends = np.array(times).T
    return Trace(starts, trainings, ends, np.array(tokens), np.array(idle))


def steps_of(setting: Setting, responses: int) -> int:
    """How many steps are simulated; those that count are whole bunches of max_staleness + 1."""
    if responses <= MANY_RESPONSES:
        return STEPS
    bunch = setting.max_staleness + 1
    return WARM_UP + bunch * max(1, _FEWER_STEPS // bunch)


def outcome(lengths: np.ndarray, server: Server, setting: Setting) -> Outcome:
    """The steps of `simulate` after the first WARM_UP."""
    steps = steps_of(setting, lengths.shape[1])
    trace = simulate(lengths[: steps + setting.max_staleness], server, setting, steps)
    seconds = trace.ends[-1] - trace.ends[WARM_UP - 1]
    waits = trace.starts[WARM_UP:] - trace.ends[WARM_UP - 1 : -1]
    # [steps, steps - WARM_UP]: of version and draw, from 0; draw d is trained on version d
    tokens = np.maximum(trace.tokens[:, WARM_UP:steps], 0.0)
    draws, versions = np.arange(WARM_UP, steps), np.arange(steps)[:, None]
    staleness = np.where(tokens > 1e-6 * lengths.mean(), draws - versions, 0)
    speed = lengths[WARM_UP:steps].sum() / seconds
    most = setting.servers * server.slots / server.token_seconds()[-1]
    idle = trace.idle[-1] - trace.idle[WARM_UP - 1]
    return Outcome(
        setting=setting,
        step_seconds=float(seconds / (steps - WARM_UP)),
        tokens_per_second=float(speed),
        trainer_idle=float(waits.sum() / seconds),
        servers_idle=float(idle / (seconds * setting.servers)),
        servers_load=float(speed / most),
        staleness_mean=float((tokens * staleness).sum() / tokens.sum()),
        staleness_max=int(staleness.max()),
    )


def plan(
    population: np.ndarray, responses: int, server: Server, settings: Sequence[Setting]
) -> list[Outcome]:
    """The outcomes of the settings, in their order, with steps of so many responses, whose lengths
    are drawn from `population` [any number]. All settings draw the same ones.

    Where all of them would take more than BUDGET, numbers of servers are left out: the smallest and
    the largest are compared, and then again and again one halfway between the best and the next."""
    draws = max(steps_of(each, responses) + each.max_staleness for each in settings)
    lengths = np.random.default_rng(0).choice(population, (draws, responses))
    numbers = sorted({setting.servers for setting in settings})
    each = len(settings) * draws * responses // len(numbers)
    affordable = max(_LEAST_NUMBERS, BUDGET // each)
    found: dict[Setting, Outcome] = {}

    def compare(chosen: Sequence[int]) -> None:
        for setting in settings:
            if setting.servers in chosen and setting not in found:
                found[setting] = outcome(lengths, server, setting)

    compare(numbers if affordable >= len(numbers) else [numbers[0], numbers[-1]])
    known = {each.servers for each in found}
    while len(known) < min(affordable, len(numbers)):
        known.add(_between(numbers, known, best([*found.values()]).setting.servers))
        compare(sorted(known))
    return [found[setting] for setting in settings if setting in found]


def _between(numbers: Sequence[int], known: Collection[int], chosen: int) -> int:
    """Of `numbers`, in their order, one that is not known: halfway from `chosen` to the next known
    one, on the side where that is farther; where there is none, the nearest to `chosen`."""
    places = [place for place, number in enumerate(numbers) if number in known]
    centre = numbers.index(chosen)
    below = max((place for place in places if place < centre), default=centre)
    above = min((place for place in places if place > centre), default=centre)
    end = below if centre - below > above - centre else above
    if abs(end - centre) > 1:
        return numbers[(centre + end) // 2]
    left = [place for place in range(len(numbers)) if place not in places]
    return numbers[min(left, key=lambda place: abs(place - centre))]


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest; of those that are as good within 2%, that with the least staleness, and of these
    that with the fewest servers."""
    limit = _AS_GOOD * min(each.step_seconds for each in outcomes)
    good = [each for each in outcomes if each.step_seconds <= limit]
    return min(good, key=lambda each: (each.setting.max_staleness, each.setting.servers))


# --- lengths and seconds that are given -----------------------------------------------------------


def read_lengths(source: str, longest: int) -> np.ndarray:
    """Response lengths of a file with one a line, or of a run folder; longer ones are cut to
    `longest`. Raises DataError."""
    if Path(source).is_dir():
        return np.clip(_lengths_of_run(source), 1, longest)
    try:
        lines = Path(source).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror or error}") from error
    lengths = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            if not (line.strip().isascii() and line.strip().isdigit()) or int(line) < 1:
                raise DataError(f"{source}:{number}: {line[:60]!r} is not a length of 1 or more")
            lengths.append(int(line))
    if not lengths:
        raise DataError(f"{source}: no lengths; one a line is wanted")
    return np.minimum(lengths, longest)


def log_normal_lengths(median: float, p90: float, longest: int) -> np.ndarray:
    """Evenly spaced quantiles of a log-normal distribution; longer ones are cut to `longest`."""
    scale = math.log(p90 / median) / NormalDist().inv_cdf(0.9)
    levels = (np.arange(20_000) + 0.5) / 20_000
    return np.clip(np.ceil(median * np.exp(scale * _normal_scores(levels))), 1, longest)


def _lengths_of_run(folder: str) -> np.ndarray:
    """Evenly spaced quantiles of the lengths of its last steps, from the percentiles and the mean
    of each step in metrics.jsonl. Above the median they are those of pieces of log-normal
    distributions; below it they are uniform, so that the mean is the step's."""
    records = read_metrics(folder)
    curves = [series(records, f"response/length_{name}")[1] for name in ("mean", *_LEVELS)]
    if not curves[0]:
        raise DataError(f"{folder}: not the folder of an RL run: no response/length_mean")
    levels = (np.arange(1000) + 0.5) / 1000
    scores = _normal_scores(levels[500:])
    known_scores = _normal_scores(list(_LEVELS.values()))
    found = []
    for mean, *values in list(zip(*curves))[-_LAST_STEPS:]:
        upper = np.exp(np.interp(scores, known_scores, np.log(values)))
        # the mean of a uniform half is that of its ends
        lowest = np.clip(2 * (2 * mean - upper.mean()) - values[0], 1, values[0])
        found += [lowest + 2 * levels[:500] * (values[0] - lowest), upper]
    return np.concatenate(found)


def _normal_scores(levels: Sequence[float] | np.ndarray) -> np.ndarray:
    """Quantiles of the standard normal distribution."""
    return np.array([NormalDist().inv_cdf(level) for level in levels])


def train_seconds(given: Mapping[int, float], nodes: int) -> float:
    """Seconds of a step on so many nodes, given those of some numbers of nodes. Nodes x seconds is
    interpolated, and constant outside of the numbers given, so that time shrinks with 1 / nodes."""
    known = sorted(given)
    return float(np.interp(nodes, known, [n * given[n] for n in known])) / nodes
