"""Trajectory.from_messages: raw text and tool_calls, observations by id or in order, statuses."""

import json

import numpy as np
import pandas as pd
import pytest

from rltr_verl.errors import DataError
from rltr_verl.format_check import format_faults
from rltr_verl.trajectory import Status, Trajectory

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def raw(query="x", name="search"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'query': query}})}\n</tool_call>"


def call(query, call_id=None, arguments=None):
    function = {"name": "search", "arguments": arguments or json.dumps({"query": query})}
    return {"type": "function", "function": function, **({"id": call_id} if call_id else {})}


def assistant(content=None, **extra):
    return {"role": "assistant", "content": content, **extra}


def observed(content, **extra):
    return {"role": "tool", "content": content, **extra}


def statuses(trajectory):
    return [item.status for item in trajectory.executed()]


def test_raw_text_and_tool_calls_give_the_same_trajectory():
    ending = [observed("r"), assistant("<answer>")]
    text = Trajectory.from_messages([assistant(raw()), *ending], "q")
    structured = Trajectory.from_messages([assistant(None, tool_calls=[call("x")]), *ending], "q")
    assert [item.call.key() for item in text.executed()] == [item.call.key() for item in structured.executed()]
    assert text.end == structured.end == "answer" and statuses(text) == statuses(structured) == [Status.OK]


def test_query_is_the_first_user_message_unless_given():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "first"},
        {"role": "user", "content": "b"},
    ]
    assert Trajectory.from_messages(messages).query == "first"
    assert Trajectory.from_messages(messages, "given").query == "given"
    assert Trajectory.from_messages([{"role": "user", "content": [{"type": "text", "text": "parts"}]}]).query == "parts"


def test_observations_go_to_their_calls_by_id():
    messages = [
        assistant("", tool_calls=[call("a", "1"), call("b", "2")]),
        observed("for b", tool_call_id="2"),
        observed("for a", tool_call_id="1"),
    ]
    assert [item.observation.text for item in Trajectory.from_messages(messages, "q").executed()] == ["for a", "for b"]


def test_observations_without_id_go_in_order():
    messages = [assistant(raw("a") + raw("b")), observed("for a"), observed("for b")]
    assert [item.observation.text for item in Trajectory.from_messages(messages, "q").executed()] == ["for a", "for b"]


def test_reasoning_content_is_thought():
    turn = Trajectory.from_messages([assistant("<answer>", reasoning_content=f"I could {raw()}")], "q").turns[0]
    assert turn.calls == () and "I could" in turn.thought and turn.stopped


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (raw(), Status.OK),
        (raw(name="serach"), Status.UNKNOWN_TOOL),
        (raw(query=[3]), Status.BAD_ARGUMENTS),
        (raw(query=" "), Status.BAD_ARGUMENTS),
        ('<tool_call>{"name": "search"}</tool_call>', Status.UNREADABLE),
    ],
)
def test_status_is_derived_from_the_call(text, status):
    answered = Trajectory.from_messages([assistant(text), observed("r")], "q", tools=[SEARCH])
    assert statuses(answered) == [status]
    unanswered = Trajectory.from_messages([assistant(text)], "q", tools=[SEARCH])
    assert statuses(unanswered) == [Status.NOT_EXECUTED if status is Status.OK else status]


def test_a_mistake_is_seen_even_if_nothing_came_back_and_the_planner_went_on():
    messages = [assistant("<tool_call>{</tool_call>"), assistant(raw()), observed("r"), assistant("<answer>")]
    assert statuses(Trajectory.from_messages(messages, "q")) == [Status.UNREADABLE, Status.OK]


def test_a_given_status_is_kept():
    trajectory = Trajectory.from_messages([assistant(raw()), observed("no reply", status="timeout")], "q")
    assert statuses(trajectory) == [Status.TIMEOUT]


def test_without_schemas_every_readable_call_is_sound():
    assert statuses(Trajectory.from_messages([assistant(raw(name="anything")), observed("r")], "q")) == [Status.OK]


@pytest.mark.parametrize(
    ("messages", "end"),
    [
        ([assistant("<answer>")], "answer"),
        ([assistant("It is 4.")], "no_call"),
        ([assistant(raw()), observed("r")], "turn_limit"),
        ([], "aborted"),
    ],
)
def test_how_it_ended(messages, end):
    assert Trajectory.from_messages(messages, "q").end == end


def test_a_tool_message_before_any_turn_is_left_out():
    assert Trajectory.from_messages([observed("r"), assistant("<answer>")], "q").n_calls == 0


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([3], r"messages\[0\]: a message must be an object with a role"),
        ([{"content": "x"}], r"messages\[0\]: a message must be an object with a role"),
        ([assistant("", tool_calls="x")], r"messages\[0\]: tool_calls must be a list"),
        ([assistant(raw()), observed("r", status="great")], "unknown status 'great'.*Fix: use one of ok"),
        ([{"role": "Assistant", "content": "<answer>"}], r"messages\[0\]: unknown role 'Assistant'.*Fix: use one of"),
        ([assistant(raw()), {"role": "functions", "content": "r"}], r"messages\[1\]: unknown role 'functions'"),
        ([assistant(5)], r"messages\[0\]: the content is no text \(given: 5\)"),
        ([assistant(raw()), observed({"exit_code": 1})], r"messages\[1\]: the content is no text"),
        ([assistant([{"type": "text", "text": 5}])], r"messages\[0\]: the content is no text"),
        ([assistant("", tool_calls=[call("x", arguments=b"{}")])], r"messages\[0\].tool_calls\[0\]: is no JSON"),
    ],
)
def test_unreadable_messages_are_one_clear_error(messages, message):
    with pytest.raises(DataError, match=message):
        Trajectory.from_messages(messages, "q")


@pytest.mark.parametrize(
    ("content", "faults"),
    [
        ("<think>never closed", ("unbalanced_think",)),
        ("<answer>4", ("call_and_answer",)),
        ("", ()),
        (None, ()),
        ("I search.", ()),
        ("<think>a</think>", ()),
        ("a</think>b", ("unbalanced_think",)),
        ('{"name": "search", "parameters": {"query": "x"}}', ()),
        ("<tool_call>{", ()),
        ("<function=search></function>", ()),
    ],
)
def test_calls_that_the_server_has_parted_from_the_text_stay_with_their_observations(content, faults):
    messages = [
        assistant(content, tool_calls=[call("a", "1"), call("b", "2")]),
        observed("for b", tool_call_id="2"),
        observed("for a", tool_call_id="1"),
    ]
    trajectory = Trajectory.from_messages(messages, "q")
    seen = [(item.call.arguments, item.observation.text) for item in trajectory.executed() if not item.call.error]
    assert seen == [({"query": "a"}, "for a"), ({"query": "b"}, "for b")]
    assert trajectory.turns[0].faults == faults
    assert sum(item.call.error is not None for item in trajectory.executed()) == (
        (content or "").startswith(("<f", "<to"))
    )


def test_many_strange_calls_stay_as_many():
    strange = [{"function": {"name": "search", "arguments": "{"}}, [{"name": "a", "arguments": {}}], "\ud800"] * 40
    assert len(Trajectory.from_messages([assistant("", tool_calls=strange)], "q").turns[0].calls) == 120


def test_an_empty_list_of_calls_is_none():
    assert Trajectory.from_messages([assistant("<answer>", tool_calls=[])], "q").end == "answer"


@pytest.mark.parametrize("item", [3, None, {}, {"function": 3}, {"function": {"name": "search"}}])
def test_a_strange_tool_call_is_an_unreadable_call(item):
    assert statuses(Trajectory.from_messages([assistant("", tool_calls=[item])], "q")) == [Status.UNREADABLE]


@pytest.mark.parametrize("calls", [1, 2])
def test_messages_as_pandas_reads_them_from_parquet(tmp_path, calls):
    """Case D01a: lists come as arrays, keys of other messages as None."""
    given = [call("x", str(number), arguments={"query": ["A B"], "k": number}) for number in range(calls)]
    messages = [
        {"role": "user", "content": "q"},
        assistant("", tool_calls=given),
        *(observed("r", tool_call_id=str(number)) for number in range(calls)),
        assistant("<answer>"),
    ]
    pd.DataFrame({"messages": [messages]}).to_parquet(tmp_path / "rows.parquet")
    stored = pd.read_parquet(tmp_path / "rows.parquet")["messages"][0]
    assert isinstance(stored[1]["tool_calls"], np.ndarray)
    trajectory = Trajectory.from_messages(stored)
    assert [item.call.arguments for item in trajectory.executed()] == [
        {"query": ["A B"], "k": number} for number in range(calls)
    ]
    assert statuses(trajectory) == [Status.OK] * calls and trajectory.end == "answer"


def test_ids_of_any_kind_lead_to_their_calls():
    messages = [assistant("", tool_calls=[call("a", 1), call("b", ["2"])]), observed("for b", tool_call_id=["2"])]
    seen = [item.observation.text for item in Trajectory.from_messages(messages, "q").executed()]
    assert seen == ["", "for b"]


def test_keys_that_parquet_put_into_a_tool_schema_are_no_part_of_it():
    """Case D02b."""
    merged = json.loads(json.dumps(SEARCH))
    merged["function"]["parameters"]["properties"] |= {"expression": None, "query": {"type": "string", "enum": None}}
    trajectory = Trajectory.from_messages([assistant(raw()), observed("r")], "q", tools=[merged])
    assert statuses(trajectory) == [Status.OK] and list(trajectory.tools) == [SEARCH]


@pytest.mark.parametrize(
    "tool",
    [
        None,
        "search",
        {},
        {"function": None},
        {"function": {"name": None}},
        {"function": {"name": "search", "parameters": "{}"}},
        {"function": {"name": "search", "parameters": {"type": "objet"}}},
        {"function": {"name": "search", "parameters": {"properties": {"query": {"type": "text"}}}}},
        {"function": {"name": "search", "parameters": {"properties": {"query": {"pattern": "("}}}}},
        {"function": {"name": "search", "parameters": {"properties": {"query": {"$ref": "#/$defs/no"}}}}},
    ],
)
def test_what_is_no_tool_schema_is_one_clear_error(tool):
    with pytest.raises(DataError, match=r"tools\[1\]: is no tool schema"):
        Trajectory.from_messages([assistant(raw()), observed("r")], "q", tools=[SEARCH, tool])


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('{"exit_code": "1"}', Status.BAD_ARGUMENTS),
        ('{"exit_code": " -9 "}', Status.BAD_ARGUMENTS),
        ('{"status": "ERROR"}', Status.BAD_ARGUMENTS),
        ('\ufeff{"status": "error"}', Status.BAD_ARGUMENTS),
        ('{"exit_code": "0", "errors": 0}', Status.OK),
        ('{"exit_code": "none"}', Status.OK),
        ('{"exit_code": false}', Status.OK),
        ('{"status": ["error"]}', Status.OK),
        ('{"status": "no error"}', Status.OK),
    ],
)
def test_a_program_states_its_failure_in_fields_of_its_own(text, status):
    call = {"role": "assistant", "content": '<tool_call>{"name": "f", "arguments": {}}</tool_call>'}
    trajectory = Trajectory.from_messages([call, {"role": "tool", "content": text}])
    assert [item.status for item in trajectory.executed()] == [status]


def test_a_turn_that_the_server_cut_off_is_truncated():
    cut = {"role": "assistant", "content": "<think>still going", "finish_reason": "length"}
    assert Trajectory.from_messages([cut]).end == "length"
    call = '<tool_call>{"name":"python","arguments":{"code":"import os; os.remove(\'a.txt'
    unfinished = Trajectory.from_messages([{**cut, "content": call}])
    assert "truncated" in format_faults(unfinished) and unfinished.n_calls == 0
    assert Trajectory.from_messages([{**cut, "content": "<answer>"}]).end == "answer"
    assert Trajectory.from_messages([cut, {"role": "assistant", "content": "<answer>"}]).end == "answer"


@pytest.mark.parametrize("role", ["function", "observation", "ipython"])
def test_other_names_of_the_role_tool(role):
    call = {"role": "assistant", "content": '<tool_call>{"name": "f", "arguments": {}}</tool_call>'}
    trajectory = Trajectory.from_messages([call, {"role": role, "content": "41"}])
    assert [item.observation.text for item in trajectory.executed()] == ["41"]
