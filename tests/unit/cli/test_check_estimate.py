"""The dry run that `check` does when it is asked to: what it prints, and its exit codes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_megatron.cli.main import main
from gspo_megatron.config import load_config, resolve_parallel
from gspo_megatron.estimate.layout import estimate_layout

ConfigWriter = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[3]
LARGE = "model.preset=qwen3-30b-a3b"


def pairs(text: str) -> dict[str, str]:
    """The name=value pairs of the last line."""
    return dict(pair.split("=", 1) for pair in text.splitlines()[-1].split())


def test_the_last_line_has_the_figures_of_the_estimate(
    write_config: ConfigWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(("abc", "hgfed"))
    overrides = ["parallel.layout=tp=2,pp=2", "model.vocab_size=80"]
    assert main(["check", str(path), "--memory", *overrides]) == 0
    text = capsys.readouterr().out
    found = estimate_layout(load_config(path, overrides), 4, 80, longest=5)
    said = pairs(text)
    assert int(said["parameters_total"]) == found.parameters_total
    assert int(said["worst_rank_bytes"]) == found.worst.total
    assert int(said["activations_bytes"]) == found.worst.activations
    assert int(said["sent_pp_bytes"]) == max(sent["pp"] for sent in found.traffic) > 0
    assert float(said["bubble"]) == pytest.approx(found.bubble, abs=1e-4)
    assert "fits" not in said
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("0", "2")] == ["0", "2"]  # a rank a stage
    parallel = resolve_parallel(load_config(path, overrides), 4)
    assert said["world_size"] == str(parallel.world_size)


def test_without_being_asked_there_is_none(
    write_config: ConfigWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(write_config())]) == 0
    assert "parameters_total" not in capsys.readouterr().out


def test_what_does_not_fit_exits_with_1(
    write_config: ConfigWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config()
    words = ["check", str(path), "model.vocab_size=80", "--gpu-memory"]
    assert main([*words, "80"]) == 0
    fits = capsys.readouterr()
    assert "fits: rank 0 needs" in fits.out
    assert pairs(fits.out)["fits"] == "yes"
    needed = int(pairs(fits.out)["worst_rank_bytes"])
    assert main([*words, str(needed / 1e9)]) == 1  # no headroom
    refused = capsys.readouterr()
    assert refused.err.startswith("does not fit: rank 0 needs")
    assert pairs(refused.out)["fits"] == "no"
    assert main([*words, str(needed / 1e9 / 0.91)]) == 0


def test_broken_rules_exit_with_2_before_any_dry_run(
    write_config: ConfigWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(write_config()), "--world-size", "3", "parallel.layout=tp=2"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("world size = 3")


def test_files_on_another_machine_do_not_matter_where_they_are_left_alone(
    write_config: ConfigWriter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "far.yaml"
    path.write_text("data: {tokenizer: /far/away, prompts: /far/away.jsonl}\n")
    assert main(["check", str(path), "--memory"]) == 2
    assert "/far/away" in capsys.readouterr().err
    assert main(["check", str(path), "--memory", "--no-files"]) == 2
    assert "model.vocab_size = None" in capsys.readouterr().err
    words = ["check", str(path), "--memory", "--no-files", "model.vocab_size=80"]
    assert main(words) == 0
    assert int(pairs(capsys.readouterr().out)["worst_rank_bytes"]) > 0
    assert main([*words, "model.hf_path=/far/weights"]) == 2
    assert "name its shape" in capsys.readouterr().err
    assert main([*words, "model.hf_path=/far/weights", "model.preset=tiny"]) == 0


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "many"])
def test_a_memory_that_is_no_size_is_refused(
    write_config: ConfigWriter, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["check", str(write_config()), f"--gpu-memory={text}"])
    assert "is not a number of GB above 0" in capsys.readouterr().err


def test_the_dry_run_sees_no_gpu_and_leaves_the_environment_as_it_was(
    write_config: ConfigWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    from gspo_megatron.estimate import layout

    native = layout.rank_model

    def watched(*args: object) -> object:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return native(*args)

    monkeypatch.setattr(layout, "rank_model", watched)
    assert main(["check", str(write_config()), "--memory"]) == 0
    assert set(seen) == {""}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_suggestions_pass_the_rules_and_fit(
    write_config: ConfigWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line is an override that `check` itself finds sound and small enough; the present layout
    is neither legal nor needed."""
    path = write_config()
    sizes = ["model.vocab_size=80", "rollout.prompts_per_step=4", "model.max_sequence_length=64"]
    words = ["check", str(path), "--no-files", "--world-size", "4", "--gpu-memory", "0.15", *sizes]
    assert main([*words, "--suggest", "parallel.layout=pp=3"]) == 2
    captured = capsys.readouterr()
    assert "parallel.pipeline_model_parallel_size = 3" in captured.err
    rows = [line.split() for line in captured.out.splitlines() if "parallel.layout=" in line]
    assert 1 <= len(rows) <= 10
    seconds = [float(row[0]) for row in rows]
    assert seconds == sorted(seconds)
    assert main([*words, *rows[0][6:]]) == 0
    assert pairs(capsys.readouterr().out)["fits"] == "yes"


@pytest.mark.parametrize(
    ("example", "world_size", "preset", "parameters"),
    [
        ("qwen3_30b_a3b", "32", "qwen3-30b-a3b", "30532122624"),
        ("qwen3_235b_a22b", "256", "qwen3-235b-a22b", "235093634560"),
    ],
)
def test_the_large_examples_fit(
    example: str,
    world_size: str,
    preset: str,
    parameters: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the figures that their pages quote."""
    monkeypatch.chdir(ROOT)
    folder = Path("examples") / example
    words = ["check", str(folder / "config.yaml"), "--no-files", f"model.preset={preset}"]
    assert main([*words, "--world-size", world_size, "--gpu-memory", "80"]) == 0
    said = pairs(capsys.readouterr().out)
    assert (said["parameters_total"], said["fits"]) == (parameters, "yes")
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{int(said['worst_rank_bytes']) / 2**30:.1f} GiB" in page


def test_an_fp8_run_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that FP8 needs is installed here; nobody asks for it without the files."""
    monkeypatch.chdir(ROOT)
    folder = Path("examples") / "qwen3_30b_a3b"
    words = ["check", str(folder / "config.yaml"), "--no-files", "model.preset=qwen3-30b-a3b"]
    words += ["training.precision=fp8-blockwise"]
    assert main([*words, "--world-size", "32", "--gpu-memory", "80"]) == 0
    said = pairs(capsys.readouterr().out)
    assert said["fits"] == "yes"
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{int(said['fp8_copies_bytes']) / 2**30:.1f} GiB" in page
