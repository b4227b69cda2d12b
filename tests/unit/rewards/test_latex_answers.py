r"""200 unusual forms of answers, in responses and in files, as math-verify reads them.

Most of the responses are given as the inside of \boxed{...} alone. The responses in WHOLE are given
completely.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from gspo_megatron.evaluation.scores import majority_at_k
from gspo_megatron.rewards.math import math, read_answer
from gspo_megatron.types import Sample

# For each gold answer: (equal forms, different forms). Two blanks separate the forms.
BOXED: dict[str, tuple[str, str]] = {
    # whole numbers, as in AIME
    "204": (
        r"204  204.0  \text{204}  \textbf{204}  \mathbf{204}  {204}  \,204\,  +204  $204$"
        r"  n=204  n = 204  \frac{408}{2}  204\text{ minutes}  \mathrm{204}"
        r"  \left(204\right)  2\cdot 102",
        r"205  -204  20.4  2040  204!  \frac{204}{2}  0.204  402  2^{204}  \text{none}",
    ),
    "033": (r"33  033  33.0", r"330  3  0.33  -33"),
    "007": (r"7  007  \frac{14}{2}", r"70  700  0.07"),
    "336^\\circ": (r"336^\circ  336  336^{\circ}  336°  336\degree", r"36^\circ  366  24^\circ"),
    "1,234,567": (r"1234567  1,234,567  1{,}234{,}567  1\,234\,567", r"1234568  1.234567"),
    "10 000/3": (r"\frac{10000}{3}  10 000/3  10\,000/3", r"0  10  10/3"),
    "10 000": (r"10000  10 000  10\,000  10,000", r"0  10  100"),
    "0": (r"0  0.0  1-1  \frac{0}{5}  -0", r"1  \emptyset  0.001  0.0000001"),
    "-5": (r"-5  -5.0  -\frac{10}{2}  x=-5  −5", r"5  -0.5  -50"),
    # fractions, decimals, percentages
    r"\frac{3}{4}": (
        r"\frac{3}{4}  \frac34  \dfrac{3}{4}  \tfrac34  3/4  0.75  .75  \frac{6}{8}  75\%"
        r"  \left(\frac{3}{4}\right)  1-\frac14",
        r"\frac{4}{3}  0.7  3  \frac{3}{5}  -\frac{3}{4}  0.075",
    ),
    r"-\frac{1}{2}": (r"-\frac{1}{2}  \frac{-1}{2}  -1/2  -0.5  \frac{1}{-2}", r"\frac12  -2"),
    "0.333": (r"0.333  .333  \frac{333}{1000}", r"0.3  0.34"),
    r"2\frac{1}{3}": (r"\frac{7}{3}  2\frac{1}{3}  2 1/3", r"\frac{2}{3}  \frac{3}{7}  1"),
    "-2 1/3": (r"-2 1/3  -\frac{7}{3}  -2\frac13", r"-1  \frac{7}{3}  -\frac{5}{3}"),
    # scientific notation, and numbers near 0
    "2.5e5": (r"250000  2.5e5  2.5E+5  2.5\times 10^5  250,000", r"2.5  25000  2.5e-5"),
    r"1.6\times 10^{-19}": (
        r"1.6\times 10^{-19}  1.6 \cdot 10^{-19}  16\times 10^{-20}",
        r"3.2\times 10^{-19}  1.6\times 10^{-18}  -1.6\times 10^{-19}  0  0.0",
    ),
    "0.0000003": (r"0.0000003  3\times 10^{-7}  3 \cdot 10^{-7}", r"0.0000004  0  0.0"),
    # roots, powers and constants
    r"\sqrt{2}": (
        r"\sqrt{2}  \sqrt2  2^{1/2}  2^{\frac{1}{2}}  \frac{2}{\sqrt{2}}  \frac{\sqrt{8}}{2}",
        r"2  1.4  -\sqrt{2}  \sqrt[3]{2}  \sqrt{3}",
    ),
    r"3\sqrt{5}": (r"3\sqrt{5}  \sqrt{45}  3 \cdot \sqrt{5}  \frac{15}{\sqrt5}", r"5\sqrt3  15"),
    r"\frac{\pi}{6}": (r"\frac{\pi}{6}  \pi/6  \frac{1}{6}\pi  \frac{2\pi}{12}", r"\pi  30  6\pi"),
    "e^2": (r"e^2  e^{2}  e\cdot e", r"2e  e  2^e"),
    "2^{10}": (r"1024  2^{10}  4^5  32^2", r"20  1023  10^2"),
    r"\log_2 3": (r"\log_2 3  \log_{2}{3}  \frac{\ln 3}{\ln 2}", r"\log_3 2  \ln 3"),
    r"\binom{10}{3}": (r"120  \binom{10}{3}  \binom{10}{7}", r"10  \binom{3}{10}  30"),
    "5!": (r"120  5!", r"5  24"),
    # expressions
    "x^2+2x+1": (
        r"x^2+2x+1  (x+1)^2  1+2x+x^2  x^{2}+2x+1  (x+1)(x+1)  f(x)=x^2+2x+1",
        r"x^2+1  (x-1)^2  x^2+2x  y^2+2y+1",
    ),
    r"\frac{x}{x+1}": (r"\frac{x}{x+1}  x/(x+1)  1-\frac{1}{x+1}", r"\frac{x+1}{x}  x"),
    "3+4i": (r"3+4i  4i+3  3 + 4i", r"3-4i  7  4+3i"),
    # tuples, sets and intervals
    "(1,2)": (
        r"(1,2)  (1, 2)  \left(1,2\right)  (1.0, 2)  \left( 1, 2 \right)  (1,\frac{4}{2})",
        r"(2,1)  (1,3)  (1,2,3)  12",
    ),
    r"\{1,2,3\}": (r"\{1,2,3\}  \{3,2,1\}  1,2,3  3, 1, 2  \left\{1,2,3\right\}", r"\{1,2\}"),
    r"\emptyset": (r"\emptyset  \varnothing  \{\}", r"0  \{0\}"),
    "[0,1)": (r"[0,1)  \left[0,1\right)", r"(0,1)  [0,2)"),
    r"(-\infty,3]": (r"(-\infty,3]  \left(-\infty,3\right]", r"(-\infty,2]  (3,\infty)"),
    r"x=1,\ x=-2": (r"1,-2  -2, 1  x=1,-2  \{-2,1\}", r"1  1,2"),
    r"\begin{pmatrix}1\\2\end{pmatrix}": (
        r"\begin{pmatrix}1\\2\end{pmatrix}  \begin{pmatrix} 1 \\ 2 \end{pmatrix}"
        r"  \begin{bmatrix}1\\2\end{bmatrix}",
        r"\begin{pmatrix}2\\1\end{pmatrix}",
    ),
    # units
    r"12\text{ cm}": (r"12\text{ cm}  12  12\ \text{cm}  12\,\mathrm{cm}", r"120  1.2"),
    r"\$18.90": (r"18.90  \$18.90  18.9", r"18  1890"),
}
# Whole responses: (response, gold answer, whether the response is right).
WHOLE: Sequence[tuple[str, str | float, bool]] = (
    ("The answer is 82.", 82, True),
    (r"\boxed{\frac{1}{2}}", 0.5, True),
    (r"\boxed{10^{-7}}", 1e-7, True),
    (r"\boxed{10^{16}}", 1e16, True),
    ("1/2", r"$\frac12$", True),
    ("$1+x^2$", "x^2+1", True),
    (r"\boxed{5} and so \boxed{4}, not 5", "5", False),
    (r"\boxed{4} and \boxed{5}", r"\{4, 5\}", True),  # all boxes together are the answer
    (r"\boxed{A \cup B}", r"A \cup B", True),  # compared as plain text
    (r"\boxed{A \cap B}", r"A \cup B", False),
    ("The answer is 204.", "204", True),
    ("The answer is $204$.", "204", True),
    ("**Answer: 204**", "204", True),
    ("so $m+n = 200+4 = \\boxed{204}$", "204", True),
    ("\\[\n\\boxed{204}\n\\]", "204", True),
    ("$$\\boxed{\\boxed{204}}$$", "204", True),
    ("\\boxed{203}, no wait, \\boxed{204}", "204", True),
    ("\\boxed{204}, no wait, \\boxed{203}", "204", False),
    ("<think>maybe \\boxed{1}</think> It is \\boxed{204}", "204", True),
    ("\\boxed {204}", "204", True),
    ("\\fbox{204}", "204", True),
    ("\\boxed{204", "204", False),
    ("\\boxed{}", "204", False),
    ("", "204", False),
    ("I do not know.", "204", False),
    ("It is between 200 and 205.", "204", False),
    ("\\boxed{204}\\boxed{204}", "204", True),
    ("The final answer is $\\frac{3}{4}$. I hope it is correct.", "\\frac{3}{4}", True),
    ("\\boxed{x = 204 \\text{ or } x = 5}", "204", False),
)


# Forms that are equal to the answer, although math-verify does not find that: (response, gold
# answer).
MISSED: Sequence[tuple[str, str]] = (
    ("204 204 204", "204"),
    (r"\boxed{204.}", "204"),
    (r"\boxed{\boldsymbol{204}}", "204"),
    (r"\boxed{\text{The answer is }204}", "204"),
    (r"\boxed{\text{033}}", "033"),
    (r"\boxed{0\le x<1}", "[0,1)"),
    (r"\boxed{x\le 3}", r"(-\infty,3]"),
)


def cases() -> list[tuple[str, str | float, bool]]:
    found = list(WHOLE)
    for gold, of_gold in BOXED.items():
        for forms, is_equal in zip(of_gold, (True, False), strict=True):
            found += [
                (rf"So it is $\boxed{{{form}}}$.", gold, is_equal) for form in forms.split("  ")
            ]
    return found


def test_there_are_two_hundred() -> None:
    assert len({(response, gold) for response, gold, _ in cases()}) >= 200


@pytest.mark.parametrize("is_equal", [True, False])
def test_answers_are_compared_by_value(is_equal: bool) -> None:
    wrong = []
    for response, gold, expected in cases():
        if expected == is_equal:
            sample = Sample("", gold, response, False)
            if bool(math(sample)) != is_equal:
                wrong.append((response, gold))
    assert wrong == []


def test_what_is_missed_is_known() -> None:
    r"""If this fails, math-verify has improved. Then move the form from MISSED to the other
    tables."""
    missed = [(text, gold) for text, gold in MISSED if not math(Sample("", gold, text, False))]
    assert missed == list(MISSED)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1}, no: \boxed {\dfrac12}.", "1/2"),
        ("it is 0.50", "1/2"),
        (r"\fbox{x^2}", "x**2"),
        (r"\boxed{\text{ Even}}", "even"),
        ("no idea", None),
        # Three spellings of one value.
        *((rf"\boxed{{{text}}}", "1/1000") for text in ("10^{-3}", "0.001", "1/1000")),
        *((rf"\boxed{{{text}}}", "5") for text in ("x=5", "5", r"\frac{10}{2}", r"\sqrt{25}")),
        *((rf"\boxed{{{text}}}", "120") for text in ("5!", r"2\cdot 60", "100+20")),
        *((rf"\boxed{{{text}}}", "1/2") for text in (r"50\%", r"\frac{\sqrt{4}}{4}", r"\log_4 2")),
        *((rf"\boxed{{{text}}}", "3.46410161514") for text in (r"\sqrt{12}", r"2\sqrt{3}")),
        (r"\boxed{\{2, 0.5, \sqrt{9}\}}", "{1/2, 2, 3}"),
        (r"\boxed{(0.5, \infty)}", "(1/2, oo)"),
        (r"\boxed{\frac{1}{0}}", "zoo"),
    ],
)
def test_votes_of_equal_answers_are_equal(response: str, answer: str | None) -> None:
    assert read_answer(Sample("", "", response, False)) == answer


@pytest.mark.parametrize("text", ["9^{9^{9^9}}", "(10^9)!", "2^{-10^{12}}", r"10^{9999}+1"])
def test_the_value_of_a_huge_number_is_not_computed(text: str) -> None:
    start = time.process_time()
    assert read_answer(Sample("", "", rf"\boxed{{{text}}}", False))
    assert time.process_time() - start < 4.0


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("0.001", ["10^{-3}", "0.001", "1/1000", "7", "7"]),
        ("5", ["x=5", "5", "7", "7", r"\frac{10}{2}"]),
        # Here the most frequent answer is wrong.
        ("9", ["1", "10^{-3}", "0.001", "9", "9", r"\frac{1}{1000}"]),
    ],
)
def test_the_majority_is_that_of_a_value(answer: str, texts: list[str]) -> None:
    samples = [Sample("", answer, rf"\boxed{{{text}}}", False) for text in texts]
    correct = [math(sample) == 1.0 for sample in samples]
    wanted = float(answer != "9")
    assert majority_at_k(correct, [read_answer(sample) for sample in samples]) == wanted
    # Right answers are counted together, even if their texts differ.
    if wanted:
        assert majority_at_k(correct, texts) == wanted
