"""Calendar distance for a planner."""

from __future__ import annotations

from datetime import date, datetime

from rltr_verl import tool
from rltr_verl.errors import BadArguments


@tool(pure=True)
def days_between(start: str, end: str) -> str:
    """Count the days from one date to another; negative when the second is earlier.

    Args:
        start: first date, YYYY-MM-DD.
        end: second date, YYYY-MM-DD.
    """
    return str((_date(end, "end") - _date(start, "start")).days)


def _date(text: str, name: str) -> date:
    try:
        return datetime.strptime(text.strip(), "%Y-%m-%d").date()
    except ValueError:
        raise BadArguments(f"{name} must be a date like 2031-05-17, not {text!r}") from None
