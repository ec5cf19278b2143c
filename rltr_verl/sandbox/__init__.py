"""Runs a Python program in a limited subprocess.

Between the trainer and the program stands a guard (``guard/``), a process that keeps the limits, reads the output and
kills the whole tree. ``host.py`` starts guards from threads, so that no event loop waits.
"""

from rltr_verl.sandbox.host import PLANS, Limits, Outcome, Plan, best_plan, run_python

__all__ = ["PLANS", "Limits", "Outcome", "Plan", "best_plan", "run_python"]
