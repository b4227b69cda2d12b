"""Checks, before a run starts, that the optional packages that the run imports are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from gspo_megatron.errors import ConfigError, gathered_in

if TYPE_CHECKING:
    from gspo_megatron.config.stages import AnyConfig

# Python also finds a folder without code that has the package's name. Such a folder has no origin.
_FIND = """
import importlib.util, sys
found = importlib.util.find_spec(sys.argv[1])
sys.exit(0 if found is not None and found.origin else 3)
"""
_MISSING = 3
_SECONDS = 60.0  # time limit to start an interpreter, which may be on a network file system


def check_packages(config: AnyConfig) -> None:
    """Raise ConfigError if a package cannot be imported: one of the trackers, or vLLM for the
    servers that the run starts on this node."""
    from gspo_megatron.addresses import rollout_nodes
    from gspo_megatron.config import Config
    from gspo_megatron.observe.trackers import require_packages

    problems: list[str] = []
    with gathered_in(problems):
        require_packages(config.logging.trackers)
    with gathered_in(problems):
        if isinstance(config, Config) and config.rollout.engine == "vllm":
            section = config.rollout.vllm
            # The agents of rollout nodes start the servers there.
            if section.servers and not rollout_nodes():
                problems += _lacks_vllm(section.python)
    if problems:
        raise ConfigError(problems)


def _lacks_vllm(python: str | None) -> list[str]:
    """Return the problem with the interpreter that is to start vLLM, or an empty list if it has
    vLLM."""
    from gspo_megatron.errors import problem

    key, advice = "rollout.vllm.python", "allowed: the interpreter of an environment that has vLLM"
    program = shutil.which(python or sys.executable)
    if program is None:
        return []  # a rule of the configuration reports this
    ended = None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(
            [program, "-c", _FIND, "vllm"],
            env={**os.environ, "PYTHONPATH": ""},  # without the trainer's path, as for the servers
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    if ended is not None and ended.returncode == 0:
        return []
    if ended is None or ended.returncode != _MISSING:
        return [problem(key, python, f"is no Python interpreter; {advice}")]
    if python is None:
        return [problem(key, None, f"{program}, which runs this program, has no vLLM; {advice}")]
    return [problem(key, python, f"has no package vllm; {advice}")]
