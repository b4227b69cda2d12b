"""Loading of configurations: files, overrides, problems of the schema, and a round trip through
YAML."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_megatron.config import (
    Config,
    load_config,
    parse_config,
    recomputes_old_logprobs,
    to_shown_yaml,
    to_yaml,
)
from gspo_megatron.config.load import STAGES, load_any_config, override, stage_of
from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig
from gspo_megatron.config.yaml12 import dump_yaml, parse_yaml
from gspo_megatron.errors import ConfigError

MINIMAL = "data: {tokenizer: letters.model}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_a_file_with_only_a_tokenizer_gets_all_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.data.tokenizer == "letters.model"
    assert (config.model.preset, config.objective.name) == ("tiny", "gspo")
    # In bf16, "auto" recomputes the old log-probs.
    assert config.objective.old_logprobs == "auto" and recomputes_old_logprobs(config)
    assert (config.rollout.group_size, config.rollout.prompts_per_step) == (8, 16)
    assert config.training.precision == "bf16"
    # A section whose keys are all commented out also has its defaults.
    assert config == load_config(write(tmp_path, MINIMAL + "training:\nparallel:\n"))


def test_run_folder_is_named_after_the_file_unless_given(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL, "my_run.yaml")
    assert load_config(path).logging.dir == "runs/my_run"
    assert load_config(path, ["logging.dir=elsewhere"]).logging.dir == "elsewhere"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("training:\n  steps: 3\n bad: x\n", ":3:2: not valid YAML"),
        ("training:\n\tsteps: 3\n", ":2:1: not valid YAML"),
        ("a: 1\n---\nb: 2\n", ":2:1: not valid YAML"),
        ("? [a]\n: 1\n", ":1:3: not valid YAML"),
        ("a: \x01", "not valid YAML"),
        ("a: !!int abc", "not valid YAML"),
        ("a: !!bool 3", "not valid YAML"),
        ("a: !!timestamp 1", "not valid YAML"),
        (f"a: {'9' * 5000}", "not valid YAML"),
        (f"a: {'[' * 3000}", "not valid YAML"),
        ("a: &x [*x]\n", ":1:4: not valid YAML: an alias inside of its own value"),
        ("# nothing but a comment\n", "empty"),
        ("[1, 2]\n", "must be a mapping of sections"),
        ("just words\n", "must be a mapping of sections"),
    ],
)
def test_unusable_files_are_refused_with_their_place(tmp_path: Path, text: str, where: str) -> None:
    path = write(tmp_path, text)
    (line,) = problems_of(path)
    assert line.startswith(str(path))
    assert where in line


def test_missing_file_folder_and_binary_file_are_refused(tmp_path: Path) -> None:
    assert "no such configuration file" in problems_of(tmp_path / "absent.yaml")[0]
    assert "is a folder; name the configuration file in it" in problems_of(tmp_path)[0]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\xd0")
    assert "not a text file" in problems_of(tmp_path / "binary")[0]
    # Problems of overrides are reported together with the missing file.
    assert len(problems_of(tmp_path / "absent.yaml", "nonsense", "a.b=[1")) == 3


def test_every_duplicate_key_is_reported_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "training:\n  steps: 3\n  steps: 4\ndata: {}\n")
    assert sorted(problems_of(path)) == [
        f"{path}:4:3: steps appears twice, first on line 3",
        f"{path}:5:1: data appears twice, first on line 1",
    ]


def test_anchors_and_merge_keys_work_and_are_no_duplicates(tmp_path: Path) -> None:
    text = "data: {tokenizer: t}\nreward: {options: {a: &x {k: 1, l: 2}, b: {<<: *x, k: 3}}}\n"
    assert load_config(write(tmp_path, text)).reward.options == {
        "a": {"k": 1, "l": 2},
        "b": {"k": 3, "l": 2},
    }
    # `d`, which is read before the deeper `c`, writes merged keys into `c`
    values = parse_yaml("a: &a {k: 1, l: 3}\nb: {c: &c {<<: *a, k: 2}}\nd: {<<: *c}\n", "x")
    assert values["d"] == values["b"]["c"] == {"k": 2, "l": 3}


def _laughs(first: str, each: str, levels: int) -> str:
    """A document of many levels. Each level refers nine times to the level before it."""
    rows = [f"    x0: &a0 {first}"]
    for level in range(1, levels):
        rows.append(f"    x{level}: &a{level} " + each.replace("*", f"*a{level - 1}"))
    return MINIMAL + "reward:\n  options:\n" + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("first", "each"),
    [
        ("[z, z, z, z, z, z, z, z, z]", f"[{', '.join('*' * 9)}]"),
        ("{k: 1, l: 2}", f"{{<<: [{', '.join('*' * 9)}]}}"),
        ("z" * 60_000, f"[{', '.join('*' * 9)}]"),
    ],
)
def test_aliases_that_stand_for_very_much_are_refused_at_once(
    tmp_path: Path, first: str, each: str
) -> None:
    start = time.process_time()
    path = write(tmp_path, _laughs(first, each, 9))
    (line,) = problems_of(path)
    assert re.search(r":1:1: .* aliases stand for [\d,]+ values; allowed: 100,000 at most", line)
    assert time.process_time() - start < 5
    options = load_config(write(tmp_path, _laughs(first, "[*]", 3))).reward.options
    assert list(options) == ["x0", "x1", "x2"]


def test_a_long_file_without_aliases_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_megatron.config.yaml12.MOST_VALUES", 1000)
    assert len(parse_yaml("a: [" + "z, " * 2000 + "z]", "x")["a"]) == 2001
    with pytest.raises(ConfigError, match=r"stand for 1,024 values; allowed: 1,000 at most"):
        parse_yaml("a: &a [" + "z, " * 100 + "z]\nb: [" + "*a, " * 8 + "*a]", "x")


def test_scalars_are_read_as_people_mean_them(tmp_path: Path) -> None:
    text = MINIMAL + (
        # YAML 1.1 would read both values as false.
        "routing: {replay: off, reference_replay: off}\n"
        "optimizer: {learning_rate: 1e-4}\n"  # YAML 1.1 would read this as a string
        "reward: {options: {time: 12:30:00, answer: yes, day: 2024-01-02, mode: 017, x: -2.5}}\n"
    )
    config = load_config(write(tmp_path, text))
    assert config.routing.replay == config.routing.reference_replay == "off"
    assert config.optimizer.learning_rate == 1e-4
    assert config.reward.options == {
        "time": "12:30:00",
        "answer": "yes",
        "day": "2024-01-02",
        "mode": "017",
        "x": -2.5,
    }


@pytest.mark.parametrize(
    ("overrides", "path", "expected"),
    [
        (["training.steps=7"], "training.steps", 7),
        (["model.megatron.num_layers=8"], "model.megatron", {"num_layers": 8}),
        (["rollout.stop=['a', \"\\n\"]"], "rollout.stop", ["a", "\n"]),
        (["objective.clip_low=3e-4"], "objective.clip_low", 3e-4),
        (["objective.clip_low="], "objective.clip_low", None),
        (["data.prompts="], "data.prompts", None),
        (["data.prompts=a=b.jsonl"], "data.prompts", ["a=b.jsonl"]),
        (["data.prompts=[a.jsonl, b.jsonl]"], "data.prompts", ["a.jsonl", "b.jsonl"]),
        (["training.steps=1", "training.steps=2"], "training.steps", 2),
        (["reward.import_path=pkg.rewards:mine"], "reward.import_path", "pkg.rewards:mine"),
        (["parallel.layout=tp=2,pp=2"], "parallel.pipeline_model_parallel_size", 2),
    ],
)
def test_overrides_reach_any_depth(
    tmp_path: Path, overrides: list[str], path: str, expected: object
) -> None:
    value: object = load_config(write(tmp_path, MINIMAL), overrides)
    for part in path.split("."):
        value = getattr(value, part)
    assert value == expected


def test_overrides_of_another_form_and_below_a_scalar_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "training: {steps: 5}\n")
    wrong = ["training.steps", "steps=3", "=3", "training.=3", ".steps=3", "model={preset: x}"]
    assert problems_of(path, *wrong, "training.steps.more=1") == [
        *(f"override {override!r}: not of the form section.key=value" for override in wrong),
        "override 'training.steps.more=1': training.steps is 5, which has no keys below it",
    ]


@pytest.mark.parametrize("text", ["Solve #1: {a}", "# Task", "[a] # b", '"a" # é', "\n#"])
def test_an_override_that_a_comment_would_cut_off_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, MINIMAL)
    [line] = problems_of(path, f"data.template={text}")
    start, told, quoted = line.partition('" #" begins a comment in YAML; with quotes it is text: ')
    assert start == f"override {f'data.template={text}'!r}: " and told
    assert load_config(path, [quoted]).data.template == text.strip()
    for given in ("'a #b' ", "a#b"):
        assert load_config(path, [f"data.template={given}"]).data.template == given.strip(" '")


def test_all_schema_and_override_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = """
trianing: {steps: 5}
model: {preset: tinny, megatron: [1]}
data: {prompts: p.jsonl}
rollout: {temperature: 0.0, group_size: "8", stop: [a, 3]}
objective: {name: gsop, clip_low: 1.0}
training: {learning_rate: 1.0, stepz: 1}
parallel: 4
"""
    lines = problems_of(write(tmp_path, text), "training.seed=-1", "training.steps.x", "a.b=[")
    named = """data.tokenizer model.megatron model.preset objective.clip_low objective.name
        override override parallel rollout.group_size rollout.stop[1] rollout.temperature
        training.learning_rate training.seed training.stepz trianing"""
    assert sorted(re.split(r"[ :]", line)[0] for line in lines) == named.split()


@pytest.mark.parametrize(
    ("override", "wrong"),
    [
        ("training.stpes=5", "unknown key; did you mean steps?"),
        ("rollout.vlm={}", "unknown key; did you mean vllm?"),
        ("training.clip_grad=1.0", "unknown key; did you mean optimizer.clip_grad?"),
        (
            "routing.xyz=1",
            "unknown key; allowed: replay, reference_replay, store_on_host, volatility, "
            "rollout_noise",
        ),
        (
            "objective.name='gsop'",
            "unknown value; did you mean gspo? allowed: gspo, gspo_token, grpo, dapo, dr_grpo, "
            "cispo, sapo, gmpo, luspo, minirl, reinforce_leave_one_out, dppo_tv, dppo_kl, "
            "ipo, vespo",
        ),
        (
            "training.precision='int8'",
            "unknown value; allowed: fp64, fp32, bf16, fp8-delayed, fp8-blockwise, mxfp8",
        ),
        ("training.seed=2147483648", "must be less than 2147483648"),
        ("training.steps='many'", "must be a valid integer"),
        ("training.steps=true", "must be a valid integer"),
        ("training.steps=1.5", "must be a valid integer"),
        ("training.steps=-1", "must be greater than or equal to 0"),
        ("training.hang_timeout_seconds=9300000000", "must be less than or equal to 2000000"),
        ("reward.scale=0", "must be greater than 0"),
        ("optimizer.beta1=1.0", "must be less than 1"),
        ("data.shuffle=1", "must be a valid boolean"),
        ("data.tokenizer=''", "must have at least 1 character"),
        (
            "reward.import_path='no_colon'",
            "malformed; a custom reward function, package.module:function; replaces name",
        ),
        ("reward.options=5", "must be a mapping of keys, as in `key: value`"),
        ("reward.weights.correct='high'", "must be a valid number"),
    ],
)
def test_each_problem_is_one_line_with_key_value_and_what_is_legal(
    tmp_path: Path, override: str, wrong: str
) -> None:
    line = f"{override.replace('=', ' = ')}: {wrong}"
    assert problems_of(write(tmp_path, MINIMAL), override) == [line]


def test_one_path_is_written_as_it_was_given_and_several_as_a_list(tmp_path: Path) -> None:
    for value, written in (
        ("p.jsonl", "p.jsonl"),
        ("[p.jsonl]", "p.jsonl"),
        ("[p, q]", ["p", "q"]),
    ):
        config = load_config(write(tmp_path, MINIMAL), [f"data.prompts={value}"])
        assert config.model_dump()["data"]["prompts"] == written
        assert parse_config(config.model_dump()) == config


def test_unknown_sections_items_of_lists_and_no_number(tmp_path: Path) -> None:
    overrides = (
        "trianing.steps=1",
        "logging.trackers=[tensorbord]",
        "optimizer.learning_rate=.nan",
    )
    assert problems_of(write(tmp_path, MINIMAL), *overrides) == [
        "optimizer.learning_rate = nan: must be a finite number",
        "logging.trackers[0] = 'tensorbord': unknown value; did you mean tensorboard? allowed: "
        "tensorboard, wandb, mlflow",
        "trianing: unknown section; did you mean training?",
    ]


_CORRECTIONS = (
    "token_tis, icepop, kpop, token_k1_mask, token_k2_mask, token_k3_mask, sequence_tis, "
    "sequence_mask, sequence_product_tis, k3_mask, worst_token_mask"
)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("correction=trunc", f"correction = 'trunc': unknown value; allowed: none, {_CORRECTIONS}"),
        (
            "correction=[icepop, trunc]",
            f"correction[1] = 'trunc': unknown value; allowed: {_CORRECTIONS}",
        ),
        ("correction_low=-1", "correction_low = -1: must be greater than 0"),
        ("correction_low.icepop=x", "correction_low.icepop = 'x': must be a valid number"),
        (
            "correction_low={trunc: 1.0}",
            f"correction_low.trunc: unknown key; allowed: {_CORRECTIONS}",
        ),
        (
            "distillation.teachers.a.teachr=x",
            "distillation.teachers.a.teachr = 'x': unknown key; several teachers by name, each "
            "with teacher or url; NAME: {} stands for prompts that have no teacher",
        ),
        ("distillation.teachers={1: {}}", "distillation.teachers[1]: a key must be text"),
    ],
)
def test_a_value_that_may_have_several_forms_has_one_problem(
    tmp_path: Path, override: str, line: str
) -> None:
    told = problems_of(write(tmp_path, MINIMAL), f"objective.{override}")
    assert told == [f"objective.{line}"]


def test_an_unknown_key_of_a_phase_is_told_with_the_known_ones(tmp_path: Path) -> None:
    (line,) = problems_of(write(tmp_path, MINIMAL), "training.phases=[{from_step: 9}]")
    assert line.startswith("training.phases[0].from_step = 9: unknown key; phases of the run: each")


def test_an_empty_suite_of_a_file_is_not_replaced_by_another(tmp_path: Path) -> None:
    (tmp_path / "suites.yaml").write_text("a: {prompts: p.jsonl}\nb:\n")
    (line,) = problems_of(write(tmp_path, MINIMAL + "evaluation: {suites: {b: suites.yaml}}\n"))
    assert line.startswith("evaluation.suites.b = null: must be a mapping")


@pytest.mark.parametrize("name", ["z" * 300, "z" * 300 + ":a", r'"a\0b"'])
def test_a_file_of_suites_with_an_impossible_name_is_told(tmp_path: Path, name: str) -> None:
    (line,) = problems_of(write(tmp_path, MINIMAL), f"evaluation.suites.a={name}")
    assert line.startswith("evaluation.suites.a: ") and ": cannot be read: " in line


def test_missing_keys_keys_that_are_no_text_and_long_values(tmp_path: Path) -> None:
    (line,) = problems_of(write(tmp_path, "training: {steps: 1}\n"))
    assert line.startswith("data.tokenizer: required and missing; a sentencepiece .model file")
    lines = problems_of(write(tmp_path, "1: x\n" + MINIMAL + "model: {2: y}\n"))
    assert lines == ["model[2]: a key must be text", "1: a key must be text"]
    (line,) = problems_of(write(tmp_path, MINIMAL), "training.steps=" + "x" * 500)
    assert line.startswith("training.steps = 'xxx") and "xxx...: " in line
    # A long value is cut, such as the contents of a file in place of its path. Only a long path is
    # shown whole.
    assert len(line) < 280


def test_yaml_round_trip_keeps_everything(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, MINIMAL),
        [
            "parallel.layout=tp=2,pp=2,ep=2",
            "model.megatron={num_layers: 8, layernorm_epsilon: 1e-6}",
            'rollout.stop=["\\n", "off", "yes", "1e-6", "null", "é", "12:30"]',
            "optimizer.learning_rate=1e-6",
            "reward.options={strict: true, note: 'yes'}",
            "logging.trackers=[tensorboard]",
        ],
    )
    again = load_config(write(tmp_path, to_yaml(config), "other.yaml"))
    assert again == config
    assert to_yaml(again) == to_yaml(config)
    # In YAML 1.1, `off` or `yes` without quotes is a boolean. A reader of YAML 1.1 must get the
    # same values.
    assert yaml.safe_load(to_yaml(config)) == config.model_dump()


def test_names_that_nothing_reads_are_not_shown_as_values(tmp_path: Path) -> None:
    minimal = write(tmp_path, MINIMAL)
    custom = load_config(minimal, ["environment.import_path=games:Game", "reward.name=math"])
    plain = load_config(minimal)
    assert to_shown_yaml(plain, {}) == to_yaml(plain)
    shown = to_shown_yaml(custom, {"reward.name": "the environment gives the rewards"})
    assert "  # name: not read; environment.import_path replaces it\n" in shown
    assert "  # name: not read; the environment gives the rewards\n" in shown
    read = yaml.safe_load(shown)
    assert "name" not in read["environment"] and "name" not in read["reward"]
    assert read["objective"]["name"] == custom.objective.name
    again = load_config(write(tmp_path, to_shown_yaml(custom, {}), "other.yaml"))
    assert again == custom


def test_the_name_of_an_objective_is_read_beside_an_own_one(tmp_path: Path) -> None:
    """Its advantage serves the own objective, too."""
    words = ["objective.name=dr_grpo", "objective.import_path=mine:loss"]
    config = load_config(write(tmp_path, MINIMAL), words)
    shown = to_shown_yaml(config, {})
    assert yaml.safe_load(shown)["objective"]["name"] == "dr_grpo"
    assert load_config(write(tmp_path, shown, "other.yaml")) == config


def test_loading_and_checking_takes_less_than_half_a_second(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    start = time.process_time()  # CPU time, because other work on the machine must not count
    load_config(path)
    assert time.process_time() - start < 0.5


def test_neither_a_configuration_nor_the_given_values_are_changed() -> None:
    values = {"data": {"tokenizer": "t"}, "parallel": {"layout": "tp=2"}}
    config = parse_config(values, ["parallel.layout=tp=4", "data.prompts=p"])
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 3
    assert values == {"data": {"tokenizer": "t"}, "parallel": {"layout": "tp=2"}}


def test_one_chunk_a_stage_is_no_interleaving() -> None:
    for layout in ("pp=2,vpp=1", "vpp=1"):
        config = parse_config({"data": {"tokenizer": "t"}, "parallel": {"layout": layout}})
        assert config.parallel.virtual_pipeline_model_parallel_size is config.layout().vpp is None


TOKENIZER = {"tokenizer": "t"}


@pytest.mark.parametrize(
    ("values", "stage"),
    [
        ({"data": {"prompts": "p", **TOKENIZER}}, "rl"),
        ({"data": {"examples": "e", **TOKENIZER}}, "sft"),
        ({"data": {"train": ["c"], **TOKENIZER}}, "pretrain"),
        # The kind of data decides the stage. The schema then reports the keys that this stage
        # lacks.
        ({"data": {"examples": "e"}, "rollout": {"group_size": 4}}, "sft"),
        ({"data": {"train": ["c"], "prompts": None}}, "pretrain"),
        # Without data, the other keys decide the stage.
        ({"data": TOKENIZER, "rollout": {}}, "rl"),
        ({"data": TOKENIZER, "training": {"keep_step_inputs": 3}}, "rl"),
        ({"data": TOKENIZER, "training": {"epochs": 2, "batch_size": 4}}, "sft"),
        ({"data": {"sequence_length": 8, **TOKENIZER}}, "pretrain"),
        ({"data": TOKENIZER, "optimizer": {"wsd_steps": 2}, "training": {"tokens": 9}}, "pretrain"),
    ],
)
def test_the_keys_tell_the_stage(values: dict[str, Any], stage: str) -> None:
    assert stage_of(values) == stage


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"data": {"prompts": "p", "examples": "e"}},
            "has training data for several stages: data.prompts (rl), data.examples (sft)",
        ),
        (
            {"data": {"sequence_length": 8}, "rollout": {}},
            "has keys of different stages: data.sequence_length (pretrain), rollout (rl)",
        ),
        (
            {"data": TOKENIZER, "export": {"hf_path": "out"}},
            "may be a configuration of sft or pretrain: allowed: one of data.examples (sft), "
            "data.train (pretrain), or give --stage",
        ),
        ({"data": TOKENIZER}, "may be a configuration of rl or sft or pretrain"),
        ({"data": "text", "colour": {"red": 1}}, "may be a configuration of rl or sft or pretrain"),
    ],
)
def test_where_they_do_not_they_are_named(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stage_of(values)
    (line,) = caught.value.problems
    assert line.startswith(told)


def test_a_resolved_configuration_is_of_the_same_stage(tmp_path: Path) -> None:
    inputs = {
        "prompts: p": Config,
        "examples: e": FineTuningConfig,
        "train: [c]": PretrainingConfig,
    }
    for given, schema in inputs.items():
        config = load_any_config(write(tmp_path, f"data: {{tokenizer: t, {given}}}"))
        assert type(config) is schema
        assert load_any_config(write(tmp_path, to_yaml(config), "resolved.yaml")) == config


def test_overrides_count_and_all_problems_come_together(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert isinstance(load_any_config(path, ["data.examples=e"]), FineTuningConfig)
    with pytest.raises(ConfigError) as caught:
        load_any_config(path, ["nonsense"])
    first, second = caught.value.problems
    assert first.startswith("override 'nonsense'") and second.startswith(f"{path}: may be")


def test_a_stage_that_is_said_is_what_the_file_is_read_as(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {prompts: x}\nrollout: {group_size: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load_any_config(path, ["training.epoch=2", "optimizer.decay=wds"], stage="sft")
    text = str(caught.value)
    assert "data.tokenizer: required and missing" in text
    assert "data.prompts = 'x': unknown key; did you mean prompt_field?" in text
    assert "rollout: unknown section" in text
    assert "training.epoch = 2: unknown key; did you mean epochs?" in text
    assert "optimizer.decay = 'wds': unknown value; did you mean wsd?" in text


@pytest.mark.parametrize(
    ("overrides", "recomputes"),
    [
        ((), False),
        (("training.precision=bf16",), True),
        (("training.precision=fp64",), True),  # the rollout engine computes in fp32, not in fp64
        (("rollout.engine=vllm",), True),
        (("routing.replay=r3",), True),
        (("routing.volatility=true",), True),
        (("routing.rollout_noise=0.1",), True),
        (("objective.correction=sequence_tis",), True),
        (("model.megatron.moe_expert_capacity_factor=2.0",), True),
        (("objective.old_logprobs=recompute",), True),
        (("objective.old_logprobs=rollout", "rollout.engine=vllm"), False),
    ],
)
def test_old_logprobs_are_computed_again_where_the_engines_may_differ(
    tmp_path: Path, overrides: tuple[str, ...], recomputes: bool
) -> None:
    path = write(tmp_path, MINIMAL)
    config = load_config(path, ("training.precision=fp32", *overrides))
    assert recomputes_old_logprobs(config) == recomputes


def test_every_character_comes_back_from_yaml_and_from_overrides() -> None:
    """The characters include those that YAML reads as the end of a line, and some with code points
    beyond 16 bits."""
    points = [*range(0x100), 0x3000, *range(0x2026, 0x202B), 0xFEFF, 0xFFFE, 0xFFFF, 0x1F600]
    texts = [text for c in map(chr, points) for text in (c, f"a{c}b", f"{c} ", f"word {c}\n x")]
    values = {"stop": texts, **{f"k{chr(c)}": c for c in points}}
    assert parse_yaml(dump_yaml(values), "x") == values
    written = override("rollout.stop", texts)
    assert parse_yaml(written.partition("=")[2], "x") == texts
    values = ["a\x85b", "\U0001f600", "\\ud83d\\ude00", "\u2028", "gspo", "off", "null", "true"]
    for value in (*values, "1e-3", "1.5", "/a/b c", ".5", "x: y", 3, 0.1, None):
        assert parse_yaml(override("a.b", value).partition("=")[2], "x") == value


@pytest.mark.parametrize("name", ["'a/b'", "2024"])
def test_names_of_suites_that_are_none_are_told(tmp_path: Path, name: str) -> None:
    override = f"evaluation.suites={{{name}: {{prompts: p}}}}"
    allowed = "allowed: letters, digits, _ and -, as in aime-24; a number in quotes"
    assert problems_of(write(tmp_path, MINIMAL), override) == [
        f"evaluation.suites: {name} cannot be the name of a suite; {allowed}"
    ]


@pytest.mark.parametrize(
    ("key", "value"), [("last", "'2024-1'"), ("first", "'2024-13'"), ("first", "20240101")]
)
def test_dates_that_are_none_are_told(tmp_path: Path, key: str, value: str) -> None:
    suite = f"{{prompts: p, filter: {{field: d, {key}: {value}}}}}"
    allowed = "not a date; allowed: 2025-01-31, 2025-01 or 2025"
    assert problems_of(write(tmp_path, MINIMAL), f"evaluation.suites={{a: {suite}}}") == [
        f"evaluation.suites.a.filter.{key} = {value}: {allowed}"
    ]


def test_dates_without_quotes_are_dates(tmp_path: Path) -> None:
    """Our reader gets a year as a number and a full date as text. PyYAML's own reader turns a full
    date into a date object. The filter is the same with both readers."""
    window = "{field: d, first: 2024, last: 2024-05-31}"
    path = write(
        tmp_path, MINIMAL + f"evaluation: {{suites: {{a: {{prompts: p, filter: {window}}}}}}}"
    )
    config = load_config(path)
    found = config.evaluation.suites["a"].filter
    assert (found.first, found.last) == ("2024", "2024-05-31")
    assert (
        load_config(write(tmp_path, to_yaml(config), "again.yaml")).evaluation == config.evaluation
    )
    assert parse_config(yaml.safe_load(path.read_text()), name="run") == config


@pytest.mark.parametrize(
    ("stage", "key", "command"), [("rl", "examples", "sft"), ("sft", "prompts", "train")]
)
def test_a_configuration_of_another_stage_is_told_by_its_command(
    tmp_path: Path, stage: str, key: str, command: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"data: {{tokenizer: t, {key}: a.jsonl}}\n")
    with pytest.raises(ConfigError) as told:
        load_config(path, (), STAGES[stage])
    (line,) = told.value.problems
    assert f"with data.{key} it is a configuration of `gspo-megatron {command}`; " in line
