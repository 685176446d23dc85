"""LoRA files that are added to the weights of a plain transformer while these are read: for clips, where nothing is
trained.

    added = AddedLora.read([LoraFile(path="style.safetensors", scale=0.8)], config)
    weight = added.over("blocks.0.attn1.to_q.weight", stored)        # W + 0.8 B A

A weight is rounded once, after all files. Of DoRA it is what PEFT computes with that scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ops.models.base.config import DiTConfig
from ops.models.lora import A, B, M, factor_file, factors_for, merged

_WEIGHT = ".weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFile:
    """A file of factors, for two experts the folder of a file for each, and the number that it is multiplied with."""

    path: str
    scale: float = 1.0

    def of(self, config: DiTConfig) -> Path | None:
        """The file for this transformer; None where a folder has one for the other expert alone. Raises
        FileNotFoundError, and ValueError for one file beside two experts."""
        path, expert = Path(self.path).expanduser(), config.expert_name
        if not path.exists():
            raise FileNotFoundError(f"LoRA file {path} does not exist. Give a .safetensors file, or its folder.")
        if not path.is_dir():
            if expert:
                raise ValueError(
                    f"{path} is one file, and this model has two experts. Give a folder with {factor_file('high')}, "
                    f"{factor_file('low')}, or both."
                )
            return path
        names = [factor_file(name) for name in (("high", "low") if expert else ("",))]
        if not any((path / name).is_file() for name in names):
            raise FileNotFoundError(f"{path} holds no {' or '.join(names)}. Give the .safetensors file itself.")
        own = path / factor_file(expert)
        return own if own.is_file() else None


class AddedLora:
    """What files add to the weights of one transformer."""

    def __init__(self, files: Sequence[tuple[float, Mapping[str, Tensor]]], key: str) -> None:
        """`files`: (scale, factors by our names). `key` says all that the result depends on beside the weights."""
        self.key = key
        self._layers: dict[str, list[tuple[float, dict[str, Tensor]]]] = {}
        for scale, factors in files:
            for name in (name for name in factors if name.endswith(A)):
                layer = name.removesuffix(A)
                here = {layer + ending: factors[layer + ending] for ending in (A, B, M) if layer + ending in factors}
                self._layers.setdefault(layer + _WEIGHT, []).append((scale, here))

    @staticmethod
    def read(files: Sequence[LoraFile], config: DiTConfig, weights: Mapping[str, Tensor]) -> AddedLora:
        """The files for the transformer of a resolved `config` with these `weights`, maybe on the meta device. Raises
        as `LoraFile.of` and `factors_for`."""
        found, key = [], ""
        for one in files:
            if (file := one.of(config)) is not None:
                stat = file.stat()
                factors = factors_for(file, weights, config)
                if len(files) > 1 and any(name.endswith(M) for name in factors):
                    raise ValueError(
                        f"{file} is DoRA, which sets the length of every row, and {len(files)} LoRA files are given: "
                        f"what they mean together depends on their order. Give it alone."
                    )
                found.append((one.scale, factors))
                key += f" {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {one.scale}"
        return AddedLora(found, key)

    def changes(self, name: str) -> bool:
        """Whether the files add to the weight of this name."""
        return name in self._layers

    def over(self, name: str, weight: Tensor, device: torch.device | None = None) -> Tensor:
        """The weight of this name with what the files add to it, in fp64 on `device` (default: its own); itself where
        they add nothing."""
        if not self.changes(name):
            return weight
        wide = weight.to(device or weight.device).double()
        for scale, factors in self._layers[name]:
            here = {key: tensor.to(wide.device) for key, tensor in factors.items()}
            wide = merged({name: wide, **here}, scale)[name]
        return wide


NOTHING_ADDED = AddedLora((), "")
