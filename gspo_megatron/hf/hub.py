"""Publishes a Hugging Face folder on the Hub, in one commit, with a model card that says how the
model was made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gspo_megatron.errors import DataError
from gspo_megatron.families.adapter_map import PEFT_CONFIG
from gspo_megatron.files import write_atomically
from gspo_megatron.hub import HubName, Kind, failures, name_of, parse_name, reason_of
from gspo_megatron.hub_splits import header_of

CARD = "README.md"
_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
# The keys of a configuration that are shown as the recipe of a run, by section.
_RECIPE = {
    "objective": ("name", "mini_batches"),
    "rollout": ("engine", "group_size", "prompts_per_step", "max_response_tokens", "temperature"),
    "reward": ("name", "import_path"),
    "environment": ("name", "import_path"),
    "preference": ("loss",),
    "optimizer": ("learning_rate",),
    "training": ("steps", "precision", "seed"),
}
_DATA = ("prompts", "examples", "preferences", "train")


def check_push(repo: str) -> None:
    """Raise DataError if the name of the repository is wrong or if there is no token."""
    from huggingface_hub import constants, get_token

    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise DataError(f"--push {repo}: not a name of the Hub; allowed: ORG/NAME")
    if constants.is_offline_mode():
        raise DataError(f"--push {repo}: HF_HUB_OFFLINE is set; unset it to push")
    if not get_token():
        raise DataError(
            f"--push {repo}: no token; set HF_TOKEN to a token of {constants.ENDPOINT} that may "
            "write"
        )


def push(folder: Path, repo: str, *, private: bool = True) -> str:
    """Push all files of a folder as one commit, and return the address of the repository. If the
    repository does not exist, create it, private by default. If the upload fails, no file of the
    repository changes. Raises DataError."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    check_push(repo)
    api, name = HfApi(), HubName("model", repo)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.create_commit(
            repo,
            [CommitOperationAdd(path.name, str(path)) for path in files],
            commit_message="Model of gspo-megatron",
        )
    except failures() as error:
        raise DataError(
            f"--push {repo}: nothing was pushed: {reason_of(error, name)}; {folder} is written"
        ) from None
    return f"{constants.ENDPOINT}/{repo}/tree/{commit.oid}"


def write_card(
    folder: Path,
    title: str,
    config: Mapping[str, Any],
    step: int | None,
    evaluation: Mapping[str, Any],
) -> Path:
    """Write README.md: where the weights come from, how they were trained, and with which data.

    config: the configuration of the run, as config.resolved.yaml has it. evaluation: metrics by
    name, as metrics.jsonl has them.
    """
    base = base_model(config)
    licence = licence_of(base)
    library = "peft" if (folder / PEFT_CONFIG).is_file() else "transformers"
    header: dict[str, Any] = {"library_name": library, "tags": ["gspo-megatron"]}
    if base is not None and (hub_name := _hub_name(base, "model")) is not None:
        header["base_model"] = hub_name.repo
    if licence is not None:
        header["license"] = licence
    data = _data(config)
    datasets = [_hub_name(each, "dataset") for each in data]
    if repos := [each.repo for each in datasets if each is not None]:
        header["datasets"] = list(dict.fromkeys(repos))
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False).strip(),
        "---",
        "",
        f"# {title}",
        "",
        "Trained with gspo-megatron" + ("." if step is None else f", {step} steps."),
        "",
        "## Base and licence",
        "",
        f"Base: {_source(base, 'model') if base else 'none, the weights began at random'}.",
        _licence_text(base, licence),
        "",
        "## Recipe",
        "",
        *_table(("key", "value"), _recipe(config)),
        "",
        "## Data",
        "",
        *([f"- {_source(each, 'dataset')}" for each in data] or ["Not named."]),
        "",
        "## Evaluation",
        "",
        *(_table(("metric", "value"), _scores(evaluation)) if evaluation else ["None was made."]),
        "",
    ]
    return write_atomically(folder / CARD, "\n".join(lines).encode())


def base_model(config: Mapping[str, Any]) -> str | None:
    """Return the model that the run began with, as a name of the Hub or a path; None: random
    weights."""
    model = config.get("model")
    model = model if isinstance(model, Mapping) else {}
    return model.get("hf_path") or model.get("checkpoint_path")


def licence_of(base: str | None) -> str | None:
    """Return the licence of a model, as its card names it; None if the card cannot be read."""
    if base is None:
        return None
    from huggingface_hub import HfApi

    name = _hub_name(base, "model")
    try:
        if name is None:
            licence = header_of((Path(base) / CARD).read_text(encoding="utf-8")).get("license")
        else:
            info: Any = HfApi().model_info(name.repo, revision=name.revision, timeout=30)
            licence = info.card_data.get("license")
    except (*failures(), AttributeError):  # then the new card says that the licence is not known
        return None
    return licence if isinstance(licence, str) else None


def _licence_text(base: str | None, licence: str | None) -> str:
    if licence is not None:
        return f"Licence of the base: {licence}. It binds this model too."
    if base is None:
        return "Licence: to be named by whoever publishes this model."
    return "Licence of the base: not known here. Look it up before the model is used or published."


def _data(config: Mapping[str, Any]) -> list[str]:
    section = config.get("data")
    section = section if isinstance(section, Mapping) else {}
    paths: list[str] = []
    for name in _DATA:
        value = section.get(name) or []
        paths += [value] if isinstance(value, str) else value
    return paths


def _recipe(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rows = []
    for section, keys in _RECIPE.items():
        values = config.get(section)
        if isinstance(values, Mapping):
            pairs = ((key, values.get(key)) for key in keys)
            rows += [(f"{section}.{key}", value) for key, value in pairs if value is not None]
    return rows


def _scores(evaluation: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, f"{value:.4g}")
        for name, value in evaluation.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]


def _table(header: tuple[str, str], rows: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [header, ("---", "---"), *rows]
    return [f"| {name} | {_escape(value)} |" for name, value in lines]


def _hub_name(value: str, kind: Kind) -> HubName | None:
    """Read a value of a run's configuration as a name of the Hub; None: a path. A run writes a name
    with its commit. So a value without a revision is a path, even if this machine lacks it."""
    name = name_of(value) or parse_name(value, kind)
    return None if name is None or name.revision is None else name


def _source(source: str, kind: Kind) -> str:
    """Return a name of the Hub unchanged. Of a path, return only the last part, because a card must
    not show the folders of a machine."""
    name = _hub_name(source, kind)
    return _escape(Path(source).name if name is None else name)


def _escape(value: Any) -> str:
    """Return a value as text for one line of Markdown, or for one cell of a table."""
    return " ".join(str(value).split()).replace("|", "\\|")
