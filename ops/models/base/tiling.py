"""How a VAE cuts clips before it encodes them, as numbers: for the VAE that does it, and for plans that price it.

Imports neither torch nor Ray.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import product

from ops.ranges import between, check_numbers

Cut = tuple[int, int]  # [from, to)
_MOST = 1 << 20  # pixels or frames


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Sizes of tiles, and from one to the next. Over time they are frames of segments, each with `shared` frames more,
    which belong to the next one, too (HunyuanVideo: 1; chunks: 0); over height and width pixels, in units of `scale`
    (Wan 2.2 cuts its patches). 0: not cut."""

    frames: int = 0
    frame_stride: int = 0
    shared: int = 1
    height: int = 0
    width: int = 0
    height_stride: int = 0
    width_stride: int = 0
    scale: int = 1

    def __post_init__(self) -> None:
        check_numbers("tiling", self, **{field.name: between(0, _MOST) for field in fields(self)})
        for size, stride in (
            ("frames", "frame_stride"),
            ("height", "height_stride"),
            ("width", "width_stride"),
        ):
            if getattr(self, size) and not 1 <= getattr(self, stride) <= getattr(self, size):
                raise ValueError(f"{stride} is {getattr(self, stride)}; it must be 1 to {size}, {getattr(self, size)}.")
        if self.scale < 1 or bool(self.height) != bool(self.width):
            raise ValueError(f"scale {self.scale} must be 1 or more; height and width are both cut, or neither.")

    def spans(self, frames: int, height: int, width: int) -> tuple[list[Cut], list[Cut], list[Cut]]:
        """Segments, rows and columns of a clip's tiles."""
        times, rows, columns = [(0, frames)], [(0, height)], [(0, width)]
        if self.frames and frames > self.frames:
            starts = range(0, frames, self.frame_stride)
            times = [(start, min(start + self.frames + self.shared, frames)) for start in starts]
        if self.height and (height > self.height or width > self.width):
            rows = cuts(height, self.height_stride, self.height, self.scale)
            columns = cuts(width, self.width_stride, self.width, self.scale)
        return times, rows, columns

    def dealt(self, clips: int, shape: tuple[int, int, int], members: int) -> DealtTiles:
        """What the busiest member of a bag encodes of `clips` clips of this shape (frames, height, width): tiles are
        dealt round robin, clip by clip."""
        sizes = [(t[1] - t[0], h[1] - h[0], w[1] - w[0]) for t, h, w in product(*self.spans(*shape))]
        pixels = [math.prod(size) for size in sizes]
        whole, rest = divmod(clips * len(sizes), members)
        largest = sizes[pixels.index(max(pixels))]
        if members == 1:
            return DealtTiles(count=whole, pixels=clips * sum(pixels), shape=largest)
        hands = [0] * members
        for number in range(clips * len(sizes)):
            hands[number % members] += pixels[number % len(sizes)]
        return DealtTiles(count=whole + (rest > 0), pixels=max(hands), shape=largest)


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtTiles:
    """Tiles of a member of a bag: their number, all their pixels, and (frames, height, width) of the largest."""

    count: int
    pixels: int
    shape: tuple[int, int, int]


def cuts(size: int, stride: int, length: int, scale: int = 1) -> list[Cut]:
    """Spans of `length` every `stride` units of `scale`; the last ones end with `size`."""
    cut = size // scale
    return [(start * scale, min(start + length, cut) * scale) for start in range(0, cut, stride)]
