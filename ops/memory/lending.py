"""One process of a node lends its NodeMemory to others, and can end those that must not write into it any more.

    lender = Lender(memory)                  # one process
    memory = borrow(lender.number)           # others of the same node and user, given the number in any way
    lender.fence(keep={4711})                # every other borrower that has not given it back is ended by SIGKILL
    lender.close()                           # lends no more; borrowed memory stays what it is

The descriptor goes over a socket without a file (an abstract address; see unix(7)), so nothing is left behind anywhere.
Whoever asks is known by the kernel's word: another user gets nothing, and a borrower is held by a pidfd, which means
the same process for ever, while pids are given out again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import signal
import socket
import struct
import threading
import time
from dataclasses import dataclass

from ops.memory.node_memory import NodeMemory

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_SIZE = struct.Struct("q")
_NUMBERS = 1 << 62  # a number fits an int64
_CONNECT_S = 20.0
_LOOK_S = 0.01  # between looks whether borrowers have given back
_REST_S = 0.1  # after a caller could not be taken in: it stays in the queue, and asks again at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Borrower:
    """A process that has the memory; its connection ends when it gives it back or dies."""

    pid: int
    pidfd: int
    connection: socket.socket


class Lender:
    """Serves one NodeMemory from a thread of its own until `close`."""

    def __init__(self, memory: NodeMemory, number: int | None = None, listener: socket.socket | None = None) -> None:
        """`number` is the secret that borrowers must present. Pass one from `new_number` if borrowers need it before
        the memory exists. With `listener`, pass the number that `claim` opened it for. Default: a fresh random one."""
        self.number = number or new_number()
        if listener is None:
            listener = claim(self.number)
            assert listener is not None, "a number that was drawn is nobody's"
        self._memory = memory
        self._lock = threading.Lock()
        self._borrowers: list[Borrower] = []
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._short = False  # of descriptors, or of what else an answer takes; said once
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="lender", daemon=True)
        self._thread.start()

    @property
    def borrowers(self) -> tuple[int, ...]:
        """Pids of the processes that have the memory now."""
        with self._lock:
            return tuple(one.pid for one in self._borrowers)

    def fence(self, keep: set[int], timeout_s: float = 10.0, grace_s: float = 0.0) -> tuple[int, ...]:
        """SIGKILL every borrower whose pid is not in `keep`; returns their pids once they are gone, and with them their
        locks and their mappings. A borrower that gives back within `grace_s` is left alone. Raises TimeoutError when
        one is still there after `timeout_s`."""
        patience = time.monotonic() + grace_s
        while time.monotonic() < patience and set(self.borrowers) - keep:
            time.sleep(_LOOK_S)
        with self._lock:
            others = [one for one in self._borrowers if one.pid not in keep]
            for one in others:
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
            deadline = time.monotonic() + timeout_s
            for one in others:
                if not _has_ended(one.pidfd, deadline - time.monotonic()):
                    raise TimeoutError(
                        f"process {one.pid} still has this node's memory {timeout_s:g} s after SIGKILL; it hangs in "
                        f"the kernel. Restart the node, or take it out of the cluster."
                    )
        if others:
            log.warning(
                "ended %s, which still had this node's memory", ", ".join(f"process {one.pid}" for one in others)
            )
        return tuple(one.pid for one in others)

    def close(self) -> None:
        """Lend no more, and forget the borrowers."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()

    # The thread -------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._lend()
                    else:
                        self._given_back(key.data)
        finally:
            with self._lock:
                for one in self._borrowers:
                    _forget(one)
                self._borrowers = []
            for part in (self._selector, self._listener, self._wake, self._woken):
                part.close()

    def _lend(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # EMFILE: others wait, and are served when there is room
            if not self._short:
                log.warning("a process that asks for this node's memory cannot be answered yet: %s", error)
            self._short = True
            time.sleep(_REST_S)
            return
        self._short = False
        try:
            pid, uid = _peer(connection)
            if uid != os.getuid():
                log.warning("process %d of user %d asked for this node's memory and gets nothing", pid, uid)
                connection.close()
                return
            borrower = Borrower(pid=pid, pidfd=os.pidfd_open(pid), connection=connection)
        except OSError as error:  # it has ended while it asked
            log.warning("a process that asked for this node's memory is gone: %s", error)
            connection.close()
            return
        with self._lock:  # before it can write: a fence that comes now must know it
            self._borrowers.append(borrower)
        self._selector.register(connection, selectors.EVENT_READ, borrower)
        try:
            socket.send_fds(connection, [_SIZE.pack(self._memory.num_bytes)], [self._memory.descriptor])
        except OSError as error:
            log.warning("process %d is gone: %s", pid, error)
            self._given_back(borrower)

    def _given_back(self, borrower: Borrower) -> None:
        """A borrower sends nothing: what is read is the end of its connection."""
        self._selector.unregister(borrower.connection)
        with self._lock:
            self._borrowers.remove(borrower)
            _forget(borrower)


class BorrowedMemory(NodeMemory):
    """Memory of another process. While it is open the lender counts this process as a borrower."""

    def __init__(self, descriptor: int, num_bytes: int, connection: socket.socket) -> None:
        self._connection = connection
        super().__init__(descriptor, num_bytes)

    def close(self) -> None:
        """Give it back: no view of `buffer` may be written through afterwards."""
        self._connection.close()
        super().close()


def new_number() -> int:
    """A number for one lender, among all of a node."""
    return secrets.randbelow(_NUMBERS - 1) + 1


def claim(number: int) -> socket.socket | None:
    """The address of this number, at which others wait from now on; None while another process of the node has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(number))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def borrow(number: int, patience_s: float = _CONNECT_S) -> BorrowedMemory:
    """Memory of the lender with this number. Raises ConnectionError when it is not on this node, or lends no more, or
    does not answer within `patience_s`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(patience_s)
    descriptors: list[int] = []
    try:
        connection.connect(_address(number))
        pid, uid = _peer(connection)
        if uid != os.getuid():
            raise ConnectionError(f"process {pid} of user {uid} answers in the lender's place")
        message, descriptors, _, _ = socket.recv_fds(connection, _SIZE.size, 1)
        if not descriptors:
            raise ConnectionError("the lender has closed")
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise ConnectionError(
            f"this node's memory could not be borrowed ({error}): processes of one node must share its network and "
            f"user, as those of one container do. Start Ray on the node so that they do."
        ) from None
    (num_bytes,) = _SIZE.unpack(message)
    return BorrowedMemory(descriptors[0], num_bytes, connection)


def _address(number: int) -> str:
    return f"\0heddle-{number:016x}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def _has_ended(pidfd: int, timeout_s: float) -> bool:
    """Whether the process ends within this time: its pidfd becomes readable."""
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, timeout_s)))


def _forget(borrower: Borrower) -> None:
    os.close(borrower.pidfd)
    borrower.connection.close()
