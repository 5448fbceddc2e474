"""Reading ahead: while a step computes, threads prepare the next ones.

Threads, not processes: reading tensors and decoding images happen outside Python's lock, nothing has to be pickled or
sent through shared memory, and a thread can't die without its exception arriving here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds of waiting before the user is told what for."""

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
    """Threads that do not keep the process alive: a read that never returns must not block its end."""

    def __init__(self, workers: int) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[Any], Any], Any] | None] = SimpleQueue()
        self._workers = workers
        self._closed = False
        for number in range(workers):
            threading.Thread(target=self._run, name=f"qflux-loader-{number}", daemon=True).start()

    def submit(self, work: Callable[[T], R], item: T) -> Future[R]:
        future: Future[R] = Future()
        self._tasks.put((future, work, item))
        return future

    def close(self) -> None:
        self._closed = True
        for _ in range(self._workers):
            self._tasks.put(None)

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
