"""`gspo-megatron new`: makes a folder with all files that a first run needs."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.cli.arguments import Commands, new_parser
from gspo_megatron.errors import UserError
from gspo_megatron.files import folder_lacks, os_errors

if TYPE_CHECKING:
    from gspo_megatron.data.tokenizers import Tokenizer
    from gspo_megatron.families.model_shape import ModelPreset

TEMPLATES = Path(__file__).with_name("new_templates")
PROMPT_FILES = ("prompts.jsonl", "eval_prompts.jsonl")
VOCABULARY = 320  # the largest number of pieces: 256 bytes, and the characters of the prompts
BATCH_SCRIPT = "slurm/train_gspo.sbatch"
# Divided by the root of the response's tokens, this is a clip range for ratios of sequences. It is
# 0.02 for the 4 tokens of the measurement in docs/objectives.md, which clips the paper's 15%.
CLIP_OF_ONE_TOKEN = 0.04
NOTES = {  # further text about a key, after the schema's description
    "objective.clip_low": "GSPO takes the ratio of a whole response, and the noise of this ratio "
    "falls with 1 / sqrt(tokens). So both bounds are "
    f"{CLIP_OF_ONE_TOKEN} / sqrt(rollout.max_response_tokens). The paper's 3e-4 and 4e-4 are for "
    "thousands of tokens, and would clip most short responses. Correct the bounds by the metric "
    "clip/token/binding, which is about 0.15 in the paper. With ratios of tokens (grpo, ...) set "
    "both to null."
}


def add_parser(commands: Commands) -> None:
    text = "make a folder to start from: configuration, reward, prompts, and a script that trains"
    parser = new_parser(commands, "new", run, text)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    parser.add_argument(
        "--model",
        metavar="HF_FOLDER",
        help="the Hugging Face folder of the model to train, or ORG/NAME[@REVISION] of the Hub "
        "(default: a tiny random model, and a tokenizer made from the ten prompts)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and print what to do next."""
    folder = Path(os.path.abspath(arguments.folder))
    problems = [] if (wrong := folder_fault(folder)) is None else [wrong]
    model = None
    if arguments.model is not None:
        try:
            model = read_model_folder(arguments.model)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    # The folder appears with all its files at once. If this command is killed, a hidden folder
    # remains.
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        with os_errors(folder, "cannot be written"):
            staging.mkdir(parents=True)
            write_files(staging, model)
            os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    shown = shlex.quote(str(arguments.folder))
    print(f"{arguments.folder}: written; look at config.yaml and reward.py first")
    print(f"on this machine:     bash {shown}/run.sh")
    print(f"on a Slurm cluster:  cd {shown} && {sbatch_line()}")
    return 0


def folder_fault(folder: Path) -> str | None:
    """Return in one line why no folder can be put at this absolute path, or None if one can."""
    if not os.path.lexists(folder):
        lacks = folder_lacks(folder.parent)
        return lacks and f"{folder}: cannot be written: {lacks}"
    if not folder.is_dir():
        return f"{folder}: is a file; name a new folder"
    if any(folder.iterdir()):
        return f"{folder}: is not empty; name a new folder"
    if folder.samefile(Path.cwd()):  # replacing it would leave the shell in a removed folder
        return f"{folder}: is the current folder; name a new one below it"
    return None


def read_model_folder(given: str) -> tuple[str, ModelPreset, Tokenizer]:
    """Return the folder (or the name on the Hub with its commit), the model's shape and the
    tokenizer. No tensor is read, and none is downloaded from the Hub.

    Raises UserError with all problems of config.json and the weights, or with the problem of the
    tokenizer.
    """
    from gspo_megatron.data.tokenizers import load_tokenizer
    from gspo_megatron.families import preset_of_folder
    from gspo_megatron.hf.files import HfFolder
    from gspo_megatron.hub import folder_of, name_of

    path = folder_of(given, "--model")
    name = name_of(str(path))
    if name is not None:
        return str(name), preset_of_folder(str(path)), load_tokenizer(path)
    path = path.resolve()
    return str(path), HfFolder(path).describe(), load_tokenizer(path)


def write_files(folder: Path, model: tuple[str, ModelPreset, Tokenizer] | None) -> None:
    """Write all files into an existing folder. If the tokenizer has a chat template, the prompts
    are messages."""
    for name in (*PROMPT_FILES, "reward.py"):
        shutil.copyfile(TEMPLATES / name, folder / name)
    if model is None:
        from gspo_megatron.data import character_tokenizer

        lines = (folder / PROMPT_FILES[0]).read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        character_tokenizer.write_character_tokenizer(
            folder / "tokenizer", prompts, VOCABULARY, **character_tokenizer.CHATML_SYMBOLS
        )
    if model is None or model[2].chat_template is not None:
        for name in PROMPT_FILES:
            text = (folder / name).read_text(encoding="utf-8")
            rows = [json.loads(line) for line in text.splitlines()]
            for row in rows:
                row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = (TEMPLATES / "run.sh").read_text(encoding="utf-8")
    for mark, text in (("@PYTHON@", shlex.quote(sys.executable)), ("@SBATCH@", sbatch_line())):
        script = script.replace(mark, text)
    (folder / "run.sh").write_text(script, encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    (folder / "config.yaml").write_text(commented_yaml(settings(model)), encoding="utf-8")


def settings(model: tuple[str, ModelPreset, Tokenizer] | None) -> dict[str, dict[str, Any]]:
    """Return the keys that a first run needs, by section."""
    rate, longest, tokenizer, start = 3e-3, 8, "tokenizer", {"preset": "tiny"}
    if model is not None:
        path, preset, _ = model
        rate, tokenizer, start = 1e-6, path, {"hf_path": path}
        longest = min(256, preset.max_sequence_length // 2)
    clip = float(f"{CLIP_OF_ONE_TOKEN / math.sqrt(longest):.2g}")
    return {
        "model": start,
        "parallel": {"layout": "tp=1"},
        "data": {
            "prompts": PROMPT_FILES[0],
            "eval_prompts": PROMPT_FILES[1],
            "tokenizer": tokenizer,
        },
        "rollout": {
            "group_size": 8,
            "prompts_per_step": 10,
            "max_response_tokens": longest,
            "temperature": 1.0,
        },
        "reward": {"import_path": "reward:reward", "options": {"partial": 0.2}},
        "objective": {"name": "gspo", "mini_batches": 2, "clip_low": clip, "clip_high": clip},
        "optimizer": {"learning_rate": rate, "warmup_steps": 2},
        "training": {
            "steps": 40,
            "precision": "fp32" if model is None else "bf16",
            "evaluation_interval": 10,
        },
        "checkpoint": {"interval": 10, "keep_last": 2},
        "logging": {"dir": "run"},
    }


def commented_yaml(values: dict[str, dict[str, Any]]) -> str:
    """Return the configuration as YAML, with the schema's description above each key."""
    from gspo_megatron.config.load import dump_yaml
    from gspo_megatron.config.schema import Config
    from gspo_megatron.config.section import keys_of

    meanings = {name: info.description or "" for name, info in keys_of(Config).items()}
    lines = [
        "# gspo-megatron check --keys [WORD] explains all keys. Relative paths start at the",
        "# current folder; an input that is not found there is looked for beside this file.",
    ]
    for section, keys in values.items():
        lines.append(f"{section}:")
        for name, value in keys.items():
            key = f"{section}.{name}"
            text = f"{meanings[key]}. {NOTES[key]}" if key in NOTES else meanings[key]
            lines += textwrap.wrap(text, 98, initial_indent="  # ", subsequent_indent="  # ")
            lines += [f"  {line}" for line in dump_yaml({name: value}).splitlines()]
    return "\n".join(lines) + "\n"


def sbatch_line() -> str:
    """Return the command that submits the run from its folder. It names the batch script of this
    checkout."""
    script = Path(__file__).resolve().parents[2] / BATCH_SCRIPT
    shown = shlex.quote(str(script)) if script.is_file() else f"PATH_TO_REPOSITORY/{BATCH_SCRIPT}"
    gpus = "--nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --time=24:00:00"
    return f"sbatch {gpus} {shown} config.yaml"
