"""A reward worker's own process: loads the reward function and calls it in its main thread.

It talks with `rewards.workers` over a socket: frames of a length and a pickled tuple.
"""

from __future__ import annotations

import asyncio
import pickle
import resource
import socket
import struct
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any

from gspo_megatron.errors import RewardError, UserError
from gspo_megatron.plugins import origin
from gspo_megatron.rewards.registry import Reward, get_reward
from gspo_megatron.rewards.values import shorten

LENGTH = struct.Struct("<Q")
VALUE, ERROR, REFUSED, TIMEOUT = "value", "error", "refused", "timeout"


@dataclass(frozen=True)
class Order:
    """What a worker is for; its first frame."""

    name: str
    import_path: str | None
    options: dict[str, Any]
    timeout_seconds: float
    memory_bytes: int


def frame(content: Any) -> bytes:
    data = pickle.dumps(content)
    return LENGTH.pack(len(data)) + data


def main(descriptor: int) -> None:
    """Serve until the owner closes the socket `descriptor`."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    stream = connection.makefile("rwb")
    _, order = _read(stream)
    resource.setrlimit(resource.RLIMIT_DATA, (order.memory_bytes, order.memory_bytes))
    try:
        reward = get_reward(order.name, order.import_path, order.options)
    except UserError as error:
        _write(stream, (0, *_failure(error)))
        return
    _write(stream, (0, VALUE, pickle.dumps(None)))
    if reward.is_async:
        asyncio.run(_serve_coroutines(connection, reward, order.timeout_seconds))
        return
    while (request := _read(stream)) is not None:
        number, given = request
        try:
            value = reward(given)
        except Exception as error:  # noqa: BLE001 (the user's code may raise anything)
            _write(stream, (number, *_failure(error)))
        else:
            stream.write(_answer(number, value, reward))
            stream.flush()


def _read(stream: BufferedRWPair) -> Any:
    """None at the end of the file."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return pickle.loads(stream.read(*LENGTH.unpack(head)))


def _write(stream: BufferedRWPair, content: Any) -> None:
    stream.write(frame(content))
    stream.flush()


def _failure(error: Exception) -> tuple[str, tuple[str, ...]]:
    if isinstance(error, UserError):
        return REFUSED, (type(error).__name__, str(error))
    return ERROR, (type(error).__name__, str(error), origin(error))


def _answer(number: int, value: Any, reward: Reward) -> bytes:
    try:
        return frame((number, VALUE, pickle.dumps(value)))
    except Exception:  # noqa: BLE001 (what has no pickle says so in many ways)
        returned = f"{shorten(value)} of type {type(value).__name__}; a number is wanted"
        error = RewardError(f"reward {reward.name!r} returned {returned}")
        return frame((number, *_failure(error)))


async def _serve_coroutines(connection: socket.socket, reward: Reward, timeout: float) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    running: set[asyncio.Task[None]] = set()

    async def serve(number: int, given: Any) -> None:
        call = asyncio.ensure_future(reward(given))
        # not wait_for: it waits for calls that do not let themselves be cancelled
        if not (await asyncio.wait({call}, timeout=timeout))[0]:
            call.cancel()
            writer.write(frame((number, TIMEOUT, None)))
            return
        error = call.exception()
        if error is None:
            writer.write(_answer(number, call.result(), reward))
        elif isinstance(error, Exception):
            writer.write(frame((number, *_failure(error))))
        else:
            raise error

    while True:
        try:
            head = await reader.readexactly(LENGTH.size)
            number, given = pickle.loads(await reader.readexactly(*LENGTH.unpack(head)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        task = asyncio.create_task(serve(number, given))
        running.add(task)
        task.add_done_callback(running.discard)
