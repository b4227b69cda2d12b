"""Progress of one phase of a run: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, TextIO, final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gspo_megatron.observe.formats import clip_fraction, duration, fixed, number, percent
from gspo_megatron.observe.streams import SafeStream

_logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 2.0
_STEPS_IN_PACE = 16  # the pace follows a change of speed within so many steps
_REFRESHES_PER_SECOND = 4
_FIGURES: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("reward", "reward/mean", fixed),
    ("loss", "loss", number),
    ("grad norm", "grad_norm", number),
)


@final
class Progress:
    """Shows how far a phase is; a context manager.

    `total` counts the steps of the phase, of which `initial_step` were done before (resume).
    `stream` is stderr unless given. On ranks other than the one that prints, pass enabled=False:
    nothing is shown. Nothing that happens to the stream or the terminal stops the run.
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
        self._display: _Display | None = None
        if enabled:
            safe = SafeStream(sys.stderr if stream is None else stream)
            if safe.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown"):
                self._display = _LiveDisplay(self._state, safe)
            else:
                self._display = _LineDisplay(self._state, safe)

    def __enter__(self) -> Progress:
        self._state.start()
        self._attempt(lambda display: display.start())
        return self

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Tell that `step` (counted from 1) is done, with its figures by metrics.jsonl's names."""
        self._state.advance(step, metrics)
        self._attempt(lambda display: display.refresh())

    def note(self, text: str) -> None:
        """Show a line of text that stays, above the bar or between the lines."""
        self._attempt(lambda display: display.note(text))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._attempt(lambda display: display.stop())

    def _attempt(self, action: Callable[[_Display], None]) -> None:
        if self._display is None:
            return
        try:
            action(self._display)
        except Exception:
            # Showing progress is worth less than the run, whatever a terminal may come up with.
            _logger.debug("progress is no longer shown", exc_info=True)
            self._display = None


class _Display(Protocol):
    def start(self) -> None: ...

    def refresh(self) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class _State:
    """What there is to show, apart from how."""

    def __init__(
        self, total: int, title: str, initial_step: int, clock: Callable[[], float]
    ) -> None:
        self.total = total
        self.title = title
        self.step = initial_step
        self.clock = clock
        self.metrics: dict[str, Any] = {}
        self.accuracy: float | None = None  # of the last evaluation, which is not every step's
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
        """Mean over the last steps, everything between them included; None before the first."""
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        if last_step <= first_step:
            return None
        return (last_time - first_time) / (last_step - first_step)

    def seconds_left(self) -> float | None:
        """Time to the end at this pace, counting down while a step is under way."""
        pace = self.seconds_per_step()
        if pace is None:
            return None
        since_last = self.clock() - self._times[-1][1]
        return max(0.0, (self.total - self.step) * pace - since_last)

    def figures(self) -> list[tuple[str, str]]:
        """Names and values of the figures there are, as shown."""
        present: list[tuple[str, Any, Callable[[float | None], str]]] = []
        for name, key, write in _FIGURES:
            if key in self.metrics:
                present.append((name, self.metrics[key], write))
        if self.accuracy is not None:
            present.insert(min(1, len(present)), ("accuracy", self.accuracy, fixed))
        clipped = clip_fraction(self.metrics)
        if clipped is not None:
            present.append(("clipped", clipped, percent))
        # None stands for a figure that was not finite, which is worth showing.
        return [
            (name, write(math.nan if value is None else float(value)))
            for name, value, write in present
        ]

    def timing(self) -> list[tuple[str, str]]:
        """Names and values of pace and remaining time, or of the whole time once done."""
        pace = self.seconds_per_step()
        if self.done:
            left = ("took", duration(self.clock() - self.started))
        else:
            left = ("ETA", duration(self.seconds_left()))
        return [left] if pace is None else [("", f"{number(pace)} s/step"), left]


class _LineDisplay:
    """One line of text now and then, for log files."""

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
        parts = [f"{name} {value}".strip() for name, value in state.figures() + state.timing()]
        count = f"{state.step:>{len(str(state.total))}}/{state.total}"
        self._stream.write("  ".join([f"{state.title}  {count}", *parts]) + "\n")
        self._stream.flush()
        self._last_time = state.clock()
        self._last_step = state.step


class _LiveDisplay:
    """A bar and a line of figures that are redrawn in place."""

    def __init__(self, state: _State, stream: SafeStream) -> None:
        self._state = state
        # The terminal was already looked at; rich must not decide otherwise from the environment.
        self._console = Console(file=stream, force_terminal=True, highlight=False)  # type: ignore[arg-type]
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_SECOND,
        )

    def start(self) -> None:
        self._live.start(refresh=True)

    def refresh(self) -> None:
        pass  # redrawn by the clock, so that a fast run does not spend its time on the terminal

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
        done = "green" if state.done else "cyan"
        progress_bar = ProgressBar(
            total=max(1, state.total),
            completed=state.step,
            width=max(10, min(40, self._console.width - 50)),
            complete_style=done,
            finished_style="green",
        )
        bar.add_row(Text(state.title, style="bold"), progress_bar, count)
        figures = Text("   ").join(_pair(name, value) for name, value in state.figures())
        figures.no_wrap, figures.overflow = True, "ellipsis"
        return Group(bar, figures)


def _pair(name: str, value: str) -> Text:
    return Text.assemble((f"{name} " if name else "", "dim"), value)
