"""Measure how far the likelihoods of an engine, used as the old policy, are from the likelihoods of
the trainer, for several lengths.

    python examples/evidence/likelihoods.py --dtype bfloat16

The script exports a policy that has been warmed up in fp32. vLLM on a CPU generates responses of
256 tokens in bf16, or in fp32 for comparison, and the trainer computes the log-probs of the same
tokens. The script measures the sequence ratio of trainer to engine before any update, and the share
of ratios outside GSPO's clip range, over the first 8, 32, 128 and all 256 tokens of the responses.
One JSON line for each dtype and seed is added to the output. The script skips a
dtype and seed if the output already has the line of both.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import records
import torch
from estimators import mean_interval, ratio_figures
from laboratory import PROMPT_TOKENS, RESPONSES, VOCABULARY, Laboratory, Setting
from vllm_engine import VllmEngine, VllmProcess, vllm_python

from gspo_megatron.platform.groups import stop_processes
from gspo_megatron.process.failures import run_script
from gspo_megatron.rollout.engine import Requests, Sampling

LENGTHS = (8, 32, 128, 256)
BATCHES = 2
PAPER = (3e-4, 4e-4)  # GSPO's clip range


def figures(delta: np.ndarray) -> dict[str, Any]:
    """The figures of delta [responses, tokens], the trainer's log-probs minus the engine's
    log-probs."""
    ratio = np.exp(delta.mean(1))
    wide = 0.1 / math.sqrt(delta.shape[1])
    outside = (ratio < 1 - PAPER[0]) | (ratio > 1 + PAPER[1])
    return {
        "sequence_abs": mean_interval(np.abs(delta.mean(1))),
        "outside_paper": mean_interval(outside.astype(float)),
        "outside_scaled": mean_interval((np.abs(ratio - 1) > wide).astype(float)),
        "ratios": ratio_figures(delta),
    }


def by_vllm(laboratory: Laboratory, process: VllmProcess) -> tuple[torch.Tensor, torch.Tensor]:
    """Responses of vLLM: tokens [responses, prompt and response tokens] and log-probs [responses,
    length]."""
    setting, count = laboratory.setting, BATCHES * RESPONSES
    rng = np.random.default_rng(setting.seed)
    prompts = rng.integers(1, VOCABULARY, (count, PROMPT_TOKENS)).tolist()
    engine = VllmEngine(laboratory.policy, process, end_ids=())
    engine.update_weights()
    drawn = engine.generate(Requests(prompts, range(count)), Sampling(setting.length), setting.seed)
    return drawn.tokens.view(count, -1), drawn.rollout_logprobs.view(count, -1)


def measure(python: str, dtype: str, seed: int, path: Path) -> None:
    """Measure this dtype and seed and add the line to the file, unless the file has it already."""
    setting = Setting(max(LENGTHS), seed)
    for line in records.read(path):
        if Setting(**line["setting"]) == setting and line["dtype"] == dtype:
            return
    start = time.monotonic()
    laboratory = Laboratory(setting)
    with closing(VllmProcess(python, dtype, PROMPT_TOKENS + setting.length)) as process:
        tokens, rollout = by_vllm(laboratory, process)
    batches = [
        laboratory.batch_of(*pair)
        for pair in zip(tokens.split(RESPONSES), rollout.split(RESPONSES), strict=True)
    ]
    laboratory.record_routes(batches, "now")
    now = laboratory.logprobs(batches, "now").flatten(0, 1)
    delta = (now - rollout).double().numpy()
    record = {
        "setting": asdict(setting),
        "engine": "vllm",
        "dtype": dtype,
        "responses": len(tokens),
        "reward": float(torch.stack([batch.rewards for batch in batches]).mean()),
        "token_abs": mean_interval(np.abs(delta).mean(1)),
        "k3": float((np.exp(delta) - 1 - delta).mean()),
        "lengths": {str(length): figures(delta[:, :length]) for length in LENGTHS},
        "seconds": time.monotonic() - start,
        "processor_seconds": time.process_time() + process.seconds,
    }
    records.add(path, record)
    print(f"{dtype}, seed {seed}: {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", help="of an environment with vLLM; made where there is none")
    parser.add_argument("--output", type=Path, default=records.RESULTS / "likelihoods.jsonl")
    parser.add_argument("--label", help="any word, to know the process by")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        measure(
            arguments.python or vllm_python(), arguments.dtype, arguments.seed, arguments.output
        )
    finally:
        stop_processes()


if __name__ == "__main__":
    sys.exit(run_script(main))
