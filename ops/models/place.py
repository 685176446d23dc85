"""Where a frozen module lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from ops.models.config import EncoderPlace


def on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with all its parameters on the device. A module that is there already is left alone: parameters
    without data (under FakeTensorMode) cannot be moved."""
    return module if all(p.device == device for p in module.parameters()) else module.to(device)


def home_of(place: EncoderPlace, device: torch.device) -> torch.device:
    """Where an encoder's weights lie between two calls."""
    return torch.device("cpu") if place == "host" else device


@contextmanager
def visiting(modules: Sequence[nn.Module], place: EncoderPlace, device: torch.device) -> Iterator[None]:
    """Copies on the device of weights that lie in host memory; afterwards the modules are as before."""
    if place == "device":
        yield
        return
    tensors = [tensor for module in modules for tensor in chain(module.parameters(), module.buffers())]
    homes = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device, copy=True, non_blocking=True)  # no wait: homes stay
        yield
    finally:
        for tensor, home in zip(tensors, homes, strict=True):
            tensor.data = home
