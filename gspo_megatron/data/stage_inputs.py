"""The input files of pre-training and fine-tuning, read and held against the configuration before
anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig
from gspo_megatron.data.fingerprints import fingerprint
from gspo_megatron.data.indexed import check_dataset, read_index
from gspo_megatron.data.inputs import model_vocab_size, vocabulary_problems
from gspo_megatron.data.supervised import Format, SupervisedData, load_supervised
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.errors import ConfigError, DataError, UserError


@dataclass(frozen=True)
class FineTuningInputs:
    """What the files hold."""

    tokenizer: Tokenizer
    train: SupervisedData
    evaluation: SupervisedData | None
    warnings: tuple[str, ...] = ()  # a line each: what is no mistake for certain


@dataclass(frozen=True)
class PretrainingInputs:
    """What is known of the files before a sample is read."""

    tokenizer: Tokenizer
    eod_id: int  # ends every document


def read_fine_tuning(config: FineTuningConfig) -> FineTuningInputs:
    """Read everything. Raises ConfigError with the problems of all files, each named by file and
    line."""
    tokenizer, problems = _load_tokenizer(config)
    found: dict[str, SupervisedData] = {}
    for key, paths in config.input_files().items() if tokenizer is not None else ():
        try:
            found[key] = load_supervised(paths[0], tokenizer, form_of(config))
        except UserError as error:
            problems += str(error).splitlines()
    if problems:
        raise ConfigError(problems)
    assert tokenizer is not None
    warnings = [
        line for key, data in found.items() for line in data.counts.unknown.warnings(key, len(data))
    ]
    return FineTuningInputs(
        tokenizer, found["data.examples"], found.get("data.eval_examples"), tuple(warnings)
    )


def form_of(config: FineTuningConfig) -> Format:
    """How the rows of a file become examples."""
    data = config.data
    return Format(
        max_tokens=config.max_tokens(),
        messages_field=data.messages_field,
        prompt_field=data.prompt_field,
        answer_field=data.answer_field,
        chat_template=data.chat_template,
        too_long=data.too_long,
    )


def read_pretraining(config: PretrainingConfig) -> PretrainingInputs:
    """Look at the tokenizer and at every corpus: index, sizes, and whether the tokenizer made it.

    Raises ConfigError with all that is wrong.
    """
    tokenizer, problems = _load_tokenizer(config)
    ends: dict[int, str] = {}
    for prefix in (*config.data.train, *config.data.evaluation):
        try:
            end = _check_corpus(config, prefix, tokenizer)
        except UserError as error:
            problems += str(error).splitlines()
        else:
            if end is not None:
                ends.setdefault(end, prefix)
    if len(ends) > 1:
        told = ", ".join(f"{end} in {prefix}" for end, prefix in ends.items())
        problems.append(f"data.train: documents end in different tokens: {told}; make them alike")
    share = config.data.evaluation_share
    shares = (evaluation_documents(config, prefix) for prefix in config.data.train)
    if not problems and share and not any(shares):
        problems.append(f"data.evaluation_share = {share}: no document of any corpus; raise it")
    if problems:
        raise ConfigError(problems)
    assert tokenizer is not None
    return PretrainingInputs(tokenizer, next(iter(ends), tokenizer.eos_id))


def evaluation_documents(config: PretrainingConfig, prefix: str) -> int:
    """How many documents at the end of a corpus Megatron-Core keeps for the evaluation."""
    count = len(read_index(f"{prefix}.idx").lengths)
    return count - round((1.0 - config.data.evaluation_share) * count)


def corpus_tokens(prefix: str) -> int:
    """Of all documents."""
    return int(read_index(f"{prefix}.idx").lengths.sum(dtype="int64"))


def _load_tokenizer(
    config: FineTuningConfig | PretrainingConfig,
) -> tuple[Tokenizer | None, list[str]]:
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
        return tokenizer, list(vocabulary_problems(config, tokenizer))  # type: ignore[arg-type]
    except UserError as error:
        return None, str(error).splitlines()


def _check_corpus(
    config: PretrainingConfig, prefix: str, tokenizer: Tokenizer | None
) -> int | None:
    """The id that ends its documents, where that is written down."""
    vocab_size = None if tokenizer is None else model_vocab_size(config, tokenizer)  # type: ignore[arg-type]
    manifest = check_dataset(prefix, vocab_size)
    if corpus_tokens(prefix) < 2:
        raise DataError(f"{prefix}.idx: holds no text to learn")
    if manifest is None:
        return None
    path = config.data.tokenizer
    if tokenizer is not None and manifest.tokenizer["sha256"] != fingerprint(path):
        raise DataError(
            f"{prefix}.json: made with another tokenizer ({manifest.tokenizer['name']}) than "
            f"data.tokenizer = {path}"
        )
    return manifest.eod_id
