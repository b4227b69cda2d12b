"""Helpers for tests of resumed runs: a very small run, and the comparison of two runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gspo_megatron.data.tokenizers import load_tokenizer
from tests.programs import ROOT, Process, command_environment, gspo, start_program
from tests.unit.data.datasets import write_indexed

# The rewards have many values, even if an untrained model writes the responses. Each call appends a
# letter to the file `calls`. If there is a file `signal_at`, it has the number of the call in which
# a rank gets SIGTERM. If there is a file `full_disk`, it has the numbers of two calls; between
# them, rank 1 cannot write files above 9 kB.
REWARD = """
import os, resource, signal, zlib
from pathlib import Path
folder = Path(__file__).parent
own_calls = 0
def limit_files():
    global own_calls
    own_calls += 1
    first, last = map(int, (folder / "full_disk").read_text().split())
    size = 9000 if first <= own_calls <= last else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
def reward(sample):
    if os.environ.get("RANK") == "1" and (folder / "full_disk").exists():
        limit_files()
    calls = folder / "calls"
    with calls.open("a") as file:
        file.write("x")
    at = folder / "signal_at"
    if at.exists() and calls.stat().st_size >= int(at.read_text()):
        at.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGTERM)
    return zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 97 / 96
"""

TINY_MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 32,
    "num_moe_experts": 4,
    # This loss depends on how tokens are divided into micro-batches, which differs between layouts.
    "moe_aux_loss_coeff": 0.0,
}


def make_small(config_file: Path, **sections: dict[str, Any]) -> Path:
    """Change a configuration file to a smaller model, other rewards, and a checkpoint at every
    step."""
    config = yaml.safe_load(config_file.read_text())
    (config_file.parent / "resuming_reward.py").write_text(REWARD)
    config["model"] = {"megatron": dict(TINY_MODEL)}
    config["reward"] = {"import_path": "resuming_reward:reward"}
    # The rate is so large that the results of different steps differ visibly. So a test
    # notices if the optimizer loses its moments, or if the schedule begins again.
    config["optimizer"] = {"learning_rate": 3e-3, "warmup_steps": 3}
    config["checkpoint"] = {"interval": 1}
    config_file.write_text(yaml.safe_dump(config))
    return edit(config_file, **sections)


def edit(config_file: Path, **sections: dict[str, Any]) -> Path:
    """Change keys in sections of a configuration file."""
    config = yaml.safe_load(config_file.read_text())
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values}
    config_file.write_text(yaml.safe_dump(config))
    return config_file


def copied(finished: Path, folder: Path, *, with_run: bool = False) -> Path:
    """Copy the folder of a configuration file and of its run. The configuration of the copy names
    the copied run, or without `with_run` the folder of a new run. Returns its file."""
    copy = shutil.copytree(finished, folder / "copy")
    if not with_run:
        shutil.rmtree(copy / "run")
    (copy / "calls").unlink()
    return edit(copy / "config.yaml", logging={"dir": str(copy / "run")})


def environment(config_file: Path) -> dict[str, str]:
    """The environment of a command. With it, Python finds the module of the rewards."""
    paths = [str(config_file.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return command_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def command(config_file: Path, *words: object, what: str = "train") -> list[str]:
    """The words of `gspo-megatron train`, or of another command, for a configuration."""
    program = [sys.executable, "-m", "gspo_megatron", what]
    return [*program, str(config_file), *map(str, words)]


def start(config_file: Path, *words: object) -> Process:
    """Start `train`. Its output goes to files, because after a kill the remaining processes would
    keep a pipe open."""
    with (config_file.parent / "stderr").open("w") as err:
        return start_program(
            *command(config_file, *words), environ=environment(config_file), err=err
        )


def train(config_file: Path, *words: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `train` to its end and check its exit code."""
    path = environment(config_file)["PYTHONPATH"]
    return gspo("train", config_file, *words, expect=expect, PYTHONPATH=path)


def all_records(run: Path, phase: str | None = None) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, or only the records of one phase."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in found if phase in (None, record["phase"])]


def records(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without values that depend on the machine and on time."""
    moment = ("perf/", "distill/teacher_seconds")
    return [
        {key: value for key, value in record.items() if not key.startswith(moment)}
        for record in all_records(run)
    ]


def checkpoint_names(run: Path) -> list[str]:
    """The names of everything in the folder of checkpoints, with hidden files."""
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """The contents of the files with weights and optimizer state. They depend on nothing but the
    run and its layout."""
    found = {p.relative_to(checkpoint).as_posix(): p for p in checkpoint.rglob("*.distcp")}
    assert {name.split("/")[0] for name in found} == {"model", "optimizer"}
    return {name: path.read_bytes() for name, path in found.items()}


def assert_same_run(run: Path, undisturbed: Path, last: str) -> None:
    """Check that two runs have equal metrics, samples, figures of prompts, weights and optimizer
    states, bit for bit."""
    assert records(run) == records(undisturbed)
    for name in ("samples.jsonl", "draws.jsonl"):
        assert (run / name).read_text() == (undisturbed / name).read_text()
    mine, theirs = (tensors(folder / "checkpoints" / last) for folder in (run, undisturbed))
    assert mine == theirs


def write_corpus(tokenizer: Path, prefix: Path, count: int = 50) -> None:
    """Write documents of random tokens, each with the end-of-sequence token."""
    loaded = load_tokenizer(tokenizer)
    source = np.random.default_rng(count)
    documents = [
        np.append(source.integers(loaded.vocab_size, size=n), loaded.eos_id)
        for n in source.integers(3, 40, size=count)
    ]
    write_indexed(documents, prefix, loaded.vocab_size)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)
