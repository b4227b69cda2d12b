"""`environment.verifiers`: runs an unchanged taskset of the package verifiers.

The taskset runs in a separate process (verifiers_bridge.py), in the interpreter that has the
package (`environment.python`). One process runs all episodes. The programs that verifiers starts
for an episode call the policy through the gateway, which records the policy's tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_megatron.environments.episode import Client, Trajectory, check_seconds, within
from gspo_megatron.environments.gateway import Gateway, new_key, reaching_loopback
from gspo_megatron.errors import EpisodeError, UnplayableError
from gspo_megatron.files import WRONG_VALUES
from gspo_megatron.process.keeper import command_under_keeper
from gspo_megatron.types import Prompt

TASK_FIELD = "task"  # field of the rows that `gspo-megatron tasks` writes
_BRIDGE = Path(__file__).with_name("verifiers_bridge.py")
_LONGEST_LINE = 1 << 24  # bytes; limit for one answer


@dataclass
class _VerifiersProcess:
    """The running process of verifiers_bridge.py."""

    running: subprocess.Popen[bytes]
    writer: asyncio.StreamWriter
    end: weakref.finalize
    answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    # Keys that no episode uses, and keys of aborted episodes whose programs may still run.
    free_keys: list[str] = field(default_factory=list)
    aborted: dict[int, str] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None

    def has_ended(self) -> bool:
        return self.reading is not None and self.reading.done()

    def tell(self, order: dict[str, Any]) -> None:
        self.writer.write(json.dumps(order).encode() + b"\n")

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Deliver answers until the process has ended."""
        problem = None
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                waiting = self.answers.get(answer["id"])
                if answer["id"] in self.aborted:
                    self.free_keys.append(self.aborted.pop(answer["id"]))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except ConnectionError:
            pass
        except WRONG_VALUES as error:  # a line that is too long, or is no answer
            problem = f"its process sent what cannot be read: {error}"
        self.writer.close()
        self.end()
        code = await asyncio.to_thread(self.running.wait)
        for waiting in self.answers.values():
            if not waiting.done():
                waiting.set_result({"error": problem or f"its process ended with exit code {code}"})


class Verifiers:
    """Runs tasks of the taskset `taskset_id` (as in `vf-eval`).

    An episode fails if it takes longer than `seconds`, not counting the policy's turns. `options`
    are fields of verifiers' environment (`--env.*` of `vf-eval`)."""

    gives_rewards = True
    needs_template = True

    def __init__(
        self, taskset_id: str, python: str, seconds: float = 600.0, **options: Any
    ) -> None:
        check_seconds(seconds)
        self._python, self._seconds = shutil.which(python) or python, seconds
        self._settings = {"taskset": taskset_id, "options": options}
        self._gateway = Gateway()
        self._process: _VerifiersProcess | None = None
        self._numbers, self._starting = itertools.count(), asyncio.Lock()

    async def rollout(self, client: Client, task: Prompt) -> Trajectory | None:
        if TASK_FIELD not in task.fields:
            raise EpisodeError(
                f"the row has no field {TASK_FIELD}; `gspo-megatron tasks` writes prompts that do"
            )
        async with self._starting:
            if self._process is None or self._process.has_ended():
                self._process = await self._start(client.limits.turns)
        process = self._process
        key = process.free_keys.pop() if process.free_keys else new_key()
        with self._gateway.session(client, key) as session:
            answer = await self._play(process, client, task.fields[TASK_FIELD], key)
        session.check()
        if "error" in answer:
            raise EpisodeError(answer["error"])
        client.is_cut |= answer["truncated"]
        return Trajectory(reward=answer["reward"])

    def tasks(self, first: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield rows of a prompt file for `count` tasks of the taskset, from number `first` on.

        Raises EpisodeError if verifiers fails."""
        settings = json.dumps(self._settings)
        command = [self._python, "-P", str(_BRIDGE), "tasks", settings, str(first), str(count)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment()) as process:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
        if process.returncode:
            raise EpisodeError("verifiers gives no tasks; what it printed above says why")

    async def _play(
        self, process: _VerifiersProcess, client: Client, task: Any, key: str
    ) -> dict[str, Any]:
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        process.answers[number] = answer
        process.tell({"id": number, "key": key, "task": task})
        try:
            return await within(self._seconds, client, answer)
        except asyncio.TimeoutError:
            raise EpisodeError(
                f"it took longer than environment.options.seconds = {self._seconds:g}"
            ) from None
        finally:
            # The key is used again when the task has ended. Otherwise verifiers would hold another
            # client for each aborted episode.
            del process.answers[number]
            if answer.cancelled():
                process.aborted[number] = key
                process.tell({"cancel": number})
            else:
                process.free_keys.append(key)

    async def _start(self, max_turns: int) -> _VerifiersProcess:
        """Start the process. Raises UnplayableError if verifiers refuses the settings."""
        settings = {**self._settings, "max_turns": max_turns}
        settings["url"] = f"{await self._gateway.url()}/v1"
        ours, theirs = socket.socketpair()
        lifeline, life = os.pipe()
        command = [self._python, "-P", str(_BRIDGE), "play", str(theirs.fileno())]
        end = weakref.finalize(self, os.close, life)  # ends the process and all that it started
        try:
            running = subprocess.Popen(
                command_under_keeper(lifeline, command),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # the rollout service needs its stdout for messages
                pass_fds=(lifeline, theirs.fileno()),
                start_new_session=True,
                env=_environment(),
            )
        except BaseException:
            end()
            ours.close()
            raise
        finally:
            os.close(lifeline)
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
        process = _VerifiersProcess(running, writer, end)
        process.tell(settings)
        try:
            line = await asyncio.wait_for(reader.readline(), self._seconds)
            problem = json.loads(line).get("problem") if line else "its process ended at once"
            if problem is not None:
                raise UnplayableError(f"environment.verifiers = {settings['taskset']}: {problem}")
        except asyncio.TimeoutError:
            end()
            writer.close()
            late = f"not ready after environment.options.seconds = {self._seconds:g}"
            raise EpisodeError(late) from None
        except BaseException:
            end()
            writer.close()
            raise
        process.reading = asyncio.create_task(process.read(reader))
        return process


def _environment() -> dict[str, str]:
    """Return the environment variables without the paths of this interpreter's packages."""
    removed = ("PYTHONPATH", "PYTHONHOME")
    variables = reaching_loopback(os.environ)
    return {name: value for name, value in variables.items() if name not in removed}
