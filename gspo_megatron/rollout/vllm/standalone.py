"""Runs a server outside of a run, for `rollout.vllm.urls`."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from gspo_megatron.addresses import key_in
from gspo_megatron.errors import RolloutError, format_value
from gspo_megatron.families import family_of, preset_of_folder
from gspo_megatron.families.model_shape import ModelShape, config_of_weights, shape_of
from gspo_megatron.process.signals import end_signals
from gspo_megatron.rollout.reward_model import KEY_VARIABLE
from gspo_megatron.rollout.vllm.client import (
    TOKEN_VARIABLE,
    ServerClient,
    ServerGone,
    connected_session,
)
from gspo_megatron.rollout.vllm.installed import delta_net_limit, device_of
from gspo_megatron.rollout.vllm.process import (
    ServerProcess,
    common_environment,
    cpu_arguments,
    cpu_environment,
    needed_arguments,
    server_words,
)

_LOOK_SECONDS = 0.2
_CALL_SECONDS = 5.0


def server_command(
    folder: Path, python: str, dtype: str, options: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a server that a run can use.

    folder: the model in Hugging Face format; dtype: vLLM's name of the data type; options: further
    options of vLLM, which override the defaults. Raises RolloutError if `python` has no vLLM, or if
    its vLLM would answer with log-probs that differ from those of training. Raises ConfigError if
    the folder's model is not supported.
    """
    shape = shape_of(preset_of_folder(str(folder)))
    arguments = needed_arguments(str(folder.resolve()), dtype, routes=bool(shape.num_moe_experts))
    if not (folder / "tokenizer_config.json").exists():
        arguments["skip_tokenizer_init"] = True
    token = key_in(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    return _command(folder, shape, python, arguments, options, token)


def reward_server_command(
    folder: Path, python: str, dtype: str, options: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a server of a reward model, for reward.model.url.

    The arguments and errors are those of `server_command`. The server accepts only requests with
    the key in KEY_VARIABLE. It has no routes for new weights, and answers with scores, not with
    their sigmoids.
    """
    arguments = {
        "model": str(folder.resolve()),
        "dtype": dtype,
        "runner": "pooling",
        "convert": "classify",
        "served_model_name": folder.resolve().name,
    }
    shape = shape_of(preset_of_folder(str(folder)))
    key = key_in(KEY_VARIABLE) or secrets.token_urlsafe(32)
    words, environ = _command(folder, shape, python, arguments, options, key)
    return words, environ | {"VLLM_SERVER_DEV_MODE": "0"}


def _command(
    folder: Path,
    shape: ModelShape,
    python: str,
    arguments: dict[str, Any],
    options: Mapping[str, Any],
    token: str,
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a server, on a CPU or on GPUs."""
    environ = common_environment(token)
    if device_of(python) == "cpu":
        if wrong := _wrong_on_cpus(folder, shape, arguments["dtype"]):
            raise RolloutError(f"{folder}: {wrong}")
        arguments |= cpu_arguments(shape, options.get("tensor_parallel_size", 1))
        environ |= cpu_environment(options)
    return server_words(python, {**arguments, **options}), environ


def _wrong_on_cpus(folder: Path, shape: ModelShape, dtype: str) -> str:
    """Return why servers on CPUs would answer with wrong log-probs. Returns an empty text if the
    log-probs would be right."""
    family = family_of(config_of_weights(str(folder), None) or {})
    if family.no_cpu_servers:
        return f"vLLM's servers for CPUs {family.no_cpu_servers}"
    limit = delta_net_limit(shape, "bf16" if dtype == "bfloat16" else dtype)
    if limit is None:
        return ""
    key, value, wrong, allowed = limit
    what = "--dtype" if key == "training.precision" else key.rpartition(".")[2]
    return f"{wrong}; {what} is {format_value(value)}; allowed: {allowed}"


async def serve(
    words: list[str],
    environ: Mapping[str, str],
    host: str,
    port: int | None,
    ended: asyncio.Event,
    *,
    scores: bool = False,
) -> None:
    """Run a server until `ended` is set. When it is ready, print the settings for a run.

    scores: whether the command comes from `reward_server_command`. Raises RolloutError if the
    server ends by itself.
    """
    process = ServerProcess(words, environ, None, host, port)
    try:
        async with connected_session() as session:
            client = ServerClient(process.url, session)
            client.begin(environ[TOKEN_VARIABLE])
            is_ready = False
            while not ended.is_set():
                if how := process.has_ended():
                    raise RolloutError(f"the server {how}")
                if not is_ready and await client.why_not_ready(seconds=_CALL_SECONDS) is None:
                    is_ready = True
                    _tell_ready(process.url, environ[TOKEN_VARIABLE], scores)
                await asyncio.sleep(_LOOK_SECONDS)
    except ServerGone as error:  # another program listens on its port
        raise RolloutError(str(error)) from error
    finally:
        await process.end()


def until_told_to_end(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `work` with an event that SIGTERM, Ctrl-C and a closed terminal set."""

    async def run() -> None:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (*end_signals(), signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # in a job, this signal is for the ranks
        await work(ended)

    asyncio.run(run())


def _tell_ready(url: str, token: str, scores: bool) -> None:
    setting = f"reward.model.url={url}" if scores else f"rollout.vllm.urls='[{url}]'"
    variable = KEY_VARIABLE if scores else TOKEN_VARIABLE
    print(f"ready: {setting}", flush=True)
    if key_in(variable) is None:
        print(f"and in the run's environment: {variable}={token}", flush=True)
