"""Waiting for other workers: cancel tokens, errors of collectives, collectives in flight."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Cancelled(RuntimeError):
    """The CancelToken was set while a collective waited. The group is unusable afterwards."""


class GroupError(RuntimeError):
    """A collective failed, usually because a member died. The group is unusable afterwards."""


class CancelToken:
    """Tells everything that waits in a generation to stop. Thread-safe; set once, never cleared."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.reason = ""

    def set(self, reason: str) -> None:
        with self._lock:
            if self._event.is_set():
                return
            self.reason = reason
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_set(self) -> bool:
        return self._event.is_set()

    def on_set(self, callback: Callable[[], None]) -> None:
        """Run `callback` when the token is set, at once if it is. Called from the thread that sets it."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def check(self, doing: str) -> None:
        if self.is_set():
            raise Cancelled(f"{doing} cancelled: {self.reason}")


_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_STACK = "Exception raised from"  # begins PyTorch's stack of C++ calls


class DeviceEvent(Protocol):
    """An event on a device, as `torch.cuda.Event`."""

    def query(self) -> bool: ...


def has_passed(event: DeviceEvent) -> bool:
    """Whether the device has come to an event. Raises RuntimeError for a failure of the device.

    `event.query()` keeps Python's other threads out for as long as it takes. While one of them launches a kernel for
    the first time, the driver answers nobody before the device has ended all that is queued, also a collective that
    waits for another worker (CUDA Programming Guide, Lazy Loading). A call by ctypes keeps nobody out.
    """
    if (driver := _driver()) is not None and (handle := getattr(event, "cuda_event", 0)):
        result = driver.cuEventQuery(ctypes.c_void_p(handle))
        if result in (0, _NOT_READY):
            return bool(result == 0)
    return bool(event.query())


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class StreamWait:
    """A wait of a device's stream, between two events on it. Any thread may ask."""

    before: torch.cuda.Event
    after: torch.cuda.Event

    @property
    def reached(self) -> bool:
        """Whether the stream has come to it: what was queued before has ended."""
        return has_passed(self.before)

    @property
    def ended(self) -> bool:
        return has_passed(self.after)

    @property
    def seconds(self) -> float:
        """How long the stream stood still, once the wait has ended."""
        return float(self.before.elapsed_time(self.after)) / 1e3


@dataclass(frozen=True, slots=True)
class Waited:
    """What a thread has waited in a stretch of its work, and its stream, whose waits may not have ended."""

    host_s: float = 0.0
    waits: tuple[StreamWait, ...] = ()

    @property
    def seconds(self) -> float:
        """Sum of host and stream; waits for the last wait of the stream."""
        if self.waits:
            self.waits[-1].after.synchronize()
        return self.host_s + sum(one.seconds for one in self.waits)


_MOST_WAITS = 1 << 16  # of a stream, of which nobody has asked: the oldest are forgotten


class WaitClock:
    """Seconds for which nothing was computed because the result of a collective was awaited: the communication that is
    not hidden behind work.

    On the CPU the host waits, and is timed. On CUDA (NCCL) a wait only orders streams: events before and after it on
    the current stream say how long that stream stood still. One clock for all groups of a generation; `take` answers
    for the thread that asks and its current stream, on which autograd's own threads run the backward of what was queued
    there. Of each stream it keeps the last `most` waits: samples, and scripts of torchrun, never ask.
    """

    def __init__(self, *, most: int = _MOST_WAITS) -> None:
        self._host = _HostSeconds()
        self._of_stream: dict[int, deque[StreamWait]] = defaultdict(lambda: deque(maxlen=most))
        self._lock = threading.Lock()

    def waited(self, wait: Callable[[], None], on_stream: bool) -> StreamWait | None:
        """Run a wait and book it. Returns the stream's wait, which may not have ended; None: the host waited."""
        if not on_stream:
            began = time.perf_counter()
            try:
                wait()
            finally:
                self._host.seconds += time.perf_counter() - began
            return None
        import torch  # here: processes that only exchange messages need no torch, which takes seconds to import

        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        wait()
        after.record()
        booked = StreamWait(before, after)
        with self._lock:
            self._of_stream[torch.cuda.current_stream().cuda_stream].append(booked)
        return booked

    def take(self) -> Waited:
        """What was waited since the last `take`."""
        found, self._host.seconds = self._host.seconds, 0.0
        if not self._of_stream:
            return Waited(found)
        import torch

        with self._lock:
            waits = self._of_stream.pop(torch.cuda.current_stream().cuda_stream, ())
        return Waited(found, tuple(waits))


class _HostSeconds(threading.local):
    """What each thread has waited itself."""

    seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long one may wait for others before they count as hung. A death is noticed otherwise, and at once."""

    limit_s: float
    why: str = ""  # where the limit comes from, as a sentence without its full stop

    def __str__(self) -> str:
        return f"{self.limit_s:g} s ({self.why})" if self.why else f"{self.limit_s:g} s"


def patient(cancel: CancelToken, patience: Patience, doing: str) -> Callable[[], None]:
    """What one calls while one waits: it raises Cancelled when the generation ends, TimeoutError after `patience`."""
    until = time.monotonic() + patience.limit_s

    def go_on() -> None:
        cancel.check(doing)
        if time.monotonic() > until:
            raise TimeoutError(f"{doing} took more than {patience}.")

    return go_on


class Work(Protocol):
    """What a process group of PyTorch returns for a collective."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta = ...) -> bool: ...


class Waiter(Protocol):
    """The group a collective belongs to: it knows token, time-out and members."""

    def wait_for(self, pending: PendingCollective) -> None: ...


class PendingCollective:
    """A collective in flight. `wait` must be called; tensors belong to the collective until it returns."""

    def __init__(
        self,
        group: Waiter | None,
        work: Work | None,
        name: str,
        finish: Callable[[], None] | None = None,
        stream_ordered: bool = False,
    ) -> None:
        self._group = group
        self.work = work
        self.name = name
        self._finish = finish
        self.stream_ordered = stream_ordered  # NCCL: a wait with a time-out would block the host

    @property
    def done(self) -> bool:
        """Whether it has ended; no where NCCL would have to be asked. Its answer needs a lock that an abort in another
        thread holds until it is through, and the GIL is kept meanwhile."""
        work = self.work
        return work is None or (not self.stream_ordered and work.is_completed())

    def wait(self) -> None:
        """Returns when the result is there. Raises Cancelled, TimeoutError or GroupError."""
        group, self._group = self._group, None
        if group is not None:
            group.wait_for(self)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def forget(self) -> None:
        """Drop the work object: it keeps the sockets of its group open."""
        self.work = None


@dataclass(frozen=True, slots=True)
class CollectiveProgress:
    """What a watchdog reads: how many collectives were begun, the one being waited for, and since when."""

    sequence: int
    name: str | None
    since: float  # time.monotonic() of the wait's begin, 0 when nothing is waited for


def first_line(error: BaseException) -> str:
    """The first line of what a library's error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def without_stack(error: BaseException) -> str:
    """All that a library's error says, in one line, without its stack of C++ calls. NCCL names the reason last."""
    said = str(error).partition(_STACK)[0].split("\n")
    return " ".join(line.strip() for line in said if line.strip()) or type(error).__name__
