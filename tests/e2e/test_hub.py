"""The way from a model's name on the Hub to a run, and back to the Hub, with the real commands,
client and files."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from gspo_megatron.data.character_tokenizer import CHATML_SYMBOLS, write_character_tokenizer
from gspo_megatron.data.tokenizers import load_tokenizer
from gspo_megatron.hub import folder_of
from tests.hub import TOKEN, SmallHub, files_of, small_hub, use_hub
from tests.programs import ROOT, command_environment, run_program
from tests.unit.hf.published import assert_same_bits, read_folder, write_model

BASE, ROWS, TRAINED = "org/base", "org/rows", "lab/trained"
VOCABULARY = 320
PROGRAM = (sys.executable, "-m", "gspo_megatron")
NAMES = (f"model.hf_path={BASE}", f"data.tokenizer={BASE}@main", f"data.prompts={ROWS}")
SMALL = (
    "data.chat_template=false",
    "training.precision=fp32",
    "rollout.prompts_per_step=4",
    "rollout.max_response_tokens=8",
)
CARD = b"---\nlicense: apache-2.0\n---\n# the base\n"


@dataclass
class Finished:
    """A run of two steps on two ranks, with the hub from which its model and data come."""

    hub: SmallHub
    home: Path
    folder: Path  # the current folder of the commands
    model: str  # the commit of the model; `rows` is the commit of the data
    rows: str
    downloads: list[str]  # the downloads of the run

    def gspo(self, *words: object, expect: int = 0, **environ: str) -> str:
        given = self.hub.environ(self.home, PYTHONPATH=str(ROOT), **environ)
        done = run_program(*PROGRAM, *words, expect=expect, environ=given, cwd=self.folder)
        assert TOKEN not in done.stdout + done.stderr
        return done.stderr if expect else done.stdout

    def train(self, *more: str) -> str:
        words = ("train", "my/config.yaml", *NAMES, *SMALL, "training.steps=2", *more)
        words += ("logging.dir=run", "logging.plots=false", "--nproc=2")
        return self.gspo(*words, HF_TOKEN=TOKEN)

    @property
    def run(self) -> Path:
        return self.folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("hub")
    source = write_model(folder / "source", "qwen3_moe", seed=9, vocab_size=VOCABULARY)
    write_character_tokenizer(source, ["Add 3 and 4: 7"], VOCABULARY, **CHATML_SYMBOLS)
    (source / "modeling_own.py").write_text("raise SystemExit('code of a stranger')")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    rows = [json.dumps({"prompt": f"Add {n} and {n}:", "answer": str(2 * n)}) for n in range(8)]
    with small_hub() as hub:
        card = {"license": "apache-2.0"}
        model = hub.add(BASE, {**files_of(source), "README.md": CARD}, card=card)
        splits = {"train.jsonl": "\n".join(rows).encode(), "test.jsonl": rows[0].encode()}
        found = Finished(hub, folder / "home", folder, model, hub.add(ROWS, splits, "dataset"), [])
        found.gspo("new", "my", "--model", BASE)
        hub.requests.clear()
        found.train(f"data.eval_prompts={ROWS}:test")
        found.downloads = hub.downloads()
        yield found


@pytest.mark.slow
def test_the_ranks_of_a_node_download_once_and_no_code(finished: Finished) -> None:
    """`new` has already downloaded the settings and the tokenizer."""
    names = [line.rpartition("/")[2] for line in finished.downloads]
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(names) == [*shards, "test.jsonl", "train.jsonl"]


@pytest.mark.slow
def test_the_commits_are_written(finished: Finished) -> None:
    config = yaml.safe_load((finished.run / "config.resolved.yaml").read_text())
    model, rows = f"{BASE}@{finished.model}", f"{ROWS}@{finished.rows}"
    assert config["model"]["hf_path"] == config["data"]["tokenizer"] == model
    assert config["data"]["prompts"] == rows
    assert config["data"]["eval_prompts"] == f"{ROWS}:test@{finished.rows}"
    commits = {f"models/{BASE}@main": finished.model, f"datasets/{ROWS}@main": finished.rows}
    assert json.loads((finished.run / "environment.json").read_text())["hub"] == commits
    assert json.loads((finished.run / "hub.json").read_text()) == commits
    written = yaml.safe_load((finished.folder / "my/config.yaml").read_text())
    assert written["model"]["hf_path"] == written["data"]["tokenizer"] == model


@pytest.mark.slow
def test_a_branch_that_moved_does_not_change_a_resumed_run(finished: Finished) -> None:
    repository = finished.hub.repositories[f"models/{BASE}"]
    moved = repository.commit({**repository.commits[finished.model], "config.json": b"{}"})
    rows = finished.hub.repositories[f"datasets/{ROWS}"]
    rows.commit({"train.jsonl": b'{"prompt": "another", "answer": "1"}'})
    finished.hub.requests.clear()
    try:
        finished.train(f"data.eval_prompts={ROWS}:test", "training.steps=3")
    finally:
        repository.branches["main"] = finished.model
        rows.branches["main"] = finished.rows
    assert finished.hub.requests == [] and moved != finished.model
    lines = (finished.run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 3
    config = yaml.safe_load((finished.run / "config.resolved.yaml").read_text())
    assert config["model"]["hf_path"] == f"{BASE}@{finished.model}"


@pytest.mark.full
def test_ranks_of_two_nodes_take_the_same_commits(finished: Finished) -> None:
    """The two ranks are started without our launcher. Each has a cache of its own."""
    hub, folder = finished.hub, finished.folder
    hub.requests.clear()
    words = ["train", "my/config.yaml", *NAMES, *SMALL, "training.steps=1", "logging.plots=false"]
    words += ["logging.dir=nodes", "data.eval_prompts=null", "training.evaluation_interval=0"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    ranks = []
    for rank in ("1", "0"):  # rank 1 starts first and waits
        given = hub.environ(folder / f"node_{rank}", **shared, RANK=rank)
        program = [*PROGRAM, *words]
        environ = command_environment() | given | {"PYTHONPATH": str(ROOT)}
        ranks.append(
            subprocess.Popen(program, env=environ, cwd=folder, stderr=subprocess.PIPE, text=True)
        )
    said = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    commits = json.loads((folder / "nodes/hub.json").read_text())
    assert commits[f"models/{BASE}@main"] == finished.model
    # one of the three requests is for `main`
    assert sum(f"/api/models/{BASE}" in line for line in hub.requests) == 3
    for rank in ("0", "1"):
        held = folder / f"node_{rank}/hub/models--org--base/snapshots/{finished.model}"
        assert len(list(held.glob("*.safetensors"))) == 3


@pytest.mark.full
def test_a_name_is_evaluated_on_a_split_of_a_dataset(finished: Finished) -> None:
    suite = (
        f"sums: {{prompts: '{ROWS}:test', max_response_tokens: 4, reward: {{name: exact_match}}}}"
    )
    (finished.folder / "suite.yaml").write_text(suite)
    assert "sums" in finished.gspo("evaluate", BASE, "--suite", "suite.yaml")
    run = finished.folder / "runs/evaluation-org-base"
    assert f"{ROWS}:test@{finished.rows}" in (run / "config.resolved.yaml").read_text()
    assert len((run / "evaluation.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_run_is_pushed_in_one_commit_and_reads_back(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = finished.hub
    words = ("convert", "megatron-to-hf", "run", "trained", "--push", TRAINED)
    hub.requests.clear()
    said = finished.gspo(*words, HF_TOKEN=TOKEN)
    assert f"{hub.url}/{TRAINED}/tree/" in said
    repository = hub.repositories[f"models/{TRAINED}"]
    assert repository.private
    assert sum(line.startswith("POST") and "/commit/" in line for line in hub.requests) == 1
    folder = finished.folder / "trained"
    assert repository.commits[repository.branches["main"]] == files_of(folder)
    card = (folder / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == BASE and header["license"] == "apache-2.0"
    assert header["datasets"] == [ROWS]
    assert "| objective.name | gspo |" in card and f"{ROWS}@{finished.rows}" in card
    assert "evaluation/reward" in card and TOKEN not in card and str(finished.folder) not in card
    written = [path for path in finished.folder.rglob("*") if path.is_file()]
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []
    use_hub(hub, finished.folder / "another", monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    back = folder_of(TRAINED, weights=True)
    assert_same_bits(read_folder(back), read_folder(folder))
    assert not (back / "modeling_own.py").exists() and load_tokenizer(back).vocab_size
