"""How fast what this process sends to other hosts gets there, as the kernel counts it, whichever library sends.

    links = Links()
    links.read(["10.0.0.7"])            # counts from here
    links.read(["10.0.0.7"])            # {"10.0.0.7": Sent(num_bytes=52_000_000, busy_s=4.9, ...)}

For each connection Linux counts the bytes that the other side has acknowledged, and the time in which some were under
way (`TCP_INFO`). A sender that has nothing to send, or whose receiver takes nothing, is not busy then: so the bytes of
a busy second are what the network between the two gives, or less where messages are too small to fill it. The kernel
knows which (it calls their sender limited by the application). What does not go by TCP, such as InfiniBand, is not
seen, and outside Linux nothing is.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)

_OWN_FILES = "/proc/self/fd"
# Linux: places in struct tcp_info (include/uapi/linux/tcp.h).
_APP_LIMITED = 7  # tcpi_delivery_rate_app_limited, the lowest bit
_BYTES_ACKED = 120  # tcpi_bytes_acked
_DELIVERY = 160  # tcpi_delivery_rate, tcpi_busy_time, tcpi_rwnd_limited
_LENGTH = _DELIVERY + 24
_MAPPED = "::ffff:"  # an IPv4 address as an IPv6 socket has it


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What went to one host in a while."""

    num_bytes: int
    busy_s: float  # of the connection that was busy for the longest
    newest: float  # bytes per second of the connection that has sent the most, by the kernel's last estimate
    fills: bool  # whether that connection took all that the network gives

    @property
    def rate(self) -> float:
        """Bytes per second that the network gives, at least; where the sender `fills` it, all."""
        return max(self.newest, self.num_bytes / self.busy_s if self.busy_s else 0.0)


class Links:
    """The connections of this process, with what they had sent when they were last looked at."""

    def __init__(self) -> None:
        self._before: dict[str, Sent] = {}  # by the kernel's name of the connection

    def read(self, hosts: Collection[str]) -> dict[str, Sent]:
        """What has gone to each of these hosts, named by their addresses, since the last call; of a connection that is
        new all it has sent. One that has been closed meanwhile is not seen. Some microseconds per open file."""
        found: dict[str, list[Sent]] = {}
        seen: dict[str, Sent] = {}
        for name, host, now in _connections():
            if host in hosts and name not in seen:
                seen[name] = now
                found.setdefault(host, []).append(_since(self._before.get(name), now))
        self._before = seen
        return {host: _together(some) for host, some in found.items()}


def _since(before: Sent | None, now: Sent) -> Sent:
    if before is None:
        return now
    return replace(now, num_bytes=now.num_bytes - before.num_bytes, busy_s=now.busy_s - before.busy_s)


def _together(connections: Sequence[Sent]) -> Sent:
    """Those to one host. They may have sent at the same time."""
    most = max(connections, key=lambda one: one.num_bytes)
    num_bytes, busy_s = sum(one.num_bytes for one in connections), max(one.busy_s for one in connections)
    return replace(most, num_bytes=num_bytes, busy_s=busy_s)


def _connections() -> Iterator[tuple[str, str, Sent]]:
    """Each TCP connection of this process: its name, the address of its other end, and what it has sent."""
    if not hasattr(socket, "TCP_INFO") or socket.getdefaulttimeout() is not None:
        return  # with a default time-out Python would set one on connections of other libraries
    for number in _open_files():
        with suppress(OSError, struct.error):  # closed meanwhile, not connected, an old kernel
            name = os.readlink(f"{_OWN_FILES}/{number}")
            if name.startswith("socket:") and (found := _looked_at(int(number))) is not None:
                yield name, *found


def _open_files() -> list[str]:
    """Their numbers; none where there is no room to look: the process may have as many open as it is allowed."""
    try:
        return os.listdir(_OWN_FILES)
    except OSError as error:
        log.debug("nobody knows what was sent: %s", error)
        return []


def _looked_at(number: int) -> tuple[str, Sent] | None:
    """The address of the other end of this socket, and what it has sent; None where it is none of TCP. The number is
    its owner's: a duplicate would keep the connection open, and in the owner's epoll, after the owner has closed it."""
    one = socket.socket(fileno=number)
    try:
        if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        host = str(one.getpeername()[0]).removeprefix(_MAPPED)
        return host, _counted(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH))
    finally:
        one.detach()


def _counted(info: bytes) -> Sent:
    (num_bytes,) = struct.unpack_from("Q", info, _BYTES_ACKED)
    newest, busy_us, no_window_us = struct.unpack_from("QQQ", info, _DELIVERY)
    fills = not info[_APP_LIMITED] & 1
    return Sent(num_bytes=num_bytes, busy_s=(busy_us - no_window_us) / 1e6, newest=newest, fills=fills)
