"""Stock ``python -m verl.trainer.main_ppo`` in a subprocess, small enough for a test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rltr_verl.world import build_world


class Run:
    """One folder in which ``main_ppo`` is run, perhaps several times."""

    def __init__(self, folder: Path, world: Path) -> None:
        self.folder, self.world = folder, world
        self.metrics_file, self.dump = folder / "metrics.jsonl", folder / "dump"
        self.ray = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Ray's sockets need a short path

    def command(self, *overrides: str) -> list[str]:
        small = [
            "scale=cpu",
            f"rltr.world={self.world}",
            f"rltr.dump_dir={self.dump}",
            "data.train_batch_size=2",
            "data.max_response_length=64",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.entropy_coeff=0.05",  # an untrained planner's rewards are all alike; this moves it
            "trainer.total_training_steps=2",
            "trainer.val_before_train=false",
            "trainer.logger=[console,file]",
            f"trainer.default_local_dir={self.folder}/checkpoints",
            f"+ray_kwargs.ray_init._temp_dir={self.ray}",
            "+ray_kwargs.ray_init.address=local",
        ]
        head = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "rltr_planner"]
        return [*head, *small, *overrides]

    def start(self, *overrides: str) -> subprocess.Popen:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_FILE_LOGGER_PATH": str(self.metrics_file)}
        log = (self.folder / "log.txt").open("ab")
        return subprocess.Popen(
            self.command(*overrides),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env=env,
            start_new_session=True,
        )

    def finish(self, *overrides: str, timeout: float = 400) -> list[dict]:
        """Run to the end; the metrics of its training steps."""
        process = self.start(*overrides)
        try:
            code = process.wait(timeout)
        finally:
            self.kill(process)
        assert code == 0, self.log()[-4000:]
        return self.metrics()

    def metrics(self) -> list[dict]:
        if not self.metrics_file.exists():
            return []
        lines = [json.loads(line) for line in self.metrics_file.read_text().splitlines() if line.endswith("}")]
        trained = [line for line in lines if "actor/grad_norm" in line["data"]]
        return [{"step": line["step"], **line["data"]} for line in trained]

    def scored(self) -> list[dict]:
        return [json.loads(line) for path in self.dump.glob("*.jsonl") for line in path.read_text().splitlines()]

    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def wait_for_step(self, process: subprocess.Popen, step: int, timeout: float = 300) -> None:
        deadline = time.monotonic() + timeout
        while not any(line["step"] >= step for line in self.metrics()):
            assert process.poll() is None, self.log()[-4000:]
            assert time.monotonic() < deadline, self.log()[-4000:]
            time.sleep(0.2)

    def kill(self, process: subprocess.Popen) -> None:
        """End the driver's process group and whatever Ray left under this run's temporary folder."""
        for victim in psutil.process_iter(["cmdline"]):
            if str(self.ray) in " ".join(victim.info["cmdline"] or ()) and victim.pid != process.pid:
                victim.kill()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.fixture(scope="session")
def untrained_world(tmp_path_factory) -> Path:
    return Path(build_world(tmp_path_factory.mktemp("world") / "w", seed=1).folder)


@pytest.fixture
def run(tmp_path, untrained_world):
    made = Run(tmp_path, untrained_world)
    yield made
    shutil.rmtree(made.ray, ignore_errors=True)
