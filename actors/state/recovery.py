"""Where a generation starts: which of the held states is whole and newest, and what follows from it. Pure.

recovery = recovery_of(inventories, checkpoint, log)    # `RunState.recover` asks which keeper holds what
committer.go_on_from(recovery)                          # commits what it makes safe

A step is committed when every shard of it is held where its worker's death cannot take it. Only then is its line of
metrics written and its data released: what is not committed is computed again. With `snapshot.every` above 1 the steps
between two snapshots are held by the workers alone: they count as committed at once, and a loss computes them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.held_state import HeldShard, NodeKeeper, Origin
from actors.step import CollectedStep
from ops.shards import missing


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitLog:
    """How far the run is: the newest committed step, -1 before the first, and finished steps after it, oldest first."""

    committed: int = -1
    finished: tuple[CollectedStep, ...] = ()
    # step and generation of the newest line of metrics, where keepers are asked how far the run is: a step counts once
    # it has its line, and keepers hear of it after that, unless the controller dies in between
    recorded: tuple[int, int] | None = None
    unread: bool = False  # that line could not be read: any later state may count, too

    @property
    def newest(self) -> int:
        """The newest step up to which all reports are known. A later state may be held, but its step has no metrics."""
        steps = [done.running.step for done in self.finished]
        return steps[-1] if steps and steps[0] == self.committed + 1 else self.committed

    @property
    def wanted(self) -> float:
        """The newest step that may count, whose state keepers are asked for; inf: not known. They may not have heard of
        the one recorded."""
        if self.unread:
            return math.inf
        return self.newest if self.recorded is None else max(self.newest, self.recorded[0])

    def knows(self, held: HeldShard) -> bool:
        """Whether the step of a shard has a line of metrics, or the reports of which one is made."""
        return held.step <= self.newest or (held.step, held.generation) == self.recorded

    def may_count(self, held: HeldShard) -> bool:
        """Whether the step of a shard has a line of metrics, as far as is known."""
        return self.unread or held.step <= self.committed or (held.step, held.generation) == self.recorded

    def until(self, step: int) -> tuple[CollectedStep, ...]:
        """Finished steps up to `step`, oldest first: safe as soon as the state after `step` is."""
        return tuple(done for done in self.finished if done.running.step <= step)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeeperInventory:
    """What one keeper says that it holds."""

    keeper: NodeKeeper
    shards: Sequence[HeldShard]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The state a generation starts from, and what follows for steps that are finished or committed."""

    origin: Origin | None  # None: the model's first weights
    newly_safe: tuple[CollectedStep, ...] = ()  # finished, not committed yet, and held: to be committed now, in order
    lost_steps: int = 0  # committed, but held nowhere any more: computed again

    @property
    def step(self) -> int:
        """Training goes on after this step; -1: from the start."""
        return self.origin.step if self.origin is not None else -1


def recovery_of(
    inventories: Sequence[KeeperInventory], checkpoint: tuple[int, Path] | None, log: CommitLog
) -> Recovery:
    """The newest state that can be put together of what keepers hold, or else the checkpoint (its step and folder).

    States of which the log does not know are ignored. Every worker may have finished one, but its reports are lost with
    a worker or with the controller: it has no metrics, so it is computed again.
    """
    found = newest_whole(held for one in inventories for held in one.shards if log.knows(held))
    origin: Origin | None = None
    if found is not None and (checkpoint is None or found[0] >= checkpoint[0]):
        holders = [one for one in inventories if any((s.step, s.generation) == found for s in one.shards)]
        origin = Origin(step=found[0], generation=found[1], keepers=tuple(one.keeper for one in holders))
    elif checkpoint is not None:
        origin = Origin(step=checkpoint[0], checkpoint=str(checkpoint[1]))
    step = origin.step if origin is not None else -1
    return Recovery(origin=origin, newly_safe=log.until(step), lost_steps=max(0, log.committed - step))


def newest_whole(shards: Iterable[HeldShard]) -> tuple[int, int] | None:
    """(step, generation) of the newest step whose shards of one generation cover the whole vector, or None."""
    ranges: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for held in shards:
        ranges.setdefault((held.step, held.generation, held.total), []).append((held.lo, held.hi))
    whole = [(step, generation) for (step, generation, total), have in ranges.items() if not missing(have, 0, total)]
    return max(whole, default=None)
