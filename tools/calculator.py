"""Arithmetic for a planner, evaluated by ``simpleeval`` and bounded in time and size."""

from __future__ import annotations

import ast
import math
import operator
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from simpleeval import InvalidExpression, SimpleEval

from rltr_verl import tool
from rltr_verl.errors import BadArguments

MAX_LENGTH = 200
MAX_DIGITS = 60
"""Bounds of one call (ours): characters of the expression, and decimal digits of any power."""

_ALLOWED = re.compile(r"[\d\s.+\-*/%()]+", re.ASCII)
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+")  # superscript digits; NFKC would make 3² a 32
_OTHER_DIGITS = re.compile("[\u2080-\u2089\u2460-\u249b\u24ea]")  # below the line, circled, numbered lists
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})


@tool(pure=True)
def calculator(expression: str) -> str:
    """Compute an arithmetic expression with + - * / // % ** and brackets.

    Args:
        expression: the expression, for example "(41 + 17) / 2".
    """
    source = _RAISED.sub(lambda found: f"**{found[0]}", expression)
    source = " ".join(unicodedata.normalize("NFKC", source).translate(_SIGNS).split())
    if len(source) > MAX_LENGTH:
        raise BadArguments(f"the expression is longer than {MAX_LENGTH} characters")
    if not _ALLOWED.fullmatch(source) or _OTHER_DIGITS.search(expression):
        raise BadArguments("an expression holds only numbers, + - * / // % ** and brackets")
    try:
        return _render(SimpleEval(operators=_OPERATORS, functions={}, names={}).eval(source))
    except (
        InvalidExpression,
        ArithmeticError,
        SyntaxError,
        ValueError,
        TypeError,
        MemoryError,
        RecursionError,
    ) as error:
        raise BadArguments(f"cannot compute {source}: {error}") from None


def _power(base: Any, exponent: Any) -> Any:
    """``base ** exponent``, refused when the result would pass ``MAX_DIGITS`` digits (it could take minutes)."""
    if abs(exponent) * len(str(int(abs(base)))) > MAX_DIGITS:
        raise ValueError("the power is too large")
    return base**exponent


def _divide(dividend: Any, divisor: Any) -> Any:
    """``dividend / divisor``; of integers without a remainder the quotient is exact, whatever its size."""
    if isinstance(dividend, int) and isinstance(divisor, int) and divisor and dividend % divisor == 0:
        return dividend // divisor
    return dividend / divisor


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _render(value: Any) -> str:
    """Integers in full, other numbers with no trailing zeros and the 15 significant digits that a float holds."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("the result is not a finite real number")
    return str(value) if isinstance(value, int) else f"{value:.15g}"
