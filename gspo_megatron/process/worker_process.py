"""The process of a worker: loads the function of its job and calls it in its main thread.

The process exchanges frames with `process.workers` over a socket. A frame is a length and a pickled
tuple.
"""

from __future__ import annotations

import asyncio
import pickle
import resource
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any

from gspo_megatron.errors import UserError
from gspo_megatron.plugins import origin
from gspo_megatron.process.coroutines import outcome_of

_LENGTH = struct.Struct("<Q")
VALUE, ERROR, REFUSED, TIMEOUT = "value", "error", "refused", "timeout"


@dataclass(frozen=True)
class Function:
    """The function that a job has loaded."""

    call: Callable[[Any], Any]  # a plain function or a coroutine function
    unsendable: Callable[[Any], UserError]  # makes the error for a result that cannot be pickled


@dataclass(frozen=True)
class Job:
    """The function that workers call, and the limits of a call. The first frame that a worker gets
    is a Job."""

    name: str  # in messages, such as: reward 'exact'
    # The worker calls this function. It must be a function of a module, because it is pickled.
    load: Callable[..., Function]
    arguments: tuple[Any, ...]  # the arguments of `load`
    is_async: bool  # whether the loaded function is a coroutine function
    timeout_seconds: float
    memory_bytes: int
    timed_out: str  # the message for a call that took too long, such as: took longer than ...
    memory_limit: str  # describes the limit in the message for a call that used too much memory
    error: type[UserError]  # raised if a worker cannot start


def frame(content: Any) -> bytes:
    data = pickle.dumps(content)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Receive one frame. Raises IncompleteReadError at the end of the stream."""
    head = await reader.readexactly(_LENGTH.size)
    return pickle.loads(await reader.readexactly(*_LENGTH.unpack(head)))


def main(descriptor: int) -> None:
    """Serve until the owner closes the socket `descriptor`."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    stream = connection.makefile("rwb")
    _, job = _read(stream)
    resource.setrlimit(resource.RLIMIT_DATA, (job.memory_bytes, job.memory_bytes))
    try:
        function = job.load(*job.arguments)
    except UserError as error:
        _write(stream, (0, *_failure(error)))
        return
    _write(stream, (0, VALUE, pickle.dumps(None)))
    if job.is_async:
        asyncio.run(_serve_coroutines(connection, function, job.timeout_seconds))
        return
    while (request := _read(stream)) is not None:
        number, argument = request
        try:
            value = function.call(argument)
        except BaseException as error:  # noqa: BLE001 (the user's code may raise anything)
            _write(stream, (number, *_failure(error)))
        else:
            stream.write(_answer(number, value, function))
            stream.flush()


def _read(stream: BufferedRWPair) -> Any:
    """Read one frame; None at the end of the file."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return pickle.loads(stream.read(*_LENGTH.unpack(head)))


def _write(stream: BufferedRWPair, content: Any) -> None:
    stream.write(frame(content))
    stream.flush()


def _failure(error: BaseException) -> tuple[str, tuple[str, ...]]:
    if isinstance(error, UserError):
        return REFUSED, (type(error).__name__, str(error))
    return ERROR, (type(error).__name__, str(error), origin(error))


def _answer(number: int, value: Any, function: Function) -> bytes:
    try:
        return frame((number, VALUE, pickle.dumps(value)))
    except Exception:  # noqa: BLE001 (pickle raises many kinds of errors)
        return frame((number, *_failure(function.unsendable(value))))


async def _serve_coroutines(connection: socket.socket, function: Function, timeout: float) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    running: set[asyncio.Task[None]] = set()

    async def serve(number: int, argument: Any) -> None:
        call = asyncio.create_task(outcome_of(lambda: function.call(argument)))
        # asyncio.wait_for is not used, because after the timeout it would still wait for a call
        # that ignores its cancellation.
        if not (await asyncio.wait({call}, timeout=timeout))[0]:
            call.cancel()
            writer.write(frame((number, TIMEOUT, None)))
            return
        value, error = call.result()
        failed = None if error is None else frame((number, *_failure(error)))
        writer.write(failed or _answer(number, value, function))

    while True:
        try:
            number, argument = await read_frame(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        task = asyncio.create_task(serve(number, argument))
        running.add(task)
        task.add_done_callback(running.discard)
