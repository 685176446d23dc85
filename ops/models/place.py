"""Where a frozen module lies."""

from __future__ import annotations

import torch
from torch import nn


def on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with all its parameters on the device. One that is there is left alone: parameters without data (under
    FakeTensorMode) cannot be moved."""
    return module if all(p.device == device for p in module.parameters()) else module.to(device)
