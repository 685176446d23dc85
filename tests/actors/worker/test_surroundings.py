"""What a worker reaches of its generation: who asks, when, and what is said."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from actors.held_state import NodeKeeper
from actors.messages import FormTask, NodeDoor, OutOfReach
from actors.worker.surroundings import Surroundings
from ops.comm.reach import DoorAddress

DOORS = tuple(NodeDoor(node=f"n{n}", host=f"host{n}", address=(f"10.0.0.{n}", 4000 + n)) for n in range(3))
NODES = (0, 0, 1, 2)  # ranks 0 and 1 share a node


class Network:
    """Answers for the nodes that are not cut off."""

    def __init__(self, *cut: str, lossy: tuple[str, ...] = ()) -> None:
        self.cut, self.lossy = cut, lossy
        self.asked: list[list[str]] = []
        self.knocked: list[list[str]] = []
        self.told: list[str] = []
        self.ended = threading.Event()

    def ask(self, doors: Mapping[str, DoorAddress], within_s: float) -> list[str]:
        self.asked.append(sorted(doors))
        return [name for name in doors if name in self.cut]

    def knock(self, doors: Mapping[str, DoorAddress]) -> dict[str, str]:
        self.knocked.append(sorted(doors))
        return {name: "9 of 20" for name in doors if name in self.lossy}

    def tell(self, why: str) -> None:
        self.told.append(why)
        self.ended.set()


def task(rank: int, doors: tuple[NodeDoor, ...] = DOORS) -> FormTask:
    home = cast(NodeKeeper, None)
    return FormTask(generation=1, rank=rank, world=4, store=("", 0), origin=None, home=home, nodes=NODES, doors=doors)


def test_the_first_worker_of_a_node_asks_for_the_other_nodes() -> None:
    network = Network()
    assert Surroundings(1.0, network.ask).enter(task(0)) is None
    assert network.asked == [["n1", "n2"]]
    assert Surroundings(1.0, network.ask).enter(task(1)) is None and len(network.asked) == 1, "rank 0 asks for it"
    assert Surroundings(1.0, network.ask).enter(task(3)) is None and network.asked[-1] == ["n0", "n1"]


def test_what_is_out_of_reach_is_named_and_travels_between_processes() -> None:
    found = Surroundings(1.0, Network("n2").ask).enter(task(2))
    assert found is not None and (found.node, [one.node for one in found.others]) == ("n1", ["n2"])
    error = pickle.loads(pickle.dumps(OutOfReach(found)))
    assert error.found == found
    assert str(error).startswith("host1 does not reach host2 (10.0.0.2)")


def test_nobody_asks_where_no_door_is_known() -> None:
    network = Network("n0", "n1", "n2")
    assert Surroundings(1.0, network.ask).enter(task(0, ())) is None
    hidden = tuple(NodeDoor(node=one.node, host=one.host, address=None) for one in DOORS)
    assert Surroundings(1.0, network.ask).enter(task(0, hidden)) is None


def test_a_worker_that_is_busy_for_long_asks_and_tells() -> None:
    network = Network()
    one = Surroundings(5.0, network.ask)
    one.enter(task(1))  # it does not ask at the start, and knows the nodes all the same
    one.look(4.9, network.tell)
    assert network.asked == [], "it has not been busy for long"
    network.cut = ("n1",)
    one.look(5.1, network.tell)
    assert network.ended.wait(10.0)
    assert network.told[0].startswith("host0 does not reach host1")
    one.look(5.3, network.tell)
    assert len(network.asked) == 1, "not again at once"


def late(one: Surroundings, network: Network) -> None:
    """It is late until it has asked."""
    before = len(network.asked)
    one.look(60.0, network.tell)
    assert one._asking is not None
    one._asking.join(10.0)
    assert len(network.asked) == before + 1


def test_a_node_that_loses_packets_is_left_out_of_the_next_generation_until_it_does_not() -> None:
    network = Network(lossy=("n2",))
    one = Surroundings(0.0, network.ask, network.knock)
    assert one.enter(task(0)) is None and network.knocked == [], "nothing has stalled yet"
    late(one, network)
    assert network.told == ["packets are lost between host0 and host2 (10.0.0.2): 9 of 20"]
    for _try in range(2):
        found = one.enter(task(0))
        assert found is not None and [door.node for door in found.others] == ["n2"] and network.knocked[-1] == ["n2"]
    network.lossy = ()
    assert one.enter(task(0)) is None, "mended"
    asked = len(network.knocked)
    assert one.enter(task(0)) is None and len(network.knocked) == asked


def test_one_worker_of_a_node_looks_for_lost_packets_and_to_a_few_nodes() -> None:
    doors = tuple(NodeDoor(node=f"n{n}", host=f"host{n}", address=(f"10.0.0.{n}", 4000)) for n in range(40))
    whole = replace(task(0), world=41, nodes=(0, *range(40)), doors=doors)
    for rank, nodes in ((0, 8), (1, 0)):
        network = Network()
        one = Surroundings(0.0, network.ask, network.knock)
        one.enter(replace(whole, rank=rank))
        late(one, network)
        assert sum(len(some) for some in network.knocked) == nodes, "their doors take some hundreds at a time"
