"""Generate greedy answers of exported models with transformers.

    python answer.py MODEL_FOLDER... --prompts test.jsonl -o answers.json

This script does not need gspo_megatron, and shows that exported folders do not need it either.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

MAX_TOKENS = 5  # the longest answer, as in training
BATCH_SIZE = 128


def answer(folder: str, prompts: list[str]) -> list[str]:
    """The model's response to each prompt, up to its end-of-sequence token."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = tokenizer(
            prompts[start : start + BATCH_SIZE],
            padding=True,
            return_tensors="pt",
            return_token_type_ids=False,
        )
        tokens = model.generate(**batch, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = tokens[:, batch["input_ids"].shape[1] :]
        answers += tokenizer.batch_decode(new, skip_special_tokens=True)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="Hugging Face folders")
    parser.add_argument("--prompts", required=True, help="JSON Lines with prompt and answer")
    parser.add_argument("-o", "--output", required=True, help="JSON: the answers of each model")
    options = parser.parse_args()
    for path in (options.prompts, Path(options.output).parent, *options.models):
        if not Path(path).exists():
            parser.exit(2, f"{path}: no such file or folder\n")
    disable_progress_bar()
    try:
        rows = [json.loads(line) for line in Path(options.prompts).read_text().splitlines()]
    except ValueError as error:
        parser.exit(2, f"{options.prompts}: not JSON Lines: {error}\n")
    found = {}
    for folder in options.models:
        answers = answer(folder, [row["prompt"] for row in rows])
        right = [given == row["answer"] for given, row in zip(answers, rows, strict=True)]
        found[folder] = {"accuracy": sum(right) / len(rows), "answers": answers}
        print(f"{folder}: {sum(right)} of {len(rows)} right")
    Path(options.output).write_text(json.dumps({"prompts": rows, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
