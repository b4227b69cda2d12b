"""The environment `agent`: a program that talks to the policy as to OpenAI's chat completions.

Each episode runs the command once. It finds the row as JSON on stdin, and the policy where the
package `openai` looks by itself, in OPENAI_BASE_URL and OPENAI_API_KEY; the key tells episodes
apart. What the policy writes is captured token by token, so the program needs no change. It may
give the reward by `POST /reward` with {"reward": 1.0}, or leave it to the reward function.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shlex
import shutil

from gspo_megatron.environments.episode import Client, LimitReached, Trajectory, within
from gspo_megatron.environments.gateway import Gateway, new_key
from gspo_megatron.environments.registry import register
from gspo_megatron.errors import EpisodeError
from gspo_megatron.process.keeper import kept
from gspo_megatron.types import Prompt

_SHOWN_CHARACTERS = 500  # of what a failed program printed last
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
_INLINE = re.compile(r"-[A-Za-z]*c")  # -c, also behind other letters: bash -lc


@register("agent")
class Agent:
    """See above. `command`: of the program, as in a shell; `seconds`: an episode that takes longer,
    beside the time for the policy's turns, has failed."""

    needs_template = True

    def __init__(self, command: str, seconds: float = 600.0) -> None:
        self._command, self._seconds = shlex.split(command), seconds
        if not self._command:
            raise ValueError("environment.options.command is empty")
        self._gateway = Gateway()

    def machine_fault(self) -> str | None:
        """Why the command cannot be run on this machine, and what to do; None: it can."""
        program, *words = self._command
        key = f"environment.options.command = {shlex.join(self._command)!r}"
        if shutil.which(program) is None:
            return f"{key}: {program} is no program; allowed: one on PATH, or a path to one"
        # What follows -c is a command line of a shell or code of Python, and no path.
        options = [*itertools.takewhile(lambda word: word.startswith("-"), words)]
        script = words[len(options)] if len(words) > len(options) else ""
        is_inline = any(_INLINE.fullmatch(option) for option in options)
        is_path = script.endswith(_SCRIPTS) and not any(map(str.isspace, script))
        if is_path and not is_inline and not os.path.isfile(script):
            where = f"a path from {os.getcwd()}, or an absolute one"
            return f"{key}: {script}: no such file; allowed: {where}"
        return None

    async def rollout(self, client: Client, task: Prompt) -> Trajectory | None:
        url, key = await self._gateway.url(), new_key()
        place = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
        with self._gateway.session(client, key) as session:
            code, said = await self._run(client, task, place)
        session.check()
        if session.reward is None and session.is_over:
            raise LimitReached
        if session.reward is None and code:
            raise EpisodeError(f"the agent ended with exit code {code}: {said}")
        return session.reward

    # The program

    async def _run(self, client: Client, task: Prompt, place: dict[str, str]) -> tuple[int, str]:
        """Its exit code, and the last that it printed."""
        row = {**task.fields, "prompt": task.text, "answer": task.answer, "row_id": task.row_id}
        row["messages"] = list(task.messages)
        lifeline, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *kept(lifeline, self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(lifeline,),
                start_new_session=True,
                env={**os.environ, **place},
            )
        finally:
            os.close(lifeline)
        try:
            work = process.communicate(json.dumps(row).encode())
            said, _ = await within(self._seconds, client, work)
        except asyncio.TimeoutError:
            raise EpisodeError(
                f"the agent took longer than environment.options.seconds = {self._seconds:g}"
            ) from None
        finally:
            os.close(ours)  # the end of all that it has started
            await asyncio.shield(process.wait())
        assert process.returncode is not None
        text = " ".join(said.decode(errors="replace").split())
        return process.returncode, text[-_SHOWN_CHARACTERS:]
