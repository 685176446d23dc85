"""What a worker sends to other hosts, measured in the thread of its heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from actors.messages import NodeDoor
from actors.progress import LinkUse
from ops.comm.links import Links, Sent

WINDOW_S = 30.0  # long enough for some steps, short enough to name a link that has become slow within a minute
_MOST = 8  # links in a heartbeat, the busiest: in a ring a worker has one, and in a bag some

ReadLinks = Callable[[Collection[str]], Mapping[str, Sent]]


class Outgoing:
    """The links from this worker to other hosts, in one window of time after the other."""

    def __init__(self, read: ReadLinks | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read or Links().read, clock
        self._doors: Mapping[str, NodeDoor] = {}
        self._began = 0.0  # of the window
        self._last: tuple[LinkUse, ...] = ()

    def look(self, own: NodeDoor | None, doors: Mapping[str, NodeDoor]) -> tuple[LinkUse, ...]:
        """The links of the last whole window, the busiest first. `doors`: those of the other hosts by their addresses;
        with other ones a window begins."""
        now = self._clock()
        if doors != self._doors:
            self._doors, self._began, self._last = doors, now, ()
            self._read(doors)
        elif own is not None and doors and now - self._began >= WINDOW_S:
            sent = self._read(doors)
            uses = [_use(own, doors[address], one, now - self._began) for address, one in sent.items()]
            self._last = tuple(sorted(uses, key=lambda use: -use.busy_s)[:_MOST])
            self._began = now
        return self._last


def _use(own: NodeDoor, door: NodeDoor, sent: Sent, over_s: float) -> LinkUse:
    return LinkUse(
        host=own.host,
        other=door.host,
        num_bytes=sent.num_bytes,
        busy_s=sent.busy_s,
        rate=sent.rate,
        fills=sent.fills,
        over_s=over_s,
    )
