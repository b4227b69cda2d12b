"""The keys that may change when a run continues, and the messages about all other changes."""

from __future__ import annotations

from gspo_megatron.config import Config, parse_config
from gspo_megatron.config.load import dump_yaml, parse_yaml
from gspo_megatron.config.resume import Changes, find_changes

VALUES = {"data": {"tokenizer": "t.model", "prompts": "p.jsonl", "eval_prompts": "e.jsonl"}}
SAME = {"data.tokenizer": True, "data.prompts": True, "data.eval_prompts": True}


def config(*overrides: str) -> Config:
    return parse_config(VALUES, overrides)


def changes(*overrides: str, before: Config | None = None, **contents: bool) -> Changes:
    stored = parse_yaml(dump_yaml((before or config()).model_dump()), "config.yaml")
    same = SAME | {f"data.{name}": value for name, value in contents.items()}
    return find_changes(stored, config(*overrides), same)


def test_all_that_shapes_a_run_is_refused_at_once() -> None:
    assert changes() == Changes()
    found = changes(
        "training.seed=2",
        "model.megatron.num_layers=4",
        "reward.options={a: 1}",
        "training.recompute=full",
    )
    assert found.refused == [
        "model.megatron.num_layers = 4: was null",
        "reward.options = {'a': 1}: was {}",
        "training.seed = 2: was 1",
    ]
    assert found.allowed == ["training.recompute: 'none' -> 'full'"]
    # named weights also end the default preset, which needs no line of its own
    assert changes("model.hf_path=x").refused == ["model.hf_path = 'x': was null"]


def test_where_and_how_fast_it_runs_is_harmless() -> None:
    found = changes(
        "parallel.tensor_model_parallel_size=2",
        "parallel.ddp.overlap_grad_reduce=true",
        "training.micro_batch_tokens=64",
        "training.evaluation_interval=3",
        "logging.dir=elsewhere",
        "checkpoint.interval=9",
        "rollout.batch_size=2",
        "model.megatron.recompute_num_layers=1",
    )
    assert found.refused == found.warned == [] and len(found.allowed) == 8


def test_of_a_path_the_contents_count() -> None:
    moved = "data.prompts=moved.jsonl"
    (line,) = changes(moved).allowed
    assert line == "data.prompts: 'p.jsonl' -> 'moved.jsonl', with the same contents"
    (line,) = changes(moved, prompts=False).refused
    assert line == "data.prompts = 'moved.jsonl': was 'p.jsonl', of other contents"
    (line,) = changes(prompts=False).refused
    assert line == "data.prompts = 'p.jsonl': its contents are not what they were"
    assert changes(eval_prompts=False) == Changes([], ["data.eval_prompts: its contents"])


def test_a_function_whose_file_has_changed_is_told_of() -> None:
    own = config("reward.import_path=mine:reward")
    same = {"reward.import_path": False}
    stored = parse_yaml(dump_yaml(own.model_dump()), "config.yaml")
    found = find_changes(stored, own, SAME | same)
    assert found == Changes(warned=["reward.import_path: the code of 'mine:reward'"])
    assert find_changes(stored, own, SAME | {"reward.import_path": True}) == Changes()
    other = config("reward.import_path=other:reward")
    (line,) = find_changes(stored, other, SAME | same).refused
    assert line == "reward.import_path = 'other:reward': was 'mine:reward'"


def test_a_file_that_was_not_read_before_is_another() -> None:
    found = find_changes(config("data.prompts=").model_dump(), config(), {"data.tokenizer": True})
    assert found.refused == ["data.prompts = 'p.jsonl': was null, of other contents"]


def test_more_steps_are_harmless_where_no_decay_ends_with_them() -> None:
    assert changes("training.steps=300").allowed == ["training.steps: 100 -> 300"]
    decaying = config("optimizer.decay=cosine")
    (line,) = changes("training.steps=300", "optimizer.decay=cosine", before=decaying).refused
    assert line == "training.steps = 300: was 100, and optimizer.decay = cosine ends there"


def test_keys_of_another_version() -> None:
    """A key that the earlier version lacked counts with its default. A key that this version lacks
    is refused, because the run cannot follow it."""
    before = config().model_dump()
    del before["rollout"]["top_k"], before["checkpoint"]
    before["rollout"]["beam_width"] = 3
    # the warm start ended before the first RL step, so this section is ignored
    before["training"]["warm_start"] = {"steps": 2}
    found = find_changes(before, config(), SAME)
    assert found == Changes(["rollout.beam_width: was 3 and is no key now"])
    # the earlier version recorded the preset as tiny; today it is null
    weights = config("model.hf_path=folder")
    older = weights.model_dump()
    older["model"]["preset"] = "tiny"
    assert find_changes(older, weights, SAME) == Changes()
    found = find_changes(before, config("rollout.top_k=5"), SAME)
    assert "rollout.top_k = 5: was 0" in found.refused


def test_a_teacher_may_move_but_neither_come_nor_go() -> None:
    key = "objective.distillation.url"
    here, there = f"{key}=http://a/v1", f"{key}=http://b/v1"
    found = changes(there, before=config(here))
    assert found == Changes(allowed=[f"{key}: 'http://a/v1' -> 'http://b/v1'"])
    assert changes(here).refused == [f"{key} = 'http://a/v1': was null"]
    assert changes(before=config(here)).refused == [f"{key} = null: was 'http://a/v1'"]
    named = "objective.distillation={{field: f, teachers: {{a: {{url: {}}}, b: {{teacher: t}}}}}}"
    found = changes(named.format("http://b/v1"), before=config(named.format("http://a/v1")))
    key = "objective.distillation.teachers.a.url"
    assert found == Changes(allowed=[f"{key}: 'http://a/v1' -> 'http://b/v1'"])
    found = changes(named.format("null"), before=config(named.format("http://a/v1")))
    assert found == Changes([f"{key} = null: was 'http://a/v1'"])


def test_what_counts_as_solved_is_harmless_where_it_chooses_no_prompts() -> None:
    other, chosen = "evaluation.correct_at=0.5", "data.selection.by=pass_rate"
    own = (chosen, "data.selection.correct_at=1.0")
    assert changes(other).allowed == ["evaluation.correct_at: 1.0 -> 0.5"]
    assert changes(*own, other, before=config(*own)).allowed
    found = changes(chosen, other, before=config(chosen))
    assert found == Changes(["evaluation.correct_at = 0.5: was 1.0"])
