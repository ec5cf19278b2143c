"""The one coercion: exactly JSON text of a number or boolean, and a number for a text; nothing else."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel

from rltr_verl.tool_arguments import coerced
from rltr_verl.tool_schema import describe


class Place(BaseModel):
    """A place."""

    name: str


def tool(
    whole: int = 1,
    number: float = 1.0,
    flag: bool = False,
    text: str = "",
    kind: Literal["1", "2"] = "1",
    maybe: int | None = None,
    many: list[int] = [],  # noqa: B006 - only the schema is read
    place: Place | None = None,
) -> str:
    """Take all kinds."""
    return ""


PARAMETERS = describe(tool)["function"]["parameters"]


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("whole", "30", 30),
        ("whole", "-7", -7),
        ("whole", 30.0, 30),
        ("whole", "30.0", 30),
        ("number", "2.5", 2.5),
        ("number", "1e3", 1000.0),
        ("flag", "true", True),
        ("flag", "false", False),
        ("text", 2662, "2662"),
        ("text", 2.5, "2.5"),
        ("kind", 2, "2"),
        ("maybe", "5", 5),
    ],
)
def test_what_is_coerced(name, given, taken):
    value = coerced(PARAMETERS, {name: given})[name]
    assert value == taken and type(value) is type(taken)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("whole", " 30"),
        ("whole", "30 "),
        ("whole", "030"),
        ("whole", "+30"),
        ("whole", "0x1e"),
        ("whole", "2.5"),
        ("whole", "thirty"),
        ("whole", "true"),
        ("whole", True),
        ("whole", ""),
        ("number", "NaN"),
        ("number", "Infinity"),
        ("number", "1e999"),
        ("flag", "yes"),
        ("flag", "True"),
        ("flag", 1),
        ("flag", "1"),
        ("text", True),
        ("text", None),
        ("text", float("inf")),
        ("text", ["a"]),
        ("kind", 3),
        ("many", "[1]"),
        ("many", ["1"]),
        ("place", '{"name": "Rome"}'),
        ("place", {"name": 5}),
        ("unknown", "30"),
        ("maybe", "null"),
    ],
)
def test_what_stays_as_it_is(name, given):
    value = coerced(PARAMETERS, {name: given})[name]
    assert value is given


def test_a_value_that_fits_is_never_changed():
    fitting = {"whole": 1, "number": 3, "flag": True, "text": "30", "kind": "1", "place": {"name": "30"}}
    assert coerced(PARAMETERS, fitting) == fitting


@pytest.mark.parametrize("reference", ["#/definitions/Count", "#/$defs/Count", "#/properties/other", "#count"])
def test_references_lead_from_the_root_of_the_schema(reference):
    """As servers write them: draft 7's definitions, and other properties in place of a second definition."""
    whole = {"type": "integer"}
    schema = {
        "type": "object",
        "properties": {"n": {"$ref": reference}, "other": whole},
        "definitions": {"Count": whole},
        "$defs": {"Count": {"$anchor": "count", **whole}},
    }
    assert coerced(schema, {"n": "30"}) == {"n": 30}
