"""The cold-start recipe refuses bad input before it starts; that it composes is in ``test_sft_compose.py``."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltr_verl._compose import compose_recipe
from rltr_verl.errors import DataError, ModelError, WorldError
from rltr_verl.preflight_sft import check_sft
from rltr_verl.world import WorldSizes, build_world


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world") / "w", sizes=WorldSizes(train=100, val=20, coldstart=100))


def recipe(*overrides: str):
    return compose_recipe("rltr_coldstart_sft", list(overrides))


def test_the_worlds_cold_start_passes(world):
    check_sft(recipe("sft_scale=cpu", f"rltr.world={world.folder}"))


@pytest.mark.parametrize(
    ("override", "error", "named"),
    [
        ("rltr.world=/no/such/world", WorldError, "no world here"),
        ("model.path=/no/such/model", ModelError, "no model folder"),
        ("data.train_files=/no/such.parquet", DataError, "no file"),
        ("data.messages_key=turns", DataError, "no column 'turns'.*columns here: messages, tools"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(world, override, error, named):
    with pytest.raises(error, match=named) as caught:
        check_sft(recipe("sft_scale=cpu", f"rltr.world={world.folder}", override))
    assert caught.value.fix


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([USER], "does not end with an assistant message"),
        ([], "does not end with an assistant message"),
        ([USER, {"role": "planner", "content": "a"}], "role 'planner'"),
        ([USER, {"role": "assistant", "content": None}], "message 1 has no content"),
    ],
)
def test_a_bad_conversation_is_named_by_its_row(world, tmp_path, messages, named):
    table = pa.Table.from_pylist([{"messages": [USER, ASSISTANT]}, {"messages": messages}])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=rf"rows\.parquet, row 1: .*{named}"):
        check_sft(recipe("sft_scale=cpu", f"rltr.world={world.folder}", f"data.train_files={tmp_path}/rows.parquet"))
