"""The critic's model without flash-attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltr_verl.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


def load_valuehead_model(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """Load a language model as a token classifier with one label: its logits (batch, length, 1) are the values.

    Args:
        local_path: folder of the model; a missing head is initialised at random.
        torch_dtype: type of the parameters.
        model_config: its configuration, with ``num_labels=1``; a choice of flash-attention gives way to sdpa.
        trust_remote_code: whether code from the folder may run.

    Raises:
        ModelError: transformers has no token classifier for this architecture.
    """
    from transformers import AutoModelForTokenClassification

    known = type(model_config) in AutoModelForTokenClassification._model_mapping
    remote = "AutoModelForTokenClassification" in getattr(model_config, "auto_map", {})
    if not known and not remote:
        raise ModelError(
            f"transformers has no token classification model for {type(model_config).__name__}, so no critic",
            where=local_path,
            fix="choose a critic of another architecture (critic.model.path) or an estimator without a critic.",
        )
    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=without_flash_attention(model_config),
        trust_remote_code=trust_remote_code,
    )


def without_flash_attention(config: PretrainedConfig) -> PretrainedConfig:
    """Turn a choice of flash-attention into sdpa, in place; any other choice is the user's and stays."""
    if (config._attn_implementation or "flash").startswith("flash"):
        config._attn_implementation = "sdpa"
    return config
