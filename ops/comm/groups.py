"""The bags of one generation, as one worker sees them: connected on demand by their members, cached, closed together.

Each bag has a store prefix made of generation and members, so only the members of a bag take part in its creation and a
name is never used twice (`new_group(use_local_synchronization=True)` counts live groups and hangs for dynamic bags).

On NCCL a communicator is made in the same background thread, not by its first collective: so no cascade waits for one,
and a member that dies meanwhile holds up that thread alone, as nothing can stop ncclCommInitRank. Several may be made
at a time and beside collectives of others: each waits for threads of its own members only, and what it allocates on
the device waits for kernels that were launched in the one order of all bags.

Use, in the same order on all members of a bag:

    groups = Groups(store, rank=2, world=(0, 1, 2, 3), backend="gloo", generation=7, timeout_s=60, cancel=token)
    groups.prepare([(0, 1), (1, 2, 3)])      # optional: connect all bags of a plan in the background, in any order
    groups.get((1, 2, 3)).all_reduce(tensor)
    groups.close()
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

from ops.comm.collectives import Group
from ops.waiting import CancelToken, CollectiveProgress, GroupError, Patience, WaitClock, without_stack

# Set before a process makes its first communicator, over what a cluster sets for other programs. By default PyTorch
# ends the process when a communicator breaks, and with it the state that a survivor holds: at once, or minutes later
# through a monitor that another worker's error has alarmed. It also does 0.1 s after a device has failed, before the
# worker has said in which cascade. With TORCH_NCCL_BLOCKING_WAIT each wait for a collective would hold the host up
# until the device has come there, and give up after a limit of its own. The debug mode for collectives out of step
# (DESYNC) switches ending on again. A dump holds the list of what is under way for up to four times its limit, while a
# broken group is to go. The NaN check ends the process for a gradient that is not finite, whose step would be skipped,
# and for padding that nobody wrote.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # wins over NCCL_BLOCKING_WAIT, its earlier name
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_NAN_CHECK": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# Sums inside the switch of a node (NVLS). A switch has memory for 128 such groups, of which each bag takes one or two;
# where one cannot be had (no slot left, a container without /dev/nvidia-caps), NCCL 2.29 no longer goes on without it
# but fails, and a member that dies while a bag connects leaves the others in a call of the driver that nothing ends.
# It is read before the first communicator and never again. A cluster whose jobs are few and long may set it to 1.
_NVLS = "NCCL_NVLS_ENABLE"
_LOOK_S = 0.05  # a cancel is seen within this
_LONG_LOOK_S = 0.5  # between looks whether all workers hold the state, which may take minutes
_GRACE_S = 5.0  # the backend gives up connecting this long after us, so that our error names the members
_LEAVE_S = 5.0  # a thread that waits for members sees a close within 0.02 s, unless the machine is busy
_PATIENT = timedelta(hours=6)


@dataclass
class _Creation:
    """A process group being connected in a thread of its own."""

    done: threading.Event = field(default_factory=threading.Event)
    connecting: bool = False  # in a constructor, which nothing can stop
    process_group: dist.ProcessGroup | None = None  # until a Group has it: nothing else holds its connections open
    error: BaseException | None = None


class Groups:
    """The bags of one generation, as one worker sees them: made on demand by their members only, cached by members.

    `rank` is this worker's number, `world` all workers of the generation. `store` is shared by all of them (the
    controller's TCPStore); `address` is the IP of this node that peers can reach, by default the host name's.
    `nodes` has the node of each worker of the world, in any numbers; None: all are on one. `device` is where NCCL makes
    communicators; None: the current one of the thread that makes this. The backend gives up connecting `grace_s` after
    `timeout_s`. `world_ctas`: multiprocessors that NCCL may take for collectives of all workers, which run beside
    cascades; `bag_ctas`: for those of a bag, which run beside its attention; 0: as it finds best.
    Not thread-safe except `close` and `abort`, which any thread may call.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: tuple[int, ...],
        backend: str,
        generation: int,
        timeout_s: float,
        cancel: CancelToken,
        address: str | None = None,
        nodes: Sequence[int] | None = None,
        device: torch.device | None = None,
        *,
        grace_s: float = _GRACE_S,
        world_ctas: int = 0,
        bag_ctas: int = 0,
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend {backend!r} is unknown; use gloo (CPU) or nccl (CUDA).")
        if rank not in world:
            raise ValueError(f"worker {rank} is not one of the generation's workers {world}.")
        self.rank = rank
        self.world = world
        self.generation = generation
        self.clock = WaitClock()  # of all its groups
        self._store = store
        self._backend = backend
        self._patience, self._grace_s = Patience(limit_s=timeout_s), grace_s
        self._cancel = cancel
        self._creations: dict[str, _Creation] = {}  # by name
        self._groups: dict[tuple[int, ...], Group] = {}
        self._lives: dict[tuple[int, ...], int] = {}  # how often a bag has been left: no name is used twice
        self._left: dict[tuple[int, ...], int] = {}  # collectives of bags before they were left
        self._counting = threading.Lock()  # a bag that is being left counts once
        self._world: Group | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._node_of = dict(zip(world, nodes or [0] * len(world), strict=True))
        self._device = _gloo_device(address) if backend == "gloo" else None
        self._world_ctas, self._bag_ctas = world_ctas, bag_ctas
        self._place = device or torch.device("cpu")
        if backend == "nccl":
            os.environ.update(_NCCL_ENVIRONMENT)
            os.environ.setdefault(_NVLS, "0")
            if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # TORCH_DISTRIBUTED_DEBUG; it means DESYNC_DEBUG, too
                dist.set_debug_level(dist.DebugLevel.INFO)
            self._place = device or torch.device("cuda", torch.cuda.current_device())  # threads begin with another one
            cancel.on_set(self._abort_beside)  # NCCL waits on the device: only aborting the communicator ends them

    def allow(self, patience: Patience) -> None:
        """How long waits may take that begin from now on, in all bags of this worker."""
        self._patience = patience
        for group in self._all():
            group.patience = patience

    def prepare(self, bags: Iterable[tuple[int, ...]]) -> None:
        """Begin to connect these bags in the background, in any order, so that `get` finds them ready."""
        for members in bags:
            self._check_members(members)
            if self.rank in members and len(members) > 1 and members not in self._groups:
                self._create(members, self._name(members))

    def get(self, members: tuple[int, ...]) -> Group:
        """The group of `members` in this rank order. Waits until all of them asked for it, if it is new.

        Without `prepare`, members of overlapping bags must ask for new bags in one common order.
        """
        group = self._groups.get(members)
        if group is None:
            group = self._groups[members] = self._connect(members, self._name(members))
            self._end_if_closed(group)
        return group

    def leave(self, members: tuple[int, ...]) -> None:
        """Close a bag to make room for others; `get` connects it anew. Returns when no member uses it any more.

        Every member calls it after the same collective of the bag; each has then ended all of them on its device.
        """
        if len(members) == 1:
            return
        group = self._groups.get(members)
        if group is None:
            raise ValueError(f"bag {members} cannot be left: it is not connected.")
        what = f"leaving bag {members} of generation {self.generation}"
        if group.failure:  # nothing could ask it later
            raise GroupError(f"{what}: it has {group.failure}.")
        store = dist.PrefixStore(self._name(members), self._store)
        if not self._meet(store, "left", group.rank, group.size, self._patience):
            self._cancel.check(what)
            raise TimeoutError(f"{what}: not all members came within {self._patience}.")
        with self._counting:
            self._groups.pop(members, None)  # another thread may have closed them all
            self._left[members] = self._left.get(members, 0) + group.progress.sequence
        self._lives[members] = self._lives.get(members, 0) + 1
        group.close()
        with suppress(RuntimeError):  # the store's: its end is that of the generation, and the bag is left
            group.forget_numbers()

    def meet(self, doing: str, patience: Patience) -> None:
        """Returns when every worker of the generation has called it. Before the first collective: each brings its part
        of the state, which takes some of them long, and collectives have little patience, which is right for steps.

        Raises Cancelled or GroupError when the generation ends, TimeoutError after `patience`.
        """
        store = dist.PrefixStore(f"heddle/{self.generation}/{doing}", self._store)
        if not self._meet(store, "here", self.world.index(self.rank), len(self.world), patience, _LONG_LOOK_S):
            self._cancel.check(doing)
            if self._closed:
                raise GroupError(f"{doing}: the groups of generation {self.generation} are closed.")
            raise TimeoutError(f"{doing}: not all workers of generation {self.generation} came within {patience}.")

    def world_group(self) -> Group:
        """The group of all workers, from the first call to the end of the generation; a bag of all workers is another
        one, which can be left."""
        world = self._world
        if world is None:
            world = self._world = self._connect(self.world, self._world_name)
            self._end_if_closed(world)
        return world

    @property
    def ended(self) -> str:
        """Why the generation has ended, "" while it runs. Collectives find out by themselves; a cascade of one worker
        has none."""
        return self._cancel.reason if self._cancel.is_set() else ""

    @property
    def progress(self) -> dict[tuple[int, ...], CollectiveProgress]:
        """Per bag, what the watchdog wants to know. Bags that were left stay in it: no count falls in a generation."""
        with self._counting:
            found = {members: CollectiveProgress(count, None, 0.0) for members, count in self._left.items()}
            groups = self._all()
        for group in groups:  # the world and a bag of all workers count as one
            one, other = group.progress, found.get(group.members)
            if other is not None:
                waits = one if one.name else other
                one = CollectiveProgress(one.sequence + other.sequence, waits.name, waits.since)
            found[group.members] = one
        return found

    @property
    def begun(self) -> int:
        """Collectives of all bags that the host has begun, also of those that were left. No device is asked."""
        with self._counting:
            return sum(self._left.values()) + sum(group.begun for group in self._all())

    def check(self, doing: str) -> None:
        """Raise when the generation was cancelled, has ended, or one of its bags has failed: on NCCL a collective that
        was aborted, or met an error, returns without one, and leaves anything in its tensors."""
        self._cancel.check(doing)
        if self._closed:
            raise GroupError(f"{doing}: the groups of generation {self.generation} are closed.")
        for group in self._all():
            if group.broken:
                raise GroupError(f"{doing}: the group {group.members} is {group.broken}.")
        if failure := self.failure:
            raise GroupError(f"{doing}: {failure}.")

    @property
    def failure(self) -> str:
        """The error that a communicator of NCCL has met, and its bag; "" if none has. Any thread may ask."""
        with self._counting:
            groups = self._all()
        return next((f"the group {group.members} has {why}" for group in groups if (why := group.failure)), "")

    def close(self) -> None:
        """Close all bags. Returns at once also with dead or frozen peers; on NCCL, when the device has passed what was
        queued of their collectives, which wait for nobody any more."""
        self._closed = True
        self._end_all(Group.close)
        self._groups.clear()
        self._world = None
        creations, deadline = list(self._creations.values()), time.monotonic() + _LEAVE_S
        for thread in self._threads:  # one that drops the last reference during interpreter exit ends in SIGABRT
            stuck = any(one.connecting and not one.done.is_set() for one in creations)
            thread.join(0.2 if stuck else max(0.2, deadline - time.monotonic()))
        for creation in creations:  # the one that was to take it has raised, and its error may still hold the creation
            creation.process_group = None
        self._creations.clear()

    def abort(self) -> None:
        """Like `close`, for a generation that has failed: communicators are aborted, waiting threads raise."""
        self._end_all(Group.abort)
        self.close()

    def _abort_beside(self) -> None:
        """`abort`, without holding up who cancels: it takes until the device has passed what is queued, which may be a
        step's computing, and without the heartbeats of the thread that cancels the worker would be replaced."""
        threading.Thread(target=self.abort, name="abort of a generation", daemon=True).start()

    def _end_all(self, end: Callable[[Group], None]) -> None:
        """NCCL ends a communicator when the device has passed its kernels. A host that is ahead may have queued them
        after a collective of another bag that waits for a dead peer: so all end at the same time."""
        groups = self._all()
        together = groups[:-1] if self._backend == "nccl" else []
        threads = [threading.Thread(target=end, args=(one,), name="end of a bag", daemon=True) for one in together]
        for thread in threads:
            thread.start()
        for group in groups[len(together) :]:
            end(group)
        for thread in threads:
            thread.join()

    def _end_if_closed(self, group: Group) -> None:
        """`close` and `abort` end the groups that they find; another thread may be about to add one."""
        if self._closed:
            group.abort()
            raise GroupError(f"bag {group.members}: the groups of generation {self.generation} are closed.")

    def _all(self) -> list[Group]:
        world = self._world  # read once: another thread may close
        return [*self._groups.values(), *([] if world is None else [world])]

    def _check_members(self, members: tuple[int, ...]) -> None:
        strangers = [m for m in members if m not in self.world]
        if strangers or len(set(members)) != len(members):
            raise ValueError(
                f"bag {members} names {strangers or 'a member twice'}; generation {self.generation} has {self.world}."
            )

    def _connect(self, members: tuple[int, ...], name: str) -> Group:
        self._check_members(members)
        if self.rank not in members:
            raise ValueError(f"worker {self.rank} asked for bag {members}, of which it is not a member.")
        if len(members) == 1:
            return Group.solo(members[0], self._cancel)
        creation = self._create(members, name)
        what = f"connecting bag {members} of generation {self.generation}"
        patience, begin = self._patience, time.monotonic()
        while not creation.done.wait(_LOOK_S):
            self._cancel.check(what)
            if time.monotonic() > begin + patience.limit_s:
                raise TimeoutError(f"{what}: not all members came within {patience}.")
        self._creations.pop(name, None)
        if creation.error is not None:
            self._cancel.check(what)
            raise GroupError(f"{what} failed: {without_stack(creation.error)}")
        process_group, creation.process_group = creation.process_group, None
        if process_group is None:
            self._cancel.check(what)
            if self._closed:
                raise GroupError(f"{what}: the groups of the generation are closed.")
            raise TimeoutError(f"{what}: not all members came within {patience}.")
        group = Group(
            process_group,
            members,
            members.index(self.rank),
            0.0,
            self._cancel,
            nodes=tuple(self._node_of[member] for member in members),
            store=dist.PrefixStore(name, self._store),
            clock=self.clock,
        )
        group.patience = self._patience
        return group

    @property
    def _world_name(self) -> str:
        return f"heddle/{self.generation}/world"

    def _name(self, members: tuple[int, ...], lives_ago: int = 0) -> str:
        life = self._lives.get(members, 0) - lives_ago
        return f"heddle/{self.generation}/{'-'.join(map(str, members))}" + (f"/{life}" if life else "")

    def _create(self, members: tuple[int, ...], name: str) -> _Creation:
        if self._closed:
            raise GroupError(f"bag {members}: the groups of generation {self.generation} are closed.")
        creation = self._creations.get(name)
        if creation is None:
            creation = self._creations[name] = _Creation()
            thread = threading.Thread(
                target=self._make_backend, args=(members, name, creation), name=f"heddle-bag-{members}", daemon=True
            )
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()
        return creation

    def _make_backend(self, members: tuple[int, ...], name: str, creation: _Creation) -> None:
        # A TCPStore client serves one blocking wait at a time: with its own clone, a bag whose peer is missing does
        # not hold up the others, nor the next generation.
        timeout = timedelta(seconds=self._patience.limit_s + self._grace_s)  # to connect, not for collectives
        rank = members.index(self.rank)
        try:
            shared: dist.Store = self._store.clone()  # type: ignore[attr-defined]
            store = dist.PrefixStore(name, shared)
            if not self._meet(store, "here", rank, len(members), self._patience):
                return
            of_all = name == self._world_name
            if not of_all and members in self._lives:
                self._forget_last_life(shared, members)
            creation.connecting = True
            creation.process_group = self._backend_of(store, rank, len(members), timeout, of_all)
            if self._closed:  # `close` has looked already
                creation.process_group = None
        except (RuntimeError, ValueError, OSError) as error:
            creation.error = error
        finally:
            creation.done.set()

    def _forget_last_life(self, shared: dist.Store, members: tuple[int, ...]) -> None:
        """All members are in the next one: nothing of the last one stays in the store, which would grow with each."""
        store, rank = dist.PrefixStore(self._name(members, lives_ago=1), shared), members.index(self.rank)
        of_backend = f"0/{rank}" if self._backend == "gloo" else "0"  # where Gloo meets this member; NCCL's id, of all
        for key in (f"here/{rank}", f"left/{rank}", of_backend):
            store.delete_key(key)

    def _backend_of(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, of_all: bool
    ) -> dist.ProcessGroup:
        if self._device is None:
            made = _make_nccl(store, rank, size, of_all, self._world_ctas if of_all else self._bag_ctas)
        else:
            made = _make_gloo(store, rank, size, timeout, self._device)
        if made.name() == "nccl":
            cast(ConnectableGroup, made).eager_connect_single_device(self._place)
        return made

    def _meet(
        self, store: dist.Store, where: str, rank: int, size: int, patience: Patience, longest_s: float = 0.02
    ) -> bool:
        """Wait until all members are here, so that the backend's constructor, which nothing can stop, does not wait.
        Looks are up to `longest_s` apart.

        False when the generation ends first, or not all came in time.
        """
        store.set(f"{where}/{rank}", "1")
        here = [f"{where}/{member}" for member in range(size)]
        pause = 0.001
        deadline = time.monotonic() + patience.limit_s
        while not store.check(here):
            if self._closed or self._cancel.is_set() or time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(longest_s, 1.5 * pause)
        return True


def _gloo_device(address: str | None) -> dist.ProcessGroupGloo.Device:
    make = dist.ProcessGroupGloo
    return make.create_device(hostname=address) if address else make.create_default_device()


def _make_gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta, device: dist.ProcessGroupGloo.Device
) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [device]
    options._threads = 2
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_default_timeout(_PATIENT)  # our own waits end sooner, and their limits follow the plan
    return _as_group(backend)


def _make_nccl(store: dist.Store, rank: int, size: int, of_all: bool, ctas: int) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    # The exchanges of bags are launched beside attention, which else has all multiprocessors before them.
    options.is_high_priority_stream = not of_all
    if ctas:
        options.config.max_ctas = ctas
    options._timeout = _PATIENT  # its watchdog has no limit of its own: the heartbeat's thread keeps that of the plan
    return _as_group(dist.ProcessGroupNCCL(store, rank, size, options))


class ConnectableGroup(Protocol):
    """What ProcessGroupNCCL has beside the collectives of a process group."""

    def eager_connect_single_device(self, device: torch.device) -> None: ...


def _as_group(backend: dist.ProcessGroupGloo | dist.ProcessGroupNCCL) -> dist.ProcessGroup:
    """Backends have the collectives of a process group; only PyTorch's annotations do not say so."""
    return cast(dist.ProcessGroup, backend)
