"""The command `prompts`: its report about a run, and the rows that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_megatron.config import load_config
from gspo_megatron.data.prompts import load_prompts
from gspo_megatron.data.selection import identity
from tests.unit.cli.conftest import Command, ConfigWriter

PROMPTS = ("ab", "ba", "cd", "dc", "ef")


@pytest.fixture
def run(write_config: ConfigWriter, tmp_path: Path) -> Path:
    """A run folder with five prompts. The first was never solved, the second always, the third in
    half of its responses, and the fourth more and more often. The fifth was never sampled."""
    config, folder = write_config(PROMPTS), tmp_path / "run"
    folder.mkdir()
    (folder / "config.resolved.yaml").write_text(config.read_text())
    prompts = load_prompts(tmp_path / "prompts.jsonl")
    lines = []
    for step, solved in ((1, (0, 4, 2, 1)), (2, (0, 4, 2, 3))):
        for row, count in enumerate(solved):
            record: dict[str, Any] = {
                "step": step,
                "prompt": identity(prompts[row]),
                "row_id": prompts[row].row_id,
                "responses": 4,
                "solved": count,
                "reward": count / 4,
                "length": 3.0,
                "spread": 0 < count < 4,
            }
            lines.append(json.dumps(record) + "\n")
    (folder / "draws.jsonl").write_text("".join(lines))
    return folder


def sections(out: str) -> dict[str, list[list[str]]]:
    """The words of each line below a title. The key is the beginning of the title."""
    blocks = [block.splitlines() for block in out.strip().split("\n\n")]
    return {block[0].partition(":")[0]: [line.split() for line in block[1:]] for block in blocks}


def test_what_is_told(gspo: Command, run: Path) -> None:
    code, out, _ = gspo("prompts", run)
    assert code == 0
    assert out.startswith("32 responses to 4 prompts in 8 groups, up to step 2; ")
    assert "rewards differ in 50.0% of the groups" in out
    found = sections(out)
    rates = {
        " ".join(line[:-2]): int(line[-2]) for line in found["pass rate of the last draw   prompts"]
    }
    assert rates == {
        "none solved": 1,
        "up to 25%": 0,
        "up to 50%": 1,
        "up to 75%": 1,
        "below 100%": 0,
        "all solved": 1,
    }
    names = {title: [line[-1] for line in lines[1:]] for title, lines in found.items()}
    assert names["hardest of those ever solved"] == ["prompts.jsonl:3", "prompts.jsonl:4"]
    assert names["dead"] == ["prompts.jsonl:2"]  # the folder has two files of this name
    assert "dead: never solved: 1 prompts" in out and "dead: always solved: 1 prompts" in out
    last = found["hardest of those ever solved"][-1]
    assert last == ["2", "50.0%", "75%", "0.500", "3.0", "2", "prompts.jsonl:4"]
    assert "saved" not in out
    _, out, _ = gspo("prompts", run, "--top", 1)
    assert "prompts.jsonl:4" not in out


def test_an_id_cannot_change_what_the_terminal_shows(gspo: Command, run: Path) -> None:
    records = [json.loads(line) for line in (run / "draws.jsonl").read_text().splitlines()]
    records[0]["row_id"] = records[4]["row_id"] = "\x1b[2Ja"
    (run / "draws.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    _, out, _ = gspo("prompts", run)
    assert "\x1b" not in out and "  \\x1b[2Ja\n" in out


def test_how_many_responses_are_saved(gspo: Command, run: Path) -> None:
    """A group has a spread if its rewards differ. Two of the ten groups that were drawn uniformly
    have a spread. All groups that the selection chose have a spread."""
    known = json.loads((run / "draws.jsonl").read_text().splitlines()[0])
    records = [known | {"step": 1, "spread": True}] * 7  # before the selection began
    records += [known | {"step": 2, "spread": n < 2, "explored": True} for n in range(10)]
    records += [known | {"step": 3, "spread": True}] * 30
    (run / "draws.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    _, out, _ = gspo("prompts", run)
    assert "from step 2: rewards differ in 80.0% of 40 groups, and in 20.0% of the 10 chosen" in out
    assert "uniform draws would take about 160 groups, so 75% of the responses are saved" in out
    # If uniform draws have a spread as often as chosen prompts, the selection saves nothing.
    records = [each | {"spread": True} for each in records]
    (run / "draws.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    _, out, _ = gspo("prompts", run)
    assert "would take about 40 groups, so none of the responses are saved" in out


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ((), [0, 1, 2, 3, 4]),
        (("--min-pass-rate", "0.01"), [1, 2, 3, 4]),
        (("--max-pass-rate", 0.99), [0, 2, 3, 4]),
        (("--min-pass-rate", 0.5, "--max-pass-rate", 0.5), [2, 4]),
        (("--min-pass-rate", 0.75, "--max-pass-rate", 0.75), [3, 4]),
    ],
)
def test_rows_are_kept_by_their_last_pass_rate(
    gspo: Command, run: Path, tmp_path: Path, bounds: tuple[object, ...], kept: list[int]
) -> None:
    out = tmp_path / "kept.jsonl"
    code, told, _ = gspo("prompts", run, "--write", out, *bounds)
    assert code == 0
    assert (
        f"kept.jsonl: {len(kept)} prompts, 1 of them without a pass rate; {5 - len(kept)} left"
        in told
    )
    assert [prompt.text for prompt in load_prompts(out)] == [PROMPTS[row] for row in kept]
    # The identity of a prompt does not change, so the next run recognises the prompt.
    before = [*map(identity, load_prompts(tmp_path / "prompts.jsonl"))]
    assert [*map(identity, load_prompts(out))] == [before[row] for row in kept]


def test_the_files_of_the_last_phase_are_read(gspo: Command, run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(
        '{"prompt": "ba", "answer": "ab", "more": ["\\ud800é"]}\n'
    )
    text = (run / "config.resolved.yaml").read_text()
    phase = run / "config.from_step_00000002.yaml"
    phase.write_text(text.replace("prompts.jsonl", "other.jsonl"))
    assert load_config(phase).data.prompts == [str(tmp_path / "other.jsonl")]
    assert gspo("prompts", run, "--write", tmp_path / "kept.jsonl")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "kept.jsonl").open()]
    # the whole row, also half a surrogate pair, which JSON can hold and UTF-8 cannot
    assert rows == [{"prompt": "ba", "answer": "ab", "more": ["\ud800é"]}]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--min-pass-rate", 0.5), "only with --write"),
        (("--write", "x", "--min-pass-rate", 1.5), "'1.5' is not a share of 0 to 1"),
        (("--write", "x", "--max-pass-rate", "nan"), "'nan' is not a share of 0 to 1"),
        (
            ("--write", "x", "--min-pass-rate", 0.6, "--max-pass-rate", 0.5),
            "--min-pass-rate 0.6: above --max-pass-rate 0.5",
        ),
        (("--write", "run/draws.jsonl"), "is there already; allowed: a new file"),
        (("--write", "prompts.jsonl/x"), "prompts.jsonl/x: cannot be written: "),
    ],
)
def test_mistakes(
    gspo: Command,
    run: Path,
    words: tuple[object, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.parent)
    code, _, err = gspo("prompts", run, *words)
    assert code == 2 and told in err


def test_bounds_that_leave_nothing(gspo: Command, run: Path, tmp_path: Path) -> None:
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "prompts.jsonl").write_text(lines[0])
    bounds = ("--write", tmp_path / "kept.jsonl", "--min-pass-rate", 0.5)
    code, _, err = gspo("prompts", run, *bounds)
    assert code == 2 and "no prompt is left; allowed: other bounds" in err
    assert not (tmp_path / "kept.jsonl").exists()


def test_a_record_without_rewards_and_one_that_is_being_written(gspo: Command, run: Path) -> None:
    path = run / "draws.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"step": 3, "pro')  # a run that is writing it, or was killed
    code, out, _ = gspo("prompts", run)
    assert code == 0 and "in 8 groups, up to step 2; " in out
    first = json.loads(whole.splitlines()[0])
    path.write_text(json.dumps(first | {"responses": 0, "solved": 0, "reward": None}) + "\n")
    code, out, _ = gspo("prompts", run)
    assert code == 0 and "no rewards" in out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "2"),
        ("prompt", None),
        ("solved", 0.5),
        ("reward", "high"),
        ("reward", None),
        ("length", None),
    ],
)
def test_a_record_that_no_run_has_written_is_named(
    gspo: Command, run: Path, name: str, value: object
) -> None:
    first, *lines = (run / "draws.jsonl").read_text().splitlines()
    wrong = json.dumps(json.loads(first) | {name: value})
    (run / "draws.jsonl").write_text("\n".join([*lines, wrong]) + "\n")
    code, _, err = gspo("prompts", run)
    assert code == 2
    assert err == f"{run}/draws.jsonl: the `{name}` of record 8 is missing or wrong\n"


def test_a_folder_without_draws(gspo: Command, tmp_path: Path) -> None:
    code, _, err = gspo("prompts", tmp_path)
    assert code == 2 and f"{tmp_path}/draws.jsonl: no groups of responses" in err
