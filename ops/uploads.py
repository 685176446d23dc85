"""Copies of small host tensors to a device: from pinned memory, several in one, without a wait of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

_Parts = TypeVar("_Parts")
_APART = 256  # bytes between two tensors, as PyTorch's allocator has them at least: kernels read whole words


def upload(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Host tensors on the device, by one copy that it makes after what its stream has queued. On the CPU the same.

    A copy from ordinary memory would make the host wait until all that is queued has ended. The pinned memory may be
    used for something else at once: PyTorch gives it out again only when the copy has read it. What comes back shares
    one piece of the device's memory.
    """
    place = torch.device(device)
    return list(tensors) if place.type == "cpu" or not tensors else _together(tensors, place)


def _together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _APART) * _APART
    staged = staging(end, device)
    for tensor, start in zip(tensors, starts, strict=True):
        _at(staged, start, tensor).copy_(tensor)
    there = staged.to(device, non_blocking=True)
    return [_at(there, start, tensor) for tensor, start in zip(tensors, starts, strict=True)]


def upload_all(parts: _Parts, device: torch.device | str) -> _Parts:
    """All tensors of a dataclass, list, tuple or dict of such, by one copy, each of them once; else it is equal."""
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
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))


def _with(part: object, there: dict[int, Tensor]) -> object:
    """The same with other tensors, by the identity of those that it has."""
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
