"""The plugin in real processes: what it registers, and that a broken one is seen although verl swallows it."""

from __future__ import annotations

import os
import subprocess
import sys

REGISTERED = """
import verl
from verl.experimental.agent_loop import agent_loop
from verl.experimental.reward_loop.reward_manager.registry import get_reward_manager_cls
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.plugin.platform import get_platform
print(agent_loop._agent_loop_registry["rltr_planner"]["_target_"])
print(get_reward_manager_cls("rltr").__name__)
print(RolloutReplicaRegistry.get("transformers").__name__)
print(get_rollout_class("transformers").__name__)
print(get_platform().device_name)
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, env=environment)


def test_everything_is_registered_in_a_process_that_only_imports_verl():
    done = python(REGISTERED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "rltr_verl.rollout.planner_loop.PlannerLoop",
        "RltrRewardManager",
        "TransformersReplica",
        "TransformersServerAdapter",
        "cpu",
    ]
    assert "COULD NOT BE LOADED" not in done.stderr


def test_our_modules_can_be_the_first_import_of_a_process():
    rollout = [f"rltr_verl.rollout.{name}" for name in ("planner_loop", "sampler", "unscored", "validation")]
    for module in ("rltr_verl.reward_manager", "rltr_verl.replacements", *rollout):
        done = python(f"import {module}")
        assert done.returncode == 0 and "COULD NOT BE LOADED" not in done.stderr, done.stderr


def test_registered_in_a_ray_worker_too():
    code = (
        "import ray\n"
        "ray.init('local', num_cpus=1, include_dashboard=False, logging_level='error')\n"
        "@ray.remote\n"
        "def look():\n"
        "    import verl\n"
        "    from verl.experimental.reward_loop.reward_manager.registry import get_reward_manager_cls\n"
        "    return get_reward_manager_cls('rltr').__name__\n"
        "print(ray.get(look.remote()))"
    )
    done = python(code)
    assert done.stdout.split()[-1:] == ["RltrRewardManager"], done.stderr


def test_the_registry_of_agent_loops_points_at_a_class_that_exists():
    code = (
        "import hydra, verl\n"
        "from rltr_verl._registration import AGENT_LOOPS\n"
        "print([hydra.utils.get_class(path).__name__ for path in AGENT_LOOPS.values()])"
    )
    assert python(code).stdout.splitlines()[-1] == "['PlannerLoop']"


def test_a_plugin_that_breaks_is_reported_once_and_verl_still_imports():
    code = (
        "import sys, types\n"
        "sys.modules['wrapt'] = types.ModuleType('wrapt')\n"  # a broken dependency
        "import verl\n"
        "print('verl', verl.__version__)"
    )
    done = python(code)
    assert done.returncode == 0 and done.stdout.startswith("verl")
    assert done.stderr.count("THE PLUGIN COULD NOT BE LOADED") == 1
    assert "Fix: reinstall" in done.stderr and "Traceback" not in done.stderr


def test_a_verl_that_moved_a_replaced_function_is_reported_by_name():
    code = (
        "import verl.utils.distributed as d, os\n"
        "del d.initialize_global_process_group\n"
        "from rltr_verl.replacements import REPLACEMENTS, apply\n"
        "from rltr_verl.errors import PluginError\n"
        "moved = next(item for item in REPLACEMENTS if item.attribute == 'initialize_global_process_group')\n"
        "try:\n"
        "    apply(moved, d)\n"
        "except PluginError as error:\n"
        "    print(error)"
    )
    assert "verl.utils.distributed.initialize_global_process_group" in python(code).stdout


def test_nothing_of_the_cpu_backend_is_active_when_another_platform_is_chosen():
    code = (
        "import verl\n"
        "import verl.utils.distributed as d\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "print('cpu' in PlatformRegistry.registered_names(), d.initialize_global_process_group_ray.__module__)"
    )
    assert python(code, VERL_PLATFORM="nvidia").stdout.split()[-2:] == ["False", "verl.utils.distributed"]


def test_hidden_gpus_do_not_keep_the_cpu_backend_from_its_ranks():
    code = (
        "import verl, ray\n"
        "ray.init('local', num_cpus=1, num_gpus=2, include_dashboard=False, logging_level='error')\n"
        "print(ray.cluster_resources()['GPU'])"
    )
    done = python(code, CUDA_VISIBLE_DEVICES="", VERL_PLATFORM="cpu")
    assert done.stdout.split()[-1:] == ["2.0"], done.stderr
