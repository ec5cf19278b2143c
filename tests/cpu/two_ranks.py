"""One rank of the two in ``test_cpu_two_ranks``: train a sharded model and report what the ranks agree on.

Usage: ``two_ranks.py MODEL_FOLDER CHECKPOINT_FOLDER``, under ``torch.distributed.run``. Rank 0 prints a JSON line.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed
import verl  # noqa: F401
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.distributed import initialize_global_process_group
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

ROWS, STEPS = 4, 3


def build(folder: str, model_type: str = "language_model", **settings):
    engine = EngineRegistry.new(
        model_type,
        "fsdp2",
        model_config=HFModelConfig(path=folder, model_type=model_type),
        engine_config=FSDPEngineConfig(strategy="fsdp2", **settings),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )
    engine.initialize()
    return engine


def batch(rank: int):
    """This rank's rows of one global batch; the last token of a row predicts nothing."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, 250, (6 + length,), generator=generator) for length in range(ROWS)]
    rows = rows[rank :: torch.distributed.get_world_size()]
    columns = {
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "loss_mask": [(torch.arange(len(row)) < len(row) - 1).long() for row in rows],
    }
    tensors = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}
    settings = {
        "use_remove_padding": True,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 16,
        "temperature": 1.0,
        "pad_mode": "no_padding",
        "pad_token_id": 0,
    }
    return tensordict_utils.get_tensordict(tensors, settings)


def token_mean(model_output, data, dp_group=None):
    """verl's convention: sum over this rank's tokens, times ranks, over the tokens of all ranks."""
    tokens = tensordict_utils.get_non_tensor_data(data, "batch_num_tokens", None)
    total = (model_output["log_probs"].values() * data["loss_mask"].values()).sum()
    return -total * torch.distributed.get_world_size() / tokens, {}


def full_weights(engine) -> dict[str, torch.Tensor]:
    return dict(engine.get_per_tensor_param()[0])


def train(engine, rank: int) -> list[float]:
    """Train a few steps; return the global loss of each."""
    losses = []
    for _ in range(STEPS):
        with engine.train_mode():
            loss = torch.tensor(sum(engine.train_batch(batch(rank), loss_function=token_mean)["loss"]))
        torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.AVG)
        losses.append(loss.item())
    return losses


def main(model: str, checkpoint: str) -> None:
    _, rank, world_size = initialize_global_process_group()
    engine = build(model)
    shards = [parameter.to_local().numel() for parameter in engine.module.parameters()]
    losses = train(engine, rank)
    weights = full_weights(engine)
    everyones = [None] * world_size
    torch.distributed.all_gather_object(
        everyones, {name: weight.double().sum().item() for name, weight in weights.items()}
    )

    engine.save_checkpoint(checkpoint, global_step=STEPS)
    restored = build(model)
    restored.load_checkpoint(checkpoint, del_local_after_load=False)
    restored_weights = full_weights(restored)

    reference = build(model, forward_only=True)
    critic = build(model, model_type="value_model")
    with reference.eval_mode(), torch.no_grad():
        log_probs = reference.infer_batch(batch(rank))["model_output"]["log_probs"]
    with critic.eval_mode(), torch.no_grad():
        values = critic.infer_batch(batch(rank))["model_output"]["values"]

    if rank == 0:
        report = {
            "world_size": world_size,
            "local_share": sum(shards) / sum(parameter.numel() for parameter in engine.module.parameters()),
            "losses": losses,
            "ranks_agree": all(other == everyones[0] for other in everyones),
            "restored": all(torch.equal(weight, restored_weights[name]) for name, weight in weights.items()),
            "continued": None,
            "reference_rows": len(log_probs.unbind()),
            "critic_rows": len(values.unbind()),
        }
    continued, repeated = train(engine, rank), train(restored, rank)
    if rank == 0:
        report["continued"] = max(abs(one - other) for one, other in zip(continued, repeated, strict=True))
        print("REPORT " + json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
