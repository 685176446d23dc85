"""What a media header says. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

# What libav may take the bytes of a clip for, as said to `av.open`: what the suffixes of clips mean, and others that
# hold their frames themselves. Its demuxers of playlists and sessions open files and sockets that the bytes name.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,live_flv,asf,gif,ogg,h264,hevc,m4v,"
    "vc1,av1,obu,ivf,nut,mxf,dv,wtv,yuv4mpegpipe,apng,png_pipe,jpeg_pipe,webp_pipe,bmp_pipe"
)
MAX_PIXEL_ASPECT = 4  # anamorphic film is 2; what claims more, or less than the inverse, is broken


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaInfo:
    """Header of a clip or image. Width and height are those of a frame with square pixels, before any rotation."""

    width: int
    height: int
    fps: float  # 0 for images
    num_frames: int  # 1 for images
    duration: float  # seconds; 0 for images
    rotation: int = 0  # degrees clockwise to turn a frame for display: 0, 90, 180, 270
    num_keyframes: int = 1
    image: bool = False
    header_crc: int = 0  # of the header read, where it states the size of every frame: another encode has another

    @property
    def shown_size(self) -> tuple[int, int]:
        """(width, height) as displayed."""
        return (self.height, self.width) if self.rotation in (90, 270) else (self.width, self.height)


@dataclass(frozen=True, slots=True)
class CropBox:
    """The part of a picture that is used: columns [left, right) and rows [top, bottom), in pixels as displayed."""

    left: int
    right: int
    top: int
    bottom: int

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)."""
        return self.right - self.left, self.bottom - self.top

    def fits(self, width: int, height: int) -> bool:
        """Whether it has pixels, all of them inside a picture of this size."""
        return 0 <= self.left < self.right <= width and 0 <= self.top < self.bottom <= height

    def __str__(self) -> str:
        return f"crop [{self.left}, {self.right}, {self.top}, {self.bottom}]"


def square_width(width: int, pixel_aspect: Fraction | float | None) -> int:
    """Columns of a stored frame of `width` when its pixels, `pixel_aspect` times as wide as high, are made square:
    1440 with 4:3 are shown as 1920. Aspects that are absent or absurd count as 1."""
    if not pixel_aspect or not 1 / MAX_PIXEL_ASPECT <= pixel_aspect <= MAX_PIXEL_ASPECT:
        return width
    return max(round(width * pixel_aspect), 1)
