"""``--set KEY=VALUE``: settings of the node ``rltr`` from a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rltr_verl.config import RltrSettings, load_settings
from rltr_verl.errors import ConfigError


def read_settings(changes: Sequence[str]) -> RltrSettings:
    """Defaults of the node ``rltr`` with the changes of ``--set`` applied.

    Raises:
        ConfigError: a change is not ``key=value``, or what it sets is refused.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for change in changes:
        if "=" not in change:
            raise ConfigError(f"'{change}' sets nothing", where="--set", fix="write key=value.")
    try:
        node = OmegaConf.to_container(OmegaConf.from_dotlist(list(changes)), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error), where="--set", fix="write key=value, value in YAML.") from None
    assert isinstance(node, dict)
    return load_settings(_with_default_terms(node.get("rltr", node)))


def _with_default_terms(node: dict[str, Any]) -> dict[str, Any]:
    """Changing one term keeps the others, as it does in a recipe."""
    reward = dict(node.get("reward") or {})
    defaults: dict[str, Any] = {name: {} for name in load_settings(None).reward.terms}
    return {**node, "reward": {**reward, "terms": defaults | dict(reward.get("terms") or {})}}
