from __future__ import annotations

import contextlib
import io
import math
import re

import pytest

from gspo_megatron.observe.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class BrokenTerminal(Terminal):
    """A stream that raises `error` at each write."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error

    def flush(self) -> None:
        raise self._error


def lines(
    total: int, *steps: tuple[float, dict[str, object]], initial_step: int = 0, fails: bool = False
) -> list[str]:
    """The printed lines for these steps, each given as (seconds, metrics)."""
    clock, stream = Clock(), io.StringIO()
    outcome = pytest.raises(RuntimeError) if fails else contextlib.nullcontext()
    with outcome, Progress(total, "RL", stream, initial_step=initial_step, clock=clock) as progress:
        for step, (seconds, metrics) in enumerate(steps, start=initial_step + 1):
            clock.now += seconds
            progress.update(step, metrics)
        if fails:
            raise RuntimeError
    return stream.getvalue().splitlines()


def test_slow_steps_each_get_a_line_with_all_figures() -> None:
    figures = {"reward/mean": 0.25, "loss": -1.2e-4, "grad_norm": 0.3}
    more = {"clip/token/binding": 0.125, "evaluation/accuracy": 0.5}
    first, second = lines(10, (3, figures | more), (5, figures))
    assert first == (
        "RL   1/10  reward 0.250  accuracy 0.500  loss -0.000120  grad norm 0.300  "
        "clipped 12.5%  3.00 s/step  ETA 27 s"
    )
    # The line shows no accuracy without a new evaluation. The pace is a mean over both steps.
    assert second == (
        "RL   2/10  reward 0.250  accuracy 0.500  loss -0.000120  grad norm 0.300  "
        "4.00 s/step  ETA 32 s"
    )


def test_clipped_tokens_are_shown_and_not_the_sequences_that_have_any() -> None:
    """Of long responses nearly all have a clipped token, if tokens are clipped."""
    [line] = lines(1, (3, {"clip/sequence/binding": 0.99, "clip/token/binding": 0.002}))
    assert "clipped 0.2%" in line


def test_fast_steps_are_throttled_to_a_line_in_two_seconds_and_the_last() -> None:
    shown = [int(line.split("/")[0].split()[1]) for line in lines(100, *[(0.125, {})] * 100)]
    assert shown == [1, 17, 33, 49, 65, 81, 97, 100]


def test_a_slow_step_tells_what_it_does_every_30_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(9, "RL", stream, clock=clock) as progress:
        for second in range(100):
            clock.now += 1.0
            progress.doing(f"rewards {second}/100")
            progress.doing("")
            if second == 40:
                progress.update(1, {})
    told = [line for line in stream.getvalue().splitlines() if "rewards" in line]
    assert told == [
        "RL  step 1: rewards 29/100",
        "RL  step 2: rewards 70/100",
    ]


def test_the_last_line_tells_how_long_it_took() -> None:
    assert lines(4, *[(30.0, {})] * 4)[-1].endswith("took 2:00")


def test_a_phase_that_ends_early_still_shows_its_last_step() -> None:
    found = lines(10, *[(0.1, {"loss": 1.0})] * 3, fails=True)
    assert [line.split("/")[0] for line in found] == ["RL   1", "RL   3"]


def test_a_resumed_phase_counts_only_its_own_steps_for_the_pace() -> None:
    assert lines(100, (2, {}), initial_step=50)[0].endswith("2.00 s/step  ETA 1:38")


def test_the_pace_follows_a_change_of_speed() -> None:
    assert "2.00 s/step" in lines(1000, *[(10, {})] * 30, *[(2, {})] * 30)[-1]


def test_the_pace_names_what_is_counted() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(2, "gsm8k", stream, unit="response", clock=clock) as progress:
        clock.now += 3.0
        progress.update(1, {})
    assert stream.getvalue() == "gsm8k  1/2  3.00 s/response  ETA 3.00 s\n"


def test_a_loss_that_is_not_finite_is_told() -> None:
    for loss in (math.nan, None):
        assert "loss not finite" in lines(2, (1, {"loss": loss}))[0]


def test_a_rank_that_does_not_print_shows_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress(3, "RL", stream, enabled=False) as progress:
            progress.update(1, {"reward/mean": 1.0})
            progress.note("text")
        assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    with Progress(4, "Fine-tuning", terminal) as progress:
        progress.note("a [note]")
        progress.update(4, {"reward/mean": 0.5, "evaluation/accuracy": 0.75})
        progress.doing("rewards 3/7")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "a [note]" in text and "Fine-tuning" in text and "━" in text
    assert "rewards 3/7" in text
    assert "4/4" in text and "reward 0.500" in text and "accuracy 0.750" in text
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is shown again


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_redraw_gets_lines(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    terminal = Terminal()
    with Progress(1, "RL", terminal) as progress:
        progress.note("saved [step 1] in a/b")
        progress.update(1, {"loss": 0.5})
    assert terminal.getvalue().startswith("saved [step 1] in a/b\nRL  1/1  loss 0.500  ")
    assert "\x1b" not in terminal.getvalue()


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), ValueError("I/O operation on closed file"), OSError(28, "full")]
)
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_broken_stream_does_not_stop_the_run(
    error: Exception, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    with Progress(2, "RL", BrokenTerminal(error)) as progress:
        progress.update(1, {"loss": 0.5})
        progress.note("text")
        progress.update(2, {"loss": "high"})


def test_no_stderr_at_all_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with Progress(1, "RL") as progress:
        progress.update(1, {})


def test_an_encoding_without_the_characters_gets_replacements() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Progress(1, "Übung", stream) as progress:
        progress.update(1, {"loss": 1.0})
    assert raw.getvalue().startswith(b"?bung  1/1  loss 1.00")


@pytest.mark.parametrize("terminal", [False, True])
def test_what_has_no_steps_shows_no_count(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One example is the evaluation of a model that is not trained."""
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal() if terminal else io.StringIO(), Clock()
    with Progress(0, "evaluation", stream, clock=clock) as progress:
        clock.now += 40
        progress.doing("rewards 1/8")
        clock.now += 1
        progress.update(0, {"evaluation/accuracy": 0.5})
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())
    assert "evaluation" in text and "accuracy 0.500" in text
    assert "0/0" not in text and "step 1" not in text
    if not terminal:
        assert text.splitlines()[0] == "evaluation  rewards 1/8"
