"""A node's gradient in host memory, for GPUs that cannot reach each other: copied there, and added by the CPU.

Copies follow the backward pass in its stream; a thread waits for each and adds it under the locks of `SharedSum`, with
the worker's share of the node's cores, while the GPU goes on. For 14B parameters that is 29 GB over PCIe and some ten
seconds of a core per pass: cascades should last longer than its share of the cores takes for that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ops.comm.collectives import Group
from ops.cores import computing_with, host_threads
from ops.shards import Bounds, Slot
from ops.update.node_sum import SharedSum, fellows_of
from ops.update_room import AHEAD_BYTES

_LOOK_S = 0.05  # between looks whether the generation still lives


class HostCopy(Protocol):
    """What a device does for `HostSum`, and for state in host memory."""

    @property
    def device(self) -> torch.device: ...

    def to_host(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """A copy in host memory, and a function that returns when it is there."""
        ...

    def room(self, like: Tensor) -> Tensor:
        """New host memory of this shape and type that the device reads and writes itself."""
        ...

    def pin(self, memory: Tensor) -> None:
        """The device reads this host memory itself from now on, if it can."""
        ...

    def unpin(self, memory: Tensor) -> None: ...


class HostSum(SharedSum):
    """The whole sum in host memory that the node's workers map; they are on GPUs."""

    name = "host memory of the node"

    def __init__(
        self,
        total: int,
        dtype: torch.dtype,
        copies: HostCopy,
        *,
        ahead_bytes: int = AHEAD_BYTES,
        host_cores: int | None = None,
    ) -> None:
        """The sum of a flat vector [total] of gradients. Copies that are not added yet take up to `ahead_bytes` before
        a further one. `host_cores`: as `host_threads` in ops.cores."""
        super().__init__(total, dtype)
        self._device = copies.device
        self._copies, self._ahead_bytes, self._host_cores = copies, ahead_bytes, host_cores
        self._own = torch.empty(0, dtype=dtype)  # pinned
        self._given: queue.SimpleQueue[tuple[Slot, Tensor, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._state = threading.Condition()
        self._ahead = 0  # bytes taken by what is not added yet
        self._error: BaseException | None = None

    def form(self, group: Group, bounds: Bounds, sends: Sequence[tuple[int, ...]]) -> None:
        """As `NodeSum.form`."""
        super().form(group, bounds, sends)
        self._own = self.memory[slice(*bounds[group.rank])]
        if self._own.numel():
            self._copies.pin(self._own)
        self._ahead, self._error = 0, None
        threads = host_threads(len(fellows_of(group)), self._host_cores)
        self._thread = threading.Thread(
            target=self._add_all, args=(self._given, threads), name="gradients", daemon=True
        )
        self._thread.start()

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Have it copied, and added by the thread."""
        copy, arrived = self._copies.to_host(gradient)
        self._wait(lambda: self._ahead <= self._ahead_bytes)
        with self._state:
            self._ahead += _taken(copy)
        self._given.put((slot, copy, arrived))

    def flush(self) -> None:
        """Returns when all that was given here is added. Raises what went wrong with it."""
        self._wait(lambda: self._ahead == 0)

    def leave(self) -> None:
        """End the thread, then let the memory go."""
        if self._thread is not None:
            given, self._given = self._given, queue.SimpleQueue()
            with self._state:
                self._error = self._error or RuntimeError("the generation has ended")  # adds nothing more
            given.put(None)
            self._thread.join()
            self._thread = None
        if self._own.numel():
            self._copies.unpin(self._own)
        self._own = torch.empty(0, dtype=self._dtype)
        super().leave()

    def _check(self) -> None:
        super()._check()
        if self._error is not None:  # the thread waits for a lock that may never be free
            raise self._error

    def _wait(self, enough: Callable[[], bool]) -> None:
        with self._state:
            while not (self._error is not None or enough()):
                self._state.wait(_LOOK_S)
                self._check()
            if self._error is not None:
                raise self._error

    def _add_all(self, given: queue.SimpleQueue[tuple[Slot, Tensor, Callable[[], None]] | None], threads: int) -> None:
        """The thread: in the order of backward. After an error it only empties the queue."""
        while (one := given.get()) is not None:
            slot, copy, arrived = one
            try:
                if self._error is None:
                    arrived()
                    with computing_with(threads):
                        super().add(slot, copy)
                    if given.empty():
                        super().flush()
            except BaseException as error:  # raised where the worker waits
                with self._state:
                    self._error = self._error or error
            finally:
                with self._state:
                    self._ahead -= _taken(copy)
                    self._state.notify_all()


def _taken(copy: Tensor) -> int:
    """Bytes; PyTorch rounds what it pins up to a power of two."""
    return 1 << (copy.nbytes - 1).bit_length() if copy.nbytes else 0
