"""verl's parquet from a file of queries.

Every row is checked before anything is written. What is good is kept in a scratch file meanwhile, so that memory does
not grow with the texts; then each row goes to its split. The same input, options and seed give the same files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rltr_verl.data.pool import Pool, Problems, RowChecks, Seen, checked_rows
from rltr_verl.data.prompt_files import Language, language_of, load_planner_prompt, prompt_messages
from rltr_verl.data.query import Query
from rltr_verl.data.summary import SPLITS, Summary
from rltr_verl.data.writing import ParquetFileWriter, data_row
from rltr_verl.errors import ConfigError, DataError, DiskError
from rltr_verl.judge.prompt_files import PromptPack

if TYPE_CHECKING:
    from rltr_verl.rollout.turns import Planner

VAL_SHARE = 0.05


def _silent(_: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class DataOptions:
    """How the data is built.

    Attributes:
        val: a file of validation queries of its own; its queries are dropped from the training file.
        val_share: share of the queries that validate, where ``val`` is None; None: 0.05 in a folder, 0 in a file.
        language: the prompt's language; None chooses by each query's own.
        prompt: a prompt for all rows instead of the shipped ones; ``no_prompt`` leaves the query alone in the prompt.
        seed: decides which queries validate.
        name: ``data_source`` of every row; None: the stem of the file of queries.
        ignore: fields of the file to leave out.
        planner: measures prompts and knows the tools; None leaves both unchecked.
        max_prompt_tokens: longest allowed prompt, tools included; needs ``planner``.
        overwrite: replace files that are there.
        keep_first: rows of ``Summary.first``.
        advance: told of progress, see :func:`rltr_verl.data.reading.iter_rows`.
    """

    val: Path | None = None
    val_share: float | None = None
    language: Language | None = None
    prompt: PromptPack | None = None
    no_prompt: bool = False
    seed: int = 1
    name: str | None = None
    ignore: frozenset[str] = frozenset()
    planner: Planner | None = None
    max_prompt_tokens: int | None = None
    overwrite: bool = False
    keep_first: int = 0
    advance: Callable[[int], None] = field(default=_silent, repr=False)

    def prompt_for(self, query: str) -> tuple[Language, PromptPack | None]:
        """The query's language, and the prompt that it gets."""
        language = self.language or language_of(query)
        if self.no_prompt:
            return language, None
        return language, self.prompt or load_planner_prompt(language)

    def tokens(self, query: Query) -> int:
        """Tokens of the query's prompt, with the row's tools shown."""
        assert self.planner is not None
        shown = self.planner.shown({"tool_selection": query.tools, "index": query.row})
        messages = prompt_messages(self.prompt_for(query.query)[1], query.query)
        return len(self.planner.template.prompt_ids(messages, list(shown.values())))


def build_data(source: Path, out: Path | None = None, options: DataOptions | None = None) -> Summary:
    """Check the queries of ``source`` and write them as verl's parquet.

    Queries that stand there before (equal, or equal after NFKC and case folding, spaces and the closing mark
    aside) are dropped, so that no query is in both splits.

    Args:
        source: JSON lines, CSV or parquet with the fields :data:`rltr_verl.data.query.FIELDS`.
        out: a folder for ``train.parquet`` and ``val.parquet``, or one ``.parquet`` file for all rows; None only
            checks. Files appear complete or not at all.
        options: see :class:`DataOptions`.

    Raises:
        ConfigError: options that contradict each other.
        DataError: rows are wrong (all are counted, the first 20 named), or nothing is left to train on.
        DiskError: the files cannot be written.
    """
    options = options or DataOptions()
    targets = _targets(source, out, options)
    home = next(iter(targets.values())).parent if targets else None
    nearest = home and next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".rltr_data.", dir=nearest) as scratch:
            return _build(source, targets, Path(scratch), options)
    except OSError as error:
        where, fix = str(home or tempfile.gettempdir()), "choose another folder or free some space."
        raise DiskError(f"cannot be written ({error.strerror or error})", where=where, fix=fix) from None


def _build(source: Path, targets: Mapping[str, Path], scratch: Path, options: DataOptions) -> Summary:
    summary = Summary()
    pools, tokens = _pools(source, scratch, options, summary)
    fresh = {split: scratch / f"{split}.parquet" for split in targets}
    with ExitStack() as stack:
        writers = {split: stack.enter_context(ParquetFileWriter(path)) for split, path in fresh.items()}
        for name, pool in pools.items():
            limit = pool.lowest(_val_share(options, targets)) if name == "train" else -1
            for place, query in enumerate(pool.queries()):
                split = "val" if pool.ranks[place] <= limit else name
                _keep(query, split, options, source, summary, writers)
                if tokens[name]:
                    summary.prompt_tokens[split].append(tokens[name][place])
    _move(fresh, targets, summary)
    return summary


def _pools(
    source: Path, scratch: Path, options: DataOptions, summary: Summary
) -> tuple[dict[str, Pool], dict[str, Sequence[int]]]:
    """The good rows of each file, and their prompts' tokens. Raises DataError if any row is wrong or none is left."""
    files = {"val": options.val, "train": source} if options.val else {"train": source}
    seen: Seen = {}
    problems = Problems()
    pools: dict[str, Pool] = {}
    tokens: dict[str, Sequence[int]] = {}
    for split, path in files.items():
        pools[split] = pool = Pool(scratch / f"{split}_pool.parquet", split, options.seed)
        checks = RowChecks(options.planner, options.tokens if options.planner else None, options.max_prompt_tokens)
        summary.dropped += pool.fill(checked_rows(path, options.ignore, options.advance), seen, checks, problems)
        tokens[split] = checks.tokens
    summary.rows = summary.dropped.pop("read", 0)
    problems.raise_if_any(summary.rows)
    for split, pool in pools.items():
        if not pool.ranks:
            raise DataError("no query is left", where=str(files[split]), fix="give at least one that is not dropped.")
    return pools, tokens


def _keep(
    query: Query,
    split: str,
    options: DataOptions,
    source: Path,
    summary: Summary,
    writers: Mapping[str, ParquetFileWriter],
) -> None:
    language, prompt = options.prompt_for(query.query)
    row = data_row(query, prompt, language=language, split=split, source=options.name or source.stem)
    summary.add(query, language, row["extra_info"]["prompt_version"], split)
    if len(summary.first) < options.keep_first:
        summary.first.append(row)
    if split in writers:
        writers[split].add(row)


def _move(fresh: Mapping[str, Path], targets: Mapping[str, Path], summary: Summary) -> None:
    """Put complete files in their places."""
    for split, path in targets.items():
        if summary.count("queries", split=split):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(fresh[split], path)
            summary.files[split] = path
        elif path.exists():  # of an earlier build: its queries may now stand in the other file
            path.unlink()


def _val_share(options: DataOptions, targets: Mapping[str, Path]) -> float:
    if options.val is not None or list(targets) == ["train"]:
        return 0
    return VAL_SHARE if options.val_share is None else options.val_share


def _targets(source: Path, out: Path | None, options: DataOptions) -> dict[str, Path]:
    """Split -> file to write."""
    if options.val is not None and options.val_share is not None:
        raise ConfigError("both --val and --val-share are given", where="--val-share", fix="give one of them.")
    if options.val_share is not None and not 0 <= options.val_share < 1:
        raise ConfigError(f"{options.val_share} is no share", where="--val-share", fix="give 0 or more, less than 1.")
    if options.max_prompt_tokens is not None and options.planner is None:
        raise ConfigError("prompts cannot be measured without a model", where="--max-prompt-tokens", fix="add --model.")
    if out is None:
        return {}
    if out.suffix in (".jsonl", ".json", ".csv"):
        raise ConfigError(f"'{out}' is no parquet file", where="--out", fix="give a folder or a .parquet file.")
    one_file = out.suffix == ".parquet"
    if one_file and (options.val is not None or options.val_share):
        raise ConfigError("one file cannot hold two splits", where="--out", fix="give a folder.")
    files = {"train": out} if one_file else {split: out / f"{split}.parquet" for split in SPLITS}
    for path in files.values():
        if any(given is not None and path.resolve() == given.resolve() for given in (source, options.val)):
            raise ConfigError("the file of queries would be replaced", where="--out", fix="write elsewhere.")
        if path.exists() and not options.overwrite:
            raise DataError("the file is there already", where=str(path), fix="write elsewhere, or add --overwrite.")
    return files
