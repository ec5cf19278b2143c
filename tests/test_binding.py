"""Settings bound to parameters by name and type."""

from typing import Annotated

import pytest
from pydantic import Field

from rltr_verl._binding import bind_settings
from rltr_verl.errors import ConfigError


def function(needed: str, lambda_: Annotated[float, Field(ge=0)] = 0.1, *, many: int = 1, **rest: object) -> None: ...


def test_a_keyword_of_python_is_the_parameter_with_an_underscore():
    bound = bind_settings(function, {"needed": "x", "lambda": 1, "many": "3"}, "at")
    assert bound == {"needed": "x", "lambda_": 1.0, "many": 3}


def test_given_values_are_passed_where_asked_for_and_cannot_be_set():
    assert bind_settings(function, {}, "at", {"needed": "x", "other": 1}) == {"needed": "x"}
    with pytest.raises(ConfigError, match="at: unknown setting 'needed'"):
        bind_settings(function, {"needed": "y"}, "at", {"needed": "x"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "at: setting 'needed' is missing. Fix: add at.needed="),
        ({"needed": "x", "mny": 1}, "unknown setting 'mny'. Fix: did you mean 'many'?"),
        ({"needed": "x", "lambda_": 1}, "did you mean 'lambda'?"),
        ({"needed": "x", "rest": 1}, "unknown setting 'rest'"),
        ({"needed": "x", "many": "few"}, r"at.many: .*'few'"),
        ({"needed": "x", "lambda": -1}, r"at.lambda: .*-1"),
    ],
)
def test_wrong_settings_name_key_and_fix(settings, message):
    with pytest.raises(ConfigError, match=message):
        bind_settings(function, settings, "at")
