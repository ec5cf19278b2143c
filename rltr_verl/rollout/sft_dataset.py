"""The cold start's conversations for verl's SFT trainer, with the ids of the rollout.

Chosen by verl's own ``data.custom_cls`` in ``recipes/rltr_coldstart_sft.yaml``. verl's dataset renders message by
message, which a template may answer with other ids than those of a rollout: Qwen3's drops or adds thoughts and puts the
results of one turn into one envelope. Here the ids are those that a rollout of the same turns has
(:mod:`rltr_verl.rollout.sft_rows`).
"""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import torch
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from rltr_verl.coldstart.loss import LossPolicy, read_loss
from rltr_verl.errors import DataError
from rltr_verl.rollout.sft_rows import RowBuilder, SftRow
from rltr_verl.rollout.sft_turns import FIXES, RowRefused
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.rows import read_messages, read_tools, without_none

EXACT = "_json"
"""Behind the name of the tools' column: one that holds them as JSON text, which is read in its place."""


class PlannerSFTDataset(MultiTurnSFTDataset):
    """verl's dataset with the ids and the mask of a rollout; text only.

    Further key of verl's node ``data``: ``rltr_loss``, the loss policy; null takes the file's column ``loss``, else the
    default of :mod:`rltr_verl.coldstart.loss`.

    ``tools`` may be JSON text; keys that parquet added as None are dropped.

    Raises:
        DataError: names the row whose tools cannot be read; on access, the row that cannot be trained.
        ConfigError: an unknown loss policy.
    """

    def __init__(self, parquet_files: Any, tokenizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        self._loss = (config or {}).get("rltr_loss")
        read_loss(self._loss)
        self._builders: dict[tuple[Any, ...], RowBuilder] = {}
        super().__init__(parquet_files, tokenizer, config, *args, **kwargs)

    def _read_files_and_process(self) -> None:
        super()._read_files_and_process()
        self.messages = [read_messages(messages) for messages in self.messages]
        self.tools = self._read_tools()
        self.losses = self._column("loss")
        self.selections = self._column("tool_selection")
        given = self._column(self.enable_thinking_key)
        self.enable_thinking = None if given is None else [self._thinking(value) for value in given]

    def _read_tools(self) -> list[list[dict[str, Any]] | None] | None:
        """One object for all rows with the same tools; builders are told apart by it."""
        exact = self.tools_key + EXACT
        key = exact if exact in self.dataframe.columns else self.tools_key
        given = self._column(key)
        if given is None:
            return None
        where, read = f"{self.files}, row {{}}, '{key}'", dict[str, list[dict[str, Any]] | None]()
        texts = [value if isinstance(value, str) else json.dumps(without_none(value)) for value in given]
        for row, text in enumerate(texts):
            if text not in read:
                read[text] = read_tools(text, where.format(row))
        return [read[text] for text in texts]

    def _column(self, key: str) -> list[Any] | None:
        """A column's values, None where a row has none; None where the file has no such column."""
        if key not in self.dataframe.columns:
            return None
        return [None if _is_missing(value) else value for value in self.dataframe[key].tolist()]

    def _thinking(self, given: Any) -> bool | None:
        """The row's value, else the default."""
        return self.enable_thinking_default if given is None else bool(given)

    @property
    def files(self) -> str:
        """The files' names, for messages."""
        return ", ".join(map(str, self.parquet_files))

    def policy(self, item: int) -> LossPolicy:
        """The loss policy of a row."""
        given = self.losses[item] if self._loss is None and self.losses is not None else self._loss
        return read_loss(given, where=f"{self.files}, row {item}, 'loss'")

    def builder(self, item: int) -> RowBuilder:
        """What makes this row; shared by rows with the same tools, policy and kind of prompt."""
        thinking = self.enable_thinking[item] if self.enable_thinking is not None else self.enable_thinking_default
        tools, policy = self.tools_of(item), self.policy(item)
        key = id(tools), thinking, policy
        if key not in self._builders:
            self._builders[key] = self._make_builder(tools or [], thinking, policy)
        return self._builders[key]

    def tools_of(self, item: int) -> list[dict[str, Any]] | None:
        """The tools that a row's prompt shows."""
        return self.tools[item] if self.tools is not None else None

    def _make_builder(self, tools: list[dict[str, Any]], thinking: bool | None, policy: LossPolicy) -> RowBuilder:
        kwargs = {} if thinking is None else {"enable_thinking": bool(thinking)}
        template = ChatTemplate(self.tokenizer, tools, {**(self.apply_chat_template_kwargs or {}), **kwargs})
        return RowBuilder(self.tokenizer, template, policy)

    def __getstate__(self) -> dict[str, Any]:
        """For workers of a data loader; builders hold caches that cannot be copied, and are made anew."""
        return {**self.__dict__, "_builders": {}}

    def row(self, item: int) -> SftRow:
        """Ids and masks of a row.

        Raises:
            RowRefused: it cannot be trained.
        """
        limit = self.max_length if self.truncation == "error" else 0
        return self.builder(item).build(self.messages[item], self.tools_of(item), limit)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        try:
            row = self.row(item)
        except RowRefused as refusal:
            raise DataError(refusal.problem, where=f"{self.files}, row {item}", fix=FIXES[refusal.kind]) from None
        return self._tensors(row)

    def _tensors(self, row: SftRow) -> dict[str, torch.Tensor]:
        """What verl's dataset returns: without padding, or padded on the right up to ``max_length``."""
        length = len(row.prompt_ids) + len(row.ids)
        kept = slice(-self.max_length, None) if self._cuts_left else slice(0, self.max_length)
        columns = {
            "input_ids": torch.tensor(row.input_ids)[kept],
            "position_ids": torch.arange(length)[kept],
            "loss_mask": torch.tensor(row.loss_mask)[kept],
        }
        if self.pad_mode == DatasetPadMode.NO_PADDING:
            return columns
        pad_id = self.tokenizer.pad_token_id
        columns["attention_mask"] = torch.ones_like(columns["input_ids"])
        fill = {name: 0 for name in columns} | {"input_ids": 0 if pad_id is None else pad_id}
        return {name: _padded(values, self.max_length, fill[name]) for name, values in columns.items()}

    @property
    def _cuts_left(self) -> bool:
        """verl cuts on the left only where it pads."""
        return self.pad_mode == DatasetPadMode.RIGHT and self.truncation == "left"


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def _padded(values: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=fill)
