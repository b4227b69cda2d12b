from __future__ import annotations

import random
from pathlib import Path

import pytest
import sentencepiece

from gspo_megatron.data.hugging_face import convert
from gspo_megatron.data.sentencepiece_model import STEP, SYMBOL_SCORE, with_exact_scores
from gspo_megatron.data.tokenizers import train_sentencepiece
from tests.unit.data.corpora import make_texts

SYMBOLS = ("<sep>", "==")


def train(folder: Path) -> bytes:
    """A unigram model that knows runs of several lengths, with and without neighbours."""
    source = random.Random(2)
    lines = [line for text in make_texts(300, seed=2) for line in text.split("\n")]
    lines += ["-" * source.randint(1, 12) + source.choice(lines) for _ in range(600)]
    path = train_sentencepiece(
        *(lines, 400, folder / "model"),
        user_defined_symbols=list(SYMBOLS),
        required_chars="<sep>=",
        byte_fallback=True,
    )
    return path.read_bytes()


def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def runs(count: int) -> list[str]:
    source = random.Random(3)
    kinds = (lambda: "-" * source.randint(1, 15), lambda: "=" * source.randint(1, 9))
    words = " ".join(make_texts(3, seed=4)).split()
    others = (lambda: source.choice(words), lambda: " ", lambda: "<sep>")
    return [
        "".join(source.choice(kinds + others)() for _ in range(source.choice((5, 50, 500))))
        for _ in range(count)
    ]


def disagreements(model: bytes) -> int:
    ours, theirs = processor(model), convert(processor(model), "unigram", SYMBOLS)
    return sum(ours.encode(text) != theirs.encode(text).ids for text in runs(200))


def test_runs_of_a_character_are_cut_alike_in_both_libraries(tmp_path: Path) -> None:
    model = train(tmp_path)
    assert disagreements(model) > 10  # of 200: rounding decides
    assert disagreements(with_exact_scores(model, SYMBOLS)) == 0


def test_only_scores_and_user_symbols_change(tmp_path: Path) -> None:
    model = train(tmp_path)
    before, after = processor(model), processor(with_exact_scores(model, SYMBOLS))
    assert after.get_piece_size() == before.get_piece_size()
    for n in range(before.get_piece_size()):
        assert after.id_to_piece(n) == before.id_to_piece(n)
        for kind in ("is_control", "is_unknown", "is_byte", "is_unused"):
            assert getattr(after, kind)(n) == getattr(before, kind)(n)
        score = after.get_score(n)
        assert (score * STEP).is_integer()
        if before.id_to_piece(n) in SYMBOLS:
            assert score == SYMBOL_SCORE
        else:
            assert score == pytest.approx(before.get_score(n), abs=0.5 / STEP)
    # Ordinary text is cut as before, but for close calls.
    texts = make_texts(200, seed=9)
    same = sum(before.encode(text) == after.encode(text) for text in texts)
    assert same > 150
    assert all(after.decode(after.encode(text)) == text for text in texts)


def test_symbols_win_over_pieces_that_hold_their_beginning(tmp_path: Path) -> None:
    lines = ["rare ab<", "ab< ab<", "sep> sep> sep>"] * 50
    path = train_sentencepiece(lines, 40, tmp_path / "m", user_defined_symbols=["<sep>"])
    model = path.read_bytes()
    symbol = processor(model).piece_to_id("<sep>")
    assert symbol in processor(with_exact_scores(model, ["<sep>"])).encode("ab<sep>")
