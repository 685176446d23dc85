"""Where a generation starts: which of the held states is whole and newest, and what follows from it.

recovery = state.recover(generation, world)     # asks who holds what, decides
committer.go_on_from(recovery)                  # commits what it makes safe; keepers drop what is later

A step is committed when every shard of it is held where its worker's death cannot take it. Only then is its line of
metrics written and its data released: what is not committed is computed again. With `snapshot.every` above 1 the steps
between two snapshots are held by the workers alone: they count as committed at once, and a loss computes them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.messages import Origin, Snapshot
from actors.state.keeper import HeldShard
from actors.state.keeper_fleet import Keepers
from actors.step import CollectedStep
from ops.shards import missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The state a generation starts from, and what follows for steps that are finished or committed."""

    generation: int
    origin: Origin | None  # None: the model's first weights
    newly_safe: tuple[CollectedStep, ...] = ()  # finished, not committed yet, and held: to be committed now, in order
    lost_steps: int = 0  # committed, but held nowhere any more: computed again
    resumed: bool = False  # what this controller began from: nobody has anything later

    @property
    def step(self) -> int:
        """Training goes on after this step; -1: from the start."""
        return self.origin.step if self.origin is not None else -1


def recovery_from(
    origin: Origin | None, generation: int, committed: int, finished: Sequence[CollectedStep]
) -> Recovery:
    """`origin` is the newest state that is held, `finished` are the steps of the commit log, oldest first."""
    step = origin.step if origin is not None else -1
    return Recovery(
        generation=generation,
        origin=origin,
        newly_safe=tuple(done for done in finished if done.running.step <= step),
        lost_steps=max(0, committed - step),
    )


def origin_of(
    keepers: Keepers,
    exports: Sequence[Snapshot],
    checkpoint: tuple[int, Path] | None,
    patience_s: float,
    newest: int | None = None,
) -> Origin | None:
    """The newest state that can be put together: keepers and surviving workers first, then the checkpoint.

    Keepers that live are waited for as long as `patience_s`, unless what the others hold gives `newest`; afterwards
    `keepers.silent` names those that have not answered and may hold more than was found.

    Snapshots of steps after `newest` are ignored. Every worker may have finished such a step, but its reports are lost
    with a worker or with the controller: it has no metrics, so it is computed again.
    """
    exports = [snapshot for snapshot in exports if newest is None or snapshot.step <= newest]
    offered = {f"export/{i}": [held_of(snapshot)] for i, snapshot in enumerate(exports)}

    def up_to_newest(inventories: Mapping[str, Sequence[HeldShard]]) -> dict[str, list[HeldShard]]:
        return {
            name: [held for held in inventory if newest is None or held.step <= newest]
            for name, inventory in inventories.items()
        }

    def enough(inventories: Mapping[str, Sequence[HeldShard]]) -> bool:
        whole = recoverable({**up_to_newest(inventories), **offered})
        steps = [known[0] for known in (whole, checkpoint) if known is not None]
        return newest is not None and max(steps, default=-1) >= newest

    kept = up_to_newest(keepers.inventories(patience_s, enough))
    found = recoverable({**kept, **offered})
    if found is not None and (checkpoint is None or found[0] >= checkpoint[0]):
        holders = [name for name, inventory in kept.items() if any((h.step, h.generation) == found for h in inventory)]
        # An export dies with its worker, which may be leaving: only where the keepers have gaps.
        needed = [] if recoverable(kept) == found else [s for s in exports if (s.step, s.generation) == found]
        return Origin(step=found[0], keepers=keepers.handles(holders), exports=tuple(s.shard for s in needed))
    if checkpoint is not None:
        return Origin(step=checkpoint[0], checkpoint=str(checkpoint[1]))
    return None


def held_of(snapshot: Snapshot) -> HeldShard:
    """The shard as a keeper would list it."""
    return HeldShard(
        step=snapshot.step,
        generation=snapshot.generation,
        lo=snapshot.lo,
        hi=snapshot.hi,
        total=snapshot.total,
        num_bytes=0,
    )


def recoverable(inventories: Mapping[str, Sequence[HeldShard]]) -> tuple[int, int] | None:
    """(step, generation) of the newest step whose shards of one generation cover the whole vector, or None."""
    ranges: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for held in (held for inventory in inventories.values() for held in inventory):
        ranges.setdefault((held.step, held.generation, held.total), []).append((held.lo, held.hi))
    whole = [(step, generation) for (step, generation, total), have in ranges.items() if not missing(have, 0, total)]
    return max(whole, default=None)
