"""Tools: described from their signature, loaded by name or file, settings bound."""

from __future__ import annotations

import textwrap

import pytest

from rltr_verl import tool
from rltr_verl.errors import BadArguments, ConfigError, ToolDefinitionError
from rltr_verl.schemas import argument_problem
from rltr_verl.tool_parameters import check_parameters
from rltr_verl.tooling import check_tools, describe, load_tools, shipped_tools


@tool
def greet(name: str, times: int = 1, *, greeting: str = "hello") -> str:
    """Greet somebody.

    Args:
        name: who is greeted.
        times: how often.
    """
    return " ".join([f"{greeting} {name}"] * times)


def write(tmp_path, body: str):
    path = tmp_path / "mine.py"
    path.write_text("from rltr_verl import tool\n\n" + textwrap.dedent(body), encoding="utf-8")
    return str(path)


def test_schema_comes_from_signature_and_docstring():
    function = describe(greet)["function"]
    assert function["name"] == "greet"
    assert function["description"] == "Greet somebody."
    assert function["parameters"]["required"] == ["name"]
    assert function["parameters"]["properties"] == {
        "name": {"type": "string", "description": "who is greeted."},
        "times": {"type": "integer", "default": 1, "description": "how often."},
    }


def test_keyword_only_parameters_are_settings_not_arguments(tmp_path):
    path = write(
        tmp_path,
        '''
        @tool
        def greet(name: str, *, greeting: str) -> str:
            """Greet somebody."""
            return f"{greeting} {name}"
        ''',
    )
    loaded = load_tools([path], {"greet": {"greeting": "moin"}})["greet"]
    assert list(loaded.parameters["properties"]) == ["name"]
    assert loaded.call(name="Ada") == "moin Ada"


def test_a_missing_setting_is_named_with_the_override_that_adds_it(tmp_path):
    path = write(
        tmp_path,
        '''
        @tool
        def greet(name: str, *, greeting: str) -> str:
            """Greet somebody."""
            return name
        ''',
    )
    with pytest.raises(ConfigError, match=r"rltr\.tool_settings\.greet\.greeting=\.\.\."):
        load_tools([path])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"greet": {"volume": 3}}, "unknown setting 'volume'.*known: greeting"),
        ({"greet": {"greeting": ["x"]}}, "greet.greeting"),
        ({"sing": {"song": 1}}, "settings for 'sing', which is no tool"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, settings, message):
    path = write(
        tmp_path,
        '''
        @tool
        def greet(name: str, *, greeting: str = "hi") -> str:
            """Greet somebody."""
            return name
        ''',
    )
    with pytest.raises(ConfigError, match=message):
        load_tools([path], settings)


def test_unknown_tool_names_the_shipped_ones():
    with pytest.raises(ConfigError, match="unknown tool 'serach'.*calculator.*search"):
        load_tools(["serach"])


def test_missing_file_and_file_without_tool(tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        load_tools([str(tmp_path / "absent.py")])
    with pytest.raises(ConfigError, match="defines no tool"):
        load_tools([write(tmp_path, "x = 1")])


def test_two_tools_of_one_name_clash(tmp_path):
    path = write(
        tmp_path,
        '''
        @tool
        def calculator(x: str) -> str:
            """Mine."""
            return x
        ''',
    )
    with pytest.raises(ConfigError, match="two tools are called 'calculator'"):
        load_tools(["calculator", path])


def test_definition_errors_name_file_and_line():
    def silent(x: str) -> str:
        return x

    def untyped(x) -> str:
        """Do."""
        return x

    def open_ended(*names: str) -> str:
        """Do."""
        return ""

    for function, message in ((silent, "no docstring"), (untyped, "no type for 'x'"), (open_ended, r"takes \*names")):
        with pytest.raises(ToolDefinitionError, match=message) as caught:
            tool(function)
        assert f"test_tooling.py:{function.__code__.co_firstlineno}" in str(caught.value)


def test_every_shipped_tool_describes_itself():
    names = shipped_tools()
    assert {"search", "calculator", "days_between"} <= set(names)


def test_order_of_the_recipe_is_kept():
    assert list(load_tools(["days_between", "calculator"])) == ["days_between", "calculator"]


CHECKED = '''
    def there(path: str) -> None:
        open(path).close()

    @tool(check=there)
    def read(line: int, *, path: str = "/no/such/file", upper: bool = False) -> str:
        """Read a line."""
        return open(path).read().splitlines()[line]
    '''


def test_a_tools_check_gets_its_settings_and_their_defaults(tmp_path):
    (tmp_path / "text").write_text("moin")
    path = write(tmp_path, CHECKED)
    good = load_tools([path], {"read": {"path": str(tmp_path / "text"), "upper": True}})
    check_tools(good)
    assert good["read"].call(line=0) == "moin"
    with pytest.raises(
        ConfigError, match=r"rltr.tool_settings.read: the tool's check failed \(FileNotFoundError.*/no/such/"
    ):
        check_tools(load_tools([path]))


def test_a_check_of_something_that_is_no_setting_is_refused():
    with pytest.raises(ToolDefinitionError, match="'greet' has a check of 'greting', which is no setting"):

        @tool(check=lambda greting: None)
        def greet(name: str, *, greeting: str) -> str:
            """Greet somebody."""
            return name


PROVIDER = '''
    from rltr_verl.tooling import Tool, describe

    def provide_tools(*, count: int = 1):
        def echo(text: str) -> str:
            """Echo."""
            return text
        schema = describe(echo)["function"]
        named = [{"type": "function", "function": {**schema, "name": f"echo{n}"}} for n in range(count)]
        return [Tool(item["function"]["name"], item, echo) for item in named]
    '''


def test_a_module_may_provide_tools_that_its_settings_decide(tmp_path):
    path = write(tmp_path, PROVIDER)
    assert list(load_tools([path])) == ["echo0"]
    assert list(load_tools([path], {"mine": {"count": 3}})) == ["echo0", "echo1", "echo2"]
    with pytest.raises(ConfigError, match="rltr.tool_settings.mine: unknown setting 'cont'.*did you mean 'count'"):
        load_tools([path], {"mine": {"cont": 3}})


def test_a_clash_names_both_places(tmp_path):
    (tmp_path / "a").mkdir()
    body = '@tool\ndef mine(x: str) -> str:\n    """Mine."""\n    return x\n'
    first, second = write(tmp_path, body), write(tmp_path / "a", body)
    with pytest.raises(ConfigError, match=r"'mine' \(.*/mine.py:3 and .*/a/mine.py:3\)"):
        load_tools([first, second])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("x = 1\nimport no_such_module_here\n", r"mine\.py:4: the file cannot be imported \(ModuleNotFoundError"),
        ("def f(:\n", r"mine\.py:3: the file cannot be imported \(SyntaxError"),
        ("1 / 0\n", r"mine\.py:3: the file cannot be imported \(ZeroDivisionError"),
        ('@tool\ndef f(x: "Missing") -> str:\n    """F."""\n', r"mine\.py:3: .*type that cannot be read"),
        ("import sys\nsys.exit(3)\n", r"mine\.py:4: the file cannot be imported \(SystemExit"),
        (
            '@tool\ndef f() -> str:\n    "F."\n\n@tool\ndef f() -> str:\n    "G."\n',
            r"mine\.py:7: .*'f' is defined twice.*:3",
        ),
        ('@tool\ndef f() -> str:\n    "F."\n    yield "a"\n', r"mine\.py:3: .*'f' yields"),
        ('@tool\ndef f(x: float = float("nan")) -> str:\n    "F."\n', r"mine\.py:3: .*'f' has a type or default"),
        ('@tool\ndef f(x: object()) -> str:\n    """F."""\n', r"mine\.py:3: .*'f' has a type"),
        ('@tool\ndef f(x: int = object()) -> str:\n    """F."""\n', r"mine\.py:3: .*default of 'x' without JSON form"),
        ('@tool\ndef f(x: str, /) -> str:\n    """F."""\n', r"mine\.py:3: .*'x' by position only"),
        ('@tool\ndef f(x) -> str:\n    """F."""\n', r"mine\.py:3: .*no type for 'x'"),
        ("@tool\ndef f(x: int) -> str:\n    return ''\n", r"mine\.py:3: .*no docstring"),
    ],
)
def test_a_file_that_defines_no_tool_properly_is_one_error_with_its_line(tmp_path, body, problem):
    with pytest.raises((ConfigError, ToolDefinitionError), match=problem):
        load_tools([write(tmp_path, body)])


def test_nested_types_keep_their_definitions_at_the_root(tmp_path):
    body = """
        from pydantic import BaseModel

        class Point(BaseModel):
            x: int

        @tool
        def path(points: list[Point]) -> str:
            '''Go.'''
            return str(len(points))
        """
    parameters = load_tools([write(tmp_path, body)])["path"].parameters
    assert argument_problem(parameters, {"points": [{"x": 1}]}) is None
    assert "'x' is a required property" in (argument_problem(parameters, {"points": [{}]}) or "")


def test_arguments_reach_the_function_as_its_types(tmp_path):
    body = """
        import datetime, enum
        from dataclasses import dataclass
        from pydantic import BaseModel

        class Kind(enum.Enum):
            UP = "up"

        @dataclass
        class Range:
            low: int

        class Point(BaseModel):
            x: int

        @tool
        def show(day: datetime.date, kind: Kind, span: Range, path: list[Point], pair: tuple[int, str] = (1, "a"),
                 plain: dict[str, list[int]] | None = None) -> str:
            "Show."
            return f"{day:%d.%m.} {kind.name} {span.low} {path[0].x} {type(pair).__name__} {plain}"
        """
    show = load_tools([write(tmp_path, body)])["show"]
    good = {"day": "2031-05-17", "kind": "up", "span": {"low": 1}, "path": [{"x": 2}], "pair": [1, "b"]}
    assert show.call(**good, plain={"a": [1.0]}) == "17.05. UP 1 2 tuple {'a': [1.0]}"
    with pytest.raises(BadArguments, match="'day': input should be a valid date"):
        show.call(**{**good, "day": "soon"})


def test_files_whose_paths_look_alike_are_told_apart(tmp_path):
    files = [tmp_path / path for path in ("a/b_c.py", "a_b/c.py", "a/b/c.py")]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"from rltr_verl import tool\n\n@tool\ndef f{number}() -> str:\n    'F.'\n")
    assert list(load_tools([str(file) for file in files])) == ["f0", "f1", "f2"]


def test_a_tool_with_two_names_in_its_file_is_one(tmp_path):
    assert list(load_tools([write(tmp_path, "@tool\ndef f() -> str:\n    'F.'\n\ng = f\n")])) == ["f"]


def test_a_module_that_cannot_be_imported_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "redpack").mkdir()
    for name, body in (("gone", "\nimport no_such_module_here\n"), ("syntax", "\ndef f(:\n"), ("ends", "\nexit(3)\n")):
        (tmp_path / "redpack" / f"{name}.py").write_text(body)
        with pytest.raises(ConfigError, match=rf"{name}\.py:2: 'redpack.{name}' cannot be imported"):
            load_tools([f"redpack.{name}"])
    for name in ("redpack.none", ".", "../x"):
        with pytest.raises(ConfigError, match="unknown tool"):
            load_tools([name])


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("[1]", "gave a int, no Tool"),
        ("None", "failed .TypeError"),
        ("1 / 0", "failed .ZeroDivisionError"),
        ("[Tool('g', {}, print)]", "'g' has no schema of its own"),
        ("[Tool('g', made('h', {'type': 'object'}), print)]", "'g' has no schema of its own"),
        ("[Tool('g', made('g', {'type': 'obj'}), print)]", "'g' has a broken schema"),
        (
            "[Tool('g', made('g', {'properties': {'a': {'$ref': '#/$defs/A'}}}), print)]",
            "'g' has a schema that refers to",
        ),
    ],
)
def test_what_a_module_provides_wrongly_is_told_at_start(tmp_path, returned, problem):
    body = f"""
        from rltr_verl.tooling import Tool

        def made(name, parameters):
            return {{"type": "function", "function": {{"name": name, "description": "G.", "parameters": parameters}}}}

        def provide_tools():
            return {returned}
        """
    with pytest.raises(ConfigError, match=problem):
        load_tools([write(tmp_path, body)])


def test_pure_reaches_the_tool(tmp_path):
    body = '@tool(pure=True)\ndef f(x: str) -> str:\n    """F."""\n    return x\n'
    assert load_tools([write(tmp_path, body)])["f"].pure


@pytest.mark.parametrize(
    ("pattern", "warned"),
    [
        ("^(a+)+$", True),
        (r"(\w+\s*)*$", True),
        ("(?:[a-z]{1,})*", True),
        (r"^\d{4}-\d{2}$", False),
        (r"(\d+,)*\d+", False),
    ],
)
def test_a_pattern_that_may_take_exponential_time_is_warned_about(pattern, warned, caplog):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": pattern}}}}
    check_parameters(schema, "tool 'x'")
    assert [("tool 'x'" in item.getMessage(), "hold up all" in item.getMessage()) for item in caplog.records] == [
        (True, True)
    ] * warned
