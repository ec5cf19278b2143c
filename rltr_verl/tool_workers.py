"""Where tools run: synchronous ones in threads, asynchronous ones in an event loop of their own.

Neither a thread that hangs nor a coroutine that blocks its loop stops the rollout: both are left behind, others take
their place, and as daemons they do not keep the process from ending. What cannot be survived is what ends or stops the
whole process: ``os._exit``, a crash in native code, native code that never gives up the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import os
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

_IDLE_S = 30.0
_BLOCKED_S = 0.5


class ToolExit(Exception):
    """A tool called ``sys.exit`` or raised something else that must not pass through an event loop."""


class CallTimeout(Exception):
    """A call has not ended in time. Not ``TimeoutError``, which a tool may raise itself."""


class Mailbox:
    """Hands callbacks to an event loop from other threads; many at once wake it once.

    Waking it for each, threads that end together would wait for each other and for the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: collections.deque[tuple[Callable[..., Any], tuple[Any, ...]]] = collections.deque()
        self._woken = False

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Let the loop call ``callback(*args)``; nothing happens where the loop is closed."""
        self._waiting.append((callback, args))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # first: what is posted from here on wakes the loop again
        while self._waiting:
            callback, args = self._waiting.popleft()
            callback(*args)


class _Here:
    """The mailbox of the loop that asks; one loop after another may."""

    def __init__(self) -> None:
        self._last: Mailbox | None = None

    def mailbox(self) -> Mailbox:
        loop, last = asyncio.get_running_loop(), self._last  # read once: a loop of another thread may ask as well
        if last is None or last.loop is not loop:
            self._last = last = Mailbox(loop)
        return last


class Job:
    """One call under way.

    ``future`` belongs to the loop that asked. ``ended``: the call itself has returned. ``given_up``: nobody waits.

    Args:
        late: called, in a thread, with a result that nobody takes: the call was given up and returned all the same.
    """

    def __init__(self, late: Callable[[Any], None] | None = None) -> None:
        self._mailbox = _HERE.mailbox()
        self.future: asyncio.Future[Any] = self._mailbox.loop.create_future()
        self.ended = False
        self.task: asyncio.Task[Any] | None = None
        self._late = late
        self.given_up = False
        self._lock = threading.Lock()

    async def result(self, timeout_s: float) -> Any:
        """The call's result; gives the call up after ``timeout_s``, or when this is cancelled.

        Raises :class:`CallTimeout`, or what the call raised.
        """
        timer = self._mailbox.loop.call_later(timeout_s, self._expire)
        try:
            return await self.future
        except asyncio.CancelledError:
            self._drop_if_there()
            raise
        finally:
            timer.cancel()
            if not self.ended:
                self.give_up()

    def give_up(self) -> None:
        """Stop waiting; a coroutine is cancelled, a thread is left to itself."""
        with self._lock:
            if self.ended:
                return
            self.given_up = True
        if self.task is not None:
            self.task.get_loop().call_soon_threadsafe(self.task.cancel)

    def end(self, result: Any, error: BaseException | None) -> None:
        """Hand over how the call ended; called from where it ran."""
        with self._lock:
            self.ended = True
            late = self._late if self.given_up and error is None else None
        if late is not None:
            late(result)
        else:
            self._mailbox.post(self._resolve, result, error)

    def _resolve(self, result: Any, error: BaseException | None) -> None:
        if error is not None:
            if not self.future.done():
                self.future.set_exception(error)
        elif not self.future.done():
            self.future.set_result(result)
        elif not self.given_up:  # it expired or was cancelled after the call had ended
            self._drop(result)

    def _drop_if_there(self) -> None:
        """The result came, but who waited was cancelled before it could take it."""
        if self.future.done() and not self.future.cancelled() and self.future.exception() is None:
            self._drop(self.future.result())

    def _drop(self, result: Any) -> None:
        if self._late is not None:
            THREADS.submit(functools.partial(self._late, result))

    def _expire(self) -> None:
        if not self.future.done():
            self.future.set_exception(CallTimeout())


def _harmless(error: BaseException) -> BaseException:
    """``error``, or one that may cross a future: a SystemExit would end the event loop with it.

    What the tool held when it failed is let go here: it may be large, or take its time to go.
    """
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # which no future takes
        return error
    described = traceback.format_exception_only(error)[-1].strip()  # also where str(error) fails
    wrapped = ToolExit(f"the tool raised {described}")
    wrapped.__cause__ = error
    return wrapped


class Threads:
    """A pool that grows: a call takes an idle thread or a new one, so that calls that hang take nothing from others."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[tuple[Job, Callable[[], Any]]]] = []
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], Any], late: Callable[[Any], None] | None = None) -> Job:
        """Run ``call()`` in a thread. Raises RuntimeError where the system gives no further one."""
        job = Job(late)
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name="rltr-tool", daemon=True).start()
        inbox.put((job, call))
        return job

    def _serve(self, inbox: queue.SimpleQueue[tuple[Job, Callable[[], Any]]]) -> None:
        while True:
            try:
                job, call = inbox.get(timeout=_IDLE_S)
            except queue.Empty:
                if self._leave(inbox):
                    return
                continue
            result, error = _outcome(call)
            del call
            with self._lock:
                self._idle.append(inbox)
            job.end(result, error)
            del job, result, error

    def _leave(self, inbox: queue.SimpleQueue[Any]) -> bool:
        """Whether the thread of ``inbox`` may end: nobody has taken it meanwhile."""
        with self._lock:
            if inbox not in self._idle:
                return False
            self._idle.remove(inbox)
            return True


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # whatever a tool raises is told to who waits for it
        return None, _harmless(error)


class ToolLoop:
    """An event loop in a thread of its own; replaced when a coroutine blocks it."""

    def __init__(self) -> None:
        self._mailbox: Mailbox | None = None
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], Awaitable[Any]]) -> Job:
        """Run ``await call()`` in the loop."""
        job = Job()
        self._running().post(self._start, job, call)
        return job

    def check(self, name: str) -> None:
        """After a call of the tool ``name`` has timed out: replace the loop unless it answers soon."""
        mailbox, answered = self._running(), threading.Event()
        mailbox.post(answered.set)
        timer = threading.Timer(_BLOCKED_S, self._replace_unless, (answered, mailbox, name))
        timer.daemon = True
        timer.start()

    def _running(self) -> Mailbox:
        with self._lock:
            if self._mailbox is None:
                loop = asyncio.new_event_loop()
                self._mailbox = Mailbox(loop)
                threading.Thread(target=_run_forever, args=(loop,), name="rltr-tool-loop", daemon=True).start()
            return self._mailbox

    def _replace_unless(self, answered: threading.Event, mailbox: Mailbox, name: str) -> None:
        with self._lock:
            if answered.is_set() or self._mailbox is not mailbox:
                return
            self._mailbox = None
        problem = "an async tool blocks its event loop (tool '%s' timed out); others wait with it."
        logger.error(problem + " Fix: await in it, or write it as a plain def, which runs in a thread.", name)

    @staticmethod
    def _start(job: Job, call: Callable[[], Awaitable[Any]]) -> None:
        if not job.given_up:
            job.task = asyncio.get_running_loop().create_task(_await(job, call))
            if job.given_up:  # meanwhile, by a thread that saw no task yet
                job.task.cancel()


async def _await(job: Job, call: Callable[[], Awaitable[Any]]) -> None:
    result, error = None, None
    try:
        result = await call()
    except BaseException as raised:  # see _outcome; a cancelled call has nobody waiting
        error = _harmless(raised)
    job.end(result, error)


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # raised by a task that a tool started itself
            logger.exception("a task of a tool tried to end the process")


_HERE = _Here()
THREADS = Threads()
LOOP = ToolLoop()
"""One of each a process: tools keep connections from one run of the rollout's loop to the next."""


def _start_anew() -> None:
    """In a forked process: the threads stayed behind."""
    THREADS.__init__()  # type: ignore[misc]
    LOOP.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_start_anew)
