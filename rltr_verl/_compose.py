"""Composes a recipe inside a Python program, as verl's entry points do from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig

from rltr_verl import _hydra
from rltr_verl.errors import ConfigError


def compose_recipe(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration of recipe ``name`` under ``overrides``.

    Raises:
        ConfigError: Hydra refuses an override or the recipe.
    """
    _hydra.register()
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose(name, overrides=list(overrides))
    except (ConfigCompositionException, MissingConfigException, OverrideParseException) as error:
        reason = " ".join(str(error).split(" Config search path")[0].split())
        fix = "correct the override; keys that are new to verl need a '+' in front."
        raise ConfigError(reason.partition("See https")[0].strip(), where=f"recipe {name}", fix=fix) from None
