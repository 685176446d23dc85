"""LoRA factors as files for other programs: `pytorch_lora_weights.safetensors` by Diffusers' and PEFT's names, and
`comfyui_lora_weights.safetensors` by those of the original code, where ComfyUI reads them so.

Nothing here needs the weights that the factors stand beside: their shapes come from a module on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ops.models.base.config import DiTConfig
from ops.models.load import dit_skeleton
from ops.models.lora import factor_file, for_comfyui, for_diffusers, lora_scale, read_factors
from ops.models.weights import check_state, is_lora, write_tensors

_BY_ORIGINAL_NAMES = "the same by their original names, as ComfyUI reads them"


def write_factors(
    folder: Path, config: DiTConfig, factors: Mapping[str, Tensor], expert: str, dtype: torch.dtype
) -> dict[str, str]:
    """Write the factors of one transformer into a folder: file name -> what it holds. `expert`: "high" or "low" where
    both were trained, else "".

    Each file is read back as `lora_from` reads one, and compared. Raises ValueError for factors of another config, for
    numbers that are not finite or too large for `dtype`, and where what was read differs by more than its rounding.
    """
    plain = replace(config, lora_from=None, frozen_dtype="same")
    skeleton = dit_skeleton(plain)
    expected = {name: weight for name, weight in skeleton.state_dict().items() if is_lora(name)}
    check_state(expected, factors, "the checkpoint")
    _check_range(factors, lora_scale(config), dtype)
    state = {**skeleton.state_dict(), **factors}
    file = factor_file(expert)
    forms = {file: (for_diffusers(state, lora_scale(config)), f"LoRA factors of {config.part}/")}
    if original := for_comfyui(state, plain):
        forms[file.replace("pytorch", "comfyui")] = original, _BY_ORIGINAL_NAMES
    for name, (tensors, _) in forms.items():
        write_tensors(folder / name, {key: tensor.to(dtype) for key, tensor in tensors.items()})
        read = read_factors(skeleton, replace(plain, lora_from=str(folder / name)))
        compare(folder / name, factors, read, dtype, lora_scale(config))
    return {name: f"{what}, {str(dtype).removeprefix('torch.')}" for name, (_, what) in forms.items()}


def _check_range(factors: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> None:
    for name, tensor in factors.items():
        if not (largest := float(tensor.abs().max()) * max(1.0, scale)) < float("inf"):
            raise ValueError(f"{name} holds numbers that are not finite. Take an earlier checkpoint.")
        if largest > torch.finfo(dtype).max:
            raise ValueError(
                f"{name} holds {largest:.3g}, and {str(dtype).removeprefix('torch.')} ends at "
                f"{torch.finfo(dtype).max:.3g}. Write it in bfloat16 or float32."
            )


def compare(
    file: Path, factors: Mapping[str, Tensor], read: Mapping[str, Tensor], dtype: torch.dtype, scale: float
) -> None:
    """Raises ValueError unless a file gives these factors, but for the rounding of `dtype` and of the scale."""
    relative = torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # distance of numbers next to zero
    absolute = least / min(1.0, scale)
    for name in sorted({*factors, *read}):
        same = name in factors and name in read and factors[name].shape == read[name].shape
        if not same or not torch.allclose(read[name].float(), factors[name].float(), rtol=relative, atol=absolute):
            raise ValueError(f"{file.name}: {name} differs after reading it back; the file is not valid.")
