"""The CPU engines: fp32 throughout, log-probs of the plain model, training, checkpoints."""

from __future__ import annotations

import pytest
import torch

from rltr_verl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_rank")
LENGTHS = (9, 17, 5, 12)


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 250, (length,), generator=generator) for length in LENGTHS]


def build(folder: str, model_type: str = "language_model", model_settings: dict | None = None, **settings):
    """Build an engine as verl's workers do."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    settings = {"strategy": "fsdp2", "forward_only": False, **settings}
    engine = EngineRegistry.new(
        model_type,
        settings["strategy"],
        model_config=HFModelConfig(path=folder, model_type=model_type, **(model_settings or {})),
        engine_config=FSDPEngineConfig(**settings),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def batch(sequences: list[torch.Tensor]):
    """Pack sequences as verl hands them to an engine, with the flags a GPU recipe would set."""
    from verl.utils import tensordict_utils

    def jagged(rows):
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    tensors = {
        "input_ids": jagged(sequences),
        "position_ids": jagged(torch.arange(len(row)) for row in sequences),
        "loss_mask": jagged(torch.ones(len(row), dtype=torch.long) for row in sequences),
    }
    settings = {
        "use_remove_padding": True,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "temperature": 1.0,
        "pad_mode": "no_padding",
        "pad_token_id": 0,
    }
    return tensordict_utils.get_tensordict(tensors, settings)


def negative_log_likelihood(model_output, data, dp_group=None):
    """Mean over tokens of all but each row's last prediction, which wraps around to the next row."""
    rows = model_output["log_probs"].unbind()
    return -torch.cat([row[:-1] for row in rows]).mean(), {}


def infer(engine, sequences, key="log_probs"):
    with engine.eval_mode(), torch.no_grad():
        return engine.infer_batch(batch(sequences))["model_output"][key].unbind()


def train(engine, sequences):
    with engine.train_mode():
        return engine.train_batch(batch(sequences), loss_function=negative_log_likelihood)


def activation_types(engine, sequences) -> set[torch.dtype]:
    """Run a forward pass and collect the types that leave every module."""
    found: set[torch.dtype] = set()
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: found.add(output.dtype))
        for module in engine.module.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    ]
    infer(engine, sequences)
    for hook in hooks:
        hook.remove()
    return found


def plain_log_probs(folder: str, sequences) -> list[torch.Tensor]:
    """log p(next token) of the plain transformers model, row by row, without padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = [model(row[None]).logits[0, :-1] for row in sequences]
    pairs = zip(logits, sequences, strict=True)
    return [rows.log_softmax(-1).gather(-1, row[1:, None])[:, 0] for rows, row in pairs]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("forward_only", [False, True], ids=["actor", "reference"])
def test_log_probs_are_those_of_the_plain_model(tiny_model, sequences, strategy, forward_only):
    engine = build(tiny_model, strategy=strategy, forward_only=forward_only)
    for ours, plain in zip(infer(engine, sequences), plain_log_probs(tiny_model, sequences), strict=True):
        torch.testing.assert_close(ours[:-1], plain, atol=1e-5, rtol=0)


def test_parameters_gradients_and_computation_are_fp32(tiny_model, sequences):
    engine = build(tiny_model)
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}
    assert activation_types(engine, sequences) == {torch.float32}
    kept = {}
    engine.optimizer.register_step_pre_hook(
        lambda optimizer, *_: kept.update(types={p.grad.dtype for g in optimizer.param_groups for p in g["params"]})
    )
    train(engine, sequences)
    assert kept["types"] == {torch.float32}


def test_reference_defaults_to_fp32(tiny_model, sequences):
    engine = build(tiny_model, forward_only=True, model_dtype=None)
    assert activation_types(engine, sequences) == {torch.float32}


def test_a_given_mixed_precision_is_kept(tiny_model, sequences):
    engine = build(tiny_model, mixed_precision={"param_dtype": "bf16"})
    assert torch.bfloat16 in activation_types(engine, sequences)


def test_training_lowers_the_loss(tiny_model, sequences):
    engine = build(tiny_model)
    before, *_, after = (sum(train(engine, sequences)["loss"]) for _ in range(6))
    assert after < before - 0.5


def test_gradients_are_those_of_the_plain_model(tiny_model, sequences):
    from transformers import AutoModelForCausalLM

    engine = build(tiny_model)
    with engine.train_mode():
        engine.forward_backward_batch(batch(sequences[:2]), negative_log_likelihood)
        ours = engine.module.model.layers[0].mlp.up_proj.weight.grad.full_tensor().clone()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rows = [model(row[None]).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None]) for row in sequences[:2]]
    (-torch.cat(rows).mean()).backward()
    torch.testing.assert_close(ours, model.model.layers[0].mlp.up_proj.weight.grad, atol=1e-6, rtol=1e-4)


def test_checkpoint_restores_weights_optimizer_and_schedule(tiny_model, sequences, tmp_path):
    engine = build(tiny_model)
    train(engine, sequences)
    engine.lr_scheduler_step()
    engine.save_checkpoint(str(tmp_path / "checkpoint"), global_step=1)
    continued = [sum(train(engine, sequences)["loss"]) for _ in range(2)]

    restored = build(tiny_model)
    restored.load_checkpoint(str(tmp_path / "checkpoint"), del_local_after_load=False)
    assert restored.lr_scheduler.last_epoch == 1
    assert [sum(train(restored, sequences)["loss"]) for _ in range(2)] == pytest.approx(continued, abs=1e-6)


def test_full_weights_carry_the_names_of_the_model_and_are_copies(tiny_model, sequences):
    from safetensors.torch import load_file

    engine = build(tiny_model)
    stored = load_file(f"{tiny_model}/model.safetensors")
    gathered = dict(engine.get_per_tensor_param()[0])
    assert set(stored) <= set(gathered)
    train(engine, sequences)
    for name, weight in stored.items():
        torch.testing.assert_close(gathered[name], weight)


def test_critic_gives_one_value_a_token_and_learns(tiny_model, sequences):
    engine = build(tiny_model, model_type="value_model")
    values = infer(engine, sequences, key="values")
    assert [len(row) for row in values] == list(LENGTHS)
    assert {row.dtype for row in values} == {torch.float32}

    def regression(model_output, data, dp_group=None):
        return (model_output["values"].values() - 1.0).square().mean(), {}

    losses = []
    for _ in range(8):
        with engine.train_mode():
            losses.append(sum(engine.train_batch(batch(sequences), loss_function=regression)["loss"]))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("settings", "model_settings", "named"),
    [
        ({"ulysses_sequence_parallel_size": 2}, {}, "ulysses_sequence_parallel_size"),
        ({}, {"use_fused_kernels": True}, "use_fused_kernels"),
    ],
)
def test_what_needs_an_accelerator_is_refused(tiny_model, settings, model_settings, named):
    with pytest.raises(ConfigError, match=named):
        build(tiny_model, model_settings=model_settings, **settings)


def test_the_number_of_threads_can_be_set(monkeypatch):
    from rltr_verl.cpu import engine

    monkeypatch.delenv("RLTR_CPU_THREADS", raising=False)
    assert engine.threads_per_rank() == torch.get_num_threads()
    monkeypatch.setenv("RLTR_CPU_THREADS", "5")
    assert engine.threads_per_rank() == 5
    monkeypatch.setenv("RLTR_CPU_THREADS", "all")
    with pytest.raises(ConfigError, match="RLTR_CPU_THREADS"):
        engine.threads_per_rank()
