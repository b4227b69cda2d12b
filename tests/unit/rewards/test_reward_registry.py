from __future__ import annotations

import importlib
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from gspo_megatron.rewards.registry import Reward, get_reward, register
from gspo_megatron.types import Reasoned, Sample, TurnRewards
from tests.unit.data.corpora import refusal
from tests.unit.rewards.scoring import score

SAMPLE = Sample(prompt="ab>", answer="ba", response="b\nb", truncated=False, num_tokens=7)
SHOWN = r"prompt 'ab>', response 'b\nb'"

MODULE = """
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nowhere import Unknown

CONSTANT = 3

def constant(sample, value: float = 0.5, *, label: str, times: int = 1, on: bool = True):
    return value * times

def anything(sample, **options):
    return len(options)

def gather(*arguments, scale: int = 1):
    return scale

def odd_hint(sample, value: Unknown = 1):
    return value

def no_sample():
    return 1.0

def only_keywords(*, sample):
    return 1.0

def of_batch(samples):
    return [1.0] * len(samples)

async def judged(sample):
    return 1.0

def misnamed(batch: list[Sample]):
    return [1.0] * len(batch)

def misnamed_sample(samples: Sample):
    return 1.0

def misnamed_group(group: Sample):
    return 0.0

def measured(sample):
    return 0.5

measured.figures = ("mean",)

def one_figure(sample):
    return 0.5

one_figure.figures = ("length")

class Judge:
    def __call__(self, sample, bonus: int = 0):
        return 1 + bonus

judge = Judge()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a user's module into the current directory, which is not on Python's search path."""
    name = "users_reward_module"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "broken_reward_module.py").write_text("x = 1\nraise KeyError('oh')\n")
    (tmp_path / "needy_reward_module.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "wrong_reward_module.py").write_text("def f(:\n")
    (tmp_path / "exits_reward_module.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def mistake_in(value: object) -> str:
    (message,) = refusal(score, Reward("mine", lambda sample: value), SAMPLE)
    assert message.startswith("reward 'mine' returned ")
    assert message.endswith(SHOWN)
    return message


def test_unknown_name_lists_the_allowed_ones() -> None:
    (line,) = refusal(get_reward, "exact")
    wrong, _, allowed = line.partition("; allowed: ")
    assert wrong == "reward.name = exact: no such reward"
    *names, own = allowed.split(", ")
    assert {"code", "exact_match", "llm_judge", "math", "per_character"} <= set(names)
    assert names == sorted(names) and own == "or give your own with reward.import_path"


def test_two_rewards_cannot_share_a_name() -> None:
    with pytest.raises(AssertionError, match="two rewards named 'exact_match'"):
        register("exact_match")(lambda sample: 1.0)


def test_options_reach_the_function(module: str) -> None:
    reward = get_reward("exact_match", f"{module}:constant", {"label": "a", "value": 2, "times": 3})
    assert score(reward, SAMPLE) == 6.0
    assert reward.name == f"{module}:constant"
    assert score(get_reward("", f"{module}:anything", {"a": 1, "b": []}), SAMPLE) == 2.0
    assert score(get_reward("", f"{module}:gather", {"scale": 4}), SAMPLE) == 4.0
    assert score(get_reward("", f"{module}:odd_hint", {"value": 4}), SAMPLE) == 4.0
    assert score(get_reward("", f"{module}:judge", {"bonus": 2}), SAMPLE) == 3.0


def test_all_bad_options_are_named_at_once(module: str) -> None:
    path = f"{module}:constant"
    options = {"valu": 1, "times": 1.5, "on": 1, "value": True}
    assert refusal(get_reward, "", path, options) == [
        f"reward.options.valu = 1: {path} has no such option; allowed: value, label, times, on",
        "reward.options.times = 1.5: wrong type; int is wanted",
        "reward.options.on = 1: wrong type; bool is wanted",
        "reward.options.value = True: wrong type; float is wanted",
        f"reward.options.label: missing; {path} needs it",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("per_character", None, {"scale": 1}),
            "reward.options.scale = 1: per_character has no such option; it takes none",
        ),
        (
            ("", "{}:anything", {"sample": 1}),
            "reward.options.sample: not an option of {}:anything but its input",
        ),
        (("", "{}:no_sample"), "takes no sample as its first argument"),
        (("", "{}:only_keywords"), "takes no sample as its first argument"),
        (("", "{}:constnt"), "no function constnt; it has: constant"),
        (("", "{}:CONSTANT"), "no function CONSTANT"),
        (
            ("", "no_such_module_here.sub:f"),
            "no module named no_such_module_here, neither installed nor in {folder}",
        ),
        (
            ("", "broken_reward_module:f"),
            "failed: KeyError: 'oh' (broken_reward_module.py:2)",
        ),
        (("", "needy_reward_module:f"), "failed: No module named 'not_installed_anywhere'"),
        (("", "wrong_reward_module:f"), "failed: SyntaxError: "),
        (("", "exits_reward_module:f"), "failed: SystemExit: 0 (exits_reward_module.py:1)"),
        (
            ("", "{}:misnamed"),
            "reward {}:misnamed: its first parameter 'batch' is a list of samples; allowed: the "
            "name "
            "`samples` for a reward of a batch",
        ),
        (
            ("", "{}:misnamed_sample"),
            "its first parameter 'samples' is one sample; allowed: another name, such as `sample`",
        ),
        (("", "{}:misnamed_group"), "its first parameter 'group' is one sample; allowed: another"),
        (("", "{}:measured"), "its figure 'mean' is no name of a metric; allowed: letters, digits"),
        (("", "{}:one_figure"), "its attribute figures is 'length'; allowed: a tuple of names"),
        (
            ("", "{}:of_batch", {}, 2),
            "2: {}:of_batch: a function of a batch is called once; allowed",
        ),
    ],
)
def test_what_cannot_be_a_reward_is_refused(
    module: str, tmp_path: Path, arguments: tuple, expected: str
) -> None:
    name, *rest = arguments
    if rest[0] is not None:
        rest[0] = rest[0].format(module)
    line = refusal(get_reward, name, *rest)[0]
    assert expected.format(module, folder=tmp_path) in line


@pytest.mark.parametrize(
    ("name", "options", "positive"),
    [
        ("code", {}, ["seconds", "total_seconds", "memory_mb"]),
        ("llm_judge", {"url": "http://x/v1", "model": "m"}, ["best", "max_tokens", "seconds"]),
        (
            "llm_judge",
            {"mode": "pairs", "url": "http://x/v1", "model": "m"},
            ["max_tokens", "seconds"],
        ),
    ],
)
def test_an_option_out_of_its_range_is_refused(
    name: str, options: dict, positive: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo_megatron.process.sandbox.fault", lambda: None)
    get_reward(name, None, options | dict.fromkeys(positive, 1))
    assert sorted(refusal(get_reward, name, None, options | dict.fromkeys(positive, 0))) == [
        f"reward.options.{key} = 0: allowed: a finite number above 0" for key in sorted(positive)
    ]
    for wrong in (-1.0, float("nan"), float("inf")):
        (line,) = refusal(get_reward, name, None, {**options, "seconds": wrong})
        assert line.startswith(f"reward.options.seconds = {wrong}: allowed: ")


@pytest.mark.parametrize("path", ["module", "module.function", ":f", "m:", ".m:f", "m.:f"])
def test_malformed_import_paths_say_how_to_write_them(path: str) -> None:
    assert refusal(get_reward, "", path) == [
        f"reward.import_path = {path}: write it as package.module:function"
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.25, -0.25),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_and_booleans_are_scores(value: object, expected: float) -> None:
    result = score(lambda sample: value, SAMPLE)
    assert type(result) is float
    assert result == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan; a finite number is wanted"),
        (float("-inf"), "-inf; a finite number is wanted"),
        (np.float32("inf"), "a finite number is wanted"),
        (10**400, "a finite number is wanted"),
        pytest.param(10**5000, "(int); a finite number is wanted", id="many digits"),
        (Reasoned(0.5, None), "None as reason; a string is wanted"),
        (None, "None of type NoneType; a number is wanted"),
        ("1.0", "'1.0' of type str; a number is wanted"),
        ([1.0], "[1.0] of type list; a number is wanted"),
        (1j, "1j of type complex; a number is wanted"),
    ],
)
def test_anything_else_is_refused_with_reward_prompt_and_response(
    value: object, expected: str
) -> None:
    assert expected in mistake_in(value)


def test_long_texts_are_cut() -> None:
    long = Sample(prompt="p" * 10_000, answer="", response="", truncated=True)
    (message,) = refusal(score, lambda sample: float("nan"), long)
    assert "returned nan" in message and len(message) < 500


# --- rewards of turns -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "ends"),
    [
        ([0.5, -1], [3, 7]),
        ((True, 2), (1, 7)),
        ([1.0], [7]),
        (np.array([1, 2], dtype=np.float32), np.array([6, 7], dtype=np.int32)),
        ([0.25] * 7, range(1, 8)),  # each token is a turn
    ],
)
def test_turns_come_back_as_arrays(rewards: object, ends: object) -> None:
    found = score(lambda sample: TurnRewards(rewards, ends), SAMPLE)
    assert isinstance(found, TurnRewards)
    assert found.rewards.dtype == np.float64
    assert found.rewards.tolist() == [float(r) for r in rewards]
    assert found.ends.dtype == np.int64
    assert found.ends.tolist() == list(ends)


@pytest.mark.parametrize(
    ("rewards", "ends", "expected"),
    [
        ([1.0, float("nan")], [3, 7], "nan for turn 1; finite numbers are wanted"),
        ([float("-inf"), 1.0], [3, 7], "-inf for turn 0; finite numbers are wanted"),
        ([1e308, 1e308], [3, 7], "turns whose rewards add up to inf; a finite sum is wanted"),
        ([1.0], [3, 7], "1 rewards and 2 ends of turns; each turn needs one reward and one end"),
        ([1.0, 1.0], [7, 7], "end 7 for turn 1; it must be above its start, 7"),
        ([1.0, 1.0, 0], [4, 2, 7], "end 2 for turn 1; it must be above its start, 4"),
        ([1.0, 1.0], [0, 7], "end 0 for turn 0; it must be above its start, 0"),
        ([1.0], [-1], "end -1 for turn 0; it must be above its start, 0"),
        ([1.0, 1.0], [3, 6], "6 as the last end; the last turn must end at the response's 7"),
        ([1.0, 1.0], [3, 8], "8 as the last end; the last turn must end at the response's 7"),
        ([], [], "no turns; the last turn must end at the response's 7 tokens"),
        (["1.0"], [7], "['1.0'] as rewards of turns; a list of numbers is wanted"),
        ([None], [7], "[None] as rewards of turns; a list of numbers is wanted"),
        ([[1.0], [1.0, 2.0]], [3, 7], "as rewards of turns; a list of numbers is wanted"),
        (1.0, [7], "1.0 as rewards of turns; a list of numbers is wanted"),
        ([1.0], [7.0], "[7.0] as ends of turns; a list of integers is wanted"),
        ([1.0], [True], "[True] as ends of turns; a list of integers is wanted"),
        ([1.0], 7, "7 as ends of turns; a list of integers is wanted"),
    ],
)
def test_mistakes_in_turns_are_named(rewards: object, ends: object, expected: str) -> None:
    assert expected in mistake_in(TurnRewards(rewards, ends))


READER = """
def right(sample, digits: int = 1):
    return float(sample.answer == read(sample, digits))

def read(sample, digits):
    if digits < 0:
        raise SystemExit(0)
    return sample.response[-digits:] if digits else 1 / digits

right.read_answer = read
"""


def test_a_reward_of_the_user_may_read_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward_that_reads.py").write_text(READER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    path = "reward_that_reads:right"
    two = get_reward("", path, {"digits": 2})
    assert two.answer_in(SAMPLE) == "\nb"
    assert get_reward("", "reward_that_reads:read", {"digits": 1}).answer_in(SAMPLE) is None
    (line,) = refusal(get_reward("", path, {"digits": 0}).answer_in, SAMPLE)
    assert line == (
        "read_answer of reward 'reward_that_reads:right' raised ZeroDivisionError: division by "
        "zero (reward_that_reads.py:8)"
    )
    (line,) = refusal(get_reward("", path, {"digits": -1}).answer_in, SAMPLE)
    assert line.endswith(":right' raised SystemExit: 0 (reward_that_reads.py:7)")
    number = Reward("mine", two.function, read_answer=lambda sample: 3)
    (line,) = refusal(number.answer_in, SAMPLE)
    assert line == "read_answer of reward 'mine' returned 3; a text or None is wanted"
