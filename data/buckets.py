"""Which bucket a clip joins, and how many clips make a batch of it. Pure arithmetic, no pixels.

A table is a list of resolution classes, largest first, each with entries (frames, ratio variants). A clip goes to the
largest resolution of which it has the pixels, then to the longest frame count it can fill, then to the nearest aspect
ratio. Open-Sora tables add a probability with which a clip takes an entry, else it tries the next (its
`get_bucket_id`); the draws come from the sample's own generator, so the choice is repeatable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from data.config import OPEN_SORA_RATIOS, BatchConfig, BucketsConfig, StartFrame
from data.ledger import Reason
from data.types import Bucket
from ops.geometry import Geometry

BatchSize = Callable[[Bucket, BatchConfig], int]  # clips of a batch that takes `target_s` seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipShape:
    """What the header of a clip says, as far as bucketing cares. `fps` 0 marks a still image."""

    frames: int
    height: int
    width: int
    fps: float

    @property
    def is_image(self) -> bool:
        return self.fps == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolutionBuckets:
    """The buckets of one resolution and frame count: one per aspect ratio."""

    resolution: str
    area: int  # nominal pixels of the resolution
    frames: int
    buckets: tuple[Bucket, ...]
    keep: float = 1.0  # probability that a clip which fits takes this entry
    step_down: float = 1.0  # probability of trying shorter entries when the clip fits but does not take this one
    batch: int = 0  # of the pasted table; 0: none given


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A bucket a clip may join, with the probability of taking it when it comes to this choice."""

    bucket: Bucket
    keep: float
    step_down: float
    resolution: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why no bucket takes a clip; `nearest` is the bucket it misses by least."""

    reason: str  # too_short, too_small, too_large, no_ratio, no_image_bucket
    nearest: Bucket | None
    detail: str

    @property
    def ledger_reason(self) -> Reason:
        """Under which it is counted."""
        return Reason.TOO_FEW_FRAMES if self.reason == "too_short" else Reason.NO_BUCKET

    @property
    def summary(self) -> str:
        return f"{self.reason}, nearest bucket {self.nearest}" if self.nearest else self.reason


class BucketTable:
    """All buckets of a run (or of a segment). Immutable."""

    def __init__(self, entries: Sequence[ResolutionBuckets], config: BucketsConfig) -> None:
        self.entries = tuple(sorted(entries, key=lambda entry: (-entry.area, -entry.frames, entry.resolution)))
        self.config = config
        self.buckets = tuple(sorted({bucket for entry in self.entries for bucket in entry.buckets}))
        self.batches = {bucket: entry.batch for entry in self.entries for bucket in entry.buckets if entry.batch}

    @classmethod
    def build(cls, config: BucketsConfig, geometry: Geometry) -> BucketTable:
        """The table a config asks for. Raises ValueError for a bucket the VAE or the patch cannot take."""
        if config.open_sora:
            entries = _open_sora_entries(config.open_sora, geometry)
        elif config.table:
            entries = _explicit_entries([Bucket.parse(text) for text in config.table])
        elif config.resolutions:
            entries = [
                _generated(name, _area(name), frames, config.ratios, geometry)
                for name in config.resolutions
                for frames in config.frames
            ]
        else:
            raise ValueError(
                "data.buckets is empty: no clip can be trained. Give table: [17x64x96], or resolutions "
                "and frames, or an open_sora table."
            )
        table = cls(entries, config)
        for bucket in table.buckets:
            geometry.token_grid(bucket.frames, bucket.height, bucket.width)
        return table

    @classmethod
    def buckets_of(cls, tables: Iterable[BucketsConfig], geometry: Geometry) -> tuple[Bucket, ...]:
        """The buckets of several tables, each once."""
        return tuple(dict.fromkeys(bucket for table in tables for bucket in cls.build(table, geometry).buckets))

    def choices(self, shape: ClipShape, fps: float) -> tuple[Choice, ...] | Refusal:
        """Buckets the clip may join, in order of preference; a sure choice ends the list."""
        frames = available_frames(shape, fps)
        entries = self._entries_by_size(shape)
        if isinstance(entries, Refusal):
            return entries
        fitting = self._entries_by_length(entries, shape, frames)
        if not fitting:
            return self._too_short(entries, shape, frames)
        return self._by_ratio(fitting, shape)

    def _entries_by_size(self, shape: ClipShape) -> list[ResolutionBuckets] | Refusal:
        area = shape.height * shape.width
        largest, smallest = self.entries[0].area, min(entry.area for entry in self.entries)
        if self.config.oversize == "drop" and area * self.config.min_area > largest:
            return Refusal(
                reason="too_large",
                nearest=self._nearest(self.entries, shape),
                detail=f"{shape.width}x{shape.height} is larger than every bucket (oversize: drop)",
            )
        entries = [entry for entry in self.entries if area >= self.config.min_area * entry.area]
        if entries:
            return entries
        if self.config.undersize == "upscale":
            return [entry for entry in self.entries if entry.area == smallest]
        nearest = self._nearest([entry for entry in self.entries if entry.area == smallest], shape)
        return Refusal(
            reason="too_small",
            nearest=nearest,
            detail=f"{shape.width}x{shape.height} has less than {self.config.min_area:g} of the pixels of "
            f"the smallest bucket {nearest}",
        )

    def _entries_by_length(
        self, entries: Sequence[ResolutionBuckets], shape: ClipShape, frames: int
    ) -> list[ResolutionBuckets]:
        """Still images take one-frame buckets, videos the others (unless a video too short may stand as an image)."""
        if shape.is_image:
            return [entry for entry in entries if entry.frames == 1]
        fitting = [entry for entry in entries if 1 < entry.frames <= frames]
        if not fitting and self.config.short_videos == "image":
            return [entry for entry in entries if entry.frames == 1]
        return fitting

    def _too_short(self, entries: Sequence[ResolutionBuckets], shape: ClipShape, frames: int) -> Refusal:
        if shape.is_image:
            return Refusal(
                reason="no_image_bucket",
                nearest=self._nearest(entries, shape),
                detail="a still image, and no bucket of its size has 1 frame",
            )
        videos = [entry for entry in entries if entry.frames > 1]
        if not videos:
            return Refusal(
                reason="too_short",
                nearest=self._nearest(entries, shape),
                detail=f"a video of {frames} frames, and its size has image buckets only",
            )
        shortest = min(entry.frames for entry in videos)
        nearest = self._nearest([entry for entry in videos if entry.frames == shortest], shape)
        return Refusal(
            reason="too_short",
            nearest=nearest,
            detail=f"{frames} frames at the training frame rate; the shortest bucket of its size is {nearest}",
        )

    def _by_ratio(self, entries: Sequence[ResolutionBuckets], shape: ClipShape) -> tuple[Choice, ...] | Refusal:
        choices = []
        for entry in entries:
            bucket = min(entry.buckets, key=lambda bucket: (_ratio_error(bucket, shape), bucket))
            if _ratio_error(bucket, shape) <= math.log(self.config.max_ratio_error) + 1e-9:
                choices.append(
                    Choice(bucket=bucket, keep=entry.keep, step_down=entry.step_down, resolution=entry.resolution)
                )
                if entry.keep >= 1:
                    break
        if choices:
            return tuple(choices)
        nearest = self._nearest(entries, shape)
        return Refusal(
            reason="no_ratio",
            nearest=nearest,
            detail=f"aspect ratio {shape.width / shape.height:.2f} is more than a factor "
            f"{self.config.max_ratio_error:g} from the nearest bucket {nearest}",
        )

    def nearest_by_class(self, shape: ClipShape) -> dict[str, Bucket]:
        """For every resolution class, smallest first, the bucket that a shape misses by least."""
        classes: dict[str, list[ResolutionBuckets]] = {}
        for entry in reversed(self.entries):
            classes.setdefault(entry.resolution, []).append(entry)
        found = {name: self._nearest(entries, shape) for name, entries in classes.items()}
        return {name: bucket for name, bucket in found.items() if bucket is not None}

    @staticmethod
    def _nearest(entries: Sequence[ResolutionBuckets], shape: ClipShape) -> Bucket | None:
        buckets = [bucket for entry in entries for bucket in entry.buckets]
        area = shape.height * shape.width
        return min(
            buckets,
            key=lambda bucket: (
                _ratio_error(bucket, shape),
                abs(bucket.area - area),
                abs(bucket.frames - shape.frames),
            ),
            default=None,
        )


def pick(choices: Sequence[Choice], uniforms: Callable[[int], float]) -> Bucket | None:
    """Walks the choices of a clip with its own random numbers. None: no probability was met, the clip is not trained.

    As in Open-Sora: an entry is taken with `keep`; if not, shorter entries of the same resolution are tried with
    `step_down`, else the next resolution.
    """
    skipped = ""
    for number, choice in enumerate(choices):
        if choice.resolution == skipped:
            continue
        if choice.keep >= 1 or uniforms(2 * number) < choice.keep:
            return choice.bucket
        if choice.step_down < 1 and uniforms(2 * number + 1) >= choice.step_down:
            skipped = choice.resolution
    return None


def available_frames(shape: ClipShape, fps: float) -> int:
    """Frames a clip yields at the training frame rate (0: its own). The last frame is held for its own duration."""
    if shape.is_image:
        return 1
    if fps <= 0 or shape.frames <= 1:
        return shape.frames
    return int((shape.frames - 1) / shape.fps * fps + 1e-6) + 1


def last_start(shape: ClipShape, bucket: Bucket, fps: float) -> int:
    """The latest frame of the file at which the bucket's frames may begin."""
    if bucket.frames == 1:
        return 0  # of an image, and of a video that stands as one
    if fps <= 0:
        return max(shape.frames - bucket.frames, 0)
    needed = (bucket.frames - 1) / fps * shape.fps
    return max(int(shape.frames - 1 - needed + 1e-6), 0)


def first_frames(latest: int, start_frame: StartFrame) -> Sequence[int]:
    """Frames of the file at which a draw may begin, whose latest is `latest`: each as likely as the others."""
    if start_frame == "random":
        return range(latest + 1)
    if start_frame == "fixed":
        return (0,)
    return [round(latest * part / (start_frame - 1)) for part in range(start_frame)]


def planned_batch(
    table: BucketTable, bucket: Bucket, config: BatchConfig, geometry: Geometry, timed: BatchSize | None = None
) -> tuple[int, str]:
    """Clips of a bucket's batch, and what sets their number: the pasted table, the seconds that `timed` gives where the
    config has a `target_s`, or a limit of the dual constraint. Raises ValueError for a `target_s` without a profile."""
    if config.from_table and bucket in table.batches:
        return table.batches[bucket], "table"
    if config.auto or not config.target_s:
        return batch_size(bucket, config, geometry), binding_limit(bucket, config, geometry)
    if timed is None:
        raise ValueError(
            "data.batch.target_s needs a profile to tell the seconds of a batch. Set data.batch.compute "
            "instead where there is none."
        )
    return timed(bucket, config), "target_s"


def batch_size(bucket: Bucket, config: BatchConfig, geometry: Geometry) -> int:
    """Clips of a batch by AdaptiveLoad's dual constraint max(1, min(floor(M_mem / S), floor(M_comp / S^p)))."""
    tokens = config.text_tokens + geometry.tokens(bucket.frames, bucket.height, bucket.width)
    size = math.floor(config.memory_tokens / tokens)
    if config.compute:
        size = min(size, math.floor(config.compute / tokens**config.exponent))
    if config.max_batch:
        size = min(size, config.max_batch)
    return max(1, size)


def binding_limit(bucket: Bucket, config: BatchConfig, geometry: Geometry) -> str:
    """Which of the limits sets the batch size: memory, compute, cap, or one (a single clip exceeds a limit)."""
    tokens = config.text_tokens + geometry.tokens(bucket.frames, bucket.height, bucket.width)
    sizes = {"memory": config.memory_tokens / tokens}
    if config.compute:
        sizes["compute"] = config.compute / tokens**config.exponent
    if config.max_batch:
        sizes["cap"] = float(config.max_batch)
    limit = min(sizes, key=lambda name: math.floor(sizes[name]))
    return limit if sizes[limit] >= 1 else f"one ({limit})"


def _explicit_entries(buckets: Sequence[Bucket]) -> list[ResolutionBuckets]:
    """Buckets whose areas lie within 25 % of the class's largest count as one resolution."""
    entries: dict[tuple[int, int], list[Bucket]] = {}
    area = 0
    for bucket in sorted(set(buckets), key=lambda bucket: -bucket.area):
        if not area or bucket.area < 0.8 * area:
            area = bucket.area
        entries.setdefault((area, bucket.frames), []).append(bucket)
    smallest = {
        area: min(bucket.area for (other, _), group in entries.items() if other == area for bucket in group)
        for area, _ in entries
    }
    return [
        ResolutionBuckets(
            resolution=f"{math.isqrt(area)}px", area=smallest[area], frames=frames, buckets=tuple(sorted(group))
        )
        for (area, frames), group in entries.items()
    ]


def _generated(
    name: str,
    area: int,
    frames: int,
    ratios: Sequence[str],
    geometry: Geometry,
    keep: float = 1.0,
    step_down: float = 1.0,
    batch: int = 0,
) -> ResolutionBuckets:
    buckets = {_fit(frames, area, ratio, geometry.spatial_multiple) for ratio in ratios}
    return ResolutionBuckets(
        resolution=name,
        area=area,
        frames=frames,
        buckets=tuple(sorted(buckets)),
        keep=keep,
        step_down=step_down,
        batch=batch,
    )


def _fit(frames: int, area: int, ratio: str, multiple: int) -> Bucket:
    """Height and width of `ratio` (width:height) nearest to `area` pixels, in multiples the model can take."""
    match = re.fullmatch(r"([\d.]+):([\d.]+)", ratio)
    if match is None or not float(match[1]) or not float(match[2]):
        raise ValueError(f"data.buckets.ratios {ratio!r} is not WIDTH:HEIGHT, for example 16:9.")
    aspect = float(match[1]) / float(match[2])
    height = max(round(math.sqrt(area / aspect) / multiple), 1) * multiple
    width = max(round(math.sqrt(area * aspect) / multiple), 1) * multiple
    return Bucket(frames, height, width)


def _area(name: str) -> int:
    """Pixels of a resolution as Open-Sora names them: 256px and 256 are 256^2, 480p is 480^2 * 16/9."""
    match = re.fullmatch(r"(\d+)(px|p)?(?:_(?:ar\d+:\d+|max))?", name)
    if match is None:
        raise ValueError(
            f"data.buckets resolution {name!r} is neither like 256px (256^2 pixels) nor like 480p "
            f"(480^2 * 16/9 pixels)."
        )
    side = int(match[1])
    return side * side * 16 // 9 if match[2] == "p" else side * side


def _open_sora_entries(table: Mapping[str, Mapping[int, object]], geometry: Geometry) -> list[ResolutionBuckets]:
    entries = []
    for name, rows in table.items():
        name = str(name)
        fixed = re.search(r"_ar(\d+:\d+)", name)
        ratios = (fixed[1],) if fixed else OPEN_SORA_RATIOS
        for frames, value in rows.items():
            probability, batch = value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
            keep, step_down = probability if isinstance(probability, list | tuple) else (probability, 1.0)
            if keep is None:
                raise ValueError(
                    f"data.buckets.open_sora {name} {frames}: {value!r} is not [probability, batch size], "
                    f"for example [1.0, 12] or [[1.0, 0.33], 27]."
                )
            if keep > 0:  # v1.2 switches entries off with (0.0, None)
                entries.append(
                    _generated(
                        name,
                        _area(name),
                        int(frames),
                        ratios,
                        geometry,
                        keep=float(keep),
                        step_down=float(step_down),
                        batch=int(batch or 0),
                    )
                )
    if not entries:
        raise ValueError("data.buckets.open_sora has no entry with a probability above 0. Give at least one.")
    return entries


def _ratio_error(bucket: Bucket, shape: ClipShape) -> float:
    return abs(math.log(bucket.width / bucket.height) - math.log(shape.width / shape.height))
