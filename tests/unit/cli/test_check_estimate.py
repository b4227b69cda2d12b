"""The memory estimate that `check` makes on request: its output and its exit codes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from gspo_megatron.cli import check, check_tables
from gspo_megatron.config import load_config, parse_config
from gspo_megatron.estimate.layout import estimate_layout
from gspo_megatron.estimate.workload import DataSizes
from tests.unit.cli.conftest import Command, ConfigWriter
from tests.unit.hf.published import write_model

ROOT = Path(__file__).resolve().parents[3]


def pairs(text: str) -> dict[str, str]:
    """The name=value pairs of the last line."""
    return dict(pair.split("=", 1) for pair in text.splitlines()[-1].split())


def test_the_last_line_has_the_figures_of_the_estimate(
    write_config: ConfigWriter, gspo: Command
) -> None:
    path = write_config(("abc", "hgfed"))
    assert "parameters_total" not in gspo("check", path)[1]  # printed only on request
    overrides = ["parallel.layout=tp=2,pp=2", "model.vocab_size=80"]
    code, out, _ = gspo("check", path, "--memory", *overrides)
    found = estimate_layout(load_config(path, overrides), 4, 80, DataSizes(longest=5))
    said = pairs(out)
    assert code == 0
    assert int(said["parameters_total"]) == found.parameters.total()
    assert int(said["worst_rank_bytes"]) == found.worst.total
    assert int(said["activations_bytes"]) == found.worst.activations
    assert int(said["sent_pp_bytes"]) == max(sent["pp"] for sent in found.traffic) > 0
    assert float(said["bubble"]) == pytest.approx(found.bubble, abs=1e-4)
    assert "fits" not in said
    [ranks] = [line.split() for line in out.splitlines() if line.strip().startswith("rank 0")]
    assert ranks == ["rank", "0", "rank", "2"]  # one rank of each stage
    assert said["world_size"] == "4"


def test_phases_are_listed_each_with_its_memory(write_config: ConfigWriter, gspo: Command) -> None:
    path = write_config(("abc", "hgfed"))
    phases = "training.phases=[{until_step: 4}, {rollout: {max_response_tokens: 100}}]"
    overrides = [phases, "model.vocab_size=80", "training.steps=6", "checkpoint.interval=1"]
    code, out, _ = gspo("check", path, "--memory", *overrides)
    lines = [line.strip() for line in out.splitlines()]
    assert code == 0 and "phase 1    steps 1 to 4: as above" in lines
    [second] = [line for line in lines if line.startswith("phase 2 ")]
    assert second.split(maxsplit=2)[2].startswith("steps 5 to 6: rollout.max_response_tokens: ")
    table = lines[lines.index(next(line for line in lines if line.startswith("phases: "))) :]
    rows = [line.split() for line in table if line.split()[:1] in (["1"], ["2"])]
    assert [row[1] for row in rows] == ["1", "5"] and rows[1][3] == "100"
    # The longer responses of phase 2 need more memory. The last line of the output is about the
    # phase that needs the most memory.
    assert float(rows[0][4]) < float(rows[1][4])
    assert int(pairs(out)["worst_rank_bytes"]) / 1e9 == pytest.approx(float(rows[1][4]), abs=1e-5)


def test_a_campaign_takes_the_hours_of_all_its_phases(
    write_config: ConfigWriter, gspo: Command
) -> None:
    words = ["check", write_config(), "--memory", "--no-files", "model.vocab_size=80"]
    words += ["data.max_prompt_tokens=20", "checkpoint.interval=1"]
    phases = "training.phases=[{until_step: 8}, {rollout: {max_response_tokens: 100}}]"
    first, second, both = (
        pairs(gspo(*words, *own)[1])
        for own in (
            ("training.steps=8",),
            ("training.steps=2", "rollout.max_response_tokens=100"),
            ("training.steps=10", phases),
        )
    )
    # the output has three digits
    for name in ("run_hours", "run_gpu_hours"):
        added = float(first[name]) + float(second[name])
        assert float(both[name]) == pytest.approx(added, rel=0.02)
    for name in ("train_step_seconds", "generate_step_seconds"):
        short, long = float(first[name]), float(second[name])
        assert short < 0.8 * long
        assert float(both[name]) == pytest.approx((8 * short + 2 * long) / 10, rel=0.02)


def test_the_largest_evaluation_counts(write_config: ConfigWriter, gspo: Command) -> None:
    """The step has two responses, the held-out prompts have three, and the suite has twelve."""
    path = write_config(("abc", "hgfed", "a"))
    words = ["check", path, "--memory", "model.vocab_size=80", "objective.mini_batches=1"]
    words += ["rollout.prompts_per_step=1", "rollout.group_size=2"]
    file = path.parent / "prompts.jsonl"
    held_out = f"data.eval_prompts={file}"
    suite = f"evaluation.suites={{letters: {{prompts: {file}, samples: 4}}}}"
    found = [
        pairs(gspo(*words, *own)[1])
        for own in ((), (held_out,), (held_out, suite), (suite, "rollout.batch_size=5"))
    ]
    caches = [int(each["kv_cache_bytes"]) for each in found]
    assert [cache * 2 for cache in caches] == [caches[0] * rows for rows in (2, 3, 12, 5)]
    # an evaluation is no part of a step
    assert len({each["generate_step_seconds"] for each in found}) == 1


def test_every_size_is_in_gb_and_says_what_it_is(
    write_config: ConfigWriter, gspo: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal has 80 columns, and there are more stages than fit side by side."""
    monkeypatch.setattr(check_tables, "console", lambda: Console(width=80, highlight=False))
    _, out, _ = gspo("check", write_config(), "--memory", "parallel.layout=pp=4")
    table, rest = out.split("most        rank ")
    assert "iB" not in out.replace("fits=", "")
    assert table.count("GB (10^9 bytes) of a rank of each pipeline stage") == 2
    names = [line[1:38].strip() for line in table.splitlines()]
    for name in (
        "micro-batches kept at once",
        "training: kept activations",
        "sampling: key-value cache",
        "while training",
        "while sampling",
        "most at one time",
    ):
        assert names.count(name) == 2, name
    stages = [word for line in table.splitlines() for word in re.findall(r"stage \d", line)]
    assert stages == ["stage 0", "stage 1", "stage 2", "stage 3"]
    *_, above, last = rest.splitlines()
    assert above == "for scripts, in bytes:" and last.startswith("world_size=4 ")
    assert rest.startswith("0 (stage 0): 0.")


def test_selective_recompute_that_saves_nothing_is_told_with_the_reason(
    write_config: ConfigWriter, gspo: Command
) -> None:
    """By default, selective recompute repeats the computation of attention. Here attention keeps no
    scores, so nothing is saved."""
    words = ("check", write_config(), "--memory", "model.vocab_size=80")
    _, out, _ = gspo(*words)
    assert "selective saves little or nothing here: it recomputes attention" in out
    _, out, _ = gspo(*words, "model.megatron.recompute_modules=[moe]")
    sizes = dict(re.findall(r"(none|selective|full) ([\d.]+) GB", out))
    assert float(sizes["selective"]) < 0.8 * float(sizes["none"])
    assert "saves little" not in out


def test_a_recompute_mode_that_saves_nothing_is_not_suggested(
    write_config: ConfigWriter, gspo: Command
) -> None:
    words = ("check", write_config(), "--world-size=2", "model.vocab_size=80", "--suggest")
    assert "recompute=full" in gspo(*words)[1] and "recompute=selective" not in gspo(*words)[1]
    assert "recompute=selective" in gspo(*words, "model.megatron.recompute_modules=[moe]")[1]


def test_what_does_not_fit_exits_with_1(write_config: ConfigWriter, gspo: Command) -> None:
    words = ("check", write_config(), "model.vocab_size=80", "--gpu-memory")
    code, out, _ = gspo(*words, 80)
    assert (code, pairs(out)["fits"]) == (0, "yes") and "fits: rank 0 needs" in out
    needed = int(pairs(out)["worst_rank_bytes"])
    code, out, err = gspo(*words, needed / 1e9)  # leaves no headroom
    assert (code, pairs(out)["fits"]) == (1, "no") and err.startswith("does not fit: rank 0 needs")
    assert gspo(*words, needed / 1e9 / 0.91)[0] == 0


def test_broken_rules_exit_with_2_before_any_dry_run(
    write_config: ConfigWriter, gspo: Command
) -> None:
    code, out, err = gspo("check", write_config(), "--world-size", 3, "parallel.layout=tp=2")
    assert (code, out) == (2, "") and err.startswith("world size = 3")


def test_files_on_another_machine_do_not_matter_where_they_are_left_alone(
    tmp_path: Path, gspo: Command
) -> None:
    path = tmp_path / "far.yaml"
    path.write_text("data: {tokenizer: /far/away, prompts: /far/away.jsonl}\n")
    far, size = ("--no-files",), ("--no-files", "model.vocab_size=80")
    for words, code, told in (
        ((), 2, "/far/away"),
        (far, 2, "model.vocab_size = null"),
        (size, 0, ""),
        ((*size, "model.hf_path=/far/weights"), 2, "name its shape"),
        ((*size, "model.hf_path=/far/weights", "model.preset=tiny"), 0, ""),
    ):
        ended, out, err = gspo("check", path, "--memory", *words)
        assert ended == code and told in err
        assert code or int(pairs(out)["worst_rank_bytes"]) > 0


def test_a_preset_decides_the_shape_without_a_look_at_the_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3_moe", seed=1)
    values = {"data": {"tokenizer": "t"}, "model": {"hf_path": str(folder)}}
    config = parse_config(values, ["model.preset=qwen3-30b-a3b"])
    assert check._without_weights(config).resolved_model().num_layers == 48
    assert check._without_weights(parse_config(values)).model.hf_path == str(folder)


@pytest.mark.parametrize("text", ["0", "inf"])
def test_a_memory_that_is_no_size_is_refused(
    write_config: ConfigWriter, text: str, gspo: Command
) -> None:
    code, _, err = gspo("check", write_config(), f"--gpu-memory={text}")
    assert code == 2 and "is not a number of GB above 0" in err


def test_the_dry_run_sees_no_gpu_and_leaves_the_environment_as_it_was(
    write_config: ConfigWriter, monkeypatch: pytest.MonkeyPatch, gspo: Command
) -> None:
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    from gspo_megatron.estimate import layout

    native = layout.rank_model

    def watched(*args: object) -> object:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return native(*args)

    monkeypatch.setattr(layout, "rank_model", watched)
    assert gspo("check", write_config(), "--memory")[0] == 0
    assert set(seen) == {""}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_suggestions_pass_the_rules_and_fit(write_config: ConfigWriter, gspo: Command) -> None:
    """Each suggested line of overrides passes `check`, and the run fits into the memory. The layout
    in the configuration may be illegal."""
    sizes = ["model.vocab_size=80", "rollout.prompts_per_step=4", "model.max_sequence_length=64"]
    words = ["check", write_config(), "--no-files", "--world-size=4", "--gpu-memory=0.15", *sizes]
    code, out, err = gspo(*words, "--suggest", "parallel.layout=pp=3")
    assert code == 2 and "parallel.pipeline_model_parallel_size = 3" in err
    title = "layouts that fit, ordered by the time of training (the rollout's is not estimated)"
    assert title in out and "key-value cache) included" in out
    lines = [line.split() for line in out.splitlines() if re.match(r" *\d+  ", line)]
    rows, overrides = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    assert 1 <= len(rows) <= 10
    assert [row[0] for row in rows] == [words[0] for words in overrides]
    seconds = [float(row[1]) for row in rows]
    assert seconds == sorted(seconds)
    code, out, _ = gspo(*words, *overrides[0][1:])
    assert (code, pairs(out)["fits"]) == (0, "yes")


@pytest.mark.parametrize(
    ("example", "world_size", "precision", "parameters", "quoted"),
    [
        ("qwen3_30b_a3b", 32, "bf16", 30532122624, "worst_rank_bytes"),
        ("qwen3_235b_a22b", 256, "bf16", 235093634560, "worst_rank_bytes"),
        ("moonlight_16b_a3b", 16, "bf16", 15960108544, "worst_rank_bytes"),
        pytest.param(
            *("glm_4_5_air", 64, "bf16", 106852245504, "worst_rank_bytes"), marks=pytest.mark.full
        ),
        pytest.param(
            *("qwen3_5_35b_a3b", 32, "bf16", 34660610688, "worst_rank_bytes"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("gpt_oss_20b", 16, "bf16", 20914757184, "worst_rank_bytes"), marks=pytest.mark.full
        ),
        # The packages that FP8 needs are missing here, but `check --no-files` does not look for
        # them.
        pytest.param(
            *("qwen3_30b_a3b", 32, "fp8-blockwise", 30532122624, "fp8_copies_bytes"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_large_examples_fit(
    example: str, world_size: int, precision: str, parameters: int, quoted: str, gspo: Command
) -> None:
    """The sizes are those in the README of each example."""
    folder = ROOT / "examples" / example
    shape = f"model.preset={example.replace('_', '-')}"
    if (folder / "config.json").exists():
        shape = f"model.hf_path={folder}"
    words = ("--no-files", shape, "--gpu-memory=80")
    words = (*words, f"training.precision={precision}", "--world-size", world_size)
    code, out, _ = gspo("check", folder / "config.yaml", *words)
    said = pairs(out)
    assert (code, said["parameters_total"], said["fits"]) == (0, str(parameters), "yes")
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{int(said[quoted]) / 1e9:.1f} GB" in page
