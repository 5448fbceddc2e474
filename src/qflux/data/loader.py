"""Reading ahead: while a step computes, threads prepare the next ones.

Threads, not processes: reading tensors and decoding images happen outside Python's lock, nothing has to be pickled or
sent through shared memory, and a thread can't die without its exception arriving here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

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
    pool = ThreadPoolExecutor(workers, thread_name_prefix="qflux-loader")
    try:
        ahead: deque[tuple[T, Future[R]]] = deque(
            (item, pool.submit(work, item)) for item in islice(remaining, 2 * workers)
        )
        while ahead:
            item, future = ahead.popleft()
            yield _result(future, lambda item=item: describe(item))  # type: ignore[misc]
            ahead.extend((item, pool.submit(work, item)) for item in islice(remaining, 1))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


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
