"""vLLM's CPU build answers to the name that verl asks for."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import pytest

from rltr_verl.cpu import vllm_cpu


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``installed(name, version)``: put a distribution into an environment that holds no other."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    vllm_cpu.install()

    def add(name: str, number: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")

    return add


@pytest.mark.parametrize(("number", "expected"), [("0.27.1", "0.27.1+cpu"), ("0.28.0+cpu", "0.28.0+cpu")])
def test_the_cpu_build_is_found_as_vllm_and_says_that_it_is_one(installed, number, expected):
    installed("vllm-cpu", number)
    assert version("vllm") == expected
    assert version("vllm-cpu") == number


def test_vllm_itself_comes_first(installed):
    installed("vllm-cpu", "0.27.1")
    installed("vllm", "0.20.0")
    assert version("vllm") == "0.20.0"


def test_without_either_nothing_is_found(installed):
    for name in ("vllm", "vllm-cpu", "nothing"):
        with pytest.raises(PackageNotFoundError):
            version(name)


def test_a_list_of_what_is_installed_stays_as_it_is(installed):
    installed("vllm-cpu", "0.27.1")
    assert [found.name for found in distributions()] == ["vllm-cpu"]


def test_a_second_installation_adds_nothing(installed):
    before = list(sys.meta_path)
    vllm_cpu.install()
    assert sys.meta_path == before
