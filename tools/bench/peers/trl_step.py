"""Generated tokens per second of TRL's GRPOTrainer over whole RL steps with the GSPO loss.

The peer's side of the RL-step benchmark: a random Qwen3-MoE model, a rollout with the lengths that
workload.py plans, old log-probabilities, 4 optimizer steps. It runs in its own environment
(requirements.txt beside this file) and prints one JSON line on stdout. TRL has the fastest
configuration that we found: grouped_mm experts, eager attention up to 128 positions and sdpa
beyond, a growing cache.
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

from workload import (
    ROUTER_AUX_LOSS_COEF,
    SEED,
    THREADS,
    WORKLOADS,
    Workload,
    peak_memory_gb,
    shape_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM
    from trl import GRPOTrainer


NO_TOKEN = 2**31 - 1  # an id that no token has


class StepClock:
    """Wall-clock seconds of each RL step and of the parts of it that are timed by name."""

    def __init__(self) -> None:
        self.boundaries: list[float] = []  # the start, and the end of each step
        self.parts: dict[str, list[float]] = {}  # seconds of each step; the last is under way

    def timed(
        self, name: str, function: Callable[..., Any], when: Callable[[], bool] = lambda: True
    ) -> Callable[..., Any]:
        """Wrap `function`: if `when()` is true, add the seconds of a call to the part `name`."""
        self.parts[name] = [0.0]

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not when():
                return function(*args, **kwargs)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.parts[name][-1] += time.perf_counter() - start
            return result

        return wrapper

    def begin(self) -> None:
        """Mark the start of the first RL step."""
        self.boundaries.append(time.perf_counter())

    def end_of_step(self) -> None:
        """Close the current RL step."""
        self.boundaries.append(time.perf_counter())
        for seconds in self.parts.values():
            seconds.append(0.0)

    def steps(self, warmup_steps: int) -> list[float]:
        """Return the seconds of each step after the first `warmup_steps`."""
        measured = itertools.pairwise(self.boundaries[warmup_steps:])
        return [end - start for start, end in measured]

    def summary(self, warmup_steps: int) -> dict[str, float]:
        """Return median seconds of the step, its parts and the rest, without warm-up steps."""
        step = statistics.median(self.steps(warmup_steps))
        parts = {
            name: statistics.median(seconds[warmup_steps:-1])
            for name, seconds in self.parts.items()
        }
        return {"step": step, **parts, "train_and_other": step - sum(parts.values())}


def build_tokenizer(vocab_size: int, *, has_end: bool) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer with words w0, w1, … and one token for the end and for padding.

    Without `has_end`, the end token is beyond the model's vocabulary: the model cannot emit it, and
    every response has its full length at no cost. With `has_end`, it is the vocabulary's last token
    (see `plan_lengths`). All prompts have the same length, so they need no padding.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = [f"w{index}" for index in range(vocab_size - has_end)] + ["<end>"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="<end>", pad_token="<end>"
    )


def build_model(size: str) -> Qwen3MoeForCausalLM:
    """Return a randomly initialised Qwen3-MoE."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(SEED)
    shape, work = shape_of(size), WORKLOADS[size]
    config = Qwen3MoeConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_query_groups"],
        head_dim=shape["kv_channels"],
        moe_intermediate_size=shape["moe_ffn_hidden_size"],
        num_experts=shape["num_moe_experts"],
        num_experts_per_tok=shape["moe_router_topk"],
        norm_topk_prob=True,
        max_position_embeddings=max(128, work.prompt_tokens + work.longest),
        attn_implementation="eager" if work.longest <= 128 else "sdpa",
        experts_implementation="grouped_mm",
    )
    # With bf16, everything on TRL's side is in BF16, also Adam's moments. Our side keeps weights
    # and moments in FP32.
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    return Qwen3MoeForCausalLM(config).to(dtype)


def even_share_of(work: Workload) -> Callable[..., list[float]]:
    """Return the reward function: the share of even token ids, so that every group has a spread at
    no cost. The function also checks the lengths of the responses."""
    steps = itertools.count(1)

    def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert [len(ids) for ids in completion_ids] == work.lengths(next(steps)), "other lengths"
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    return even_share


def plan_lengths(trainer: GRPOTrainer, work: Workload) -> None:
    """Change generation so that the responses of each rollout have their planned lengths."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    model, end = trainer.model, trainer.processing_class.eos_token_id
    steps = itertools.count(1)

    class PlannedEnds(StoppingCriteria):
        """Writes the end token where a response must end, and replaces end tokens that were sampled
        elsewhere. These are a few operations on one number per row, which cost nothing compared
        with a decoding step."""

        eos_token_id = end  # transformers then pads the rows that have ended

        def __init__(self) -> None:
            self.lengths = torch.tensor(work.lengths(next(steps)))

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            position, last = input_ids.shape[1] - work.prompt_tokens, input_ids[:, -1]
            last.masked_fill_(last == end, 0).masked_fill_(self.lengths == position, end)
            return self.lengths <= position

    def generate(*args: Any, native: Any = model.generate, **kwargs: Any) -> Any:
        return native(*args, stopping_criteria=StoppingCriteriaList([PlannedEnds()]), **kwargs)

    model.generate = generate


def training_arguments(output_dir: str, rl_steps: int, work: Workload) -> dict[str, Any]:
    """Return GRPOConfig arguments: the GSPO loss, and nothing that only costs time."""
    end_is_drawn = {} if work.median is None else {"eos_token_id": NO_TOKEN}
    return {
        "output_dir": output_dir,
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "num_generations": work.group,
        "per_device_train_batch_size": work.responses // work.mini_batches,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": work.mini_batches,
        "max_steps": rl_steps * work.mini_batches,
        "max_completion_length": work.longest,
        "generation_kwargs": {"use_cache": True, **end_is_drawn},
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
        "seed": SEED,
    }


def build_trainer(size: str, rl_steps: int, output_dir: str, clock: StepClock) -> GRPOTrainer:
    """Build TRL's trainer for `rl_steps` rollouts. Generation and old log-probs are timed."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class StepTimes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % work.mini_batches == 0:
                clock.end_of_step()

    vocab_size, work = shape_of(size)["vocab_size"], WORKLOADS[size]
    generator = random.Random(SEED)
    prompts = [
        " ".join(f"w{generator.randrange(vocab_size - 1)}" for _ in range(work.prompt_tokens))
        for _ in range(work.prompts * rl_steps)
    ]
    trainer = GRPOTrainer(
        model=build_model(size),
        reward_funcs=even_share_of(work),
        args=GRPOConfig(**training_arguments(output_dir, rl_steps, work)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=build_tokenizer(vocab_size, has_end=work.median is not None),
        callbacks=[StepTimes()],
    )
    # stdout is only for the JSON line
    trainer.remove_callback(PrinterCallback)
    if work.median is not None:
        plan_lengths(trainer, work)
    trainer._generate_single_turn = clock.timed("generation", trainer._generate_single_turn)
    # the loss calls this method, too; without gradients it computes the old log-probabilities
    trainer._get_per_token_logps_and_entropies = clock.timed(
        "old_logprobs",
        trainer._get_per_token_logps_and_entropies,
        when=lambda: not torch.is_grad_enabled(),
    )
    return trainer


def run(size: str, steps: int) -> dict[str, Any]:
    """Measure `steps` RL steps of TRL after the warm-up. Returns tokens/s and seconds a step."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers
    import trl

    torch.set_num_threads(THREADS)
    clock, work = StepClock(), WORKLOADS[size]
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(size, work.warmup_steps + steps, output_dir, clock)
        trainer.train()
    seconds = clock.summary(work.warmup_steps)
    return {
        "peer": "trl",
        "size": size,
        "steps": steps,
        "tokens_per_second": round(work.rate(clock.steps(work.warmup_steps)), 1),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "peak_memory_gb": round(peak_memory_gb(), 2),
        "versions": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(WORKLOADS), default="small")
    parser.add_argument("--steps", type=int, default=20, help="RL steps measured")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    print(json.dumps(run(arguments.size, arguments.steps)))


if __name__ == "__main__":
    main()
