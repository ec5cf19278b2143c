"""Which samples are to be made, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rltr_verl.coldstart.queries import QueryStore
from rltr_verl.coldstart.records import Task, sample_seed
from rltr_verl.coldstart.samples import prompt_digest
from rltr_verl.errors import DataError


class Work:
    """The tasks of a run: n of each query.

    All queries get their first sample before any gets its second: a run that is stopped, or whose budget is spent,
    has served all queries alike, and a larger n later goes on where a smaller one ended.
    """

    def __init__(self, queries: QueryStore, n: int, seed: int) -> None:
        self._queries, self._n, self._seed = queries, n, seed

    @property
    def total(self) -> int:
        """Tasks, done or not."""
        return len(self._queries) * self._n

    def wants(self, task: Mapping[str, Any]) -> bool:
        """Whether a task, as it stands in ``samples.jsonl``, is one of this run's.

        Raises:
            DataError: it was made from another prompt or with other tools than its query has now.
        """
        name = task["query_id"]
        now = self._queries.digest(name)
        if now is None:
            return False
        if now != prompt_digest(task["prompt"], task["info"]):
            problem = "its prompt or its tools are not those that it was sampled with before"
            fix = "give the changed query an id of its own, or choose another folder."
            raise DataError(problem, where=f"query '{name}'", fix=fix)
        return task["number"] < self._n

    def left(self, final: Collection[str]) -> Iterator[Task]:
        """The tasks whose ids are not in ``final``, made one by one."""
        for number in range(self._n):
            for place, name in enumerate(self._queries.ids):
                if f"{name}/{number}" not in final:
                    query = self._queries[place]
                    yield Task(name, number, sample_seed(self._seed, name, number), query.prompt, query.info)
