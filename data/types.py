"""Types of the data path: bucket, sample, item, step, batch. Plain data; no torch, no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.config import LimitsConfig
from data.media_info import CropBox
from ops.geometry import PixelShape

if TYPE_CHECKING:
    import numpy as np

    from data.ledger import Fault


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A shape that batches are made of. An image bucket has one frame."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"

    @property
    def shape(self) -> PixelShape:
        return self.frames, self.height, self.width

    @property
    def area(self) -> int:
        return self.height * self.width

    @classmethod
    def parse(cls, text: str) -> Bucket:
        """Bucket of `"17x480x832"`."""
        frames, height, width = (int(part) for part in text.split("x"))
        return cls(frames, height, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRef:
    """One clip of a step, with everything that chance decided about it. Names a clip, holds no bytes of it."""

    source: int
    epoch: int
    row: int  # ordinal in the index of the source
    start_frame: int  # in frames of the file
    key: str  # name of the sample, unique within its shard
    caption_chars: int  # 0 when the caption is dropped
    content: str  # identity of the media bytes, for caches
    caption_pick: float = 0.0  # in [0, 1): which of several captions
    caption_drop: bool = False  # trained without its caption, for classifier-free guidance

    @property
    def draw(self) -> str:
        """Source, epoch and row: the key of its random numbers."""
        return f"{self.source}/{self.epoch}/{self.row}"


def clip_of(draw: str) -> str:
    """The part of such a key that is the same in every epoch; another name as it is."""
    source, _, row = draw.split("/") if draw.count("/") == 2 else (draw, "", "")
    return f"{source}/{row}" if row else source


@dataclass(frozen=True, kw_only=True, slots=True)
class DataItem:
    """One bucket batch of a step, and how a decoder makes it. `id` is unique in the run: s<step>.<slot>."""

    job: DecodeJob
    samples: tuple[SampleRef, ...]

    @property
    def id(self) -> str:
        return self.job.item

    @property
    def bucket(self) -> Bucket:
        return self.job.bucket

    @property
    def batch(self) -> int:
        return len(self.samples)

    @property
    def step(self) -> int:
        return int(self.id[1:].partition(".")[0])

    @property
    def slot(self) -> int:
        return int(self.id.rpartition(".")[2])


NeedsPixels = Callable[[DataItem], bool]  # whether an item's video is wanted, or its captions alone


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOfItems:
    """The items of one step. The same for any number of workers."""

    index: int
    items: tuple[DataItem, ...]

    @property
    def num_samples(self) -> int:
        return sum(item.batch for item in self.items)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Where the bytes of a sample lie and which frames of them are wanted. Made by the dataset, read by a decoder."""

    source: int = 0  # number in data.sources
    key: str
    media: str  # path or URI of the file, or of the shard that holds it
    offset: int  # of the media within the file
    size: int  # bytes; -1: to the end of the file
    file_size: int = 0  # bytes of the whole file when it was indexed; 0: not compared
    suffix: str  # of the media, without dot, lower case
    image: bool
    frames: int  # number of frames the header promises
    fps: float  # frame rate the header promises; 0 for images
    start_frame: int
    start_s: float = 0.0  # the sample is the part [start_s, end_s) of a longer video
    end_s: float = 0.0  # 0: to the end of the video
    rotation: int = 0
    crop: CropBox | None = None  # the part of each frame that is used
    captions: tuple[CaptionRef, ...] = ()
    caption_pick: float = 0.0
    caption_drop: bool = False
    shard: str = ""  # named in faults


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionRef:
    """A caption: `text` itself, or the bytes [offset, offset + size) of `path` (field `field` of them if JSON), after
    the `prefix` of its source."""

    text: str | None = None
    path: str = ""
    offset: int = 0
    size: int = 0
    field: str = ""
    prefix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeJob:
    """Decode work for one item; self-contained, so decoders need no index."""

    item: str
    bucket: Bucket
    clips: tuple[Clip, ...]
    fps: float  # 0 keeps the frame rate of each clip
    crop: bool  # cut the bucket out of larger frames without scaling them
    limits: LimitsConfig
    decoder: str  # module:function that turns (clip, job) into uint8 [T, H, W, 3]
    pixels: bool = True  # False: only captions are read, the video of the batch has no frames

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[B, T, H, W, 3] of its batch."""
        frames = self.bucket.frames if self.pixels else 0
        return len(self.clips), frames, self.bucket.height, self.bucket.width, 3


@dataclass(slots=True)
class Batch:
    """Pixels and captions of one item. A clip found bad keeps its slot: black frames, `ok` False, weight 0.

    The video of an item whose latents are cached has no frames. Code that needs them must check its shape.
    """

    item: str
    video: np.ndarray  # uint8 [B, T, H, W, 3]; read-only when it lies in shared memory
    captions: list[str]
    ok: list[bool]
    keys: list[str]
    faults: tuple[Fault, ...] = ()  # one per slot with ok False, in slot order
