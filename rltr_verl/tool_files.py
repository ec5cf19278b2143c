"""Modules that hold tools: the shipped ones, importable ones, and a user's own files."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from rltr_verl.errors import ConfigError, RltrError

_SHIPPED = "rltr_verl.tools"


def shipped_tools() -> list[str]:
    """Names of the tools that come with the package: one file each in ``tools/``."""
    package = importlib.import_module(_SHIPPED)
    files = (path for folder in package.__path__ for path in Path(folder).glob("*.py"))
    return sorted(path.stem for path in files if not path.stem.startswith("_"))


def module_of(source: str) -> ModuleType:
    """The module that a recipe names: a path ending in .py, an importable module, or the name of a shipped tool.

    Raises ConfigError where there is none, or where it cannot be imported.
    """
    if source.endswith(".py"):
        return load_file(source, "rltr.tools")
    name = source if "." in source else f"{_SHIPPED}.{source}"
    fix = f"use one of {', '.join(shipped_tools())}, a path ending in .py, or an importable module."
    unknown = ConfigError(f"unknown tool '{source}'", where="rltr.tools", fix=fix)
    if not all(name.split(".")):
        raise unknown
    try:
        return importlib.import_module(name)
    except RltrError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything; it is told, never swallowed
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise unknown from None
        problem = f"'{source}' cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(
            problem, where=_line_of(error), fix=f"correct it; python -c 'import {name}' shows it."
        ) from error


def load_file(path: str, where: str) -> ModuleType:
    """Import a user's file as a module of its own; the same file is imported once per process.

    Raises ConfigError when there is no such file or it cannot be imported, naming its line.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"no file '{path}'", where=where, fix=f"check the path; it was looked up as {file}.")
    # the digest tells a/b_c.py from a/b/c.py
    name = f"rltr_user_{re.sub(r'[^0-9A-Za-z]', '_', file.stem)}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"'{path}' is no Python file", where=where, fix="give a file ending in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, RltrError) or not isinstance(error, Exception | SystemExit):
                raise
            problem = f"the file cannot be imported ({type(error).__name__}: {error})"
            raise ConfigError(problem, where=_line_of(error, file), fix="correct it; python FILE shows it.") from error
    return sys.modules[name]


def _line_of(error: BaseException, file: Path | None = None) -> str:
    """``file:line`` where importing ``file`` failed; without one, of the last line of a file that is no importer."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [item for item in traceback.extract_tb(error.__traceback__) if not _imports(item.filename)]
    lines = [f"{item.filename}:{item.lineno}" for item in frames if file is None or item.filename == str(file)]
    return lines[-1] if lines else str(file or "rltr.tools")


def _imports(filename: str) -> bool:
    return filename.startswith("<frozen ") or filename in (__file__, importlib.__file__)
