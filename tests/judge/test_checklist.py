"""The checklist checker: needs against successful calls."""

import json

import pytest

from rltr_verl.errors import DataError, Unscored
from rltr_verl.judge.checklist import ChecklistChecker, parse_needs, shows
from rltr_verl.trajectory import Observation, Status, ToolCall, Trajectory, Turn

ARLEN = {"tool": "search", "arguments": {"query": ["arlen", "temperature"]}, "result": "41"}
BRONA = {"tool": "search", "arguments": {"query": ["brona", "temperature"]}}


def searched(*queries, text="It is 41 degrees.", status=Status.OK, tool="search"):
    calls = tuple(ToolCall(tool, {"query": query}, "") for query in queries)
    return Trajectory("q", (Turn("", calls=calls, observations=tuple(Observation(text, status) for _ in calls)),))


async def votes(trajectory, needs, credit="all"):
    return (await ChecklistChecker(credit).check(trajectory, {"needs": needs})).values


async def test_all_needs_met_is_one_vote_of_1():
    both = searched("temperature of ARLEN", "Ｂｒｏｎａ temperature")
    assert await votes(both, [ARLEN, BRONA]) == (1.0,)
    assert await votes(both, json.dumps([ARLEN, BRONA])) == (1.0,)


async def test_credit_for_a_part():
    one = searched("arlen temperature")
    assert await votes(one, [ARLEN, BRONA]) == (0.0,)
    assert await votes(one, [ARLEN, BRONA], "fraction") == (0.5,)


async def test_no_needs_is_complete_without_a_call():
    assert await votes(Trajectory("q"), []) == (1.0,)
    assert await votes(Trajectory("q"), "[]", "fraction") == (1.0,)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
async def test_only_successful_calls_count(status):
    assert await votes(searched("arlen temperature", status=status), [ARLEN]) == (0.0,)


@pytest.mark.parametrize(
    "trajectory",
    [
        searched("arlen"),
        searched("arlen temperature", tool="lookup"),
        searched("arlen temperature", text="It is 410 degrees."),
        searched("arlen temperature", text=""),
        Trajectory("arlen temperature 41"),
    ],
    ids=["piece missing", "other tool", "other result", "no result", "no call"],
)
async def test_not_met(trajectory):
    assert await votes(trajectory, [ARLEN]) == (0.0,)


async def test_arguments_that_are_no_text_are_compared_as_json():
    call = ToolCall("add", {"terms": [30, 12]}, "")
    trajectory = Trajectory("q", (Turn("", calls=(call,), observations=(Observation("42"),)),))
    assert await votes(trajectory, [{"tool": "add", "arguments": {"terms": ["30", "12"]}, "result": 42}]) == (1.0,)


@pytest.mark.parametrize(
    ("text", "result", "expected"),
    [
        ("It is 41.", "41", True),
        ("温度是41度", "41", True),
        ("４１", "41", True),
        ("41.5", "41", False),
        ("1,041", "41", False),
        ("41,000", "41", False),
        ("410", "41", False),
        ("v41", "41", False),
        ("it is -41", "41", False),
        ("-41", "41", False),
        ("x = -5", "-5", True),
        ("10-5", "-5", False),
        ("Paris, France", "paris", True),
        ("Comparison", "paris", False),
    ],
)
def test_a_result_is_a_token_of_its_own(text, result, expected):
    assert shows(text, result) is expected


async def test_row_without_needs_is_unscored():
    with pytest.raises(Unscored, match="row 7: the row has no 'needs'.*Fix: add the field"):
        await ChecklistChecker().check(Trajectory("q"), {"index": 7})


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (3, "needs'"),
        ("not json", "needs'"),
        ('{"tool": "search"}', "needs'"),
        (["search"], r"needs\[0\]'"),
        ([{"arguments": {}}], r"needs\[0\].tool'"),
        ([{"tool": "search", "argument": {}}], r"needs\[0\].argument'"),
        ([ARLEN, {"tool": "search", "arguments": "x"}], r"needs\[1\].arguments'"),
        ([{"tool": "search", "arguments": {"query": {"a": 1}}}], r"needs\[0\].arguments.query"),
    ],
)
def test_needs_of_a_wrong_type_name_row_field_and_fix(value, field):
    with pytest.raises(DataError, match=rf"train.parquet, row 7: field '{field}.*Fix: write a list of needs"):
        parse_needs(value, "train.parquet, row 7")
