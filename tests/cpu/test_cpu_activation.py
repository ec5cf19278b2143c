"""Where the CPU backend is active, where it is not, and what it costs a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rltr_verl import cpu

no_accelerator = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")

REPORT = """
import sys, time
import verl
before, started = set(sys.modules), time.process_time()
from rltr_verl import cpu
if cpu.wanted():
    cpu.activate()
seconds = time.process_time() - started
heavy = sorted(name for name in set(sys.modules) - before if name.startswith(("verl.", "transformers.", "torch.")))
import verl.workers.engine.fsdp.transformer_impl
from verl.plugin.platform import get_platform
from verl.utils import distributed
from verl.workers.engine import EngineRegistry
devices = set(EngineRegistry._engines["language_model"]["fsdp2"])
group = distributed.initialize_global_process_group.__module__
engine_loaded = "rltr_verl.cpu.engine" in sys.modules
print(get_platform().device_name, sorted(map(str, devices)), group, engine_loaded, heavy, f"{seconds:.3f}", sep="|")
"""


def report(*path: Path, **variables: str) -> list[str]:
    """Load the backend in a fresh process as the plugin does; return what came of it."""
    decided = ("VERL_PLATFORM", cpu.CACHE_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in decided}
    environment["PATH"] = os.pathsep.join([*map(str, path), environment["PATH"]])
    environment |= {"VERL_USE_EXTERNAL_PLUGINS": "none", **variables}
    run = subprocess.run([sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1].split("|")


@pytest.fixture
def vendor_tool(tmp_path: Path) -> Path:
    """A folder with a working ``nvidia-smi`` that counts its calls: what a machine with a GPU has."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho call >> {tmp_path}/calls\n")
    tool.chmod(0o755)
    return tool.parent


@pytest.fixture
def undecided(cpu_backend: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says nothing, in a process that has imported verl."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.delenv(cpu.CACHE_VARIABLE, raising=False)
    return monkeypatch


@no_accelerator
def test_active_where_there_is_no_accelerator():
    device, engines, group, *_ = report()
    assert (device, group) == ("cpu", "rltr_verl.cpu.gloo")
    assert "cpu" in engines


def test_nothing_is_active_on_a_machine_with_a_gpu_even_where_no_device_is_visible(vendor_tool):
    device, engines, group, engine_loaded, *_ = report(vendor_tool, CUDA_VISIBLE_DEVICES="")
    assert device == "cuda"
    assert "cpu" not in engines
    assert group == "verl.utils.distributed"
    assert engine_loaded == "False"


def test_the_user_can_ask_for_the_cpu_on_a_machine_with_a_gpu_and_activation_is_cheap(vendor_tool):
    device, *_, heavy, seconds = report(vendor_tool, VERL_PLATFORM="cpu")
    assert device == "cpu"
    assert heavy == "[]"
    assert float(seconds) < 3  # of CPU; to load verl's engines or transformers takes several times as much


@pytest.mark.parametrize(("platform", "expected"), [("cpu", True), (" CPU ", True), ("nvidia", False)])
def test_the_platform_variable_decides(undecided, platform, expected):
    undecided.setenv("VERL_PLATFORM", platform)
    assert cpu.wanted() is expected


def test_the_check_runs_once_and_its_answer_reaches_children(undecided, vendor_tool, tmp_path):
    undecided.setenv("PATH", f"{vendor_tool}{os.pathsep}{os.environ['PATH']}")
    assert not cpu.wanted()
    assert not cpu.wanted()
    assert (tmp_path / "calls").read_text() == "call\n"
    question = "import sys; from rltr_verl import cpu; print(cpu.wanted(), 'torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, timeout=500, check=True)
    assert answer.stdout.split() == ["False", "False"]


def test_an_answer_about_another_host_is_not_believed(undecided, vendor_tool):
    undecided.setenv("PATH", f"{vendor_tool}{os.pathsep}{os.environ['PATH']}")
    undecided.setenv(cpu.CACHE_VARIABLE, "another-host=no")
    assert not cpu.wanted()


@no_accelerator
def test_taking_over_from_verls_guess_is_silent():
    program = (
        "import verl; from verl.plugin.platform import get_platform, platform_manager as manager; get_platform()\n"
        "from rltr_verl import cpu; cpu.activate(); cpu.activate()\n"
        "print(get_platform().device_name, manager.logger.disabled)"
    )
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    environment.pop("VERL_PLATFORM", None)
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=500)
    assert run.stdout.split() == ["cpu", "False"], run.stderr
    assert "Replacing" not in run.stderr
