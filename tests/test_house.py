"""The house's walls: who may import what, and that the light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERL = ("rltr_verl/reward_manager.py",)
VERL_FOLDERS = ("rltr_verl/rollout/", "rltr_verl/cpu/")
TORCH_FOLDERS = ("rltr_verl/rollout/", "rltr_verl/cpu/", "rltr_verl/world/")


def sources() -> list[str]:
    folders = (ROOT / name for name in ("rltr_verl", "tools", "reward_fns"))
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.py"))


def imported(path: str) -> set[str]:
    """Top-level names of all modules that a file imports, at its top or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", sources())
def test_verl_and_torch_are_imported_only_where_the_design_says(path):
    names = imported(path)
    if not path.startswith(VERL_FOLDERS) and path not in VERL:
        assert "verl" not in names
    if not path.startswith(TORCH_FOLDERS):
        assert "torch" not in names


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_need_neither_torch_nor_verl():
    code = (
        "import sys, rltr_verl\n"
        "from rltr_verl import Trajectory, parse_turn, parse_verdict, tool, RewardTerm\n"
        "import rltr_verl.config, rltr_verl.scoring\n"
        "print(sorted({'torch', 'verl', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert run(code) == "[]"


def test_the_plugin_brings_no_rollout_code_into_a_process_that_only_imports_verl():
    code = (
        "import verl, sys\n"
        "heavy = ['rltr_verl.rollout.planner_loop', 'rltr_verl.rollout.generation', 'rltr_verl.reward_manager',\n"
        "         'verl.experimental.agent_loop.agent_loop', 'verl.workers.rollout.replica', 'matplotlib',\n"
        "         'rltr_verl.world']\n"
        "print('rltr_verl.plugin' in sys.modules, [name for name in heavy if name in sys.modules])"
    )
    assert run(code).splitlines()[-1] == "True []"
