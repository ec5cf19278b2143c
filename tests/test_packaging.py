"""The wheel holds everything: the open folders inside the package, recipes, prompts and templates as data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns(".git", ".venv", "outputs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the unpacked wheel, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=IGNORED)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(folder / "source")]
    done = subprocess.run(build, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_every_recipe_prompt_and_template_is_in_the_wheel(installed):
    for pattern in ("*.yaml", "*.txt", "*.j2"):
        for folder, inside in (("recipes", "rltr_verl/recipes"), ("rltr_verl", "rltr_verl")):
            for path in (ROOT / folder).rglob(pattern):
                assert (installed / inside / path.relative_to(ROOT / folder)).exists(), path


@pytest.mark.slow
def test_the_installed_wheel_works_without_the_sources(installed, tmp_path):
    code = (
        "import verl, rltr_verl, rltr_verl.tools, rltr_verl.reward_fns\n"
        "from rltr_verl._compose import compose_recipe\n"
        "from rltr_verl.tooling import load_tools\n"
        "print(rltr_verl.__file__)\n"
        "print(compose_recipe('rltr_planner', ['scale=cpu', 'algo=ppo']).algorithm.adv_estimator)\n"
        "print(*load_tools(['calculator', 'days_between']))"
    )
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=500)
    assert done.returncode == 0, done.stderr
    where, estimator, tools = done.stdout.splitlines()[-3:]
    assert where.startswith(str(installed)) and estimator == "gae" and tools == "calculator days_between"
