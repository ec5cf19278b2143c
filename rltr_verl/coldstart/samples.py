"""Reading back what was sampled, one sample at a time: memory holds ids and digests only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rltr_verl.coldstart.outcomes import turns_digest
from rltr_verl.coldstart.records import Outcome, Sample, Usage
from rltr_verl.coldstart.store import Folder, read_lines
from rltr_verl.trajectory import Trajectory


def read_samples(folder: Folder) -> Iterator[Sample]:
    """The newest line of each sample in ``samples.jsonl``: the final ones in the order of the file, then those that
    have failed so far.

    A final sample (:attr:`rltr_verl.coldstart.records.Outcome.is_final`) is never made again, so its line is the only
    one that is final. A failed one may have several lines; they are read a second time, in place of being kept.

    Raises:
        DataError: names the line that is no JSON object.
    """
    failed: dict[str, int] = {}
    for place, line in enumerate(read_lines(folder.samples)):
        if Outcome(line["outcome"]).is_final:
            failed.pop(line["id"], None)
            yield Sample.from_dict(line)
        else:
            failed[line["id"]] = place
    places = frozenset(failed.values())
    if places:
        lines = enumerate(read_lines(folder.samples))
        yield from (Sample.from_dict(line) for place, line in lines if place in places)


@dataclass
class Past:
    """What earlier runs left.

    Attributes:
        final: ids of the samples that are not made again.
        turns: digests of the turns of the samples that are ``ok``.
        outcomes: how many of the final samples came to what.
        usage: of all attempts, failed ones too.
    """

    final: set[str] = field(default_factory=set)
    turns: set[bytes] = field(default_factory=set)
    outcomes: dict[Outcome, int] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)


def read_past(folder: Folder, wanted: Callable[[Mapping[str, Any]], bool]) -> Past:
    """What ``samples.jsonl`` says.

    Args:
        wanted: whether a sample's ``task``, as it stands in the file, is one of the run's; the others do not count in
            ``outcomes``. May raise where the task was made from another prompt.
    """
    past = Past()
    for line in read_lines(folder.samples):
        outcome = Outcome(line["outcome"])
        past.usage += Usage(**line["usage"])
        if not outcome.is_final:
            continue
        if outcome is Outcome.OK:
            past.turns.add(turns_digest(line["task"]["query_id"], Trajectory.from_dict(line["trajectory"])))
        if wanted(line["task"]):
            past.final.add(line["id"])
            past.outcomes[outcome] = past.outcomes.get(outcome, 0) + 1
    return past


def prompt_digest(prompt: Any, info: Mapping[str, Any]) -> bytes:
    """8 bytes of what a teacher is asked: the prompt's messages and the row's choice of tools."""
    text = json.dumps([list(prompt), info.get("tool_selection")], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
