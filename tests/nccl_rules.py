"""What NCCL asks of its callers and Gloo forgives, checked while ranks that are threads run over Gloo.

    with nccl_rules(monkeypatch) as rules:
        ...                      # any Groups made here
    assert rules.most_peers(0) <= 11

- A communicator is made by its first collective, which waits in it for all members and cannot be stopped, unless its
  group was asked to connect before; a constructor connects nothing. (ncclCommInitRank; NCCL User Guide, Creating a
  Communicator)
- Collectives of several communicators on one device must be launched in one order by all devices that share them: two
  that each wait for the other never end. A launch that closes a circle raises before it hangs. (Using multiple NCCL
  communicators concurrently)
- All members launch the same collectives of a communicator, of equal sizes and types; what one sends is what the other
  receives. Where Gloo aborts the process and NCCL hangs or writes elsewhere, this raises.
- Ranges of one length are summed and gathered in place; an all-gather of others takes a copy of all of them.
- Every communicator costs memory for each peer as long as it lives, all-to-alls for those alone that get or send
  something (ProcessGroupNCCL sends nothing of size 0).
- An error of a collective is not told by its wait, which returns with anything in the tensors: only by the
  communicator, to the one that asks it or launches the next one. (Asynchronous errors and error handling)
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

import ops.comm.groups
from ops.comm.groups import Groups

_GARBAGE = 3  # what a failed collective multiplies its result by: neither NaN nor infinite, which a step would skip
Launched = tuple[str, int]  # a communicator, and the number of its collective


class AgainstNccl(ValueError):
    """This would hang or corrupt memory on NCCL. (Not a RuntimeError, which a group takes for a lost member.)"""


@dataclass
class Rules:
    """What all ranks have launched, and the communicators that they have open. Thread-safe."""

    _lock: threading.RLock = field(default_factory=threading.RLock)
    _counts: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))  # by communicator and worker
    _facts: dict[Launched, dict[int, tuple[object, ...]]] = field(default_factory=lambda: defaultdict(dict))
    _last: dict[int, Launched] = field(default_factory=dict)
    _after: dict[Launched, set[Launched]] = field(default_factory=lambda: defaultdict(set))
    _open: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # worker -> peers of its communicators
    _most: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _blocked: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # worker -> what it connects
    _failing: dict[int, tuple[str, int]] = field(default_factory=dict)  # worker -> kind, and how many come before
    _failed: set[tuple[str, int]] = field(default_factory=set)  # communicators and workers
    _partners: dict[tuple[str, int], set[int]] = field(default_factory=lambda: defaultdict(set))  # of all-to-alls
    _members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)  # collectives by name, counted once for each member
    made: int = 0  # communicators, counted once for each member
    made_late: int = 0  # of them, by a collective

    def launch(self, worker: int, name: str, members: tuple[int, ...], facts: tuple[object, ...]) -> None:
        """The worker is about to launch its next collective of the communicator."""
        with self._lock:
            number = self._counts[name, worker]
            self._counts[name, worker] += 1
            self.kinds[str(facts[0])] += 1
            self._members[name] = members
            if facts[0] == "alltoall_base":
                self._partners[name, worker] |= _partners(members, worker, *facts[1:])
            now, before = (name, number), self._last.get(worker)
            if before is not None and self._reaches(now, before):
                raise AgainstNccl(
                    f"worker {worker} launches {facts[0]} {now} after {before}; others launch them the other way round"
                )
            if before is not None:
                self._after[before].add(now)
            self._last[worker] = now
            for other, theirs in self._facts[now].items():
                if why := _unlike(members, worker, facts, other, theirs):
                    raise AgainstNccl(f"{now} on workers {worker} and {other}: {why}")
            self._facts[now][worker] = facts

    def fail(self, worker: int, kind: str, after: int = 0) -> None:
        """The worker's next collective of this kind, or the one `after` others, meets an error."""
        self._failing[worker] = kind, after

    def fails(self, worker: int, name: str, kind: str) -> bool:
        """Whether the collective that the worker launches now does."""
        with self._lock:
            wanted, before = self._failing.get(worker, ("", 0))
            if wanted != kind:
                return False
            if before:
                self._failing[worker] = kind, before - 1
                return False
            del self._failing[worker]
            self._failed.add((name, worker))
            return True

    def has_failed(self, worker: int, name: str) -> bool:
        with self._lock:
            return (name, worker) in self._failed

    def connects(self, worker: int, name: str, members: tuple[int, ...]) -> None:
        """The worker waits in the communicator's first collective until all members have launched it."""
        with self._lock:
            self.made_late += 1
            self._blocked[worker] = name, members
            if self._waits_for(worker, worker, set()):
                raise AgainstNccl(f"worker {worker} connects {name}: it and others wait for each other")

    def connected(self, worker: int) -> None:
        with self._lock:
            del self._blocked[worker]

    def _waits_for(self, worker: int, goal: int, seen: set[int]) -> bool:
        if worker in seen or worker not in self._blocked:
            return False
        name, members = self._blocked[worker]
        missing = [one for one in members if not self._counts[name, one]]
        return goal in missing or any(self._waits_for(one, goal, seen | {worker}) for one in missing)

    def opened(self, worker: int, peers: int) -> None:
        """A communicator of the worker has been made, or has gone (negative peers)."""
        with self._lock:
            self.made += peers > 0
            self._open[worker] += peers
            self._most[worker] = max(self._most[worker], self._open[worker])

    @property
    def collectives(self) -> int:
        return self.kinds.total()

    def most_peers(self, worker: int) -> int:
        """Peers of all communicators that the worker had at a time."""
        return self._most[worker]

    def open_peers(self, worker: int) -> int:
        return self._open[worker]

    def partners(self, worker: int, members: tuple[int, ...]) -> set[int]:
        """The workers that the worker has exchanged with by all-to-alls of a communicator of these members."""
        found = [met for (name, one), met in self._partners.items() if one == worker and self._members[name] == members]
        return set().union(*found)

    def _reaches(self, start: Launched, goal: Launched) -> bool:
        seen, found = set(), [start]
        while found:
            one = found.pop()
            if one == goal:
                return True
            if one not in seen:
                seen.add(one)
                found += self._after.get(one, ())
        return False


def _partners(members: tuple[int, ...], worker: int, sent: object, received: object) -> set[int]:
    assert isinstance(sent, tuple) and isinstance(received, tuple)
    return {one for one, out, into in zip(members, sent, received) if (out or into) and one != worker}


def _unlike(
    members: tuple[int, ...], worker: int, facts: tuple[object, ...], other: int, theirs: tuple[object, ...]
) -> str:
    """What differs between two launches of one collective; "" if nothing does."""
    if facts[0] != theirs[0]:
        return f"{facts[0]} and {theirs[0]}"
    if facts[0] != "alltoall_base":
        return "" if facts == theirs else f"{facts} and {theirs}"
    mine, their_place = members.index(worker), members.index(other)
    for (_, sent, _), place, (_, _, received), at in (
        (facts, their_place, theirs, mine),
        (theirs, mine, facts, their_place),
    ):
        assert isinstance(sent, tuple) and isinstance(received, tuple)
        if sent[place] != received[at]:
            return f"{sent[place]} bytes are sent and {received[at]} received"
    return ""


class LazyGroup:
    """A Gloo group that is made by its first collective and tells the rules of each."""

    def __init__(
        self, rules: Rules, name: str, members: tuple[int, ...], worker: int, make: Callable[[], dist.ProcessGroup]
    ) -> None:
        self._rules, self._name, self._members, self._worker, self._make = rules, name, members, worker, make
        self._real: dist.ProcessGroup | None = None

    def name(self) -> str:
        return "nccl"  # so that groups take the way that they take on GPUs

    def abort(self) -> None:
        """Nothing: Gloo's waits end by themselves."""

    def get_error(self) -> ErrorType:
        failed = self._rules.has_failed(self._worker, self._name)
        return ErrorType.COMM_ERROR if failed else ErrorType.SUCCESS

    def __del__(self) -> None:
        if self._real is not None:
            self._rules.opened(self._worker, 1 - len(self._members))

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._connect()

    def allreduce(self, tensors: Sequence[Tensor], options: dist.AllreduceOptions) -> object:
        (tensor,) = tensors
        self._launch("allreduce", tensor.numel(), str(tensor.dtype))
        return self._begun("allreduce", self._group().allreduce(tensors, options), tensor)

    def broadcast(self, tensors: Sequence[Tensor], options: dist.BroadcastOptions) -> object:
        (tensor,) = tensors
        self._launch("broadcast", tensor.numel(), str(tensor.dtype), options.rootRank)
        return self._begun("broadcast", self._group().broadcast(tensors, options), tensor)

    def alltoall_base(
        self, output: Tensor, source: Tensor, outputs: list[int], inputs: list[int], *more: Any
    ) -> object:
        sent, received = (
            tuple(count * (tensor.nbytes // max(len(tensor), 1)) for count in splits)
            for tensor, splits in ((source, inputs), (output, outputs))
        )
        self._launch("alltoall_base", sent, received)
        work = self._group().alltoall_base(output, source, outputs, inputs, *more)
        return self._begun("alltoall_base", work, output)

    def reduce(self, tensors: Sequence[Tensor], options: dist.ReduceOptions) -> object:
        (tensor,) = tensors
        self._launch("reduce", tensor.numel(), str(tensor.dtype), options.rootRank)
        return self._group().reduce(tensors, options)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: dist.ReduceScatterOptions) -> object:
        """Into its own place in `source`, of which it leaves the rest alone."""
        size, place = len(self._members), self._members.index(self._worker)
        if source.numel() != size * output.numel() or output.data_ptr() != source.chunk(size)[place].data_ptr():
            raise AgainstNccl(
                f"reduce_scatter of {source.numel()} elements: {output.numel()} for each of {size} members"
            )
        self._launch("reduce_scatter", source.numel(), str(source.dtype))
        whole = source.clone()
        work = self._group().allreduce([whole], dist.AllreduceOptions())
        return self._begun("reduce_scatter", Then(work, lambda: output.copy_(whole.chunk(size)[place])), output)

    def _allgather_base(self, output: Tensor, source: Tensor) -> object:
        """From its own place in `output`."""
        size, place = len(self._members), self._members.index(self._worker)
        if output.numel() != size * source.numel() or source.data_ptr() != output.chunk(size)[place].data_ptr():
            raise AgainstNccl(f"all_gather of {output.numel()} elements: {source.numel()} from each of {size} members")
        self._launch("all_gather", output.numel(), str(output.dtype))
        work = self._group().allgather([list(output.chunk(size))], [source.clone()])
        return self._begun("all_gather", work, output)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], sources: Sequence[Tensor]) -> object:
        lengths = [one.numel() for one in outputs[0]]
        raise AgainstNccl(f"all_gather of {lengths} elements takes a copy of all of them, and a broadcast for each")

    def _begun(self, kind: str, work: Any, output: Tensor) -> object:
        """The work, or one that says that all is well and leaves something else in the output."""
        if not self._rules.fails(self._worker, self._name, kind):
            return work
        return Then(work, lambda: output.mul_(_GARBAGE))

    def _launch(self, *facts: object) -> None:
        if self._rules.has_failed(self._worker, self._name):
            raise RuntimeError("NCCL error: the communicator met an error before")
        self._rules.launch(self._worker, self._name, self._members, facts)

    def _group(self) -> dist.ProcessGroup:
        if self._real is not None:
            return self._real
        self._rules.connects(self._worker, self._name, self._members)
        real = self._connect()
        self._rules.connected(self._worker)
        return real

    def _connect(self) -> dist.ProcessGroup:
        self._real = self._make()
        self._rules.opened(self._worker, len(self._members) - 1)
        return self._real


@dataclass
class Then:
    """A work of Gloo whose result is only there when `finish` has put it where it belongs."""

    work: Any
    finish: Callable[[], object]

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, timeout: timedelta = timedelta(hours=1)) -> bool:
        done = bool(self.work.wait(timeout))
        self.finish()
        return done


@contextmanager
def nccl_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rules]:
    """Gloo groups made meanwhile keep NCCL's rules."""
    rules, local = Rules(), threading.local()
    make_backend, make_gloo = Groups._make_backend, ops.comm.groups._make_gloo

    def remember(self: Groups, members: tuple[int, ...], name: str, creation: Any) -> None:
        local.facts = name, members, self.rank
        make_backend(self, members, name, creation)

    def lazily(*arguments: Any) -> LazyGroup:
        name, members, worker = local.facts
        return LazyGroup(rules, name, members, worker, lambda: make_gloo(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(Groups, "_make_backend", remember)
        patch.setattr(ops.comm.groups, "_make_gloo", lazily)
        yield rules
