"""The input files of a run, read and held against the configuration: tokenizer and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_megatron.config import Config
from gspo_megatron.data.encode import encode_prompts
from gspo_megatron.data.problems import Problems
from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.data.unknown import Unknown
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.types import Prompt

SUPERVISED = "training.warm_start.prompts"


@dataclass(frozen=True)
class Inputs:
    """What the input files hold."""

    tokenizer: Tokenizer
    files: dict[str, list[Prompt]]  # encoded prompts by the key that names their file
    warnings: tuple[str, ...] = ()  # a line each: what is no mistake for certain

    @property
    def train(self) -> list[Prompt]:
        return self.files["data.prompts"]

    @property
    def evaluation(self) -> list[Prompt]:
        return self.files.get("data.eval_prompts", [])

    @property
    def supervised(self) -> list[Prompt]:
        """Of the warm start; the training prompts unless it has its own."""
        return self.files.get(SUPERVISED, self.train)


def read_inputs(config: Config) -> Inputs:
    """Read everything that a run needs, before any process group exists.

    Raises ConfigError with the problems of all files, each named by file and line: what cannot be
    read or decoded, prompts and answers that the model cannot hold, a tokenizer with ids beyond the
    model's vocabulary.
    """
    problems: list[str] = []
    tokenizer = None
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
        problems += vocabulary_problems(config, tokenizer)
    except UserError as error:
        problems += str(error).splitlines()
    files = {}
    warnings: list[str] = []
    for key, path in prompt_files(config).items():
        try:
            files[key] = _read_prompts(config, key, path, tokenizer, warnings)
        except UserError as error:
            problems += str(error).splitlines()
    if problems:
        raise ConfigError(problems)
    assert tokenizer is not None
    return Inputs(tokenizer, files, tuple(warnings))


def prompt_files(config: Config) -> dict[str, str]:
    """The prompt files that a run reads, by the key that names them."""
    files = {
        "data.prompts": config.data.prompts,
        "data.eval_prompts": config.data.eval_prompts,
        SUPERVISED: config.training.warm_start.prompts,
    }
    return {key: path for key, path in files.items() if path is not None}


def model_vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """The configured vocabulary, or the tokenizer's."""
    wanted = config.resolved_model().vocab_size
    return tokenizer.vocab_size if wanted is None else wanted


def _read_prompts(
    config: Config, key: str, path: str, tokenizer: Tokenizer | None, warnings: list[str]
) -> list[Prompt]:
    data = config.data
    prompts = load_prompts(path, data.prompt_field, data.answer_field)
    longest_allowed = config.max_prompt_tokens()
    if tokenizer is None or longest_allowed < 1:
        return prompts  # a problem that was found before, and not one of every prompt
    encoded = encode_prompts(prompts, tokenizer, longest_allowed, data.chat_template)
    warm_start = config.training.warm_start
    learned = warm_start.steps and key == (SUPERVISED if warm_start.prompts else "data.prompts")
    unknown = Unknown()
    if learned:
        _check_answers(config, encoded, tokenizer, unknown)
    else:
        for prompt in encoded:
            unknown.note(tokenizer, prompt.source, prompt.token_ids, prompt.text)
    warnings += unknown.warnings(key, len(encoded))
    return encoded


def _check_answers(
    config: Config, prompts: Sequence[Prompt], tokenizer: Tokenizer, unknown: Unknown
) -> None:
    """The warm start trains on prompt, answer and end of sequence."""
    problems = Problems()
    longest = config.resolved_model().max_sequence_length
    for prompt in prompts:
        token_ids = [*prompt.token_ids, *tokenizer.encode(prompt.answer)]
        unknown.note(tokenizer, prompt.source, token_ids, prompt.text + prompt.answer)
        length = len(token_ids) + 1
        if length > longest:
            problems.add(
                prompt.source,
                f"prompt and answer have {length} tokens; the model holds {longest} "
                "(model.max_sequence_length)",
            )
    problems.raise_if_any()


def vocabulary_problems(config: Config, tokenizer: Tokenizer) -> list[str]:
    """What is wrong where the tokenizer has ids that the model has no room for."""
    wanted = model_vocab_size(config, tokenizer)
    if wanted >= tokenizer.vocab_size:
        return []
    folder = config.model.hf_path
    if folder is not None:
        return [
            f"data.tokenizer = {config.data.tokenizer}: it has {tokenizer.vocab_size} ids, the "
            f"model in model.hf_path = {folder} {wanted}; legal: at most {wanted}"
        ]
    return [
        f"model.vocab_size = {wanted}: the tokenizer {config.data.tokenizer} has "
        f"{tokenizer.vocab_size} ids; legal: {tokenizer.vocab_size} or more"
    ]
