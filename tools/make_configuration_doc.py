"""Make docs/configuration.md from the schema of the configuration.

python tools/make_configuration_doc.py
"""

from __future__ import annotations

from pathlib import Path

from gspo_megatron.config.keys import Key, list_keys
from gspo_megatron.config.load import STAGES
from gspo_megatron.config.section import sections_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """# Configuration

Every key, by section. `python tools/make_configuration_doc.py` makes this page, and a test compares
it with the schema. `gspo-megatron check --keys [WORD]` prints the same.

A configuration is a YAML file of sections; the command line replaces single keys, as in
`rollout.group_size=16`, whose value is YAML, too. The column "resume" says whether the value of a
key may change when a run is resumed. Fields of `model.megatron` may change if they only affect the
speed. `gspo-megatron check` also checks the rules between several keys.

Relative paths start at the current folder. If an input is not there, it is looked for beside the
configuration file, and the command says where it was found. `~` is not expanded.
"""
_TITLES = {
    "rl": "RL",
    "sft": "Supervised fine-tuning",
    "pretrain": "Pre-training",
    "reward_model": "Preference models",
}
# The stages whose command has another name.
_COMMANDS = {"rl": "train", "reward_model": "reward-model"}


def markdown() -> str:
    """Return the text of docs/configuration.md."""
    parts = [_INTRODUCTION]
    reinforcement = list(list_keys("rl"))
    for stage, title in _TITLES.items():
        keys = list(list_keys(stage))
        parts.append(f"## {title} (`gspo-megatron {_COMMANDS.get(stage, stage)}`)\n")
        if stage != "rl":
            keys = [k for k in keys if k not in reinforcement or k.name.startswith("data.")]
            parts.append(f"{_shared(stage)}\nThe keys below are new or differ.\n")
        for section, schema in sections_of(STAGES[stage]).items():
            rows = [_row(key) for key in keys if key.name.startswith(f"{section}.")]
            if rows:
                parts.append(f"### {section}\n\n{schema.__doc__}\n")
                head = "| key | type | default | meaning | allowed | resume |"
                parts.append("\n".join([head, "| --- " * 6 + "|", *rows]) + "\n")
    return "\n".join(parts)


def _shared(stage: str) -> str:
    """Return a sentence about the sections that a stage shares with RL."""
    sections, others = sections_of(STAGES["rl"]), sections_of(STAGES[stage])
    missing = [
        f"`{name}.{key}`"
        for name, schema in sections.items()
        if name in others and name != "data"
        for key in schema.model_fields
        if key not in others[name].model_fields
    ]
    names = ", ".join(f"`{name}`" for name in sections if name in others and name != "data")
    return f"The sections {names} have the keys of an RL run,\nwithout {', '.join(missing)}."


def _row(key: Key) -> str:
    cells = (
        f"`{key.name.partition('.')[2]}`",
        key.type,
        key.default if key.default == "required" else f"`{key.default}`",
        key.meaning,
        key.legal,
        key.resume,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
