"""The reward manager under verl's own registry and data protocol."""

import asyncio
import json

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from omegaconf import OmegaConf
from tensordict import TensorDict
from typer.testing import CliRunner
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.reward import load_reward_manager

from rltr_verl.cli.main import app as cli
from rltr_verl.errors import ConfigError, DataError, Unscored
from rltr_verl.reward_manager import RltrRewardManager
from rltr_verl.rollout import unscored
from rltr_verl.tool_metrics import TOOL_METRICS_FIELD
from rltr_verl.trajectory import Trajectory

CALL = '<tool_call>{"name": "search", "arguments": {"query": "arlen"}}</tool_call>'
NEEDS = json.dumps([{"tool": "search", "arguments": {"query": ["arlen"]}}])


def manager(address=None, **node):
    reward = {"reward_manager": {"source": "register", "name": "rltr"}, "reward_model": {"model_path": "served-judge"}}
    config = OmegaConf.create({"rltr": node, "reward": reward})
    return load_reward_manager(config, tokenizer=None, reward_router_address=address, reward_model_tokenizer=None)


def column(value):
    """One row of a non-tensor column, as verl builds it."""
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


def data(texts, as_text=False, needs=NEEDS, **extra):
    messages = []
    for text in texts:
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "tool", "content": "41"}] * text.count("<tool_call>")
    trajectory = Trajectory.from_messages(messages, "q").to_dict()
    fields = {"rltr_trajectory": json.dumps(trajectory) if as_text else trajectory}
    columns = {
        "data_source": "rltr_world/look",
        "reward_model": {"style": "rule", "ground_truth": "41"},
        "extra_info": {"index": 7, "kind": "look", "needs": needs},
        "uid": "u1",
        "tool_extra_fields": fields,
        **extra,
    }
    batch = TensorDict({"responses": torch.zeros(1, 4, dtype=torch.int64)}, batch_size=1)
    return DataProto(batch=batch, non_tensor_batch={key: column(value) for key, value in columns.items()})


def test_verl_knows_it_by_name():
    assert get_reward_manager_cls("rltr") is RltrRewardManager


@pytest.mark.parametrize("as_text", [False, True], ids=["dict", "JSON text"])
async def test_score_and_extra_info(as_text):
    result = await manager().run_single(data([CALL, CALL, "<answer>"], as_text))
    assert result["reward_score"] == pytest.approx(0.9)
    info = result["reward_extra_info"]
    assert (info["acc"], info["calls"], info["repeats"], info["format_ok"]) == (1.0, 2.0, 1.0, 1.0)


async def test_the_same_numeric_keys_on_every_path():
    """verl takes the keys of the first row and indexes all rows with them."""
    subject = manager()
    runs = [[CALL, "<answer>"], ["<answer>"], ["no marker"], ["<think>"], ["<tool_call>{</tool_call>", "<answer>"]]
    infos = [(await subject.run_single(data(run)))["reward_extra_info"] for run in runs]
    assert len({tuple(info) for info in infos}) == 1
    assert {type(value) for info in infos for value in info.values()} == {float}
    assert np.array([info["acc"] for info in infos]).dtype == np.float64


async def test_figures_of_the_tools_join_the_metrics():
    row = data([CALL, "<answer>"])
    row.non_tensor_batch["tool_extra_fields"][0][TOOL_METRICS_FIELD] = json.dumps({"tool/search/calls": 1.0})
    info = (await manager().run_single(row))["reward_extra_info"]
    assert info["tool/search/calls"] == 1.0 and info["acc"] == 1.0


async def test_malformed_is_minus_one():
    result = await manager().run_single(data(["no marker"]))
    assert result["reward_score"] == -1.0 and result["reward_extra_info"]["format_no_stop_marker"] == 1.0


async def test_a_row_the_checker_cannot_judge_is_unscored():
    with pytest.raises(Unscored, match="row 7.*has no 'needs'"):
        await manager().run_single(data([CALL, "<answer>"], needs=None))


async def test_the_replay_buffer_hears_of_an_unscored_trajectory_before_verl_does(monkeypatch):
    heard = []

    async def report(*told):
        heard.append(told)

    monkeypatch.setattr(unscored, "report", report)
    subject = manager()
    await subject.run_single(data([CALL, "<answer>"], session_id=3))
    await subject.run_single(data(["no marker"], session_id=3))
    assert not heard
    with pytest.raises(Unscored):
        await subject.run_single(data([CALL, "<answer>"], needs=None, session_id=3))
    ((uid, session, missing),) = heard
    assert (uid, session, missing.by_judge) == ("u1", 3, True) and "has no 'needs'" in missing.reason
    cut = manager(reward={"truncated": "unscored"})
    with pytest.raises(Unscored):
        await cut.run_single(data([CALL], session_id=4))
    assert not heard[-1][2].by_judge


async def test_a_term_without_a_verdict_leaks_no_number_to_verl():
    """Another term may have a value; the metrics of the missing one are NaN, which verl would average."""
    subject = manager(reward={"terms": {"repeat": {}, "completeness": {}}})
    scored = await subject.run_single(data([CALL, CALL, "<answer>"]))
    assert (
        np.isfinite(list(scored["reward_extra_info"].values())).all() and scored["reward_extra_info"]["unscored"] == 0
    )
    with pytest.raises(Unscored):
        await subject.run_single(data([CALL, CALL, "<answer>"], needs=None))


HOSTED = {"backend": "hosted", "n_votes": 2, "min_votes": 2, "context_tokens": 8192}


async def test_the_judge_that_verl_serves_is_asked_at_its_router():
    asked = []

    async def vote(request):
        asked.append((await request.json())["model"])
        message = {"role": "assistant", "content": '{"reason": "r", "score": 1}'}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", vote)
    async with TestServer(app) as server:
        subject = manager(f"{server.host}:{server.port}", judge=HOSTED)
        result = await subject.run_single(data([CALL, "<answer>"], needs=None))
        await subject.scorer.close()
    assert result["reward_score"] == 1.0 and asked == ["served-judge", "served-judge"]


def test_a_served_judge_that_is_not_there_is_told_when_the_manager_is_built():
    with pytest.raises(ConfigError, match="rltr.judge.backend=hosted.*reward.reward_model.enable"):
        manager(judge=HOSTED)


async def test_another_agent_loop_is_named_with_the_fix():
    lost = data([CALL, "<answer>"], tool_extra_fields={}, agent_name="single_turn_agent")
    with pytest.raises(DataError, match='agent loop: single_turn_agent.*Fix: .*agent_name="rltr_planner"'):
        await manager().run_single(lost)


def test_a_wrong_setting_is_told_when_the_manager_is_built():
    with pytest.raises(ConfigError, match="rltr.reward.florr: unknown key 'florr'"):
        manager(reward={"florr": 1})


async def test_every_trajectory_is_dumped_with_its_parts(tmp_path):
    subject = manager(dump_dir=str(tmp_path))
    await subject.run_single(data([CALL, "<answer>"], global_steps=np.int64(3), session_id=np.int64(2)))
    await subject.run_single(data(["no marker"]))
    with pytest.raises(Unscored):
        await subject.run_single(data([CALL, "<answer>"], needs=None))
    (file,) = tmp_path.iterdir()
    assert '"global_steps": 3,' in file.read_text()
    scored, malformed, unscored = map(json.loads, file.read_text().splitlines())
    assert (scored["uid"], scored["index"], scored["kind"], scored["global_steps"]) == ("u1", 7, "look", 3)
    assert scored["session_id"] == 2
    assert scored["total"] == 1.0 and scored["terms"]["completeness"]["votes"] == [1.0]
    assert Trajectory.from_dict(scored["trajectory"]).n_calls == 1
    assert malformed["total"] == -1.0 and malformed["format"] == ["no_stop_marker"] and malformed["terms"] == {}
    assert unscored["total"] is None and "has no 'needs'" in unscored["unscored"]


def test_a_dump_is_scored_again(tmp_path):
    asyncio.run(manager(dump_dir=str(tmp_path)).run_single(data([CALL, CALL, "<answer>"])))
    (file,) = tmp_path.iterdir()
    again = CliRunner().invoke(cli, ["score", str(file), "--set", "reward.terms.repeat.lambda=0.3"])
    assert json.loads(again.stdout)["total"] == pytest.approx(0.7)
    (tmp_path / "broken.jsonl").write_text('{"trajectory": {"turns": 1}}')
    broken = CliRunner().invoke(cli, ["score", str(tmp_path / "broken.jsonl")])
    assert broken.exit_code == 2 and "row 1: field 'trajectory' is not a trajectory of a dump" in broken.stderr
