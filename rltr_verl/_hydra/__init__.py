"""Adds ``pkg://rltr_verl.recipes`` to Hydra's search path, so that ``--config-name rltr_planner`` works from any folder.

Installed as ``hydra_plugins.rltr_verl`` (a namespace package that Hydra scans).
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class RltrSearchPath(SearchPathPlugin):
    """Appended behind verl's own configuration, which therefore wins on any clash of names."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="rltr_verl", path="pkg://rltr_verl.recipes")
