"""Being told to stop: SIGTERM and SIGUSR1 ask for a checkpoint and an orderly end.

A scheduler sends one of them some time before it ends a job. The ranks notice it at different
moments, so they agree on when to stop: at the end of a step, or after the rollouts of one.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRun(Exception):  # noqa: N818 (no error: the orderly end of a run that was told to stop)
    """Raised on all ranks once the run is saved and may end."""


class StopSignals:
    """Inside the context, the signals set `is_requested` instead of ending the process.

    With enabled=False they do what they did before: a run that saves nothing ends at once.
    """

    def __init__(self, *, enabled: bool) -> None:
        # Python takes signals in the main thread only; elsewhere nobody sends any to a thread.
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, object] = {}
        self.is_requested = False
        self.longest_step = 0.0  # seconds
        self._last_boundary: float | None = None

    def boundary(self) -> None:
        """The end of a step, before it is saved: from one to the next is as long as a stop may take
        that is requested at any time."""
        now = time.monotonic()
        if self._last_boundary is not None:
            self.longest_step = max(self.longest_step, now - self._last_boundary)
        self._last_boundary = now

    def __enter__(self) -> StopSignals:
        if self._enabled:
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.is_requested = True
