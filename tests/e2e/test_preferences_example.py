"""examples/preferences: its rule, and the commands in its README, with few steps."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.resuming import all_records
from tests.programs import ROOT, module_at, run_program

FOLDER = ROOT / "examples" / "preferences"
FEW = {
    "sft": ["training.steps=20"],
    "reward-model": ["training.steps=20"],
    "train": ["training.steps=2"],
    "make_data.py": ["--pairs", "640"],
}


def test_the_rule_is_that_of_the_page() -> None:
    """A response of 4 letters that all occur in the prompt has the score 1. A choice depends on the
    score and, less strongly, on the length."""
    own = module_at(FOLDER / "rule.py")
    assert own.score("abcd", "abca") == 1.0 and own.score("abcd", "") == 0.0
    assert own.score("abcd", "abxx") == own.score("abcd", "ab") - 0.125
    assert own.score("abcd", "abcdabcd") == 0.75

    def share(first: str, second: str) -> float:
        chance = random.Random(1)
        count = 2000
        return sum(own.prefers_first("abcd", first, second, chance) for _ in range(count)) / count

    assert share("abcd", "efgh") > 0.99
    # The share is near the probability sigmoid(-4 * (0.5 - 0.3)) = 0.31. With the rule alone, the
    # probability would be sigmoid(-4 * 0.5) = 0.12.
    assert 0.27 < share("abcdabcd", "abcd") < 0.35
    assert 0.45 < share("abcd", "dcba") < 0.55


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """Run the commands in the first block of the page in order, with fewer pairs and fewer
    steps."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:1]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    seen = []
    for line in block.replace("\\\n", " ").splitlines():
        words = line.split()
        name = words[1].rpartition("/")[2]
        program = ["-m", "gspo_megatron"] if words[0] == "gspo-megatron" else []
        done = run_program(sys.executable, *program, *words[1:], *FEW.get(name, []), cwd=tmp_path)
        seen.append(name)
    assert seen == ["make_data.py", "sft", "reward-model", "train", "plot.py"]
    told = dict(word.split("=") for word in done.stdout.split() if "=" in word)
    assert told["run"] == "gspo" and told["steps"] == "2"
    folder = tmp_path / "runs" / "preferences"
    last = all_records(folder / "gspo")[-1]
    assert last["reward/mean"] == pytest.approx(last["reward/model"])  # the rule has the weight 0
    assert last["reward/true_score"] <= 1.0 and last["response/length_mean"] > 1
    [picture] = folder.glob("*.png")
    assert picture.read_bytes()[1:4] == b"PNG"
    config = json.loads((folder / "reward_model_hf" / "config.json").read_text())
    [architecture] = config["architectures"]
    assert architecture.endswith("ForSequenceClassification")
