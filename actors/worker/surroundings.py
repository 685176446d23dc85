"""Whether a worker reaches the other nodes of its generation: asked before it begins, and while one is busy for long.

Ray sees every node from its head, and says nothing of two that do not reach each other. Their collectives would wait
for as long as a step may take. The same is true of two whose packets get lost: TCP sends them again after ever longer
times, and Ray's own few are answered all the while.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping

from actors.messages import FormTask, NodeDoor, NodesApart
from ops.comm.reach import DoorAddress, losing, out_of_reach

log = logging.getLogger(__name__)

_MOST_KNOCKED = 8  # nodes, that a node looks for lost packets to: of hundreds not all knock at each other's doors

Ask = Callable[[Mapping[str, DoorAddress], float], list[str]]
Knock = Callable[[Mapping[str, DoorAddress]], dict[str, str]]


class Surroundings:
    """The other nodes of a generation. `look` is for the heartbeat's thread, the rest for that of the worker."""

    def __init__(self, within_s: float, ask: Ask = out_of_reach, knock: Knock = losing) -> None:
        """A node is out of reach that does not answer for `within_s`."""
        self._within_s, self._ask, self._knock = within_s, ask, knock
        self._own: NodeDoor | None = None
        self._others: dict[str, NodeDoor] = {}
        self._first = False  # of the workers of its node
        # Nodes to which packets were lost, until they are not any more: such a node is asked before it is waited for.
        self._doubted: set[str] = set()
        self._asked_at = 0.0  # monotonic seconds
        self._asking: threading.Thread | None = None

    def enter(self, task: FormTask) -> NodesApart | None:
        """Know the nodes of this generation from now on. Returns those that the worker does not reach, or hardly; one
        worker of each node asks, the others return None."""
        self.leave()
        if not task.doors:
            return None
        mine = task.nodes[task.rank]
        self._own = task.doors[mine]
        self._others = {door.node: door for door in task.doors if door is not self._own and door.address}
        self._first = task.nodes.index(mine) == task.rank
        return self._apart(self._doubted) if self._first else None

    def leave(self) -> None:
        """The generation has ended: its nodes may go."""
        self._own, self._others = None, {}

    @property
    def hosts(self) -> tuple[NodeDoor | None, dict[str, NodeDoor]]:
        """The own node, and those on other hosts by their addresses."""
        own, others = self._own, self._others
        here = own.address[0] if own is not None and own.address else ""
        return own, {one.address[0]: one for one in others.values() if one.address and one.address[0] != here}

    def look(self, late_s: float, tell: Callable[[str], None]) -> None:
        """Ask now and then, in a thread, for a worker that has done one thing for `late_s` longer than planned; `tell`
        what is wrong."""
        now = time.monotonic()
        asking = self._asking is not None and self._asking.is_alive()
        if not self._others or late_s < self._within_s or now - self._asked_at < self._within_s or asking:
            return
        self._asked_at = now
        self._asking = threading.Thread(target=self._ask_and_tell, args=(tell,), name="surroundings", daemon=True)
        self._asking.start()

    def _ask_and_tell(self, tell: Callable[[str], None]) -> None:
        own, others = self._own, list(self._others)
        knocked = random.sample(others, min(len(others), _MOST_KNOCKED)) if self._first else []
        try:
            found = self._apart(knocked)
        except OSError as error:  # it may have too many files open: that says nothing of a node
            log.warning("nobody knows which nodes are within reach: %s", error)
            return
        if found is not None and own is self._own:  # not of a generation that has ended meanwhile
            tell(found.describe())

    def _apart(self, knocked: Collection[str]) -> NodesApart | None:
        """The nodes that do not answer; if all answer, those of `knocked` to which packets are lost. None if there are
        none."""
        own, others = self._own, self._others
        addresses = {name: one.address for name, one in others.items() if one.address}
        silent = self._ask(addresses, self._within_s)
        if own is None:
            return None
        if silent:
            return NodesApart(node=own.node, host=own.host, others=tuple(others[name] for name in silent))
        asked = {name: addresses[name] for name in knocked if name in addresses}
        lossy = self._knock(asked) if asked else {}
        self._doubted = (self._doubted - asked.keys()) | lossy.keys()
        if not lossy:
            return None
        first = next(iter(lossy.values()))
        return NodesApart(node=own.node, host=own.host, others=tuple(others[name] for name in lossy), losing=first)
