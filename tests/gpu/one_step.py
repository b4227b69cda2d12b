"""Tasks with one small model on one device, computed by the code of a run: `python -m
tests.gpu.one_step TASK ...`.

Each task runs in its own process. In a process from which CUDA is hidden, the same code computes
the reference on the CPU. A process that already uses CUDA cannot do this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    forward_backward,
    response_logprobs,
)
from gspo_megatron.checkpoint.model_pieces import scale_pieces
from gspo_megatron.checkpoint.tensors import load_model, load_optimizer, save_tensors
from gspo_megatron.config import Config, check_config, parse_config, resolve_parallel
from gspo_megatron.families import family_of_shape
from gspo_megatron.hf.export import export_hf, stream_hf
from gspo_megatron.hf.load import load_hf
from gspo_megatron.models.build import Policy, build_policy
from gspo_megatron.models.optimizer import Schedule, Trainer, build_trainer, zero_gradients
from gspo_megatron.platform.groups import set_up_model_parallel, start_processes, stop_processes
from gspo_megatron.rollout.engine import Requests, Sampling
from gspo_megatron.rollout.megatron.engine import MegatronEngine

VOCABULARY, PAD, NO_TOKEN = 93, 0, 10_000
# These sizes are multiples of the numbers that FP8 products need (config/precision.py).
SIZES = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 32,
    "moe_ffn_hidden_size": 64,
    # Every token goes to every expert. Otherwise rounding could change the expert of a token, and
    # then the results would differ much.
    "num_moe_experts": 4,
    "moe_router_topk": 4,
    "init_method_std": 0.1,
}
# Pairs (prompt tokens, response tokens). The sum of all numbers is 83, a prime number.
LENGTHS = [(5, 20), (3, 1), (17, 9), (2, 26)]
RATE = 1e-3


def config_of(precision: str, backend: str, folder: Path | None = None) -> Config:
    """The configuration of the model above, or of the model in a Hugging Face folder."""
    model: dict[str, Any] = {"backend": backend}
    model |= {"megatron": SIZES} if folder is None else {"hf_path": str(folder)}
    config = parse_config(
        {
            "model": model | {"vocab_size": VOCABULARY},
            "data": {"tokenizer": "none"},
            "optimizer": {"learning_rate": RATE},
            "training": {"precision": precision},
        }
    )
    check_config(config, 1)
    return config


def policy_of(config: Config) -> tuple[Policy, Trainer]:
    policy = build_policy(config, resolve_parallel(config, 1), VOCABULARY)
    if config.model.hf_path is not None:
        load_hf(config.model.hf_path, policy)
    schedule = Schedule(RATE, RATE, 0, 1, "constant")
    return policy, build_trainer(policy, config.optimizer, schedule)


def batch_of(policy: Policy) -> MicroBatch:
    """One packed micro-batch of random sequences. Every call returns the same sequences."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(1, VOCABULARY, (sum(n),), generator=generator) for n in LENGTHS]
    return packed(policy, tokens, [response for _, response in LENGTHS])


def packed(policy: Policy, tokens: list[Tensor], responses: list[int]) -> MicroBatch:
    offsets = [sum(responses[:i]) for i in range(len(responses))]
    builder = MicroBatchBuilder(policy, PAD, 1.0)
    return builder.build(range(len(tokens)), tokens, responses, offsets)


def backward(policy: Policy, trainer: Trainer, batch: MicroBatch) -> float:
    """Compute the gradients of the mean negative log-prob of all response tokens. Returns this
    mean."""
    zero_gradients(policy.chunks, trainer.optimizer)

    def loss(_: MicroBatch, logprobs: Tensor, __: Tensor) -> tuple[Tensor, Tensor]:
        value = -logprobs.mean()
        return value, value.detach()

    (found,) = forward_backward(policy, [batch], loss, 1)
    return float(found)


def logprobs_of(policy: Policy, batch: MicroBatch) -> Tensor:
    ((logprobs, _),) = response_logprobs(policy, [batch])
    return logprobs.cpu()


@torch.no_grad()
def gradients_of(policy: Policy) -> dict[str, Tensor]:
    """The gradients, by the names of Hugging Face's model, because these names are the same for
    both backends. The gradients are written over the weights, because the conversion of names works
    only for weights."""
    for parameter in policy.models[0].parameters():
        parameter.copy_(parameter.main_grad)
    family = family_of_shape(policy.shape)
    streamed = stream_hf(policy, family=family, dtype=torch.float32)
    return {name: tensor.cpu().clone() for name, tensor in streamed}


def step(folder: Path, precision: str, backend: str) -> dict[str, Any]:
    """The loss, gradients and dtypes of the folder's model, and the difference between its
    log-probs in training and in the rollout engine."""
    policy, trainer = policy_of(config_of(precision, backend, folder))
    batch = batch_of(policy)
    dtypes: dict[str, set[torch.dtype]] = {"router": set(), "experts": set()}
    for layer in policy.models[0].decoder.layers:
        layer.mlp.router.register_forward_hook(lambda *a: dtypes["router"].add(a[2][0].dtype))
        layer.mlp.experts.register_forward_hook(lambda *a: dtypes["experts"].add(a[2][0].dtype))
    result: dict[str, Any] = {"logprobs": logprobs_of(policy, batch)}
    dtypes["weights"] = {p.dtype for p in policy.models[0].parameters()}
    dtypes["gradients"] = {p.main_grad.dtype for p in policy.models[0].parameters()}
    dtypes["head"] = {result["logprobs"].dtype}
    result["mismatch"] = mismatch(policy)
    result["loss"] = backward(policy, trainer, batch)
    return result | {"gradients": gradients_of(policy), "dtypes": dtypes}


def mismatch(policy: Policy) -> float:
    """The mean of |log-prob of training - log-prob of the rollout| over sampled tokens."""
    engine = MegatronEngine(policy, pad_id=PAD, eos_id=NO_TOKEN)
    requests = Requests([(1, 2, 3), (4, 5), (6,)], [0, 1, 2], responses_per_prompt=5)
    rollout = engine.generate(requests, Sampling(max_tokens=16), seed=1)
    lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
    tokens = [row.cpu() for row in rollout.tokens.split(lengths)]
    batch = packed(policy, tokens, rollout.response_lengths.tolist())
    return float((logprobs_of(policy, batch) - rollout.rollout_logprobs.cpu()).abs().mean())


def learn(folder: Path, precision: str, backend: str, updates: int = 8) -> list[float]:
    """The losses of several updates on the same batch."""
    policy, trainer = policy_of(config_of(precision, backend, folder))
    batch, losses = batch_of(policy), []
    for _ in range(updates):
        losses.append(backward(policy, trainer, batch))
        trainer.update()
    return losses


def resume(folder: Path, precision: str, backend: str, checkpoint: str) -> dict[str, Any]:
    """The log-probs after an update that follows the saving of a checkpoint, and the log-probs
    after the same update from the loaded checkpoint. The result also has FP8's scales at the saving
    and after the loading."""
    results: dict[str, Any] = {}
    for name in ("saved", "loaded"):
        policy, trainer = policy_of(config_of(precision, backend, folder))
        batch = batch_of(policy)
        if name == "saved":
            for _ in range(3):
                backward(policy, trainer, batch)
                trainer.update()
            mismatch(policy)  # a rollout in bf16 must not change the result
            save_tensors(Path(checkpoint), policy, trainer, asynchronous=False).result()
        else:
            load_model(Path(checkpoint), policy)
            load_optimizer(Path(checkpoint), policy, trainer)
        pieces = scale_pieces(policy, originals_only=False)
        results[f"{name} scales"] = {p.key: p.data.detach().cpu().clone() for p in pieces}
        backward(policy, trainer, batch)
        trainer.update()
        results[name] = logprobs_of(policy, batch)
    return results


def make(folder: Path) -> None:
    """Write a Hugging Face folder with random weights."""
    export_hf(policy_of(config_of("fp32", "torch_native"))[0], folder)


def main(task: str, folder: str, out: str, options: str) -> None:
    """Run a task. `options` is JSON. The result is written to the file `out`, for torch.load."""
    start_processes(timeout_minutes=5.0)
    try:
        set_up_model_parallel(resolve_parallel(config_of("fp32", "torch_native"), 1), seed=1)
        run = {"make": make, "step": step, "learn": learn, "resume": resume}[task]
        torch.save(run(Path(folder), **json.loads(options)), out)
    finally:
        stop_processes()


if __name__ == "__main__":
    main(*sys.argv[1:])
