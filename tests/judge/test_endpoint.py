"""The endpoint checker against a real HTTP server on loopback."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rltr_verl.config import BudgetSettings, CacheSettings, JudgeSettings
from rltr_verl.errors import ConfigError, Unscored
from rltr_verl.judge import build_checker
from rltr_verl.judge.endpoint import EndpointChecker, Hosted, hosted_settings
from rltr_verl.trajectory import Trajectory
from tests.fakes.openai_server import CONSTRAINTS, FakeServer, Reply

CASES = {
    case["id"]: case["input"]
    for case in map(json.loads, (Path(__file__).parents[1] / "cases/checker_client.jsonl").read_text().splitlines())
}
JSON_YES = '{"reason": "nothing is missing", "verdict": 1}'


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Lock files of this test alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def trajectory(query="What is the weather?", observation="Sunny.", calls=1):
    call = '<tool_call>{"name": "search", "arguments": {"query": "weather %d"}}</tool_call>'
    turns = [
        message
        for number in range(calls)
        for message in ({"role": "assistant", "content": call % number}, {"role": "tool", "content": observation})
    ]
    return Trajectory.from_messages([*turns, {"role": "assistant", "content": "<answer>"}], query)


ONE = trajectory()


@asynccontextmanager
async def judging(*servers, **settings):
    """A checker that asks ``servers``."""
    base = {"backend": "endpoint", "base_url": [server.url for server in servers], "model": "m", "n_votes": 1}
    checker = build_checker(JudgeSettings(**{**base, **settings}))
    try:
        yield checker
    finally:
        await checker.close()


async def unscored(checker, item=ONE):
    with pytest.raises(Unscored) as caught:
        await checker.check(item, {})
    return str(caught.value)


def payloads(server, name):
    return [request.payload.get(name) for request in server.requests]


@pytest.mark.parametrize("name", ["C21b", "C24a", "C24b", "C24c", "C24d"])
async def test_nothing_gathered_is_0_without_asking(name):
    case = CASES[name]
    messages = case.get("messages") or [{"role": "assistant", "content": case["text"]}]
    async with FakeServer() as server, judging(server, n_votes=3, min_votes=3) as checker:
        votes = await checker.check(Trajectory.from_messages(messages, "q"), {})
    assert votes.mean == 0 and server.count == 0


async def test_a_query_that_needs_no_tool_is_asked_about():
    async with FakeServer() as server, judging(server) as checker:
        assert (await checker.check(Trajectory("q"), {"needs": []})).values == (1,)
    async with FakeServer() as server, judging(server, no_call="ask") as checker:
        assert (await checker.check(Trajectory("q"), {})).values == (1,)


async def test_n_votes_each_with_its_own_seed_and_the_same_prompt():
    async with (
        FakeServer(lambda number, _: f"Score: {number % 2}") as server,
        judging(server, n_votes=4, temperature=0.6, max_tokens=77) as checker,
    ):
        votes = await checker.check(ONE, {})
    assert sorted(votes.values) == [0, 0, 1, 1] and votes.mean == 0.5
    assert len(set(payloads(server, "seed"))) == 4
    assert len({json.dumps(messages) for messages in payloads(server, "messages")}) == 1
    assert set(payloads(server, "temperature")) == {0.6} and set(payloads(server, "max_tokens")) == {77}
    assert votes.record["prompt"].startswith("completeness_en@") and votes.record["judge"] == "m"


async def test_seeds_do_not_depend_on_the_random_token():
    async with FakeServer() as server, judging(server, n_votes=2) as checker:
        await checker.check(ONE, {})
        await checker.check(ONE, {})
        await checker.check(trajectory("another query"), {})
    seeds, prompts = payloads(server, "seed"), [request.prompt for request in server.requests]
    assert sorted(seeds[:2]) == sorted(seeds[2:4]) and not set(seeds[:2]) & set(seeds[4:])
    assert prompts[0] != prompts[2]


async def test_a_vote_with_what_it_took():
    async with FakeServer(Reply(JSON_YES, usage=(1000, 10))) as server:
        budget = BudgetSettings(price_prompt=2.0, price_completion=10.0)
        async with judging(server, budget=budget) as checker:
            votes = await checker.check(ONE, {})
    (vote,) = votes.votes
    assert (vote.verdict, vote.reason, vote.failure, vote.cached) == (1, "nothing is missing", None, False)
    assert (vote.prompt_tokens, vote.completion_tokens) == (1000, 10) and vote.latency_s > 0
    assert vote.cost == pytest.approx(0.0021)
    (shown,) = votes.record["judge_votes"]
    assert shown["verdict"] == 1 and shown["prompt_tokens"] == 1000 and "failure" not in shown


async def test_unreadable_votes_leave_the_mean():
    """Case C12b."""
    replies = ["Score: 1", CASES["C12b"]["content"], "Score: 0"]
    async with FakeServer(replies) as server, judging(server, n_votes=3, verdict_retries=0) as checker:
        votes = await checker.check(ONE, {})
    assert votes.mean == 0.5 and sorted(votes.readable) == [0, 1]
    (failed,) = [vote for vote in votes.votes if vote.verdict is None]
    assert failed.unreadable and "no readable verdict in 'I cannot evaluate this.'" in failed.failure


async def test_an_unreadable_reply_is_asked_for_again_at_another_seed():
    async with FakeServer(["Hm.", "Score: 0"]) as server, judging(server) as checker:
        votes = await checker.check(ONE, {})
    assert votes.values == (0,) and votes.votes[0].failure is None and not votes.votes[0].unreadable
    assert len(set(payloads(server, "seed"))) == 2
    assert votes.votes[0].prompt_tokens == 200


async def test_the_retry_of_a_reply_ends():
    async with FakeServer("Hm.") as server, judging(server, verdict_retries=2, n_votes=2) as checker:
        assert "0 of 2 votes are readable" in await unscored(checker)
    assert server.count == 6 and len(set(payloads(server, "seed"))) == 6


async def test_fewer_than_min_votes_is_unscored():
    async with FakeServer(["Score: 1", "?"]) as server, judging(server, n_votes=3, min_votes=2) as checker:
        message = await unscored(checker)
    assert "1 of 3 votes are readable" in message and server.url in message and "Fix:" in message


async def test_a_result_that_only_tells_of_an_error_is_a_failed_vote():
    """Case C09a."""
    async with FakeServer(CASES["C09a"]["content"]) as server, judging(server) as checker:
        assert "no readable verdict" in await unscored(checker)


@pytest.mark.parametrize("name", ["C09b", "C19b"])
async def test_bodies_without_a_reply_fail(name):
    async with FakeServer([CASES[name]["body"]]) as server, judging(server, retries=1) as checker:
        assert "no chat completion" in await unscored(checker)
    assert server.count == 2


async def test_a_judge_that_stays_down_is_unscored_after_the_retries():
    """Case C12a: never a plain 0."""
    replies = [Reply(status=status, headers={"Retry-After": "0"}) for status in CASES["C12a"]["statuses"]]
    async with FakeServer(replies) as server, judging(server, n_votes=CASES["C12a"]["votes"], retries=2) as checker:
        message = await unscored(checker)
    assert "0 of 3 votes are readable (HTTP 503" in message and server.count == 9


async def test_a_hanging_judge_ends_at_the_deadline_and_others_finish():
    """Case C16a."""
    async with (
        FakeServer(lambda number, _: Reply(fault="hang") if number == 0 else "1") as server,
        judging(server, n_votes=2, timeout_s=3, retries=0) as checker,
    ):
        first, second = await asyncio.gather(checker.check(ONE, {}), checker.check(trajectory("b"), {}))
    assert sorted(first.values + second.values, key=str) == [1, 1, 1, None]
    assert "no reply within 3 s" in next(vote.failure for vote in first.votes + second.votes if vote.failure)


async def test_the_deadline_is_for_the_whole_reply():
    """Case C16b."""
    async with (
        FakeServer(Reply(fault="drip", drip_s=0.1)) as server,
        judging(server, timeout_s=0.5, retries=0) as checker,
    ):
        assert "no reply within 0.5 s" in await unscored(checker)


async def test_all_votes_end_at_the_deadline_of_the_trajectory():
    async with (
        FakeServer(Reply(fault="hang")) as server,
        judging(server, n_votes=3, timeout_s=3600, deadline_s=3, retries=5, concurrency=1) as checker,
    ):
        message = await unscored(checker)
    assert "no slot was free before the deadline" in message
    assert server.count == 1


async def test_context_overflow_shrinks_once():
    """Case C17b: the shorter prompt fits, and it is rendered once for all votes."""
    long = trajectory(observation="rain " * 2000)
    async with FakeServer("Score: 1", context_chars=9_000) as server, judging(server, n_votes=3) as checker:
        votes = await checker.check(long, {})
    assert votes.values == (1, 1, 1) and server.count == 6
    shown = [request.prompt for request in server.requests]
    assert len(set(shown)) == 2 and "characters left out" in min(shown, key=len) and "weather 0" in min(shown, key=len)


async def test_context_overflow_that_stays_is_a_failed_vote():
    """Case C17b."""
    refusal = Reply(status=CASES["C17b"]["status"], body=CASES["C17b"]["body"])
    async with FakeServer(refusal) as server, judging(server, n_votes=2) as checker:
        assert "maximum context length is 8192 tokens" in await unscored(checker, trajectory(observation="x " * 3000))
    assert server.count == 4


async def test_a_known_context_is_kept_before_asking():
    """Case C17a."""
    async with FakeServer("Score: 1") as server, judging(server, context_tokens=4096, max_tokens=256) as checker:
        await checker.check(trajectory(observation="x" * 200_000), {})
    assert server.count == 1 and len(server.requests[0].prompt) < 20_000


async def test_the_servers_context_is_kept_without_being_told():
    async with FakeServer("Score: 1", model="m", max_model_len=4096) as server, judging(server) as checker:
        await checker.check(trajectory(observation="x y " * 50_000), {})
        await checker.check(trajectory(observation="z y " * 50_000), {})
    assert server.count == 2 and all(len(request.prompt) < 16_000 for request in server.requests)


async def test_verdict_is_not_taken_from_the_reasoning():
    """Case C19a."""
    async with FakeServer([CASES["C19a"]["body"]]) as server, judging(server, verdict_retries=0) as checker:
        assert "no readable verdict in ''" in await unscored(checker)
    assert server.count == 1


async def test_a_reply_cut_off_at_max_tokens_is_no_verdict():
    async with FakeServer(Reply("Score: 1, since", finish="length")) as server, judging(server) as checker:
        assert "cut off at max_tokens" in await unscored(checker)
    assert server.count == 2


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_other_4xx_are_not_tried_again(status):
    async with FakeServer(Reply(status=status, body="no")) as server, judging(server, n_votes=2) as checker:
        assert f"HTTP {status}: 'no'" in await unscored(checker)
    assert server.count == 2


async def test_many_samples_stay_within_the_limit():
    """Case C26a with a limit; the one of open files is tested with the slots."""
    load = CASES["C26a"]
    async with (
        FakeServer(latency_s=0.01) as server,
        judging(server, n_votes=load["votes"], concurrency=32, timeout_s=120) as checker,
    ):
        items = [trajectory(str(number)) for number in range(load["samples"])]
        votes = await asyncio.gather(*(checker.check(item, {}) for item in items))
    assert all(item.values == (1,) * load["votes"] for item in votes)
    assert server.count == load["samples"] * load["votes"] and server.peak <= 32 and server.sockets <= 32


async def test_proxy_variables_are_not_used(monkeypatch):
    """Case C27a."""
    for name, value in CASES["C27a"]["env"].items():
        monkeypatch.setenv(name, value)
    async with FakeServer() as server, judging(server, retries=0) as checker:
        assert (await checker.check(ONE, {})).values == (1,)


async def test_several_urls_share_the_votes():
    async with (
        FakeServer(latency_s=0.1) as one,
        FakeServer(latency_s=0.1) as two,
        judging(one, two, n_votes=8) as checker,
    ):
        await checker.check(ONE, {})
    assert (one.count, two.count) == (4, 4)


@pytest.mark.parametrize(
    ("refused", "used"),
    [
        ((), "response_format"),
        (CONSTRAINTS[:1], "structured_outputs"),
        (("response_format", "structured_outputs"), "guided_choice"),
        (CONSTRAINTS, None),
    ],
)
async def test_a_refused_constraint_is_not_asked_for_again(refused, used):
    async with FakeServer(JSON_YES, refuses=refused) as server, judging(server, verdict_retries=0) as checker:
        for number in range(3):
            assert (await checker.check(trajectory(str(number)), {})).values == (1,)
    first, last = server.requests[0].payload, server.requests[-1].payload
    assert "response_format" in first
    assert [name for name in CONSTRAINTS if name in last][:1] == ([used] if used else [])
    assert server.count == 3 + (refused != ()) + ("structured_outputs" in refused) + (refused == CONSTRAINTS)


async def test_the_refusal_of_one_url_does_not_touch_another():
    async with (
        FakeServer(latency_s=0.05, refuses=CONSTRAINTS) as old,
        FakeServer(latency_s=0.05) as new,
        judging(old, new, n_votes=8) as checker,
    ):
        for number in range(3):
            await checker.check(trajectory(str(number)), {})
    assert "response_format" not in old.requests[-1].payload
    assert all(payloads(new, "response_format"))


async def test_free_text_from_a_server_that_ignores_the_constraint():
    async with FakeServer("Nothing is missing.\nScore: 1") as server, judging(server) as checker:
        assert (await checker.check(ONE, {})).values == (1,)
    assert server.count == 1


async def test_thinking_and_further_fields():
    extra = {"top_p": 0.9, "chat_template_kwargs": {"date": "today"}}
    async with FakeServer() as server, judging(server, thinking=False, extra_body=extra, structured="off") as checker:
        await checker.check(ONE, {})
    payload = server.requests[0].payload
    assert payload["chat_template_kwargs"] == {"date": "today", "enable_thinking": False} and payload["top_p"] == 0.9
    assert not set(CONSTRAINTS) & set(payload)


async def test_thinking_is_left_to_the_server():
    async with FakeServer() as server, judging(server) as checker:
        await checker.check(ONE, {})
    assert "chat_template_kwargs" not in server.requests[0].payload


@pytest.mark.parametrize(
    ("replies", "asked"),
    [("11111", 3), ("00000", 3), ("10101", 5), ("11011", 4), ("?1111", 4)],
)
async def test_early_stop_once_the_majority_is_decided(replies, asked):
    async with (
        FakeServer([f"Score: {reply}" for reply in replies]) as server,
        judging(server, n_votes=5, early_stop=True, verdict_retries=0) as checker,
    ):
        votes = await checker.check(ONE, {})
    assert len(votes.votes) == asked == server.count


async def test_early_stop_waits_for_min_votes():
    async with FakeServer("Score: 1") as server, judging(server, n_votes=4, min_votes=4, early_stop=True) as checker:
        await checker.check(ONE, {})
    assert server.count == 4


async def test_verdicts_come_from_the_cache(tmp_path):
    cache = CacheSettings(dir=str(tmp_path / "cache"))
    async with FakeServer([JSON_YES, '{"reason": "gone", "verdict": 0}']) as server:
        async with judging(server, n_votes=2, cache=cache) as checker:
            first = await checker.check(ONE, {})
        async with judging(server, n_votes=2, cache=cache) as checker:
            again = await checker.check(ONE, {})
            assert server.count == 2
        async with judging(server, n_votes=2, cache=cache, temperature=0.9) as checker:
            await checker.check(ONE, {})
    assert again.values == first.values and all(vote.cached for vote in again.votes) and server.count == 4
    assert [vote.reason for vote in again.votes] == [vote.reason for vote in first.votes]
    assert sum(vote.prompt_tokens for vote in again.votes) == 0


async def test_failed_votes_are_not_cached(tmp_path):
    cache = CacheSettings(dir=str(tmp_path / "cache"))
    async with (
        FakeServer(["?", "Score: 1"]) as server,
        judging(server, cache=cache, verdict_retries=0) as checker,
    ):
        await unscored(checker)
        assert (await checker.check(ONE, {})).values == (1,)


async def test_replay_asks_nobody(tmp_path):
    folder = str(tmp_path / "cache")
    async with FakeServer() as server:
        async with judging(server, cache=CacheSettings(dir=folder)) as checker:
            await checker.check(ONE, {})
        async with judging(server, cache=CacheSettings(dir=folder, mode="replay")) as checker:
            assert (await checker.check(ONE, {})).values == (1,)
            assert "no verdict is recorded" in await unscored(checker, trajectory("never seen"))
    assert server.count == 1


async def test_the_same_question_asked_twice_at_once_is_one_request(tmp_path):
    async with (
        FakeServer(latency_s=0.1) as server,
        judging(server, n_votes=2, cache=CacheSettings(dir=str(tmp_path / "cache"))) as checker,
    ):
        votes = await asyncio.gather(*(checker.check(ONE, {}) for _ in range(10)))
    assert server.count == 2 and {item.values for item in votes} == {(1, 1)}
    assert sum(vote.cached for item in votes for vote in item.votes) == 18


async def test_a_cancelled_question_is_taken_over_by_who_waits_for_it(tmp_path):
    async with (
        FakeServer([Reply(fault="hang"), "Score: 1"]) as server,
        judging(server, cache=CacheSettings(dir=str(tmp_path / "cache"))) as checker,
    ):
        first = asyncio.create_task(checker.check(ONE, {}))
        while not server.count:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(checker.check(ONE, {}))
        await asyncio.sleep(0.05)
        first.cancel()
        assert (await asyncio.wait_for(second, 120)).values == (1,)
    assert server.count == 2


async def test_a_spent_budget_ends_scoring_as_unscored():
    async with (
        FakeServer(Reply("Score: 1", usage=(90, 10))) as server,
        judging(server, budget=BudgetSettings(tokens=150)) as checker,
    ):
        for number in range(2):
            await checker.check(trajectory(str(number)), {})
        assert "budget.tokens: 200 tokens spent" in await unscored(checker, trajectory("3"))
    assert server.count == 2


async def test_key_comes_from_the_named_variable(monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "secret")
    async with FakeServer(key="secret") as server, judging(server, api_key_env="MY_JUDGE_KEY") as checker:
        assert (await checker.check(ONE, {})).values == (1,)


def endpoint(**settings):
    return JudgeSettings(**{"backend": "endpoint", "base_url": "http://h/v1", "model": "m", **settings})


def test_a_missing_key_is_told_before_any_request(monkeypatch):
    monkeypatch.delenv("MY_JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="MY_JUDGE_KEY is not set.*Fix: export"):
        build_checker(endpoint(api_key_env="MY_JUDGE_KEY"))


def test_votes_at_temperature_0_are_warned_about(caplog):
    """Case X11."""
    build_checker(endpoint(n_votes=3, temperature=0))
    assert "at temperature 0 the 3 votes of a trajectory are one vote. Fix: rltr.judge.n_votes=1" in caplog.text


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (Reply(status=401), "rltr.judge.api_key_env"),
        ("I cannot evaluate this.", "rltr.judge.max_tokens"),
        (Reply(finish="length"), "rltr.judge.structured"),
        (Reply(status=404), "check that the server answers"),
    ],
)
async def test_the_fix_of_an_unscored_trajectory_goes_by_how_the_votes_were_lost(reply, named):
    async with FakeServer(reply) as server, judging(server, n_votes=2) as checker:
        message = await unscored(checker)
    assert named in message.partition("Fix:")[2] and "rltr.judge.min_votes" in message


async def test_a_server_that_repeats_itself_is_warned_about_once(caplog):
    """Case X11."""
    async with FakeServer(JSON_YES) as server, judging(server, n_votes=3) as checker:
        for number in range(3):
            await checker.check(trajectory(str(number)), {})
    assert caplog.text.count("the 3 votes of a trajectory are one vote") == 1


async def test_short_or_different_replies_are_not_warned_about(caplog):
    async with (
        FakeServer(lambda number, _: f"Reason number {number} is a long one.\nScore: 1") as server,
        judging(server, n_votes=3) as checker,
    ):
        await checker.check(ONE, {})
    async with FakeServer("Score: 1") as server, judging(server, n_votes=3) as checker:
        await checker.check(ONE, {})
    assert "one vote" not in caplog.text


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("10.0.0.7:8000", "http://10.0.0.7:8000/v1"),
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000/v1"),
        ("http://10.0.0.7:8000/", "http://10.0.0.7:8000/v1"),
        ("https://judge/v1", "https://judge/v1"),
        ("judge:80/v1/", "http://judge:80/v1/"),
        ("fd00::7:8000", "http://[fd00::7]:8000/v1"),
        ("[fd00::7]:8000", "http://[fd00::7]:8000/v1"),
    ],
)
def test_address_of_a_hosted_judge(address, url):
    assert Hosted(address, "m").base_url == url


async def test_hosted_asks_what_verl_serves():
    async with FakeServer(model="/models/judge") as server:
        settings = JudgeSettings(backend="hosted", n_votes=2)
        checker = build_checker(settings, hosted=Hosted(f"127.0.0.1:{server.port}", "/models/judge"))
        assert isinstance(checker, EndpointChecker)
        assert (await checker.check(ONE, {})).values == (1, 1)
        await checker.close()


@pytest.mark.parametrize("hosted", [None, Hosted("", "m"), Hosted("127.0.0.1:1", "")])
def test_hosted_without_a_served_model_is_told(hosted):
    with pytest.raises(ConfigError, match="verl serves no reward model.*reward.reward_model.enable=true"):
        hosted_settings(JudgeSettings(backend="hosted"), hosted)
