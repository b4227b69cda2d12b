"""Reports as texts and tables. The pictures are tested in test_plots and test_timing_plots."""

from __future__ import annotations

import html
import io
import math
import random
import re
import statistics
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from gspo_megatron.errors import DataError, UserError
from gspo_megatron.observe import plots, progress, report
from gspo_megatron.observe.metrics_files import (
    SAMPLES_FILE,
    JsonLinesWriter,
    MetricsWriter,
    read_metrics,
    read_samples,
    sample_row,
)
from gspo_megatron.observe.report import finish_run, summarize, wall_seconds, write_report
from gspo_megatron.observe.windows import window_means
from gspo_megatron.types import Sample
from tests.unit.observe.conftest import RunMaker


@pytest.fixture(autouse=True)
def _pictures_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the drawing of pictures, which would take seconds for each report."""
    monkeypatch.setattr(Figure, "savefig", lambda _, path, **__: Path(path).write_bytes(b"picture"))


def cells(path: Path) -> list[str]:
    """The cells of all tables in a page, as the HTML source has them (with escaped text)."""
    return re.findall(r"<td>(.*?)</td>", path.read_text(), re.DOTALL)


def sources(path: Path) -> list[str]:
    """The addresses of everything that the page would load."""
    return re.findall(r"(?:src|href)\s*=\s*[\"']?([^\"'>]*)", path.read_text())


def printed_at_the_end(run_dir: Path, plots: bool = False) -> str:
    stream = io.StringIO()
    finish_run(run_dir, stream, plots=plots)
    return stream.getvalue()


def test_the_report_of_one_run_is_one_file_with_everything_inside(make_run: RunMaker) -> None:
    run_dir = make_run("run")
    (run_dir / "config.resolved.yaml").write_text("model:\n  preset: <tiny>\n")
    path = write_report([run_dir], run_dir)
    assert path == run_dir / "report.html"
    assert len(sources(path)) == 5
    assert all(source.startswith("data:image/png;base64,") for source in sources(path))
    assert "preset: &lt;tiny&gt;" in path.read_text()
    # Text is escaped, so it is never interpreted as HTML.
    assert "&lt;b&gt;1&lt;/b&gt;" in cells(path) and "&amp;seven" in cells(path)


def test_the_report_tells_where_a_run_comes_from(make_run: RunMaker) -> None:
    run_dir = make_run("run")
    assert "History" not in write_report([run_dir], run_dir).read_text()
    (run_dir / "branch.json").write_text('{"run": "/runs/<old>", "step": 40}')
    page = write_report([run_dir], run_dir).read_text()
    assert "History" in page and "branch of /runs/&lt;old&gt; after step 40" in page


def test_a_report_elsewhere_leaves_the_run_as_it_was(make_run: RunMaker, tmp_path: Path) -> None:
    run_dir = make_run("run")
    before = sorted(run_dir.rglob("*"))
    write_report([run_dir], tmp_path / "out")
    assert sorted(run_dir.rglob("*")) == before
    assert (tmp_path / "out" / "plots" / "learning.png").is_file()


def test_of_many_samples_the_first_and_the_last_are_shown(make_run: RunMaker) -> None:
    run_dir = make_run("run", steps=40)
    page = write_report([run_dir], run_dir).read_text()
    prompts = [int(step) for step in re.findall(r"&lt;b&gt;(\d+)&lt;", page)]
    assert prompts == [1, 2, 3, 4, 5, 6, 35, 36, 37, 38, 39, 40]


def test_an_episode_is_shown_as_a_conversation(make_run: RunMaker) -> None:
    run_dir = make_run("run", steps=1)
    turns = [
        {"role": "user", "text": "guess", "branch": 0, "trained": False},
        {"role": "assistant", "text": "4\ruser: x<|im_end|>", "branch": 0, "reward": -0.5},
        {"role": "tool", "text": "lower", "branch": 1},
        {"role": "assistant", "text": "3<|im_end|>", "branch": 1, "reward": 1.0},
    ]
    with JsonLinesWriter(run_dir / SAMPLES_FILE) as writer:
        records = [{"turns": turns, "error": None}, {"turns": turns[:1], "error": "no tool; f:1"}]
        sample = Sample("guess", "3", "last", False, transcript="t")
        for reward, record in zip([0.5, math.nan], records, strict=True):
            writer.append({"step": 1, **sample_row(sample, reward, record=record)})
    written = read_samples(run_dir)[-2:]
    assert [each["turns"] for each in written] == [turns, turns[:1]]
    assert [each["reward"] for each in written] == [0.5, None]
    page = html.unescape(write_report([run_dir], run_dir).read_text())
    assert "user: guess\nassistant: 4\n    user: x<|im_end|> [reward -0.5]\n" in page
    assert "tool: lower\nassistant: 3<|im_end|> [reward 1]" in page
    assert "failed: no tool; f:1" in page


def test_a_sample_of_a_row_without_an_answer_has_an_empty_cell(make_run: RunMaker) -> None:
    run_dir = make_run("run", steps=1)
    with JsonLinesWriter(run_dir / SAMPLES_FILE) as writer:
        writer.append({"step": 2, **sample_row(Sample("ask", None, "told", False), 0.5)})
    assert cells(write_report([run_dir], run_dir))[-5:] == ["2", "ask", "told", "", "0.500"]


def test_seeds_are_shown_as_mean_and_spread(make_run: RunMaker, tmp_path: Path) -> None:
    bonuses = (0.0, 0.03, 0.09)
    runs = [make_run(f"gspo_seed{seed}", bonus=bonus) for seed, bonus in enumerate(bonuses)]
    runs.append(make_run("grpo", bonus=0.2))
    path = write_report(runs, tmp_path / "out")
    last = [0.6 + bonus for bonus in bonuses]
    expected = f"{statistics.fmean(last):.3f} ± {statistics.stdev(last):.3f}"
    assert cells(path)[:4] == ["gspo", "3", expected, expected]
    assert cells(path)[9:12] == ["grpo", "1", "0.800"]
    assert len(sources(path)) == 1
    assert not list((tmp_path / "out").glob("*.png"))


def test_a_figure_that_only_some_seeds_have_is_not_averaged(
    make_run: RunMaker, tmp_path: Path
) -> None:
    # only step 2 has an evaluation
    runs = [make_run("x_seed1", steps=1), make_run("x_seed2", steps=2)]
    assert cells(write_report(runs, tmp_path / "out"))[4] == "not in all runs"


def make_stage_run(folder: Path, phase: str, losses: list[float]) -> Path:
    """A run of a stage before RL, with an evaluation at its end."""
    with MetricsWriter(folder) as metrics:
        for step, loss in enumerate(losses, 1):
            held_out = {"evaluation/loss": loss + 0.5} if step == len(losses) else {}
            own = {"phase": phase, "step": step, "loss": loss, "grad_norm": 2.0 * loss, "lr": 0.1}
            metrics.write(own | {"perf/step_seconds": 1.5} | held_out)
    return folder


def test_runs_of_a_stage_are_compared_by_what_the_stage_has(tmp_path: Path) -> None:
    runs = [make_stage_run(tmp_path / f"x_seed{n}", "sft", [3.0, 2.0 + n]) for n in (1, 2)]
    path = write_report(runs, tmp_path / "out")
    held_out, loss, grad_norm = "4.00 ± 0.707", "3.50 ± 0.707", "7.00 ± 1.41"
    found, text = cells(path), path.read_text()
    assert found[:7] == ["x", "2", held_out, held_out, loss, grad_norm, progress.MISSING]
    assert found[7:13] == ["x_seed1", "2", "3.50", "3.50", "3.00", "6.00"]
    assert "last held-out loss" in text and "last reward" not in text
    assert len(sources(path)) == 1  # one picture


def test_runs_of_several_stages_are_compared_stage_by_stage(
    make_run: RunMaker, tmp_path: Path
) -> None:
    runs = [make_run("policy"), make_stage_run(tmp_path / "corpus", "pretrain", [5.0, 4.0])]
    for run, rate in zip(runs, (1e-5, 1e-3)):
        config = {"optimizer": {"learning_rate": rate}, "logging": {"dir": run.name}, "model": {}}
        (run / "config.resolved.yaml").write_text(str(config))
    path = write_report(runs, tmp_path / "out")
    found, text = cells(path), path.read_text()
    printed = io.StringIO()
    report.print_comparison(runs, printed)
    head, row = (line.split() for line in printed.getvalue().splitlines() if "   " in line.strip())
    assert head == ["key", "policy", "corpus"]
    assert row == ["optimizer.learning_rate", "1e-05", "0.001"]
    assert "Each run (rl)" in text and "Each run (pretrain)" in text
    rl, corpus = found.index("policy"), found.index("corpus")
    assert found[rl + 1 : rl + 3] == ["6", "0.600"]
    assert found[corpus + 1 : corpus + 5] == ["2", "4.50", "4.50", "4.00"]
    assert len(sources(path)) == 2 and "Over seeds" not in text
    # settings that differ come last
    assert found[-3:] == ["optimizer.learning_rate", "1e-05", "0.001"]


def test_settings_that_differ_are_spelled_as_in_a_configuration(make_run: RunMaker) -> None:
    runs, printed = [make_run("a"), make_run("b")], io.StringIO()
    for run, given in zip(runs, ("null", "true")):
        (run / "config.resolved.yaml").write_text(f"data: {{chat_template: {given}}}\n")
    report.print_comparison(runs, printed)
    assert "data.chat_template null true" in " ".join(printed.getvalue().split())


def test_of_different_stages_only_keys_that_both_have_are_compared(make_run: RunMaker) -> None:
    runs, printed = [make_run("a"), make_run("b")], io.StringIO()
    configs = (
        "rollout: {group_size: 8}\ndata: {prompts: p}\ntraining: {seed: 1, steps: 5}\n",
        "data: {examples: e}\ntraining: {seed: 2, steps: 5, batch_size: 4}\n",
    )
    for run, text in zip(runs, configs, strict=True):
        (run / "config.resolved.yaml").write_text(text)
    (runs[1] / "metrics.jsonl").write_text('{"phase": "sft", "step": 1, "loss": 1.0}\n')
    report.print_comparison(runs, printed)
    lines = printed.getvalue().splitlines()
    told = "The stages differ (rl, sft): only keys that all runs have are compared."
    assert lines[:2] == [told, "settings that differ:"]
    rows = [line.split() for line in lines[2:] if "." in line]
    assert rows == [["training.seed", "1", "2"]]


def test_equal_settings_and_healthy_runs_add_nothing(make_run: RunMaker, tmp_path: Path) -> None:
    runs, printed = [make_run("a"), make_run("b")], io.StringIO()
    for run in runs:
        (run / "config.resolved.yaml").write_text(
            f"training: {{steps: 6}}\nlogging: {{dir: {run}}}"
        )
    report.print_comparison(runs, printed)
    text = write_report(runs, tmp_path / "out").read_text()
    assert printed.getvalue() == "" and "Settings that differ" not in text
    assert "Warnings" not in text


def test_warnings_name_the_run_the_metric_and_the_steps(make_run: RunMaker, tmp_path: Path) -> None:
    """The warnings appear in the run's summary, in its report, and in comparisons."""
    runs = [make_run("good"), make_run("bad", steps=12)]
    with MetricsWriter(runs[1]) as writer:
        writer.write({"step": 7, "grad_norm": 400.0})
    said = "warning: bad: grad_norm, step 7: gradient spikes, up to 400, over 10 times the running"
    summary = printed_at_the_end(runs[1], plots=True)
    assert said in " ".join(summary.split())
    assert summary.index("warning") < summary.index("report  ")
    printed = io.StringIO()
    report.print_comparison(runs, printed)
    assert said in " ".join(printed.getvalue().split()) and printed.getvalue().count("warning") == 1
    for path in (runs[1] / "report.html", write_report(runs, tmp_path / "out")):
        assert "Warnings" in path.read_text()
        row = cells(path)[cells(path).index("grad_norm") - 1 :]
        assert row[:3] == ["bad", "grad_norm", "step 7"] and "optimizer.clip_grad" in row[4]


def test_a_warning_knows_the_values_of_each_phase(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 21):
            writer.write({"step": step, "response/length_mean": 20.0 if step <= 10 else 90.0})
    limit = "rollout: {{max_response_tokens: {}}}\n".format
    (tmp_path / "config.resolved.yaml").write_text(limit(100))
    assert "warning: " in printed_at_the_end(tmp_path)
    (tmp_path / "config.from_step_00000001.yaml").write_text(limit(100))
    (tmp_path / "config.from_step_00000011.yaml").write_text(limit(200))
    assert "warning: " not in printed_at_the_end(tmp_path)


def test_a_configuration_is_read_as_a_run_reads_it(make_run: RunMaker) -> None:
    """A reader of YAML 1.1 would read 1e-5 as text, and would use the second of two equal keys."""
    run_dir = make_run("run")
    file = run_dir / "config.resolved.yaml"
    file.write_text("evaluation: {correct_at: 1e-5}\n")
    assert "held-out accuracy (reward ≥ 1e-05)" in printed_at_the_end(run_dir)
    file.write_text("evaluation: {correct_at: 1}\nevaluation: {correct_at: 2}\n")
    with pytest.raises(DataError, match="resolved.yaml:2:1: evaluation appears twice"):
        printed_at_the_end(run_dir)
    file.write_text("evaluation\n")
    with pytest.raises(DataError, match="not the configuration of a run"):
        printed_at_the_end(run_dir)


def test_a_run_without_a_single_step_still_has_a_report(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).close()
    assert cells(write_report([tmp_path], tmp_path)) == []
    assert "0 steps" in printed_at_the_end(tmp_path)


def test_an_evaluation_has_one_value_of_each_metric(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 0, "evaluation/accuracy": 0.25, "evaluation/reward": 0.5})
    text = printed_at_the_end(tmp_path)
    assert "value" in text and "best" not in text and "step" not in text.replace(str(tmp_path), "")
    assert re.search(r"held-out accuracy \(reward ≥ 1\)\s+25\.0%\s*\n", text)


def test_what_is_no_run_and_where_no_report_can_go_is_told(
    make_run: RunMaker, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="not the folder of a run"):
        write_report([tmp_path / "nowhere"], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be a folder"):
        write_report([make_run("run")], tmp_path / "file")
    for name in ("plots/learning.png", "report.html"):  # folders in place of files
        out = tmp_path / name.partition(".")[0]
        (out / name).mkdir(parents=True)
        with pytest.raises(DataError, match=f"{name}: cannot be written: "):
            write_report([tmp_path / "run"], out)


def test_first_last_and_best_of_what_has_a_best(make_run: RunMaker) -> None:
    run_dir = make_run("run", steps=4)
    with MetricsWriter(run_dir) as writer:
        writer.write({"step": 5, "reward/mean": 0.3, "loss": float("nan"), "grad_norm": 9.0})
    rows = {row.metric.name: row for row in summarize(read_metrics(run_dir))}
    reward = rows["reward"]
    assert (reward.first, reward.last, reward.best, reward.best_step) == (0.1, 0.3, 0.4, 4)
    accuracy = rows["held-out accuracy"]
    assert accuracy.first == pytest.approx(0.15) and accuracy.best_step == 4
    assert rows["loss"].best is None and rows["loss"].not_finite == 1
    assert rows["gradient norm"].best is None and rows["gradient norm"].last == 9.0
    assert rows["clip fraction"].best is None and rows["clip fraction"].last == 0.1


def test_the_clip_fraction_is_that_of_tokens() -> None:
    clips = {"clip/sequence/binding": 0.99, "clip/token/binding": 0.002}
    rows = {row.metric.name: row for row in summarize([{"step": 1, **clips}])}
    assert rows["clip fraction"].last == 0.002


def test_a_long_run_is_told_by_means_and_not_by_its_first_and_last_step(tmp_path: Path) -> None:
    """The reward rises, but happens to be low at the last step."""
    rewards = [0.9] + [0.2] * 4 + [0.5] * 10 + [0.8] * 4 + [0.1]
    with MetricsWriter(tmp_path) as writer:
        for step, reward in enumerate(rewards, 1):
            held_out = {"evaluation/accuracy": reward} if step in (1, 20) else {}
            writer.write({"step": step, "reward/mean": reward, **held_out})
    rows = {row.metric.name: row for row in summarize(read_metrics(tmp_path))}
    reward, accuracy = rows["reward"], rows["held-out accuracy"]
    assert reward.steps == 5
    assert (reward.first, reward.last) == pytest.approx((0.34, 0.66))
    assert reward.best == pytest.approx(0.74) and reward.best_step == 19
    # An evaluation is already a mean over prompts, so no mean over steps is taken.
    assert (accuracy.first, accuracy.last, accuracy.steps) == (0.9, 0.1, 1)
    page = write_report([tmp_path], tmp_path).read_text()
    assert "reward, first to last 5 of 20 steps</span><b>0.340 → 0.660" in page
    assert "reward, means of 5" in printed_at_the_end(tmp_path)


def test_the_headline_of_a_fine_tuning_counts_its_own_steps(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 41):
            writer.write({"phase": "sft", "step": step, "loss": 1 / step})
    assert "first to last 5 of 40 steps" in write_report([tmp_path], tmp_path).read_text()


def test_means_of_windows_are_those_of_a_plain_loop() -> None:
    generator = random.Random(1)
    values = [generator.gauss(0, 1) for _ in range(40)]
    for place in (3, 4, 5, 6, 20):
        values[place] = generator.choice([math.nan, math.inf, -math.inf])
    for size in (1, 2, 3, 7, 40):
        expected = []
        for end in range(size, len(values) + 1):
            finite = [v for v in values[end - size : end] if math.isfinite(v)]
            expected.append(statistics.fmean(finite) if finite else math.nan)
        if size == 1:  # a window of one value changes nothing
            expected = values
        # The order of the sums differs, over 40 numbers near 1.
        found = window_means(values, size)
        assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_a_spike_changes_only_the_means_of_its_windows() -> None:
    values = [0.5] * 20
    values[3] = 1e20
    assert window_means(values, 5)[4:] == [0.5] * 12


def test_means_leave_out_what_is_not_finite_and_say_so(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 11):
            writer.write({"step": step, "reward/mean": math.nan if step == 8 else 0.5})
    [reward, *_] = summarize(read_metrics(tmp_path))
    assert (reward.last, reward.not_finite) == (0.5, 1)
    assert "(not finite at 1 steps)" in " ".join(printed_at_the_end(tmp_path).split())


def test_an_accuracy_has_its_interval_and_its_number_of_prompts(make_run: RunMaker) -> None:
    run_dir = make_run("run")
    with MetricsWriter(run_dir) as writer:
        interval = {"evaluation/accuracy_low": 0.3, "evaluation/accuracy_high": 0.8}
        record = {"step": 7, "evaluation/accuracy": 0.55, "evaluation/prompts": 16}
        writer.write(record | interval)
    printed = " ".join(printed_at_the_end(run_dir).split())
    assert "95% interval, n = 16 30.0% to 80.0%" in printed
    page = write_report([run_dir], run_dir).read_text()
    assert "first to last (n = 16, 95% of the last 30.0% to 80.0%)" in page


def configured(run_dir: Path, config: str) -> Path:
    (run_dir / "config.resolved.yaml").write_text(config)
    return run_dir


def printed_comparison(runs: list[Path], monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    report.print_results(runs, stream)
    report.print_comparison(runs, stream)
    return stream.getvalue()


def test_the_results_of_several_runs_are_printed(
    make_run: RunMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run("a[red]"), make_run("b:x:y", bonus=0.3), tmp_path / "sft"]
    make_stage_run(runs[2], "sft", [3.0, 2.0])
    lines = printed_comparison(runs, monkeypatch, 100).splitlines()
    rows = [line.split() for line in lines]
    assert ["a[red]", "6", "0.600", "0.600", "55.0%", "55.0%", "12", "s"] in rows
    assert ["b:x:y", "6", "0.900", "0.900", "85.0%", "85.0%", "12", "s"] in rows
    assert ["sft", "2", "2.50", "2.50", "2.00", "4.00", "3.00", "s"] in rows
    one = io.StringIO()
    report.print_results(runs[:1], one)
    assert one.getvalue().splitlines()[0].rstrip() == "a[red]: 6 steps"
    assert printed_at_the_end(runs[1]).startswith("b:x:y: 6 steps")


def test_settings_that_differ_are_whole_words_one_key_each(
    make_run: RunMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping is shown with one line for each key. A comparison that is too wide for columns is
    shown as a list."""
    config = "rollout: {{vllm: {{servers: {0}, options: {{max_num_seqs: {0}}}}}, engine: vllm}}\n"
    runs = [configured(make_run(f"[bold]_{n}"), config.format(n)) for n in range(2)]
    wide = printed_comparison(runs, monkeypatch, 100)
    rows = [line.split() for line in wide.splitlines()]
    assert ["rollout.vllm.servers", "0", "1"] in rows
    assert ["rollout.vllm.options.max_num_seqs", "0", "1"] in rows
    assert ["key", "[bold]_0", "[bold]_1"] in rows and "{" not in wide
    runs += [configured(make_run("x" * 40 + str(n)), config.format(n)) for n in range(5)]
    narrow = printed_comparison(runs, monkeypatch, 80).partition("settings that differ:")[2]
    assert "  rollout.vllm.servers\n    [bold]_0: 0\n    [bold]_1: 1\n" in narrow
    assert all(f"    {'x' * 40}{n}: {n}\n" in narrow for n in range(5))
    page = write_report(runs, tmp_path / "out").read_text()
    assert "rollout.vllm.options.max_num_seqs" in page and "{&#39;" not in page


def test_every_table_says_from_which_reward_a_response_is_correct(
    make_run: RunMaker, tmp_path: Path
) -> None:
    # the configuration of `whole` does not have the key yet
    half, whole = make_run("half"), make_run("whole")
    (half / "config.resolved.yaml").write_text("evaluation: {correct_at: 0.5}\n")
    rows = [line.split() for line in printed_at_the_end(half).splitlines()]
    assert ["held-out", "accuracy", "(reward", "≥", "0.5)"] in [row[:5] for row in rows]
    # a metric without values has no row
    assert ["held-out", "reward"] not in [row[:2] for row in rows]
    for runs, name in (
        ([half], "held-out accuracy (reward ≥ 0.5)"),
        ([whole], "held-out accuracy (reward ≥ 1)"),
        ([half, whole], "last held-out accuracy (reward ≥ evaluation.correct_at)"),
    ):
        assert name in write_report(runs, tmp_path / "report").read_text(encoding="utf-8")


def test_wall_time_is_the_sum_over_all_phases() -> None:
    records = [
        {"phase": "sft", "step": 1, "perf/step_seconds": 1.5},
        {"step": 1, "perf/step_seconds": 2.0},
        {"step": 2, "perf/step_seconds": None},
    ]
    assert wall_seconds(records) == 3.5
    assert wall_seconds([{"step": 1}]) is None


def test_without_plots_the_summary_alone_is_printed_as_plain_text(make_run: RunMaker) -> None:
    run_dir = make_run("gspo/seed_2")
    text = printed_at_the_end(run_dir)
    assert not (run_dir / "plots").exists() and "report" not in text
    assert "\x1b" not in text
    assert text.splitlines()[0].rstrip() == "gspo/seed_2: 6 steps"
    row = next(line.split() for line in text.splitlines() if "reward" in line)
    assert row == ["reward", "0.100", "0.600", "0.600", "6"]
    assert re.search(r"time of steps\s+12 s", text)


def test_finishing_a_run_leaves_plots_and_report_and_says_where(make_run: RunMaker) -> None:
    run_dir = make_run("a_run_whose_name_is_longer_than_a_line_of_a_terminal_" + "x" * 60)
    text = printed_at_the_end(run_dir, plots=True)
    assert (run_dir / "plots" / "learning.png").is_file()
    assert f"run     {run_dir}\n" in text and f"report  {run_dir / 'report.html'}\n" in text
    assert "held-out accuracy" in text


def test_a_plot_that_fails_does_not_make_the_run_fail(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for a picture")

    monkeypatch.setattr(plots, "plot_run", fail)
    text = printed_at_the_end(make_run("run"), plots=True)
    assert "report  not written: MemoryError: no room for a picture" in text
    assert "reward" in text


def test_finishing_with_a_closed_stdout_still_writes_the_report(make_run: RunMaker) -> None:
    run_dir, stream = make_run("run"), io.StringIO()
    stream.close()
    finish_run(run_dir, stream)
    assert (run_dir / "report.html").is_file()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (float("nan"), "not finite"),
        (0.000653, "0.000653"),
        (1.5e-6, "1.50e-06"),
        (0.5, "0.500"),
        (12.345, "12.3"),
        (999.7, "1000"),
        (5041.7, "5,042"),
        (2.5e7, "2.50e+07"),
    ],
)
def test_numbers_have_three_significant_digits(value: float | None, text: str) -> None:
    assert progress.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0.40 s"), (59.4, "59 s"), (61, "1:01"), (3725, "1:02:05"), (356580, "4d 03:03")],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


def test_a_tiny_negative_share_is_no_minus_zero() -> None:
    assert [progress.fixed(-1e-9), progress.points(-1e-9), progress.percent(-1e-9)] == [
        "0.000",
        "0.0",
        "0.0%",
    ]
    assert [progress.fixed(-0.25), progress.percent(-0.001)] == ["-0.250", "-0.1%"]
