"""What a media header says. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaInfo:
    """Header of a clip or image. Width and height are those of the stored frames, before any rotation."""

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
