"""The environment `agent`: a program that calls the policy through OpenAI's chat completions API.

Each episode runs the command once. The program gets the row as JSON on stdin. The variables
OPENAI_BASE_URL and OPENAI_API_KEY make the package `openai` send its requests to the policy; each
episode has its own key. The gateway (environments/gateway.py) answers the requests and records the
policy's tokens, so the program needs no change. The program may send a reward by `POST /reward`
with {"reward": 1.0}; otherwise the reward function scores the episode.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shlex
import shutil

from gspo_megatron.environments.episode import (
    Client,
    LimitReached,
    Trajectory,
    check_seconds,
    within,
)
from gspo_megatron.environments.gateway import Gateway, new_key, reaching_loopback
from gspo_megatron.environments.registry import register
from gspo_megatron.errors import EpisodeError
from gspo_megatron.process.keeper import command_under_keeper
from gspo_megatron.types import Prompt

_KEPT_BYTES = 1 << 14  # of a program's output
_SHOWN_CHARACTERS = 500  # an error message shows the end of a failed program's output
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
_INLINE = re.compile(r"-[A-Za-z]*c")  # -c, or -c after other letters, as in bash -lc


@register("agent")
class Agent:
    """Runs a program in each episode. `command` is its command line, as in a shell.

    An episode fails if it takes longer than `seconds`, not counting the policy's turns."""

    needs_template = True

    def __init__(self, command: str, seconds: float = 600.0) -> None:
        check_seconds(seconds)
        self._command, self._seconds = shlex.split(command), seconds
        if not self._command:
            raise ValueError("environment.options.command is empty")
        self._gateway = Gateway()

    def machine_fault(self) -> str | None:
        """Return why this machine cannot run the command and what to do, or None if it can."""
        program, *words = self._command
        key = f"environment.options.command = {shlex.join(self._command)!r}"
        if shutil.which(program) is None:
            return f"{key}: {program}: no such program; allowed: one on PATH, or a path to one"
        # After -c comes shell or Python code, not a path.
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
        variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
        with self._gateway.session(client, key) as session:
            code, output_end = await self._run(client, task, variables)
        session.check()
        if session.reward is None and session.is_over:
            raise LimitReached
        if code and not session.is_over:
            raise EpisodeError(f"the agent ended with exit code {code}: {output_end}")
        return session.reward

    async def _run(
        self, client: Client, task: Prompt, variables: dict[str, str]
    ) -> tuple[int, str]:
        """Run the program; return its exit code and the end of its output."""
        row = {**task.fields, "prompt": task.text, "answer": task.answer, "row_id": task.row_id}
        row["messages"] = list(task.messages)
        stdin = json.dumps(row, default=str).encode()  # a Parquet file may have dates
        lifeline, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command_under_keeper(lifeline, self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(lifeline,),
                start_new_session=True,
                env={**reaching_loopback(os.environ), **variables},
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(lifeline)
        output = asyncio.ensure_future(_end_of_output(process, stdin))
        try:
            last_bytes = await within(self._seconds, client, asyncio.shield(output))
        except asyncio.TimeoutError:
            raise EpisodeError(
                f"the agent took longer than environment.options.seconds = {self._seconds:g}"
            ) from None
        finally:
            os.close(ours)  # ends the program and everything that it has started
            await asyncio.shield(output)
        assert process.returncode is not None
        text = " ".join(last_bytes.decode(errors="replace").split())
        return process.returncode, text[-_SHOWN_CHARACTERS:]


async def _end_of_output(process: asyncio.subprocess.Process, content: bytes) -> bytes:
    """Write `content` to the program, and return the last bytes of its output after its end.

    Reads to the end of the output, because asyncio's `wait` returns only then."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(content)
    process.stdin.close()  # once all is written; a program that does not read it is no error
    last = b""
    while block := await process.stdout.read(1 << 16):
        last = (last + block)[-_KEPT_BYTES:]
    await process.wait()
    return last
