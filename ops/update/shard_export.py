"""A worker's optimizer state on its way to others: as it lies in its node's memory, or copied there.

State in host memory is updated there, bank by bank (ops.update.own_state), and is not copied at all. State on a device
is copied once, into the bank that takes the next version: at once, or, where there is a GPU, while the next cascades
run. Then only the next update, which would change what is read, waits until the copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ops.memory.cuda_memory import CudaHostCopy
from ops.shards import ShardState

CopyWait = Callable[[], None]
"""Returns when what was begun has ended, from any thread and any number of times; raises what it failed with."""


def _nothing() -> None:
    """There is nothing to wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardExport:
    """The state of a shard as it was when the export began: `shard` may be read once `wait` has returned. It lies in
    the bank `bank` of the node's memory, where there is one, and is not changed there until it is committed."""

    shard: ShardState
    bank: int | None = None
    wait: CopyWait = _nothing

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.wait is _nothing


class CopyArrays(Protocol):
    """How state on a device comes into host memory."""

    def __call__(self, arrays: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> CopyWait:
        """Begin to copy each array into the one of its name in host memory."""
        ...

    def release(self) -> None:
        """No copy runs, and what was copied into is about to go. Any number of times."""
        ...


class CopyAtOnce:
    """A copy from any device; it has ended when the call returns."""

    def __call__(self, arrays: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> CopyWait:
        """As `CopyArrays`."""
        for name, array in arrays.items():
            into[name].copy_(array)
        return _nothing

    def release(self) -> None:
        """Nothing is kept."""


class Pins(Protocol):
    """A device that can be made to read and write host memory itself."""

    def pin(self, memory: Tensor) -> None: ...
    def unpin(self, memory: Tensor) -> None: ...


class PinnedTargets:
    """Host memory that is known to a device, once for the copies that take turns in it: what the last two went
    into. Pages of a bank that was used before these may go back to the node (`StateMemory.give`); a device that still
    knew of it would go on to write into the old pages, which nothing reads."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._known: dict[tuple[int, int], Tensor] = {}  # by address and bytes
        self._last: set[tuple[int, int]] = set()  # of the last copy

    def pin(self, targets: Iterable[Tensor]) -> None:
        """Tell the device, unless it knows, of what a copy goes into; it forgets what neither this one nor the last
        one goes into. No copy runs meanwhile."""
        wanted = {(target.data_ptr(), target.nbytes): target for target in targets if target.numel()}
        for key in self._known.keys() - self._last - wanted.keys():
            self._pins.unpin(self._known.pop(key))
        for key, target in wanted.items():
            if key not in self._known:
                self._pins.pin(target)
                self._known[key] = target
        self._last = set(wanted)

    def release(self) -> None:
        """The device forgets all of it."""
        while self._known:
            self._pins.unpin(self._known.popitem()[1])


class CopyOnStream:
    """State on a GPU: copied on a stream of its own, after what the current one has queued so far."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._targets = PinnedTargets(CudaHostCopy(device))

    def __call__(self, arrays: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> CopyWait:
        """As `CopyArrays`."""
        self._targets.pin(into.values())
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps, without the GIL
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, array in arrays.items():
                into[name].copy_(array, non_blocking=True)
                array.record_stream(self._stream)  # not given out again before the copy has read it
            done.record(self._stream)
        wait: CopyWait = done.synchronize
        return wait

    def release(self) -> None:
        """As `CopyArrays.release`."""
        self._targets.release()


def copies_of(state_device: torch.device) -> CopyArrays | None:
    """How state there is copied; None: it lies in host memory, where it is updated bank by bank."""
    if state_device.type == "cpu":
        return None
    return CopyOnStream(state_device) if state_device.type == "cuda" else CopyAtOnce()
