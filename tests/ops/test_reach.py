"""Doors: who answers, who does not, and who is gone."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from ops.comm.reach import Door, DoorAddress, door_at, losing, out_of_reach

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


def test_a_host_that_says_no_is_asked_again_until_time_is_up() -> None:
    """A firewall says the same as a host on which nobody listens; a route may come back."""
    door = Door(HERE)
    door.close()
    assert out_of_reach({"closed": door.address}, 1.0) == ["closed"]
    late = socket.socket()
    late.bind(door.address)
    threading.Timer(0.7, late.listen).start()
    assert out_of_reach({"late": door.address}, 20.0) == []
    late.close()


def test_a_thousand_are_asked_without_threads_and_with_few_files_open() -> None:
    with closing(Door(HERE)) as door:
        before = set(threading.enumerate())
        assert out_of_reach(dict.fromkeys(range(1023), door.address), 10.0) == []
        assert set(threading.enumerate()) == before


def test_a_door_is_open_after_too_many_files_were() -> None:
    """Else the connections that nobody takes fill the backlog, and the node looks cut off."""
    with closing(Door(HERE)) as door:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        one, spare = socket.socket(), os.dup(0)
        os.close(spare)  # the number that the next file gets
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limits[1]))
        try:
            one.connect(door.address)
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            one.close()
        with socket.create_connection(door.address, timeout=5.0) as asked:
            assert asked.recv(1) == b"", "it is taken and closed"


def test_doors_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with closing(Door("::1")) as door:
        assert out_of_reach({"six": door.address}, 5.0) == []


def test_an_address_of_another_machine_has_no_door_here() -> None:
    assert door_at("192.0.2.1") is None  # for documentation (RFC 5737)


def test_nobody_to_ask() -> None:
    assert out_of_reach({}) == []


def test_packets_are_lost_where_the_kernel_has_sent_them_again_and_nowhere_else() -> None:
    """A host that says no has answered, and so has one whose process takes no connection of those that are made."""
    closed = Door(HERE)
    closed.close()
    with closing(Door(HERE)) as door, silent() as dropped, socket.create_server((HERE, 0), backlog=64) as busy:
        doors = {"door": door.address, "dropped": dropped, "closed": closed.address, "busy": busy.getsockname()[:2]}
        found = losing(doors)
    assert list(found) == ["dropped"] and found["dropped"].startswith("20 of 20 connections")
