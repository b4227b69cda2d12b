"""Writes the value of a mathematical answer as text, so that equal answers in a vote match.

This module does not use sympy's simplification, which may take minutes for a short power tower. It
computes the numbers itself, with a limit on their size.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_MOST_BITS = 8192  # limit for a numerator or denominator
_MOST_FACTORIAL = 500
_MOST_BITS_OF_RESPONSE = 1 << 18  # of a number that math-verify computes, a fraction of a second
_DIGITS = 12  # significant digits of a number that is not a fraction
_SMALL = Fraction(1, 100_000)  # with 6 decimals, a smaller number has at most one digit
_FUNCTIONS: dict[str, Callable[..., complex]] = {
    "log": cmath.log,
    "exp": cmath.exp,
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "asin": cmath.asin,
    "acos": cmath.acos,
    "atan": cmath.atan,
    "Abs": abs,
}


def value_text(form: Any) -> str:
    """Return the text of an expression that math-verify has parsed.

    A rational number is written as a fraction, any other number with twelve digits. `x = 5` becomes
    5. Sets, tuples and intervals are written with the values of their members. Other forms are
    written as sympy writes them."""
    kind = type(form).__name__
    if kind == "Equality" and getattr(form.lhs, "is_Symbol", False):
        return value_text(form.rhs)
    if kind in ("FiniteSet", "Tuple"):
        members = [value_text(each) for each in form.args]
        left, right = "{}" if kind == "FiniteSet" else "()"
        return f"{left}{', '.join(sorted(members) if kind == 'FiniteSet' else members)}{right}"
    if kind == "Interval":
        left, right = "(" if form.left_open else "[", ")" if form.right_open else "]"
        return f"{left}{value_text(form.start)}, {value_text(form.end)}{right}"
    exact = _exact(form)
    number = _decimal(form) if exact is None else None
    if number is not None:
        near = Fraction(number).limit_denominator(10_000)  # log 8 to the base 2 is exactly 3
        if abs(near - Fraction(number)) <= abs(near) * Fraction(1, 10**_DIGITS):
            exact = near
    if exact is not None:
        return str(exact)
    return str(form) if number is None else f"{number:.{_DIGITS}g}"


def _is_small(value: Fraction) -> bool:
    return max(value.numerator.bit_length(), value.denominator.bit_length()) <= _MOST_BITS


def _exact(form: Any) -> Fraction | None:
    """Return the value if it is a fraction; None if it is not one or has too many bits."""
    kind = type(form).__name__
    if getattr(form, "is_Rational", False):
        return Fraction(int(form.p), int(form.q))
    if getattr(form, "is_Float", False):
        return Fraction(str(form)) if form.is_finite else None
    arguments = [_exact(each) for each in getattr(form, "args", ())]
    values = [value for value in arguments if value is not None]
    if not values or len(values) < len(arguments):
        return None
    result: Fraction | None = None
    if kind == "UnevaluatedExpr":
        result = values[0]
    elif kind == "Add":
        result = sum(values, Fraction(0))
    elif kind == "Mul":
        result = Fraction(1)
        for value in values:
            if not _is_small(result := result * value):
                return None
    elif kind == "Pow":
        result = _power(*values)
    elif kind == "factorial" and values[0].denominator == 1:
        number = values[0].numerator
        result = Fraction(math.factorial(number)) if 0 <= number <= _MOST_FACTORIAL else None
    elif kind == "Abs":
        result = abs(values[0])
    return result if result is not None and _is_small(result) else None


def are_small_and_differ(form: Any, other: Any) -> bool:
    r"""Return whether two expressions are fractions near 0, and differ by more than a thousandth.

    math-verify compares numbers to 6 or to 16 decimals, so for it 1.6 \cdot 10^{-19} is 0."""
    one, two = _exact(form), _exact(other)
    if one is None or two is None:
        return False
    larger = max(abs(one), abs(two))
    return larger < _SMALL and abs(one - two) * 1000 > larger


def is_too_large(form: Any) -> bool:
    """Return whether a number in an expression of sympy may have more than `_MOST_BITS_OF_RESPONSE`
    bits. Python may compute with larger ones for a minute, in one step that no time limit ends."""
    return _most_bits(form) > _MOST_BITS_OF_RESPONSE


def _most_bits(form: Any) -> float:
    """Return an upper limit of the bits of all numbers in an expression."""
    if getattr(form, "is_Rational", False):
        return max(form.p.bit_length(), form.q.bit_length())
    inner = form.flat() if hasattr(form, "flat") else getattr(form, "args", ())
    parts = [_most_bits(part) for part in inner]
    kind = type(form).__name__
    if kind == "Pow" and len(parts) == 2 and not form.free_symbols:
        exponent = form.args[1]
        bits = parts[1]
        if exponent.is_Rational:
            bits = exponent.p.bit_length() - exponent.q.bit_length() + 1
        size = 2.0 ** min(bits, 64)
        return max(parts[0], 1) * max(size, 1)
    if kind in ("factorial", "gamma", "binomial") and parts:
        number = 2.0 ** min(parts[0], 64)
        return max(number * math.log2(number + 1), *parts) if parts[0] > 12 else sum(parts) + 2**12
    return sum(parts)


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return a power; None if it is not a fraction or has too many bits."""
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > _MOST_BITS or (base == 0 and exponent < 0):
        return None
    if exponent.denominator == 1:
        return Fraction(base**exponent.numerator)
    if base < 0 or exponent.denominator > bits:
        return base if base == 1 else None
    from sympy import integer_nthroot  # math-verify has imported it

    parts = (base.numerator, base.denominator)
    (over, under), are_exact = zip(*(integer_nthroot(n, exponent.denominator) for n in parts))
    return Fraction(over, under) ** exponent.numerator if all(are_exact) else None


def _decimal(form: Any) -> float | None:
    """Return the value if it is a real number. Returns None if it is not, or if it is too large for
    a float."""
    try:
        value = _number(form)
    except (ArithmeticError, ValueError):
        return None
    if value is None or abs(value.imag) > abs(value) * 10.0**-_DIGITS:
        return None
    return value.real if math.isfinite(value.real) else None


def _number(form: Any) -> complex | None:
    kind = type(form).__name__
    if (exact := _exact(form)) is not None:
        return complex(float(exact))
    if getattr(form, "is_NumberSymbol", False):  # pi and e
        return complex(float(form))
    values = [_number(each) for each in getattr(form, "args", ())]
    if not values or None in values:
        return None
    numbers = [value for value in values if value is not None]
    if kind == "UnevaluatedExpr":
        return numbers[0]
    if kind == "Add":
        return sum(numbers)
    if kind == "Mul":
        return math.prod(numbers)
    if kind == "Pow":
        return complex(numbers[0] ** numbers[1])
    return complex(_FUNCTIONS[kind](*numbers)) if kind in _FUNCTIONS else None
