"""A live run as an operator reaches it: the handle of its monitor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from actors.pool.monitor import MonitorReport
    from actors.refs import Method


class OperatorHandle(Protocol):
    """What an operator asks of the actor `actors.pool.monitor.Monitor`."""

    @property
    def report(self) -> Method[[], MonitorReport]: ...
    @property
    def drain(self) -> Method[[tuple[str, ...]], None]: ...
    @property
    def scale(self) -> Method[[int], None]: ...
    @property
    def stop(self) -> Method[[str], None]: ...
    @property
    def stopped(self) -> Method[[], None]: ...
    @property
    def ping(self) -> Method[[], bool]: ...


def monitor_of(folder: Path) -> OperatorHandle:
    """The monitor of the live run in this folder. Raises LookupError where there is none on this cluster."""
    from actors.names import find_monitor

    handle: OperatorHandle = find_monitor(folder)
    return handle
