"""How fast a link is, as the kernel has counted it for connections that this process knows nothing of."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from ops.comm.links import Links, Sent, _connections, _together

ONE, OTHER = "127.0.0.2", "127.0.0.3"  # hosts of their own, as far as addresses say
MIB = 2**20

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="Linux counts")


@contextmanager
def connected(host: str, bytes_per_s: float = 0.0, family: int = socket.AF_INET) -> Iterator[socket.socket]:
    """A connection whose other end takes what comes, at most so much a second; 0: at once."""
    with socket.create_server((host, 0)) as door, ExitStack() as open_now:
        mapped = f"::ffff:{host}" if family == socket.AF_INET6 else host
        made = open_now.enter_context(socket.socket(family))
        made.connect((mapped, door.getsockname()[1]))
        taken = open_now.enter_context(door.accept()[0])

        def take() -> None:
            while piece := taken.recv(1 << 16):
                time.sleep(len(piece) / bytes_per_s if bytes_per_s else 0)

        taking = threading.Thread(target=take, daemon=True)
        taking.start()
        yield made
        made.close()
        taking.join()


def send(connection: socket.socket, size: int) -> None:
    connection.sendall(bytes(size))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_what_goes_to_each_host_is_counted_by_itself(family: int) -> None:
    with connected(ONE, family=family) as one, connected(OTHER) as other, connected(OTHER) as second:
        links = Links()
        links.read([ONE, OTHER])
        for connection, size in ((one, 40 * MIB), (other, 20 * MIB), (second, 30 * MIB)):
            send(connection, size)
        time.sleep(0.2)  # for the last bytes to be acknowledged
        found = links.read([ONE, OTHER])
        assert {host: sent.num_bytes for host, sent in found.items()} == {ONE: 40 * MIB, OTHER: 50 * MIB}
        for sent in found.values():  # the kernel counts in milliseconds: no time at all, where the way is fast
            assert 0 <= sent.busy_s < 60 and 0 < sent.newest <= sent.rate
            assert not sent.busy_s or sent.rate >= sent.num_bytes / sent.busy_s
        again = links.read([ONE])
        assert again.keys() == {ONE} and again[ONE].num_bytes == 0 and again[ONE].busy_s == 0


def test_a_receiver_that_takes_its_time_makes_no_link_slow() -> None:
    with connected(ONE, bytes_per_s=8 * MIB) as slow:
        links = Links()
        links.read([ONE])
        began = time.monotonic()
        send(slow, 24 * MIB)
        took_s = time.monotonic() - began
        sent = links.read([ONE])[ONE]
        assert took_s > 1.0 and sent.busy_s < took_s / 2
        assert sent.rate > 3 * sent.num_bytes / took_s


def test_messages_too_small_to_fill_the_way_are_known() -> None:
    with connected(ONE) as one:
        links = Links()
        links.read([ONE])
        for _ in range(200):
            send(one, 100)
            time.sleep(0.001)
        assert not links.read([ONE])[ONE].fills
        send(one, 50 * MIB)
        time.sleep(0.2)
        assert links.read([ONE])[ONE].fills


def test_of_several_connections_the_one_that_sends_the_most_says_how_fast_the_link_is() -> None:
    """Another may have been fast once, when it was last used."""
    idle = Sent(num_bytes=100, busy_s=0.1, newest=4e9, fills=True)
    busy = Sent(num_bytes=10_000_000, busy_s=9.0, newest=1.2e6, fills=True)
    small = Sent(num_bytes=5_000_000, busy_s=12.0, newest=2e5, fills=False)
    found = _together([idle, busy, small])
    assert found == Sent(num_bytes=15_000_100, busy_s=12.0, newest=1.2e6, fills=True)
    assert found.rate == 15_000_100 / 12.0
    assert replace(found, busy_s=0.0).rate == 1.2e6, "faster than the kernel counts time"


def test_a_connection_with_two_descriptors_is_one() -> None:
    with connected(ONE) as one, one.dup():
        links = Links()
        links.read([ONE])
        send(one, MIB)
        time.sleep(0.2)
        assert links.read([ONE])[ONE].num_bytes == MIB


def test_connections_to_others_and_files_that_are_none_are_left_alone() -> None:
    with connected(ONE) as one, socket.socket() as unconnected, open("/dev/null"):
        first, second = socket.socketpair()
        with first, second:
            links = Links()
            send(one, MIB)
            assert links.read([OTHER]) == {}
            one.settimeout(5.0)
            assert links.read([ONE]).keys() <= {ONE}
            assert one.gettimeout() == 5.0 and unconnected.gettimeout() is None


def test_a_connection_that_its_owner_closes_meanwhile_is_closed() -> None:
    with socket.create_server((ONE, 0)) as door, socket.create_connection(door.getsockname()) as made:
        taken, _ = door.accept()
        taken.settimeout(5.0)
        with taken:
            for _, host, _ in _connections():
                if host == ONE and made.fileno() >= 0:
                    made.close()
                    assert taken.recv(1) == b"", "the other end hears of it at once"
        assert made.fileno() == -1


def test_no_socket_is_closed_by_being_looked_at() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with connected(ONE) as one:
        for _ in range(3):
            Links().read([ONE])
        gc.collect()
        send(one, MIB)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_with_as_many_open_files_as_it_may_have_is_none_the_worse() -> None:
    """Heartbeats are sent by the same thread."""
    links, (soft, hard) = Links(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected(ONE) as one, ExitStack() as files:
        send(one, MIB)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
            with suppress(OSError):
                while True:
                    files.enter_context(open("/dev/null"))
            assert links.read([ONE]) == {}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            files.close()
        assert links.read([ONE]).keys() == {ONE}


def test_nothing_is_read_where_python_would_change_the_sockets_of_others() -> None:
    with connected(ONE) as one:
        send(one, 4 * MIB)
        socket.setdefaulttimeout(1.0)
        try:
            assert Links().read([ONE]) == {}
        finally:
            socket.setdefaulttimeout(None)
        assert one.getblocking() and Links().read([ONE]).keys() == {ONE}
