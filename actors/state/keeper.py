"""Keepers: the process of each node that keeps versions of the training state alive in the node's memory.

The memory (`ops.update.state_memory`) is the keeper's and is mapped by the workers of its node, who write their shards
into it; so nothing is copied on a node, and a worker's death takes nothing with it. A keeper of another node copies
what the controller names, in pieces, so that a lost node takes nothing either. A step is committed when every shard of
it is held by the keeper of its node and by `snapshot.copies` others. `actors.state.recovery` finds the newest step that
is whole from the keepers' own inventories, so a restarted controller needs nothing else.

    controller:  keeper.begin.remote(generation, step, made_in, total, members)
    worker:      joined = keeper.join.remote(generation, pid, lo, hi); memory = borrow(joined.number)
    controller:  keeper.put.remote(snapshots); other.hold.remote([(snapshot, keeper), ...])
                 keeper.commit.remote(generation, step, position, pinned)       # older versions may go
    recovery:    keeper.inventory.remote(); keeper.read.remote(step, generation, lo, hi)

What a keeper knows lies in the same memory: if it dies, another one takes the memory over from a worker (`adopt`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np

from actors import process
from actors.held_state import COPIES, READS, WRITES, HeldShard, JoinAnswer, NodeKeeper, Snapshot, WrittenShard
from actors.refs import Method
from actors.state.checkpoint_files import write_shard
from actors.state.pulling import PIECE, pull
from actors.state.versions import Version, VersionBook
from actors.step import Position
from ops.memory.lending import Lender, borrow
from ops.memory.node_room import node_room
from ops.shards import ARRAYS, Distance, ShardState
from ops.update.state_memory import BANKS, SEATS, TURNS, BankOrder, StateMemory

log = logging.getLogger(__name__)

Process = tuple[int, str]  # pid and birth (`actors.process`)

_FILES_AT_ONCE = 4  # of a checkpoint, that a keeper writes
_WRITES_AT_ONCE = 3  # of checkpoints: one, beside two that were given up as their storage hangs
_SMALL = 64 << 20  # bytes; a smaller range is taken without a look at the node's memory
_ENDED_S = 10.0  # for a process to end after SIGKILL
_LOOK_S = 0.02
_GIVEN_AT_ONCE = 1 << 25  # elements that are let go of while no other call is served


class VersionLost(RuntimeError):
    """The version that was being written is not there any more."""


class Outdated(RuntimeError):
    """The generation for which something was done is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How far the run is, as its keeper last heard."""

    committed: int = -1  # newest committed step
    generation: int = 0  # older ones are refused
    position: tuple[int, Position] | None = None  # newest step whose data position it knows, and that


class KeeperHandle(NodeKeeper, Protocol):
    """A keeper as the controller knows it."""

    @property
    def begin(self) -> Method[[int, int, int, int, tuple[Process, ...]], None]: ...
    @property
    def adopt(self) -> Method[[tuple[int, ...]], bool]: ...
    @property
    def hold(self) -> Method[[list[tuple[Snapshot, NodeKeeper]]], bool]: ...
    @property
    def commit(self) -> Method[[int, int, Position | None, tuple[int, ...]], None]: ...
    @property
    def inventory(self) -> Method[[], list[HeldShard]]: ...
    @property
    def take_over(self) -> Method[[], Standing]: ...
    @property
    def standing(self) -> Method[[], Standing]: ...
    @property
    def room(self) -> Method[[], tuple[str, int]]: ...


class Keeper:
    """Plain class; `spawn` runs it as a Ray actor, with threads in which it copies, hands out and writes. What only
    takes a look or a note is done in the order in which it was asked for."""

    def __init__(self, room: Callable[[], int] = node_room, *, piece_elements: int = PIECE) -> None:
        """`room` gives the bytes that this node can still spare; copies come in pieces of `piece_elements`."""
        self._room, self._piece_elements = room, piece_elements
        self._own: Process = (os.getpid(), process.birth(os.getpid()))
        self._lock = threading.RLock()
        self._book = VersionBook()
        self._memory: StateMemory | None = None
        self._lender: Lender | None = None
        self._members: tuple[Process, ...] = ()  # workers of this node in the generation, by seat
        self._refused = ""  # why the generation could not begin here
        self._without_memory = -1  # the newest generation for which the memory could not be made
        self._trimming: threading.Thread | None = None
        self._told_long = False  # a warning said that the position of the data is too long
        self._to_trim = False  # ranges have changed, or a bank more than those that take turns was in use

    # -- a generation --------------------------------------------------------------------------------------------------

    def begin(self, generation: int, step: int, made_in: int, total: int, members: Sequence[Process] = ()) -> None:
        """Training goes on after `step` in `generation`, from the version that generation `made_in` has computed, of
        `total` elements; `members` are its workers on this node. Versions of other steps go, what older generations
        send is refused, and workers of them that may still be writing here are ended."""
        with self._lock:
            if generation < self._book.generation:
                return
            if self._memory is None:
                try:
                    self._lend(StateMemory.reserve(total))
                except (OSError, MemoryError) as error:  # nobody takes this answer: those hear of it that need it
                    self._without_memory = max(generation, self._without_memory)
                    self._refused = (
                        f"the keeper on {socket.gethostname()} cannot make the memory of the state, of {total} "
                        f"parameters: {error}. See `ulimit -a` there"
                    )
                    log.error("%s", self._refused)
                    return
            assert self._memory is not None
            self._book.begin(generation, step, made_in, self._has_spare_room)
            self._to_trim = True
            self._memory.order = self._book.order  # first: no worker begins to write for an older one from now on
            before, self._members = self._members, tuple((pid, born) for pid, born in members)
            present = [one for seat, one in enumerate(before) if self._memory.present[seat]]
            self._refused = end_all([one for one in present if one not in self._members])
            if total != (here := self._memory.total):
                self._refused = (
                    f"the memory of this node has the state of {here} parameters, the model has {total}; use the run's "
                    f"own model."
                )
            self._memory.present[:] = 0
            self._note()

    def adopt(self, numbers: Sequence[int]) -> bool:
        """Take over the memory that a worker of this node lends by one of these numbers, with all that the keeper
        before this one knew of it. That one is ended, if it lives: it may only have been silent, and would go on where
        it stopped. False when there is none to be had."""
        with self._lock:
            for number in numbers if self._memory is None else ():
                try:
                    memory = StateMemory(borrow(number))
                except ConnectionError as error:
                    log.info("no worker lends its memory as %d: %s", number, error)
                    continue
                before, book, members = known_by(memory.index)
                if why := end_all([before] if before != self._own else []):
                    log.error("the memory of this node cannot be taken over: %s", why)
                    break
                self._book, self._members = book, members
                self._lend(memory)
                self._leave()
                log.warning("the memory of this node was taken over, with %d shards", len(self.inventory()))
                break
            return self._memory is not None

    def join(self, generation: int, pid: int, lo: int, hi: int) -> JoinAnswer | None:
        """A worker of this node enters the generation with the range [lo, hi). None: the generation has not begun here
        yet. Raises RuntimeError where it cannot."""
        with self._lock:
            if self._refused and generation in (self._book.generation, self._without_memory):
                raise RuntimeError(self._refused)
            if generation != self._book.generation or self._memory is None or self._lender is None:
                return None
            seat = [member for member, _ in self._members].index(pid)
            self._memory.present[seat] = 1
            self._book.expected.add((lo, hi))
            self._note()
            base = self._book.base
            assert base is not None, "a generation begins with it"
            return JoinAnswer(
                number=self._lender.number,
                seat=seat,
                made_in=base.generation,
                ranges=tuple(sorted(base.ranges)),
                names=base.names,
                updates=base.updates,
                part_updates=base.part_updates,
                distances=base.distances,
            )

    # -- versions ------------------------------------------------------------------------------------------------------

    def put(self, snapshots: Sequence[Snapshot]) -> bool:
        """Workers of this node have written these shards, all of them. False when one comes from what is over."""
        with self._lock:
            book = self._book
            taken = [book.bank_for(one.step, one.generation) == one.bank and book.add(one) for one in snapshots]
            self._note()
            return all(taken)

    def hold(self, shards: Sequence[tuple[Snapshot, NodeKeeper]]) -> bool:
        """Copy shards, each from the keeper of another node that has it or will know of it soon. Returns when all
        are here; False when one comes from what is over. Raises MemoryError when this node has no room: better a clear
        answer than a node that ends its processes. Runs in the thread group COPIES."""
        try:
            return all(self._copied(snapshot, source) for snapshot, source in shards)
        except Outdated:
            return False

    def _copied(self, snapshot: Snapshot, source: NodeKeeper) -> bool:
        version, lo, hi = (snapshot.step, snapshot.generation), snapshot.lo, snapshot.hi
        bank = self._bank_for(snapshot)

        def go_on() -> None:
            with self._lock:
                if self._is_over(snapshot) or self._book.bank_for(*version) != bank:
                    raise Outdated

        if self.read(*version, lo, hi) is not None:
            return True
        into = self._taken(bank, snapshot)
        # With the lock: when a generation has begun, what lies here is what its workers write, and no late piece.
        piece = self._piece_elements
        while pull(source, version, lo, hi, into, go_on, self._lock, piece_elements=piece) is None:
            time.sleep(_LOOK_S)
        with self._lock:
            taken = not self._is_over(snapshot) and self._book.bank_for(*version) == bank and self._book.add(snapshot)
            self._note()
            return taken

    def commit(
        self, generation: int, step: int, position: Position | None = None, pinned: Collection[int] = ()
    ) -> None:
        """`step` is safe on all its keepers: older versions may go, but those of the steps `pinned`, whose checkpoints
        are being written. `position` is where the data stands after it. Does nothing if it comes late: after a newer
        one, or when another than `generation` has begun."""
        with self._lock:
            if not self._book.takes(generation, step):
                return
            self._book.pin(pinned)
            self._book.commit(step, position, self._has_spare_room)
            self._note()
            spare = {version.bank for version in self._book.versions.values()} | {self._book.next}
            self._to_trim |= max(spare) >= TURNS
            if self._to_trim and max(spare) < TURNS:
                self._to_trim = False
                self._trim()

    # -- what is here --------------------------------------------------------------------------------------------------

    def inventory(self) -> list[HeldShard]:
        """Everything that is held, for `actors.state.recovery`."""
        with self._lock:
            versions = list(self._book.versions.values())
            return [shard for version in versions for shard in self.held(version.step, version.generation)]

    def take_over(self) -> Standing:
        """What a controller asks that takes the run over: it goes on after the committed step, in a generation that is
        not refused. What an earlier one has sent is refused from now on. A commit of its that came later would let go
        of the version that this answer names."""
        with self._lock:
            self._book.generation += 1
            self._note()
            return self.standing()

    def standing(self) -> Standing:
        """How far the run is."""
        book = self._book
        return Standing(committed=book.committed, generation=book.generation, position=book.position)

    def held(self, step: int, generation: int) -> list[HeldShard]:
        """What of a version is held."""
        with self._lock:
            version = self._book.find(step, generation)
            if version is None or self._memory is None:
                return []
            return [
                HeldShard(
                    step=step,
                    generation=generation,
                    lo=lo,
                    hi=hi,
                    total=self._memory.total,
                    num_bytes=(hi - lo) * 4 * len(version.names),
                )
                for lo, hi in sorted(version.ranges)
            ]

    def read(self, step: int, generation: int, lo: int, hi: int) -> ShardState | None:
        """[lo, hi) of a version, in the keeper's own memory: as a Ray actor it is copied when the call returns. None
        when not all of it is held, which has to be asked again afterwards. Runs in the thread group READS."""
        with self._lock:
            version = self._book.find(step, generation)
            if version is None or self._memory is None or not version.covers(lo, hi):
                return None
            return ShardState(
                updates=version.updates,
                lo=lo,
                hi=hi,
                total=self._memory.total,
                arrays=self._memory.arrays(version.bank, lo, hi, version.names),
                part_updates=version.part_updates,
                distances=version.distances,
            )

    def write(self, folder: str, step: int, generation: int, ranges: Sequence[tuple[int, int]]) -> list[WrittenShard]:
        """Write these ranges of a version into the folder of a checkpoint, each into a file of its own, a few at a
        time. Raises VersionLost when the version is not all there to the end, OSError; nothing is being written then.
        Runs in the thread group WRITES."""
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="shard") as pool:
            files = [pool.submit(self._write, Path(folder), step, generation, *bounds) for bounds in ranges]
            try:
                return [file.result() for file in files]
            except BaseException:
                pool.shutdown(cancel_futures=True)  # waits for those that have begun
                raise

    def _write(self, folder: Path, step: int, generation: int, lo: int, hi: int) -> WrittenShard:
        shard = self.read(step, generation, lo, hi)
        file = write_shard(folder, shard) if shard is not None else None
        if file is None or self.read(step, generation, lo, hi) is None:
            raise VersionLost(f"the keeper on {socket.gethostname()} has let go of step {step}")
        return WrittenShard(lo=lo, hi=hi, name=file.name, size=file.size, crc32=file.crc32)

    def used_bytes(self) -> int:
        """Memory that the state takes here."""
        return self._memory.taken_bytes if self._memory is not None else 0

    def room(self) -> tuple[str, int]:
        """This host, and the bytes that the state may take here, what is held already included."""
        return socket.gethostname(), self.used_bytes() + self._room()

    def close(self) -> None:
        """Lend no more. The memory is there as long as a process has it."""
        if self._lender is not None:
            self._lender.close()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _lend(self, memory: StateMemory) -> None:
        self._memory, self._lender = memory, Lender(memory.memory)

    def _note(self) -> None:
        """Leave what is known now to whoever comes after this process, then let workers see what follows for them."""
        if self._memory is not None:
            self._leave()
            self._memory.order = self._book.order

    def _leave(self) -> None:
        """A position of the data that is too long is left out, as whoever comes after can do without: workers wait for
        what a commit says after this."""
        assert self._memory is not None
        try:
            self._memory.index = described(self._own, self._book, self._members)
        except ValueError as error:
            if not self._told_long:
                log.warning("the position of the data is not left to another keeper: %s", error)
            self._told_long = True
            self._memory.index = described(self._own, replace(self._book, position=None), self._members)

    def _is_over(self, snapshot: Snapshot) -> bool:
        book = self._book
        return book.find(snapshot.step, snapshot.generation) is None and (
            snapshot.generation < book.generation or snapshot.step <= book.committed
        )

    def _bank_for(self, snapshot: Snapshot) -> int:
        """Where a copy goes. Waits until nothing needs what lies there; raises Outdated, and MemoryError where there is
        no memory."""
        while True:
            with self._lock:
                if self._memory is None and snapshot.generation <= self._without_memory:
                    raise MemoryError(self._refused)
                ready = self._memory is not None and self._book.generation >= snapshot.generation
                if ready and self._is_over(snapshot):
                    raise Outdated
                bank = self._book.bank_for(snapshot.step, snapshot.generation) if ready else None
                if bank is not None:
                    self._book.expected.add((snapshot.lo, snapshot.hi))
                    return bank
            time.sleep(_LOOK_S)

    def _taken(self, bank: int, snapshot: Snapshot) -> dict[str, np.ndarray]:
        """The range of a shard in a bank, with pages."""
        assert self._memory is not None
        lo, hi, names = snapshot.lo, snapshot.hi, snapshot.names
        num_bytes = (hi - lo) * 4 * len(names)
        try:
            if num_bytes > _SMALL:
                self._memory.take(bank, lo, hi, names)
        except MemoryError:
            room = self._room()
            raise MemoryError(
                f"the keeper on {socket.gethostname()} holds {self.used_bytes() / 2**20:.0f} MiB and is given "
                f"{num_bytes / 2**20:.0f} MiB more, but the node can spare {room / 2**20:.0f} MiB. Add nodes or "
                f"memory, lower snapshot.copies, or set snapshot.enabled: false."
            ) from None
        return self._memory.arrays(bank, lo, hi, names)

    def _has_spare_room(self, base: Version) -> bool:
        wanted = BANKS * sum(hi - lo for lo, hi in base.ranges) * 4 * len(base.names)
        return wanted - self.used_bytes() <= self._room()

    def _trim(self) -> None:
        """Let go of pages that are not needed, beside what else is asked: of a bank that was used for a checkpoint, and
        of ranges that other nodes have now."""
        if self._trimming is None or not self._trimming.is_alive():
            self._trimming = threading.Thread(target=self._give, name="trim", daemon=True)
            self._trimming.start()

    def _give(self) -> None:
        memory = self._memory
        assert memory is not None
        for bank in range(BANKS):
            at = 0
            while at < memory.total:
                with self._lock:  # anew for each piece, as banks and ranges come into use meanwhile
                    unused = [(max(lo, at), hi) for lo, hi in self._book.garbage(bank, memory.total) if hi > at]
                    lo, hi = min(unused, default=(memory.total, memory.total))
                    at = min(hi, lo + _GIVEN_AT_ONCE)
                    memory.give(bank, lo, at)


def described(keeper: Process, book: VersionBook, members: Sequence[Process]) -> bytes:
    """What the keeper that runs in the process `keeper` knows, for the one that comes after it."""
    return json.dumps({"keeper": keeper, "book": book.to_json(), "members": list(members)}).encode()


def known_by(index: bytes) -> tuple[Process, VersionBook, tuple[Process, ...]]:
    """What `described` was given."""
    known = json.loads(index)
    pid, born = known["keeper"]
    return (pid, born), VersionBook.from_json(known["book"]), tuple((pid, born) for pid, born in known["members"])


def end_all(processes: Sequence[Process]) -> str:
    """SIGKILL those that live, and wait until they have ended. Why that could not be done; "" if it was."""
    for pid, born in processes:
        if process.kill(pid, born):
            log.warning("ended process %d, which had not left its generation", pid)
    deadline = time.monotonic() + _ENDED_S
    while living := [pid for pid, born in processes if process.lives(pid, born)]:
        if time.monotonic() > deadline:
            return (
                f"process {living[0]} still has this node's memory {_ENDED_S:g} s after SIGKILL; it hangs in the "
                f"kernel. Restart the node, or take it out of the cluster."
            )
        time.sleep(_LOOK_S)
    return ""


# Where shards go --------------------------------------------------------------------------------


def place(workers: Mapping[int, str], keepers: Mapping[str, str], copies: int = 1) -> dict[int, tuple[str, ...]]:
    """Keepers that copy each worker's shard, beside the one of its own node: on other nodes than it and than each
    other, as far as there are such nodes.

    `workers` and `keepers` map to their nodes. The load is spread evenly. At most one copy goes to a keeper.
    """
    nodes = {node: n for n, node in enumerate(sorted({*workers.values(), *keepers.values()}))}
    load: Counter[str] = Counter()
    chosen: dict[int, tuple[str, ...]] = {}
    for worker, home in sorted(workers.items()):
        mine: list[str] = []
        for _ in range(copies):
            used = {home, *(keepers[name] for name in mine)}
            free = [name for name, node in keepers.items() if node not in used]
            if not free:
                break
            # Ties go to the next node in a circle: taking the first would leave the last worker with a full one.
            ahead = {name: (nodes[keepers[name]] - nodes[home]) % len(nodes) for name in free}
            best = min(free, key=lambda name: (load[name], ahead[name], name))
            load[best] += 1
            mine.append(best)
        chosen[worker] = tuple(mine)
    return chosen


def forecast_bytes(total: int, *, weight_bytes: int, copies: int, num_keepers: int) -> int:
    """Memory per keeper, spread evenly: two versions of what its node's workers own, and of what it copies. A state
    takes `weight_bytes` of each of `total` elements."""
    return TURNS * total * weight_bytes * (1 + min(copies, num_keepers - 1)) // num_keepers


# Ray ----------------------------------------------------------------------------------------------------------------


@cache
def protocol() -> str:
    """A digest of what keepers are asked and answer, and of how what they know lies in memory. Keepers outlive the
    controller, and the next one may be of another version."""
    messages = (Snapshot, HeldShard, JoinAnswer, WrittenShard, Standing, ShardState, Distance, Version, VersionBook)
    said = [(one.__name__, *((of.name, str(of.type)) for of in fields(one))) for one in (*messages, BankOrder)]
    methods = sorted(name for name in vars(Keeper) if not name.startswith("_"))
    asked = [(name, *map(str, getattr(vars(Keeper)[name], "__annotations__", {}).items())) for name in methods]
    return blake2b(json.dumps([said, asked, BANKS, TURNS, SEATS, ARRAYS]).encode(), digest_size=4).hexdigest()


def spawn(name: str, node_id: str, *, namespace: str) -> KeeperHandle:
    """A keeper as a detached actor on this node: it outlives the controller and is found again by `attach`."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.ray_calls import remote_of

    actor = remote_of(Keeper, {COPIES: 2, READS: 2, WRITES: _WRITES_AT_ONCE}).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    keeper: KeeperHandle = actor.remote()
    return keeper


def attach(names: Sequence[str], *, namespace: str) -> dict[str, KeeperHandle]:
    """Handles of the keepers with these names, by name; those that do not exist are left out."""
    import ray

    found: dict[str, KeeperHandle] = {}
    for name in names:
        try:
            found[name] = ray.get_actor(name, namespace=namespace)
        except ValueError:
            log.info("keeper %s is gone", name)
    return found
