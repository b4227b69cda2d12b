"""The benchmark of the service still runs on the package as it is."""

from __future__ import annotations

import sys

from tests.programs import ROOT, run_program


def test_the_service_is_measured() -> None:
    words = ("--servers", "3", "--groups", "4", "--lengths", "50,200")
    done = run_program(sys.executable, str(ROOT / "tools" / "bench_service.py"), *words)
    last = done.stdout.splitlines()[-1]
    figures = {name: float(value) for name, value in (word.split("=") for word in last.split())}
    names = {"responses_per_cpu_second", "core_percent", "scoring_percent", "peak_mb"}
    names.add("process_percent")
    assert figures.keys() == names
    assert all(value > 0 for value in figures.values())
