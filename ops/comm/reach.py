"""Whether processes of a cluster reach each other, found out without the libraries that hang when they do not.

A network can fail between two hosts that a third one still reaches. A collective of theirs then waits for its time-out,
and so does the connection of a new one. A connection to a `Door` says within seconds where that is.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TypeVar

DoorAddress = tuple[str, int]  # host and port
Name = TypeVar("Name")

WITHIN_S = 10.0  # a packet that is lost is sent again after 1, 3 and 7 s
_AT_ONCE = 256  # connections at a time, of the thousand files that a process may have open
_BACKLOG = 1024  # that the kernel answers before this process does
_PAUSE_S = 0.001  # between two answers: whoever knocks all the time takes no more of this process than that
_AGAIN_S = 0.5  # before a host that has said no is asked again
_KNOCKS = 20  # at a door, to find out whether packets are lost on the way
_KNOCKS_S = 4.0  # a packet that is lost is sent again after 1 and 3 s
# This number of them that needed a second packet is no chance: where 1 % of packets are lost either way it is seen once
# in 1,700 times, where 30 % are nearly always.
_UNSURE_KNOCKS = 4
# Linux: offset of tcpi_total_retrans in struct tcp_info (include/uapi/linux/tcp.h), after 8 bytes and 23 numbers.
_TOTAL_RETRANS = 100


class Door:
    """A port of this process. The kernel answers who connects, also while the process computes; what is sent is never
    read, and the connection closed at once."""

    def __init__(self, host: str) -> None:
        """`host`: the address of this node that the others reach, IPv4 or IPv6; the port is on that one alone. Raises
        OSError where it is not this machine's."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address: DoorAddress = (host, self._socket.getsockname()[1])
        self._closed = False
        threading.Thread(target=self._answer, name="door", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):  # where it was never connected to
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept of the other thread
        self._socket.close()

    def _answer(self) -> None:
        while not self._closed:
            with suppress(OSError):  # who knocked has gone, or this process has too many files open for the moment
                self._socket.accept()[0].close()
            time.sleep(_PAUSE_S)


def door_at(host: str) -> Door | None:
    """A door at this address; None where it is none of this machine's own, as beyond address translation: then nobody
    can say whether it is reached."""
    try:
        return Door(host)
    except OSError:
        return None


def out_of_reach(doors: Mapping[Name, DoorAddress], within_s: float = WITHIN_S) -> list[Name]:
    """Names of the doors that do not answer within this time, in their order. Where a host says that nobody listens, or
    the way there is closed, it is asked again until then: the doors are those of processes that live, so a firewall has
    said so, or a network that is changing. `_AT_ONCE` of them are asked at a time, without threads."""
    names = list(doors)
    silent: list[Name] = []
    for first in range(0, len(names), _AT_ONCE):
        some = names[first : first + _AT_ONCE]
        answered = _answered([doors[name] for name in some], within_s)
        silent += [name for name, answers in zip(some, answered, strict=True) if not answers]
    return silent


def losing(doors: Mapping[Name, DoorAddress]) -> dict[Name, str]:
    """The doors on whose way packets are lost, and how that was seen: connections to them need more than one packet, or
    are not made within four seconds. The kernel of this host counts, so a process without CPU time loses nothing.
    Elsewhere than on Linux nothing is found."""
    if not hasattr(socket, "TCP_INFO"):
        return {}
    unsure = dict.fromkeys(doors, 0)
    names = list(doors)
    at_once = max(1, _AT_ONCE // _KNOCKS)
    for first in range(0, len(names), at_once):
        some = [name for name in names[first : first + at_once] for _ in range(_KNOCKS)]
        well = _answered([doors[name] for name in some], _KNOCKS_S, at_first=True)
        for name, answered in zip(some, well, strict=True):
            unsure[name] += not answered
    return {
        name: f"{count} of {_KNOCKS} connections were not made by one packet"
        for name, count in unsure.items()
        if count >= _UNSURE_KNOCKS
    }


def _answered(addresses: Sequence[DoorAddress], within_s: float, at_first: bool = False) -> list[bool]:
    """Whether each took a connection; with `at_first` whether each answered the first packet, with whatever."""
    answered = [False] * len(addresses)
    until = time.monotonic() + within_s
    due = dict.fromkeys(range(len(addresses)), 0.0)  # who is to be asked, and when
    asked: dict[socket.socket, int] = {}
    with ExitStack() as open_now, selectors.DefaultSelector() as selector:
        while (due or asked) and (now := time.monotonic()) < until:
            for number in [number for number, at in due.items() if at <= now]:
                connection = open_now.enter_context(_connecting(addresses[number]))
                selector.register(connection, selectors.EVENT_WRITE)
                asked[connection] = number
                del due[number]
            for key, _ in selector.select(min([until, *due.values()]) - now):
                assert isinstance(key.fileobj, socket.socket)
                number = asked.pop(key.fileobj)
                answered[number] = not _sent_again(key.fileobj) if at_first else _took(key.fileobj)
                selector.unregister(key.fileobj)
                key.fileobj.close()
                if not answered[number] and not at_first:
                    due[number] = now + _AGAIN_S
    return answered


def _connecting(address: DoorAddress) -> socket.socket:
    """A connection that is being made. It is ready to be written to as soon as that has ended, in whatever way."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.connect_ex(address)
    return connection


def _took(connection: socket.socket) -> bool:
    """Whether the connection was made."""
    with suppress(OSError):
        connection.getpeername()
        return True
    return False


def _sent_again(connection: socket.socket) -> bool:
    """Whether the kernel had to send a packet of this connection more than once."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TOTAL_RETRANS + 4)
    count: int = struct.unpack_from("I", info, _TOTAL_RETRANS)[0]
    return count > 0
