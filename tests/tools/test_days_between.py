from __future__ import annotations

import pytest

from rltr_verl.errors import BadArguments
from rltr_verl.tools.days_between import days_between


@pytest.mark.parametrize(
    ("start", "end", "days"),
    [
        ("2031-01-01", "2031-03-01", "59"),
        ("2032-01-01", "2032-03-01", "60"),
        ("2031-05-17", "2031-05-17", "0"),
        ("2031-05-17", "2031-05-10", "-7"),
        (" 2031-05-17 ", "2031-05-18", "1"),
    ],
)
def test_days(start, end, days):
    assert days_between(start, end) == days


@pytest.mark.parametrize(
    ("start", "end", "name"),
    [
        ("2031-02-30", "2031-03-01", "start"),
        ("2031-03-01", "soon", "end"),
        ("", "2031-03-01", "start"),
        ("20310301", "2031-03-01", "start"),
        ("2031-W10-1", "2031-03-01", "start"),
    ],
)
def test_a_bad_date_is_named(start, end, name):
    with pytest.raises(BadArguments, match=f"{name} must be a date"):
        days_between(start, end)
