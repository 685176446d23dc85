"""A run that waits for clips which nobody can decode, because its workers leave no CPU for it: told once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from actors.outcome import Tell
from actors.ray_calls import nodes
from actors.records.events import DecodingAwaited
from actors.refs import RayNode
from data.config import EngineConfig

_WAITED_S = 30.0  # for one step's clips, before anybody asks why
_LOOK_S = 5.0
_SLACK = 1e-6  # fractions of a core add up to a whole one


class DecodeRoom:
    """Looks for CPUs that workers leave to decoding while a step's clips are awaited for long; those on which clips are
    being decoded are among them. All times are seconds of the caller's clock."""

    def __init__(
        self, engine: EngineConfig, cpus_per_worker: float, tell: Tell, nodes: Callable[[], Sequence[RayNode]] = nodes
    ) -> None:
        self._engine, self._cpus_per_worker, self._tell, self._nodes = engine, cpus_per_worker, tell, nodes
        self._since: float | None = None
        self._looked_at = 0.0
        self._told: tuple[str, ...] | None = None  # the nodes that were avoided then
        self.lacks = False  # True: there was no CPU at the last look of this wait

    def came(self) -> None:
        """The clips of a step have come."""
        self._since, self.lacks = None, False

    def awaited(self, avoid: Sequence[str], taken: Sequence[str], now: float) -> None:
        """A step's clips are still awaited; nothing is decoded on the nodes to `avoid`. `taken`: each worker's node."""
        if self._engine.kind != "ray":
            return  # a pool of processes asks Ray for nothing
        self._since = now if self._since is None else self._since
        if now - self._since < _WAITED_S or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        workers = Counter(taken)
        left = {
            node["NodeID"]: node["Resources"].get("CPU", 0.0) - workers[node["NodeID"]] * self._cpus_per_worker
            for node in self._nodes()
            if node["Alive"]
        }
        needed = self._engine.decode_cpus
        self.lacks = not any(cpus >= needed - _SLACK for node, cpus in left.items() if node not in avoid)
        if self.lacks and self._told != tuple(avoid):
            self._told = tuple(avoid)
            beyond = sum(max(left.get(node, 0.0), 0.0) for node in avoid)
            self._tell(DecodingAwaited(cpus=needed, nodes_avoided=len(avoid), cpus_avoided=round(beyond, 3)))
