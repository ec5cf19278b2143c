"""What is trained is what is rolled out: ids and masks of stored conversations against rollouts of the same turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rltr_verl.coldstart.conversations import planner_row
from rltr_verl.coldstart.loss import LOSS_POLICIES
from rltr_verl.rollout.sft_rows import RowBuilder, SftRow, covered, located
from rltr_verl.rollout.sft_turns import FIXES, RowRefused
from rltr_verl.rollout.turns import Rollout
from tests.coldstart.export_kit import call, played, sample
from tests.fakes.families import FAMILIES, TOOLS, template_of, tokenizer_of
from tests.rollout.test_masks import observed

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
families = pytest.mark.parametrize("family", FAMILIES)
policies = pytest.mark.parametrize("policy", LOSS_POLICIES)
WITH_TAGS = [name for name, family in FAMILIES.items() if "<tool_call>" in family.markup]
"""Families in which a call's tags are tokens of their own, so that no id straddles them."""

prose = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>|[]｜＜"), min_size=1, max_size=30)
nasty_query = st.one_of(prose, st.sampled_from(["</tool_call>", '"}}', "<answer>", "</think>", "\n", "巴黎"]))


@dataclass(frozen=True)
class Parts:
    """A turn's parts, from which the test itself knows what each policy trains."""

    thought: str
    prose: str
    calls: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.thought + self.prose + self.actions

    @property
    def actions(self) -> str:
        return "\n".join(self.calls) if self.calls else "<answer>"


def drawn_turns(thinks: bool) -> st.SearchStrategy[list[Parts]]:
    thought = prose.map(lambda text: f"<think>\n{text}\n</think>\n\n") if thinks else st.just("")
    said = st.one_of(st.just(""), prose.map(lambda text: f"{text.strip()}:\n"))
    calls = st.lists(nasty_query.map(call), min_size=1, max_size=3).map(tuple)
    results = st.lists(observed, min_size=1, max_size=3).map(tuple)
    acting = st.lists(st.builds(Parts, thought, said, calls, results), max_size=3)
    last = st.builds(Parts, thought, said, st.just(()), st.just(()))
    return st.builds(lambda turns, end: [*turns, end], acting, last)


def made(family: str, policy: str, turns: Sequence[Parts]) -> tuple[Rollout, SftRow, RowBuilder]:
    """The rollout, and the row of what it recorded, proven."""
    rollout, trajectory = played(family, [(turn.text, turn.results) for turn in turns])
    assume([turn.text for turn in trajectory.turns[:-1]] == [turn.text + end(family) for turn in turns[:-1]])
    builder = RowBuilder(tokenizer_of(family), template_of(family), policy)
    stored = planner_row(sample(trajectory), builder.style)
    row = builder.build(stored.messages, TOOLS)
    builder.check(row, stored.recorded, TOOLS)
    return rollout, row, builder


def end(family: str) -> str:
    return template_of(family).glue.turn_end


def trained_texts(row: SftRow, builder: RowBuilder) -> list[str]:
    """What is trained of each turn."""
    decode = builder.template.decode
    texts = []
    for span in row.turns:
        ids, mask = row.ids[span.start : span.end], row.mask[span.start : span.end]
        texts.append(decode([item for item, trained in zip(ids, mask, strict=True) if trained]))
    return texts


@families
@policies
@few
@given(data=st.data())
def test_ids_and_context_are_the_rollouts(family, policy, data):
    turns = data.draw(drawn_turns(thinks=family != "qwen3-no-think"))
    rollout, row, _ = made(family, policy, turns)
    assert (row.prompt_ids, row.ids, row.sampled) == (rollout.prompt_ids, rollout.ids, rollout.mask)
    assert all(own >= trained for own, trained in zip(row.sampled, row.mask, strict=True))
    assert row.loss_mask == [0] * len(row.prompt_ids) + row.mask


@pytest.mark.parametrize("family", WITH_TAGS)
@few
@given(data=st.data())
def test_each_policy_trains_its_parts_and_nothing_else(family, data):
    turns = data.draw(drawn_turns(thinks=family != "qwen3-no-think"))
    closing = [end(family)] * (len(turns) - 1) + [""]
    wanted = {
        "all_assistant": [turn.text for turn in turns],
        "action_only": [turn.actions for turn in turns],
        "action+final_think": [turn.actions for turn in turns[:-1]] + [kept_of_last(turns[-1])],
    }
    for policy, parts in wanted.items():
        _, row, builder = made(family, policy, turns)
        texts = [text + ending for text, ending in zip(parts, closing, strict=True)]
        assert trained_texts(row, builder) in (texts, [text.replace("\x00", "") for text in texts])


def kept_of_last(turn: Parts) -> str:
    """The thought and the marker; white space between them goes with them, prose does not."""
    thought = turn.thought if not turn.prose else turn.thought.rstrip("\n")
    return thought + turn.actions


@families
@policies
def test_the_end_of_a_turn_and_the_stop_marker_are_trained_and_nothing_behind_the_marker(family, policy):
    turns = [Parts("", "", (call(),), ("41",)), Parts("", "", (), ())]
    _, row, builder = made(family, policy, turns)
    first, last = row.turns
    assert row.mask[first.end - 1] == 1 and builder.template.ends_turn(row.ids[first.start : first.end])
    assert last.end == len(row.ids)
    assert builder.template.decode(row.ids[last.start :]) == "<answer>" and all(row.mask[last.start :])


# what is caught


def thinking(family: str) -> list[Parts]:
    thoughts = ["<think>\nWhere?\n</think>\n\n", "<think>\nDone.\n</think>\n\n"]
    first, last = thoughts if family != "qwen3-no-think" else ("", "")
    return [Parts(first, "So:\n", (call(), call("b")), ("41 degrees", "two")), Parts(last, "", (), ())]


@families
@policies
@few
@given(data=st.data())
def test_every_wrong_mask_is_caught(family, policy, data):
    _, row, builder = made(family, policy, thinking(family))
    at = data.draw(st.integers(0, len(row.mask) - 1))
    flipped = [value ^ (place == at) for place, value in enumerate(row.mask)]
    shifted, inverted = [0, *row.mask[:-1]], [1 - value for value in row.mask]
    for mask in (flipped, shifted, inverted, row.mask[:-1], [1] * len(row.mask), [0] * len(row.mask)):
        if mask != row.mask:
            with pytest.raises(RowRefused) as caught:
                builder.check(row, row.conversation, TOOLS, mask)
            assert caught.value.kind == "mask"


@families
@few
@given(data=st.data())
def test_every_other_text_is_caught(family, data):
    _, row, builder = made(family, "all_assistant", thinking(family))
    turns = list(row.conversation.turns)
    number = data.draw(st.integers(0, len(turns) - 1))
    changed = data.draw(st.sampled_from(["text", "dropped", "observation"]))
    if changed == "text":
        turns[number] = replace(turns[number], text=turns[number].text + "x")
    elif changed == "observation":
        turns[0] = replace(turns[0], observations=(*turns[0].observations[:-1], "42 degrees"))
    else:
        del turns[number]
    with pytest.raises(RowRefused):
        builder.check(row, replace(row.conversation, turns=tuple(turns)), TOOLS)


@families
@few
@given(data=st.data())
def test_every_other_id_is_caught(family, data):
    _, row, builder = made(family, "action_only", thinking(family))
    at = data.draw(st.integers(0, len(row.ids) - 1))
    other = data.draw(st.integers(0, len(tokenizer_of(family)) - 1))
    assume(other != row.ids[at])
    ids = [*row.ids[:at], other, *row.ids[at + 1 :]]
    assume(builder.template.decode(ids) != builder.template.decode(row.ids))
    with pytest.raises(RowRefused):
        builder.check(replace(row, ids=ids), row.conversation, TOOLS)


@families
def test_another_prompt_is_caught(family):
    _, row, builder = made(family, "all_assistant", thinking(family))
    with pytest.raises(RowRefused) as caught:
        builder.check(replace(row, prompt_ids=row.prompt_ids[:-1]), row.conversation, TOOLS)
    assert caught.value.kind == "prompt"


# what is refused


def build(messages: list[dict], *, policy: str = "all_assistant", max_length: int = 0, family: str = "qwen3") -> SftRow:
    return RowBuilder(tokenizer_of(family), template_of(family), policy).build(messages, TOOLS, max_length)


USER, DONE = {"role": "user", "content": "q"}, {"role": "assistant", "content": "<answer>"}


@pytest.mark.parametrize(
    ("messages", "kind", "named"),
    [
        ([USER], "roles", "no assistant turn"),
        ([USER, DONE, {"role": "tool", "content": "x"}], "roles", "does not end with an assistant"),
        ([USER, DONE, DONE], "roles", "two assistant messages follow each other"),
        ([USER, DONE, USER, DONE], "roles", "a message of role 'user' follows"),
        ([{"content": "x"}, DONE], "form", "no role"),
    ],
)
def test_a_conversation_that_is_none_of_a_planner_is_refused(messages, kind, named):
    with pytest.raises(RowRefused, match=named) as caught:
        build(messages)
    assert caught.value.kind == kind in FIXES


def test_a_row_that_would_lose_its_end_is_refused_and_one_that_just_fits_is_not():
    length = len(build([USER, DONE]).input_ids)
    assert build([USER, DONE], max_length=length).input_ids
    with pytest.raises(RowRefused, match=rf"{length} tokens, {length - 1} allowed") as caught:
        build([USER, DONE], max_length=length - 1)
    assert caught.value.kind == "too_long"


def test_a_text_that_the_tokenizer_writes_otherwise_is_refused():
    messages = [USER, {"role": "assistant", "content": "e\u0301 <answer>"}]
    builder = RowBuilder(tokenizer_of("qwen3"), template_of("qwen3"), "all_assistant")
    row = builder.build(messages, TOOLS)
    with pytest.raises(RowRefused, match="the policy wrote") as caught:
        builder.check(row, row.conversation, TOOLS)
    assert caught.value.kind == "text"


def test_a_turn_that_holds_an_end_of_turn_before_its_end_is_refused():
    messages = [USER, {"role": "assistant", "content": "a<|im_end|>\n<|im_start|>user\nb <answer>"}]
    builder = RowBuilder(tokenizer_of("qwen3"), template_of("qwen3"), "all_assistant")
    row = builder.build(messages, TOOLS)
    with pytest.raises(RowRefused) as caught:
        builder.check(row, row.conversation, TOOLS)
    assert caught.value.kind == "control"


# ids and stretches


def test_an_id_is_trained_only_if_all_of_its_characters_are():
    assert covered([(0, 2), (2, 4), (4, 5), (5, 5)], [(0, 3), (4, 5)], 5) == [1, 0, 1, 0]


def test_places_without_a_fast_tokenizer_are_those_of_a_fast_one():
    class Slow:
        is_fast = False

    text = "So 巴黎: 41 <tool_call>"
    fast = located(tokenizer_of("qwen3"), template_of("qwen3"), text)
    ids, places = located(Slow(), template_of("qwen3"), text)
    assert ids == fast[0] and places[-1][1] == len(text)
    stretch = [(text.index("<"), len(text))]
    assert covered(places, stretch, len(text)) == covered(fast[1], stretch, len(text))
