"""Processes of this machine that measure something together."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from multiprocessing.queues import Queue

PATIENCE_S = 240.0  # of processes that import all of torch first, on a machine with other work

T = TypeVar("T")


def answers_of(work: Callable[..., T], given: Sequence[object], count: int, answering: int) -> list[T]:
    """What `work(store, rank, *given)` returns in each of `count` processes. All but the first `answering` may die
    without a word. Raises RuntimeError with what one has met."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers: Queue[tuple[str, T | None]] = context.Queue()
    processes = [
        context.Process(target=_answer, args=(answers, work, rank, store.port, given), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        found = [_next(answers, processes[:answering]) for _ in range(answering)]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    if why := next((why for why, _ in found if why), ""):
        raise RuntimeError(f"one of {count} processes: {why}")
    return [answer for _, answer in found if answer is not None]


def _answer(
    answers: Queue[tuple[str, T | None]], work: Callable[..., T], rank: int, port: int, given: Sequence[object]
) -> None:
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
        answers.put(("", work(store, rank, *given)))
    except Exception as error:  # reported to the process that waits
        answers.put((f"{type(error).__name__}: {error}", None))


def _next(answers: Queue[tuple[str, T | None]], processes: Sequence[BaseProcess]) -> tuple[str, T | None]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            return answers.get(timeout=0.5)
        except queue.Empty:
            ended = [process.exitcode for process in processes if process.exitcode]
            if ended:
                return f"it ended with code {ended[0]}", None
    return f"no answer in {PATIENCE_S:.0f} s", None
