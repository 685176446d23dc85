"""What a worker says of its links with its heartbeats."""

from __future__ import annotations

from collections.abc import Collection

from actors.messages import NodeDoor
from actors.worker.outgoing import WINDOW_S, Outgoing
from ops.comm.links import Sent

OWN = NodeDoor(node="n0", host="host0", address=("10.0.0.1", 4000))
DOORS = {f"10.0.0.{n}": NodeDoor(node=f"n{n}", host=f"host{n}", address=(f"10.0.0.{n}", 4000)) for n in range(2, 14)}


class Kernel:
    """Has sent the same to each host since it was last asked: to the first one the most slowly."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, 0

    def read(self, hosts: Collection[str]) -> dict[str, Sent]:
        self.asked += 1
        return {
            host: Sent(num_bytes=1000, busy_s=9.0 - n * 0.5, newest=500.0, fills=n % 2 == 0)
            for n, host in enumerate(hosts)
        }


def test_links_are_said_when_a_window_is_over_the_busiest_first() -> None:
    kernel = Kernel()
    outgoing = Outgoing(kernel.read, lambda: kernel.now)
    assert outgoing.look(OWN, DOORS) == () and kernel.asked == 1, "what was sent before is none of this generation"
    kernel.now = WINDOW_S - 1
    assert outgoing.look(OWN, DOORS) == () and kernel.asked == 1
    kernel.now = WINDOW_S + 2
    found = outgoing.look(OWN, DOORS)
    assert len(found) == 8
    first = found[0]
    assert (first.host, first.other, first.num_bytes, first.busy_s) == ("host0", "host2", 1000, 9.0)
    assert (first.rate, first.over_s) == (500.0, WINDOW_S + 2)
    assert [one.fills for one in found[:2]] == [True, False]
    kernel.now += 5
    assert outgoing.look(OWN, DOORS) == found and kernel.asked == 2, "each heartbeat says it: any may be lost"


def test_other_hosts_begin_a_window() -> None:
    kernel = Kernel()
    outgoing = Outgoing(kernel.read, lambda: kernel.now)
    outgoing.look(OWN, DOORS)
    kernel.now = WINDOW_S + 1
    assert outgoing.look(OWN, DOORS)
    fewer = dict(list(DOORS.items())[:1])
    assert outgoing.look(OWN, fewer) == ()
    kernel.now = WINDOW_S * 1.5
    assert outgoing.look(OWN, fewer) == ()
    kernel.now = 2 * WINDOW_S + 2
    assert [one.other for one in outgoing.look(OWN, fewer)] == ["host2"]
    assert outgoing.look(None, {}) == ()


def test_a_worker_between_two_generations_says_nothing() -> None:
    kernel = Kernel()
    outgoing = Outgoing(kernel.read, lambda: kernel.now)
    outgoing.look(OWN, DOORS)
    kernel.now = WINDOW_S + 1
    assert outgoing.look(None, DOORS) == (), "its own node is not known any more"
