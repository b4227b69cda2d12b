"""The start of a run: it continues from the checkpoints in its folder, or begins with given
weights."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gspo_megatron.checkpoint.branch import begin_branch
from gspo_megatron.checkpoint.convert_source import find_checkpoint
from gspo_megatron.checkpoint.folder import (
    CHECKPOINTS,
    REFERENCE,
    Position,
    Publication,
    remove_leftovers,
)
from gspo_megatron.checkpoint.manifest import MANIFEST, files_below, find_damage, record_of
from gspo_megatron.checkpoint.resume import (
    candidates,
    check_given,
    finished_text,
    given_checkpoint,
    preview,
    weights_fit,
)
from gspo_megatron.checkpoint.run_lock import RunLock
from gspo_megatron.checkpoint.run_state import (
    CONFIG_FILE,
    MODEL_FILE,
    STATE_FILE,
    RunState,
    describe_model,
    fingerprints,
    versions,
)
from gspo_megatron.config import Config, parse_config, to_yaml
from gspo_megatron.errors import ConfigError, DataError, UserError
from gspo_megatron.families.model_shape import checkpoint_model_file


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "p.jsonl").write_text("{}")
    (tmp_path / "t.model").write_text("t")
    return parse_config(
        {
            "data": {"prompts": str(tmp_path / "p.jsonl"), "tokenizer": str(tmp_path / "t.model")},
            "training": {"steps": 9},
            "logging": {"dir": str(tmp_path / "run")},
        }
    )


def state_at(config: Config, position: Position) -> RunState:
    rollouts = {"metrics": {}} if position.rolled_out else None
    return RunState(
        phase=position.phase,
        step=position.step,
        trainer={},
        loader={},
        fingerprints=fingerprints(config),
        layout="tp=1",
        world_size=1,
        versions=versions(),
        metrics={"loss": 0.1 + 0.2},
        rollouts=rollouts,
    )


def add(config: Config, position: Position, **of_state: Any) -> Path:
    """Add a checkpoint without tensors. `of_state`: fields of its RunState."""
    state = dataclasses.replace(state_at(config, position), **of_state)
    publication = Publication(Path(str(config.logging.dir)) / CHECKPOINTS, position.name)
    publication.begin()
    contents = {
        STATE_FILE: state.dump(),
        CONFIG_FILE: to_yaml(config).encode(),
        MODEL_FILE: json.dumps(describe_model(config, 48)).encode(),
        "model/__0_0.distcp": b"weights",
    }
    for name, content in contents.items():
        path = publication.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    folder = publication.folder
    return publication.publish({name: record_of(folder / name) for name in files_below(folder)})


def changed(config: Config, *overrides: str) -> Config:
    return parse_config(config.model_dump(exclude_unset=True), overrides)


def with_phases(config: Config, *phases: dict[str, Any]) -> Config:
    values = config.model_dump(exclude_unset=True)
    values["training"] = {**values["training"], "phases": list(phases)}
    values["checkpoint"] = {"interval": 1}
    return parse_config(values)


def test_a_state_comes_back_as_it_was(config: Config) -> None:
    path = add(config, Position("rl", 3, True))
    assert RunState.read(path) == state_at(config, Position("rl", 3, True))
    (path / STATE_FILE).write_text('{"phase": "rl"}')
    with pytest.raises(DataError, match="another version"):
        RunState.read(path)


def test_an_absent_or_empty_folder_is_a_new_run(config: Config) -> None:
    folder = Path(str(config.logging.dir))
    for fresh in (False, True):
        assert preview(config, fresh=fresh).checkpoint is None
    (folder / CHECKPOINTS).mkdir(parents=True)
    (folder / CHECKPOINTS / ".partial-rl_00000001-00").mkdir()
    assert preview(config, fresh=False).checkpoint is None
    with pytest.raises(UserError, match=f"--fresh: {folder} is not empty"):
        preview(config, fresh=True)


def test_the_newest_is_the_one_that_the_run_reached_last(config: Config) -> None:
    for position in (Position("rl", 2), Position("sft", 700), Position("rl", 2, True)):
        path = add(config, position)
    found = preview(config, fresh=False)
    assert found.checkpoint == path
    assert found.state is not None and found.state.position == Position("rl", 2, True)
    assert not found.is_finished
    assert found.notes == [f"resuming from {path} at step 3 of 9"]


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_run_that_is_killed_while_it_replaces_its_only_checkpoint_resumes(
    config: Config, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """`done`: the number of folders that the run has renamed when it is killed."""
    path = add(config, Position("rl", 2), metrics={"loss": 1.0})
    renames, rename = [], Path.rename

    def dies(self: Path, target: Path) -> Path:
        if len(renames) == done:
            raise KeyboardInterrupt
        renames.append(self)
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", dies)
        add(config, Position("rl", 2), metrics={"loss": 2.0})
    # Programs that may not repair the folder, such as conversions, find the checkpoint too.
    run = path.parents[1]
    found = find_checkpoint(run)[0]
    assert find_damage(found) == [] and found.name.removeprefix(".replaced-") == path.name
    assert find_checkpoint(path)[0] == found == given_checkpoint(str(run))
    for given in (path, run, path.parent):
        assert checkpoint_model_file(str(given)) == found / MODEL_FILE
    assert preview(config, fresh=False).checkpoint == found
    branch = begin_branch(run, 2, ["training.steps=12"]).parent / CHECKPOINTS / path.name
    assert RunState.read(branch) == RunState.read(found)
    with RunLock() as lock:
        assert candidates(config, fresh=False, lock=lock) == [path]
    assert find_damage(path) == []
    assert RunState.read(path).metrics == {"loss": 2.0 if done == 2 else 1.0}
    remove_leftovers(path.parent)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    add(config, Position("rl", 2), metrics={"loss": 3.0})
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_change_begins_the_step_of_saved_responses_again(config: Config) -> None:
    """Saved responses depend on the old values. Their prompts and scores are not skipped."""
    before = {"loader": {"position": 4}, "reward_moments": {"count": 8.0}}
    after = {"loader": {"position": 8}, "reward_moments": {"count": 16.0}}
    path = add(config, Position("rl", 2, True), before_rollouts=before, **after)
    state = preview(config, fresh=False).state
    assert state is not None and state.rollouts is not None and state.loader == after["loader"]
    other = changed(config, "optimizer.learning_rate=0.5")
    with pytest.raises(ConfigError) as refused:
        preview(other, fresh=False, command=["gspo-megatron", "train", "a.yaml"])
    _, go_on, begin = str(refused.value).splitlines()  # one command in a line, to be copied
    assert go_on.endswith("from step 3: gspo-megatron train a.yaml --change")
    assert begin.startswith("or start a new run on its weights: gspo-megatron train a.yaml ")
    start = preview(other, fresh=False, change=True)
    assert start.checkpoint == path and start.begins_phase and start.next_step == 3
    assert start.state is not None and start.state.rollouts is None
    found = {"loader": start.state.loader, "reward_moments": start.state.reward_moments}
    assert found == before


def test_many_damaged_files_do_not_fill_the_screen(config: Config) -> None:
    whole = add(config, Position("rl", 1))
    damaged = add(config, Position("rl", 2))
    for number in range(50):
        (damaged / f"foreign{number:02d}").touch()
    notes = preview(config, fresh=False).notes
    assert len(notes) == 10
    assert "42 more files" in notes[8]
    assert notes[-1] == f"resuming from {whole}, the newest undamaged checkpoint, at step 2 of 9"


@pytest.mark.parametrize("name", [STATE_FILE, CONFIG_FILE, MODEL_FILE])
def test_an_altered_small_file_is_damage_and_no_other_run(config: Config, name: str) -> None:
    """The contents of these files decide how the run goes on. So an altered one must not be taken
    for the record of a run with other inputs or of another version."""
    used, damaged = (add(config, Position("rl", step)) for step in (3, 6))
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(content)
    start = preview(config, fresh=False)
    assert start.checkpoint == used
    assert start.notes[0].startswith(f"checkpoint rl_00000006 is damaged and not used: {name}: alt")


def test_without_an_undamaged_checkpoint_nothing_begins_anew_unasked(config: Config) -> None:
    for step in (1, 2):
        (add(config, Position("rl", step)) / MANIFEST).unlink()
    with pytest.raises(UserError) as caught:
        preview(config, fresh=False)
    *damage, last = str(caught.value).splitlines()
    told = "checkpoint rl_0000000{} is damaged and not used: manifest.json: missing"
    assert damage == [told.format(step) for step in (2, 1)]
    assert last.startswith(f"{config.logging.dir}: all checkpoints of this run are damaged")


@pytest.mark.parametrize(
    ("position", "steps", "finished"),
    [
        (Position("rl", 9), 9, True),
        (Position("rl", 9), 5, True),
        (Position("rl", 9), 10, False),
        (Position("rl", 8), 9, False),
        (Position("sft", 9), 9, False),
    ],
)
def test_when_a_run_is_finished(
    config: Config, position: Position, steps: int, finished: bool
) -> None:
    add(config, position)
    config = changed(config, f"training.steps={steps}")
    assert preview(config, fresh=False).is_finished == finished


@pytest.mark.parametrize(("unevaluated", "finished"), [(None, True), ({"loss": 0.5}, False)])
def test_a_run_whose_last_step_was_not_evaluated_is_not_finished(
    config: Config, unevaluated: dict[str, float] | None, finished: bool
) -> None:
    """The resumed run evaluates its last step. If the run counted as finished, the metrics of this
    evaluation would never be written."""
    add(config, Position("rl", 9), unevaluated=unevaluated)
    start = preview(config, fresh=False)
    assert start.is_finished == finished
    assert start.state is not None and start.state.unevaluated == unevaluated


@pytest.mark.parametrize(
    ("unevaluated", "goes_on"), [(None, (4, True)), ({"loss": 0.5}, (3, False))]
)
def test_a_phase_begins_when_the_last_step_before_it_is_evaluated(
    config: Config, unevaluated: dict[str, float] | None, goes_on: tuple[int, bool]
) -> None:
    """If the next phase began earlier, the checkpoint after the evaluation would have the values of
    the next phase, and the run could not be resumed from there."""
    config = with_phases(config, {"until_step": 3}, {"optimizer": {"learning_rate": 1e-3}})
    add(config, Position("rl", 3), unevaluated=unevaluated)
    start = preview(config, fresh=False)
    assert (start.next_step, start.begins_phase) == goes_on


def test_how_to_go_on_with_a_finished_run(config: Config) -> None:
    path = add(config, Position("rl", 9))
    state = RunState.read(path)
    said = finished_text(config, state)
    assert "9 of 9 steps" in said and "raise training.steps" in said
    assert f"model.checkpoint_path={path}" in said
    command = ["gspo-megatron", "train", "a.yaml", "training.steps=9", "training.seed=2"]
    advice = "gspo-megatron train a.yaml training.seed=2 training.steps=18"
    assert f"raise training.steps: {advice}\n" in finished_text(config, state, command)
    decaying = changed(config, "optimizer.decay=linear")
    assert "raise training.steps" not in finished_text(decaying, state)


def test_the_run_folder_may_be_the_current_folder(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = RunState.read(add(config, Position("rl", 9)))
    run = Path(str(config.logging.dir))
    monkeypatch.chdir(run)
    said = finished_text(changed(config, "logging.dir=."), state)
    assert f"logging.dir={run}-2" in said
    with pytest.raises(UserError, match="--from-step 3: . has no checkpoint of it; allowed: 9"):
        begin_branch(Path("."), 3, [])


def test_why_a_branch_cannot_be_made_is_told(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = add(config, Position("rl", 9)).parents[1]
    refusal = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(Path, "mkdir", mock.Mock(side_effect=refusal))
    with pytest.raises(UserError, match="-from-9: the branch cannot be made: Permission denied; "):
        begin_branch(run, 9, ["training.steps=12"])


@pytest.mark.parametrize("done", range(13))
def test_a_branch_is_made_again_by_the_command_that_was_killed(
    config: Config, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """`done`: the number of folders that the command has made or renamed, and of files that it has
    renamed, when it is killed."""
    saved, steps = add(config, Position("rl", 9)), []
    run = saved.parents[1]

    def dying(action: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            if len(steps) == done:
                raise KeyboardInterrupt
            steps.append(action)
            return action(*arguments, **options)

        return act

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for owner, name in ((Path, "mkdir"), (Path, "replace"), (Path, "rename"), (os, "replace")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        begin_branch(run, 9, ["training.steps=12"])
    folder = begin_branch(run, 9, ["training.steps=12"]).parent
    assert find_damage(folder / CHECKPOINTS / saved.name) == []


def test_the_records_of_a_branch_are_on_the_disk_before_its_checkpoint(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power, a branch with its checkpoint and without draws.jsonl would choose
    other prompts, without a word."""
    run = add(config, Position("rl", 9)).parents[1]
    names = ("metrics.jsonl", "draws.jsonl", "config.from_step_00000003.yaml")
    for name in names:
        (run / name).write_text('{"step": 2}\n')
    branch, fsync, rename = run.with_name("run-from-9"), os.fsync, Path.rename
    on_disk: list[int] = []  # numbers of inodes

    def noted(file: int) -> None:
        on_disk.append(os.fstat(file).st_ino)
        fsync(file)

    def renames(self: Path, target: Path) -> Path:
        if target == branch / CHECKPOINTS / "rl_00000009":
            assert {(branch / name).stat().st_ino for name in names} <= {*on_disk}
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renames)
    begin_branch(run, 9, ["training.steps=12"])
    assert (branch / CHECKPOINTS / "rl_00000009").is_dir()


def test_a_branch_whose_override_a_phase_replaces_is_refused(config: Config) -> None:
    """The branch would go on with the value of the phase, without a word."""
    faster = {"optimizer": {"learning_rate": 1e-3}}
    run = add(with_phases(config, {"until_step": 3}, faster), Position("rl", 3)).parents[1]
    override, branch = "optimizer.learning_rate=0.5", run.with_name("run-from-3")
    with pytest.raises(ConfigError) as caught:
        begin_branch(run, 3, [override])
    [line] = caught.value.problems
    assert line.startswith("optimizer.learning_rate: training.phases sets another value for step 4")
    assert not branch.exists()
    begin_branch(run, 3, [override, "training.phases=[]"])
    assert (branch / CHECKPOINTS / "rl_00000003").is_dir()


def test_a_branch_of_a_run_with_a_damaged_reference(config: Config) -> None:
    run = Path(str(config.logging.dir))
    add(config, Position("rl", 9))
    (run / CHECKPOINTS / REFERENCE).mkdir()
    with pytest.raises(UserError, match=f"{run}/checkpoints/reference: manifest.json: missing"):
        begin_branch(run, 9, ["training.steps=12"])


def test_prompt_files_may_move_and_not_change_places(config: Config, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("p.jsonl", "q.jsonl", "moved.jsonl")]
    for path, text in zip(paths, ("{}", "{ }", "{ }"), strict=True):
        path.write_text(text)
    names = [str(path) for path in paths]
    config = changed(config, f"data.prompts=[{names[0]}, {names[1]}]")
    add(config, Position("rl", 3))
    moved = changed(config, f"data.prompts=[{names[0]}, {names[2]}]")
    notes = "\n".join(preview(moved, fresh=False).notes)
    assert f"data.prompts: {names[:2]} -> {names[::2]}, with the same contents" in notes
    for other in (f"[{names[1]}, {names[0]}]", names[0]):
        with pytest.raises(ConfigError, match=r"data.prompts = .*: was \[.*, of other contents"):
            preview(changed(config, f"data.prompts={other}"), fresh=False)


def test_a_changed_prompt_file_is_refused(config: Config) -> None:
    add(config, Position("rl", 3))
    Path(config.data.prompts[0]).write_text("{} ")
    with pytest.raises(ConfigError, match="data.prompts = .*: its contents are not what they were"):
        preview(config, fresh=False)


OTHER_TOKENIZER = "data.tokenizer = .*: its contents are not what they were"


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize("is_there_before", [True, False])
def test_another_file_beside_a_tokenizer_file_is_refused(
    config: Config, tmp_path: Path, name: str, is_there_before: bool
) -> None:
    """The chat template and the ends of responses decide how a sentencepiece model is used."""
    file = tmp_path / name
    if is_there_before:
        file.write_text("{}")
    path = add(config, Position("rl", 3))
    assert preview(config, fresh=False).checkpoint == path
    (tmp_path / "other.json").write_text("{}")  # nothing reads this file
    assert preview(config, fresh=False).checkpoint == path
    file.write_text("{ }")
    with pytest.raises(ConfigError, match=OTHER_TOKENIZER):
        preview(config, fresh=False)


def test_other_ends_of_responses_in_a_tokenizer_folder_are_refused(
    config: Config, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    ends = folder / "generation_config.json"
    ends.write_text("{}")
    config = changed(config, f"data.tokenizer={folder}")
    add(config, Position("rl", 3))
    (tmp_path / "generation_config.json").write_text("{}")  # of another folder
    assert preview(config, fresh=False).checkpoint is not None
    ends.write_text("{ }")
    with pytest.raises(ConfigError, match=OTHER_TOKENIZER):
        preview(config, fresh=False)


def test_a_checkpoint_of_an_earlier_version_knows_no_files_beside_the_tokenizer(
    config: Config, tmp_path: Path
) -> None:
    known = fingerprints(config)
    old = {key: known[key] for key in ("data.prompts", "data.tokenizer")}
    path = add(config, Position("rl", 3), fingerprints=old)
    (tmp_path / "chat_template.jinja").write_text("{}")
    assert preview(config, fresh=False).checkpoint == path


def test_other_versions_are_told_of(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    now = versions()
    with monkeypatch.context() as patch:
        then = now | {"torch": "2.1", "gone": "1.0"}
        patch.setitem(state_at.__globals__, "versions", lambda: then)
        path = add(config, Position("rl", 3))
    assert preview(config, fresh=False).notes == [
        f"resuming from {path} at step 4 of 9",
        f"changed since then, and may change results: torch 2.1 -> {now['torch']}",
    ]


@pytest.mark.parametrize(
    "key", ["reward.import_path", "objective.import_path", "objective.advantage_import_path"]
)
def test_an_own_function_whose_file_has_changed_is_told_of(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The file is searched for as Python searches for a module, the current directory included."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    module = tmp_path / "own_package" / "functions.py"
    module.write_text("def function(first): ...")
    config = changed(config, f"{key}=own_package.functions:function")
    path = add(config, Position("rl", 3))
    assert preview(config, fresh=False).notes == [f"resuming from {path} at step 4 of 9"]
    module.write_text("def function(first): return 1.0")
    told = f"{key}: the code of 'own_package.functions:function'"
    assert preview(config, fresh=False).notes == [
        f"resuming from {path} at step 4 of 9",
        f"changed since then, and may change results: {told}",
    ]
    # A missing file gets no note, because the code that loads the function reports it.
    module.unlink()
    assert preview(config, fresh=False).notes == [f"resuming from {path} at step 4 of 9"]


def test_a_given_checkpoint_is_found_by_any_of_its_folders(config: Config, tmp_path: Path) -> None:
    add(config, Position("rl", 3))
    newest = add(config, Position("rl", 4))
    run = newest.parents[1]
    for path in (newest, run, run / CHECKPOINTS):
        assert given_checkpoint(str(path)) == newest
    with pytest.raises(DataError, match="no such folder"):
        given_checkpoint(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="holds no checkpoint of gspo-megatron"):
        given_checkpoint(str(tmp_path))


def test_given_weights_are_looked_at(config: Config) -> None:
    path = add(config, Position("rl", 4))
    new = changed(config, f"model.checkpoint_path={path}", "model.max_sequence_length=64")
    check_given(new, 48)
    (path / STATE_FILE).unlink()  # a checkpoint of weights alone is enough
    check_given(new, 48)
    with pytest.raises(ConfigError, match="model.vocab_size = 64: .* has 48"):
        check_given(new, 64)
    (path / "model" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(DataError, match="cut short"):
        check_given(new, 48)


def test_all_sizes_that_differ_are_told(config: Config) -> None:
    path = add(config, Position("rl", 4))
    model: dict[str, Any] = json.loads((path / MODEL_FILE).read_bytes())
    model["shape"] |= {"num_layers": 77, "tie_embeddings": not model["shape"]["tie_embeddings"]}
    (path / MODEL_FILE).write_text(json.dumps(model))
    with pytest.raises(ConfigError) as caught:
        weights_fit(path, config, 48)
    assert len(caught.value.problems) == 2
    shape = dataclasses.asdict(config.resolved_model())
    assert (
        f"model.megatron.num_layers = {shape['num_layers']}: {path} has 77" in caught.value.problems
    )
    (path / MODEL_FILE).write_text("[]")
    with pytest.raises(DataError, match="lacks the model's shape"):
        weights_fit(path, config, 48)


@pytest.mark.parametrize("below", [False, True])
def test_a_run_folder_that_cannot_be_one_is_refused(
    config: Config, tmp_path: Path, below: bool
) -> None:
    (tmp_path / "run").write_text("a file")
    folder = tmp_path / ("run/deeper/still" if below else "run")
    with pytest.raises(UserError) as caught:
        preview(changed(config, f"logging.dir={folder}"), fresh=False)
    assert str(caught.value) == f"logging.dir = {str(folder)!r}: {tmp_path}/run is not a folder"


def test_a_run_folder_that_may_not_be_written_is_refused(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # os.access is replaced, because root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UserError, match=f"logging.dir = .*: {tmp_path} may not be written"):
        preview(config, fresh=False)
