"""Reads the input files of a run and checks them against the configuration.

This happens in every stage, before any process group exists."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from gspo_megatron.config import Config
from gspo_megatron.config.schema import suite_key
from gspo_megatron.config.stages import (
    AnyConfig,
    FineTuningConfig,
    PreferenceConfig,
    PretrainingConfig,
)
from gspo_megatron.data.chat import check_template
from gspo_megatron.data.examples import SupervisedData, load_supervised
from gspo_megatron.data.formats import FieldMap, field_map
from gspo_megatron.data.indexed import check_dataset, read_index
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.data.preferences import PreferenceData, load_preferences
from gspo_megatron.data.prompts import (
    IDLE_OPTIONS,
    OddTexts,
    encode_prompts,
    load_prompts,
)
from gspo_megatron.data.rows import check_rows
from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer
from gspo_megatron.errors import ConfigError, DataError, UnknownValueError, gathered_in
from gspo_megatron.files import fingerprint
from gspo_megatron.types import Prompt

Rows = TypeVar("Rows", SupervisedData, PreferenceData)


@dataclass(frozen=True)
class Inputs:
    """The input of reinforcement learning."""

    tokenizer: Tokenizer
    files: dict[str, list[Prompt]]  # encoded prompts by the configuration key of their files
    warnings: tuple[str, ...] = ()  # one line each
    train_sizes: tuple[int, ...] = ()  # number of prompts in each training file, in order

    @property
    def train(self) -> list[Prompt]:
        return self.files.get("data.prompts", [])

    @property
    def evaluation(self) -> list[Prompt]:
        return self.files.get("data.eval_prompts", [])


@dataclass(frozen=True)
class ExampleInputs(Generic[Rows]):
    """The input of supervised fine-tuning, or of the training of a preference model."""

    tokenizer: Tokenizer
    train: Rows
    evaluation: Rows | None
    warnings: tuple[str, ...] = ()  # one line each


@dataclass(frozen=True)
class PretrainingInputs:
    """The input of pre-training, without the corpora, which are read during the run."""

    tokenizer: Tokenizer
    eod_id: int  # the token that ends every document


def read_inputs(config: Config, tools: Sequence[dict[str, Any]] = ()) -> Inputs:
    """Read tokenizer and prompt files. The chat template describes `tools` in the prompts.

    Raises ConfigError with the problems of all files, by file and line: a file or row that cannot
    be read, prompts that are too long, a tokenizer with ids beyond the model's vocabulary.
    """
    tokenizer, problems = _load_tokenizer(config)
    if tokenizer is not None and tools:
        tokenizer.template_options = {**tokenizer.template_options, "tools": list(tools)}
    forms, named = prompt_forms(config), config.input_files()
    loaded: dict[str, list[list[Prompt]]] = {key: [] for key in forms}
    for key, paths in named.items():
        for path in paths:
            with gathered_in(problems):
                if key not in forms:
                    check_rows(Path(path), "prompt file")  # raises if there is no such file
                    continue
                form = forms[key]
                loaded[key].append(load_prompts(path, form.fields, form.chat_template))
        if key in forms:
            loaded[key] = _first(loaded[key], forms[key].limit)
    warnings: list[str] = []
    # If the tokenizer or a limit is missing, its problem is among the reported problems already.
    if tokenizer is not None and all(form.max_tokens > 0 for form in forms.values()):
        with gathered_in(problems):
            _check_template(config, tokenizer, itertools.chain(*loaded.values()))
            for key, files in loaded.items():
                loaded[key] = _encode(files, tokenizer, forms[key], problems)
                warnings += _odd_texts(loaded[key], tokenizer, key)
    if problems:
        raise ConfigError(problems)
    if tokenizer is None or forms.keys() != named.keys():
        raise UnknownValueError
    prompts = {key: [*itertools.chain(*files)] for key, files in loaded.items()}
    sizes = {key: tuple(map(len, files)) for key, files in loaded.items()}
    for held_out in {"data.eval_prompts"} & prompts.keys():
        # An evaluation uses the first `training.evaluation_prompts` prompts. Mix the files, so that
        # each file has its share of them.
        total = len(prompts[held_out])
        order = PromptLoader(sizes[held_out], total, seed=0, shuffle=False).next()
        prompts[held_out] = [prompts[held_out][number] for number in order]
    return Inputs(tokenizer, prompts, tuple(warnings), sizes.get("data.prompts", ()))


@dataclass(frozen=True)
class PromptForm:
    """How to read the files of one configuration key."""

    fields: FieldMap
    chat_template: bool
    max_tokens: int  # the largest number of tokens of a prompt
    max_setting: str  # the setting that gives `max_tokens`, for error messages
    limit: int | None = None  # the number of prompts to use; None: all


def prompt_forms(config: Config) -> dict[str, PromptForm]:
    """Return how to read the input files of each configuration key.

    Keys that depend on an unknown value are left out. If the model's shape is unknown, `max_tokens`
    is not positive, and `_load_tokenizer` reports why."""
    try:
        longest, length = config.max_prompt_tokens(), config.resolved_model().max_sequence_length
    except ConfigError:
        longest = length = 0
    names = {suite_key(name): name for name in config.evaluation.suites}
    forms = {}
    for key in config.input_files():
        with contextlib.suppress(UnknownValueError):
            if key not in names:
                data, setting = config.data, "data.max_prompt_tokens"
                forms[key] = PromptForm(field_map(data), data.chat_template, longest, setting)
                continue
            suite, name = config.evaluation.suites[names[key]], names[key]
            forms[key] = PromptForm(
                field_map(suite, key),
                config.data.chat_template if suite.chat_template is None else suite.chat_template,
                length - config.suite_response_tokens(name),
                f"model.max_sequence_length = {length}, less {key}.max_response_tokens",
                suite.limit,
            )
    return forms


def _first(files: list[list[Prompt]], limit: int | None) -> list[list[Prompt]]:
    """Return the first `limit` prompts over all files; all prompts if the limit is None."""
    room = sum(map(len, files)) if limit is None else limit
    chosen = []
    for prompts in files:
        chosen.append(prompts[:room])
        room -= len(chosen[-1])
    return chosen


def _check_template(config: Config, tokenizer: Tokenizer, files: Iterable[list[Prompt]]) -> None:
    """Raise DataError if prompts need a chat template that is missing or unusable, or if there are
    template options but no prompt uses a template."""
    prompts = [prompt for prompts in files for prompt in prompts]
    conversation = next((prompt.messages for prompt in prompts if prompt.messages), None)
    if conversation is not None:
        check_template(tokenizer, conversation)
    elif config.data.chat_template_options and prompts:
        raise DataError(": ".join(IDLE_OPTIONS))


def _encode(
    files: list[list[Prompt]], tokenizer: Tokenizer, form: PromptForm, problems: list[str]
) -> list[list[Prompt]]:
    encoded = []
    for prompts in files:
        with gathered_in(problems):
            encoded.append(encode_prompts(prompts, tokenizer, form.max_tokens, form.max_setting))
    return encoded


def _odd_texts(files: list[list[Prompt]], tokenizer: Tokenizer, key: str) -> list[str]:
    """Return warnings about characters unknown to the tokenizer and quoted control tokens."""
    odd = OddTexts()
    for prompt in itertools.chain(*files):
        texts = [message["content"] for message in prompt.messages] or [prompt.text]
        ids, text, of_messages = prompt.token_ids, "".join(texts), bool(prompt.messages)
        odd.add(tokenizer, prompt.source, ids, text, of_messages=of_messages)
    return odd.warnings(key, sum(map(len, files)))


def read_fine_tuning(config: FineTuningConfig) -> ExampleInputs[SupervisedData]:
    """Read tokenizer and examples.

    Raises ConfigError with the problems of all files, by file and line.
    """
    return _read_examples(config, load_supervised)


def read_preferences(config: PreferenceConfig) -> ExampleInputs[PreferenceData]:
    """Read tokenizer and preferences.

    Raises ConfigError with the problems of all files, by file and line.
    """
    regression = config.preference.loss == "regression"
    inputs = _read_examples(config, partial(load_preferences, regression=regression))
    warnings = [*inputs.warnings]
    for key, data in zip(config.inputs, (inputs.train, inputs.evaluation), strict=True):
        if data is not None and data.counts.ends_in_padding:
            warnings.append(
                f"data.{key}: {data.counts.ends_in_padding} of {len(data.lengths)} sequences end "
                f"in the padding token {inputs.tokenizer.pad_id}: transformers takes it for "
                "padding and scores an earlier token of them; this program and vLLM score the last "
                "one"
            )
    return replace(inputs, warnings=tuple(warnings))


def _read_examples(
    config: FineTuningConfig | PreferenceConfig, load: Callable[[str, Tokenizer, Any], Rows]
) -> ExampleInputs[Rows]:
    """Read the tokenizer, and the file of each key with `load`."""
    tokenizer, problems = _load_tokenizer(config)
    form = None
    with contextlib.suppress(ConfigError):  # the model's shape is wrong; already reported
        form = config.data.model_copy(update={"max_tokens": config.max_tokens()})
    rows_by_key: dict[str, Rows] = {}
    warnings: list[str] = []
    for key, paths in config.input_files().items():
        with gathered_in(problems):
            if tokenizer is None or form is None:
                check_rows(Path(paths[0]), "file")  # raises if there is no such file
                continue
            rows_by_key[key] = data = load(paths[0], tokenizer, form)
            warnings += data.counts.odd.warnings(key, len(data.lengths))
    if problems:
        raise ConfigError(problems)
    if tokenizer is None or form is None:
        raise UnknownValueError
    learned, held_out = (rows_by_key.get(f"data.{name}") for name in config.inputs)
    assert learned is not None, "inputs_are_given comes first"
    return ExampleInputs(tokenizer, learned, held_out, tuple(warnings))


def read_pretraining(config: PretrainingConfig) -> PretrainingInputs:
    """Read the tokenizer, and check index, sizes and tokenizer of every corpus.

    Raises ConfigError with all problems.
    """
    tokenizer, problems = _load_tokenizer(config)
    ends: dict[int, str] = {}  # end-of-document id -> the first corpus that uses it
    for prefix in (*config.data.train, *config.data.evaluation):
        with gathered_in(problems):
            size = None if tokenizer is None else model_vocab_size(config, tokenizer)
            manifest = check_dataset(prefix, size)
            if corpus_tokens(prefix) < 2:
                raise DataError(f"{prefix}.idx: holds no text to learn")
            if manifest is None:
                continue
            path = config.data.known("tokenizer")
            if tokenizer is not None and manifest.tokenizer["sha256"] != fingerprint(path):
                raise DataError(
                    f"{prefix}.json: made with another tokenizer ({manifest.tokenizer['name']}) "
                    f"than data.tokenizer = {path}"
                )
            if manifest.eod_id is not None:
                ends.setdefault(manifest.eod_id, prefix)
    if len(ends) > 1:
        named = ", ".join(f"{end} in {prefix}" for end, prefix in ends.items())
        problems.append(f"data.train: documents end in different tokens: {named}; make them alike")
    share = config.data.evaluation_share
    shares = (evaluation_documents(config, prefix) for prefix in config.data.train)
    if not problems and share and not any(shares):
        problems.append(f"data.evaluation_share = {share}: no document of any corpus; raise it")
    if problems:
        raise ConfigError(problems)
    if tokenizer is None:
        raise UnknownValueError
    return PretrainingInputs(tokenizer, next(iter(ends), tokenizer.eos_id))


def evaluation_documents(config: PretrainingConfig, prefix: str) -> int:
    """Return how many documents at the end of a corpus Megatron-Core uses for the evaluation."""
    count = len(read_index(f"{prefix}.idx").lengths)
    return count - round((1.0 - config.data.evaluation_share) * count)


def corpus_tokens(prefix: str) -> int:
    """Return the number of tokens in a corpus."""
    return int(read_index(f"{prefix}.idx").lengths.sum(dtype="int64"))


def model_vocab_size(config: AnyConfig, tokenizer: Tokenizer) -> int:
    """Return the configured vocabulary size of the model, or else the tokenizer's."""
    size = config.resolved_model().vocab_size
    return tokenizer.vocab_size if size is None else size


def _load_tokenizer(config: AnyConfig) -> tuple[Tokenizer | None, list[str]]:
    """Return the configured tokenizer (None if it cannot be loaded) and the problems with it."""
    problems: list[str] = []
    size = None
    with gathered_in(problems):
        data, model = config.data, config.model
        options = getattr(data, "chat_template_options", None)  # pre-training has no such key
        name, tokenizer = data.tokenizer, load_tokenizer(data.tokenizer, options)
        size = model_vocab_size(config, tokenizer)
    if size is None:
        return None, problems
    by_weights = model.hf_path is not None or (model.preset is None and model.vocab_size is None)
    if size < tokenizer.vocab_size and by_weights:
        key = "checkpoint_path" if model.hf_path is None else "hf_path"
        problems.append(
            f"data.tokenizer = {name}: it has {tokenizer.vocab_size} ids, the model in "
            f"model.{key} = {getattr(model, key)} {size}; allowed: at most {size}"
        )
    elif size < tokenizer.vocab_size:
        problems.append(
            f"model.vocab_size = {size}: the tokenizer {name} has {tokenizer.vocab_size} ids; "
            f"allowed: {tokenizer.vocab_size} or more"
        )
    return tokenizer, problems
