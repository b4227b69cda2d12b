"""Run a vLLM engine for vllm_engine.py, in vLLM's own environment: responses with their log-probs.

PYTHON vllm_sample.py FOLDER --dtype bfloat16 --max-tokens 260

Orders come as JSON lines on the standard input: {"weights": FOLDER} loads new weights, {"requests":
FILE, "responses": FILE, ...} generates responses. The script writes a line to the standard output
when the engine is ready, and a line after each order. The line has the processor seconds so far.
vLLM's own messages go to the standard error.
"""

import argparse
import json
import os
import sys
import time

import numpy as np

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

from vllm import LLM, SamplingParams  # noqa: E402 (it may write to the standard output)


def start(arguments: argparse.Namespace) -> LLM:
    return LLM(
        arguments.folder,
        dtype=arguments.dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,  # the cache would outlive the old weights
        # on a CPU a request's random generator cannot be reset after a part of the prompt
        enable_chunked_prefill=False,
        enable_return_routed_experts=True,
        worker_extension_cls="gspo_vllm_worker.GspoWorker",
        max_model_len=arguments.max_tokens,
        max_num_seqs=128,
        distributed_executor_backend="uni",
        logprobs_mode="processed_logprobs",
    )


def load(engine: LLM, folder: str) -> None:
    engine.collective_rpc("forget_prepacked_experts")
    engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def draw(engine: LLM, order: dict) -> None:
    """Generate responses. The file `requests` has padded prompts [responses, tokens], and a length
    and a seed for each."""
    given = np.load(order["requests"])
    parameters = [
        SamplingParams(
            max_tokens=order["max_tokens"],
            temperature=order["temperature"],
            seed=int(seed),
            logprobs=0,
            ignore_eos=True,
            stop_token_ids=order["ends"],
            detokenize=False,
        )
        for seed in given["seeds"]
    ]
    prompts = [
        {"prompt_token_ids": row[:length].tolist()}
        for row, length in zip(given["prompts"], given["lengths"], strict=True)
    ]
    drawn = [each.outputs[0] for each in engine.generate(prompts, parameters, use_tqdm=False)]
    logprobs = [
        at[token].logprob
        for each in drawn
        for token, at in zip(each.token_ids, each.logprobs, strict=True)
    ]
    np.savez(
        order["responses"],
        tokens=np.concatenate([each.token_ids for each in drawn]),
        lengths=np.array([len(each.token_ids) for each in drawn]),
        truncated=np.array([each.finish_reason == "length" for each in drawn]),
        logprobs=np.array(logprobs, dtype=np.float32),
        # the experts of all tokens of prompt and response, except the last token
        routes=np.concatenate([each.routed_experts for each in drawn]),
    )


def done() -> None:
    print(json.dumps({"processor_seconds": time.process_time()}), file=answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of the first weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=260, help="of prompt and response")
    parser.add_argument("--label", help="any word, to know the process by")
    arguments = parser.parse_args()
    engine = start(arguments)
    done()
    for line in sys.stdin:
        order = json.loads(line)
        if "weights" in order:
            load(engine, order["weights"])
        else:
            draw(engine, order)
        done()


if __name__ == "__main__":
    main()
