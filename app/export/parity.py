"""Compares a written transformer folder, loaded by Diffusers' own class, with our model: same weights, equal outputs.

compare_files(folder, state)                  # what was written is what was meant; then `state` may go
reference = load_reference(folder, class_name)  # what Diffusers loads is what was written
compare_forward(reference, config, where)     # by our module with the same weights, which are in memory once
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from actors.state.checkpoint_files import CheckpointError
from ops.comm.collectives import Group
from ops.heap import give_back
from ops.models.base.config import DiTConfig
from ops.models.base.family import ParitySample
from ops.models.families import FAMILIES
from ops.models.files import read_json
from ops.models.folders import dit_config
from ops.models.load import dit_skeleton
from ops.models.weights import describe, iterate
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify

# fp32 on both sides; sums run in another order. 1e-4 of the largest output leaves room for 40 layers.
TOLERANCE = 1e-4
_SIGMA = 0.6
_FRAMES, _FRAME = 2, (2, 3)
_IMAGE_TOKENS = 5


def compare_files(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless the files of `folder` hold exactly the names and bits of `state`. One tensor is
    read at a time."""
    left = set(state)
    for name, tensor in iterate(folder):
        if name not in state or not _same_bits(tensor, state[name]):
            raise CheckpointError(f"{folder.name}: {name} differs after reading it back; the export is not valid.")
        left.remove(name)
    if left:
        raise CheckpointError(f"{folder.name}: {min(left)} is missing after writing it; the export is not valid.")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and bits are equal, NaNs among them."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits, others = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(bits, others)


def load_reference(folder: Path, class_name: str) -> nn.Module:
    """The transformer in `folder` as Diffusers' own class loads it, in the dtype of its files. Raises CheckpointError
    unless it has exactly their names and bits."""
    dtype = next(iter(describe(folder).values())).dtype
    model, report = _load(folder, class_name, dtype)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(problem):
            raise CheckpointError(
                f"{folder.name}: Diffusers' {class_name} reports {problem.replace('_', ' ')} "
                f"{list(report[problem])[:3]}; the export is not valid."
            )
    loaded = model.state_dict()
    for name, tensor in iterate(folder):
        if name in loaded and not _same_bits(loaded[name].to(tensor.dtype), tensor):
            raise CheckpointError(f"{folder.name}: {name} differs after loading it back; the export is not valid.")
    return model


def compare_config(folder: Path, config: DiTConfig) -> None:
    """Raises CheckpointError unless config.json of `folder` is that of our own transformer: for a class that Diffusers
    has not."""
    read = dit_config(read_json(folder / "config.json"), config, str(folder))
    if read != config:
        raise CheckpointError(f"{folder.name}: config.json describes another transformer; the export is not valid.")


def compare_forward(reference: nn.Module, config: DiTConfig, where: str) -> float:
    """Largest difference between our forward and that of a class of Diffusers with the same weights, over the largest
    output, in fp32. Raises CheckpointError above TOLERANCE. `reference` is in fp32 afterwards, and its weights are in
    memory once."""
    module = dit_skeleton(config)
    for tensor in (*reference.parameters(), *reference.buffers()):  # .float() would leave holes that the heap keeps
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
            give_back()
    own = module.state_dict()
    module.load_state_dict({name: w for name, w in reference.state_dict().items() if name in own}, assign=True)
    sample = parity_sample(config)
    with torch.no_grad():
        ours, theirs = our_velocity(module.eval(), sample), their_velocity(reference.eval(), config, sample)
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"{where}: Diffusers' forward pass differs from ours by {difference:.1e} of its "
            f"largest value (allowed {TOLERANCE:.0e}); the export is not valid."
        )
    return difference


def _load(folder: Path, class_name: str, dtype: torch.dtype) -> tuple[nn.Module, Mapping[str, list[object]]]:
    import diffusers

    model: nn.Module
    report: Mapping[str, list[object]]  # what was missing, unexpected or of another shape
    model, report = getattr(diffusers, class_name).from_pretrained(
        folder, torch_dtype=dtype, local_files_only=True, output_loading_info=True
    )
    return model, report


def parity_sample(config: DiTConfig, clean_frames: int = 0) -> ParitySample:
    """A random sample that the Diffusers class and ours compute alike. A first frame that is always given is one of
    the `clean_frames`."""
    generator = torch.Generator().manual_seed(0)
    size = [length * patch for length, patch in zip(_grid(config), config.patch, strict=True)]
    text = FAMILIES[config.architecture].parity_text(config)
    image = None
    if config.image_width:
        image = torch.randn(config.image_rows or _IMAGE_TOKENS, config.image_width, generator=generator)
    return ParitySample(
        latent=torch.randn(config.in_channels, *size, generator=generator),
        timestep=torch.tensor([1000 * _SIGMA]),
        text=torch.randn(text, config.text_dim, generator=generator),
        conditions=Conditions(image=image),
        clean_frames=max(clean_frames, int(config.gives_first_frame)),
    )


def _grid(config: DiTConfig) -> tuple[int, int, int]:
    frames = 1 if config.images_only else FAMILIES[config.architecture].parity_frames(config)
    return (frames or _FRAMES, *_FRAME)


def our_velocity(module: nn.Module, sample: ParitySample) -> Tensor:
    """[C_out, t, h, w] by our transformer."""
    config = module.config
    assert isinstance(config, DiTConfig)
    image = 0 if sample.conditions.image is None else len(sample.conditions.image)
    t, h, w = (size // patch for size, patch in zip(sample.latent.shape[1:], config.patch, strict=True))
    grid = (t, h, w)
    layout = Layout([Sequence(grid, len(sample.text), image, sample.clean_frames)])
    rows = patchify(sample.latent, config.patch)
    tokens = module(rows, sample.timestep, sample.text, layout, Group.solo(), sample.conditions)
    return unpatchify(tokens, grid, config.patch, config.out_channels)


def their_velocity(reference: nn.Module, config: DiTConfig, sample: ParitySample) -> Tensor:
    """[C_out, t, h, w] by the class of Diffusers."""
    family = FAMILIES[config.architecture]
    with family.parity_mode():
        return family.parity_output(reference(**family.parity_inputs(config, sample)).sample[0], sample)
