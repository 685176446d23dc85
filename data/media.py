"""Header of any clip or image: MP4 and MOV by their moov, still images by Pillow's lazy open, the rest by PyAV.

Nothing is decoded on the first two ways. PyAV opens Matroska, WebM, AVI and fragmented MP4 with `max_pixels` set, since
`av.open` itself decodes a frame to learn the pixel format. Another one is decoded here, which says how it is turned.
"""

from __future__ import annotations

import contextlib
import io
import struct
from importlib.util import find_spec
from typing import BinaryIO

import av
import av.error
from av.sidedata.sidedata import SideData
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

from data import mp4
from data.config import LimitsConfig
from data.dynamic_range import check_transfer
from data.errors import DataError, DataIOError
from data.ledger import BadSample, Reason
from data.media_info import CONTAINERS, MediaInfo, square_width
from data.storage import ByteRange, ReadFile

BOX_SUFFIXES = frozenset(("mp4", "mov", "m4v"))
VIDEO_SUFFIXES = BOX_SUFFIXES | frozenset(("mkv", "webm", "avi", "mpg", "mpeg", "ts", "flv", "wmv", "gif"))
IMAGE_SUFFIXES = frozenset(("jpg", "jpeg", "png", "webp", "bmp"))
MEDIA_SUFFIXES = VIDEO_SUFFIXES | IMAGE_SUFFIXES
# What the bytes of a picture may be, under whatever suffix: for EPS, Pillow starts Ghostscript. The usual ones, whose
# plugins load first, stand first; MPO is read as JPEG. Pillow before 11.3 has no AVIF, and `Image.open` raises KeyError
# for one that it lacks.
PICTURE_FORMATS = (
    *("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF", "DIB", "DDS", "JPEG2000"),
    *(("AVIF",) if find_spec("PIL.AvifImagePlugin") else ()),
)
PICKLE_SUFFIXES = frozenset(("pkl", "pickle", "pyd", "pth", "pt", "dill", "joblib"))
EXIF_ORIENTATION = 274
# by orientation: what makes the pixels upright (Pillow turns against the clock), and the rotation in that
EXIF_TRANSPOSES = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
EXIF_ROTATIONS = {3: 180, 4: 180, 5: 90, 6: 90, 7: 270, 8: 270}
# What plugins of Pillow raise on broken bytes, besides DecompressionBombError: AVIF and DDS RuntimeErrors. Errors of
# our storage are RuntimeErrors, too: who reads through Pillow lets STORAGE_ERRORS pass first.
PILLOW_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    EOFError,
    RuntimeError,
    struct.error,
)
STORAGE_ERRORS = (DataError, DataIOError, FileNotFoundError)


_BEGINNINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"\x1aE\xdf\xa3": "mkv", b"BM": "bmp"}


def suffix_of(name: str) -> str:
    """Last suffix in lower case, without dot; empty if there is none."""
    return name.rpartition("/")[2].rpartition(".")[2].lower() if "." in name.rpartition("/")[2] else ""


def suffix_by_content(head: bytes) -> str:
    """Suffix of media by its first 16 bytes, where it has no name; empty if it is none of the usual ones."""
    if head[4:8] == b"ftyp":
        return "mp4"
    if head[:4] == b"RIFF":
        return {b"WEBP": "webp", b"AVI ": "avi"}.get(head[8:12], "")
    return next((suffix for start, suffix in _BEGINNINGS.items() if head.startswith(start)), "")


def probe(file: ReadFile, offset: int, size: int, suffix: str, limits: LimitsConfig) -> MediaInfo:
    """Header of the media at [offset, offset + size). Raises BadSample with the reason it cannot be used."""
    if size == 0:
        raise BadSample(Reason.EMPTY_MEMBER, "0 bytes of media", offset)
    if size > limits.max_member_bytes:
        raise BadSample(Reason.MEMBER_TOO_LARGE, f"{size} bytes > max_member_bytes {limits.max_member_bytes}", offset)
    if suffix in IMAGE_SUFFIXES:
        return _probe_image(file, offset, size, limits)
    if suffix in BOX_SUFFIXES:
        try:
            return mp4.probe(lambda at, count: file.pread(offset + at, min(count, size - at)), size, limits)
        except mp4.FragmentedFile:
            pass
    return _probe_with_av(file, offset, size, limits)


def _probe_image(file: ReadFile, offset: int, size: int, limits: LimitsConfig) -> MediaInfo:
    stream = io.BufferedReader(ByteRange(file, offset, size), 2048)
    try:
        with open_picture(stream) as image:
            width, height = image.size
            check_pixels(width, height, limits)
            rotation = EXIF_ROTATIONS.get(orientation(image), 0)
    except Image.DecompressionBombError as error:
        raise BadSample(Reason.TOO_MANY_PIXELS, str(error)) from error
    except UnidentifiedImageError as error:
        raise BadSample(Reason.NOT_MEDIA, "not an image Pillow knows") from error
    except STORAGE_ERRORS:
        raise
    except PILLOW_ERRORS as error:
        raise BadSample(Reason.DECODE_ERROR, f"image header: {error}") from error
    return MediaInfo(width=width, height=height, fps=0.0, num_frames=1, duration=0.0, image=True, rotation=rotation)


def open_picture(file: BinaryIO) -> Image.Image:
    """As `Image.open`, of bytes that nobody vouches for."""
    return Image.open(file, formats=PICTURE_FORMATS)


def orientation(image: Image.Image) -> int:
    """EXIF orientation, from what Pillow has read so far: `image.getexif()` would decode a whole PNG to look for it.
    Unreadable EXIF counts as absent."""
    try:
        return Image.Image.getexif(image).get(EXIF_ORIENTATION, 1)
    except STORAGE_ERRORS:
        raise
    except PILLOW_ERRORS:
        return 1


def _probe_with_av(file: ReadFile, offset: int, size: int, limits: LimitsConfig) -> MediaInfo:
    """Counts packets, since these containers do not state their number of frames reliably: reads the whole clip."""
    options = {
        "max_pixels": str(limits.max_pixels),
        "format_whitelist": CONTAINERS,
        "probesize": "1000000",
        "analyzeduration": "1000000",
    }
    try:
        with av.open(ByteRange(file, offset, size), "r", options=options, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise BadSample(Reason.NO_VIDEO_TRACK, f"{container.format.name} without video")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise BadSample(Reason.DECODE_ERROR, f"{container.format.name} with a codec that PyAV does not know")
            check_pixels(stream.codec_context.width, stream.codec_context.height, limits)
            check_transfer(stream.codec_context.color_trc)
            stream.codec_context.thread_count, stream.codec_context.thread_type = 1, "NONE"
            stream.codec_context.options = {"max_pixels": str(limits.max_pixels)}
            times, num_keyframes, rotation = [], 0, None
            for packet in container.demux(stream):
                if packet.pts is not None and packet.size:
                    times.append(packet.pts)
                    num_keyframes += packet.is_keyframe
                if rotation is None:
                    rotation = _rotation_in(packet)
                if len(times) > limits.max_frames:
                    raise BadSample(Reason.TOO_MANY_FRAMES, f"more than max_frames {limits.max_frames}")
            return _info_from_packets(stream, times, num_keyframes, rotation or 0)
    except av.error.FFmpegError as error:
        raise BadSample(Reason.DECODE_ERROR, f"PyAV: {error}") from error


def _rotation_in(packet: av.Packet) -> int | None:
    """Degrees clockwise to turn frames, by the first one: PyAV says it of frames alone. None where none comes out.
    Clips that cannot be decoded are found when they are drawn, as those are of which nothing is decoded here."""
    with contextlib.suppress(av.error.FFmpegError):
        for frame in packet.decode():
            matrix = frame.side_data.get("DISPLAYMATRIX")
            return mp4.rotation_of(struct.unpack("=9i", matrix)) if isinstance(matrix, SideData) else 0
    return None


def _info_from_packets(stream: av.VideoStream, times: list[int], num_keyframes: int, rotation: int) -> MediaInfo:
    width, height = stream.codec_context.width, stream.codec_context.height
    if not times or not width or not height:
        raise BadSample(Reason.NO_VIDEO_TRACK, f"{len(times)} frames of {width}x{height}")
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    span = max(times) - min(times)
    if span and stream.time_base:
        rate = (len(times) - 1) / float(span * stream.time_base)
    if rate <= 0:
        raise BadSample(Reason.DECODE_ERROR, "no frame rate")
    return MediaInfo(
        width=square_width(width, stream.sample_aspect_ratio),
        height=height,
        fps=rate,
        num_frames=len(times),
        duration=len(times) / rate,
        rotation=rotation,
        num_keyframes=max(num_keyframes, 1),
    )


def check_pixels(width: int, height: int, limits: LimitsConfig) -> None:
    if width * height > limits.max_pixels:
        raise BadSample(Reason.TOO_MANY_PIXELS, f"{width}x{height} > max_pixels {limits.max_pixels}")
