"""The tiny model as loaded, and a plain forward pass to compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture
def make_model(tiny_folder: Path) -> Callable[[], Any]:
    return lambda: AutoModelForCausalLM.from_pretrained(tiny_folder).eval()


@pytest.fixture(scope="session")
def plain_log_probs() -> Callable[..., list[float]]:
    """Log-probabilities of ``output`` after ``prompt`` as a trainer computes them: one forward pass, no cache."""

    def log_probs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits.float() / temperature, dim=-1)
        return rows.gather(1, torch.tensor(output).unsqueeze(1))[:, 0].tolist()

    return log_probs
