from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import transformers

from gspo_megatron.data.chat import check_template
from gspo_megatron.data.tokenizers import load_tokenizer, train_sentencepiece
from gspo_megatron.data.toy import CHARACTERS, VOCAB_SIZE, train_toy_tokenizer
from gspo_megatron.errors import DataError
from tests.unit.data.corpora import refusal


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_toy_tokenizer(tmp_path_factory.mktemp("toy") / "tokenizer")


def refused(path: Path) -> str:
    (message,) = refusal(load_tokenizer, path)
    assert str(path) in message
    return message


def test_every_character_of_the_toy_alphabet_is_one_token(toy_model: Path) -> None:
    tokenizer = load_tokenizer(str(toy_model))
    ids = [tokenizer.encode(character) for character in CHARACTERS]
    assert all(len(each) == 1 for each in ids)
    assert len({0, 1, 2, *(each[0] for each in ids)}) == len(CHARACTERS) + 3
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (1, 2, None)
    assert tokenizer.vocab_size == VOCAB_SIZE == 48
    assert tokenizer.name == str(toy_model)
    # Encoding and decoding give back the same text, also with spaces at any place.
    generator = random.Random(7)
    texts = ["", " ", "  ab  c ", "37+45=", "cabd>", " a", "a "]
    texts += ["".join(generator.choices(CHARACTERS + "    ", k=n)) for n in range(1, 60)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        # Encoding character by character gives the same ids, because no prefix is added and no
        # characters are merged.
        assert ids == [i for character in text for i in tokenizer.encode(character)]
    # Special ids and unknown ids decode to an empty text.
    a, size = tokenizer.encode("a")[0], tokenizer.vocab_size
    assert tokenizer.decode([a, tokenizer.eos_id, tokenizer.pad_id, size, a, size + 7]) == "aa"


@pytest.mark.parametrize(("lines", "size", "kind"), [([], 10, "char"), (["abc"], 1, "bpe")])
def test_impossible_training_is_a_data_error(
    tmp_path: Path, lines: list[str], size: int, kind: str
) -> None:
    with pytest.raises(DataError, match="sentencepiece could not train"):
        train_sentencepiece(lines, size, tmp_path / "t", model_type=kind)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [0, 1, 200, 5000, None])
def test_damaged_sentencepiece_file(
    tmp_path: Path, toy_model: Path, length: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    path, whole = tmp_path / "tokenizer.model", toy_model.read_bytes()
    path.write_bytes(whole[:101] if length is None else random.Random(length).randbytes(length))
    assert "give a sentencepiece .model file" in refused(path)
    assert capfd.readouterr().err == ""


def test_special_tokens_of_foreign_models(tmp_path: Path) -> None:
    """The padding token defaults to the end-of-sequence token. A model without an end-of-sequence
    token is refused."""
    train_sentencepiece(["abc"], 8, tmp_path / "a", "char", pad_id=-1, eos_id=2, bos_id=1)
    tokenizer = load_tokenizer(tmp_path / "a.model")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    train_sentencepiece(["abc"], 8, tmp_path / "b", "char", pad_id=-1, eos_id=-1)
    assert "no end-of-sequence token" in refused(tmp_path / "b.model")


# --- Hugging Face folders -------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_folder(folder: Path, bos_in_front: bool = False, **config: object) -> Path:
    pieces = ["<unk>", "<s>", "<pad>", "<eos>", *"abcdefgh 0123456789+=<>istunr"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    )
    tokenizer.decoder = tokenizers.decoders.Fuse()
    if bos_in_front:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 4,
        **config,
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_folder_encodes_without_special_tokens_and_round_trips(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(build_folder(tmp_path / "hf"))
    text = "  ab  c 37+45= "
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == text
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (3, 2, None)
    assert tokenizer.vocab_size == max(max(ids) + 1, 33) == 33
    captured = capfd.readouterr()
    # transformers printed no warning, although the text was longer than model_max_length
    assert captured.out + captured.err == ""


def test_special_tokens_of_folders(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(build_folder(tmp_path / "bos", bos_in_front=True))
    assert tokenizer.bos_id == 1 and 1 not in tokenizer.encode("ab")
    assert load_tokenizer(build_folder(tmp_path / "pad", pad_token=None)).pad_id == 3
    assert "set eos_token" in refused(build_folder(tmp_path / "eos", eos_token=None))
    # GPT-2 uses one token as the unknown token and as the end of a sequence.
    assert load_tokenizer(build_folder(tmp_path / "unk", unk_token="<eos>")).unk_id is None
    assert tokenizer.unk_id == 0


def test_chat_template_opens_the_answer(tmp_path: Path, toy_model: Path) -> None:
    tokenizer = load_tokenizer(build_folder(tmp_path / "hf", chat_template=CHAT_TEMPLATE))
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.render(messages, open_answer=True).text == "<user>ab<assistant>"
    assert tokenizer.render(messages).text == "<user>ab"
    (line,) = refusal(tokenizer.render, [{"role": "bad", "content": "ab"}])
    assert "the chat template failed: no such role" in line
    (line,) = refusal(load_tokenizer(build_folder(tmp_path / "plain")).render, [])
    assert "no chat template" in line
    (line,) = refusal(load_tokenizer(toy_model).render, messages)
    assert "a sentencepiece model has no chat template" in line


THINKS = (
    "{%- set think = enable_thinking if enable_thinking is defined else true -%}"
    "{%- set ns = namespace(last=-1) -%}{%- if tools -%}{{- tools | tojson -}}{%- endif -%}"
    "{%- for message in messages -%}{%- if loop.last and not think -%}{%- break -%}{%- endif -%}"
    "{%- generation -%}{{- message.content -}}{%- endgeneration -%}{%- endfor -%}"
    "{{- bos_token -}}{%- if add_generation_prompt -%}<{%- endif -%}"
)


def test_options_are_variables_of_the_template(tmp_path: Path) -> None:
    """The options become variables of the template. The rendered text is the same as with
    transformers."""
    folder = build_folder(tmp_path / "hf", chat_template=THINKS)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "cd"}]
    texts = set()
    for options in ({}, {"enable_thinking": False}, {"tools": [{"type": "function"}]}):
        ours = load_tokenizer(folder, options)
        check_template(ours, messages)
        texts.add(ours.render(messages, open_answer=True).text)
        assert texts >= {
            theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        }
    assert len(texts) == 3


def test_an_option_that_the_template_never_reads_is_refused_by_name(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "hf", chat_template=THINKS)
    options = {"enable_thinkin": 1, "ns": 2, "enable_thinking": False, "bos_token": "<s>"}
    lines = refusal(check_template, load_tokenizer(folder, options))
    key, never = "data.chat_template_options", f"the chat template of {folder} never reads it"
    assert lines == [
        f"{key}.enable_thinkin = 1: {never}; did you mean enable_thinking?",
        f"{key}.ns = 2: {never}; allowed: enable_thinking, tools",
        f"{key}.bos_token = '<s>': {never}; allowed: enable_thinking, tools",
    ]


def test_the_right_path_is_named(
    tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no such tokenizer; give a sentencepiece .model file or a Hugging Face" in refused(
        tmp_path / "none.model"
    )
    monkeypatch.chdir(tmp_path)
    assert f"the current folder is {tmp_path}" in refused(Path("none.model"))
    assert "a folder without tokenizer.json" in refused(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(toy_model.read_bytes())
    assert f"name the file {tmp_path / 'tokenizer.model'}" in refused(tmp_path)
    folder = build_folder(tmp_path / "hf")
    assert f"name its folder, {folder}" in refused(folder / "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xe2\x28\xa1 random"])
def test_damaged_folder_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = build_folder(tmp_path / "hf")
    (folder / "tokenizer.json").write_bytes(content)
    assert "or damaged" in refused(folder)


def test_code_of_a_folder_is_never_run(tmp_path: Path) -> None:
    folder = build_folder(
        tmp_path / "hf",
        tokenizer_class="Custom",
        auto_map={"AutoTokenizer": ["code.Custom", "code.Custom"]},
    )
    marker = tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    # transformers may refuse the folder, or use tokenizer.json instead.
    with contextlib.suppress(DataError):
        load_tokenizer(folder)
    assert not marker.exists()


def test_a_folder_whose_tokenizer_is_code_is_told_as_such(tmp_path: Path) -> None:
    code = {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}
    folder = build_folder(tmp_path / "hf", tokenizer_class="TikTokenTokenizer", auto_map=code)
    (folder / "tokenizer.json").unlink()
    assert refused(folder) == (
        f"{folder}: its tokenizer is Python code, which is never run; make a folder with a "
        "tokenizer.json (docs/checkpoints.md), and name that folder"
    )


@pytest.mark.parametrize(
    ("content", "further"),
    [("{}", ()), ('{"eos_token_id": 30}', (30,)), ('{"eos_token_id": [31, 3, 2]}', (31, 3, 2))],
)
def test_the_generation_config_names_further_end_tokens(
    tmp_path: Path, toy_model: Path, content: str, further: tuple[int, ...]
) -> None:
    folder = build_folder(tmp_path / "hf")
    assert load_tokenizer(folder).eos_ids == (3,)
    (folder / "tokenizer.model").write_bytes(toy_model.read_bytes())
    (folder / "generation_config.json").write_text(content)
    for path, own in ((folder, 3), (folder / "tokenizer.model", 2)):
        assert load_tokenizer(path).eos_ids == (own, *(i for i in further if i != own))
    for damaged in ("", "[]", '{"eos_token_id": "<eos>"}', '{"eos_token_id": [1.5]}'):
        (folder / "generation_config.json").write_text(damaged)
        assert "generation_config.json: " in refused(folder)


def test_a_tokenizer_that_names_no_family_is_read_without_torch(tmp_path: Path) -> None:
    """The tokenizer has the class that AutoTokenizer would choose. AutoTokenizer itself would
    import torch."""
    model = tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast.save(str(tmp_path / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    code = (
        "import sys; from gspo_megatron.data.tokenizers import load_tokenizer\n"
        "made = load_tokenizer(sys.argv[1])\n"
        "print(made.encode('a b c'), made.eos_id, 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    chosen = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert printed.split() == [*str(chosen.encode("a b c")).split(), "1", "False"]
    assert isinstance(chosen, transformers.PreTrainedTokenizerFast)
