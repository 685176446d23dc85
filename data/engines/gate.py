"""The actor between a Ray engine and its decode tasks. Imports no ray.data, which would take it seconds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from data.errors import DataIOError

if TYPE_CHECKING:
    from ray import ObjectRef

P = ParamSpec("P")
R = TypeVar("R")


class RemoteMethod(Protocol[P, R]):
    """A method of an actor of this room."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]: ...


class GateHandle(Protocol):
    """The gate as its callers see it."""

    @property
    def begin(self) -> RemoteMethod[[int, str], tuple[int, bool] | None]: ...
    @property
    def open(self) -> RemoteMethod[[int, list[str]], None]: ...
    @property
    def dismiss(self) -> RemoteMethod[[], None]: ...
    @property
    def end(self) -> RemoteMethod[[str, list[str]], None]: ...
    @property
    def fail(self) -> RemoteMethod[[DataIOError | ValueError], None]: ...
    @property
    def take_faults(self) -> RemoteMethod[[list[str]], list[str]]: ...
    @property
    def failure(self) -> RemoteMethod[[], DataIOError | None]: ...


class Gate:
    """Decode tasks ask it whether a microbatch may begin, and report its faults and failures of the storage.

    A clip that crashes libav ends the process of its task, and Ray starts the task again. The gate tells that task
    that it is a second attempt; it then decodes each clip in a process of its own.
    """

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._faults: dict[str, list[str]] = {}
        self._without_pixels: set[str] = set()
        self._failure: DataIOError | None = None
        self._open = 0
        self._dismissed = False
        self._changed = asyncio.Condition()

    async def begin(self, number: int, item: str) -> tuple[int, bool] | None:
        """Waits until this microbatch may begin. Returns how many earlier attempts at it did not end, and whether its
        pixels are needed; None when the engine has stopped."""
        async with self._changed:
            await self._changed.wait_for(lambda: number < self._open or self._dismissed)
        if self._dismissed:
            return None
        earlier = self._begun.get(item, 0)
        self._begun[item] = earlier + 1
        return earlier, item not in self._without_pixels

    async def open(self, until: int, without_pixels: list[str]) -> None:
        """Microbatches below `until` may begin."""
        self._without_pixels.update(without_pixels)
        async with self._changed:
            self._open = max(until, self._open)
            self._changed.notify_all()

    async def dismiss(self) -> None:
        """Nothing is wanted any more: tasks that wait, and those to come, end without work."""
        async with self._changed:
            self._dismissed = True
            self._changed.notify_all()

    def end(self, item: str, faults: list[str]) -> None:
        self._begun.pop(item, None)
        self._without_pixels.discard(item)
        if faults:
            self._faults[item] = faults

    def fail(self, error: DataIOError | ValueError) -> None:
        self._failure = error if isinstance(error, DataIOError) else DataIOError(str(error))

    def take_faults(self, items: list[str]) -> list[str]:
        return [fault for item in items for fault in self._faults.pop(item, [])]

    def failure(self) -> DataIOError | None:
        return self._failure
