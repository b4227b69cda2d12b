"""Runs whose prompts are conversations from several files: which prompts are drawn, which arguments
the reward gets, and how a run is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.e2e.conftest import write_config
from tests.e2e.resuming import make_small
from tests.programs import gspo

TEMPLATE = (
    "{%- for message in messages -%}{{- message.content -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- mark -}}{%- endif -%}"
)
# The reward writes one line for each response, with the arguments that it got.
REWARD = """
import json, zlib
from pathlib import Path
def reward(sample):
    assert sample.answer is None and sample.messages[-1]["content"] == sample.prompt
    seen = {name: getattr(sample, name) for name in ("row_id", "messages", "fields", "prompt",
            "num_prompt_tokens", "num_tokens", "truncated", "response")}
    with (Path(__file__).parent / "seen").open("a") as file:
        file.write(json.dumps(seen) + "\\n")
    return zlib.crc32((sample.row_id + sample.response).encode()) % 97 / 96
"""


def drawn(folder: Path) -> list[tuple[object, ...]]:
    """The training samples that samples.jsonl records."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    names = ("step", "row_id", "prompt", "response", "reward", "answer")
    return [tuple(row[name] for name in names) for row in rows if row["split"] == "train"]


def test_conversations_of_two_files_on_another_layout_and_resumed(
    toy: Path, tmp_path: Path
) -> None:
    shutil.copy(toy / "tokenizer.model", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "conversation_reward.py").write_text(REWARD)
    files = []
    for name, count in (("one", 9), ("two", 6)):
        files.append(tmp_path / f"{name}.jsonl")
        history = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
        rows = [
            {"chat": {"turns": [*history, {"role": "user", "content": "cd"[: n % 2 + 1]}]}, "n": n}
            for n in range(count)
        ]
        if name == "one":
            rows = [{**row, "id": row["n"]} for row in rows]
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "tokenizer": str(tmp_path / "tokenizer.model"),
        "prompts": [*map(str, files)],
        "eval_prompts": None,
        "weights": [3, 1],
        "prompt_field": "chat.turns",
        "answer_field": None,
        "chat_template_options": {"mark": "cab"},
    }
    path = write_config(toy, tmp_path)
    make_small(
        path,
        data=data,
        reward={"import_path": "conversation_reward:reward"},
        training={"steps": 4},
        logging={"samples_per_step": 16},
    )
    folders = [tmp_path / "whole", tmp_path / "resumed"]
    environ = {"PYTHONPATH": str(tmp_path)}
    gspo("train", path, f"logging.dir={folders[0]}", **environ)
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    for steps, layout in ((2, "dp=2"), (4, "dp=1")):
        words = (f"logging.dir={folders[1]}", f"training.steps={steps}")
        gspo("train", path, *words, f"parallel.layout={layout}", **environ)
    whole, resumed = map(drawn, folders)
    # Rank 0 writes only the samples that it has scored itself.
    assert [row for row in whole if row[:2] in {r[:2] for r in resumed}] == resumed
    assert len(resumed) == 2 * 8 + 2 * 16
    assert [len([row for row in whole if row[0] == step]) for step in range(1, 5)] == [16] * 4
    for step in range(1, 5):  # 3 of 4 prompts come from the first file, whose rows have ids
        ids = {str(row[1]) for row in whole if row[0] == step}
        assert sum(row_id.isdigit() for row_id in ids) == 3
        assert sum(row_id.startswith("two.jsonl:") for row_id in ids) == 1
    # Each row of the first file comes once before any row comes again.
    order = [str(row[1]) for row in whole[::4]]
    assert len(set([row_id for row_id in order if row_id.isdigit()][:9])) == 9

    assert len(seen) == 64
    first = next(each for each in seen if each["row_id"] == "3")
    assert [message["content"] for message in first["messages"]] == ["ab", "ba", "cd"]
    assert (first["prompt"], first["num_prompt_tokens"]) == ("cd", len("abbacd" + "cab"))
    assert first["fields"]["n"] == 3 and first["fields"]["id"] == 3
    assert all(each["truncated"] or each["num_tokens"] <= 6 for each in seen)
