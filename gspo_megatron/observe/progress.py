"""Progress of one phase of a run: a live bar on a terminal, plain lines anywhere else.

Also how numbers are written for people, here and in the reports.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO, final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_logger = logging.getLogger(__name__)

MISSING = "–"
_SECONDS_BETWEEN_LINES = 2.0
_STEPS_IN_PACE = 16  # the pace is the mean over so many steps
_REFRESHES_PER_SECOND = 4


# --- numbers --------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits; an exponent only for the very large and small."""
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
        return template.format(scale * value)

    return write


fixed = _formatted("{:.3f}")  # a number of order one; a column of them is aligned
percent = _formatted("{:.1f}%", 100)  # a share between 0 and 1
points = _formatted("{:.1f}", 100)  # the difference of two shares, in percentage points


def duration(seconds: float | None) -> str:
    """Seconds as 0.41 s, 12 s, 3:05, 2:03:05 or 4d 02:03."""
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


class SafeStream(io.TextIOBase):
    """Writes to another stream; does nothing when that one is closed, full or gone.

    Characters that the stream's encoding lacks are replaced. rich writes from its own thread, where
    the training loop could not catch an exception.
    """

    def __init__(self, stream: TextIO | Any) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return bool(self._stream.isatty())
        except (OSError, ValueError, AttributeError):
            return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        # On a closed pipe or terminal the text is lost; the run goes on.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                known = text.encode(self.encoding, errors="replace").decode(self.encoding)
                self._stream.write(known)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._stream.flush()

    def close(self) -> None:
        """Leave the wrapped stream open: it belongs to its owner."""


# --- progress -------------------------------------------------------------------------------------


@final
class Progress:
    """Shows the progress of a phase; a context manager.

    `total` counts the steps of the phase, of which `initial_step` were done before (resume).
    `stream` is stderr unless given. With enabled=False, as on ranks that print nothing, nothing is
    shown. An error of the stream or the terminal never stops the run.
    """

    def __init__(
        self,
        total: int,
        title: str,
        stream: TextIO | None = None,
        *,
        enabled: bool = True,
        initial_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = _State(total, title, initial_step, clock)
        self._display: _LineDisplay | _LiveDisplay | None = None
        if enabled:
            safe = SafeStream(sys.stderr if stream is None else stream)
            redraws = safe.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
            self._display = (_LiveDisplay if redraws else _LineDisplay)(self._state, safe)

    def __enter__(self) -> Progress:
        self._state.start()
        self._attempt(lambda display: display.start())
        return self

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` (counted from 1) is done; `metrics` by the names of metrics.jsonl."""
        self._state.advance(step, metrics)
        self._attempt(lambda display: display.refresh())

    def note(self, text: str) -> None:
        """Show a line of text that stays, above the bar or between the lines."""
        self._attempt(lambda display: display.note(text))

    def __exit__(self, *_: object) -> None:
        self._attempt(lambda display: display.stop())

    def _attempt(self, action: Callable[[_LineDisplay | _LiveDisplay], None]) -> None:
        if self._display is None:
            return
        try:
            action(self._display)
        except Exception:
            # The run matters more than its display, whatever is wrong with the terminal.
            _logger.debug("progress is no longer shown", exc_info=True)
            self._display = None


class _State:
    """What is shown, for both displays."""

    def __init__(
        self, total: int, title: str, initial_step: int, clock: Callable[[], float]
    ) -> None:
        self.total = total
        self.title = title
        self.step = initial_step
        self.clock = clock
        self.metrics: dict[str, Any] = {}
        self.accuracy: float | None = None  # of the last evaluation; not every step has one
        self._times: deque[tuple[int, float]] = deque(maxlen=_STEPS_IN_PACE + 1)
        self.start()

    def start(self) -> None:
        self.started = self.clock()
        self._times.clear()
        self._times.append((self.step, self.started))

    def advance(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.step = step
        self.metrics = dict(metrics)
        if metrics.get("evaluation/accuracy") is not None:
            self.accuracy = metrics["evaluation/accuracy"]
        self._times.append((step, self.clock()))

    @property
    def done(self) -> bool:
        return self.step >= self.total

    def seconds_per_step(self) -> float | None:
        """Mean over the last steps, with everything between them; None before the first."""
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        if last_step <= first_step:
            return None
        return (last_time - first_time) / (last_step - first_step)

    def shown_metrics(self) -> list[tuple[str, str]]:
        """Names and values of the metrics that this step has, as text."""
        metrics = self.metrics
        # The objective clips sequences or tokens, and logs which.
        clips = [metrics.get(f"clip/{unit}/binding") for unit in ("sequence", "token")]
        clipped = next((value for value in clips if value is not None), None)
        shown: list[tuple[str, Any, Callable[[float | None], str], bool]] = [
            ("reward", metrics.get("reward/mean"), fixed, "reward/mean" in metrics),
            ("accuracy", self.accuracy, fixed, self.accuracy is not None),
            ("loss", metrics.get("loss"), number, "loss" in metrics),
            ("grad norm", metrics.get("grad_norm"), number, "grad_norm" in metrics),
            ("clipped", clipped, percent, clipped is not None),
        ]
        # None stands for a number that was not finite, which must be shown.
        return [
            (name, write(math.nan if value is None else float(value)))
            for name, value, write, present in shown
            if present
        ]

    def timing(self) -> list[tuple[str, str]]:
        """Names and values of pace and remaining time, or of the total time when done."""
        pace = self.seconds_per_step()
        if self.done:
            time_shown = ("took", duration(self.clock() - self.started))
        else:
            left = None
            if pace is not None:  # counts down while a step is running
                since_last = self.clock() - self._times[-1][1]
                left = max(0.0, (self.total - self.step) * pace - since_last)
            time_shown = ("ETA", duration(left))
        return [time_shown] if pace is None else [("", f"{number(pace)} s/step"), time_shown]


class _LineDisplay:
    """A line of text every few seconds, for log files."""

    def __init__(self, state: _State, stream: SafeStream) -> None:
        self._state = state
        self._stream = stream
        self._last_time = -math.inf
        self._last_step: int | None = None

    def start(self) -> None:
        pass

    def refresh(self) -> None:
        waited = self._state.clock() - self._last_time
        if waited >= _SECONDS_BETWEEN_LINES or self._state.done:
            self._write_line()

    def note(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def stop(self) -> None:
        if self._last_step != self._state.step and self._state.metrics:
            self._write_line()

    def _write_line(self) -> None:
        state = self._state
        parts = [f"{name} {value}".strip() for name, value in state.shown_metrics()]
        parts += [f"{name} {value}".strip() for name, value in state.timing()]
        count = f"{state.step:>{len(str(state.total))}}/{state.total}"
        self.note("  ".join([f"{state.title}  {count}", *parts]))
        self._last_time = state.clock()
        self._last_step = state.step


class _LiveDisplay:
    """A bar and a line of metrics that are redrawn in place."""

    def __init__(self, state: _State, stream: SafeStream) -> None:
        self._state = state
        # Progress has decided that this is a terminal; rich must not decide again.
        self._console = Console(file=stream, force_terminal=True, highlight=False)  # type: ignore[arg-type]
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_SECOND,
        )

    def start(self) -> None:
        self._live.start(refresh=True)

    def refresh(self) -> None:
        pass  # redrawn by the clock, so that fast steps are not slowed down by the terminal

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        state = self._state
        bar = Table.grid(padding=(0, 2), expand=False)
        for _ in range(3):
            bar.add_column(no_wrap=True)
        timing = Text("  ").join(_pair(name, value) for name, value in state.timing())
        count = Text.assemble((f"{state.step}", "bold"), f"/{state.total}  ", timing)
        progress_bar = ProgressBar(
            total=max(1, state.total),
            completed=state.step,
            width=max(10, min(40, self._console.width - 50)),
            complete_style="green" if state.done else "cyan",
            finished_style="green",
        )
        bar.add_row(Text(state.title, style="bold"), progress_bar, count)
        metrics = Text("   ").join(_pair(name, value) for name, value in state.shown_metrics())
        metrics.no_wrap, metrics.overflow = True, "ellipsis"
        return Group(bar, metrics)


def _pair(name: str, value: str) -> Text:
    return Text.assemble((f"{name} " if name else "", "dim"), value)
