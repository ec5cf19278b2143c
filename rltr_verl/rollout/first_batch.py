"""The masks of a run's first training batch, checked once before anything is updated.

What the check reads is what the loss will read: the rows in verl's queue, not what the loop meant to put there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue as tq
from omegaconf import OmegaConf

from rltr_verl.errors import MaskError
from rltr_verl.rollout.mask_check import check_masks
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.rows import read_messages
from rltr_verl.trajectory import TRAJECTORY_FIELD, Trajectory

_LOG = logging.getLogger(__name__)

_FIELDS = ["prompts", "responses", "response_mask", "extra_fields", "raw_prompt"]


class FirstBatch:
    """Checks the first training batch that it is shown.

    Args:
        trainer: verl's trainer, for its tokenizer (it loads it after building its buffer) and its chat template
            arguments; without one nothing is checked.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._due = trainer, True
        self._template_of_run: ChatTemplate | None = None

    def check(self, keys: Sequence[str], partition_id: str) -> None:
        """Check the rows of ``keys``, the first time only; one line in the log.

        Raises:
            MaskError: the ids that would be trained are not exactly those that the policy sampled.
        """
        if not self._due or getattr(self._trainer, "tokenizer", None) is None:
            return
        self._due = False
        start = time.perf_counter()
        rows = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=_FIELDS)
        columns = [[_plain(value) for value in rows[name]] for name in _FIELDS]
        trained = [self._trained(key, *row) for key, *row in zip(keys, *columns, strict=True)]
        counted = f"{len(trained)} trajectories, {sum(trained)} trained tokens"
        # A warning, since the trainer's process shows no lower level.
        _LOG.warning("masks of the first batch: %s, ok (%.1f s)", counted, time.perf_counter() - start)

    def _trained(
        self, key: str, prompt: list[int], response: list[int], mask: list[int], extra: Mapping[str, Any], messages: Any
    ) -> int:
        """Trained tokens of one row, once it is known that they are the right ones."""
        where = f"masks of the first batch: trajectory {key}"
        if TRAJECTORY_FIELD not in extra:
            raise MaskError("no trajectory came with the ids", where=where, fix="use the agent loop rltr_planner.")
        trajectory = Trajectory.from_dict(json.loads(extra[TRAJECTORY_FIELD]))
        faults = check_masks(prompt, response, mask, trajectory, self._template(trajectory), read_messages(messages))
        if faults:
            more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
            fix = "let rollout and trainer use the same tokenizer and chat template; docs/masks.md explains the check."
            raise MaskError(f"{faults[0]}{more}", where=where, fix=fix)
        return sum(mask)

    def _template(self, trajectory: Trajectory) -> ChatTemplate:
        """The run's chat template. What stands between turns does not depend on the tools, so one serves all rows."""
        if self._template_of_run is None:
            kwargs = OmegaConf.select(self._trainer.config, "data.apply_chat_template_kwargs") or {}
            self._template_of_run = ChatTemplate(self._trainer.tokenizer, trajectory.tools, {**kwargs})
        return self._template_of_run


def _plain(value: Any) -> Any:
    """A row's value out of the tensors and wrappers that verl's queue hands out."""
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "data", value)
