"""Python for a planner, in a limited subprocess or on a SandboxFusion server.

What holds depends on what the kernel lets us do; the strongest of four plans that works is taken, and the log says at
start which one it is and what it leaves open (``rltr_verl.sandbox.PLANS``). Always: limits of wall time, CPU, memory,
processes, file size and output; an empty environment; a fresh folder for each call; nothing kept between calls.

NOT covered, under any plan:

- The kernel's own faults: there is no filter of system calls. A program that breaks the kernel breaks out.
- Without namespaces: the network, and files that the program's user may read. Under the weakest plan that user is the
  trainer's, so keys in files and in the environment of the trainer's processes can be read, and its processes killed.
- Under namespaces: what lies in /usr, /lib and the Python installation can be read, secrets there included. The socket
  between a virtual machine and its host (AF_VSOCK), which the kernel keeps out of network namespaces, can be reached.
- Memory of the whole tree is counted ten times a second and in part (no memory that belongs to files), not by a
  cgroup: for moments it may take ``processes`` x ``memory_mb``. Files without a place (memfd_create) hold up to
  ``disk_mb`` each beside that, 256 for each process. CPU time is limited for each process, not for the tree.
- Time and load: a program can see how busy the machine is, and makes it busier within its limits.
- A SandboxFusion server's isolation is its own.

Where programs are to be trusted less than that, run a SandboxFusion server on another machine and give its ``url``.
"""

from __future__ import annotations

import json
import logging
import signal
from typing import Any, Literal

import aiohttp

from rltr_verl import tool
from rltr_verl.errors import BadArguments, ConfigError
from rltr_verl.sandbox import PLANS, Limits, Outcome, best_plan, run_python

logger = logging.getLogger(__name__)

NOTHING = "(no output)"


def runs(
    timeout_s: float,
    cpu_s: float | None,
    memory_mb: int,
    output_chars: int,
    processes: int,
    disk_mb: int,
    isolation: Literal["best", "full"],
    url: str | None,
) -> None:
    """Say in the log how programs will run.

    Raises :class:`ConfigError` for a limit of 0 or less, and if ``full`` isolation is asked and cannot be had.
    """
    Limits(timeout_s, timeout_s if cpu_s is None else cpu_s, memory_mb, output_chars, processes, disk_mb)
    if url is not None:
        logger.info("code: programs are sent to %s", url)
        return
    plan = best_plan()
    if isolation == "full" and plan.name not in ("namespaces", "user_namespaces"):
        fix = f"run on a machine with {PLANS[0].needs} or {PLANS[1].needs}, set url, or allow isolation: best."
        raise ConfigError(f"programs cannot be isolated here; open: {', '.join(plan.open)}", where="isolation", fix=fix)
    logger.info("code: plan %s: %s", plan.name, "; ".join(plan.protections))
    if plan.open:
        logger.warning("code: under plan %s programs can reach: %s", plan.name, "; ".join(plan.open))


@tool(check=runs, bounded_by="timeout_s", at_once=256)
async def code(
    code: str,
    *,
    timeout_s: float = 10.0,
    cpu_s: float | None = None,
    memory_mb: int = 1024,
    output_chars: int = 10_000,
    processes: int = 64,
    disk_mb: int = 64,
    isolation: Literal["best", "full"] = "best",
    failed_program: Literal["bad_arguments", "ok"] = "bad_arguments",
    url: str | None = None,
) -> str:
    """Run a Python program and return what it prints, and the value of its last line if that is an expression.

    Args:
        code: the program. It has no network, and nothing is kept from one call to the next.
    """
    if url is not None:
        text, failed = await _remote(url, code, timeout_s, memory_mb, output_chars)
    else:
        cpu_s = timeout_s if cpu_s is None else cpu_s
        limits = Limits(timeout_s, cpu_s, memory_mb, output_chars, processes, disk_mb)
        text, failed = _local(await run_python(code, limits), limits)
    if failed and failed_program == "bad_arguments":
        raise BadArguments(text)
    return text


def _local(outcome: Outcome, limits: Limits) -> tuple[str, bool]:
    """What the model reads, and whether the program failed.

    A program stopped by the clock has not failed for certain: a busy machine looks the same from inside.
    """
    gap = f"\n[... {outcome.left_out} bytes left out ...]\n" if outcome.left_out else ""
    end = _ending(outcome, limits)
    return _joined(outcome.head + gap + outcome.tail, end), bool(end) and outcome.reason != "timeout"


def _ending(outcome: Outcome, limits: Limits) -> str:
    if outcome.reason == "exit":
        return f"[exit code {outcome.value}]" if outcome.value else ""
    if outcome.reason == "signal" and outcome.value == signal.SIGXCPU:
        return f"[stopped: more than {limits.cpu_s:g} s of CPU time]"
    return {
        "signal": f"[killed by {_signal_name(outcome.value)}]",
        "timeout": f"[stopped: no end within {limits.timeout_s:g} s]",
        "memory": f"[stopped: more than {limits.memory_mb} MB of memory]",
        "processes": f"[stopped: more than {limits.processes} processes]",
    }[outcome.reason]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _joined(output: str, end: str) -> str:
    text = "\n".join(part for part in (output.rstrip("\n"), end) if part)
    return text or NOTHING


async def _remote(url: str, program: str, timeout_s: float, memory_mb: int, limit: int) -> tuple[str, bool]:
    """The same from a SandboxFusion server. Raises OSError or aiohttp.ClientError where the server fails."""
    request = {
        "code": program.encode("utf-8", "replace").decode(),
        "language": "python",
        "run_timeout": timeout_s,
        "memory_limit_MB": memory_mb,
    }
    answer = await _post(url.rstrip("/") + "/run_code", request, timeout_s)
    result = answer.get("run_result")
    if answer.get("status") not in ("Success", "Failed") or not isinstance(result, dict):
        raise OSError(f"SandboxFusion: {answer.get('status')}: {str(answer.get('message'))[:200]}")
    output = _cut(_both(result), limit)
    if result.get("status") == "TimeLimitExceeded":
        return _joined(output, f"[stopped: no end within {timeout_s:g} s]"), False
    exit_code = result.get("return_code")
    failed = answer["status"] == "Failed" or bool(exit_code)
    end = "" if not failed else "[failed]" if exit_code is None else f"[exit code {exit_code}]"
    return _joined(output, end), failed


async def _post(url: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=timeout_s + 15.0)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=request) as response:
        response.raise_for_status()
        body = await response.read()
    answer = json.loads(body)
    if not isinstance(answer, dict):
        raise OSError("SandboxFusion: the answer is no object")
    return answer


def _both(result: dict[str, Any]) -> str:
    parts = [str(result.get(name) or "") for name in ("stdout", "stderr")]
    return "\n".join(part.rstrip("\n") for part in parts if part)


def _cut(text: str, limit: int) -> str:
    half = limit // 2
    if len(text) <= 2 * half:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:] if half else ''}"
