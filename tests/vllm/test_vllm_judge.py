"""Votes over HTTP from a real vLLM server: `make test-vllm`.

The model is random, so that nothing but the server's structured output makes a reply of it that holds a verdict.
"""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rltr_verl import Trajectory
from rltr_verl.config import load_settings
from rltr_verl.errors import ConfigError, Unscored
from rltr_verl.judge import Votes, build_checker
from rltr_verl.judge.probe import probe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make venv-vllm` installs it"),
]

CONTEXT = 4096
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def trajectory(number: int, result: str = "41") -> Trajectory:
    call = {"name": "search", "arguments": {"query": f"arlen temperature {number}"}}
    messages = [
        {"role": "user", "content": f"How warm is Arlen on day {number}?"},
        {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "<answer>"},
    ]
    return Trajectory.from_messages(messages, tools=[TOOL])


def judge(url: str, **settings: Any):
    base = {"backend": "endpoint", "base_url": url, "model": "judge", "n_votes": 4, "min_votes": 4, "temperature": 1}
    return load_settings({"judge": {**base, "timeout_s": 120, **settings}}).judge


async def votes_on(settings, *trajectories: Trajectory) -> list[Votes]:
    checker = build_checker(settings)
    try:
        return list(await asyncio.gather(*(checker.check(one, {}) for one in trajectories)))
    finally:
        await checker.close()


@pytest.fixture
def closing_quote(model: Path) -> dict[str, Any]:
    """A field that makes a random model end a JSON string some time."""
    from transformers import AutoTokenizer

    return {"logit_bias": {str(AutoTokenizer.from_pretrained(model).encode('"')[0]): 8}}


async def test_a_random_model_gives_readable_verdicts_under_a_json_schema(server, closing_quote):
    settings = judge(server, structured="json_schema", extra_body=closing_quote, verdict_retries=3)
    found = await votes_on(settings, *map(trajectory, range(6)))
    verdicts = [value for votes in found for value in votes.values]
    assert len(verdicts) == 24 and set(verdicts) == {0, 1}
    for vote in (vote for votes in found for vote in votes.votes):
        assert vote.failure is None and not vote.cached
        assert vote.prompt_tokens > 100 and vote.completion_tokens > 4 and vote.latency_s > 0


async def test_a_random_model_gives_readable_verdicts_under_a_choice(server):
    found = await votes_on(judge(server, structured="choice", verdict_retries=0), *map(trajectory, range(6)))
    verdicts = [value for votes in found for value in votes.values]
    assert len(verdicts) == 24 and set(verdicts) <= {0, 1}
    assert all(vote.completion_tokens <= 2 for votes in found for vote in votes.votes)


async def test_the_same_model_gives_none_without(server):
    with pytest.raises(Unscored, match="0 of 4 votes are readable"):
        await votes_on(judge(server, structured="off", min_votes=1, max_tokens=64), trajectory(0))


async def test_votes_have_seeds_and_repeat(server):
    settings = judge(server, structured="choice")
    first, again = [await votes_on(settings, *map(trajectory, range(6))) for _ in range(2)]
    assert [votes.values for votes in first] == [votes.values for votes in again]


async def test_a_record_longer_than_the_context_is_cut_to_fit(server, prose):
    settings = judge(server, structured="choice", max_record_chars=1_000_000)
    (votes,) = await votes_on(settings, trajectory(0, result=prose))
    assert set(votes.values) <= {0, 1}
    assert all(CONTEXT / 4 < vote.prompt_tokens < CONTEXT for vote in votes.votes)


def test_the_server_is_probed_before_a_run(server):
    assert probe(judge(server)).context_tokens == CONTEXT
    with pytest.raises(ConfigError, match="does not serve the model 'juge'. Fix: did you mean 'judge'"):
        probe(judge(server, model="juge"))
