"""The command `check`: the problems that it finds in a configuration and its files, and its
output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gspo_megatron.cli.check_tables import count_parameters
from gspo_megatron.config import ModelShape, load_config
from gspo_megatron.families import describe
from gspo_megatron.families.model_shape import shape_of as shape_of_preset
from tests.unit.cli.conftest import Command, ConfigWriter, refused
from tests.unit.families.test_published_sizes import PUBLISHED


def shape_of(path: Path, *overrides: str) -> ModelShape:
    return load_config(path, overrides).resolved_model()


def test_a_sound_configuration_is_summed_up(write_config: ConfigWriter, gspo: Command) -> None:
    path = write_config(("abc", "hgfed", "a"))
    code, out, _ = gspo("check", path, "--world-size", 4, "parallel.layout=tp=2")
    assert code == 0
    # tables follow after these lines
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[:9])
    assert lines["layout"] == "tp=2 on 4 ranks, dp=2"
    assert lines["model"].startswith("tiny: 4 layers of 64, 2 of 8 experts, ")
    assert lines["weights"] == "random"
    assert lines["prompts"] == "3 in data.prompts"
    assert lines["lengths"].startswith("prompts of at most 5 tokens (96 allowed)")
    assert lines["run"] == "100 steps into runs/config"
    assert lines["saved"] == "no checkpoint, as checkpoint.interval = 0"
    _, out, _ = gspo("check", path, "checkpoint.interval=5")
    assert "\nsaved" not in out and "\ncollapse" not in out
    words = ("checkpoint.interval=5", "training.on_collapse=rollback", "training.max_rollbacks=3")
    _, out, _ = gspo("check", path, *words)
    assert "\ncollapse   the run goes back to the last healthy checkpoint, at most 3 times; " in out
    assert "a checkpoint is saved every 5 steps, " in " ".join(out.split())


def test_a_check_imports_neither_torch_nor_megatron(write_config: ConfigWriter) -> None:
    """Without a dry run, adapters and weights. They take more time than the check."""
    code = (
        "import sys; from gspo_megatron.cli.main import main\n"
        f"assert main(['check', {str(write_config())!r}]) == 0\n"
        "sys.exit(str({'torch', 'megatron'} & {*sys.modules} or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""


def test_adapters_are_counted_and_a_rate_of_full_training_is_warned_of(
    write_config: ConfigWriter, gspo: Command
) -> None:
    words = ("--no-files", "model.vocab_size=48", "model.lora.rank=4")
    code, out, _ = gspo("check", write_config(), *words, "model.lora.targets=[q_proj, v_proj]")
    assert code == 0
    # 4 layers: q [64, 64] and v [32, 64]
    told = f"{4 * 4 * (64 + 64 + 32 + 64):,} parameters of rank 4, times 1, beside q_proj, v_proj"
    assert f"adapters   {told}\n" in out
    assert "optimizer.learning_rate = 1e-06 is one for training all weights" in out
    _, out, _ = gspo("check", write_config(), *words, "optimizer.learning_rate=1e-5")
    assert "training all weights" not in out


def test_the_clip_range_of_gspo_is_warned_of_with_ratios_of_tokens(
    write_config: ConfigWriter, gspo: Command
) -> None:
    words = ("--no-files", "model.vocab_size=48", "objective.clip_low=0.04")
    code, out, _ = gspo("check", write_config(), *words, "objective.name=grpo")
    assert code == 0
    assert "warning    objective.clip_low = 0.04 and objective.clip_high = 0.27: a range for" in out
    assert "a range for ratios" not in gspo("check", write_config(), *words)[1]


def test_problems_of_all_parts_are_told_at_once(
    write_config: ConfigWriter, tmp_path: Path, gspo: Command
) -> None:
    missing = ("data.tokenizer=missing.model", f"data.eval_prompts={tmp_path}/none.jsonl")
    words = ("rollout.group_size=1", "reward.name=exakt", *missing)
    code, _, err = gspo("check", write_config(), *words)
    names = ["rollout.group_size = 1", "reward.name = exakt", "missing.model"]
    assert (code, [line.split(":")[0] for line in err.splitlines()]) == (
        2,
        [*names, f"{tmp_path}/none.jsonl"],
    )


@pytest.mark.parametrize(
    ("prompts", "word", "rows", "told"),
    [
        (("abc", "abcdefgh", "ab", "hgfedcb"), "data.max_prompt_tokens=6", "24", "8 tokens; at"),
        # exact_match compares any text
        (("abc", "}", "$", "de"), "reward.name=exact_match", "", ""),
        (("abc", "}", "$", "de"), "reward.name=math", "23", "prompts.jsonl"),
    ],
)
def test_what_is_wrong_with_prompts_is_named_by_line(
    write_config: ConfigWriter,
    gspo: Command,
    prompts: tuple[str, ...],
    word: str,
    rows: str,
    told: str,
) -> None:
    if "math" in word:
        pytest.importorskip("math_verify")
    code, _, err = gspo("check", write_config(prompts), word)
    assert (code, "".join(line.split(":")[1] for line in err.splitlines())) == (
        2 * bool(rows),
        rows,
    )
    assert told in err.partition("\n")[0]


def test_characters_that_the_tokenizer_does_not_know_are_warned_of(
    write_config: ConfigWriter, gspo: Command
) -> None:
    code, out, _ = gspo("check", write_config(("abc", "axyb", "xy")))
    (line,) = [row for row in out.splitlines() if row.startswith("warning ")]
    assert code == 0 and line.endswith("prompts.jsonl:2: 'x', 'y'")
    assert line.split(maxsplit=1)[1].startswith("data.prompts: 2 of 3 texts hold characters that ")


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(
    write_config: ConfigWriter, gspo: Command
) -> None:
    code, _, err = gspo("check", write_config(), "model.vocab_size=5")
    assert code == 2 and "model.vocab_size = 5: the tokenizer" in err


# The published numbers (https://huggingface.co/Qwen) of all parameters, and of the parameters that
# one token uses ("3.3B active", "22B active").
@pytest.mark.parametrize(
    ("preset", "total", "active_billions"),
    [("qwen3-30b-a3b", 30_532_122_624, 3.3), ("qwen3-235b-a22b", 235_093_634_560, 22.2)],
)
def test_parameters_of_published_models(
    write_config: ConfigWriter, preset: str, total: int, active_billions: float
) -> None:
    shape = shape_of(write_config(), f"model.preset={preset}")
    counted = count_parameters(shape, shape.vocab_size or 0)
    assert counted is not None
    assert counted[0] == total
    assert counted[1] / 1e9 == pytest.approx(active_billions, abs=0.1)


# The first model is one of the family qwen3_moe. The second model belongs to no family.
@pytest.mark.parametrize("matrices", [3, 2])
def test_parameters_of_a_small_model_counted_by_hand(
    write_config: ConfigWriter, matrices: int
) -> None:
    # Width 8: 2 heads and 1 group of 4 channels. Layer 0 has 3 experts of width 5. Layer 1
    # has an MLP of width 7.
    sizes = (
        "num_layers: 2, hidden_size: 8, num_attention_heads: 2, num_query_groups: 1, "
        "kv_channels: 4, num_moe_experts: 3, moe_ffn_hidden_size: 5, ffn_hidden_size: 7, "
        f"moe_router_topk: 2, moe_layer_freq: 2, gated_linear_unit: {str(matrices == 3).lower()}"
    )
    shape = shape_of(write_config(), f"model.megatron={{{sizes}}}", "model.tie_embeddings=true")
    attention = 8 * 8 + 8 * 8 + 8 * 8  # query, then key and value, then output
    norms = 8 + 8 + 4 + 4
    expert, mlp, router = matrices * 8 * 5, matrices * 8 * 7, 8 * 3
    outside = 11 * 8 + 8  # the tied embedding of 11 tokens, and the final norm
    always = outside + 2 * (attention + norms) + router + mlp
    assert count_parameters(shape, 11) == (always + 3 * expert, always + 2 * expert)


# From the model cards: "671B total, 37B activated", "16B total, 3B activated", "106B total, 12B
# active". Here input and output embedding are included, but not the layers that predict further
# tokens.
@pytest.mark.parametrize(
    ("name", "active_billions"),
    [("DeepSeek-V3", 37.6), ("Moonlight-16B-A3B", 3.0), ("GLM-4.5-Air", 13.4)],
)
def test_parameters_of_latent_attention_biases_and_shared_experts(
    name: str, active_billions: float
) -> None:
    hf, billions = PUBLISHED[name]
    counted = count_parameters(shape_of_preset(describe(hf)), hf["vocab_size"])
    assert counted is not None
    total, active = counted
    assert total / 1e9 == pytest.approx(billions, rel=0.005)
    assert active / 1e9 == pytest.approx(active_billions, rel=0.03)


def test_parameters_beyond_the_formula_are_not_guessed(write_config: ConfigWriter) -> None:
    shape = shape_of(write_config(), "model.megatron.add_qkv_bias=true")
    assert count_parameters(shape, 11) is None


def test_illegal_values_hide_no_other_mistake(write_config: ConfigWriter, gspo: Command) -> None:
    """Values, an unknown key, a missing file, a module, and rules of several keys are reported
    together, one line each. Only rules about layout and learning rate cannot be checked."""
    words = ("parallel.layout=tp=x", "optimizer.learning_rate=-1", "training.stpes=5")
    others = (
        "data.eval_prompts=none.jsonl",
        "reward.import_path=no_such_module:score",
        "rollout.top_k=5",
        "rollout.engine=vllm",
        "rollout.vllm.servers=1",
        "rollout.vllm.python=/no/python",
        "objective.kl_coefficient=0.5",
    )
    lines = refused(gspo, "check", write_config(), *words, *others)
    assert [line.split(" = ")[0].split(":")[0] for line in lines] == [
        "parallel.layout",
        "optimizer.learning_rate",
        "training.stpes",
        "rollout.vllm.python",
        "rollout.top_k",
        "objective.kl_coefficient",
        "reward.import_path",
        "none.jsonl",
    ]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        # Each of these mistakes could cause further messages: about rules, files, or the run
        # folder.
        (("data.tokenizer=5",), 1),
        (("data.tokenizer=5", "data.eval_prompts=none.jsonl"), 2),
        (("data.prompts=[]", "data.prompt=a.jsonl"), 1),
        (("trainnig.evaluation_interval=5", "checkpoint.interval=5", "checkpoint.keep_best=1"), 1),
        (("trainnig.seed=5", "data.eval_prompts=none.jsonl", "model.lora.alpha=3"), 3),
        (("model.megatrn.num_layers=3", "parallel.layout=pp=3"), 1),
        (("model.megatron.num_layer=3", "parallel.layout=pp=3"), 1),
        (("model.hf_path=5", "model.vocab_size=3"), 1),
        (("reward.name=5", "data.answer_field=null"), 1),
        (("evaluation.suites.aime.prompst=a.jsonl", "training.evaluation_interval=2"), 3),
        (("evaluation.suites.aime=none.yaml", "evaluation.interval=3"), 1),
        (("evaluation.suites.aime.samples=0", "evaluation.suites.aime.prompts=none.jsonl"), 2),
        (("logging.dir=5", "checkpoint.interval=2"), 1),
        (("rollout.vllm=5", "rollout.engine=vllm"), 1),
        (("rollout.engine=vlm", "rollout.vllm.servers=2"), 1),
        (("rollout.group_size", "rollout.group_siez=4"), 2),
        (("model.backend=transformer_engin",), 1),
    ],
)
def test_an_illegal_value_causes_no_second_error(
    write_config: ConfigWriter, gspo: Command, words: tuple[str, ...], count: int
) -> None:
    lines = refused(gspo, "check", write_config(), *words)
    assert len(lines) == count, lines


@pytest.mark.parametrize("command", ["train", "play"])
def test_commands_that_run_tell_all_mistakes_at_once_too(
    write_config: ConfigWriter, gspo: Command, command: str
) -> None:
    lines = refused(
        gspo, command, write_config(), "rollout.top_k=-1", "data.eval_prompts=none.jsonl"
    )
    assert [line.split(" = ")[0].split(":")[0] for line in lines] == ["rollout.top_k", "none.jsonl"]


def test_play_checks_only_the_phase_that_it_plays(
    write_config: ConfigWriter, gspo: Command
) -> None:
    """The model itself generates, so servers in a later phase are no mistake."""
    later = "{rollout: {max_staleness: 1}, data: {eval_prompts: none.jsonl}}"
    phases = f"training.phases=[{{until_step: 1, data: {{eval_prompts: gone.jsonl}}}}, {later}]"
    words = ("play", write_config(), "rollout.engine=vllm", "checkpoint.interval=1", phases)
    [line] = refused(gspo, *words)
    assert line.startswith("gone.jsonl: no such")
    [line] = refused(gspo, *words, "--step", "2")
    assert line.startswith("none.jsonl: no such")
    # nor is a cache that only servers keep
    [line] = refused(gspo, *words, "rollout.kv_after_update=keep")
    assert line.startswith("gone.jsonl: no such")


@pytest.mark.parametrize("phases", ["[{from_step: 2}]", "[{optimizer: {learning_rate: x}}]"])
def test_a_mistake_in_the_phases_does_not_hide_a_missing_file(
    write_config: ConfigWriter, gspo: Command, phases: str
) -> None:
    words = (f"training.phases={phases}", "data.eval_prompts=none.jsonl")
    first, second = refused(gspo, "check", write_config(), *words)
    assert first.startswith("training.phases[0]") and second.startswith("none.jsonl: no such")


def test_a_stage_tells_missing_files_beside_illegal_values(tmp_path: Path, gspo: Command) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("data: {tokenizer: none.model, examples: none.jsonl, max_tokens: 0}\n")
    lines = refused(gspo, "check", path)
    places = ["data.max_tokens", "none.model", "none.jsonl"]
    assert [line.split(" = ")[0].split(":")[0] for line in lines] == places
    lines = refused(gspo, "sft", path, "data.tokenizer=null", "optimizer.decay=lineaer")
    places = ["optimizer.decay", "data.tokenizer", "data.max_tokens", "none.jsonl"]
    assert [line.split(" = ")[0].split(":")[0] for line in lines] == places
