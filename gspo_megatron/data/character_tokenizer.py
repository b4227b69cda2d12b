"""Writes a tokenizer of single characters in the formats of sentencepiece and transformers.

Such a tokenizer is for small models and examples. A published model comes with its own tokenizer.
To make any other tokenizer, use the trainer of sentencepiece."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.data.chat import CHATML, TEMPLATE_FILE
from gspo_megatron.data.tokenizers import special_pieces, train_sentencepiece
from gspo_megatron.files import write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"  # stands for a space in pieces
# Texts such as "<0x41>" must become single characters, never the piece for that byte. So all their
# characters must be in the vocabulary.
_BYTE_PIECE_CHARACTERS = "<0x123456789ABCDEF>"
# Keyword arguments of `write_character_tokenizer` for ChatML. "<|im_end|>" ends a sequence.
CHATML_SYMBOLS: dict[str, Any] = {
    "control_symbols": ("<|im_start|>",),
    "eos_symbol": "<|im_end|>",
    "chat_template": CHATML,
}


def write_character_tokenizer(
    folder: str | Path,
    texts: Iterable[str],
    vocab_size: int,
    *,
    byte_fallback: bool = True,
    user_symbols: Sequence[str] = (),
    control_symbols: Sequence[str] = (),
    eos_symbol: str = "</s>",
    chat_template: str | None = None,
) -> Path:
    """Write tokenizer.model, tokenizer.json, tokenizer_config.json, and chat_template.jinja.

    The last file is written only if there is a `chat_template` (Jinja). Returns the path of
    tokenizer.model. The vocabulary has the characters of `texts`, and at most `vocab_size` ids.
    With byte_fallback, all other characters become byte pieces. A user symbol is one token in any
    text. A control symbol is one token only in the output of a chat template. Raises DataError if
    sentencepiece cannot train on these texts.
    """
    folder = Path(folder)
    symbols = ("<unk>", "<pad>", eos_symbol, *control_symbols, *user_symbols)
    required = "\n" + "".join(symbols) + _BYTE_PIECE_CHARACTERS * byte_fallback
    model = train_sentencepiece(
        (line for text in texts for line in text.split("\n") if line),
        vocab_size,
        folder / "tokenizer",
        "char",
        byte_fallback=byte_fallback,
        unk_piece="<unk>",
        pad_piece="<pad>",
        eos_piece=eos_symbol,
        control_symbols=list(control_symbols),
        user_defined_symbols=list(user_symbols),
        # a user symbol of one character is a piece already
        required_chars="".join(sorted({*required} - {*user_symbols})),
        input_sentence_size=0,  # use all lines
        shuffle_input_sentence=False,
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_pieces(_processor(model)),
    }
    files = {
        "tokenizer.json": for_transformers(model, user_symbols).to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    if chat_template is not None:
        files[TEMPLATE_FILE] = chat_template
    for name, content in files.items():
        write_atomically(folder / name, content.encode())
    return model


def for_transformers(model: Path, user_symbols: Sequence[str] = ()) -> Tokenizer:
    """Convert a sentencepiece model to the `tokenizers` library.

    The result is a BPE model without merges, which leaves single characters. The conversion in
    transformers is not used, because it needs protobuf, and because with it text can become byte
    and control pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    processor = _processor(model)
    pieces = [processor.id_to_piece(n) for n in range(processor.get_piece_size())]
    special = [n for n in range(len(pieces)) if processor.is_control(n) or processor.is_unknown(n)]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: n for n, piece in enumerate(pieces)},
            [],
            unk_token=pieces[processor.unk_id()],
            fuse_unk=True,
            byte_fallback=any(map(processor.is_byte, range(len(pieces)))),
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(pieces[n], special=True, normalized=False) for n in special]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in user_symbols])
    return tokenizer


def _processor(model: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_proto=model.read_bytes())
