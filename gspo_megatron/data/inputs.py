"""The input files of a run, read and held against the configuration: tokenizer and prompts."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_megatron.config import Config
from gspo_megatron.data.encode import encode_prompts
from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.data.unknown import Unknown
from gspo_megatron.errors import ConfigError, UserError
from gspo_megatron.types import Prompt


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
    unknown = Unknown()
    for prompt in encoded:
        unknown.note(tokenizer, prompt.source, prompt.token_ids, prompt.text)
    warnings += unknown.warnings(key, len(encoded))
    return encoded


def vocabulary_problems(config: Config, tokenizer: Tokenizer) -> list[str]:
    """What is wrong where the tokenizer has ids that the model has no room for."""
    wanted = model_vocab_size(config, tokenizer)
    if wanted >= tokenizer.vocab_size:
        return []
    model = config.model
    if model.hf_path is not None or (model.preset is None and model.vocab_size is None):
        key = "checkpoint_path" if model.hf_path is None else "hf_path"
        return [
            f"data.tokenizer = {config.data.tokenizer}: it has {tokenizer.vocab_size} ids, the "
            f"model in model.{key} = {getattr(model, key)} {wanted}; legal: at most {wanted}"
        ]
    return [
        f"model.vocab_size = {wanted}: the tokenizer {config.data.tokenizer} has "
        f"{tokenizer.vocab_size} ids; legal: {tokenizer.vocab_size} or more"
    ]
