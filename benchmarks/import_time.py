"""What the plugin adds to ``import verl``: the same import with and without it, in turns.

    python benchmarks/import_time.py [--rounds 7]

Prints medians of the wall time and of the CPU time (user and system), and the median of the paired differences; then
the plugin alone, imported where verl already is. On a busy machine the differences are noise and the last line is not.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    import_seconds("none")  # fills the file cache
    pairs = [(import_seconds("none"), import_seconds("auto")) for _ in range(rounds)]
    table = Table("seconds", "without the plugin", "with it", "added", title=f"import verl, median of {rounds}")
    for index, clock in enumerate(("wall", "CPU")):
        without, with_plugin = ([run[index] for run in runs] for runs in zip(*pairs, strict=True))
        added = [b - a for a, b in zip(without, with_plugin, strict=True)]
        table.add_row(clock, *(f"{statistics.median(values):.3f}" for values in (without, with_plugin, added)))
    console = Console()
    console.print(table)
    console.print(f"the plugin alone: {statistics.median(plugin_seconds() for _ in range(rounds)):.3f} CPU s")


def import_seconds(plugins: str) -> tuple[float, float]:
    """Wall and CPU seconds of ``python -c 'import verl'``."""
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    wall, cpu = time.perf_counter(), _children_cpu()
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import verl"], env=environment, check=True)
    return time.perf_counter() - wall, _children_cpu() - cpu


def plugin_seconds() -> float:
    """CPU seconds of importing the plugin in a process that has verl without it."""
    code = "import time, verl; t = time.process_time(); import rltr_verl.plugin; print(time.process_time() - t)"
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return float(out.splitlines()[-1])


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
