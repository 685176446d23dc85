"""`heddle bench families`: forward and backward of every family's transformer against its class in Diffusers.

    heddle bench families --rounds 7

What a plain training loop on Diffusers does: a batch of clips of one size, stacked. Ours gets the same clips packed,
with the same random weights; their velocities must agree before anything is timed. Both are one thread on the CPU, in
turn, so that other load hits both; seconds are those of the processor. A ratio above 1: ours does more in a second.
Losses, optimizer and data are left out: they are not the transformer's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.models.base.config import DiTConfig
from ops.models.base.family import Family, ParitySample
from ops.models.families import FAMILIES
from ops.models.folders import dit_json
from ops.models.load import build_dit
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout
from ops.packed.packing import Sequence as PackedSequence
from ops.packed.patches import patchify, unpatchify
from ops.typed import ConfigError

_SIGMA = 0.6
_AGREE = 1e-4  # of the largest velocity


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilySpeed:
    """Processor seconds of forward and backward of one batch: medians over the rounds."""

    family: str
    tokens: int  # of all clips of the batch, without text
    parameters: int
    ours_s: float
    theirs_s: float
    ratio: float  # median of theirs / ours of each round


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformBatch:
    """One batch of clips for both sides."""

    family: Family
    config: DiTConfig
    grid: tuple[int, int, int]  # tokens over t, h, w
    clips: Sequence[ParitySample]

    @staticmethod
    def of(name: str, layers: int, heads: int, head_dim: int, grid: tuple[int, int, int], batch: int) -> UniformBatch:
        family, dim = FAMILIES[name], heads * head_dim
        config = family.settings(
            num_layers=layers, num_heads=heads, head_dim=head_dim, ffn_dim=4 * dim, text_dim=dim, freq_dim=64
        )
        frames = 1 if config.images_only else family.parity_frames(config) or grid[0]
        grid = (frames, grid[1], grid[2])
        generator = torch.Generator().manual_seed(0)
        size = [length * patch for length, patch in zip(grid, config.patch, strict=True)]
        clips = [
            ParitySample(
                latent=torch.randn(config.in_channels, *size, generator=generator),
                timestep=torch.tensor([1000 * _SIGMA]),
                text=torch.randn(family.parity_text(config), dim, generator=generator),
            )
            for _ in range(batch)
        ]
        return UniformBatch(family=family, config=config, grid=grid, clips=clips)

    @property
    def tokens(self) -> int:
        t, h, w = self.grid
        return len(self.clips) * t * h * w

    def theirs(self) -> tuple[nn.Module, Callable[[], Tensor]]:
        """The class of Diffusers with random weights, and its velocities [B, C, t, h, w]."""
        import diffusers

        described = {key: value for key, value in dit_json(self.config).items() if not key.startswith("_")}
        torch.manual_seed(0)
        module: nn.Module = getattr(diffusers, self.family.diffusers_class)(**described)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.05)
        inputs = stacked([self.family.parity_inputs(self.config, clip) for clip in self.clips])

        def forward() -> Tensor:
            found = module(**inputs).sample
            return torch.stack([self.family.parity_output(one, clip) for one, clip in zip(found, self.clips)])

        return module, forward

    def ours(self, weights: dict[str, Tensor]) -> tuple[nn.Module, Callable[[], Tensor]]:
        """Our transformer with these weights, and its velocities [B, C, t, h, w]."""
        module = build_dit(self.config, 0)
        module.load_state_dict(weights)
        layout = Layout([PackedSequence(self.grid, len(clip.text)) for clip in self.clips])
        text = torch.cat([clip.text for clip in self.clips])
        times = torch.cat([clip.timestep for clip in self.clips])

        def forward() -> Tensor:
            rows = torch.cat([patchify(clip.latent, self.config.patch) for clip in self.clips])
            tokens = module(rows, times, text, layout, Group.solo(), Conditions())
            return torch.stack(
                [
                    unpatchify(part, self.grid, self.config.patch, self.config.out_channels)
                    for part in tokens.chunk(len(self.clips))
                ]
            )

        return module, forward

    def run(self, rounds: int) -> FamilySpeed:
        """Raises RuntimeError where the two sides disagree."""
        (their_module, their_forward), name = self.theirs(), self.config.architecture
        kept = self.family.kept
        weights = {
            key: value for key, value in their_module.state_dict().items() if not any(one in key for one in kept)
        }
        our_module, our_forward = self.ours(weights)
        with torch.no_grad():
            expected, found = their_forward(), our_forward()
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= _AGREE:
            raise RuntimeError(f"{name}: velocities differ by {difference:.1e} of the largest, more than {_AGREE:.0e}.")
        del expected, found
        sides = [(our_module, our_forward), (their_module, their_forward)]
        for module, forward in sides:  # the first call allocates
            seconds_of(module, forward)
        measured = [[seconds_of(module, forward) for module, forward in sides] for _ in range(rounds)]
        return FamilySpeed(
            family=name,
            tokens=self.tokens,
            parameters=sum(weight.numel() for weight in our_module.parameters()),
            ours_s=statistics.median(ours for ours, _ in measured),
            theirs_s=statistics.median(theirs for _, theirs in measured),
            ratio=statistics.median(theirs / ours for ours, theirs in measured),
        )


def stacked(inputs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Arguments of single samples as those of a batch: what has a batch dimension of 1 is joined, the rest is alike."""
    return {key: _joined([one[key] for one in inputs]) for key in inputs[0]}


def _joined(values: Sequence[object]) -> object:
    rows = [value for value in values if isinstance(value, Tensor) and value.shape[0] == 1]
    return torch.cat(rows) if rows else values[0]


def seconds_of(module: nn.Module, forward: Callable[[], Tensor]) -> float:
    """Processor seconds of one forward and backward."""
    module.zero_grad(set_to_none=True)
    begin = time.process_time()
    forward().square().mean().backward()
    return time.process_time() - begin


def table(found: Sequence[FamilySpeed]) -> str:
    lines = ["family       parameters  tokens   ours s  Diffusers s  ratio"]
    lines += [
        f"{one.family:<12} {one.parameters / 1e6:8.1f} M {one.tokens:7,} {one.ours_s:8.3f} {one.theirs_s:12.3f} "
        f"{one.ratio:6.2f}"
        for one in found
    ]
    return "\n".join(lines)


def run(
    families: Annotated[str, typer.Option(help="Names, separated by commas; all without it.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Measured passes of each side.")] = 7,
    layers: Annotated[int, typer.Option(min=1, help="Of each transformer.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Of attention.")] = 4,
    head_dim: Annotated[int, typer.Option(min=2, help="Width of a head.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Clips of a batch.")] = 4,
    size: Annotated[str, typer.Option(help="Tokens of a clip over t, h, w.")] = "4x8x12",
) -> None:
    known = [name for name, family in FAMILIES.items() if family.own_code is None]
    names = [name.strip() for name in families.split(",") if name.strip()] or known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--families has {', '.join(unknown)}; Diffusers has {', '.join(known)}.")
    parts = size.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--size {size} is no size; give tokens as TxHxW, for example 4x8x12.")
    t, h, w = map(int, parts)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        print(table([UniformBatch.of(name, layers, heads, head_dim, (t, h, w), batch).run(rounds) for name in names]))
    finally:
        torch.set_num_threads(threads)
