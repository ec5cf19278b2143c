"""The commands of docs/quickstart.md for one's own queries, tool and judge, as they stand there, in another folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.openai_server import FakeServer
from tests.test_docs import ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = ROOT / "docs" / "quickstart.md"


def write_files(folder: Path) -> None:
    for block in blocks(PAGE):
        mark, _, name = block.mark.partition("=")
        if mark == "file":
            (folder / name).write_text(block.text, encoding="utf-8")


def commands(url: str, run) -> str:
    """The page's commands up to training; the judge is ours, Ray works under a short path and ends with the test."""
    (training,) = (block.text for block in blocks(PAGE) if "rltr.tools=[shop.py]" in block.text)
    making = [block.text for block in blocks(PAGE) if block.mark == "run"]
    assert "http://127.0.0.1:8000/v1" in training
    training = training.rstrip("\n").replace("http://127.0.0.1:8000/v1", url)
    return "\n".join(
        ["set -e", *making, f"{training} +ray_kwargs.ray_init._temp_dir={run.ray} +ray_kwargs.ray_init.address=local"]
    )


async def test_own_queries_tool_and_judge_train_on_a_laptop(run, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_files(folder)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    async with FakeServer("Score: 1", model="judge") as server:
        log = (folder / "log.txt").open("wb")
        process = subprocess.Popen(
            ["bash", "-c", commands(server.url, run)],
            cwd=folder,
            env={**env, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = await asyncio.to_thread(process.wait, 400)
        finally:
            run.kill(process)
    said = (folder / "log.txt").read_text(errors="replace")
    assert code == 0, said[-4000:]
    assert re.search(r"step:2\b", said), said[-4000:]
    records = [
        json.loads(line)
        for file in (folder / "shop" / "trajectories").glob("*.jsonl")
        for line in file.read_text("utf-8").splitlines()
    ]
    train = [item for item in records if item["split"] == "train"]
    assert len(train) == 2 * 2 * 8, len(train)
    assert {tool["function"]["name"] for item in train for tool in item["trajectory"]["tools"]} == {"stock"}
