"""Bytes of the tensors that a piece of work holds at a time: what a device's allocator would count, on any device.

    with StorageCount(limit_bytes=2 << 30) as count:
        loss(model, batch).backward()
    print(count.peak_bytes)

Works on real tensors and under FakeTensorMode (entered before it), where it costs no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ops.units import GIB


class StorageCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    """Counts the storages that operators of this thread make while it is entered, backward passes included.

    Storages that were there before do not count, nor does what an operator frees before it returns. With `limit_bytes`
    an operator whose result would exceed them raises torch.OutOfMemoryError, as a device's allocator does.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._limit = limit_bytes
        self._known: dict[int, weakref.ref[Any]] = {}  # by address: storages that live, counted or from before

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],  # Any, here and below: as PyTorch's own signature says
        types: Sequence[type],
        args: tuple[Any, ...] = (),  # as above
        kwargs: Mapping[str, Any] | None = None,  # as above
    ) -> Any:  # as above
        kwargs = kwargs or {}
        for tensor in _tensors((*args, *kwargs.values())):
            self._note(tensor, 0)
        out = func(*args, **kwargs)
        for tensor in _tensors((out,)):
            self._note(tensor, tensor.untyped_storage().nbytes())
        return out

    def _note(self, tensor: Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        self._known[address] = weakref.ref(storage, lambda _: self._forget(address, num_bytes))
        if not num_bytes:
            return
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._limit is not None and self.live_bytes > self._limit:
            raise torch.OutOfMemoryError(
                f"{self.live_bytes / GIB:.3f} GiB of tensors with {num_bytes / GIB:.3f} GiB more; "
                f"the limit is {self._limit / GIB:.3f} GiB."
            )

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.pop(address, None)
        self.live_bytes -= num_bytes


def _tensors(values: Iterable[object]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages under these tensors, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
