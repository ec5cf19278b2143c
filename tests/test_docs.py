"""The documents name only what exists, and their examples print what they say.

Fenced blocks may carry a mark behind the language: ``file=NAME`` is written to a folder of the page's own, ``run`` is
run there, and ``output`` is what the block before it prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
from hydra.core.override_parser.overrides_parser import OverridesParser
from pydantic import BaseModel

from rltr_verl.cli.main import app
from rltr_verl.config import RltrSettings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUPS = sorted(path.name for path in (ROOT / "recipes").iterdir() if path.is_dir() and not path.name.startswith("_"))


@dataclass(frozen=True)
class Block:
    """A fenced block: language, mark and text."""

    language: str
    mark: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)[ ]?([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(*parts) for parts in found]


def code(page: Path) -> Iterator[str]:
    """Every line of the fenced and indented blocks, continued lines joined, and every inline code span."""
    for block in blocks(page):
        yield from block.text.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", prose)


def named(pattern: str) -> list[tuple[str, str]]:
    """(page, match) of all matches of the pattern's only group in the pages' code."""
    return [(page.name, match) for page in PAGES for line in code(page) for match in re.findall(pattern, line)]


by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_every_rltr_command_and_option_exists():
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "rltr_verl").rglob("*.py")))
    messages = [("a message", line) for line in re.findall(r"`(rltr [a-z][^`{]*)", sources)]
    names = named(r"(?:^|[\s/$])(rltr [a-z].*)") + messages
    assert names
    for page, line in names:
        words = re.split(r"[|>#;&]", line)[0].split()[1:]
        command = typer.main.get_command(app)
        while words and (below := getattr(command, "commands", None)):
            assert words[0] in below, f"{page}: {line}"
            command = below[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known, f"{page}: {line}"


def test_every_recipe_and_group_value_exists():
    recipes = named(r"--config-name[ =]([\w-]+)")
    assert recipes
    for page, name in recipes:
        assert (ROOT / "recipes" / f"{name}.yaml").is_file(), f"{page}: --config-name {name}"
    for group in GROUPS:
        for page, values in named(rf"(?:^|\s){group}=([\w|]+)"):
            for value in values.split("|"):
                assert (ROOT / "recipes" / group / f"{value}.yaml").is_file(), f"{page}: {group}={value}"


def test_every_key_of_the_node_exists():
    keys = named(r"(?<![\w.{])rltr\.([a-z_.]+)")
    assert keys
    for page, key in keys:
        model: object = RltrSettings
        for part in key.strip(".").split("."):
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                break  # a mapping whose keys belong to a term, a tool or an estimator
            assert part in model.model_fields, f"{page}: rltr.{key}"
            model = model.model_fields[part].annotation


def test_overrides_are_ones_that_hydra_can_read():
    parser = OverridesParser.create()
    for page in PAGES:
        for line in (line for line in code(page) if "--config-name" in line and "main_ppo" in line):
            words = subprocess.run(
                ["bash", "-c", f'args() {{ printf "%s\\n" "$@"; }}; args {line.split("main_ppo", 1)[1]}'],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.splitlines()
            parser.parse_overrides([word for word in words if "=" in word])


def test_every_file_of_the_package_that_is_named_exists():
    paths = named(r"^((?:rltr_verl|tools|reward_fns|recipes|tests|benchmarks|docs)/[\w./]*)$")
    assert paths
    for page, path in paths:
        assert (ROOT / path).exists(), f"{page}: {path}"


def test_every_python_name_of_the_package_that_is_named_exists():
    names = named(r"^(rltr_verl(?:\.\w+)+)(?:\(.*\))?$")
    assert names
    program = f"import pkgutil\nfor _, name in {names!r}: pkgutil.resolve_name(name)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


@by_page
def test_links_resolve(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, target


@by_page
def test_python_blocks_compile(page):
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, f"{page.name}", "exec")


@by_page
def test_marked_blocks_run_and_print_what_the_page_says(page, tmp_path):
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    printed = ""
    for block in blocks(page):
        name, _, value = block.mark.partition("=")
        if name == "file":
            (tmp_path / value).write_text(block.text, encoding="utf-8")
        elif name == "run":
            program = [sys.executable, "-c", block.text] if block.language == "python" else ["bash", "-c", block.text]
            done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=500)
            assert done.returncode == 0, done.stderr
            printed = done.stdout
        elif name == "output":
            assert block.text == printed
