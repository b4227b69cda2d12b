"""Shows the progress of one phase of a run: a live bar on a terminal, plain lines elsewhere.

Also formats numbers for the display and for the reports.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any, TextIO, cast, final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_logger = logging.getLogger(__name__)

MISSING = "–"
_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BEFORE_DETAILS = 30.0  # after this silence, a line says what the step is doing
_STEPS_IN_PACE = 16  # the pace is the mean over this many steps
_REFRESHES_PER_SECOND = 4
_GONE = (OSError, ValueError, AttributeError)  # errors of a closed or missing stream


# --- numbers --------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """Write `value` with `digits` significant digits; with an exponent if very large or small."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 10**6 or size < 10**-4:
        return f"{value:.{digits - 1}e}"
    if size >= 10**digits:
        return f"{value:,.0f}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:.{decimals}f}"


def _formatted(template: str, scale: float = 1.0) -> Callable[[float | None], str]:
    def write(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return number(value)
        # Remove the minus of a small negative number, which would become "-0.0" and look like a
        # result.
        return re.sub(r"^-(?=[0.]*%?$)", "", template.format(scale * value))

    return write


fixed = _formatted("{:.3f}")  # a number of order one; fixed decimals align a column
percent = _formatted("{:.1f}%", 100)  # a share between 0 and 1
points = _formatted("{:.1f}", 100)  # the difference of two shares, in percentage points


def duration(seconds: float | None) -> str:
    """Write seconds as 0.41 s, 12 s, 3:05, 2:03:05 or 4d 02:03."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        days, hours = divmod(hours, 24)
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class SafeStream:
    """Writes to another stream; does nothing if that stream is closed, full or missing.

    Characters that the stream's encoding lacks are replaced. rich writes from its own thread, so
    the training loop could not catch an exception.
    """

    def __init__(self, stream: TextIO | Any) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def as_file(self) -> IO[str]:
        """Return this stream, typed as a file. It has the methods that rich needs."""
        return cast("IO[str]", self)

    def isatty(self) -> bool:
        with contextlib.suppress(*_GONE):
            return bool(self._stream.isatty())
        return False

    def write(self, text: str) -> int:
        # If the pipe or terminal is closed, the text is lost and the run goes on.
        with contextlib.suppress(*_GONE):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                known = text.encode(self.encoding, errors="replace").decode(self.encoding)
                self._stream.write(known)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(*_GONE):
            self._stream.flush()


def console_for(stream: TextIO | None = None) -> Console:
    """Return a console that prints to `stream`, or to stdout."""
    safe = SafeStream(sys.stdout if stream is None else stream)
    # A run may be called "a[red]" or "a:x:b", which must not become a colour or an emoji.
    plain = {"highlight": False, "markup": False, "emoji": False}
    options: dict[str, Any] = {"force_terminal": safe.isatty(), **plain}
    return Console(file=safe.as_file(), **options)


# --- progress -------------------------------------------------------------------------------------

_SHOWN: tuple[tuple[str, Callable[[float | None], str], tuple[str, ...]], ...] = (
    ("reward", fixed, ("reward/mean",)),
    ("accuracy", fixed, ("evaluation/accuracy",)),
    ("loss", number, ("loss",)),
    ("grad norm", number, ("grad_norm",)),
    # The share of tokens. A sequence of which one token is clipped also counts as clipped.
    ("clipped", percent, ("clip/token/binding", "clip/sequence/binding")),
)


@final
class Progress:
    """Shows the progress of a phase; a context manager.

    `total` is the number of steps of the phase; `unit` is the word for one of them. A resumed run
    has already done `initial_step` of these steps. `stream` defaults to stderr. With enabled=False
    nothing is shown; all ranks except one use this. An error of the stream or the terminal never
    stops the run.
    """

    def __init__(
        self,
        total: int,
        title: str,
        stream: TextIO | None = None,
        *,
        enabled: bool = True,
        initial_step: int = 0,
        unit: str = "step",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._title, self._step, self._clock = total, title, initial_step, clock
        self._unit = unit
        self._metrics: dict[str, Any] = {}
        # The accuracy of the last evaluation. Not every step has an evaluation.
        self._accuracy: dict[str, Any] = {}
        self._times: deque[tuple[int, float]] = deque(maxlen=_STEPS_IN_PACE + 1)
        self._line_step, self._line_time = initial_step, -math.inf  # step and time of last line
        self._doing, self._doing_time = "", -math.inf  # text of `doing`, time of its last line
        self._enabled = enabled
        self._stream = SafeStream(sys.stderr if stream is None else stream)
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self._started = self._clock()
        self._times.append((self._step, self._started))
        redraws = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        if self._enabled and redraws and self._stream.isatty():
            # isatty() was true, so rich must not decide that this is no terminal.
            file = self._stream.as_file()
            console = Console(file=file, force_terminal=True, highlight=False)
            self._live = Live(
                console=console,
                get_renderable=lambda: self._render(console.width),
                refresh_per_second=_REFRESHES_PER_SECOND,
            )
            self._attempt(partial(self._live.start, refresh=True))
        return self

    def begin_steps(self) -> None:
        """Measure the pace from now on. An evaluation before the first step is no part of it."""
        self._times.clear()
        self._times.append((self._step, self._clock()))

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` (counted from 1) is done. `metrics` has the names of metrics.jsonl as
        keys."""
        if metrics.get("evaluation/accuracy") is not None:
            self._accuracy = {"evaluation/accuracy": metrics["evaluation/accuracy"]}
        self._step, self._metrics, self._doing = step, {**metrics, **self._accuracy}, ""
        now = self._clock()
        self._times.append((step, now))
        # A bar is redrawn at a fixed rate, so that the terminal does not slow down fast steps.
        is_due = now - self._line_time >= _SECONDS_BETWEEN_LINES or step >= self._total
        if self._live is None and is_due:
            self._attempt(self._write_line)

    def doing(self, text: str) -> None:
        """Show what the current step is doing, such as "rewards 12/64"; "" clears it.

        The text is part of the bar. Without a bar, the text becomes a line after 30 s without
        output. The method may be called often."""
        self._doing = text
        if self._live is None and text:
            now = self._clock()
            last = max(self._started, self._line_time, self._doing_time)
            if now - last >= _SECONDS_BEFORE_DETAILS:
                self._doing_time = now
                step = f"step {self._step + 1}: " if self._total else ""
                self._attempt(lambda: self._write(f"{self._title}  {step}{text}"))

    def note(self, text: str) -> None:
        """Print a permanent line of text, above the bar or between the lines."""
        show = self._write if self._live is None else self._live.console.print
        self._attempt(partial(show, Text(text)))

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._attempt(self._live.stop)
        elif self._line_step != self._step and self._metrics:
            self._attempt(self._write_line)

    def _attempt(self, show: Callable[[], object]) -> None:
        if not self._enabled:
            return
        try:
            show()
        except Exception:
            # An error of the display must not stop the run.
            _logger.debug("progress is no longer shown", exc_info=True)
            self._enabled = False

    def _shown_metrics(self) -> list[tuple[str, str]]:
        """Return names and formatted values of the metrics that this step has."""
        shown = []
        for name, write, keys in _SHOWN:
            values = [self._metrics[key] for key in keys if key in self._metrics]
            if values:  # None means that the number was not finite, which must be shown
                shown.append((name, write(math.nan if values[0] is None else float(values[0]))))
        return shown

    def _timing(self) -> list[tuple[str, str]]:
        """Return names and values of the pace and the remaining time (at the end: total time)."""
        now = self._clock()
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        steps = last_step - first_step
        pace = (last_time - first_time) / steps if steps > 0 else None  # mean over the last steps
        if self._step >= self._total:
            time_shown = ("took", duration(now - self._started))
        else:
            remaining = None
            if pace is not None:  # the remaining time counts down while a step is running
                remaining = max(0.0, (self._total - self._step) * pace - (now - last_time))
            time_shown = ("ETA", duration(remaining))
        if pace is None:
            return [time_shown]
        return [("", f"{number(pace)} s/{self._unit}"), time_shown]

    def _write_line(self) -> None:
        pairs = [*self._shown_metrics(), *self._timing()]
        # An evaluation has no steps to count.
        count = f"  {self._step:>{len(str(self._total))}}/{self._total}" if self._total else ""
        parts = [f"{self._title}{count}", *(f"{name} {value}".strip() for name, value in pairs)]
        self._write("  ".join(parts))
        self._line_step, self._line_time = self._step, self._clock()

    def _write(self, text: object) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _render(self, width: int) -> Group:
        bar = Table.grid(padding=(0, 2), expand=False)
        for _ in range(3):
            bar.add_column(no_wrap=True)
        timing = Text("  ").join(_pair(name, value) for name, value in self._timing())
        counted = [(f"{self._step}", "bold"), f"/{self._total}  "] if self._total else []
        count = Text.assemble(*counted, timing)
        progress_bar = ProgressBar(
            total=max(1, self._total),
            completed=self._step,
            width=max(10, min(40, width - 50)),
            complete_style="cyan",
            finished_style="green",
        )
        bar.add_row(Text(self._title, style="bold"), progress_bar, count)
        pairs = [*self._shown_metrics(), *([("", self._doing)] if self._doing else [])]
        metrics = Text("   ").join(_pair(name, value) for name, value in pairs)
        metrics.no_wrap, metrics.overflow = True, "ellipsis"
        return Group(bar, metrics)


def _pair(name: str, value: str) -> Text:
    return Text.assemble((f"{name} " if name else "", "dim"), value)
