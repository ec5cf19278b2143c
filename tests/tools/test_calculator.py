from __future__ import annotations

import time

import pytest

from rltr_verl.errors import BadArguments
from rltr_verl.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("41 + 17", "58"),
        ("(41 + 17) / 2", "29"),
        ("10 / 4", "2.5"),
        ("1 / 3", "0.333333333333333"),
        ("98765432109876 / 2", "49382716054938"),
        ("197530864219753 / 2", "98765432109876.5"),
        ("12345678901234567890 / 10 + 1", "1234567890123456790"),
        ("12345678.9012 * 1", "12345678.9012"),
        ("2 / 0.5", "4"),
        ("-7 // 2", "-4"),
        ("17 % 5", "2"),
        ("2 ** 10", "1024"),
        ("2 ^ 10", "1024"),
        ("7 × 6 − 2", "40"),
        ("５+５", "10"),
        ("3² + 2¹⁰", "1033"),
        ("1\n+ 2", "3"),
        ("(1 +\r\n2)\t* 3", "9"),
        ("0.1 + 0.2", "0.3"),
        ("12345678901234567890 * 10", "123456789012345678900"),
    ],
)
def test_arithmetic(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        *("", "   ", "41 +", "1 2", "((", "x + 1", "1e9", "'a' * 3", "__import__('os')", "1 if 1 else 2", "1; 2"),
        *("[1] * 9", "1 / 0", "0 ** -1", "(-8) ** 0.5", "1" * 201, "5 == 5", "lambda: 1", "1,000 + 1"),
        *("1 + 1\n2 + 2", "2₂", "1①", "½"),
    ],
)
def test_refused(expression):
    with pytest.raises(BadArguments):
        calculator(expression)


@pytest.mark.parametrize("expression", ["9**9**9", "(9**50)**50", "9.0**60*" * 24 + "1", "2**-9999999", "((((" * 40])
def test_bounded_in_time_and_size(expression):
    start = time.thread_time()
    with pytest.raises(BadArguments):
        calculator(expression)
    assert time.thread_time() - start < 5  # of this thread's CPU; unbounded, it is minutes
