"""One face for the two kinds of tokenizers: sentencepiece models and Hugging Face folders."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gspo_megatron.data.files import write_atomically
from gspo_megatron.errors import DataError

HELP = (
    "give a sentencepiece .model file or a Hugging Face tokenizer folder "
    "(python -m gspo_megatron.data.toy makes a small one)"
)
HUGGING_FACE_FILES = ("tokenizer.json", "tokenizer_config.json")


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer.

    `vocab_size` is one more than the largest id. `bos_id` is None unless the tokenizer's models
    expect such a token before plain text. `encode` adds no special tokens; `decode` drops them.
    """

    name: str  # the path it was loaded from
    vocab_size: int
    eos_id: int
    pad_id: int
    bos_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as one text that ends where the assistant's answer begins.

        Raises DataError where the tokenizer has no template or the template refuses the messages.
        """
        ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads a sentencepiece model (a file) or a Hugging Face tokenizer (a folder).

    Only local files are read, and no code that comes with a tokenizer is run. Raises DataError,
    naming the path and what to do, where it is missing, damaged or without an end-of-sequence
    token.
    """
    path = Path(path)
    if path.is_dir():
        return HuggingFaceTokenizer(path)
    if path.suffix == ".json":
        raise DataError(f"{path}: for a Hugging Face tokenizer name its folder, {path.parent}")
    return SentencePieceTokenizer(path)


class SentencePieceTokenizer:
    """A sentencepiece `.model` file. Padding falls back on end-of-sequence, as in Llama's."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise DataError(f"{path}: no such tokenizer; {HELP}") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        if not content:  # sentencepiece takes nothing for an empty model and fails later
            raise DataError(f"{path}: an empty file, not a tokenizer; {HELP}")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise DataError(f"{path}: not a sentencepiece model, or damaged; {HELP}") from error
        self.name = str(path)
        self.vocab_size: int = self._processor.get_piece_size()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise DataError(f"{path}: has no end-of-sequence token; train it with an eos_id")
        pad_id: int = self._processor.pad_id()
        self.pad_id = pad_id if pad_id >= 0 else self.eos_id
        bos_id: int = self._processor.bos_id()
        self.bos_id = bos_id if bos_id >= 0 else None

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._processor.decode([int(token_id) for token_id in token_ids])

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        raise DataError(
            f"{self.name}: a sentencepiece model has no chat template; set data.chat_template to "
            "false or use a Hugging Face tokenizer folder"
        )


class HuggingFaceTokenizer:
    """A folder written by `save_pretrained`. Padding falls back on end-of-sequence."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = _load_hugging_face(path)
        self.name = str(path)
        # Not len(): a vocabulary may have gaps, and the model's table must reach the last id.
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if not self.vocab_size:
            raise DataError(f"{path}: the tokenizer has an empty vocabulary")
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"{path}: has no end-of-sequence token; set eos_token in tokenizer_config.json"
            )
        self.eos_id: int = self._tokenizer.eos_token_id
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_id if pad_id is None else pad_id
        # Many folders name a BOS token that their models never saw before a text (GPT-2): ask the
        # tokenizer what it does, not what it has.
        bos_id = self._tokenizer.bos_token_id
        first = self._tokenizer("", verbose=False)["input_ids"][:1]
        self.bos_id: int | None = bos_id if bos_id is not None and first == [bos_id] else None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            [int(token_id) for token_id in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,  # it would alter what the model wrote
        )

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{self.name}: the tokenizer has no chat template; set data.chat_template to "
                "false or use the folder of a chat model"
            )
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is the folder's own program: any error is its
            raise DataError(f"{self.name}: the chat template failed: {error}") from error


def _load_hugging_face(path: Path) -> Any:
    if not any((path / name).is_file() for name in HUGGING_FACE_FILES):
        inside = path / "tokenizer.model"
        advice = f"name the file {inside}" if inside.is_file() else HELP
        wanted = " or ".join(HUGGING_FACE_FILES)
        raise DataError(f"{path}: a folder without {wanted}; {advice}")
    try:
        import transformers
        from transformers.utils import logging
    except ImportError as error:
        raise DataError(
            f"{path}: a tokenizer folder needs transformers: pip install transformers"
        ) from error
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its warnings speak of models and libraries not in use here
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # every library below it raises its own on a damaged file
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}: not a tokenizer that transformers can load, or damaged: {reason}; {HELP}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def train_sentencepiece(
    lines: Iterable[str], vocab_size: int, out_prefix: str | Path, model_type: str = "unigram"
) -> Path:
    """Trains a sentencepiece model of at most `vocab_size` pieces; returns `out_prefix`.model.

    Text is taken as it is (no normalisation, no added or removed spaces), so that decoding gives
    back exactly what was encoded as long as its characters were in `lines`. Ids: 0 unknown,
    1 padding, 2 end of sequence; no beginning of sequence. `model_type`: unigram, bpe, char.

    Raises DataError where sentencepiece cannot train on these lines.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            unk_id=0,
            pad_id=1,
            eos_id=2,
            bos_id=-1,
            minloglevel=2,  # errors only
        )
    except (RuntimeError, OSError) as error:
        raise DataError(f"{out_prefix}.model: sentencepiece could not train: {error}") from error
    return write_atomically(f"{out_prefix}.model", model.getvalue())
