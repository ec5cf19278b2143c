"""A turn that a chat server has parted into thought, text and calls, as the text that the planner would sample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rltr_verl.rollout.template import ChatTemplate


def turn_text(template: ChatTemplate, content: str, reasoning: str | None = None, calls: Sequence[Any] = ()) -> str:
    """The turn as one text, behind what the generation prompt already wrote of it.

    The thought stands in ``<think>`` once, as the content of the tag; it is left out where the generation prompt closes
    the thought itself (a model that is not to think). Calls are written as ``<tool_call>`` blocks behind the text.

    Args:
        template: the planner's.
        content: visible text, which may hold calls as text.
        reasoning: the thought, where the server keeps it apart.
        calls: OpenAI ``tool_calls``.
    """
    text = "\n".join([*filter(None, [content.strip()]), *map(_block, calls)])
    opened = template.prompted_thought
    thinks = "<think>" in opened and "</think>" not in opened
    if "</think>" not in content and (thinks or (reasoning and not opened)):
        text = f"<think>\n{(reasoning or '').strip()}\n</think>\n\n{text}"
    return text.removeprefix(opened.lstrip()) if thinks else text


def _block(call: Any) -> str:
    """One call; arguments that are JSON text stand as the object they are, if they are one."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
    body = {
        "name": function.get("name"),
        "arguments": _arguments(function.get("arguments", function.get("parameters"))),
    }
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _arguments(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
    except ValueError:
        return given
    return found if isinstance(found, dict) else given
