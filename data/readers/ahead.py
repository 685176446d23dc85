"""Rows of a part in order, while threads look at the files of those to come: each file waits for storage, and a table
of 200,000 clips is one part.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

log = logging.getLogger(__name__)

AT_ONCE = 8
ROWS_AHEAD = 256  # of which few may have a file; Koala-36M's rows have one where somebody has downloaded it
HEAVY_AHEAD = 8  # rows that hold a clip themselves
TOLD_EVERY_S = 30.0

Row = TypeVar("Row")
Found = TypeVar("Found")


def in_order(
    rows: Iterable[Row],
    begin: Callable[[Row, Executor], Future[Found] | None],
    part: str,
    *,
    is_heavy: Callable[[Row], bool] = lambda row: False,
    at_once: int = AT_ONCE,
    told_every_s: float = TOLD_EVERY_S,
) -> Generator[tuple[Row, Future[Found] | None], None, None]:
    """Each row with what `begin` gave for it: what an executor does for this row, or None. `begin` is called in the
    order of rows, ahead of them. An error of `rows` comes after the rows before it; one of an executor is in the
    future of its row alone. A caller that leaves it early closes it. Tells of a long `part` how far it is. Of rows that
    are heavy few are held."""
    rest, ended = iter(rows), False
    failure: Exception | None = None
    waiting: deque[tuple[Row, Future[Found] | None]] = deque()
    begun = heavy = number = 0
    began = told = time.monotonic()
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="files ahead")
    try:
        while waiting or not ended:
            enough = ended or begun >= 2 * at_once or heavy >= HEAVY_AHEAD or len(waiting) >= ROWS_AHEAD
            if waiting and (enough or _is_done(waiting[0][1])):
                row, future = waiting.popleft()
                begun -= future is not None
                heavy -= is_heavy(row)
                yield row, future
                number += 1
                if (now := time.monotonic()) - told > told_every_s:
                    log.info("index of %s: %s rows are read in %.0f s", part, f"{number:,}", now - began)
                    told = now
                continue
            try:
                row = next(rest)
            except StopIteration:
                ended = True
                continue
            except Exception as error:
                ended, failure = True, error
                continue
            future = begin(row, pool)
            begun += future is not None
            heavy += is_heavy(row)
            waiting.append((row, future))
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(cancel_futures=True)


def _is_done(future: Future[Found] | None) -> bool:
    return future is None or future.done()
