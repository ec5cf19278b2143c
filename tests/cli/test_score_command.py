"""`rltr score` on files, with its output read back."""

import json
import os
import pty
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rltr_verl.cli.main import app

CALL = '<tool_call>{"name": "search", "arguments": {"query": "arlen"}}</tool_call>'
KEYS = ["id", "format_ok", "format_reason", "n_calls", "repeats", "errors", "completeness", "votes", "total", "terms"]
TURN = {"text": "", "thought": "", "answer": None, "stopped": False, "calls": [], "faults": [], "observations": []}
NEEDS = [{"tool": "search", "arguments": {"query": ["arlen"]}}]


def row(*texts, **extra):
    messages = []
    for text in texts:
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "tool", "content": "41"}] * text.count("<tool_call>")
    return {"id": "r", "query": "q", "messages": messages, **extra}


def run(tmp_path, *rows, options=()):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in rows), "utf-8")
    changes = [part for option in options for part in ("--set", option)]
    return CliRunner().invoke(app, ["score", str(path), *changes])


def lines(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_one_line_a_row_with_exactly_these_keys(tmp_path):
    good = row(CALL, CALL, "<answer>", needs=NEEDS, id="good")
    broken = row("<tool_call>{</tool_call>", "<answer>", needs=json.dumps(NEEDS), id=17)
    malformed = row(CALL, "It is 41.", needs=NEEDS)
    first, second, third = lines(run(tmp_path, good, broken, malformed))
    assert list(first) == list(second) == list(third) == KEYS
    terms = {"completeness": 1.0, "repeat": -0.1, "error": 0.0}
    assert list(first.values()) == ["good", True, None, 2, 1, 0, 1.0, [1.0], 0.9, terms]
    terms = {"completeness": 0.0, "repeat": 0.0, "error": -0.2}
    assert list(second.values()) == [17, True, None, 1, 0, 1, 0.0, [0.0], -0.2, terms]
    assert list(third.values()) == ["r", False, "no_stop_marker", 1, 0, 0, None, [], -1.0, {}]


def test_settings_change_the_score(tmp_path):
    given = row(CALL, CALL, "<tool_call>{</tool_call>", "<answer>", needs=NEEDS)
    options = ["reward.terms.repeat.lambda=0.3", "reward.terms.error.mu=0.5"]
    (line,) = lines(run(tmp_path, given, options=options))
    assert line["total"] == pytest.approx(1 - 0.3 - 0.5)
    (line,) = lines(run(tmp_path, given, options=["rltr.reward.terms.repeat=null"]))
    assert line["total"] == pytest.approx(0.8) and line["repeats"] is None


def test_scope_of_repeats(tmp_path):
    other = CALL.replace("arlen", "brona")
    given = row(CALL, other, CALL, "<answer>", needs=[])
    counts = [
        lines(run(tmp_path, given, options=[f"reward.terms.repeat.scope={scope}"]))[0]["repeats"]
        for scope in ("consecutive", "any")
    ]
    assert counts == [0, 1]


def test_tools_decide_what_is_an_error(tmp_path):
    schema = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
    (line,) = lines(run(tmp_path, row(CALL, "<answer>", needs=[], tools=[schema])))
    assert line["errors"] == 1


def test_tool_calls_form(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"query": "arlen"}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "41"},
        {"role": "assistant", "content": "<answer>"},
    ]
    (line,) = lines(run(tmp_path, {"id": 1, "query": "q", "messages": messages, "needs": NEEDS}))
    assert (line["completeness"], line["total"]) == (1.0, 1.0)


def test_without_needs_and_judge_the_total_is_null_and_says_why(tmp_path):
    result = run(tmp_path, row(CALL, "<answer>"))
    (line,) = lines(result)
    assert line["completeness"] is None and line["total"] is None and line["votes"] == []
    assert "1 of 1 rows are unscored" in result.stderr and "judge.backend=endpoint" in result.stderr


@contextmanager
def judge(reply):
    """A judge server on loopback that always gives the same reply."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("reply", "completeness", "votes"),
    [("Score: 1", 1.0, [1, 1]), ("不完整", 0.0, [0, 0]), ("I cannot say.", None, [])],
)
def test_a_judge_by_endpoint(tmp_path, reply, completeness, votes):
    with judge(reply) as url:
        options = ["judge.backend=endpoint", f"judge.base_url={url}", "judge.model=m", "judge.n_votes=2"]
        result = run(tmp_path, *[row(CALL, "<answer>", id=index) for index in range(70)], options=options)
    scored = lines(result)
    assert [line["id"] for line in scored] == list(range(70))
    assert all(line["completeness"] == completeness and line["votes"] == votes for line in scored)
    assert (scored[0]["total"] is None) == (completeness is None)
    assert ("70 of 70 rows are unscored" in result.stderr) == (completeness is None)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "row 2: not valid JSON"),
        ("[]", "row 2: a row must be a JSON object"),
        ({"id": 1}, "row 2: field 'messages' is missing"),
        ({"messages": "x"}, "row 2: field 'messages' has the wrong type (str)"),
        ({"messages": [3]}, "row 2, messages[0]: a message must be an object"),
        ({"messages": [], "query": 3}, "row 2: field 'query' has the wrong type (int)"),
        ({"messages": [], "tools": {}}, "row 2: field 'tools' has the wrong type (dict)"),
        ({"messages": [], "tools": ["x"]}, "row 2: field 'tools[0]' must be an object"),
        (
            {"messages": [], "tools": [{"function": {"name": "a", "parameters": {"type": "x"}}}]},
            "row 2, tools[0]: is no",
        ),
        ({"messages": [{"role": "gpt", "content": "x"}]}, "row 2, messages[0]: unknown role 'gpt'"),
        (
            {"trajectory": {"query": "q", "turns": [{**TURN, "text": 5}], "tools": [], "end": "answer"}},
            "row 2: field 'tr",
        ),
        ({"messages": [], "needs": "x"}, "row 2: field 'needs' is not valid JSON"),
        ({"messages": [], "needs": [{}]}, "row 2: field 'needs[0].tool'"),
    ],
)
def test_a_bad_row_is_one_clear_error_before_anything_is_scored(tmp_path, bad, message):
    result = run(tmp_path, row(CALL, "<answer>", needs=[]), bad)
    assert result.exit_code == 2 and result.stdout == ""
    assert f"DataError: {tmp_path / 'rows.jsonl'}, {message}" in result.stderr and "Fix: " in result.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("reward.term=1", "rltr.reward.term: unknown key 'term'. Fix: did you mean 'terms'?"),
        ("reward.terms.repeat.lamda=1", "did you mean 'lambda'?"),
        ("lambda", "--set: 'lambda' sets nothing"),
        (
            "judge.backend=endpoint",
            "needs rltr.judge.base_url and rltr.judge.model. Fix: add rltr.judge.base_url=http://HOST:PORT/v1 "
            "rltr.judge.model=NAME (to an `rltr` command: --set judge.base_url=http://HOST:PORT/v1 --set judge.model",
        ),
        (
            "judge={backend: endpoint, base_url: 'http://h/v1'}",
            "endpoint needs rltr.judge.model. Fix: add rltr.judge.m",
        ),
        ("judge.backend=endpont", "(given: 'endpont'). Fix: did you mean 'endpoint'?"),
        ("judge.backend=oracle", "see docs/settings.md"),
        ("judge.n_votes=none", "rltr.judge.n_votes"),
        ("reward.terms.repeat.lambda=inf", "rltr.reward.terms.repeat.lambda: input should be a finite number"),
        ("reward.terms.error.mu=1e400", "rltr.reward.terms.error.mu: input should be a finite number"),
    ],
)
def test_a_bad_setting_is_one_clear_error(tmp_path, option, message):
    result = run(tmp_path, row("<answer>", needs=[]), options=[option])
    assert result.exit_code == 2 and message in result.stderr


def test_a_missing_file_is_one_clear_error(tmp_path):
    result = CliRunner().invoke(app, ["score", str(tmp_path / "no.jsonl")])
    assert result.exit_code == 2 and "no such file" in result.stderr


def test_terms_stand_as_in_the_total(tmp_path):
    given = row(CALL, CALL, "<answer>", needs=NEEDS)
    (line,) = lines(run(tmp_path, given, options=["reward.terms.repeat.weight=3"]))
    assert line["terms"]["repeat"] == pytest.approx(-0.3) and line["total"] == pytest.approx(
        sum(line["terms"].values())
    )


def test_the_judges_reasons_are_given(tmp_path):
    with judge('{"reason": "nothing is missing", "score": 1}') as url:
        options = ["judge.backend=endpoint", f"judge.base_url={url}", "judge.model=m", "judge.n_votes=2"]
        (line,) = lines(run(tmp_path, row(CALL, "<answer>"), options=options))
    assert line["reasons"] == ["nothing is missing"] * 2


def test_a_dump_is_written_as_in_training_and_can_be_scored_again(tmp_path):
    given = [row(CALL, CALL, "<answer>", needs=NEEDS, id="a", index=7), row("x", needs=NEEDS, id="b")]
    first = lines(run(tmp_path, *given, options=[f"dump_dir={tmp_path / 'dump'}"]))
    (file,) = (tmp_path / "dump").glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [(item["id"], item["index"], item["total"]) for item in records] == [("a", 7, 0.9), ("b", None, -1.0)]
    assert records[0]["terms"]["completeness"]["votes"] == [1.0] and records[1]["format"] == ["no_stop_marker"]
    assert lines(CliRunner().invoke(app, ["score", str(file)])) == first


def test_a_terminal_shows_progress_and_stdout_holds_lines_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(CALL, "<answer>", needs=NEEDS)) + "\n")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from rltr_verl.cli.main import app; app()", "score", str(path)]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=120, env=env)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "scoring" in shown and "1/1" in shown
    assert [json.loads(line)["total"] for line in done.stdout.splitlines()] == [1.0]


def test_parquet_is_told_apart_from_conversations(tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["é" * 100], "n": [255]}), path)
    result = CliRunner().invoke(app, ["score", str(path)])
    assert result.exit_code == 2 and "the file is parquet. Fix: give a UTF-8 file of JSON lines" in result.stderr


def test_all_rows_that_are_wrong_are_named(tmp_path):
    result = run(tmp_path, "{", row("<answer>", needs=[]), *[{"id": 1}] * 30)
    assert result.exit_code == 2 and result.stdout == ""
    assert "row 1: not valid JSON" in result.stderr and "row 21: field 'messages'" in result.stderr
    assert "row 22:" not in result.stderr and "and 11 more rows" in result.stderr
    assert "31 of 32 rows cannot be used" in result.stderr


def test_a_byte_order_mark_does_no_harm(tmp_path):
    assert lines(run(tmp_path, "\ufeff" + json.dumps(row("<answer>", needs=[]))))[0]["total"] == 1.0


def test_empty_lines_are_passed_over_and_a_row_without_id_gets_its_number(tmp_path):
    given = {key: value for key, value in row("<answer>", needs=[]).items() if key != "id"}
    assert [line["id"] for line in lines(run(tmp_path, "", given, "", given))] == [2, 4]
