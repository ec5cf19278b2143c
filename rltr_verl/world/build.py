"""Write a world folder and read it back.

    manifest.json      format version, seed, sizes, sha256 of every file
    facts.jsonl        the search corpus: {"key", "text"} a line
    {train,val,val_unseen}.parquet   rows in verl's format
    {train,val,val_unseen}.jsonl     the same queries, readable
    coldstart.parquet  the short-sighted teacher's conversations; ``tools`` is JSON text
    model/             the untrained tiny planner with its tokenizer

The folder appears at once and complete, or not at all: everything is written beside it and then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rltr_verl.errors import WorldError
from rltr_verl.tooling import Tool, load_tools, schemas
from rltr_verl.world.facts import (
    ATTRIBUTES,
    CITIES,
    EVENT_ATTRIBUTES,
    EVENT_DATES,
    EVENTS,
    NEW_NAMES,
    OLD_NAMES,
    REFERENCE_DATES,
    Facts,
    make_facts,
    make_sibling,
)
from rltr_verl.world.policies import Teacher, play
from rltr_verl.world.queries import LESSON_MIX, Query, word, wordings
from rltr_verl.world.splits import SPLITS, make_splits, shares

FORMAT, VERSION = "rltr_world", 2
"""Raise ``VERSION`` with any change that makes an older folder unusable or its figures incomparable."""

AGENT_NAME = "rltr_planner"
TOOL_NAMES = ("calculator", "days_between", "search")


@dataclass(frozen=True)
class WorldSizes:
    """How much a world holds: queries per split, conversations of the cold start and the siblings that share them."""

    train: int = 2000
    val: int = 128
    val_unseen: int = 96
    coldstart: int = 8000
    siblings: int = 40

    def __post_init__(self) -> None:
        """Every kind must occur in train and in the cold start."""
        if self.train < 100 or not 100 <= self.coldstart >= self.siblings >= 1 or min(self.val, self.val_unseen) < 1:
            fix = "use train and coldstart of 100 or more, val and val_unseen of 1 or more."
            raise WorldError(f"a world of {self} is too small", where="sizes", fix=fix)


DEFAULT_SIZES = WorldSizes()


@dataclass(frozen=True)
class World:
    """A complete world folder."""

    folder: Path
    seed: int
    sizes: WorldSizes

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def corpus(self) -> Path:
        return self.folder / "facts.jsonl"

    @property
    def coldstart(self) -> Path:
        return self.folder / "coldstart.parquet"

    def split(self, name: str) -> Path:
        """Parquet file of a split in :data:`rltr_verl.world.splits.SPLITS`."""
        return self.folder / f"{name}.parquet"


def build_world(
    folder: str | Path, seed: int = 1, sizes: WorldSizes = DEFAULT_SIZES, *, overwrite: bool = False
) -> World:
    """Build the world of ``seed`` in ``folder``; the same arguments give the same bytes.

    A folder that already holds exactly this world is kept as it is.

    Raises:
        WorldError: ``folder`` holds something else and ``overwrite`` is False, or is no world folder at all.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise WorldError("this is a file", where=str(target), fix="choose a folder.")
    if target.exists() and any(target.iterdir()):
        if not (target / "manifest.json").exists():
            raise WorldError("the folder holds other files", where=str(target), fix="choose a new or empty folder.")
        if not overwrite:
            return _same_world(target, seed, sizes)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        fresh = Path(scratch) / "world"
        _write_world(fresh, seed, sizes)
        if target.exists():
            os.replace(target, Path(scratch) / "replaced")
        os.replace(fresh, target)
    return World(target, seed, sizes)


def load_world(folder: str | Path) -> World:
    """Open a world folder.

    Raises:
        WorldError: no world is there, it was built by another version, or a file is missing.
    """
    path = Path(folder)
    manifest = _read_manifest(path)
    missing = [name for name in manifest["files"] if not (path / name).exists()]
    if missing:
        raise WorldError(f"{missing[0]} is missing", where=str(path), fix=_rebuild(path))
    return World(path, manifest["seed"], _read_sizes(path, manifest["sizes"]))


def load_world_tools(corpus: str | Path) -> dict[str, Tool]:
    """The world's three tools by name, ``search`` bound to ``corpus``."""
    return load_tools(TOOL_NAMES, {"search": {"corpus": str(corpus)}})


def query_row(query: Query, split: str, index: int) -> dict[str, Any]:
    """A query as a row of verl's RL parquet."""
    info = {
        "index": index,
        "split": split,
        "kind": query.kind,
        "lang": query.lang,
        "query": query.text,
        "needs": json.dumps(query.needs, ensure_ascii=False),
        "plan": json.dumps([asdict(call) for call in query.plan], ensure_ascii=False),
        "reference": query.reference,
    }
    return {
        "data_source": f"rltr_world/{query.kind}",
        "prompt": [{"role": "user", "content": query.text}],
        "agent_name": AGENT_NAME,
        "reward_model": {"style": "rule", "ground_truth": query.reference},
        "extra_info": info,
    }


def coldstart_rows(facts: Facts, train: list[Query], seed: int, sizes: WorldSizes) -> list[dict[str, Any]]:
    """The teacher's conversations: train queries, asked in sibling worlds, answered by the real tools."""
    rng = random.Random(f"coldstart {seed}")
    pools = {kind: [query for query in train if query.kind == kind] for kind in LESSON_MIX}
    asked = [rng.choice(pools[kind]) for kind, n in shares(LESSON_MIX, sizes.coldstart).items() for _ in range(n)]
    conversations = []
    for number in range(sizes.siblings):
        sibling = make_sibling(facts, seed, number)
        chosen = asked[number :: sizes.siblings]
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder) / "facts.jsonl"
            _write_jsonl(corpus, sibling.documents())
            conversations += _lesson(sibling, chosen, load_world_tools(corpus), Teacher(seed), rng)
    rng.shuffle(conversations)
    return conversations


def _lesson(
    sibling: Facts, queries: list[Query], tools: Mapping[str, Tool], teacher: Teacher, rng: random.Random
) -> list[dict[str, Any]]:
    """Conversations of one sibling world. ``tools`` is JSON text, since parquet would merge the tools' parameters."""
    callables = {name: tool.call for name, tool in tools.items()}
    described = json.dumps(schemas(tools), ensure_ascii=False)
    conversations = []
    for query in queries:
        asked = word(query.kind, query.subject, sibling, *rng.choice(wordings(query.kind)), rng)
        row = query_row(asked, "coldstart", rng.getrandbits(32))
        conversations.append({"messages": play(teacher, row, callables), "tools": described})
    return conversations


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a world of this version."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WorldError("no world here (manifest.json is missing)", where=str(path), fix=_rebuild(path)) from None
    except ValueError as error:
        raise WorldError(f"manifest.json is not JSON ({error})", where=str(path), fix=_rebuild(path)) from None
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if found != (FORMAT, VERSION):
        problem = f"{found[0]} version {found[1]} found, this package reads {FORMAT} version {VERSION}"
        raise WorldError(problem, where=str(path), fix=_rebuild(path))
    return manifest


def _read_sizes(path: Path, sizes: Any) -> WorldSizes:
    """The manifest's sizes; a package with other sizes than this one's wrote them if they do not fit."""
    try:
        return WorldSizes(**sizes)
    except TypeError as error:
        problem = f"the world's sizes are those of another version of this package ({error})"
        raise WorldError(problem, where=str(path), fix=_rebuild(path)) from None


def _rebuild(path: Path) -> str:
    return f"delete the folder and build it anew (rltr world build --out {path} --seed SEED)."


def _same_world(target: Path, seed: int, sizes: WorldSizes) -> World:
    """The world in ``target`` if it is exactly the one asked for."""
    world = load_world(target)
    if (world.seed, world.sizes) != (seed, sizes):
        problem = f"another world is here (seed {world.seed}, {world.sizes})"
        raise WorldError(problem, where=str(target), fix="choose another folder, or overwrite it (--overwrite).")
    return world


def _write_world(folder: Path, seed: int, sizes: WorldSizes) -> None:
    facts = make_facts(seed)
    folder.mkdir()
    _write_jsonl(folder / "facts.jsonl", facts.documents())
    splits = make_splits(facts, seed, {split: getattr(sizes, split) for split in SPLITS})
    rows = {split: [query_row(q, split, i) for i, q in enumerate(queries)] for split, queries in splits.items()}
    for split in SPLITS:
        _write_parquet(folder / f"{split}.parquet", rows[split])
        _write_jsonl(folder / f"{split}.jsonl", (row["extra_info"] for row in rows[split]))
    conversations = coldstart_rows(facts, splits["train"], seed, sizes)
    _write_parquet(folder / "coldstart.parquet", conversations)
    _write_model(folder / "model", conversations, seed)
    _write_manifest(folder, seed, sizes)


def _write_model(folder: Path, conversations: list[dict[str, Any]], seed: int) -> None:
    """Tokenizer and untrained model. torch and transformers are imported here: reading a world needs neither."""
    from rltr_verl.world.model import make_model, make_tokenizer, save_model

    tokenizer = make_tokenizer(_tokenizer_texts(conversations), _names())
    save_model(folder, make_model(tokenizer, seed), tokenizer)


def _names() -> list[str]:
    """What a planner copies in one piece."""
    attributes = ATTRIBUTES | EVENT_ATTRIBUTES
    return [*CITIES, *OLD_NAMES, *NEW_NAMES, *EVENTS, *attributes, *attributes.values()]


def _tokenizer_texts(conversations: list[dict[str, Any]]) -> Iterable[str]:
    """What BPE learns from: the conversations, and each number and date often enough to become a token."""
    for conversation in conversations:
        yield from (message["content"] for message in conversation["messages"])
    dates = [day.isoformat() for day in (*REFERENCE_DATES, *EVENT_DATES)]
    for text in [str(number) for number in range(10, 100)] + dates:
        yield from [text] * len(conversations)


def _write_manifest(folder: Path, seed: int, sizes: WorldSizes) -> None:
    """Written last: a folder with a manifest is complete."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    manifest = {"format": FORMAT, "version": VERSION, "seed": seed, "sizes": asdict(sizes), "files": digests}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _write_jsonl(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    path.write_text("".join(lines), encoding="utf-8")


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)
