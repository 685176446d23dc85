"""What memory some workers would lack to train together: of their devices, and of their nodes.

The membership asks before it forms a generation of them, so that a run which shrinks, or grows by a worker that is
alone on its node, waits for others in place of ending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from actors.config import SnapshotConfig
from actors.messages import WorkerInfo
from actors.plan.costs.needs import Needs
from actors.planning.demand import Demand
from actors.planning.room import GenerationRoom
from actors.state.hosts import (
    HostNeed,
    aside_gib,
    asides_at_once,
    needs_of_hosts,
    refuse_short_hosts,
    refuse_short_stores,
    shortages,
)


@dataclass(kw_only=True)
class Shortage:
    """Which nodes and workers of one run have too little memory. `room` has the sizes of what is trained, `demand` what
    must run on every worker (None: nobody has predicted it) and `needs` its memory. `samples`: clips are made beside
    the run, and each node must have memory for one; so it must for the task that writes LoRA files, of
    `lora_files_gib`."""

    snapshot: SnapshotConfig
    room: GenerationRoom
    demand: Demand | None = None
    needs: Needs = field(default_factory=Needs)
    samples: bool = False
    lora_files_gib: float = 0.0
    # GiB that each node could spare before it had any state of this run; None: it had some when it was seen first.
    _hosts: dict[str, float | None] = field(default_factory=dict, init=False)
    _begun: bool = field(default=False, init=False)

    def begin(self, infos: Sequence[WorkerInfo], fresh: bool) -> None:
        """A generation of these workers is about to form. `fresh`: nothing of the run's state is in anybody's memory
        yet. Raises PlanError when a node of the first generation of a fresh run has too little memory."""
        if not self._begun and fresh:
            refuse_short_hosts(self._needs_of_hosts(infos))
            refuse_short_stores(infos, self.room.sizes.state_gib, self.room.sizes.state_bytes, self.snapshot)
        self._note(infos, known=self._begun or fresh)
        self._begun = True

    def of(self, infos: Sequence[WorkerInfo]) -> str:
        """What these workers lack, in a sentence; "" for nothing."""
        return self._of_devices(infos) or self._of_hosts(infos)

    def asides_at_once(self, infos: Sequence[WorkerInfo]) -> int | None:
        """How many workers of a node may make a sample at a time in the generation of these workers, which has begun;
        None: any number."""
        return asides_at_once(self._needs_of_hosts(self._as_before(infos)))

    def _of_devices(self, infos: Sequence[WorkerInfo]) -> str:
        rooms = {info.worker: room for info, room in zip(infos, self.room.of(infos), strict=True) if room is not None}
        if self.demand is None or not rooms:
            return ""
        worker = min(rooms, key=rooms.__getitem__)
        need = self.demand.need_gib(self.needs, self.room.degrees, len(infos))
        if need <= rooms[worker]:
            return ""
        return (
            f"a clip of some bucket needs {need:.1f} GiB, and of {len(infos)} workers {worker} has {rooms[worker]:.1f}"
        )

    def _of_hosts(self, infos: Sequence[WorkerInfo]) -> str:
        """What the nodes lack, compared with the memory that they could spare before they held any state of this run: a
        worker that starts later sees less."""
        if not self._begun:
            return ""
        self._note(infos, known=True)
        return " ".join(shortages(self._needs_of_hosts(self._as_before(infos))))

    def _as_before(self, infos: Sequence[WorkerInfo]) -> list[WorkerInfo]:
        """The workers with what their nodes could spare when they had nothing of this run."""
        return [replace(info, host_room_gib=self._hosts[info.node]) for info in infos]

    def _needs_of_hosts(self, infos: Sequence[WorkerInfo]) -> list[tuple[str, HostNeed, float | None]]:
        sizes, gpu = self.room.sizes, infos[0].device != "cpu"
        sample = aside_gib(sizes.state_gib, sizes.state_bytes, sizes.parameter_bytes, gpu) if self.samples else 0.0
        files = self.lora_files_gib
        return needs_of_hosts(infos, sizes.state_gib, sizes.state_bytes, self.snapshot, sample, files)

    def _note(self, infos: Sequence[WorkerInfo], known: bool) -> None:
        new: dict[str, float | None] = {}
        for info in infos:
            if info.node not in self._hosts:
                told = [room for room in (new.get(info.node), info.host_room_gib) if room is not None]
                new[info.node] = min(told, default=None) if known else None
        self._hosts.update(new)
