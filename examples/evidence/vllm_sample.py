"""Responses by vLLM with their log-probs, for likelihoods.py. Runs in vLLM's own environment.

PYTHON vllm_sample.py FOLDER PROMPTS.npy OUTPUT.npz --dtype bfloat16 --length 256 --seed 1
"""

import argparse
import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
import numpy as np
from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("prompts")
    parser.add_argument("output")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--label")
    arguments = parser.parse_args()
    prompts = np.load(arguments.prompts)  # [responses, prompt tokens]
    engine = LLM(
        arguments.folder,
        dtype=arguments.dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=prompts.shape[1] + arguments.length,
        max_num_seqs=64,
        distributed_executor_backend="uni",
        logprobs_mode="processed_logprobs",
        seed=arguments.seed,
    )
    sampling = SamplingParams(
        max_tokens=arguments.length, ignore_eos=True, logprobs=0, temperature=1.0, detokenize=False
    )
    requests = [{"prompt_token_ids": row.tolist()} for row in prompts]
    drawn = [each.outputs[0] for each in engine.generate(requests, sampling, use_tqdm=False)]
    tokens = np.array([each.token_ids for each in drawn])
    logprobs = [
        [at[token].logprob for token, at in zip(each.token_ids, each.logprobs, strict=True)]
        for each in drawn
    ]
    np.savez(arguments.output, tokens=tokens, logprobs=np.array(logprobs, dtype=np.float32))


if __name__ == "__main__":
    main()
