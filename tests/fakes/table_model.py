"""Models set by hand: a table from the last token to the next, in the weights of the tiny architecture.

So an untrained planner makes calls that can be judged, and an untrained judge writes verdicts. The layers add
nothing, an embedding names the token's row of the table, and the output weights hold the table.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

SEARCH = '<tool_call>\n{"name": "search", "arguments": {"query": "'
PLANNER = {
    "assistant\n": {SEARCH: 0.4, "<answer>": 0.6},
    SEARCH: {"Arlen": 0.5, "Brona": 0.5},
    "Arlen": {'"}}\n</tool_call>': 1.0},
    "Brona": {'"}}\n</tool_call>': 1.0},
    '"}}\n</tool_call>': {"<|im_end|>": 1.0},
}
POSITIONS = 8192


def write_table(source: Path, folder: Path, table: Mapping[str, Mapping[str, float]]) -> Path:
    """A model folder with the tokenizer of ``source``, whose next-token probabilities are those of ``table``."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(source, folder)
    (folder / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = Qwen3Config.from_pretrained(source, tie_word_embeddings=False, max_position_embeddings=POSITIONS)
    model = Qwen3ForCausalLM(config).float()
    width = config.hidden_size
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, output = model.model.embed_tokens.weight.zero_(), model.lm_head.weight.zero_()
        embedding[:, 0] = 1
        for row, (token, nexts) in enumerate(table.items(), 1):
            token_id = tokenizer.convert_tokens_to_ids(token)
            embedding[token_id] = torch.eye(width)[row]
            output[:, row] = -20 / width**0.5  # the norm makes the embedding's one entry the root of the width
            for following, share in nexts.items():
                output[tokenizer.convert_tokens_to_ids(following), row] = torch.tensor(share).log() / width**0.5
    model.save_pretrained(folder)
    return folder
