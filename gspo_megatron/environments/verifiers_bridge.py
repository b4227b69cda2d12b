"""Runs tasks of the package verifiers, in the Python interpreter that has this package. It is a
separate script that does not import gspo_megatron, because gspo_megatron and verifiers need
different versions of packages.

    python -P verifiers_bridge.py tasks SETTINGS FIRST COUNT   prints tasks as rows of prompts
    python -P verifiers_bridge.py play FD                      runs tasks, over the socket FD

The socket carries one JSON object on each line. The first input line is SETTINGS: {"taskset": id,
"options": the fields of verifiers' environment, "url": the policy's URL, "max_turns": n}. Then come
{"id": n, "key": the episode's API key, "task": the row's task} and {"cancel": n}. The answer to the
settings is {"problem": ...} or {}. The answer to a task is {"id": n, "reward": x,
"truncated": bool} or {"id": n, "error": ...}. It also comes for a cancelled task, when the task has
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from typing import Any

POLICY = "policy"
_LONGEST_LINE = 1 << 30  # the most bytes of a line; a task is one line
_SHOWN_CHARACTERS = 2000  # of an error's message


class UnfitError(Exception):
    """Raised if an environment of verifiers cannot be used here; the text says why."""


def load(settings: dict[str, Any]) -> Any:
    """Return the environment of verifiers that the settings name."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import PrimeConfig
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        env_config_type,
        load_environment,
        resolve_env_config,
    )

    name, options = settings["taskset"], dict(settings["options"])
    taskset = {**options.get("taskset", {}), "id": name}
    config_type = env_config_type(name, options.get("id", ""))
    roles = agent_config_fields(resolve_env_config({**options, "taskset": taskset}))
    for role, config in roles.items():
        of_role = dict(options.get(role, {}))
        # With the defaults of verifiers, a task could run on a machine rented from the company that
        # makes verifiers, or the policy would get a shell on this machine.
        if "runtime" not in of_role and type(config.runtime) is PrimeConfig:
            of_role["runtime"] = {"type": "subprocess"}
        if config.harness is None and default_harness_id(name) == "bash":
            of_role["harness"] = {"id": "null"}
        if config.max_turns is None and settings.get("max_turns"):
            of_role["max_turns"] = settings["max_turns"]
        options[role] = of_role
    environment = load_environment(resolve_env_config({**options, "taskset": taskset}))
    if not isinstance(environment.config, config_type):
        raise UnfitError(f"its configuration is no {config_type.__name__}")
    data = type(environment.taskset).task_type().data_type()
    lost = [field for field, info in data.model_fields.items() if info.exclude]
    if lost:
        raise UnfitError(f"{data.__name__} does not write its fields {', '.join(lost)}")
    return environment


def print_tasks(settings: dict[str, Any], first: int, count: int) -> None:
    """Print tasks as rows of a prompt file, in the order of the taskset."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as rows:
        os.dup2(2, 1)  # the taskset's own output must not be among the rows
        for row in _rows(load(settings).taskset.skip(first).take(count)):
            rows.write(json.dumps(row, ensure_ascii=False) + "\n")


def _rows(taskset: Any) -> Iterator[dict[str, Any]]:
    for task in taskset:
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        yield {"id": task.key, "prompt": _messages(data, task.key), "task": data}


def _messages(data: dict[str, Any], key: str) -> list[dict[str, str]]:
    """Return the messages with which a conversation begins: the task's prompt, or its name."""
    prompt = data.get("prompt")
    system = []
    if data.get("system_prompt"):
        system = [{"role": "system", "content": data["system_prompt"]}]
    if isinstance(prompt, list):
        texts = [(m.get("role"), m.get("content")) for m in prompt]
        texts = [(role, text) for role, text in texts if isinstance(text, str)]
        messages = [{"role": role, "content": text} for role, text in texts]
        if messages:
            return [*system, *messages]
    # If the task has no prompt, the environment's simulated user speaks first. The row then has the
    # task's name as its prompt.
    text = prompt if isinstance(prompt, str) else data.get("name") or key
    return [*system, {"role": "user", "content": text}]


class Bridge:
    """Runs the tasks that come over the socket, and answers them."""

    def __init__(self, environment: Any, url: str) -> None:
        self.environment, self.url = environment, url
        self.task_class = type(environment.taskset).task_type()
        self.playing: dict[int, asyncio.Task[None]] = {}
        # API key -> environment variable. verifiers holds one client for each variable name. To
        # keep the number of clients small, the caller reuses keys, and each key always has the same
        # variable.
        self.variables: dict[str, str] = {}

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run tasks until the other side closes the socket."""
        async with self.environment.serving():
            _tell(writer, {})
            while line := await reader.readline():
                order = json.loads(line)
                if "cancel" in order:
                    if order["cancel"] in self.playing:
                        self.playing[order["cancel"]].cancel()
                else:
                    task = asyncio.create_task(self._answer(order, writer))
                    self.playing[order["id"]] = task
                    await asyncio.sleep(0)  # if cancelled before it begins, it would never answer
            for task in self.playing.values():
                task.cancel()

    async def _answer(self, order: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._play(order["task"], order["key"])
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 (any code)
            answer = {"error": _described(error)}
        finally:
            del self.playing[order["id"]]
        _tell(writer, {"id": order["id"], **answer})

    async def _play(self, data: dict[str, Any], key: str) -> dict[str, Any]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        task = self.task_class(
            self.task_class.data_type().model_validate(data), self.environment.config.taskset.task
        )
        variable = self.variables.setdefault(key, f"GSPO_API_KEY_{len(self.variables)}")
        os.environ[variable] = key
        client = EvalClientConfig(base_url=self.url, api_key_var=variable)
        (slot,) = self.environment.slots(task)
        episode = await self.environment.run_slot(slot, ModelContext(POLICY, client))
        if not episode.ok:
            errors = [each.last_error for each in (episode, *episode.traces) if each.last_error]
            problem = f"{errors[0].type}: {errors[0].message}" if errors else "it failed"
            return {"error": _cut(problem)}
        traces = [each for each in episode.traces if each.agent.trainable]
        if len(traces) != 1:
            return {"error": f"{len(traces)} agents are the policy in an episode; allowed: one"}
        return {"reward": traces[0].reward, "truncated": traces[0].is_truncated}


def _tell(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")


def _described(error: BaseException) -> str:
    text = str(error) if isinstance(error, UnfitError) else f"{type(error).__name__}: {error}"
    return _cut(text)


def _cut(text: str) -> str:
    """Leave out the middle of a long message. The other side reads lines of a limited length."""
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}"


async def play(descriptor: int) -> None:
    """Serve the socket until its other side is closed."""
    connection = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=connection, limit=_LONGEST_LINE)
    settings = json.loads(await reader.readline())
    try:
        environment = load(settings)
    except Exception as error:  # noqa: BLE001 (any code of the taskset)
        _tell(writer, {"problem": _described(error)})
        await writer.drain()
        return
    with contextlib.suppress(ConnectionError):
        await Bridge(environment, settings["url"]).run(reader, writer)


def main() -> None:
    """Run the command line."""
    sys.path.append(os.getcwd())  # the option -P has removed this folder
    # verifiers calls `uv` to prepare the programs that call the policy. The `uv` of this Python
    # installation comes first on the path.
    places = itertools.chain(
        [os.path.dirname(sys.executable)], [os.environ.get("PATH", os.defpath)]
    )
    os.environ["PATH"] = os.pathsep.join(places)
    os.environ.setdefault("VF_RUN_ID", secrets.token_hex(8))
    if sys.argv[1] == "play":
        asyncio.run(play(int(sys.argv[2])))
        return
    try:
        print_tasks(json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    except Exception as error:  # noqa: BLE001 (any code of the taskset)
        sys.exit(_described(error))


if __name__ == "__main__":
    main()
