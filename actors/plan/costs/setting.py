"""What costs were measured with: costs of another setting are refused, never scaled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledSetting:
    """What a profile was measured with, as far as it changes costs; empty where that is not known."""

    model: str = ""  # family, blocks and width
    device: str = ""  # cpu, or a GPU's name
    attention: str = ""  # backend, as the config names it
    backend: str = ""  # what that name means on the device
    precision: str = ""  # of the parameters, and autocast
    checkpointing: str = ""  # on or off
    trained: str = ""  # all weights, LoRA factors, or some
    frozen: str = ""  # where frozen weights of blocks lie; of a device that decides it, not known
    vae: str = ""  # class or kind, its precision, and its tiles
    text: str = ""  # kind and size of the encoder, its precision, and where it is
