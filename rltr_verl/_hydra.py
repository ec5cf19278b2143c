"""Adds ``pkg://rltr_verl.recipes`` to Hydra's search path: ``--config-name rltr_planner`` works from any folder.

Registered with Hydra by the verl plugin, before verl's entry points compose their configuration. Hydra's own discovery
(the namespace package ``hydra_plugins``) is not used: it does not see editable installs.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin


class RltrSearchPath(SearchPathPlugin):
    """Appended behind verl's own configuration, which therefore wins on any clash of names."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="rltr_verl", path="pkg://rltr_verl.recipes")


def register() -> None:
    """Make the recipes visible to every composition of this process."""
    Plugins.instance().register(RltrSearchPath)
