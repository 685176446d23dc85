"""KnapFormer's data codes as a workload: `g16b4i256f1s0,g4b5i1024f1s0` are 16 workers that load 4 pictures of 256 x 256
each, and 4 workers that load 5 of 1024 x 1024 (its Section 4, and the launcher it published).

g workers, b samples each, i pixels of a side, f frames, s 1 for a video and 0 for pictures. A video of f frames has
f / 3.4 latent frames, as with its VAE (17 pixel frames to 5), pictures have f of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from actors.plan.types import Item
from ops.geometry import Geometry
from ops.typed import ConfigError

PATTERN = re.compile(r"g([1-9]\d*)b([1-9]\d*)i([1-9]\d*)f([1-9]\d*)s([01])")
PER_LATENT = 3.4  # pixel frames
MOST_TEXT = 392  # tokens of a caption, drawn from 0 to this


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCode:
    """What a number of workers load alike."""

    workers: int
    batch: int
    pixels: int
    frames: int
    video: bool

    @property
    def latent_frames(self) -> int:
        return max(int(self.frames / PER_LATENT), 1) if self.video else self.frames


def parse_codes(text: str) -> tuple[DataCode, ...]:
    """Raises ConfigError for what is not a list of codes."""
    codes = []
    for term in text.split(","):
        match = PATTERN.fullmatch(term.strip())
        if match is None:
            raise ConfigError(
                f"--codes {text!r}: {term.strip()!r} is not gWORKERSbBATCHiPIXELSfFRAMESs0 or s1, for example "
                f"g16b4i256f1s0,g4b1i512f85s1."
            )
        workers, batch, pixels, frames, video = map(int, match.groups())
        codes.append(DataCode(workers=workers, batch=batch, pixels=pixels, frames=frames, video=bool(video)))
    return tuple(codes)


def workers_of(text: str) -> int:
    """The number of workers that load once what the codes say. Raises ConfigError."""
    return sum(code.workers for code in parse_codes(text))


def check_workers(text: str, workers: int) -> int:
    """The workers of the codes. Raises ConfigError where `workers` are no multiple of them."""
    group = workers_of(text)
    if workers % group:
        raise ConfigError(
            f"--codes {text!r} is for {group} workers, and the cluster's {workers} are no multiple of them; give "
            f"--cluster 1x{group} or a multiple."
        )
    return group


def items_from_codes(
    text: str, workers: int, steps: int, seed: int, geometry: Geometry
) -> tuple[tuple[Item, ...], ...]:
    """One item per worker and step; the codes repeat until all workers have one. Shapes are those that give as many
    latent frames with the model's own VAE, captions have random lengths.

    Raises ConfigError where the workers are no multiple of the codes', or the model cannot take a size.
    """
    codes, group = parse_codes(text), check_workers(text, workers)
    loaded = [code for _ in range(workers // group) for code in codes for _ in range(code.workers)]
    for code in codes:
        try:
            geometry.token_grid(_frames(code, geometry), code.pixels, code.pixels)
        except ValueError as error:
            raise ConfigError(f"--codes: pictures of {code.pixels} pixels do not fit the model: {error}") from None
    rng = np.random.default_rng(seed)
    return tuple(
        tuple(
            Item(
                id=f"s{step}.{worker}",
                batch=code.batch,
                frames=_frames(code, geometry),
                height=code.pixels,
                width=code.pixels,
                text_tokens=round(float(rng.integers(0, MOST_TEXT + 1, size=code.batch).mean())),
            )
            for worker, code in enumerate(loaded)
        )
        for step in range(steps)
    )


def _frames(code: DataCode, geometry: Geometry) -> int:
    """Pixel frames that this model's VAE turns into the code's latent frames."""
    return geometry.frames_of(code.latent_frames)
