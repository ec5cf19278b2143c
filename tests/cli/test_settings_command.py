"""`rltr settings` and the page made from it."""

from pathlib import Path

from typer.testing import CliRunner

from rltr_verl.cli.main import app
from rltr_verl.config import RltrSettings, ToolLimits

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def printed() -> str:
    result = CliRunner().invoke(app, ["settings"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_page_in_docs_is_the_output():
    assert PAGE.read_text(encoding="utf-8") == printed(), "run: rltr settings > docs/settings.md"


def keys_of(model) -> set[str]:
    """Keys of a node and of the nodes below it."""
    keys: set[str] = set()
    for key, field in model.model_fields.items():
        below = getattr(field.annotation, "model_fields", None)
        keys |= keys_of(field.annotation) if below else {key}
    return keys


def test_every_key_has_a_row_with_its_default_and_meaning():
    rows = {line.split(" | ")[0].strip("| `"): line for line in printed().splitlines() if line.startswith("| `")}
    assert keys_of(RltrSettings) | keys_of(ToolLimits) <= set(rows)
    assert rows["max_turns"].startswith("| `max_turns` | int, ≥ 1 | `10` | Assistant turns")
    assert rows["credit"].split(" | ")[1:3] == ["`all` or `fraction`", '`"all"`']
    assert rows["floor"].split(" | ")[1:3] == ["float or null", "`-1.0`"]
