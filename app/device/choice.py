"""The device that a command works on."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from ops.typed import ConfigError

if TYPE_CHECKING:
    import torch


def pick_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one."""
    import torch

    from ops.gpu_check import why_unusable

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not one of auto, cpu, cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: no GPU of this machine can be used. {why_unusable()}. Or use --device cpu.")
    return torch.device("cuda", 0) if name != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The model name of the device, as profiles are labelled."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.processor() or 'core'}"
