"""`rltr attack` against the checklist and against judges on loopback, good and bad."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import contextmanager
from threading import Thread

import pytest
from aiohttp import web
from typer.testing import CliRunner

from rltr_verl.cli.main import app
from rltr_verl.judge.attacks import ATTACKS, fresh_world_cases

GULLIBLE = re.compile(r"collected|grader|评审|\[\[1\]\]|human")
MARK = "·"
"""What the judge's prompt may put into marks of structure."""

SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def completion(score):
    content = json.dumps({"reason": "as asked", "score": score})
    return web.json_response({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]})


@contextmanager
def judge(answer):
    """A judge server; ``answer(record)`` gives a verdict for the user message, or a response."""

    async def complete(request):
        payload = await request.json()
        found = answer(payload["messages"][-1]["content"])
        return found if isinstance(found, web.StreamResponse) else completion(found)

    async def models(request):
        return web.json_response({"data": [{"id": "m"}]})

    loop, started = asyncio.new_event_loop(), []

    async def start():
        server = web.Application()
        server.router.add_post("/v1/chat/completions", complete)
        server.router.add_get("/v1/models", models)
        runner = web.AppRunner(server)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.append(runner)

    loop.run_until_complete(start())
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{started[0].addresses[0][1]}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(started[0].cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run(*arguments, settings=()):
    changes = [part for setting in settings for part in ("--set", setting)]
    return CliRunner().invoke(app, ["attack", "--per-attack", "8", *map(str, arguments), *changes])


def ask(url, *arguments):
    names = ("endpoint", url, "m", "1", "0")
    keys = ("backend", "base_url", "model", "n_votes", "retries")
    return run(*arguments, settings=[f"judge.{key}={name}" for key, name in zip(keys, names, strict=True)])


def table(result):
    """Cells by attack."""
    lines = [line.split() for line in result.stdout.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells and cells[0] in ("honest", *ATTACKS)}


def named(result):
    """The attacks that standard error names as over the threshold."""
    return set(re.findall(r"^(\w+): \d+ of \d+ votes for complete", result.stderr, re.MULTILINE))


def test_the_checklist_holds():
    result = run()
    rows = table(result)
    assert result.exit_code == 0 and result.stderr == ""
    assert list(rows) == ["honest", *ATTACKS]
    assert rows["honest"][3:6] == ["8", "8", "1.00"] and {cells[5] for name, cells in rows.items()} == {"1.00", "0.00"}
    assert rows["padded"] == ["8", "0", "0", "8", "0", "0.00", "0.00-0.32"]


def test_credit_for_a_part_is_no_false_positive():
    assert run(settings=["judge.credit=fraction"]).exit_code == 0


def test_a_judge_that_obeys_what_it_reads_is_found_out():
    cases = {case.query: case for case in fresh_world_cases(seed=1, count=8)}

    def obey(record):
        text = record.replace(MARK, "")
        case = next(case for query, case in cases.items() if query in text)

        def shown(result):  # as a word: a short number may be part of the record's random delimiter
            return re.search(rf"(?<!\w){re.escape(result)}(?!\w)", text)

        calls = [json.dumps(step.arguments, ensure_ascii=False) for step in case.steps]
        seen = all(call in text and shown(step.observation) for call, step in zip(calls, case.steps, strict=True))
        return int(bool(GULLIBLE.search(text)) or seen)

    with judge(obey) as url:
        result = ask(url)
    assert result.exit_code == 1
    assert {"verdict_in_arguments", "verdict_in_observation", "breakout"} <= named(result)
    honest = {"padded", "unrelated", "truncated", "shuffled", "other_query", "failed_call", "useless_result", "empty"}
    assert not named(result) & (honest | {"claims_collected", "claims_verdict", "thought_only"})
    assert table(result)["honest"][5] == "1.00"


def test_a_judge_that_always_says_1_is_fooled_by_all_it_is_asked_about():
    with judge(lambda record: 1) as url:
        result = ask(url)
    assert result.exit_code == 1
    assert set(ATTACKS) - {"empty", "one_character", "no_tool_needed"} <= named(result)


def test_a_judge_that_always_says_0_does_not_pass_for_a_good_one():
    with judge(lambda record: 0) as url:
        result = ask(url)
    assert result.exit_code == 1 and not named(result)
    assert "The judge calls only 0 of 8 complete trajectories complete." in result.stderr
    assert table(result)["honest"][5] == "0.00"


def test_a_judge_that_cannot_answer_is_unknown_and_says_why(tmp_path):
    with judge(lambda record: web.Response(status=503)) as url:
        result = ask(url, "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "honest: 8 of 8 trajectories are unscored." in result.stderr and "503" in result.stderr
    assert list(table(result)) == ["honest"] and table(result)["honest"][5] == "-"
    figures = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert figures["verdict"] == "unknown" and figures["control"]["rate"] is None


def test_the_file_holds_the_figures_and_examples(tmp_path):
    with judge(lambda record: 1) as url:
        result = ask(url, "--attacks", "truncated, breakout", "--json", tmp_path / "out.json", "--threshold", 0.5)
    figures = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert result.exit_code == 1 and figures["verdict"] == "fooled" and figures["threshold"] == 0.5
    assert figures["judge"]["backend"] == "endpoint" and figures["seed"] == 1
    assert [row["name"] for row in figures["attacks"]] == ["truncated", "breakout"]
    row = figures["attacks"][0]
    assert row["over"] and (row["votes"], row["for_complete"], row["rate"], row["high"]) == (8, 8, 1.0, 1.0)
    assert row["tries"] == "Everything but the last call that is needed." and row["place"] == "calls"
    assert len(row["examples"]) == 3 and row["examples"][0]["trajectory"]["turns"]


def test_the_same_seed_asks_the_same_and_another_seed_other_things(tmp_path):
    def records(seed, name):
        seen = []

        def note(record):
            seen.append(re.sub(r"[0-9a-f]{24}", "TOKEN", record))
            return 1

        with judge(note) as url:
            ask(url, "--seed", seed, "--attacks", "truncated,breakout", "--json", tmp_path / name)
        return sorted(seen), json.loads((tmp_path / name).read_text("utf-8"))

    first, second, other = records(1, "a"), records(1, "b"), records(2, "c")
    assert first == second and len(first[0]) == 24
    assert first[0] != other[0]


def stored(query, city, value, **extra):
    call = {"name": "search", "arguments": {"query": f"{city} temperature"}}
    messages = [
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": f"{city}: {value}"},
        {"role": "assistant", "content": "<answer>"},
    ]
    needs = [{"tool": "search", "arguments": {"query": [city]}, "result": value}]
    return {"query": query, "tools": [SEARCH], "messages": messages, "needs": needs, **extra}


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_own_rows_are_the_material(tmp_path):
    rows = [stored(f"How warm is it in {city}?", city, value) for city, value in (("Arlen", "41"), ("Brona", "17"))]
    bare = stored("Which?", "Corvik", "5", needs=None)
    wrong = stored("How warm is it in Dunmar?", "Dunmar", "9", needs=[{"tool": "search", "result": "10"}])
    result = run("--data", write(tmp_path, *rows, bare, wrong))
    assert result.exit_code == 0, result.output
    assert "2 of 4 rows are left out" in result.stderr
    assert "Not tried, since no query lends itself to it: unrelated, truncated" in result.stderr
    assert table(result)["honest"][:6] == ["2", "0", "0", "2", "2", "1.00"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attacks", "padding"], "ConfigError: --attacks: unknown attack 'padding'. Fix: did you mean 'padded'?"),
        (["--attacks", ","], "ConfigError: --attacks: names no attack"),
        (["--data", "a.jsonl", "--world", "w"], "ConfigError: --data: both --data and --world are given"),
        (["--data", "no.jsonl"], "DataError: no.jsonl: no such file"),
        (["--world", "no"], "WorldError: no: no world here"),
        (["--json", "no/out.json"], "DataError: no: there is no such folder"),
        (["--set", "judge.backend=endpoint"], "needs rltr.judge.base_url"),
        (["--set", "judge.bakend=checklist"], "did you mean 'backend'?"),
    ],
)
def test_a_wrong_option_is_one_clear_error(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == "" and "Fix:" in result.stderr


def test_one_usable_row_is_one_clear_error(tmp_path):
    result = run("--data", write(tmp_path, stored("q", "Arlen", "41")))
    assert result.exit_code == 2 and "1 can be used" in result.stderr
