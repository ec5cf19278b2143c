"""The error model, in one page.

Three kinds of things go wrong, and each has one place:

* The user's input is wrong (a recipe key, a file, a row): a subclass of :class:`RltrError` is raised before work
  starts. Its message says what is wrong, where (file, row, field) and the fix.
* The policy did something wrong (an unreadable call, an unknown tool, arguments that break the schema): no exception.
  The trajectory records it (``ToolCall.error``, ``Observation.status``) and the reward terms charge it.
* The surroundings failed (a tool timed out, a judge did not answer): the policy is never charged. Tools end in a typed
  ``Observation.status``; a judge's failure raises :class:`Unscored`, so that no number stands in for a verdict.

Inside a tool two exceptions are part of its contract: :class:`BadArguments` (the caller's mistake) and
:class:`ToolFailed` (the tool's own failure).
"""

from __future__ import annotations


class RltrError(Exception):
    """Base of every error this package raises on purpose. ``str(error)`` is one paragraph ending with the fix."""

    def __init__(self, problem: str, *, where: str = "", fix: str = "") -> None:
        self.problem, self.where, self.fix = problem, where, fix
        text = f"{where}: {problem}" if where else problem
        if fix:
            stop = "" if text.endswith((".", "!", "?")) else "."
            text = f"{text}{stop} Fix: {fix}"
        super().__init__(text)

    def __reduce__(self) -> tuple:
        """Survive pickling between processes (Ray) although the arguments are keyword-only."""
        return _rebuild, (type(self), self.problem, self.where, self.fix)


def _rebuild(cls: type[RltrError], problem: str, where: str, fix: str) -> RltrError:
    return cls(problem, where=where, fix=fix)


class ConfigError(RltrError):
    """A recipe or override is wrong: an unknown key, a value of the wrong type, settings that contradict each other."""


class DataError(RltrError):
    """A data file is wrong: names the file, the row and the field."""


class ModelError(RltrError):
    """A model folder is missing or unusable, for example a tokenizer without a chat template."""


class WorldError(RltrError):
    """A world folder is missing, incomplete or of another version."""


class DiskError(RltrError):
    """The disk cannot take what the run will write."""


class PluginError(RltrError):
    """The verl plugin could not be loaded, or verl has moved something that the plugin needs."""


class ToolDefinitionError(RltrError):
    """A tool or a reward term is not defined as its contract asks; names the file and line."""


class ToolError(RltrError):
    """Base of what a tool may raise while it runs."""


class BadArguments(ToolError):
    """A tool refuses what it was given: the policy's own mistake (status ``bad_arguments``, charged)."""


class ToolFailed(ToolError):
    """A tool could not do its work although it was asked properly (status ``tool_failed``, never charged)."""


class Unscored(RltrError):
    """No verdict could be had for a trajectory. It must leave the baseline and the loss; it is never 0 and never 1."""


class CacheMiss(Unscored):
    """Replay found no verdict for a request, and replay never asks the judge."""


class BudgetSpent(Unscored):
    """The judge has cost what ``rltr.judge.budget`` allows. No further request is sent."""


class MaskError(RltrError):
    """Tokens would be trained that the policy did not sample, or sampled ones would not be."""


class JudgeOutage(RltrError):
    """So many trajectories are unscored that training stops; names the judge, the last reason and how often it came."""


class GateError(RltrError):
    """The cold start did not reach what the RL stage needs."""


class StageError(RltrError):
    """A command that a longer run started has failed; the message holds its last error lines and the log's path."""


class RolloutError(RltrError):
    """The rollout engine cannot go on with what it was given: weights that do not fit, logits that are not numbers."""
