"""A run that waits for clips which nobody can decode, because no CPU is free for it: told once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from actors.outcome import Tell
from actors.ray_calls import free_by_node
from actors.records.events import DecodingAwaited
from data.config import EngineConfig

_WAITED_S = 30.0  # for one step's clips, before anybody asks why
_LOOK_S = 5.0

FreeByNode = Callable[[], Mapping[str, Mapping[str, float]]]  # node's id -> what is unused there, by Ray's names


class DecodeRoom:
    """Looks for free CPUs while a step's clips are awaited for long. All times are seconds of the caller's clock."""

    def __init__(self, engine: EngineConfig, tell: Tell, free: FreeByNode = free_by_node) -> None:
        self._engine, self._tell, self._free = engine, tell, free
        self._since: float | None = None
        self._looked_at = 0.0
        self._told: tuple[str, ...] | None = None  # the nodes that were avoided then
        self.lacks = False  # no CPU was free at the last look of this wait

    def came(self) -> None:
        """The clips of a step have come."""
        self._since, self.lacks = None, False

    def awaited(self, avoid: Sequence[str], now: float) -> None:
        """A step's clips are still awaited; nothing is decoded on the nodes to `avoid`."""
        if self._engine.kind != "ray":
            return  # a pool of processes asks Ray for nothing
        self._since = now if self._since is None else self._since
        if now - self._since < _WAITED_S or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        cpus = {node: free.get("CPU", 0.0) for node, free in self._free().items()}
        needed = self._engine.decode_cpus
        self.lacks = not any(free >= needed for node, free in cpus.items() if node not in avoid)
        if self.lacks and self._told != tuple(avoid):
            self._told = tuple(avoid)
            beyond = sum(cpus.get(node, 0.0) for node in avoid)
            self._tell(DecodingAwaited(cpus=needed, nodes_avoided=len(avoid), cpus_avoided=round(beyond, 3)))
