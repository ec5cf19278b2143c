"""Which characters each loss policy trains."""

from __future__ import annotations

import pytest

from rltr_verl.cli.coldstart_export import Loss
from rltr_verl.coldstart.loss import DEFAULT_LOSS, LOSS_POLICIES, read_loss, trained_stretches
from rltr_verl.errors import ConfigError
from tests.coldstart.export_kit import call


def trained(text: str, policy: str = "action_only", is_last: bool = False, prefilled: bool = False) -> list[str]:
    stretches = trained_stretches(text, policy, is_last=is_last, prefilled_think=prefilled)
    assert stretches == sorted(stretches) and all(start < end for start, end in stretches)
    return [text[start:end] for start, end in stretches]


THINK = "<think>\nr\n</think>"


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        (f"{THINK}\n\n{call()}", [call()]),
        (f"{THINK}\n\nSo: {call()}\n{call('b')}\n", [f"{call()}\n{call('b')}\n"]),
        (f"{call()} and {call('b')}", [call(), call("b")]),
        (f"{call('</tool_call>')} x", [call("</tool_call>")]),
        (f"{call('</think>')} x", [call("</think>")]),
        (f"<think>{call()}</think>\n\n<answer>", ["<answer>"]),
        (f"{THINK}\n\nSaid. <answer>41</answer>", ["<answer>41</answer>"]),
        (f"{THINK}\n\nIt is 41.\n", ["It is 41.\n"]),
        ("no </think>\n\n<answer>", ["<answer>"]),
        ("<tool_call>\n{broken\n</tool_call> x", ["<tool_call>\n{broken\n</tool_call>"]),
        ("<tool_call>\n{never closed", ["<tool_call>\n{never closed"]),
        ("<search>arlen</search> x", ["<search>arlen</search>"]),
        ("<think>never closed <answer>", []),
        ("", []),
    ],
)
def test_actions_alone(text, actions):
    assert trained(text) == actions
    assert trained(text, is_last=True) == actions


def test_the_thought_of_the_last_turn_is_trained_with_the_actions():
    text = f"{THINK}\n\nSaid. <answer>"
    assert trained(text, "action+final_think", is_last=True) == [THINK, "<answer>"]
    assert trained(text, "action+final_think") == ["<answer>"]
    assert trained(f"{THINK}\n\n<answer>", "action+final_think", is_last=True) == [f"{THINK}\n\n<answer>"]


def test_everything_of_the_assistant():
    text = f"{THINK}\n\nSaid. {call()}"
    assert trained(text, "all_assistant") == [text]


def test_a_thought_that_the_prompt_opened_is_one():
    assert trained(f"r\n</think>\n\n{call()}", prefilled=True) == [call()]
    assert trained("r\n</think>\n\n<answer>", "action+final_think", True, True) == ["r\n</think>\n\n<answer>"]


def test_policies_are_read_strictly():
    assert [read_loss(name) for name in LOSS_POLICIES] == list(LOSS_POLICIES)
    assert read_loss(None) == DEFAULT_LOSS == "all_assistant"
    with pytest.raises(ConfigError, match="no loss policy 'all'.*Fix: policies: action_only, action.final_think"):
        read_loss("all")
    assert [item.value for item in Loss] == list(LOSS_POLICIES), "the command's choices"
