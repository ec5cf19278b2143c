"""A world, and a real vLLM server on the CPU in a process of its own: a random Qwen3 behind the OpenAI API."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import rltr_verl.judge
from rltr_verl.world import World, build_world

MODEL, CONTEXT = "judge", 4096
PROMPTS = Path(rltr_verl.judge.__file__).parent / "prompts"
_OPTIONS = {
    "--served-model-name": MODEL,
    "--host": "127.0.0.1",
    "--dtype": "float32",
    "--max-model-len": str(CONTEXT),
    "--max-num-batched-tokens": str(CONTEXT),
    "--max-num-seqs": "16",
}
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """An offline world with its untrained model."""
    return build_world(tmp_path_factory.mktemp("world") / "w", seed=1)


@pytest.fixture(scope="session")
def prose() -> str:
    """Ten thousand words that the model's tokenizer knows."""
    return (PROMPTS / "completeness_en.txt").read_text(encoding="utf-8") * 40


@pytest.fixture(scope="session")
def model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with room for a judge's prompt, a vocabulary for its words, and heads of the size vLLM wants."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("judge")
    texts = [path.read_text(encoding="utf-8") for path in PROMPTS.iterdir()]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder).train_new_from_iterator(texts, 2000, show_progress=False)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "head_dim": 32, "max_position_embeddings": CONTEXT}
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(tiny_folder, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's base URL."""
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    options = [part for pair in {**_OPTIONS, "--model": str(model), "--port": str(port)}.items() for part in pair]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """The server and its engine, which is a process of the same group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_healthy(process: subprocess.Popen, url: str, log: Path, timeout: float = 300) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + timeout
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-6000:]
        try:
            direct.open(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
