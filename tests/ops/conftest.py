"""Threads as ranks: real Gloo groups over a store in memory, without the seconds that a process per rank costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.waiting import CancelToken

RunRanks = Callable[[int, Callable[[Group], Any]], list[Any]]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes a device that this machine does not have for an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def run_ranks() -> RunRanks:
    """run_ranks(size, work) calls work(group) on `size` ranks at once and returns their results in rank order. The
    first error of any rank is raised; it cancels the waits of the others."""
    return _run_ranks


def _run_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    store, cancel = dist.HashStore(), CancelToken()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        groups = Groups(store, rank, tuple(range(size)), "gloo", 0, 60.0, cancel)
        try:
            results[rank] = work(groups.get(tuple(range(size))))
        except BaseException as error:  # handed to the test's thread
            errors.append(error)
            cancel.set(f"rank {rank} failed: {error}")
        finally:
            groups.close()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
