"""``rltr settings``: every key of the recipe node ``rltr:`` as a Markdown page, read from :mod:`rltr_verl.config`."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rltr_verl.config import EstimatorNeeds, RltrSettings, ToolLimits

_INTRO = """\
# Settings of the node `rltr:`

This page is the output of `rltr settings`; a test keeps the two equal. It lists what `rltr_verl/config.py` accepts.
Every other key of a recipe is verl's own.

- On the command line of `main_ppo` a key is set by its full name: `rltr.rollout.max_turns=6`. A key that the recipe
  does not hold yet needs a `+` in front: `+rltr.reward.terms.repeat.cap=0.3`.
- With `rltr score` the same names follow `--set`, with or without the leading `rltr.`.
- An unknown key is refused. After `--set`, and on the command line with a `+`, the message is ours and names the
  nearest known key. On the command line without a `+`, Hydra answers first, in words of its own (`Could not override
  'rltr.judge.credt'`), and advises a `+`; follow it, and the nearest key is named. Nothing is trained either way.
- The defaults below hold where a recipe leaves a key out. `recipes/rltr_node.yaml` sets `tools` and `estimator`; the
  groups `scale=` and `judge=` set others.
- `[paper]` marks a value that the RLTR paper gives (arXiv 2508.19598), `[ours]` one that it leaves open. A key without
  a mark is not a matter of the method.

The keys under `rltr.reward.terms.<name>` and `rltr.tool_settings.<name>` belong to the term or tool of that name:
see [rewards.md](rewards.md) and [tools.md](tools.md).
"""

_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "min_length": "not empty"}


def settings() -> None:
    """Print every key of the node rltr (type, default, meaning) as the Markdown page docs/settings.md."""
    typer.echo(settings_page(), nl=False)


def settings_page() -> str:
    """The page: one section with one table per node, in the order of the classes' fields."""
    sections = [_section(name, model) for name, model in _nodes("rltr", RltrSettings)]
    sections.append(_section("rltr.rollout.tool_limits.<tool>", ToolLimits))
    return "\n".join([_INTRO, *sections, _section("rltr.estimator.<adv_estimator>", EstimatorNeeds)])


def _nodes(name: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The node itself, then the nodes below it."""
    yield name, model
    for key, field in model.model_fields.items():
        if _is_node(field.annotation):
            yield from _nodes(f"{name}.{key}", typing.cast("type[BaseModel]", field.annotation))


def _section(name: str, model: type[BaseModel]) -> str:
    fields = {key: field for key, field in model.model_fields.items() if not _is_node(field.annotation)}
    rows = [f"| {_code(key)} | {_type(field)} | {_default(field)} | {_cell(field)} |" for key, field in fields.items()]
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## `{name}`", "", _text(inspect.getdoc(model)), "", *head, *rows, ""])


def _is_node(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)


def _type(field: FieldInfo) -> str:
    """The type in words, with its bounds."""
    limits = [(key, getattr(item, key)) for item in field.metadata for key in _BOUNDS if hasattr(item, key)]
    bounds = [_BOUNDS[key].format(value) for key, value in limits]
    return ", ".join([_type_name(field.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(_code(value) for value in arguments)
    if type(None) in arguments:
        return " or ".join("null" if item is type(None) else _type_name(item) for item in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    return "text" if annotation is str else str(annotation.__name__)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none: must be given"
    return _code(json.dumps(field.get_default(call_default_factory=True)))


def _cell(field: FieldInfo) -> str:
    return _text(field.description).replace("|", "\\|")


def _text(text: str | None) -> str:
    """Text of the code as Markdown: no tag that would be read as HTML, single backticks."""
    return (text or "").replace("``", "`").replace("<", "\\<")


def _code(text: Any) -> str:
    return f"`{text}`"
