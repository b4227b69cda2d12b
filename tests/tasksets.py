"""The tasksets for tests with the package verifiers: words for a game, and a taskset that is made
from the scaffold of verifiers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_megatron.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece
from tests.programs import command_environment

TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' ~ message.role ~ '|>' ~ message.content ~ eos_token -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
# This code fills the gaps that the scaffold leaves to the author of a taskset.
_LOAD = """return [
            MySumsTask(MySumsData(prompt=f"{n}+{n + 1}?", answer=str(2 * n + 1)), self.config.task)
            for n in range(self.config.num_tasks)
        ]
"""
_REWARD = """if trace.last_reply == "fail":
            raise RuntimeError("I cannot score this")
        return float(trace.last_reply == self.data.answer)
"""


def letters(folder: Path) -> Tokenizer:
    """A tokenizer whose tokens are characters, with a chat template. Its files are written to
    `folder`."""
    characters = "".join(map(chr, range(32, 127)))
    symbols = [f"<|{role}|>" for role in ("user", "assistant", "tool", "system")]
    train_sentencepiece(
        [characters] * 9, 140, folder / "tokenizer", "char", control_symbols=symbols
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(folder / "tokenizer.model")


def hangman_words(folder: Path, words: Sequence[str]) -> Path:
    """A folder for NLTK_DATA with these words. textarena's games choose their words from it."""
    corpus = folder / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("\n".join(words) + "\n")
    return folder


def sums_taskset(python: str, folder: Path) -> Path:
    """The folder of the taskset my_sums. `vf-init` makes it, and this function fills in its tasks
    and reward."""
    scaffold = [str(Path(python).with_name("vf-init")), "my-sums", "--path", str(folder)]
    subprocess.run(scaffold, check=True, capture_output=True, env=command_environment())
    place = folder / "my_sums"
    source = place / "my_sums" / "taskset.py"
    text = source.read_text()
    open_load = text.index("raise NotImplementedError(\n")  # vf-init leaves this for us to replace
    text = text[:open_load] + _LOAD
    open_reward = text.index("raise NotImplementedError(")  # replaced too
    after = text.index("\n", open_reward)
    text = text[:open_reward] + _REWARD.rstrip() + text[after:]
    fields = '"""One row\'s data. Add task-specific fields here, such as a reference answer."""\n'
    assert fields in text
    source.write_text(text.replace(fields, f"{fields}    answer: str\n"))
    return place


def run_settings(folder: Path, taskset: str, python: Path) -> dict[str, Any]:
    """The settings of a run of two steps on the tasks in folder/tasks.jsonl, with the tokenizer of
    `letters`."""
    return {
        "model": {"preset": "tiny", "max_sequence_length": 4096},
        "data": {
            "prompts": str(folder / "tasks.jsonl"),
            "tokenizer": str(folder / "letters" / "tokenizer.model"),
            "answer_field": None,
        },
        "environment": {"verifiers": taskset, "python": str(python), "max_turns": 3},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_response_tokens": 600},
        "training": {"steps": 2, "precision": "fp32"},
        "logging": {"dir": str(folder / "run"), "plots": False},
    }
