"""What the plugin adds to ``import verl``: the same import with and without it, in turns.

    python benchmarks/import_time.py [--rounds 7]

Prints the median seconds of both and of the paired difference.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from rich.console import Console


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    import_seconds("none")  # fills the file cache
    without, with_plugin = zip(*((import_seconds("none"), import_seconds("auto")) for _ in range(rounds)), strict=True)
    added = [b - a for a, b in zip(without, with_plugin, strict=True)]
    Console().print(
        f"import verl, median of {rounds}: {statistics.median(without):.3f} s without the plugin, "
        f"{statistics.median(with_plugin):.3f} s with it; added {statistics.median(added):.3f} s"
    )


def import_seconds(plugins: str) -> float:
    """Wall seconds of ``python -c 'import verl'``."""
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import verl"], env=environment, check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
