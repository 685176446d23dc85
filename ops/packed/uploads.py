"""Copies of host tensors to a device: from pinned memory, several in one, without a wait of the host while what is
under way is within bounds (`ops/upload_room.py`).

    expect(device, largest)                # once: bytes of the largest upload that is to be far ahead of the device
    ids, mask = upload([ids, mask], device)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from ops.upload_room import BLOCK, SMALL, most_blocks
from ops.waiting import has_passed

_Parts = TypeVar("_Parts")
_APART = 256  # bytes between two tensors, as PyTorch's allocator has them at least: kernels read whole words


def upload(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Host tensors on the device, by one copy that it makes after what its stream has queued. On the CPU the same.

    A copy from ordinary memory would make the host wait until all that is queued has ended. The pinned memory may be
    used for something else at once: PyTorch gives it out again only when the copy has read it. What comes back shares
    one piece of the device's memory. A large upload may wait until the device has read one before (`LargeUploads`).
    """
    place = torch.device(device)
    return list(tensors) if place.type == "cpu" or not tensors else _together(tensors, place)


def brought(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Each tensor on the device: those of the host by one copy, as `upload`, those of this device as they are."""
    found = list(tensors)
    places = [place for place, tensor in enumerate(found) if tensor.device.type == "cpu"]
    for place, there in zip(places, upload([found[place] for place in places], device), strict=True):
        found[place] = there
    return found


def _together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _APART) * _APART
    if end > SMALL:
        there = _large(device).send([*zip(starts, map(_bytes, tensors))], end)
    else:
        staged = staging(end, device)
        for tensor, start in zip(tensors, starts, strict=True):
            _at(staged, start, tensor).copy_(tensor)
        there = staged.to(device, non_blocking=True)
    return [_at(there, start, tensor) for tensor, start in zip(tensors, starts, strict=True)]


def upload_all(parts: _Parts, device: torch.device | str) -> _Parts:
    """A dataclass, list, tuple or dict with all tensors in it brought to the device, by one copy, each of them once."""
    found = {id(tensor): tensor for tensor in _tensors(parts)}
    there = dict(zip(found, upload(list(found.values()), device), strict=True))
    return cast(_Parts, _with(parts, there))


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple | dict):
        for one in part.values() if isinstance(part, dict) else part:
            yield from _tensors(one)
    elif is_dataclass(part):
        for one in fields(part):
            yield from _tensors(getattr(part, one.name))


def _with(part: object, there: dict[int, Tensor]) -> object:
    """The part with its tensors replaced; `there` has the new ones by the `id` of the old."""
    if isinstance(part, Tensor):
        return there[id(part)]
    if isinstance(part, list | tuple):
        return type(part)(_with(one, there) for one in part)
    if isinstance(part, dict):
        return {name: _with(one, there) for name, one in part.items()}
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: _with(getattr(part, f.name), there) for f in fields(part)})
    return part


def upload_numbers(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    """Each row of numbers as a tensor of `dtype` on the device, by one copy."""
    return upload([torch.tensor(row, dtype=dtype) for row in rows], device)


def staging(size: int, device: torch.device) -> Tensor:
    """uint8 [size] in host memory from which a device copies while the host goes on."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _at(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """The place of a tensor like this one, from byte `start` on."""
    return memory[start : start + like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes] of a host tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)


# Large ones ----------------------------------------------------------------------------------------------------------


class Mark(Protocol):
    """A place in what a device has queued, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come there."""
        ...

    def synchronize(self) -> None:
        """Returns when it has. Raises RuntimeError for a failure of the device."""
        ...


@dataclass(slots=True)
class _Block:
    """Pinned memory, and the copies from it that the device may not have made."""

    memory: Tensor  # uint8 [BLOCK]
    used: int = 0  # bytes, from its beginning, that have been given out
    copies: list[Mark] = field(default_factory=list)

    def is_read(self) -> bool:
        return all(has_passed(copy) for copy in self.copies)

    def empty(self) -> None:
        """Wait until the device has read it."""
        for copy in self.copies:
            copy.synchronize()
        self.used, self.copies = 0, []


class LargeUploads:
    """Large uploads to one device, in pieces of at most a block through at most `most` blocks of pinned memory, which
    are made as they are needed and kept; a piece that finds none free waits until the device has read the oldest.

    No bag locks up by such a wait: a host waits only for copies that it has queued before, and all members of a bag
    queue copies and collectives in one order, so the first collective that has not run has all its hosts on their way.
    """

    def __init__(self, device: torch.device, copy: Callable[[Tensor, Tensor], Mark], most: int) -> None:
        """`copy`: queues one, as `queue_copy`."""
        self.most = most
        self._device, self._copy = device, copy
        self._blocks: deque[_Block] = deque()  # the oldest first
        self._lock = threading.Lock()  # an encode that outlasts its step has a thread of its own

    def send(self, parts: Sequence[tuple[int, Tensor]], size: int) -> Tensor:
        """uint8 [size] on the device, with each part, uint8 of the host, from its byte on."""
        there = torch.empty(size, dtype=torch.uint8, device=self._device)
        with self._lock:
            for first in range(0, size, BLOCK):
                piece = there[first : first + BLOCK]
                block = self._with_room(len(piece))
                staged = block.memory[block.used : block.used + len(piece)]
                _fill(staged, parts, first)
                block.used += len(piece)
                block.copies.append(self._copy(piece, staged))
        return there

    def _with_room(self, size: int) -> _Block:
        """The block that was begun last, where it has `size` bytes left, else an empty one."""
        if self._blocks and self._blocks[-1].used + size <= BLOCK:
            return self._blocks[-1]
        if len(self._blocks) < self.most and not (self._blocks and self._blocks[0].is_read()):
            block = _Block(staging(BLOCK, self._device))
        else:
            block = self._blocks.popleft()
            block.empty()
        self._blocks.append(block)
        return block


def _fill(staged: Tensor, parts: Sequence[tuple[int, Tensor]], first: int) -> None:
    """Bytes `first` on of what is sent, as many as there is room for."""
    end = first + len(staged)
    for start, part in parts:
        low, high = max(start, first), min(start + len(part), end)
        if low < high:
            staged[low - first : high - first].copy_(part[low - start : high - start])


@dataclass(frozen=True, slots=True)
class _Made:
    """The mark of a device that has made a copy when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def queue_copy(there: Tensor, staged: Tensor) -> Mark:
    """Queue a copy to a device after what its stream has queued. What comes back is the place after it."""
    there.copy_(staged, non_blocking=True)
    if there.device.type != "cuda":
        return _Made()
    made = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps, without the GIL
    made.record(torch.cuda.current_stream(there.device))
    return cast(Mark, made)


large_by_device: dict[torch.device, LargeUploads] = {}  # of this process


def _large(device: torch.device) -> LargeUploads:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in large_by_device:
        large_by_device[device] = LargeUploads(device, queue_copy, most_blocks(0))
    return large_by_device[device]


def expect(device: torch.device, largest: int) -> None:
    """Uploads to this device, of at most `largest` bytes, may be as far ahead of it as `ops/upload_room.py` says."""
    _large(device).most = most_blocks(largest)
