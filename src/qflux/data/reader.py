"""Reading ahead: while a step computes, threads prepare the next ones.

Threads, not processes: reading tensors and decoding images happen outside Python's lock, nothing has to be pickled or
sent through shared memory, and a thread can't die without its exception arriving here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds of waiting before the user is told what for."""

FAREWELL = 5.0
"""Seconds that work at hand has to end when nobody wants it any more."""

T = TypeVar("T")
R = TypeVar("R")


def read_ahead(
    work: Callable[[T], R], items: Iterable[T], workers: int, describe: Callable[[T], str] = str
) -> Generator[R, None, None]:
    """`work` of every item, in order, done by `workers` threads up to twice as many items ahead; 0 works in place.

    An exception of `work` is raised when its item is due, and ends the rest. `describe` names an item in messages.
    """
    if workers == 0:
        yield from map(work, items)
        return
    remaining = iter(items)
    pool = _Pool(workers)
    try:
        ahead: deque[tuple[T, Future[R]]] = deque(
            (item, pool.submit(work, item)) for item in islice(remaining, 2 * workers)
        )
        while ahead:
            item, future = ahead.popleft()
            yield _result(future, lambda item=item: describe(item))  # type: ignore[misc]
            ahead.extend((item, pool.submit(work, item)) for item in islice(remaining, 1))
    finally:
        pool.close()


class _Pool:
    """Threads that end with the pool, and that a read that never returns can't make keep the process alive."""

    def __init__(self, workers: int) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[Any], Any], Any] | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"qflux-loader-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[T], R], item: T) -> Future[R]:
        future: Future[R] = Future()
        self._tasks.put((future, work, item))
        return future

    def close(self) -> None:
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        # A thread inside torch when the interpreter ends would abort the process, so the work at hand is waited for.
        deadline = time.monotonic() + FAREWELL
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            future, work, item = task
            try:
                future.set_result(work(item))
            except BaseException as error:  # whatever it is, it belongs to who waits for the result
                future.set_exception(error)


def _result(future: Future[R], describe: Callable[[], str]) -> R:
    waited = 0.0
    while True:
        try:
            return future.result(timeout=PATIENCE)
        except TimeoutError:
            if future.done():  # the work itself timed out
                return future.result()
            waited += PATIENCE
            logger.warning("reading %s has taken %.0f s so far; is the disk or the network stuck?", describe(), waited)
