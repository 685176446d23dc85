"""Whether processes of a cluster reach each other, found out without the libraries that hang when they do not.

A network can fail between two hosts that a third one still reaches. A collective of theirs then waits for its time-out,
and so does the connection of a new one. A connection to a `Door` says within seconds where that is.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

DoorAddress = tuple[str, int]  # host and port
Name = TypeVar("Name")

WITHIN_S = 10.0  # a packet that is lost is sent again after 1, 3 and 7 s
_AT_ONCE = 32  # connections at a time
_BACKLOG = 1024  # that the kernel answers before this process does


class Door:
    """A port of this process. The kernel answers who connects, also while the process computes."""

    def __init__(self, host: str) -> None:
        """`host`: the address of this node that the others reach, IPv4 or IPv6."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address: DoorAddress = (host, self._socket.getsockname()[1])
        threading.Thread(target=self._answer, name="door", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # where it was never connected to
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept of the other thread
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return


def door_at(host: str) -> Door | None:
    """A door at this address; None where it is none of this machine's own, as beyond address translation: then nobody
    can say whether it is reached."""
    try:
        return Door(host)
    except OSError:
        return None


def out_of_reach(doors: Mapping[Name, DoorAddress], within_s: float = WITHIN_S) -> list[Name]:
    """Names of the doors whose host does not answer within this time, in their order. A process that has ended is
    within reach: its host says that nobody listens."""
    if not doors:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(doors)), thread_name_prefix="reach") as threads:
        answers = threads.map(lambda address: _answers(address, within_s), doors.values())
        return [name for name, answers_it in zip(doors, answers, strict=True) if not answers_it]


def _answers(address: DoorAddress, within_s: float) -> bool:
    try:
        socket.create_connection(address, timeout=within_s).close()
    except ConnectionError:
        return True
    except OSError:  # no answer, or no way there
        return False
    return True
