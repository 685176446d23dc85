"""LoRA factors as files for other programs: `pytorch_lora_weights.safetensors` by Diffusers' and PEFT's names, and
`comfyui_lora_weights.safetensors` by those of the original code, where ComfyUI reads them so.

Nothing here needs the weights that the factors stand beside: their shapes come from a module on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ops.models.base.config import DiTConfig
from ops.models.load import dit_skeleton
from ops.models.lora import factor_file, for_comfyui, for_diffusers, lora_scale, read_factors
from ops.models.weights import check_state, is_lora, write_tensors

# Of a process that imports what it takes, a small model's files included. Measured: 0.43 GiB on CPUs.
_PROCESS_BYTES = 1 << 29
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
    scale, numbers = lora_scale(config), str(dtype).removeprefix("torch.")
    _check_range(factors, scale, dtype)
    state = {**skeleton.state_dict(), **factors}
    file = factor_file(expert)
    forms: list[tuple[str, Callable[[], dict[str, Tensor]], str]] = [
        (file, lambda: for_diffusers(state, scale), f"LoRA factors of {config.part}/"),
        (file.replace("pytorch", "comfyui"), lambda: for_comfyui(state, plain), _BY_ORIGINAL_NAMES),
    ]
    written: dict[str, str] = {}
    for name, form, what in forms:
        tensors = form()  # one after the other, as each is as large as the factors or more
        if not tensors:
            continue
        for key in tensors:
            tensors[key] = tensors[key].to(dtype)
        write_tensors(folder / name, tensors)
        del tensors
        read = read_factors(skeleton, replace(plain, lora_from=str(folder / name)))
        compare(folder / name, factors, read, dtype, scale)
        del read
        written[name] = f"{what}, {numbers}"
    return written


def num_written(config: DiTConfig) -> int:
    """How many numbers the files of one transformer's factors hold together (`write_factors`), zeros of layers that are
    one in the original code among them; 0 without factors."""
    return sum(_form_sizes(config))


def writing_bytes(experts: Sequence[DiTConfig]) -> int:
    """The most host memory that a process takes which writes the files of a checkpoint of these transformers
    (`write_factors`), pages of the files that it reads back included.

    In fp32, whatever is written: the factors of all, and of one transformer at a time its larger form twice, as it is
    made or read, and what it is made of. Wan's factors of 0.81 GiB took 2.94 GiB of the 2.94 that this says, those of
    0.20 GiB 1.09 of 1.11; rounded to bfloat16 2.26 and 0.90.
    """
    sizes = [_form_sizes(one) for one in experts]
    factors, largest = sum(of_diffusers for of_diffusers, _ in sizes), max(map(max, sizes))
    return _PROCESS_BYTES + 4 * (factors + 2 * largest)


def _form_sizes(config: DiTConfig) -> tuple[int, int]:
    """Numbers of one transformer's factors as Diffusers has them, which are the factors, and as ComfyUI has them."""
    plain = replace(config, lora_from=None, frozen_dtype="same")
    state = dit_skeleton(plain).state_dict()
    forms = for_diffusers(state, lora_scale(config)), for_comfyui(state, plain)
    of_diffusers, of_comfyui = (sum(tensor.numel() for tensor in form.values()) for form in forms)
    return of_diffusers, of_comfyui


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
