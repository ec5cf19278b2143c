"""The list of replaced verl symbols is true of the installed verl, and a symbol that moved is named."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import verl  # noqa: F401 - loads the plugin, which puts the replacements in

from rltr_verl.errors import PluginError
from rltr_verl.replacements import REPLACEMENTS, Replacement, apply


def name_of(replacement: Replacement) -> str:
    return f"{replacement.module}.{replacement.attribute}"


@pytest.mark.parametrize("replacement", [item for item in REPLACEMENTS if item.where == "everywhere"], ids=name_of)
def test_in_place(replacement):
    module = importlib.import_module(replacement.module)
    assert getattr(module, replacement.attribute) is replacement.function


def test_in_place_beside_an_accelerator_too():
    code = (
        "import verl\n"
        "from verl.trainer.ppo.v1 import trainer_base\n"
        "import verl.utils.distributed as distributed\n"
        "print(trainer_base.process_validation_metrics.__module__)\n"
        "print(distributed.initialize_global_process_group_ray.__module__)"
    )
    environment = {**os.environ, "VERL_PLATFORM": "nvidia", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=500)
    assert done.stdout.split()[-2:] == ["rltr_verl.rollout.validation", "verl.utils.distributed"], done.stderr


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=name_of)
def test_every_one_has_a_reason(replacement):
    assert len(replacement.reason) > 20 and replacement.where in ("everywhere", "cpu")


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=name_of)
def test_a_symbol_that_is_gone_is_named(replacement):
    with pytest.raises(PluginError, match=name_of(replacement)):
        apply(replacement, ModuleType("empty"))


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=name_of)
def test_changed_parameters_are_named(replacement):
    module = ModuleType("changed")
    setattr(module, replacement.attribute, lambda something_else: None)
    with pytest.raises(PluginError, match=f"{name_of(replacement)}.*something_else"):
        apply(replacement, module)
    assert getattr(module, replacement.attribute) is not replacement.function


def test_a_moved_symbol_stops_the_import_that_needs_it(tmp_path, monkeypatch):
    import wrapt

    (tmp_path / "module_of_a_new_verl.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    moved = replace(REPLACEMENTS[0], module="module_of_a_new_verl")
    wrapt.register_post_import_hook(lambda module: apply(moved, module), moved.module)
    with pytest.raises(PluginError, match=f"module_of_a_new_verl.{moved.attribute}"):
        importlib.import_module("module_of_a_new_verl")
