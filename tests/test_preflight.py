"""Bad input: one clear error with its fix, from the real command, before Ray starts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rltr_verl._compose import compose_recipe
from rltr_verl.errors import ConfigError, DataError, DiskError, ModelError, RltrError, WorldError
from rltr_verl.preflight import check, require_room
from rltr_verl.preflight_context import positions
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.tooling import load_tools, schemas
from rltr_verl.world import build_world
from tests.fakes.openai_server import FakeServer

PRINTS_MESSAGES = "{% for m in messages %}{{ m | tojson }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world") / "w", seed=1)


def checked(world, *overrides: str) -> None:
    check(compose_recipe("rltr_planner", ["scale=cpu", f"rltr.world={world.folder}", *overrides]))


def rows_of(world) -> list[dict]:
    return pq.read_table(world.split("val")).to_pylist()[:3]


def as_jsonl(tmp_path, rows) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return str(path)


def test_a_good_recipe_passes(world):
    checked(world)


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("+rltr.rollout.max_turn=3", ConfigError, "rltr.rollout.max_turn: unknown key.*did you mean 'max_turns'"),
        ("rltr.rollout.max_turns=0", ConfigError, "rltr.rollout.max_turns: .*greater than or equal to 1"),
        ("+rltr.reward.terms.brevity={}", ConfigError, "unknown reward term 'brevity'"),
        ("rltr.reward.terms.repeat.lambda=much", ConfigError, "rltr.reward.terms.repeat.lambda"),
        ("rltr.tools=[serach]", ConfigError, "unknown tool 'serach'"),
        ("judge=endpoint", ConfigError, "rltr.judge.(base_url|model): a value is missing"),
        ("data.val_files=null", ConfigError, "data.val_files: a value is missing"),
        ("algorithm.adv_estimator=grop", ConfigError, "no settings for estimator 'grop'"),
        (
            "rltr.world=/no/such/world",
            WorldError,
            r"rltr.world: no world '/no/such/world'. Fix: build one \(rltr world build --out .*set rltr.world=null",
        ),
        (
            "rltr.world=null",
            ConfigError,
            r"data.train_files: a value is missing \(it comes from the world.*Fix: add data",
        ),
        ("data.max_prompt_length=900", ConfigError, r"900 \+ 192 = 1092 tokens, the model has positions for 1024"),
        ("actor_rollout_ref.rollout.max_model_len=2048", ConfigError, "max_model_len: .* for 1024 tokens, not 2048"),
        ("actor_rollout_ref.model.path=/no/such/model", ModelError, "no model folder '/no/such/model'"),
        ("data.train_files=/no/such.parquet", DataError, "data.train_files: no file '/no/such.parquet'"),
        ("data.max_prompt_length=5", DataError, r"train.parquet, row 1 \(index 0, '.+'\): the prompt has \d+ tokens"),
        ("rltr.dump_dir=/proc/dump", DiskError, "rltr.dump_dir"),
        (
            "rltr.tool_settings.search.corpus=/no/such.jsonl",
            ConfigError,
            r"rltr.tool_settings.search: /no/such.jsonl: cannot read the search corpus: No such.*Fix: set rltr",
        ),
        (
            "rltr.rollout.mode=end_to_end",
            ConfigError,
            "rltr.rollout.mode: 'end_to_end' cannot be trained.*mode=planner",
        ),
        ("+rltr.rollout.stop_marker=X", ConfigError, "unknown key 'stop_marker'"),
        (
            "actor_rollout_ref.rollout.name=sglang",
            ConfigError,
            "cannot stop at .*Fix: add actor_rollout_ref.rollout.skip_tokenizer_init=false",
        ),
    ],
)
def test_wrong_settings_name_the_key_and_the_fix(world, override, error, message):
    with pytest.raises(error, match=message) as caught:
        checked(world, override)
    assert caught.value.fix


ROWS = [
    (lambda row: row.pop("prompt"), r"row 2.*: no 'prompt'\. Fix: add a column 'prompt'.*columns here"),
    (lambda row: row.update(prompt="question"), "row 2.*: 'prompt' is not a list of chat messages"),
    (lambda row: row.update(prompt=[]), "row 2.*: 'prompt' is not a list of chat messages"),
    (lambda row: row.update(agent_name="tool_agent"), "agent_name 'tool_agent' is not a loop of this package"),
    (lambda row: row["extra_info"].update(needs=7), "row 2.*: field 'needs'"),
    (lambda row: row["extra_info"].update(needs="[{"), "row 2.*: field 'needs' is not valid JSON"),
    (lambda row: row["extra_info"].update(needs=[{"tol": "search"}]), r"row 2.*: field 'needs\[0\]"),
    (lambda row: row["extra_info"].pop("needs"), "row 2.*: no 'extra_info.needs'.*judge=endpoint"),
    (lambda row: row.update(extra_info=None), "row 2.*: no 'extra_info.needs'"),
    (
        lambda row: row["extra_info"].update(tool_selection=["search", "serach"]),
        "row 2.*: field 'extra_info.tool_selection' names 'serach'.*calculator, days_between, search",
    ),
    (lambda row: row["extra_info"].update(tool_selection="serach"), "row 2.*: .*tool_selection' names 'serach'"),
]


@pytest.mark.parametrize(("spoil", "message"), ROWS)
def test_a_bad_row_is_named_by_file_row_and_field(world, tmp_path, spoil, message):
    rows = rows_of(world)
    spoil(rows[1])
    path = as_jsonl(tmp_path, rows)
    with pytest.raises(DataError, match=message) as caught:
        checked(world, f"data.train_files={path}")
    assert path in str(caught.value)


@pytest.mark.parametrize("off", ["skip_tokenizer_init=false", "+engine_kwargs.sglang.skip_tokenizer_init=false"])
def test_sglang_with_its_tokenizer_passes(world, off):
    plus, key = ("+" if off.startswith("+") else ""), off.lstrip("+")
    rollout = "actor_rollout_ref.rollout"
    checked(world, f"{rollout}.name=sglang", f"{plus}{rollout}.{key}")


def test_the_length_is_that_with_the_rows_own_tools(world, tmp_path):
    row = rows_of(world)[0]
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    few = schemas(load_tools(["calculator"]))
    limit = len(ChatTemplate(tokenizer, few).prompt_ids(row["prompt"]))
    with pytest.raises(DataError, match=rf"the prompt has \d+ tokens, data.max_prompt_length is {limit}"):
        checked(world, f"data.train_files={as_jsonl(tmp_path, [row])}", f"data.max_prompt_length={limit}")
    row["extra_info"]["tool_selection"] = ["calculator"]
    file = as_jsonl(tmp_path, [row])
    checked(world, f"data.train_files={file}", f"data.val_files={file}", f"data.max_prompt_length={limit}")


def test_messages_are_measured_as_the_rollout_reads_them(world, tmp_path):
    """Keys that parquet added as None are shown neither here nor there, whatever the template prints."""
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    tokenizer.chat_template = PRINTS_MESSAGES
    tokenizer.save_pretrained(tmp_path / "model")
    shutil.copy(world.model / "config.json", tmp_path / "model")
    row = rows_of(world)[0]
    limit = len(ChatTemplate(tokenizer, []).prompt_ids(row["prompt"]))
    row["prompt"][0]["name"] = None
    given = {
        "train_files": as_jsonl(tmp_path, [row]),
        "val_files": as_jsonl(tmp_path, [row]),
        "max_prompt_length": limit,
    }
    overrides = [f"data.{key}={value}" for key, value in given.items()]
    checked(world, f"actor_rollout_ref.model.path={tmp_path / 'model'}", *overrides)


def test_a_row_is_found_again_by_its_number_in_the_users_file_and_its_query(world, tmp_path):
    rows = rows_of(world)
    rows[2]["extra_info"] |= {"index": 17, "query": "How  much warmer is Arlen than Brona today?", "needs": 7}
    path = as_jsonl(tmp_path, rows)
    with pytest.raises(DataError) as caught:
        checked(world, f"data.train_files={path}")
    assert caught.value.where == f"{path}, row 3 (index 17, 'How much warmer is Arlen than Brona toda...')"


def test_a_prompt_that_no_setting_makes_fit_is_told_so(world, tmp_path):
    row = rows_of(world)[0]
    row["prompt"] = [{"role": "user", "content": "word " * 400}]
    with pytest.raises(DataError, match=r"with data.max_response_length=700 it exceeds the model's 1024.*longer"):
        checked(world, f"data.train_files={as_jsonl(tmp_path, [row])}", "data.max_response_length=700")
    row["prompt"] = [{"role": "user", "content": "word " * 100}]
    with pytest.raises(DataError, match=r"raise data.max_prompt_length \(with the response at most 1024"):
        checked(world, f"data.train_files={as_jsonl(tmp_path, [row])}")


def test_a_model_without_its_config_is_refused(world, tmp_path):
    AutoTokenizer.from_pretrained(world.model).save_pretrained(tmp_path / "bare")
    with pytest.raises(ModelError, match=r"no usable config.json"):
        checked(world, f"actor_rollout_ref.model.path={tmp_path / 'bare'}")


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 1024),
        ({"max_position_embeddings": 512}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
    ],
)
def test_positions_are_those_of_the_run(world, changes, most):
    assert positions(str(world.model), "model", changes) == most


def test_a_run_that_keeps_no_checkpoint_says_so(world, caplog):
    checked(world)
    assert [item.message for item in caplog.records if "keeps no checkpoint" in item.message]
    caplog.clear()
    checked(world, "trainer.save_freq=10")
    assert not [item for item in caplog.records if "keeps no checkpoint" in item.message]


def test_an_incomplete_world_is_told_apart_from_none(world, tmp_path):
    (tmp_path / "w").mkdir()
    with pytest.raises(WorldError, match=r"manifest.json is missing.*delete the folder.*rltr.world=null"):
        checked(world, f"rltr.world={tmp_path / 'w'}")


def test_a_file_without_rows_or_with_garbage_is_refused(world, tmp_path):
    with pytest.raises(DataError, match="holds no rows"):
        checked(world, f"data.val_files={as_jsonl(tmp_path, [])}")
    broken = tmp_path / "x.parquet"
    broken.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read"):
        checked(world, f"data.val_files={broken}")


def test_a_tokenizer_without_chat_template_is_refused(world, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").write_text((world.model / "config.json").read_text())
    with pytest.raises(ModelError, match="no chat template"):
        checked(world, f"actor_rollout_ref.model.path={tmp_path / 'bare'}")


def test_disk_room_is_asked_of_the_nearest_existing_folder(tmp_path):
    require_room(tmp_path / "a" / "b", "x", need=1)
    with pytest.raises(DiskError, match="GiB are needed.*Fix: free some space"):
        require_room(tmp_path, "x", need=1 << 60)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rltr.judge.model=n", r"rltr.judge.model: .*'n'.*Fix: "),
        ("rltr.judge.api_key_env=null", r"HTTP 401.*Fix: "),
        ("rltr.judge.api_key_env=NOT_SET_ANYWHERE", r"NOT_SET_ANYWHERE is not set.*Fix: "),
        ("rltr.judge.base_url=http://127.0.0.1:9/v1", r"rltr.judge.base_url: .*127.0.0.1:9.*Fix: "),
        ("rltr.judge.prompt=/no/such.txt", r"/no/such.txt.*Fix: "),
        ("rltr.judge.context_tokens=100000", r"rltr.judge.context_tokens: .*Fix: "),
        ("rltr.judge.cache.dir=/proc/cache", r"/proc/cache.*Fix: "),
        ("rltr.judge.budget.money=5", r"rltr.judge.budget.*price.*Fix: "),
        ("rltr.judge.backend=oracle", r"rltr.judge.backend: .*Fix: "),
    ],
)
async def test_a_judge_that_cannot_work_is_told_before_any_rollout(world, monkeypatch, override, message):
    monkeypatch.setenv("JUDGE_KEY", "k")
    async with FakeServer("1", key="k", model="m", max_model_len=8192) as server:
        good = ["judge=endpoint", f"rltr.judge.base_url={server.url}", "rltr.judge.model=m"]
        good.append("rltr.judge.api_key_env=JUDGE_KEY")
        await asyncio.to_thread(checked, world, *good)
        with pytest.raises(RltrError, match=message):
            await asyncio.to_thread(checked, world, *good, override)


def test_it_can_be_switched_off(world):
    checked(world, "rltr.preflight=false", "data.train_files=/no/such.parquet")


def test_the_real_command_stops_with_one_line_before_ray(world, tmp_path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "rltr_planner", "scale=cpu"]
    overrides = [f"rltr.world={world.folder}", "data.train_files=/no/such.parquet"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, cwd=tmp_path, timeout=500, env=env)
    assert done.returncode == 1
    assert "[rltr_verl] DataError: data.train_files: no file '/no/such.parquet'. Fix:" in done.stderr
    assert "Traceback" not in done.stderr and "ray init" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_errors_survive_the_way_between_processes():
    import pickle

    error = DataError("bad", where="file, row 3", fix="mend it.")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, RltrError) and str(again) == str(error) and again.fix == "mend it."
