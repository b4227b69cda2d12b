"""Calls functions in worker processes, because a function may hang, crash or use up the memory.

In such a case, the owner ends the worker with all processes that the worker has started, and only
the call that caused this fails.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from gspo_megatron import errors
from gspo_megatron.process.keeper import SIGNALLED, program_under_keeper
from gspo_megatron.process.worker_process import (
    ERROR,
    REFUSED,
    TIMEOUT,
    VALUE,
    Job,
    frame,
    read_frame,
)

START_SECONDS = 300.0  # limit for importing the function's module, even from a slow file system
END_SECONDS = 10.0  # limit for ending the processes that a call has started
# A worker itself ends coroutines that take too long. If the worker is late by more than this time,
# one of the coroutines blocks the worker.
GRACE_SECONDS = 1.0

_PROGRAM = "from gspo_megatron.process.worker_process import main; main({data})"


class WorkerError(Exception):
    """A call in a worker returned no value.

    kind: the error's type, or what happened to the worker. The text continues a sentence that
    begins with the job's name.
    """

    def __init__(self, kind: str, text: str, *, timed_out: bool = False) -> None:
        self.kind, self.timed_out = kind, timed_out
        super().__init__(text)


class _SuspectError(Exception):
    """A worker was lost while it had several calls. Any of these calls may be the reason."""


class Workers:
    """A pool of `count` workers. Each is started when it is first needed.

    Use a pool from one event loop only. A worker runs up to `slots` calls of a coroutine function
    at the same time. It runs the calls of a plain function one after another, in its main thread.
    """

    def __init__(self, job: Job, count: int, slots: int) -> None:
        self._workers = [_Worker(job) for _ in range(count)]
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        for _ in range(slots):
            for worker in self._workers:
                self._free.put_nowait(worker)
        self._quarantine, self._quarantine_lock = _Worker(job), asyncio.Lock()

    async def call(self, argument: Any) -> Any:
        """Call the function and return its value. Raises WorkerError if the call fails. Raises a
        UserError if the function raises one or if a worker cannot start."""
        worker = await self._free.get()
        try:
            return await worker.call(argument)
        except _SuspectError:
            pass
        finally:
            self._free.put_nowait(worker)
        # Repeat the call alone, so that only the call that caused the loss fails.
        async with self._quarantine_lock:
            return await self._quarantine.call(argument)

    async def close(self) -> None:
        """End all workers; returns when their processes are gone."""
        for worker in (*self._workers, self._quarantine):
            await worker.close()


class _Worker:
    """One worker: a process. After its end, a new process takes its place."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._starting = asyncio.Lock()
        self._process: _Process | None = None
        self._processes: set[_Process] = set()  # all processes that are not gone yet

    async def call(self, argument: Any) -> Any:
        async with self._starting:
            if self._process is None or self._process.is_ended:
                self._process = _Process(self._job, self._processes.discard)
                self._processes.add(self._process)
                await self._process.start()
        return await self._process.call(argument)

    async def close(self) -> None:
        for process in tuple(self._processes):
            process.end()
        for process in tuple(self._processes):
            await process.wait_until_gone()


class _Process:
    """One process of a worker. It is ended with all that it has started."""

    def __init__(self, job: Job, on_gone: Callable[[_Process], None]) -> None:
        self._job, self._on_gone = job, on_gone
        self.is_ended = False  # True as soon as `end` is called
        self._calls: dict[int, asyncio.Future[tuple[str, Any]]] = {}  # calls without an answer yet
        self._numbers = itertools.count()
        self._connected = asyncio.Event()
        self._socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        program = program_under_keeper(lifeline, _PROGRAM.format(data=theirs.fileno()))
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=2,  # to stderr, because a program may read the owner's stdout
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(lifeline)
        self._listener = asyncio.create_task(self._listen())

    async def start(self) -> None:
        """Let the process load the function. Raises `job.error` if that fails."""
        try:
            await self._ask(self._job, START_SECONDS)
        except WorkerError as error:
            late = f"is not ready after {START_SECONDS:g} s"
            what = late if error.timed_out else f"did not start: it {error}"
            raise self._job.error(f"{self._job.name}: its worker {what}") from error

    async def call(self, argument: Any) -> Any:
        grace = GRACE_SECONDS if self._job.is_async else 0.0
        return await self._ask(argument, self._job.timeout_seconds + grace)

    async def _ask(self, content: Any, limit: float) -> Any:
        """Send a frame and return the value of its answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            await self._connected.wait()
            self._writer.write(frame((number, content)))
            done, _ = await asyncio.wait({answer}, timeout=limit)
        except asyncio.CancelledError:
            self._calls.pop(number, None)
            self.end()  # the function is still busy with this call
            raise
        self._calls.pop(number, None)
        if not done:
            is_suspected = bool(self._calls)
            self.end()
            raise _SuspectError if is_suspected else self._timeout_error()
        return self._read_answer(*answer.result())

    def _read_answer(self, kind: str, content: Any) -> Any:
        """Return the value of an answer, or raise the error that it holds."""
        if kind == VALUE:
            return pickle.loads(content)
        if kind == TIMEOUT:
            raise self._timeout_error()
        if kind == REFUSED:
            name, text = content
            raise errors.error_of(name, text) if hasattr(errors, name) else self._job.error(text)
        assert kind == ERROR, kind
        name, text, where = content
        if name == "MemoryError":
            self.end()  # after the error, the state of the process is unknown
            text = f"{text or 'out of memory'}, with {self._job.memory_limit}"
        raise WorkerError(name, f"raised {name}: {text} ({where})")

    def _timeout_error(self) -> WorkerError:
        return WorkerError("time-out", self._job.timed_out, timed_out=True)

    async def _listen(self) -> None:
        """Receive answers until the keeper is gone. The keeper is the last process that holds the
        other end of the socket pair."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._connected.set()
        try:
            while True:
                number, kind, value = await read_frame(reader)
                if (answer := self._calls.pop(number, None)) is not None:
                    answer.set_result((kind, value))
        except asyncio.CancelledError:
            self.end()
            raise
        except Exception:  # noqa: BLE001 (the end of the file, or what the function itself wrote)
            self._close_lifeline()
            self._fail_calls(_crash(self._reap()))
        finally:
            self._on_gone(self)

    def end(self) -> None:
        """End the process. Callers that still wait for an answer get an error."""
        self._close_lifeline()
        self._fail_calls(_SuspectError())

    def _close_lifeline(self) -> None:
        """Let the keeper end the process."""
        if not self.is_ended:
            self.is_ended = True
            os.close(self._lifeline)

    def _fail_calls(self, error: Exception) -> None:
        """Let all calls without an answer raise `error`, or a _SuspectError if there are several of
        them."""
        suspects, self._calls = self._calls, {}
        for answer in suspects.values():
            answer.set_exception(error if len(suspects) == 1 else _SuspectError())

    def _reap(self) -> int:
        try:
            self._writer.close()
            return self._popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()

    async def wait_until_gone(self) -> None:
        await asyncio.wait({self._listener}, timeout=END_SECONDS)


def _crash(code: int) -> WorkerError:
    number = code - SIGNALLED if code > SIGNALLED else -code
    try:
        what = signal.Signals(number).name if code < 0 or code > SIGNALLED else f"exit code {code}"
    except ValueError:
        what = f"exit code {code}"
    return WorkerError(what, f"ended its worker with {what}")
