"""How a verdict is asked for, and that a refusal is asked for once."""

import pytest

from rltr_verl.judge.replies import ChatFailed
from rltr_verl.judge.structured import StructuredOutput

URL = "http://judge/v1"
REFUSALS = [
    (400, "response_format is not supported by this model"),
    (400, '{"error": {"message": "Unknown parameter: \'response_format.json_schema\'."}}'),
    (
        400,
        "[{'type': 'extra_forbidden', 'loc': ('body', 'structured_outputs'), 'msg': 'Extra inputs are not permitted'}]",
    ),
    (400, "Unrecognized request argument supplied: guided_choice"),
    (400, "The provided JSON schema contains features not supported by xgrammar."),
    (400, "Grammar error: unsupported schema"),
    (422, '{"detail": [{"loc": ["body", "response_format"], "msg": "value is not a valid enumeration member"}]}'),
    (500, "Failed to compile grammar"),
    (501, "structured output is not implemented"),
]


def failure(structured, status=400, said="response_format is not supported", url=URL):
    failed = ChatFailed("http", "refused", status=status, body=said)
    failed.url, failed.sent = url, structured.fields(url)
    return failed


def forms(structured, limit=9):
    found = [structured.form(URL)]
    while len(found) < limit and structured.refused(failure(structured)):
        found.append(structured.form(URL))
    return found


@pytest.mark.parametrize(
    ("mode", "thinking", "expected"),
    [
        ("auto", None, ["json_schema", "choice", "guided_choice", "free"]),
        ("auto", False, ["json_schema", "choice", "guided_choice", "free"]),
        ("auto", True, ["json_schema", "free"]),
        ("json_schema", None, ["json_schema", "free"]),
        ("choice", None, ["choice", "guided_choice", "free"]),
        ("choice", True, ["free"]),
        ("off", None, ["free"]),
    ],
)
def test_order_of_forms(mode, thinking, expected):
    assert forms(StructuredOutput(mode, thinking)) == expected


@pytest.mark.parametrize(("status", "said"), REFUSALS)
def test_refusals(status, said):
    structured = StructuredOutput("auto")
    assert structured.refused(failure(structured, status, said))
    assert structured.form(URL) == "choice"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, "temperature must be positive"),
        (400, ""),
        (401, "response_format is not for you"),
        (404, "no such model"),
        (429, "too many json_schema requests"),
        (500, "internal error"),
        (503, "response_format"),
    ],
)
def test_other_failures_are_no_refusal(status, said):
    structured = StructuredOutput("auto")
    assert not structured.refused(failure(structured, status, said))
    assert structured.form(URL) == "json_schema"


def test_refusals_of_requests_sent_together_count_once():
    structured = StructuredOutput("auto")
    together = [failure(structured) for _ in range(5)]
    assert all(structured.refused(item) for item in together)
    assert structured.form(URL) == "choice"


def test_each_url_is_remembered_for_itself():
    structured = StructuredOutput("auto")
    structured.refused(failure(structured, url="http://old/v1"))
    assert structured.form("http://old/v1") == "choice" and structured.form(URL) == "json_schema"


def test_a_request_without_a_constraint_cannot_be_refused_for_it():
    structured = StructuredOutput("off")
    assert not structured.refused(failure(structured))


@pytest.mark.parametrize("name", ["response_format", "guided_choice", "structured_outputs", "regex", "guided_json"])
def test_a_constraint_of_the_users_own_stays_alone(name):
    assert StructuredOutput("auto", given={name: 1}).form(URL) == "free"
    assert StructuredOutput("auto", given={"top_p": 1}).form(URL) == "json_schema"


def test_the_schema_asks_for_the_reason_first():
    schema = StructuredOutput("auto").fields(URL)["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == schema["required"] == ["reason", "verdict"]
    assert schema["properties"]["verdict"]["enum"] == [0, 1]
