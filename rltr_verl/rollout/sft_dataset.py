"""The cold start's conversations for verl's SFT trainer, with the tools as the rollout shows them.

Chosen by verl's own ``data.custom_cls`` in ``recipes/rltr_coldstart_sft.yaml``.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from rltr_verl.rows import read_messages, read_tools


class PlannerSFTDataset(MultiTurnSFTDataset):
    """verl's dataset, except that ``tools`` may be JSON text and that keys which parquet added as None are dropped.

    Raises :class:`rltr_verl.errors.DataError`, naming the row, for tools that cannot be read.
    """

    def _read_files_and_process(self) -> None:
        super()._read_files_and_process()
        self.messages = [read_messages(messages) for messages in self.messages]
        if self.tools is not None:
            where = f"{', '.join(map(str, self.parquet_files))}, row {{}}, '{self.tools_key}'"
            given = [None if value is pd.NA else value for value in self.tools]
            self.tools = [read_tools(value, where.format(row)) for row, value in enumerate(given)]

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        return read_messages(super()._build_messages(example))
