"""Which hosts are unfit, from what every rank found out about itself. Pure: no torch, no ranks."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gspo_megatron.platform.preflight.expected import expected

MEMORY = "free memory"
UNITS = {"matmul": "TFLOP/s", "clock": "MHz", MEMORY: "GiB"}
LINK_UNIT = "GB/s"
# Of what its peers have. Memory that is in use was left behind by somebody.
MEMORY_SHARE = 0.9
# What a user's minimum is compared with: the operation that training uses most in such groups.
MAIN_OPERATION = {
    "matmul": "matmul",
    "tp": "tp all-reduce",
    "pp": "pp send/recv",
    "cp": "cp all-reduce",
    "ep": "ep all-to-all",
    "dp": "dp all-reduce",
}


@dataclass(frozen=True)
class Report:
    """What one rank says of itself."""

    rank: int
    host: str
    device: str  # the GPU's name, or cpu
    wrong: str | None = None  # why it cannot take part
    driver: str | None = None  # its version; None: nobody tells, or there is no GPU
    is_cut_off: bool = False  # wrong while it talked to others, and so perhaps one of theirs
    figures: Mapping[str, float] = field(default_factory=dict)  # by measure; more is better
    # by measure, where it is a figure of several ranks together: those ranks
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Unit:
    """One figure, of a rank or of a group of them."""

    ranks: tuple[int, ...]
    hosts: frozenset[str]
    value: float
    least: float | None = None  # that it is expected to reach, whatever its peers do

    def __str__(self) -> str:
        hosts = ", ".join(sorted(self.hosts))
        ranks = f"{self.ranks[0]}" if len(self.ranks) == 1 else _spans(self.ranks)
        return f"{hosts} (rank{'s' if len(self.ranks) > 1 else ''} {ranks})"


@dataclass(frozen=True)
class Row:
    """A measure over all ranks."""

    measure: str
    median: float
    slowest: Unit

    @property
    def unit(self) -> str:
        return UNITS.get(self.measure, LINK_UNIT)


@dataclass(frozen=True)
class Verdict:
    """The table, and what is wrong, by host; nothing where all are fit."""

    rows: list[Row]
    problems: dict[str, list[str]]


def excused(reports: Iterable[Report], missing: Mapping[int, str], why: str) -> list[Report]:
    """The reports, with one of each rank that gave none (`missing`: its host). Where a rank failed
    by itself, others that waited for it, or lost it, did nothing wrong."""
    reports = list(reports)
    absent = [Report(rank, host, "unknown", why) for rank, host in sorted(missing.items())]
    own = [report for report in reports if report.wrong is not None and not report.is_cut_off]
    if own:
        return [report for report in reports if report.wrong is None or report in own]
    if absent:
        return [report for report in reports if report.wrong is None] + absent
    return reports


def judge_devices(reports: Sequence[Report]) -> dict[str, list[str]]:
    """What is wrong, by host, before anything is measured."""
    problems: dict[str, list[str]] = defaultdict(list)
    sound = [report for report in reports if report.wrong is None]
    usual_device = _most_common(report.device for report in sound)
    usual_driver = _most_common(report.driver for report in sound if report.driver)
    for report in reports:
        said = None
        if report.wrong is not None:
            said = f"rank {report.rank}: {report.wrong}"
        elif report.device != usual_device:
            said = f"rank {report.rank} has {_named(report.device)}, and most have "
            said += _named(usual_device)
        elif report.driver not in (None, usual_driver):
            said = f"rank {report.rank} has driver {report.driver}, and most have {usual_driver}"
        if said is not None:
            problems[report.host].append(said)
    return dict(problems)


def _most_common(names: Iterable[str]) -> str:
    """Nothing where there are none."""
    counted = Counter(names).most_common(1)
    return counted[0][0] if counted else ""


def judge(reports: Sequence[Report], share: float, minima: Mapping[str, float]) -> Verdict:
    """Hold every figure against `share` of its peers' median, and against `minima` (by a key of
    MAIN_OPERATION) or, where these say nothing, against what the device is expected to reach. Peers
    of a rank are all others; of a group, those over as many hosts."""
    problems: dict[str, list[str]] = defaultdict(list)
    for host, lines in judge_devices(reports).items():
        problems[host] += lines
    rows, slow_groups = [], []
    smallest = {MAIN_OPERATION[name]: value for name, value in minima.items()}
    for measure in _measures(reports):
        units = _units(reports, measure, smallest)
        rows.append(
            Row(
                measure,
                statistics.median(unit.value for unit in units),
                min(units, key=lambda unit: unit.value),
            )
        )
        for unit, reason in _slow(measure, units, share):
            if len(unit.ranks) == 1:
                problems[min(unit.hosts)].append(f"rank {unit.ranks[0]}: {reason}")
            else:
                slow_groups.append((unit, units, reason))
    named = set(problems)
    for unit, units, reason in slow_groups:
        # a host that another group is fast with is not the reason; nor one beside a host that is
        slow = {other for other, all_units, _ in slow_groups if all_units is units}
        fast = {host for other in units if other not in slow for host in other.hosts}
        suspects = (unit.hosts - fast) or unit.hosts
        for host in sorted(suspects & named or suspects):
            problems[host].append(f"ranks {_spans(unit.ranks)}: {reason}")
    return Verdict(rows, dict(problems))


def _named(device: str) -> str:
    return "no GPU" if device == "cpu" else device


def _measures(reports: Sequence[Report]) -> list[str]:
    """In the order in which they were taken."""
    return list(dict.fromkeys(name for report in reports for name in report.figures))


def _units(reports: Sequence[Report], measure: str, smallest: Mapping[str, float]) -> list[Unit]:
    """A group's figure is that of its slowest member."""
    hosts = {report.rank: report.host for report in reports}
    values: dict[tuple[int, ...], float] = {}
    devices: dict[tuple[int, ...], str] = {}
    for report in reports:
        if measure in report.figures:
            ranks = tuple(report.groups.get(measure, (report.rank,)))
            value = report.figures[measure]
            values[ranks] = min(value, values.get(ranks, value))
            devices[ranks] = report.device
    units = []
    for ranks, value in values.items():
        its_hosts = frozenset(hosts[rank] for rank in ranks if rank in hosts)  # some are excused
        least = smallest.get(measure)
        if least is None and measure in MAIN_OPERATION.values():
            least = expected(devices[ranks], measure, len(ranks), len(its_hosts))
        units.append(Unit(ranks, its_hosts, value, least or None))
    return units


def _slow(measure: str, units: Sequence[Unit], share: float) -> Iterator[tuple[Unit, str]]:
    share = max(share, MEMORY_SHARE) if measure == MEMORY else share
    unit_name = UNITS.get(measure, LINK_UNIT)
    for spread in sorted({len(unit.hosts) for unit in units}):
        alike = [unit for unit in units if len(unit.hosts) == spread]
        for unit in alike:
            said = f"{measure} {unit.value:,.3g} {unit_name}"
            if unit.least is not None and unit.value < unit.least:
                yield unit, f"{said}, less than {unit.least:,.3g}"
                continue
            if len(alike) < 2:
                continue  # nothing to compare with
            usual = statistics.median(other.value for other in alike if other is not unit)
            if unit.value < share * usual:
                yield unit, f"{said}, {unit.value / usual:.0%} of its peers' {usual:,.3g}"


def _spans(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
