"""What is said about the training state outside of workers: who holds which ranges of which version, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from actors.refs import Method, Ref
from ops.sending import sent_often
from ops.shards import Distance, ShardState

COPIES = "copies"  # concurrency groups of a keeper: in which it copies what others hold
READS = "reads"  # in which it hands out what it holds
WRITES = "writes"  # in which it writes checkpoints


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One worker's shard of a finished step, as it lies in the memory of its node (`ops.update.state_memory`). Its
    keepers hear of it from the controller."""

    step: int
    generation: int
    rank: int
    lo: int
    hi: int
    total: int
    bank: int
    names: tuple[str, ...]  # of its arrays
    updates: int
    part_updates: tuple[int, ...] = ()
    distances: tuple[Distance, ...] = ()
    copied: Ref[None] | None = None  # resolves when it is all there; None: it is


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class HeldShard:
    """One range of a version that a keeper holds."""

    step: int
    generation: int
    lo: int
    hi: int
    total: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinAnswer:
    """What a keeper says to a worker of its node that enters a generation."""

    number: int  # of the lender of the node's memory
    seat: int  # of the worker there
    made_in: int  # the generation that has computed the version that training goes on from
    ranges: tuple[tuple[int, int], ...]  # of that version, that lie in the node's memory
    names: tuple[str, ...]  # of its arrays, if there are any
    updates: int
    part_updates: tuple[int, ...]
    distances: tuple[Distance, ...]


class NodeKeeper(Protocol):
    """A keeper as workers, other keepers and the writer of checkpoints know it (`actors.state.keeper`)."""

    @property
    def join(self) -> Method[[int, int, int, int], JoinAnswer | None]: ...
    @property
    def put(self) -> Method[[tuple[Snapshot, ...]], bool]: ...
    @property
    def held(self) -> Method[[int, int], list[HeldShard]]: ...
    @property
    def read(self) -> Method[[int, int, int, int], ShardState | None]: ...
    @property
    def write(self) -> Method[[str, int, int, list[tuple[int, int]]], list[WrittenShard]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShard:
    """A range of a checkpoint that a keeper has written, and the name, size and checksum of its file."""

    lo: int
    hi: int
    name: str
    size: int
    crc32: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where the training state of a generation comes from: keepers of a version of it, or a checkpoint folder."""

    step: int
    generation: int = -1  # that has computed the version; -1: it is on disk
    keepers: tuple[NodeKeeper, ...] = ()
    checkpoint: str | None = None
