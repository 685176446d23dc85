"""What a keeper knows: which versions of the state lie in which banks of its node, and where the next one goes. Pure.

A version is the state after a step, as one generation has computed it. Of the two banks that take turns one has the
version that training goes on from (the base: the newest committed one), and the other one is being filled. With a
commit they change places. While a checkpoint is written of a version, its bank is *pinned*; then the spare bank is used
where the node has room for it. Where it has not, the base is given up: its bank is written over, and until the
checkpoint is written only the version of the checkpoint is left.

    book.begin(generation=3, step=7, made_in=2, has_room=has_room)
    book.add(shard)                 # of step 8, by a worker of this node, or copied from another one
    if book.takes(generation=3, step=8):
        book.commit(8, position, has_room)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from actors.held_state import Snapshot
from actors.step import Position
from ops.shards import Distance, missing
from ops.update.state_memory import BANKS, TURNS, BankOrder

ShardRange = tuple[int, int]


@dataclass(kw_only=True)
class Version:
    """The state after `step`, as `generation` has computed it: the ranges of it that lie here, and its counts."""

    step: int
    generation: int
    bank: int
    ranges: set[ShardRange] = field(default_factory=set)
    updates: int = 0
    part_updates: tuple[int, ...] = ()
    distances: tuple[Distance, ...] = ()
    names: tuple[str, ...] = ()

    def is_of(self, step: int, generation: int) -> bool:
        return (self.step, self.generation) == (step, generation)

    def covers(self, lo: int, hi: int) -> bool:
        """Whether all of [lo, hi) is here."""
        return not missing(self.ranges, lo, hi)


HasRoom = Callable[[Version], bool]
"""Whether the node has room for as many banks as there are, full of what it has of this version."""


@dataclass(kw_only=True)
class VersionBook:
    """`generation`: older ones are refused. `committed`: the newest committed step that it knows of. `expected`:
    ranges that workers of this node write, or that are copied here, in this generation."""

    generation: int = 0
    committed: int = -1
    position: tuple[int, Position] | None = None  # newest step whose data position is known, and that
    next: int = 0  # the bank that is being filled
    versions: dict[int, Version] = field(default_factory=dict)  # by bank
    pinned: set[int] = field(default_factory=set)  # steps whose checkpoint is being written
    expected: set[ShardRange] = field(default_factory=set)
    _base: int = 0  # the bank of the version that training goes on from

    # -- what happens --------------------------------------------------------------------------------------------------

    def begin(self, generation: int, step: int, made_in: int, has_room: HasRoom) -> None:
        """Training goes on after `step` in `generation`, from the version that generation `made_in` has computed:
        forget all others but pinned ones, and refuse what older generations send."""
        self.generation, self.committed, self.expected = generation, step, set()
        if self.position is not None and self.position[0] > step:
            self.position = None
        self.versions = {
            bank: version
            for bank, version in self.versions.items()
            if version.is_of(step, made_in) or (version.step in self.pinned and version.step < step)
        }
        base = self.find(step, made_in)
        if base is None:
            bank = min(bank for bank in range(BANKS) if bank not in self.versions)
            base = self.versions[bank] = Version(step=step, generation=made_in, bank=bank)
        self._follow(base, has_room, is_taken_up=False)

    def add(self, shard: Snapshot) -> bool:
        """A range is whole, in the bank that `bank_for` gives. False: it belongs to what is over."""
        version = self.find(shard.step, shard.generation)
        if version is None:
            if shard.generation != self.generation or shard.step <= self.committed or self.next in self.versions:
                return False
            version = Version(step=shard.step, generation=shard.generation, bank=self.next)
            self.versions[self.next] = version
        version.ranges.add((shard.lo, shard.hi))
        self.expected.add((shard.lo, shard.hi))
        version.updates, version.part_updates, version.names = shard.updates, shard.part_updates, shard.names
        version.distances = shard.distances
        return True

    def takes(self, generation: int, step: int) -> bool:
        """Whether a commit is news, or the newest once more. Commits come by relays, where one may overtake another or
        the start of a generation: a late one would set back what is known."""
        return generation == self.generation and step >= self.committed

    def commit(self, step: int, position: Position | None, has_room: HasRoom) -> None:
        """All of the version after `step` is safe: it is the base, and older ones may go. `position` is where the data
        stands after it; the two are stored together."""
        if position is not None:
            self.position = (step, position)
        if step <= self.committed:
            return
        self.committed = step
        filled = self.versions.get(self.next)
        base = filled if filled is not None and filled.step == step else None
        self.versions = {
            bank: version for bank, version in self.versions.items() if version is base or version.step in self.pinned
        }
        if base is None:  # nothing of it lies here
            base = self.versions[self.next] = Version(step=step, generation=self.generation, bank=self.next)
        self._follow(base, has_room, is_taken_up=True)

    def pin(self, steps: Collection[int]) -> None:
        """Checkpoints of these steps alone are being written."""
        self.pinned = set(steps)
        self.versions = {
            bank: version
            for bank, version in self.versions.items()
            if version.step >= self.committed or version.step in self.pinned
        }

    def _follow(self, base: Version, has_room: HasRoom, is_taken_up: bool) -> None:
        """Choose where the version after the base goes. Where nothing is free the base is given up, if the workers
        have it; else the oldest version of which a checkpoint is being written, which then is written of a later one.
        """
        self._base = base.bank
        free = [bank for bank in range(BANKS) if bank not in self.versions]
        if free and (free[0] < TURNS or has_room(base)):
            self.next = free[0]
            return
        others = [version for version in self.versions.values() if version is not base]
        keeps_base = not is_taken_up or base.step in self.pinned
        given_up = min(others, key=lambda version: version.step) if others and keeps_base else base
        del self.versions[given_up.bank]
        self.next = given_up.bank

    # -- what is asked -------------------------------------------------------------------------------------------------

    def find(self, step: int, generation: int) -> Version | None:
        """The version after this step of this generation, if anything of it may be here."""
        return next((version for version in self.versions.values() if version.is_of(step, generation)), None)

    def bank_for(self, step: int, generation: int) -> int | None:
        """The bank that a range of this version is written into; None: not yet, what lies there is needed."""
        version = self.find(step, generation)
        if version is not None:
            return version.bank
        return self.next if self.next not in self.versions else None

    @property
    def order(self) -> BankOrder:
        """What workers may count on."""
        return BankOrder(generation=self.generation, step=self.committed, held=self._base, next=self.next)

    @property
    def base(self) -> Version | None:
        """The version that training goes on from; None where it was given up."""
        return self.versions.get(self._base) if self._base != self.next else None

    def garbage(self, bank: int, total: int) -> list[ShardRange]:
        """Parts of the flat vector of which nothing needs what is in this bank."""
        held = self.versions.get(bank)
        base = self.base
        kept = set(held.ranges) if held is not None else set()
        if bank in (self._base, self.next):
            kept |= self.expected | (base.ranges if base is not None else set())
        return missing(kept, 0, total)

    # -- kept for whoever comes after this process ---------------------------------------------------------------------

    def to_json(self) -> dict[str, object]:
        """All of it, as an object of JSON."""
        known = {name: value for name, value in vars(self).items() if name != "versions"}
        for name in ("pinned", "expected"):
            known[name] = sorted(known[name])
        listed = [{**asdict(version), "ranges": sorted(version.ranges)} for version in self.versions.values()]
        return {**known, "versions": listed}

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> VersionBook:  # JSON
        """The book that `to_json` gave, once it has been JSON."""
        versions = [
            Version(
                step=one["step"],
                generation=one["generation"],
                bank=one["bank"],
                ranges={(lo, hi) for lo, hi in one["ranges"]},
                updates=one["updates"],
                part_updates=tuple(one["part_updates"]),
                distances=tuple(Distance(**known_of) for known_of in one["distances"]),
                names=tuple(one["names"]),
            )
            for one in known["versions"]
        ]
        position = known["position"]
        book = cls(
            generation=known["generation"],
            committed=known["committed"],
            position=(position[0], position[1]) if position else None,
            next=known["next"],
            versions={version.bank: version for version in versions},
            pinned=set(known["pinned"]),
            expected={(lo, hi) for lo, hi in known["expected"]},
        )
        book._base = known["_base"]
        return book
