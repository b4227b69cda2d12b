"""Generated tokens per second of TRL's GRPOTrainer over whole RL steps with the GSPO loss.

The peer's side of the RL-step benchmark: a random Qwen3-MoE model, one rollout of 128 responses of
exactly 32 tokens, old log-probabilities, 4 optimizer steps of 32 responses. It runs in its
own environment (requirements.txt beside this file) and prints one JSON line on stdout. The module
imports nothing heavy, so our_step.py can import SHAPES and WORKLOAD from it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM
    from trl import GRPOTrainer

SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "top_k": 2,
        "vocab_size": 1024,
    },
    "mid": {
        "num_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "top_k": 2,
        "vocab_size": 1024,
    },
}

WORKLOAD: dict[str, int] = {
    "prompts_per_step": 16,
    "group_size": 8,
    "prompt_tokens": 8,
    "response_tokens": 32,
    "mini_batches": 4,
    "threads": 2,
    "warmup_steps": 3,
    "seed": 1,
}

# TRL would add the model config's own 1e-3; without it TRL is faster. Both sides must agree.
ROUTER_AUX_LOSS_COEF = 0.0

RESPONSES_PER_STEP = WORKLOAD["prompts_per_step"] * WORKLOAD["group_size"]
TOKENS_PER_STEP = RESPONSES_PER_STEP * WORKLOAD["response_tokens"]


class StepClock:
    """Wall-clock seconds of each RL step and of the parts of it that are timed by name."""

    def __init__(self) -> None:
        self.boundaries: list[float] = []
        self.parts: dict[str, list[float]] = {}
        self._current: dict[str, float] = {}

    def timed(
        self, name: str, function: Callable[..., Any], when: Callable[[], bool] = lambda: True
    ) -> Callable[..., Any]:
        """`function`, with the seconds of each call made while `when()` added to part `name`."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not when():
                return function(*args, **kwargs)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            elapsed = time.perf_counter() - start
            self._current[name] = self._current.get(name, 0.0) + elapsed
            return result

        return wrapper

    def end_of_step(self) -> None:
        """Close the current RL step."""
        self.boundaries.append(time.perf_counter())
        for name, seconds in self._current.items():
            self.parts.setdefault(name, []).append(seconds)
        self._current.clear()

    def summary(self, warmup_steps: int) -> dict[str, float]:
        """Median seconds over the steps after the first `warmup_steps`: step, parts and rest."""
        measured = itertools.pairwise(self.boundaries[warmup_steps - 1 :])
        step = statistics.median(end - start for start, end in measured)
        parts = {
            name: statistics.median(seconds[warmup_steps:]) for name, seconds in self.parts.items()
        }
        return {"step": step, **parts, "train_and_other": step - sum(parts.values())}


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of `vocab_size` words (w0, w1, …) with EOS and padding beyond them.

    The model cannot emit an id beyond its vocabulary. So every response has its full length without
    a logits processor, which would slow TRL's sampling down. All prompts have the same length, so
    padding never reaches the embedding either.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = [f"w{index}" for index in range(vocab_size)] + ["<eos>", "<pad>"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="<eos>", pad_token="<pad>"
    )


def build_model(shape: dict[str, int]) -> Qwen3MoeForCausalLM:
    """A randomly initialised fp32 Qwen3-MoE of `shape`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(WORKLOAD["seed"])
    config = Qwen3MoeConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_query_groups"],
        head_dim=shape["head_dim"],
        moe_intermediate_size=shape["moe_intermediate_size"],
        num_experts=shape["num_experts"],
        num_experts_per_tok=shape["top_k"],
        norm_topk_prob=True,
        max_position_embeddings=128,
        # on CPU, at 40 positions, both are the fastest in transformers
        attn_implementation="eager",
        experts_implementation="grouped_mm",
    )
    return Qwen3MoeForCausalLM(config)


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward: the share of even token ids, so that every group has a spread at no cost."""
    lengths = {len(ids) for ids in completion_ids}
    assert lengths == {WORKLOAD["response_tokens"]}, f"response lengths {sorted(lengths)}"
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def training_arguments(output_dir: str, rl_steps: int) -> dict[str, Any]:
    """GRPOConfig arguments: the GSPO loss; everything that only costs time is off."""
    mini_batches = WORKLOAD["mini_batches"]
    return {
        "output_dir": output_dir,
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "num_generations": WORKLOAD["group_size"],
        "per_device_train_batch_size": RESPONSES_PER_STEP // mini_batches,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": mini_batches,
        "max_steps": rl_steps * mini_batches,
        "max_completion_length": WORKLOAD["response_tokens"],
        "generation_kwargs": {"use_cache": True},
        "router_aux_loss_coef": ROUTER_AUX_LOSS_COEF,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "optim": "adamw_torch_fused",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": WORKLOAD["seed"],
    }


def build_trainer(size: str, rl_steps: int, output_dir: str, clock: StepClock) -> GRPOTrainer:
    """TRL's trainer for `rl_steps` rollouts, with its generation and old log-probs timed."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class StepEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % WORKLOAD["mini_batches"] == 0:
                clock.end_of_step()

    shape = SHAPES[size]
    generator = random.Random(WORKLOAD["seed"])
    prompts = [
        " ".join(
            f"w{generator.randrange(shape['vocab_size'])}" for _ in range(WORKLOAD["prompt_tokens"])
        )
        for _ in range(WORKLOAD["prompts_per_step"] * rl_steps)
    ]
    trainer = GRPOTrainer(
        model=build_model(shape),
        reward_funcs=even_share,
        args=GRPOConfig(**training_arguments(output_dir, rl_steps)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=build_tokenizer(shape["vocab_size"]),
        callbacks=[StepEnd()],
    )
    # stdout is only for the JSON line
    trainer.remove_callback(PrinterCallback)
    trainer._generate_single_turn = clock.timed("generation", trainer._generate_single_turn)
    # the loss calls this method, too; without gradients it computes the old log-probabilities
    trainer._get_per_token_logps_and_entropies = clock.timed(
        "old_logprobs",
        trainer._get_per_token_logps_and_entropies,
        when=lambda: not torch.is_grad_enabled(),
    )
    return trainer


def run(size: str, steps: int) -> dict[str, Any]:
    """Measure `steps` RL steps of TRL at `size` after the warm-up; tokens/s and seconds a step."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers
    import trl

    torch.set_num_threads(WORKLOAD["threads"])
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(size, WORKLOAD["warmup_steps"] + steps, output_dir, clock)
        trainer.train()
    seconds = clock.summary(WORKLOAD["warmup_steps"])
    return {
        "peer": "trl",
        "size": size,
        "steps": steps,
        "tokens_per_second": round(TOKENS_PER_STEP / seconds["step"], 1),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "versions": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SHAPES), default="small")
    parser.add_argument("--steps", type=int, default=20, help="RL steps measured")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    print(json.dumps(run(arguments.size, arguments.steps)))


if __name__ == "__main__":
    main()
