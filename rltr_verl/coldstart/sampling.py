"""Step 1 of the cold start: a teacher plays every query n times.

Every finished sample is appended at once. A run that is stopped, killed or fails is simply started again: it makes what
is not there yet, and what failed. Only what was in flight is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltr_verl.coldstart import run_file
from rltr_verl.coldstart.crew import Crew, SamplingStopped, Watch
from rltr_verl.coldstart.queries import QueryOptions, QueryStore, Skipped, read_queries
from rltr_verl.coldstart.recording import Recorder, Summary, summary_of
from rltr_verl.coldstart.records import Task
from rltr_verl.coldstart.samples import read_past
from rltr_verl.coldstart.store import Appender, Folder, write_lines
from rltr_verl.coldstart.teacher import Teacher, build_teacher
from rltr_verl.coldstart.work import Work
from rltr_verl.config import RltrSettings

if TYPE_CHECKING:
    from rltr_verl.rollout.turns import Planner

Build = Callable[[RltrSettings, Any], Teacher]
"""(settings, tokenizer) -> teacher."""

__all__ = ["Build", "SampleOptions", "SamplingStopped", "sample"]


@dataclass(frozen=True)
class SampleOptions:
    """How a run samples.

    Attributes:
        n: samples of each query.
        seed: of the run; each sample has its own, drawn from it, the query's id and the sample's number.
        queries: how the file of queries is read.
        ray: address of a Ray cluster, ``auto`` for the one that this machine belongs to, ``local`` for one that is
            started here and now; None samples in this process.
        ray_workers: processes that play, on Ray.
    """

    n: int = 8
    seed: int = 1
    queries: QueryOptions = field(default_factory=QueryOptions)
    ray: str | None = None
    ray_workers: int = 2


def sample(
    folder: Folder | Path,
    queries: Path,
    settings: RltrSettings,
    model: str,
    options: SampleOptions | None = None,
    *,
    watch: Watch | None = None,
    build: Build = build_teacher,
) -> Summary:
    """Let the teacher of ``settings`` play each query ``n`` times, and append each sample to ``samples.jsonl``.

    Finished samples of earlier runs stay and are not made again. Ctrl-C and SIGTERM end the run early: what is in
    flight is dropped, and ``interrupted`` is set in the summary; a second one ends the process.

    Args:
        folder: of the cold start; made if it is not there.
        queries: see :func:`rltr_verl.coldstart.queries.read_queries`.
        settings: the recipe node of the planner that is to learn; ``rltr.teacher`` says who teaches.
        model: folder or hub name of that planner: its tokenizer measures and renders.
        watch: gets the figures about twice a second, and at the end.
        build: makes the teacher; with Ray in each worker, so it must be importable there.

    Returns:
        The figures, and whether the run was interrupted.

    Raises:
        ConfigError, ModelError: settings or model cannot be used, or are not those of the samples in the folder.
        DataError: no row of the queries can be used, or one cannot and ``strict``.
        DiskError: the folder cannot be written, or another process is writing to it.
        SamplingStopped: the teacher fails for good; names its reason.
    """
    folder = folder if isinstance(folder, Folder) else Folder(folder)
    inputs = _Inputs.load(queries, settings, model, options or SampleOptions())
    with Appender(folder.samples) as file:
        recorder, tasks = inputs.resume(folder, file)
        if recorder.summary.left:
            crew = Crew(recorder, tasks, settings.teacher, watch or (lambda _: None))
            asyncio.run(crew.run(lambda: inputs.teacher(build)))
    return recorder.tick()


@dataclass(frozen=True)
class _Inputs:
    """What a run starts from, checked."""

    path: Path
    settings: RltrSettings
    model: str
    options: SampleOptions
    planner: Planner
    tokenizer: Any
    queries: QueryStore
    skipped: Skipped

    @classmethod
    def load(cls, path: Path, settings: RltrSettings, model: str, options: SampleOptions) -> _Inputs:
        from rltr_verl.preflight import load_tokenizer
        from rltr_verl.rollout.turns import Planner

        tokenizer = load_tokenizer(model, "--model")
        planner = Planner.build(settings, tokenizer)
        return cls(path, settings, model, options, planner, tokenizer, *read_queries(path, planner, options.queries))

    def resume(self, folder: Folder, file: Appender) -> tuple[Recorder, Iterator[Task]]:
        """The figures so far, and the tasks that are left. The caller holds ``file``, so nobody else is writing."""
        wanted = run_file.depends_on(self.settings, self.tokenizer, self.planner.schemas, self.options.seed)
        run_file.keep(folder, wanted, **self._facts())
        _write_skipped(folder, self.skipped)
        work = Work(self.queries, self.options.n, self.options.seed)
        past = read_past(folder, work.wants)
        summary = summary_of(work.total, len(self.queries), self.skipped)
        return Recorder(file, past, summary, _name(self.settings)), work.left(past.final)

    def teacher(self, build: Build) -> Teacher:
        """In this process, or on Ray."""
        if self.options.ray is None:
            return build(self.settings, self.tokenizer)
        from rltr_verl.coldstart.ray_pool import RayPool

        return RayPool(self.options.ray, self.options.ray_workers, self.settings, self.model, build)

    def _facts(self) -> dict[str, Any]:
        """What ``run.json`` tells besides: the later steps ask the same teacher."""
        teacher = self.settings.teacher.model_dump(mode="json", exclude_unset=True)
        return {"model": self.model, "queries": str(self.path), "n": self.options.n, "teacher": teacher}


def _name(settings: RltrSettings) -> str:
    teacher = settings.teacher
    return teacher.policy if teacher.backend == "scripted" else str(teacher.model)


def _write_skipped(folder: Folder, skipped: Skipped) -> None:
    if skipped.lines:
        write_lines(folder.skipped, skipped.lines)
    else:
        folder.skipped.unlink(missing_ok=True)
