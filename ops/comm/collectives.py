"""A group of workers that communicate: cancellable collectives, and a close that never hangs on a dead peer.

Nothing here touches torch.distributed's default group. A `Group` wraps a raw ProcessGroup, Gloo on CPU and NCCL on
CUDA. `ops.comm.groups` connects the groups of a generation.

Waiting: Gloo cannot abort a collective from another thread, so every wait is a sequence of short waits that looks at
the CancelToken and the deadline in between. NCCL waits only order streams; there the token aborts the communicators.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from ops.comm.host_exchange import HostExchange
from ops.shards import even_bounds
from ops.waiting import (
    Cancelled,
    CancelToken,
    CollectiveProgress,
    GroupError,
    Patience,
    PendingCollective,
    StreamWait,
    WaitClock,
    Work,
    without_stack,
)

log = logging.getLogger(__name__)

ReduceOp = Literal["sum", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_MOST_QUEUED = 4096  # waits of a stream that are looked at: more than a host can be ahead of its device
_SLICE = timedelta(milliseconds=50)  # a cancel is seen within this; waits themselves return at once when the work ends
_LOOK_S = (0.0002, 0.02)  # between looks at a store: at first, at most
_PATIENT = timedelta(hours=6)
_BYTE_SIZED = (torch.int16,)  # Gloo has no all-to-all for these; they travel as bytes


class Group:
    """A fixed set of members that communicate. All members call the same collectives in the same order.

    `members` are worker numbers of the generation in rank order; `rank` is this process's index in it. After any
    exception out of a collective the group is broken: it lets go of its connections at once, which makes the other
    members fail too instead of waiting for their time-out.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        members: tuple[int, ...],
        rank: int,
        timeout_s: float,
        cancel: CancelToken | None = None,
        nodes: tuple[int, ...] = (),
        store: dist.Store | None = None,
        clock: WaitClock | None = None,
    ) -> None:
        """`nodes` of the members: equal numbers share a node's memory; by default all are on one. `store` is that of
        the members alone, for `exchange_numbers` and `install_default`; `clock` that of the generation."""
        self.members = members
        self.rank = rank
        self.size = len(members)
        self.nodes = nodes or (0,) * self.size
        self.broken = ""  # why the group can no longer be used
        self.abandoned = False  # a collective may still write into its tensors: do not reuse them
        self.clock = clock or WaitClock()
        self.patience = Patience(limit_s=timeout_s)  # of the waits that begin from now on
        self._process_group = process_group
        self._on_device = _is_nccl(process_group)
        self._cancel = cancel or CancelToken()
        self._outstanding: set[PendingCollective] = set()  # also those whose holder has dropped them in an error
        self._ending = threading.Lock()  # a collective is begun before the group's end, which then knows it, or refused
        self._progress = CollectiveProgress(0, None, 0.0)
        self._queued: deque[_QueuedWait] = deque(maxlen=_MOST_QUEUED)
        self._queue = threading.Lock()
        self._store = store
        self._hosts = None if store is None else HostExchange(store, rank, self.size)
        self._is_default = False

    @staticmethod
    def solo(member: int = 0, cancel: CancelToken | None = None) -> Group:
        """A group of one: every call is a local copy or nothing at all. Waits that are no collective (`check`) end by
        `cancel`."""
        return Group(None, (member,), 0, 0.0, cancel)

    @staticmethod
    def wrap(process_group: dist.ProcessGroup, timeout_s: float = 600.0) -> Group:
        """A group over one of torch.distributed's (`dist.group.WORLD`, one of `dist.new_group` or of a device mesh),
        for torchrun scripts. Closing it leaves that one open.

        Raises ValueError in a process that is no member: `dist.new_group` gives it a number instead of a group.
        """
        if not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(
                f"Group.wrap takes a process group of torch.distributed that this process is in, not {process_group!r}"
                "; initialise torch.distributed first, and leave groups of other ranks alone."
            )
        members = tuple(dist.get_process_group_ranks(process_group))
        return Group(process_group, members, process_group.rank(), timeout_s)

    @property
    def progress(self) -> CollectiveProgress:
        """What a watchdog reads, from any thread. On NCCL the host does not wait: there it is the collective that the
        stream waits in, or none while it computes."""
        progress = self._progress
        try:
            with self._queue:
                while self._queued and self._queued[0].wait.ended:
                    self._queued.popleft()
                first = self._queued[0] if self._queued else None
            waits = first is not None and first.wait.reached
        except RuntimeError:  # of the device: its next call says so, and a watchdog lives on
            return progress
        return CollectiveProgress(progress.sequence, first.name, first.since) if first and waits else progress

    @property
    def begun(self) -> int:
        """Collectives that the host has begun. Any thread may ask."""
        return self._progress.sequence

    @property
    def on_device(self) -> bool:
        """Whether its collectives take tensors of a GPU alone (NCCL), or did until it ended."""
        return self._on_device

    @property
    def failure(self) -> str:
        """What went wrong on NCCL in a collective that has returned already; "" if nothing is known. There a wait only
        orders streams: an error, of a network above all, is reported by the communicator, some time later, when asked.
        (NCCL User Guide, Asynchronous errors and error handling) Any thread may ask."""
        process_group = self._process_group
        if process_group is None or not _is_nccl(process_group):
            return ""
        error: ErrorType = cast(ErrorTeller, process_group).get_error()
        return "" if error == ErrorType.SUCCESS else f"an error of its communicator ({error.name})"

    # Collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Sum (or maximum) of `tensor` [any shape] over the members, in place."""
        self.all_reduce_async(tensor, op).wait()

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingCollective:
        """Sum (or maximum) of `tensor` [any shape] over the members, in place."""
        if self.size == 1:
            return _DONE
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        return self._begin("all_reduce", tensor, lambda pg: pg.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, source_rank: int) -> None:
        """`tensor` [any shape] of rank `source_rank` to all members, in place."""
        self.broadcast_async(tensor, source_rank).wait()

    def broadcast_async(self, tensor: Tensor, source_rank: int) -> PendingCollective:
        """`tensor` of rank `source_rank` in this group to all members, in place."""
        if self.size == 1 or tensor.numel() == 0:
            return _DONE
        options = dist.BroadcastOptions()
        options.rootRank = source_rank
        options.rootTensor = 0
        return self._begin("broadcast", tensor, lambda pg: pg.broadcast([tensor], options))

    def all_to_all(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        """input [sum(input_splits), ...] in pieces to the ranks, output [sum(output_splits), ...] from them."""
        self.all_to_all_async(output, input, output_splits, input_splits).wait()

    def all_to_all_async(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> PendingCollective:
        """Rows input_splits[r] of `input` go to rank r; output_splits[r] rows of `output` come from rank r.

        Splits count rows of dimension 0 and may be uneven or zero; trailing dimensions are equal on all members.
        """
        self._check_splits(output, output_splits, "output")
        self._check_splits(input, input_splits, "input")
        if self.size == 1:
            output.copy_(input)
            return _DONE
        source = input.contiguous()
        target = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        finish = None if target is output else partial(_copy, output, target)
        if input.dtype in _BYTE_SIZED:
            source, output_splits, input_splits = _as_bytes(source, output_splits, input_splits)
            received = target.view(-1).view(torch.uint8)
        else:
            received = target
        return self._begin(
            "all_to_all",
            received,
            lambda pg: pg.alltoall_base(received, source, output_splits, input_splits),
            finish,
        )

    def reduce_scatter_ranges_async(self, flat: Tensor, bounds: Sequence[tuple[int, int]]) -> list[PendingCollective]:
        """After the waits flat[lo:hi] of this rank's bounds is the sum over the members; the rest is undefined.

        Neighbouring ranges of flat [n] in rank order, some of them empty. Until the wait, flat is left alone there.

        NCCL has a collective for equal ranges (`even_ranges`); others are reduced to one owner after the other. Gloo's
        reduce-scatter is slower than its all-reduce at every size, so there the ranges are exchanged and added by the
        owner in rank order, which also makes the sum independent of how it is cut.
        """
        if self.size == 1:
            return []
        lo, hi = bounds[self.rank]
        whole = flat[bounds[0][0] : bounds[-1][1]]
        if self.on_device:
            if _equal(bounds):
                usual = dist.ReduceScatterOptions()
                return [
                    self._begin("reduce_scatter", flat, lambda pg: pg._reduce_scatter_base(flat[lo:hi], whole, usual))
                ]
            return [self._reduce_to(r, flat[a:b]) for r, (a, b) in enumerate(bounds) if a < b]
        received = flat.new_empty(self.received_elements(bounds))
        output_splits, input_splits = [hi - lo] * self.size, [b - a for a, b in bounds]
        options = dist.AllToAllOptions()
        options.timeout = _PATIENT  # it may start long before the last member's part is ready; our own wait has a limit
        return [
            self._begin(
                "reduce_scatter",
                received,
                lambda pg: pg.alltoall_base(received, whole, output_splits, input_splits, options),
                partial(_add_parts, flat[lo:hi], received.view(self.size, hi - lo)),
            )
        ]

    def received_elements(self, bounds: Sequence[tuple[int, int]]) -> int:
        """Elements of memory that `reduce_scatter_ranges_async` takes beside `flat` until its wait."""
        lo, hi = bounds[self.rank]
        return 0 if self.size == 1 or self.on_device else self.size * (hi - lo)

    def _reduce_to(self, owner: int, tensor: Tensor) -> PendingCollective:
        options = dist.ReduceOptions()
        options.rootRank = owner
        return self._begin("reduce", tensor, lambda pg: pg.reduce([tensor], options))

    def all_gather_ranges(self, flat: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        """flat[lo:hi] of every rank's bounds to all members, in place."""
        for pending in self.all_gather_ranges_async(flat, bounds):
            pending.wait()

    def all_gather_ranges_async(self, flat: Tensor, bounds: Sequence[tuple[int, int]]) -> list[PendingCollective]:
        """In-place broadcasts on Gloo (measured 4x faster than its all-gather). NCCL gathers equal ranges in place
        (`even_ranges`), others through a copy of all of them."""
        if self.size == 1:
            return []
        if self.on_device:
            lo, hi = bounds[self.rank]
            if _equal(bounds):
                whole = flat[bounds[0][0] : bounds[-1][1]]
                return [self._begin("all_gather", flat, lambda pg: pg._allgather_base(whole, flat[lo:hi]))]
            outputs = [[flat[a:b] for a, b in bounds]]
            return [self._begin("all_gather", flat, lambda pg: pg.allgather(outputs, [flat[lo:hi]]))]
        return [self.broadcast_async(flat[a:b], source_rank=r) for r, (a, b) in enumerate(bounds)]

    def even_ranges(self, flat: Tensor, total: int) -> list[tuple[int, int]] | None:
        """The members' ranges of one length, by which NCCL sums and gathers all of a vector of `total` elements at
        once, in place; None where that is not better, or `flat` has too little room after the vector."""
        bounds = even_bounds(total, self.size)
        return bounds if self.size > 1 and self.on_device and bounds[-1][1] <= flat.numel() else None

    def barrier(self, device: str | torch.device = "cpu") -> None:
        """Returns when every member has called it."""
        self.all_reduce(torch.zeros(1, device=device))

    def exchange_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """What every member's host gives, in rank order; each may give as many as it likes. All members call it at the
        same place among their collectives. A host does not wait for its device, only for the other hosts.

        Raises Cancelled, GroupError, or TimeoutError, which names who has not come. Not of a group that was wrapped.
        A store whose process is frozen, not dead, holds it beyond all three, as a look at it has no limit in PyTorch
        2.13: that process is the controller's, with which Ray ends the workers.
        """
        if self.size == 1:
            return [list(numbers)]
        assert self._hosts is not None, "a group that was wrapped has no store"
        hosts, name = self._hosts, "exchange of numbers"
        where = f"{name} in group {self.members} (rank {self.rank})"
        if self.broken:
            raise GroupError(f"{where}: the group is {self.broken}.")
        begin = time.monotonic()
        self._progress = CollectiveProgress(self._progress.sequence + 1, name, begin)
        try:
            hosts.give(numbers)
            if self.on_device:  # a device may be working meanwhile
                self._wait_for_hosts(hosts, where, begin)
            else:
                self.clock.waited(lambda: self._wait_for_hosts(hosts, where, begin), on_stream=False)
            return hosts.take()
        except (Cancelled, GroupError, TimeoutError):
            self._release(f"broken by the {name}")
            raise
        except RuntimeError as error:  # of the store
            self._release(f"broken by the {name}")
            self._cancel.check(where)
            raise GroupError(f"{where} failed: {without_stack(error)}") from None
        finally:
            self._progress = CollectiveProgress(self._progress.sequence, None, 0.0)

    def forget_numbers(self) -> None:
        """When all members have got the last ones: they go from the store."""
        if self._hosts is not None:
            self._hosts.forget()

    def _wait_for_hosts(self, hosts: HostExchange, where: str, begin: float) -> None:
        pause, longest = _LOOK_S
        while not hosts.have_come():
            self._cancel.check(where)
            if self.broken:
                raise GroupError(f"{where}: the group is {self.broken}.")
            if time.monotonic() > begin + self.patience.limit_s:
                missing = ", ".join(str(self.members[rank]) for rank in hosts.missing())
                raise TimeoutError(f"{where}: worker {missing} did not come within {self.patience}.")
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def check(self, doing: str) -> None:
        """Raise Cancelled when the generation has ended: for waits of the members that are no collective."""
        self._cancel.check(f"{doing} in group {self.members}")

    # Life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the connections back. Never blocks: what a dead peer still holds up is freed in the background."""
        self._release("closed")

    def abort(self) -> None:
        """Make the group unusable from any thread: waiting members raise, on NCCL the communicator is aborted."""
        _abort(self._process_group)
        self._release("aborted")

    def install_default(self) -> None:
        """Make these members torch.distributed's default group too, for libraries that know no other (DeepSpeed).

        Collective; undone by `close`. Waits inside that group see no cancel: a stuck worker has to be replaced.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        backend = "nccl" if self.on_device else "gloo"
        store = dist.HashStore() if self._store is None else dist.PrefixStore("default", self._store)
        timeout = timedelta(seconds=self.patience.limit_s or 60.0)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        self._is_default = True

    def _check_splits(self, tensor: Tensor, splits: list[int], side: str) -> None:
        # Gloo answers a size mismatch with SIGABRT of the process, so the local half is checked here.
        if len(splits) != self.size or sum(splits) != tensor.shape[0]:
            raise ValueError(
                f"all_to_all: {side} splits {splits} must be {self.size} numbers (one per member of {self.members}) "
                f"that add up to the tensor's {tensor.shape[0]} rows."
            )

    def _begin(
        self,
        name: str,
        tensor: Tensor,
        launch: Callable[[dist.ProcessGroup], Work],
        finish: Callable[[], None] | None = None,
    ) -> PendingCollective:
        process_group = self._process_group
        if self.broken or process_group is None:
            raise GroupError(f"{name} in group {self.members}: the group is {self.broken or 'closed'}.")
        self._cancel.check(f"{name} in group {self.members}")
        self._progress = CollectiveProgress(self._progress.sequence + 1, self._progress.name, self._progress.since)
        try:
            work = launch(process_group)
        except RuntimeError as error:
            self._release(f"broken by {name}")
            raise GroupError(f"{name} in group {self.members} could not start: {without_stack(error)}") from None
        pending = PendingCollective(self, work, name, finish, stream_ordered=tensor.is_cuda)
        with self._ending:
            if not self.broken:
                self._outstanding.add(pending)
                return pending
        # Another thread has ended the group since it was looked at, without knowing this work.
        if not pending.done:
            self.abandoned = True
            _abort(process_group)
            _bury(_Remains(process_group, [work]))
        self._cancel.check(f"{name} in group {self.members}")
        raise GroupError(f"{name} in group {self.members}: the group is {self.broken}.")

    def wait_for(self, pending: PendingCollective) -> None:
        name = pending.name
        begin = time.monotonic()
        self._progress = CollectiveProgress(self._progress.sequence, name, begin)
        try:
            queued = self.clock.waited(lambda: self._wait_sliced(pending, begin, self.patience), pending.stream_ordered)
            if queued is not None:
                with self._queue:
                    self._queued.append(_QueuedWait(queued, name, begin))
        except RuntimeError:
            self.abandoned = self.abandoned or not pending.done
            self._release(f"broken by {name}")
            raise
        except TimeoutError:
            self.abandoned = True
            self._release(f"broken by {name}")
            raise
        finally:
            pending.forget()
            with self._ending:  # another thread may be looking through them
                self._outstanding.discard(pending)
            self._progress = CollectiveProgress(self._progress.sequence, None, 0.0)

    def _wait_sliced(self, pending: PendingCollective, begin: float, patience: Patience) -> None:
        where = f"{pending.name} in group {self.members} (rank {self.rank})"
        while True:
            work = pending.work
            if work is None:  # released by another thread
                self._cancel.check(where)
                raise GroupError(f"{where}: the group is {self.broken}.")
            completed = pending.done
            try:
                if pending.stream_ordered:
                    work.wait()
                else:
                    work.wait(_SLICE)
                return
            except RuntimeError as error:
                if completed or pending.stream_ordered:  # its own error: the end of a slice comes before the work's
                    self._cancel.check(where)
                    raise GroupError(f"{where} failed: {without_stack(error)}") from None
            del work
            self._cancel.check(where)
            if time.monotonic() > begin + patience.limit_s:
                raise TimeoutError(
                    f"{where}: not all members arrived within {patience}. One of {self.members} is stuck or dead."
                )

    def _release(self, why: str) -> None:
        with self._ending:
            was_default, self._is_default = self._is_default, False
            ends_now = self.size > 1 and not self.broken
            if ends_now:
                self.broken = why
            pending = list(self._outstanding)
            self._outstanding.clear()
        if was_default:
            dist.destroy_process_group()
        if not ends_now:
            return
        busy = [one.work for one in pending if one.work is not None and not one.done]
        self.abandoned = self.abandoned or bool(busy)
        for one in pending:
            one.forget()
        process_group, self._process_group = self._process_group, None
        # One of our own (with a store) would else end with its last reference, which an error or a heartbeat may hold,
        # and PyTorch would warn of that. One that was wrapped stays open.
        if busy or self._store is not None:
            _abort(process_group)
        if busy:
            _bury(_Remains(process_group, busy))
        free_ended()  # idle connections close at the end of this call, within a millisecond


@dataclass(frozen=True, slots=True)
class _QueuedWait:
    """A wait that a stream will do or does."""

    wait: StreamWait
    name: str  # of the collective
    since: float  # time.monotonic() when the host queued it


_DONE = PendingCollective(None, None, "done")


def _is_nccl(process_group: dist.ProcessGroup | None) -> bool:
    return process_group is not None and process_group.name() == "nccl"


def _abort(process_group: dist.ProcessGroup | None) -> None:
    """End what runs in it: on NCCL nothing else does, and a device that waits in a collective does nothing more."""
    if process_group is None or not _is_nccl(process_group):
        return
    try:
        process_group.abort()
    except RuntimeError as error:  # the group is lost either way, and whoever ends it has more to do
        log.warning("a communicator could not be aborted: %s", without_stack(error))


class ErrorTeller(Protocol):
    """What ProcessGroupNCCL has beside the collectives of a process group."""

    def get_error(self) -> ErrorType: ...


@dataclass(eq=False)
class _Remains:
    """A process group and its pending works."""

    process_group: dist.ProcessGroup | None
    works: list[Work]


_buried: list[_Remains] = []
_digging = threading.Lock()  # of `_buried`: what has ended is freed once


def _bury(remains: _Remains) -> None:
    """Keep a process group with pending operations from being destroyed.

    Its destructor joins threads that wait for the operation, which waits for the peer. The extra reference holds also
    at interpreter exit: a destructor that runs in or after finalization ends in std::terminate (seen: SIGABRT of a
    finished process when a background thread did this).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(remains))
    _buried.append(remains)


def free_ended() -> None:
    """Destroy buried groups whose operations have ended meanwhile: they hold the tensors of their collectives, which in
    a gradient sum are as large as the model. To be called when all members have left a generation."""
    with _digging:
        ended = [remains for remains in _buried if all(work.is_completed() for work in remains.works)]
        for remains in ended:
            _buried.remove(remains)
    for remains in ended:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(remains))


def _equal(bounds: Sequence[tuple[int, int]]) -> bool:
    """Neighbouring ranges of one length: what the plain NCCL collectives take, in place."""
    lengths = {hi - lo for lo, hi in bounds}
    return len(lengths) == 1 and all(one[1] == other[0] for one, other in pairwise(bounds))


def _add_parts(output: Tensor, parts: Tensor) -> None:
    """output = sum over the rows of `parts`, in their order."""
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)


def _copy(output: Tensor, source: Tensor) -> None:
    output.copy_(source)


def _as_bytes(source: Tensor, output_splits: list[int], input_splits: list[int]) -> tuple[Tensor, list[int], list[int]]:
    row = source.element_size()
    for length in source.shape[1:]:
        row *= length
    return source.view(-1).view(torch.uint8), [s * row for s in output_splits], [s * row for s in input_splits]
