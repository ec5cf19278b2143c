from __future__ import annotations

from typing import Any

import pytest

from rltr_verl.errors import ConfigError
from rltr_verl.rollout.stopping import StopMatcher


def _stops_at(tokenizer: Any, text: str, stop: tuple[str, ...]) -> list[int] | None:
    """Feed the tokens of ``text`` one by one as the engine does; the tokens up to the stop, None without one."""
    matcher = StopMatcher(tokenizer)
    candidates, output = matcher.candidates(stop), []
    for token in tokenizer.encode(text, add_special_tokens=False):
        output.append(token)
        if token in candidates and matcher.completed(output, stop):
            return output
    return None


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("call calc <answer> 48", ("<answer>",)),
        ("call <tool_call> then", ("<answer>", "</x>", "call> t")),
        ("巴黎的人口是多少？再", ("人口",)),
        ("aab", ("ab",)),
        ("zzzzz", ("z",)),
        ("one\n\ntwo", ("\n\n",)),
        ("a <|im_end|>", ("<|im_end|>",)),
    ],
)
def test_stops_with_the_token_that_completes_the_string(tokenizer: Any, text: str, stop: tuple[str, ...]) -> None:
    output = _stops_at(tokenizer, text, stop)
    assert output is not None
    assert any(string in tokenizer.decode(output) for string in stop)
    assert not any(string in tokenizer.decode(output[:-1]) for string in stop)


def test_goes_on_without_the_string(tokenizer: Any) -> None:
    assert _stops_at(tokenizer, "no marker < answer > <answer", ("<answer>",)) is None


def test_most_tokens_cannot_complete_the_planners_marker(tokenizer: Any) -> None:
    candidates = StopMatcher(tokenizer).candidates(("<answer>",))
    whole = [token for token in candidates if "�" not in tokenizer.decode([token])]
    assert all(">" in tokenizer.decode([token]) for token in whole)
    assert 0 < len(whole) <= 5


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        StopMatcher(None).candidates(("x",))


def test_no_stop_strings_need_no_tokenizer() -> None:
    assert StopMatcher(None).candidates(()) == frozenset()
