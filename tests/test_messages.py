"""Trajectory.from_messages: raw text and tool_calls, observations by id or in order, statuses."""

import json

import pytest

from rltr_verl.errors import DataError
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
