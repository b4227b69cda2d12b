"""Prompts to token ids, refusing what a rollout could not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gspo_megatron.data.problems import Problems
from gspo_megatron.data.tokenizers import Tokenizer
from gspo_megatron.types import Prompt


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    chat_template: bool = False,
) -> list[Prompt]:
    """Fills in `token_ids` of each prompt, in the same order.

    With `chat_template` the text becomes one user message, rendered with the opening of the
    assistant's turn; without, the tokenizer's beginning-of-sequence token, where it has one, goes
    first (a template writes its own). Both count towards `max_prompt_tokens`.

    Raises DataError that names file and line of every prompt without a token or with more than
    `max_prompt_tokens`, and the lengths; or where the tokenizer has no chat template.
    """
    problems = Problems()
    encoded = []
    for prompt in prompts:
        token_ids = encode_text(prompt.text, tokenizer, chat_template)
        if not prompt.text.strip() or not token_ids:
            problems.add(prompt.source, "the prompt is empty")
        elif len(token_ids) > max_prompt_tokens:
            problems.add(
                prompt.source,
                f"the prompt has {len(token_ids)} tokens; at most {max_prompt_tokens} are allowed "
                "(data.max_prompt_tokens)",
            )
        encoded.append(replace(prompt, token_ids=tuple(token_ids)))
    problems.raise_if_any()
    return encoded


def encode_text(text: str, tokenizer: Tokenizer, chat_template: bool = False) -> list[int]:
    """The token ids of one prompt, as `encode_prompts` makes them."""
    if chat_template:
        messages = [{"role": "user", "content": text}]
        return tokenizer.encode_rendered(tokenizer.apply_chat_template(messages)).ids
    token_ids = tokenizer.encode(text)
    return token_ids if tokenizer.bos_id is None else [tokenizer.bos_id, *token_ids]
