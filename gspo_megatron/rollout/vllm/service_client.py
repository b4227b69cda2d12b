"""The client of the rollout service on rank 0: starts the process, and restarts it if it dies."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.addresses import rollout_nodes
from gspo_megatron.config import Config
from gspo_megatron.errors import RolloutError, error_of, tell
from gspo_megatron.families.model_shape import experts_in_layers
from gspo_megatron.process.nodes import visible_gpus
from gspo_megatron.process.ranks import environment_of_children, ranks_on_node
from gspo_megatron.process.signals import signal_name
from gspo_megatron.rollout.store import step_of
from gspo_megatron.rollout.vllm.process import end_with_parent, hold_port

if TYPE_CHECKING:
    from gspo_megatron.models.build import Policy
    from gspo_megatron.rollout.engine import RolloutRequest

STACKS_SIGNAL = signal.SIGUSR2  # the service prints the stacks of its threads
END_SIGNAL = signal.SIGINT  # not SIGTERM, which job schedulers send to all processes
LONGEST_WAIT = 5.0  # longest time in seconds that the service waits for news before it answers
_END_SECONDS = 30.0  # time for the service and its servers to end
_STACKS_SECONDS = 1.0  # time to print the stacks of all threads
_DYING_SECONDS = 10.0  # time for a dying process to end


class ServiceClient:
    """The process of the service, on rank 0.

    Its methods raise RolloutError if servers fail, or if the user's settings are wrong.
    """

    def __init__(self, settings: dict[str, Any], restarts: int) -> None:
        """settings: JSON for the service; restarts: how often it may die."""
        self._settings: dict[str, Any] = {**settings, "starter": os.getpid()}
        # Limit of a call. A reward function without workers may hold Python's lock (GIL), and then
        # the service does not answer. Rank 0 itself has no heartbeats meanwhile.
        patience = settings["config"]["training"]["hang_timeout_seconds"]
        self._call_seconds = max(patience / 2, 2 * LONGEST_WAIT) if patience else None
        self._restarts_left = restarts
        self._weights: dict[str, Any] | None = None
        # the requests that are not done, by name
        self._requests: dict[str, dict[str, Any]] = {}
        self.needs_folder = False  # a server waits for a folder with the newest weights
        self.told_to_end = False  # the service and its servers got SIGTERM
        self._process: subprocess.Popen[str] | None = None
        self._port: socket.socket | None = None  # reserves the port of the service
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def begin_phase(self, settings: dict[str, Any], config: Config) -> bool:
        """Continue with the settings and the configuration of the run's next phase.

        Returns False, and changes nothing, if this phase needs other servers.
        """
        section = config.rollout.vllm
        before, self._settings = self._settings, {**self._settings, **settings}
        self._requests = {}  # the requests of the previous phase are done
        answer = self._call(
            "POST", "/phase", self._settings, seconds=section.weight_update_timeout_seconds
        )
        if "error" in answer:
            raise RolloutError(answer["error"])
        if answer["other"]:
            self._settings = before
            tell(f"the servers are started again: {answer['other']}")
            return False
        return True

    def take_weights(self, weights: dict[str, Any]) -> dict[str, int]:
        """Begin to load new weights on all servers, see `Weights`.

        Returns the servers to which rank 0 must stream the weights: key of a server -> number of
        its workers.
        """
        # for a restarted service: its new servers can load weights from a folder only
        self._weights = {**weights, "stream": None}
        return self._call("POST", "/weights", weights)["receivers"]

    def receivers(self) -> list[str]:
        """Return the keys of the servers that wait for weights from rank 0."""
        return self._call("GET", "/weights/receivers")

    def add_to_weights(self, **parts: Any) -> None:
        """Tell the service the `folder` of the newest weights, or the `check` that servers with
        these weights must pass."""
        assert self._weights is not None, "weights that nobody has made"
        self._weights.update(parts)
        self._call("POST", "/weights/parts", parts)
        self.needs_folder &= self._weights["folder"] is None

    def weights_status(self) -> dict[str, bool]:
        """Return the status of the newest weights. Waits some seconds for `done`.

        done: all remaining servers have passed the check; can_stream: the servers support streams
        from rank 0.
        """
        status = self._call("GET", "/weights")
        self._note(status)
        return status

    def begin_request(self, request: RolloutRequest) -> None:
        """Start a request for responses."""
        content = self._requests[request.name] = asdict(request)
        self._note(self._call("POST", "/requests", content))

    def request_status(self, name: str) -> dict[str, Any]:
        """Return the status of a request: finished and scoring (groups), tokens, done.

        Waits some seconds for the end. Raises the error of the request, such as RewardError.
        """
        status = self._call("GET", f"/requests/{name}")
        self._note(status)
        if status["done"]:
            # A restarted service must not open its file again: it would generate failed groups
            # again, with newer weights than the request allows.
            self._requests.pop(name, None)
        return status

    def forget(self, step: int) -> None:
        """Delete the requests up to `step`, after a checkpoint that includes this step.

        Later requests stay, even those from an earlier start of the run.
        """
        self._requests = {
            name: request for name, request in self._requests.items() if step_of(name) > step
        }
        self._call("POST", "/forget", {"step": step})

    def figures(self) -> dict[str, float]:
        """Return counters and gauges of the servers."""
        return self._call("GET", "/figures")

    def close(self) -> None:
        """End the service and the servers that it started, and remove the weights."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(END_SIGNAL)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._port is not None:
            self._port.close()
        shutil.rmtree(self._settings["weights_folder"], ignore_errors=True)

    def _start(self) -> None:
        """Start the service; restart it if it is killed before it reports that it listens."""
        while not (line := self._first_line()):
            assert self._process is not None
            if self._process.wait() >= 0:  # not killed: a new process would end in the same way
                raise RolloutError(self._how_it_ended())
            self._use_restart()
        answer = json.loads(line)
        if "error" in answer:
            raise RolloutError(answer["error"])
        self._url = f"http://127.0.0.1:{self._settings['port']}"

    def _first_line(self) -> str:
        """Start a process. Its first line, which is returned, says that the process listens, or
        why it cannot start.

        The line is empty if the process has ended. Rank 0 reserves the port, so that no other user
        can listen there after a service has died. Each process of the service gets a new token, so
        that the token of a dead service is useless.
        """
        earlier, self._port = self._port, hold_port("127.0.0.1", 0)
        if earlier is not None:
            earlier.close()
        self._settings["port"] = self._port.getsockname()[1]
        self._settings["token"] = secrets.token_urlsafe(32)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gspo_megatron.rollout.vllm.service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C must not end the service: saving the run needs it
            preexec_fn=end_with_parent,
            env={**environment_of_children(), "CUDA_VISIBLE_DEVICES": ""},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            json.dump(self._settings, pipe)
        with self._process.stdout as pipe:
            return pipe.readline()

    def _use_restart(self) -> None:
        """Count a restart. Raises RolloutError if none is left."""
        how = self._how_it_ended()
        if self._restarts_left == 0:
            raise RolloutError(f"{how} once more than rollout.vllm.restarts allows")
        self._restarts_left -= 1
        tell(f"{how}: starting it again")

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(STACKS_SIGNAL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STACKS_SECONDS)
            self._process.kill()
            self._process.wait()
            return "the rollout service did not answer, and was ended (its stacks are above)"
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {code}"
        return f"the rollout service {how}"

    def _call(self, verb: str, path: str, content: Any = None, seconds: float | None = None) -> Any:
        """Call the service. If it has died, or does not answer, restart it and send weights and
        requests again. seconds: None: half of training.hang_timeout_seconds, and at least twice
        LONGEST_WAIT."""
        has_died = False
        while True:
            try:
                if has_died:  # in the `try`, because the new process may die too
                    self._start_again()
                return self._ask(verb, path, content, seconds)
            except urllib.error.HTTPError as error:
                # A defect in the service, which has printed the traceback. As an OSError it would
                # look like a problem with a file.
                raise RuntimeError(f"the rollout service: {verb} {path}: {error}") from error
            except (OSError, HTTPException):
                has_died = True

    def _start_again(self) -> None:
        self._use_restart()
        self._start()
        if self._weights is not None:
            self._ask("POST", "/weights", self._weights)
        for request in self._requests.values():
            self._ask("POST", "/requests", request)

    def _ask(self, verb: str, path: str, content: Any = None, seconds: float | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            data=None if content is None else json.dumps(content).encode(),
            method=verb,
            headers={"Authorization": f"Bearer {self._settings['token']}"},
        )
        # The address is on loopback, so no proxy is used.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=seconds or self._call_seconds) as answer:
            return json.load(answer)

    def _note(self, status: dict[str, Any]) -> None:
        """Note the part of a status that is about the service. If the status has an error, this
        error is raised."""
        self.needs_folder = status.get("needs_folder", False)
        self.told_to_end = status.get("told_to_end", False)
        error = status.get("error")
        if error is not None:
            raise error_of(error["kind"], error["text"])


def service_settings(
    config: Config, policy: Policy, origin: str, weights_folder: Path, *, on_cpu: bool
) -> dict[str, Any]:
    """Return the settings of the service as JSON values.

    origin: a fingerprint of all that decides responses and rewards. Raises RolloutError if there
    are too few GPUs for the servers.
    """
    shape = config.resolved_model()
    layers = [n for n, count in enumerate(experts_in_layers(shape)) if count]
    return {
        "config": config.model_dump(mode="json"),
        "facts": {
            "vocab_size": policy.vocab_size,
            "num_layers": policy.config.num_layers,
            "num_experts": shape.num_moe_experts or 0,
            "experts_per_token": policy.config.moe_router_topk,
            "moe_layers": layers,
        },
        "origin": origin,
        "dtype": str(policy.config.params_dtype).removeprefix("torch."),
        "devices": [] if on_cpu else _gpus_for_servers(config),
        "on_cpu": on_cpu,
        "nodes": rollout_nodes(),
        "weights_folder": str(weights_folder),
    }


def _gpus_for_servers(config: Config) -> list[str]:
    """Return the GPUs of this machine that no rank uses.

    Raises RolloutError if these GPUs are too few for the servers.
    """
    import torch  # only here, because the service runs without torch

    section = config.rollout.vllm
    if not section.servers or rollout_nodes():
        return []
    used, needed = ranks_on_node() or 1, section.tensor_parallel_size
    visible = visible_gpus()
    if visible is None:
        visible = list(map(str, range(torch.cuda.device_count())))
    free = visible[used:]
    if len(free) < section.servers * needed:
        raise RolloutError(
            f"rollout.vllm.servers = {section.servers}: {section.servers * needed} GPUs beside "
            f"the {used} of the ranks are needed on this machine, and {len(free)} are left"
        )
    return free
