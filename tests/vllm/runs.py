"""Small RL runs with vLLM servers, and their processes.

The trainers are forks of a process that has done their imports (tests/forks.py). Servers and
services are new interpreters. In tests/slurm/test_servers.py, trainers with servers are new
interpreters, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from gspo_megatron.data.toy import write_toy_dataset
from tests import forks
from tests.programs import ROOT, command_environment

# The reward of a response is arbitrary but reproducible. Each call adds a line to the file `calls`.
_REWARD = """
import json, zlib
from pathlib import Path
folder = Path(__file__).parent
def reward(sample):
    with (folder / "calls").open("a") as file:
        file.write(json.dumps([sample.row_id, sample.response]) + "\\n")
    return zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 97 / 96
"""


class Trainer(forks.Fork):
    """A running train command. It is killed when the tests end."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        assert forks.can_fork(words, environ), environ
        read, write = os.pipe()
        with open(os.devnull) as none:
            files = [none.fileno(), write, write]
            super().__init__(forks.next_server(), words[1:], environ, str(folder), files)
        os.close(write)
        # A thread of its own reads the output, because a full pipe would stop the command.
        self._said = ThreadPoolExecutor(1).submit(forks.read_all, read)

    def communicate(self, timeout: float | None = None) -> str:
        """Wait until the command and all processes that share its output have ended. Returns the
        output."""
        self.wait(timeout)
        return self._said.result(timeout)


@dataclass
class Run:
    """A run, with all its files in `folder`."""

    folder: Path
    processes: list[Trainer] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def start(self, *overrides: str, **environ: str) -> Trainer:
        """Start the train command."""
        words = [*forks.COMMAND, "train", str(self.folder / "config.yaml"), *overrides]
        path = os.pathsep.join([str(ROOT), str(self.folder)])
        environ = {**command_environment(), "PYTHONPATH": path, **environ}
        self.processes.append(Trainer(words, environ, self.folder))
        return self.processes[-1]

    def wait(self, process: Trainer, condition: Callable[[], Any]) -> Any:
        """Wait until the condition returns something true. Fails if the run ends first."""

        def look() -> Any:
            assert process.poll() is None, process.communicate()[-6000:]
            return condition()

        return wait_for(look, 600)

    def finish(self, process: Trainer, code: int = 0, seconds: float = 600) -> str:
        """Wait until the run ends. Returns its output."""
        said = process.communicate(timeout=seconds)
        assert process.returncode == code, said[-6000:]
        return said

    def records(self) -> list[dict[str, Any]]:
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if '"step"' in line]

    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records() if record["step"] > 0]

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def services(self) -> list[psutil.Process]:
        return self._below("gspo_megatron.rollout.vllm.service")

    def trainers(self) -> list[psutil.Process]:
        """The processes of the train command and of its ranks."""
        command = [psutil.Process(p.pid) for p in self.processes if p.poll() is None]
        return [*self._below("gspo_megatron"), *command]

    def servers(self) -> list[psutil.Process]:
        return self._below("gspo_vllm_server")

    def _below(self, word: str) -> list[psutil.Process]:
        """The living descendants of the train commands with this word in their command lines."""
        found = []
        for process in self.processes:
            if process.poll() is None:
                found += psutil.Process(process.pid).children(recursive=True)
        chosen = [each for each in found if is_alive(each) and word in _words_of(each)]
        return sorted(chosen, key=lambda each: each.create_time())


def _words_of(process: psutil.Process) -> list[str]:
    """The command line of a process, which may end at any time."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def make_run(folder: Path, python: Path, **sections: Mapping[str, Any]) -> Run:
    """Make a run with one rank and one server, unless `sections` change that."""
    (folder / "vllm_test_reward.py").write_text(_REWARD)
    write_toy_dataset(folder / "toy", "mixed", train=64, test=8, seed=1)
    config: dict[str, dict[str, Any]] = {
        # the 16 channels of the preset tiny are too few for vLLM's kernels
        "model": {"megatron": {"kv_channels": 32}},
        "parallel": {},
        "data": {
            "tokenizer": str(folder / "toy" / "tokenizer.model"),
            "prompts": str(folder / "toy" / "train.jsonl"),
        },
        "rollout": {
            "engine": "vllm",
            "group_size": 4,
            "prompts_per_step": 6,
            "max_response_tokens": 12,
            "max_staleness": 0,
            "vllm": {"servers": 1, "python": str(python)},
        },
        "reward": {"import_path": "vllm_test_reward:reward"},
        "objective": {"name": "gspo", "mini_batches": 2},
        "optimizer": {"learning_rate": 3e-3},
        "training": {"steps": 4, "precision": "fp32"},
        "checkpoint": {},
        "logging": {"dir": str(folder / "run"), "plots": False},
    }
    for section, values in sections.items():
        known = config.setdefault(section, {})
        for key, value in values.items():
            known[key] = {**known[key], **value} if key == "vllm" else value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return Run(folder)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process is alive. A killed process that its parent has not reaped counts as
    dead."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], Any], seconds: float = 300) -> Any:
    """Wait until the condition returns something true, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found
