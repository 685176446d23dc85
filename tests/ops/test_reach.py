"""Doors: who answers, who does not, and who is gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from ops.reach import Door, DoorAddress, door_at, out_of_reach

HERE = "127.0.0.1"


@contextmanager
def silent() -> Iterator[DoorAddress]:
    """An address whose host drops what it is sent: the kernel does so when nobody takes what waits in a backlog."""
    with socket.create_server((HERE, 0), backlog=0) as listening:
        address: DoorAddress = (HERE, listening.getsockname()[1])
        waiting = []
        for _ in range(8):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(address)
            waiting.append(one)
        time.sleep(0.1)
        try:
            yield address
        finally:
            for one in waiting:
                one.close()


def test_doors_answer_any_number_of_times() -> None:
    with closing(Door(HERE)) as one, closing(Door(HERE)) as other:
        for _ in range(50):
            assert out_of_reach({"one": one.address, "other": other.address}, 5.0) == []


def test_a_host_that_drops_packets_is_out_of_reach_and_the_others_are_not() -> None:
    with closing(Door(HERE)) as open_one, silent() as dropped:
        began = time.monotonic()
        assert out_of_reach({2: open_one.address, 0: dropped, 1: dropped}, 1.0) == [0, 1]
        assert time.monotonic() - began < 30.0


def test_a_host_whose_process_has_ended_is_within_reach() -> None:
    door = Door(HERE)
    door.close()
    assert out_of_reach({"gone": door.address}, 5.0) == []


def test_an_address_of_another_machine_has_no_door_here() -> None:
    assert door_at("192.0.2.1") is None  # for documentation (RFC 5737)


def test_nobody_to_ask() -> None:
    assert out_of_reach({}) == []
