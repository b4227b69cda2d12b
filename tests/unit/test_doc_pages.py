"""The pages recipes, coming_from, troubleshooting and limits, compared with the code."""

from __future__ import annotations

import ast
import json
import re
import signal
from pathlib import Path

import pytest
import yaml

from gspo_megatron.cli.check_inputs import check_run
from gspo_megatron.config.keys import list_keys
from gspo_megatron.config.load import STAGES, load_any_config
from gspo_megatron.config.section import sections_of
from gspo_megatron.process import failures
from gspo_megatron.process.heartbeat import HUNG
from tests.programs import ROOT, gspo

DOCS = ROOT / "docs"
PAGES = (
    "metrics",
    "how_a_step_works",
    "recipes",
    "campaigns",
    "coming_from",
    "troubleshooting",
    "limits",
)
KEYS = {key.name for stage in STAGES for key in list_keys(stage)}
SECTIONS = {name.partition(".")[0] for name in KEYS}
# In recipes.md, the first line of a block is "# FILE; N ranks[: X GB]".
HEAD = re.compile(r"# (\S+); (\d+) ranks?(?:: ([\d.]+) GB)?\n")
PRESETS = {1: "tiny", 16: "qwen3-30b-a3b", 32: "qwen3-30b-a3b", 256: "qwen3-235b-a22b"}
# The changes, the file that they change, the number of ranks, and the GB.
Recipe = tuple[str, str, int, "float | None"]


def read(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def test_a_page_begins_with_its_title() -> None:
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    assert [page.name for page in pages if not page.read_text("utf-8").startswith("# ")] == []


# --- keys -----------------------------------------------------------------------------------------


def ours(page: str) -> str:
    """The text of a page. For coming_from.md, only the cells with keys of this project."""
    text = read(page)
    if page != "coming_from":
        return text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    return "\n".join(cells[1] for cells in rows if len(cells) > 1)


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_names_exists(page: str) -> None:
    found = 0
    for code in re.findall(r"`([a-z_]+\.[a-z0-9_.]+(?:: ?[^`]*|=[^` ]*)?)`", ours(page)):
        name, value = re.fullmatch(r"([a-z0-9_.]+)[:=]? ?(.*)", code).groups()
        if name.partition(".")[0] not in SECTIONS:
            continue  # a file or a module
        assert name in KEYS, f"{name}: no such key"
        found += 1
        if value:
            section, _, field = name.partition(".")
            schemas = [sections_of(schema).get(section) for schema in STAGES.values()]
            [schema, *_] = [each for each in schemas if each and field in each.model_fields]
            if not any(f.is_required() for f in schema.model_fields.values()):
                schema(**{field: yaml.safe_load(value)})
    assert found > 0 or page == "limits"


def test_the_keys_of_trl_are_those_of_the_installed_version() -> None:
    """TRL's source is searched as text, because importing TRL takes half a minute."""
    site = Path(pytest.__file__).parents[1]
    sources = [site / "trl/trainer/grpo_config.py", site / "transformers/training_args.py"]
    if not all(path.is_file() for path in sources):
        pytest.skip("TRL is not installed")
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    fields = set(re.findall(r"^    (\w+): ", text, re.MULTILINE))
    table = read("coming_from").partition("## TRL")[2].partition("## verl")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert len(named) > 30 and named <= fields, named - fields


# --- configurations -------------------------------------------------------------------------------


def recipes() -> list[Recipe]:
    """The blocks of recipes.md."""
    found = []
    text = read("recipes")
    for body in re.findall(r"^```yaml[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        head = HEAD.match(body)
        assert head, f"no first line with file and ranks: {body}"
        found.append((body, head[1], int(head[2]), float(head[3]) if head[3] else None))
    return found


def merged(body: str, file: str, folder: Path) -> Path:
    """Write the complete configuration of a recipe to a file."""
    if file == "laptop.yaml":
        base = yaml.safe_load(recipes()[0][0])
    else:
        base = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
        base["model"].pop("hf_path")
        if (shape := ROOT / file).with_name("config.json").exists():
            base["model"]["hf_path"] = str(shape.parent)
    for section, values in yaml.safe_load(body).items():
        base[section] = base.get(section, {}) | values
    (folder / "config.yaml").write_text(yaml.safe_dump(base))
    return folder / "config.yaml"


def shape_of(file: str, ranks: int) -> list[str]:
    """Overrides with the sizes of the model, if its folder has no config.json."""
    has_own = (ROOT / file).with_name("config.json").exists()
    return [] if has_own else [f"model.preset={PRESETS[ranks]}"]


def label(recipe: Recipe) -> str:
    body, file, ranks, _ = recipe
    return f"{file}-{ranks}-{body.splitlines()[1]}"


@pytest.mark.parametrize("recipe", recipes(), ids=label)
def test_a_recipe_passes_the_check_at_its_size(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [reward] = re.findall(r'```python title="my_rewards.py"\n(.*?)```', read("recipes"), re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(reward)
    monkeypatch.chdir(tmp_path)  # rewards are looked up in the current directory
    body, file, ranks, _ = recipe
    words = shape_of(file, ranks)
    config = load_any_config(str(merged(body, file, tmp_path)), words, None)
    check_run(config, ranks, with_files=False)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [r for r in recipes() if r[3]], ids=label)
def test_the_memory_of_a_recipe_is_the_estimate(recipe: Recipe, tmp_path: Path) -> None:
    body, file, ranks, gigabytes = recipe
    words = ("--no-files", "--world-size", ranks, "--gpu-memory", 80)
    of_model = shape_of(file, ranks)
    said = gspo("check", merged(body, file, tmp_path), *of_model, *words).stdout
    found = int(re.search(r"worst_rank_bytes=(\d+)", said)[1])
    assert found / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_the_sections_of_coming_from_are_legal(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", read("coming_from"), re.MULTILINE | re.DOTALL)
    assert blocks
    for body in blocks:
        file = merged(body, "examples/qwen3_30b_a3b/config.yaml", tmp_path)
        config = load_any_config(str(file), ["model.preset=qwen3-30b-a3b"], None)
        check_run(config, 32, with_files=False)


# --- messages -------------------------------------------------------------------------------------


def messages() -> str:
    """All strings in the package, with … in place of values."""
    found = []
    for path in (ROOT / "gspo_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quoted() -> list[str]:
    """The messages in troubleshooting.md, from blocks of text and from tables of messages."""
    text = read("troubleshooting")
    blocks = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    tables = re.findall(r"^\| message \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    return lines + re.findall(r"^\| `([^`]+)` \|", "".join(tables), re.MULTILINE)


def test_every_quoted_message_is_one_of_the_code() -> None:
    known, by_pydantic = messages(), ("must be greater than or equal to 1", "training.stpes")
    lines = [line for line in quoted() if not any(word in line for word in by_pydantic)]
    assert len(lines) > 15
    for line in lines:
        for part in line.split("…"):
            assert part.strip(" ,;:=") in known, f"{part!r} of {line!r}"


def test_the_table_has_every_exit_code() -> None:
    page = read("troubleshooting")
    [table] = re.findall(r"^\| exit code \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    cells = [row.split("|")[1] for row in table.splitlines() if row]
    named = {int(number) for number in re.findall(r"\d+", " ".join(cells))}
    of_signals = {128 + number for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL)}
    own = {failures.DEFECT, failures.USER_ERROR, failures.STOPPED, failures.LOST_PEER, HUNG}
    assert named >= {0, *own, failures.INTERRUPTED, failures.UNREAD, *of_signals}


def test_the_examples_of_mistakes_are_told_so(tmp_path: Path) -> None:
    config = {"data": {"prompts": "p.jsonl", "tokenizer": "t"}}
    config |= {"rollout": {"group_size": 0}, "training": {"stpes": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))  # YAML includes JSON
    said = gspo("check", tmp_path / "config.json", expect=2).stderr.splitlines()
    blocks = re.findall(r"```text\n(.*?)```", read("troubleshooting"), re.DOTALL)
    [example] = [block for block in blocks if "stpes" in block]
    assert set(example.splitlines()) <= set(said)
