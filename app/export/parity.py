"""Compares a written transformer folder, loaded by Diffusers' own class, with our model: same weights, equal
outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from actors.state.checkpoint_files import CheckpointError
from ops.comm.collectives import Group
from ops.models.base.config import DiTConfig
from ops.models.base.family import ParitySample
from ops.models.families import FAMILIES
from ops.models.files import read_json
from ops.models.folders import dit_config
from ops.models.load import build_dit
from ops.models.weights import read_state
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify

# fp32 on both sides; sums run in another order. 1e-4 of the largest output leaves room for 40 layers.
TOLERANCE = 1e-4
_SIGMA = 0.6
_FRAMES, _FRAME = 2, (2, 3)
_IMAGE_TOKENS = 5


def compare_weights(folder: Path, class_name: str, state: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless Diffusers loads exactly the names and bits of `state` from `folder`."""
    model, report = _load(folder, class_name, next(iter(state.values())).dtype)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(problem):
            raise CheckpointError(
                f"{folder.name}: Diffusers' {class_name} reports {problem.replace('_', ' ')} "
                f"{list(report[problem])[:3]}; the export is not valid."
            )
    for name, tensor in model.state_dict().items():
        if name in state and not torch.equal(tensor.to(state[name].dtype), state[name]):
            raise CheckpointError(f"{folder.name}: {name} differs after loading it back; the export is not valid.")


def compare_read_back(folder: Path, config: DiTConfig, state: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless our own transformer, read from `folder`, has exactly the bits of `state`: for a
    class that Diffusers has not."""
    found = read_state(folder)
    read = dit_config(read_json(folder / "config.json"), config, str(folder))
    if read != config:
        raise CheckpointError(f"{folder.name}: config.json describes another transformer; the export is not valid.")
    for name, tensor in state.items():
        if name not in found or not torch.equal(found[name], tensor):
            raise CheckpointError(f"{folder.name}: {name} differs after reading it back; the export is not valid.")


def compare_forward(folder: Path, config: DiTConfig, state: Mapping[str, Tensor]) -> float:
    """Largest difference between our forward and Diffusers', over the largest output. Raises above TOLERANCE."""
    reference, _ = _load(folder, FAMILIES[config.architecture].diffusers_class, torch.float32)
    module = build_dit(config, 0)
    module.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    sample = parity_sample(config)
    with torch.no_grad():
        ours, theirs = our_velocity(module.eval(), sample), their_velocity(reference.eval(), config, sample)
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"{folder.name}: Diffusers' forward pass differs from ours by {difference:.1e} of its "
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
