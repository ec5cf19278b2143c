"""`rltr verify-masks` on dumps as the reward manager writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rltr_verl.cli.verify_masks import verify_masks
from rltr_verl.masks import trained_spans
from rltr_verl.rollout.turns import Rollout
from rltr_verl.trajectory import Observation, Turn
from tests.fakes.families import FAMILIES, TOOLS, template_of, tokenizer_of

app = typer.Typer()
app.command()(verify_masks)


def record(family: str, result: str = "41 degrees") -> dict[str, Any]:
    template = template_of(family)
    rollout = Rollout(template.prompt_ids([{"role": "user", "content": "How warm is it?"}]), 400)
    first = template.encode("I call." + FAMILIES[family].end)
    context, (seen,) = template.observe([result], turn_ended=True)
    last = template.encode("<answer>")
    rollout.ids, rollout.mask = first + context + last, [1] * len(first) + [0] * len(context) + [1] * len(last)
    rollout.turns = [Turn(template.decode(first), observations=(Observation(seen),)), Turn("<answer>")]
    trajectory = rollout.trajectory("How warm is it?", {"search": TOOLS[0]})
    return {
        "uid": "a",
        "prompt_ids": rollout.prompt_ids,
        "response_ids": rollout.ids,
        "trained": trained_spans(rollout.mask),
        "trajectory": trajectory.to_dict(),
    }


def run(folder: Path, family: str, records: list[Any], *options: str):
    dump = folder / "dump"
    dump.mkdir()
    half = len(records) // 2
    for name, part in (("a", records[:half]), ("b", records[half:])):
        (dump / f"trajectories-{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in part))
    model = folder / "model"
    tokenizer_of(family).save_pretrained(model)
    return CliRunner().invoke(app, [str(dump), "--model", str(model), *options])


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "glm4"])
def test_a_right_dump(tmp_path, family):
    result = run(tmp_path, family, [record(family), record(family, "no record <|im_end|>")])
    assert result.exit_code == 0, result.output
    lines = {line.rsplit(None, 1)[0].strip(): line.rsplit(None, 1)[1] for line in result.output.splitlines()[:6]}
    trained = sum(end - start for start, end in record(family)["trained"])
    assert lines["trajectories"] == "2" and lines["turns"] == "4"
    assert lines["trained tokens"] == str(2 * trained) and lines["with a fault"] == "0"
    assert lines["other than a fresh rendering"] == "0"
    assert "ok: exactly the sampled tokens are trained" in result.output


def test_a_broken_mask_is_shown_and_fails(tmp_path):
    broken = record("qwen2.5")
    broken["trained"][0][1] -= 1
    result = run(tmp_path, "qwen2.5", [record("qwen2.5"), broken])
    assert result.exit_code == 1
    assert "with a fault" in result.output and "1 (" in result.output
    assert "first fault" in result.output and "trajectories-b.jsonl, line 1" in result.output
    assert "the policy wrote 'I call.<|im_end|>'" in result.output


def test_what_steers_a_terminal_is_shown_and_not_sent(tmp_path):
    broken = record("qwen2.5", "\x1b[2J\x07 gone")
    broken["trajectory"]["turns"][0]["observations"][0]["text"] = "another"
    result = run(tmp_path, "qwen2.5", [broken, broken])
    assert result.exit_code == 1 and "\x1b" not in result.output and "\\x1b" in result.output


def test_an_observation_that_the_record_does_not_hold_fails(tmp_path):
    broken = record("qwen2.5")
    broken["trajectory"]["turns"][0]["observations"][0]["text"] = "42 degrees"
    result = run(tmp_path, "qwen2.5", [broken, broken])
    assert result.exit_code == 1 and "context 2" in result.output


def test_a_divergence_is_reported_and_no_fault(tmp_path):
    no_think = record("qwen3-no-think")
    options = ("--template-kwargs", '{"enable_thinking": false}')
    result = run(tmp_path, "qwen3-no-think", [no_think, no_think], *options)
    assert result.exit_code == 0, result.output
    assert "first divergence" in result.output and "opens a past turn otherwise" in result.output


def test_another_chat_template_is_a_fault(tmp_path):
    result = run(tmp_path, "qwen3-no-think", [record("qwen3-no-think")] * 2)
    assert result.exit_code == 1 and "context" in result.output
    own = tmp_path / "own.jinja"
    own.write_text(tokenizer_of("qwen3").chat_template.replace("is defined and not enable_thinking", "is not defined"))
    options = [str(tmp_path / "dump"), "--model", str(tmp_path / "model"), "--chat-template", str(own)]
    assert CliRunner().invoke(app, options).exit_code == 0


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"input": "q", "output": "a", "gts": None, "score": 1.0, "step": 1}] * 2, "rollout_data_dir holds neither"),
        ([{**record("qwen2.5"), "trajectory": {}}] * 2, "line 1: not a record of a dump"),
        ([{**record("qwen2.5"), "trained": 3}] * 2, "line 1: not a record of a dump"),
        ([{**(r := record("qwen2.5")), "trajectory": {**r["trajectory"], "tools": ["x"]}}], "line 1: not a record"),
        ([{**record("qwen2.5"), "response_ids": [-1]}] * 2, "line 1: not a record of a dump"),
        ([{**record("qwen2.5"), "response_ids": [1.5]}] * 2, "line 1: not a record of a dump"),
        ([{**record("qwen2.5"), "response_ids": [1 << 70]}] * 2, "line 1: not a record of a dump"),
    ],
)
def test_what_is_no_dump_is_refused(tmp_path, records, message):
    result = run(tmp_path, "qwen2.5", records)
    assert result.exit_code == 2 and message in result.output


def test_a_missing_dump_and_wrong_arguments_are_refused(tmp_path):
    tokenizer_of("qwen2.5").save_pretrained(tmp_path / "model")
    options = ["--model", str(tmp_path / "model")]
    assert "no dump here" in CliRunner().invoke(app, [str(tmp_path / "none"), *options]).output
    result = CliRunner().invoke(app, [str(tmp_path), *options, "--template-kwargs", "x=1"])
    assert result.exit_code == 2 and "no JSON object" in result.output


def test_a_line_that_ends_inside_of_a_character_is_named(tmp_path):
    """As a full disk leaves it behind."""
    run(tmp_path, "qwen2.5", [record("qwen2.5")] * 2)
    torn = json.dumps(record("qwen2.5", "结果"), ensure_ascii=False).encode()
    torn = torn[: torn.index("结".encode()) + 1]
    with (tmp_path / "dump" / "trajectories-b.jsonl").open("ab") as file:
        file.write(torn + b"\n")
    result = CliRunner().invoke(app, [str(tmp_path / "dump"), "--model", str(tmp_path / "model")])
    assert result.exit_code == 2 and "trajectories-b.jsonl, line 2: not valid JSON" in result.output
