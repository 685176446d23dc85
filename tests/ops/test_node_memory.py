"""Memory of a node: it outlives its processes, its locks do not, and a fence leaves no old writer. Real processes."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ops.memory.lending import BorrowedMemory, Lender, borrow
from ops.memory.node_memory import NodeMemory, RangeLock

ROOT = Path(__file__).parents[2]
SIZE = 1 << 20


class Process:
    """One borrower of its own (tests/ops/borrower.py)."""

    def __init__(self, number: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ops.borrower", str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.pid = self._process.pid
        assert self._answer() == "ready"

    def do(self, line: str) -> str:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended_by(self) -> int:
        return self._process.wait(120)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


Start = Callable[[int], Process]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Process] = []

    def begin(number: int) -> Process:
        made.append(Process(number))
        return made[-1]

    yield begin
    for process in made:
        process.close()


@pytest.fixture
def lender() -> Iterator[Lender]:
    lending = Lender(NodeMemory.create("test", SIZE))
    yield lending
    lending.close()


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_memory_outlives_every_process_but_one_that_has_it(lender: Lender, start: Start) -> None:
    writer = start(lender.number)
    assert writer.do(f"write {SIZE - 1} 42") == "written"
    mine = borrow(lender.number)
    writer.signal(signal.SIGKILL)
    assert writer.ended_by() == -signal.SIGKILL
    lender.close()
    assert mine.buffer[SIZE - 1] == 42 and mine.buffer[0] == 0


def test_a_lock_excludes_other_processes_on_its_range_only_and_is_free_after_a_death(
    lender: Lender, start: Start
) -> None:
    holder, other = start(lender.number), start(lender.number)
    assert holder.do("lock 100 200") == "locked"
    assert [other.do(f"tries {lo} {lo + 10}") for lo in (90, 95, 150, 199, 200)] == [
        "True",
        "False",
        "False",
        "False",
        "True",
    ]
    holder.signal(signal.SIGSTOP)
    assert other.do("tries 150 160") == "False", "a stopped process keeps its lock"
    holder.signal(signal.SIGKILL)
    holder.ended_by()
    assert other.do("tries 100 200") == "True"


def test_two_threads_with_a_lock_each_exclude_each_other() -> None:
    memory = NodeMemory.create("test", 64)
    one, other = RangeLock(memory), RangeLock(memory)
    assert one.try_acquire(0, 8) and not other.try_acquire(0, 8)
    taken = threading.Event()

    def wait_for_it() -> None:
        other.acquire(0, 8, lambda: None)
        taken.set()

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    assert not taken.wait(0.05)
    one.release(0, 8)
    waiting.join(60)
    assert taken.is_set()


def test_a_wait_for_a_lock_ends_with_what_its_check_raises() -> None:
    memory = NodeMemory.create("test", 64)
    one, other = RangeLock(memory), RangeLock(memory)
    one.acquire(0, 8, lambda: None)

    def cancelled() -> None:
        raise InterruptedError("the generation has ended")

    with pytest.raises(InterruptedError, match="generation"):
        other.acquire(4, 12, cancelled)


def test_a_fence_ends_stopped_and_running_borrowers_and_frees_their_locks(lender: Lender, start: Start) -> None:
    stopped, running, kept, gone = (start(lender.number) for _ in range(4))
    assert stopped.do("lock 0 8") == "locked"
    stopped.signal(signal.SIGSTOP)
    gone.signal(signal.SIGKILL)
    gone.ended_by()
    assert eventually(lambda: gone.pid not in lender.borrowers)
    assert set(lender.fence(keep={kept.pid}, timeout_s=100.0)) == {stopped.pid, running.pid}
    assert kept.do("tries 0 8") == "True", "nobody holds it when the fence returns"
    assert stopped.ended_by() == running.ended_by() == -signal.SIGKILL
    assert eventually(lambda: lender.borrowers == (kept.pid,))
    assert lender.fence(keep={kept.pid}) == ()


def test_who_gave_the_memory_back_is_spared(lender: Lender, start: Start) -> None:
    borrower = start(lender.number)
    assert borrower.do("back") == "given back"
    assert eventually(lambda: lender.borrowers == ())
    assert lender.fence(keep=set()) == ()
    assert borrower.do("back") == "given back", "it lives"


def test_no_descriptor_and_no_thread_is_left_after_fifty_generations() -> None:
    def generation() -> None:
        memory = NodeMemory.create("test", 4096)
        lender = Lender(memory)
        borrowed = borrow(lender.number)
        lock = RangeLock(borrowed)
        lock.acquire(0, 8, lambda: None)
        borrowed.buffer[0] = 1
        assert memory.buffer[0] == 1
        lender.close()
        lock.close()
        borrowed.close()
        memory.close()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    generation()
    gc.collect()  # what tests before this one have left goes now, or later and is no fault
    files, threads = held()
    for _ in range(50):
        generation()
    assert eventually(lambda: held()[0] <= files and held()[1] <= threads), f"{(files, threads)} -> {held()}"


def test_a_lender_without_descriptors_serves_when_it_has_some_again(
    lender: Lender, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting, caplog.at_level(logging.WARNING):
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # no number is left below this one
        try:
            waiting.connect(f"\0heddle-{lender.number:016x}")
            time.sleep(0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert eventually(lambda: lender.borrowers == (os.getpid(),)), "it has waited and is served"
        told = [record.getMessage() for record in caplog.records]
        assert [line for line in told if "cannot be answered yet" in line] == told and len(told) == 1
    assert eventually(lambda: not lender.borrowers)
    mine = borrow(lender.number)
    mine.close()


def test_memory_that_cannot_be_mapped_lets_go_of_its_descriptor_once() -> None:
    """Also a borrower's, whose lender learns of it: the object goes later, when another file may have the number."""
    (ours, lenders), other = socket.socketpair(), os.open(os.devnull, os.O_RDONLY)
    for made in (NodeMemory, partial(BorrowedMemory, connection=ours)):
        descriptor = os.memfd_create("empty")
        with pytest.raises(ValueError, match="empty file") as caught:
            made(descriptor, 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        os.dup2(other, descriptor)
        del caught
        gc.collect()
        os.close(descriptor)  # fails where it is closed already
    os.close(other)
    assert lenders.recv(1) == b""
    lenders.close()


def test_an_unknown_lender_is_named_with_what_to_do() -> None:
    with pytest.raises(ConnectionError, match=r"could not be borrowed .*share its network and user"):
        borrow(1)


def test_memory_that_the_node_does_not_have_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.memory.node_memory.node_room", lambda: 3 << 20)
    assert NodeMemory.create("test", 3 << 20).num_bytes == 3 << 20
    with pytest.raises(MemoryError, match=r"no room for 4 MiB of shared memory \(test\), it can spare 3 MiB"):
        NodeMemory.create("test", 4 << 20)
