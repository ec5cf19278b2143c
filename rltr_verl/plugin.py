"""What verl loads: the entry point of group ``verl.plugins``, imported in every process that imports verl.

Importing this module registers everything. Each registration waits for the verl module it belongs to (post-import
hooks), so a process that runs no rollout pays milliseconds. verl logs a plugin's failure at DEBUG level only; here it
is printed as one clear error on stderr before it is raised again.
"""

from __future__ import annotations

import sys


def _activate() -> None:
    from rltr_verl._registration import register_all

    register_all()


try:
    _activate()
except Exception as error:
    sys.stderr.write(
        f"\n[rltr_verl] THE PLUGIN COULD NOT BE LOADED: {type(error).__name__}: {error}\n"
        "[rltr_verl] verl goes on without it, so recipes named rltr_* will not work. "
        "Fix: reinstall rltr_verl and verl>=0.9.1,<0.10 in this environment.\n\n"
    )
    raise
