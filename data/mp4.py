"""Size, frame rate and frame count of an MP4 or MOV from its moov box alone: about 2 KiB read, nothing decoded.

Boxes are [size u32][type 4 bytes][payload]; size 1 means a u64 follows, size 0 means to the end (ISO 14496-12).
Everything a box claims is checked against what contains it, so a hostile header costs no memory.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from zlib import crc32

import numpy as np

from data.config import LimitsConfig
from data.dynamic_range import check_transfer
from data.ledger import BadSample, Reason
from data.media_info import MediaInfo, square_width

Read = Callable[[int, int], bytes]
TOP_LEVEL = frozenset(b"ftyp moov mdat free skip wide pnot styp sidx moof mfra uuid meta udta pdin ssix prft".split())
ROTATIONS = {(0, 1, -1, 0): 90, (-1, 0, 0, -1): 180, (0, -1, 1, 0): 270}
FIRST_READ_BYTES = 64  # covers ftyp, free and the header of mdat in what ffmpeg writes
LAST_READ_BYTES = 4096  # what follows mdat, if short, is read at once
SAMPLE_ENTRY_BYTES = 86  # of a video sample entry, before the boxes in it


class FragmentedFile(Exception):
    """The samples lie in moof boxes; the moov alone does not tell their number."""


def probe(read: Read, size: int, limits: LimitsConfig) -> MediaInfo:
    """Read `size` bytes of media through `read(offset, count)`. Raises BadSample, or FragmentedFile."""
    moov = _find_moov(read, size, limits)
    try:
        return _parse_moov(moov, size, limits)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise BadSample(Reason.DECODE_ERROR, f"moov: {error}") from error


def _find_moov(read: Read, size: int, limits: LimitsConfig) -> bytes:
    """The payload of moov, after checking that every top-level box lies inside the file."""
    position, moov = 0, None
    buffer, buffer_start = read(0, min(FIRST_READ_BYTES, size)), 0
    while position + 8 <= size:
        start = position - buffer_start
        if start < 0 or start + 16 > len(buffer):
            left = size - position
            buffer, buffer_start, start = read(position, left if left <= LAST_READ_BYTES else 16), position, 0
        header = buffer[start : start + 16]
        length, kind = struct.unpack_from(">I4s", header)
        head = 8
        if length == 1 and len(header) == 16:
            length, head = struct.unpack_from(">Q", header, 8)[0], 16
        elif length == 0:
            length = size - position
        if length < head or not _is_box(kind, position, length, size, moov):
            if position == 0:
                raise BadSample(Reason.NOT_MP4, f"starts with {header[:8]!r}")
            break  # trailing bytes after whole boxes are harmless
        if position + length > size:
            raise BadSample(
                Reason.TRUNCATED_VIDEO,
                f"{kind.decode()} at {position} ends {position + length - size} bytes past the end of the media",
            )
        if kind == b"moov":
            if length > limits.max_moov_bytes:
                raise BadSample(Reason.HEADER_TOO_LARGE, f"moov of {length} bytes > {limits.max_moov_bytes}")
            inside = buffer[start : start + length]
            moov = (inside if len(inside) == length else read(position, length))[head:]
        position += length
    if moov is None:
        raise BadSample(Reason.TRUNCATED_VIDEO, "no moov box")
    return moov


def _is_box(kind: bytes, position: int, length: int, size: int, moov: bytes | None) -> bool:
    """Whether a box begins here, not bytes that follow the last one. Before moov there may be boxes of makers' own."""
    own = kind.isascii() and kind.decode().isprintable() and position + length <= size
    return kind in TOP_LEVEL or (own and position > 0 and moov is None)


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, payload start, payload end) of the boxes in data[start:end]."""
    while start + 8 <= end:
        length, kind = struct.unpack_from(">I4s", data, start)
        head = 8
        if length == 1:
            length, head = struct.unpack_from(">Q", data, start + 8)[0], 16
        elif length == 0:
            length = end - start
        if length < head or start + length > end:
            raise ValueError(f"box {kind!r} of {length} bytes does not fit its parent")
        yield kind, start + head, start + length
        start += length


def _children(data: bytes, start: int, end: int) -> dict[bytes, tuple[int, int]]:
    found: dict[bytes, tuple[int, int]] = {}
    for kind, low, high in _boxes(data, start, end):
        found.setdefault(kind, (low, high))
    return found


def _parse_moov(moov: bytes, size: int, limits: LimitsConfig) -> MediaInfo:
    movie_scale, fragmented = 1000, False
    tracks: list[tuple[int, int]] = []
    for kind, low, high in _boxes(moov, 0, len(moov)):
        if kind == b"mvhd":
            movie_scale = struct.unpack_from(">I", moov, low + (20 if moov[low] == 1 else 12))[0] or 1000
        elif kind == b"mvex":
            fragmented = True
        elif kind == b"trak":
            tracks.append((low, high))
    for low, high in tracks:
        track = _children(moov, low, high)
        if b"mdia" not in track:
            continue
        media = _children(moov, *track[b"mdia"])
        if b"hdlr" in media and moov[media[b"hdlr"][0] + 8 : media[b"hdlr"][0] + 12] == b"vide":
            return _parse_track(moov, track, media, movie_scale, size, limits, fragmented)
    raise BadSample(Reason.NO_VIDEO_TRACK, f"{len(tracks)} tracks, none of video")


def _parse_track(
    moov: bytes,
    track: dict[bytes, tuple[int, int]],
    media: dict[bytes, tuple[int, int]],
    movie_scale: int,
    size: int,
    limits: LimitsConfig,
    fragmented: bool,
) -> MediaInfo:
    inner = _children(moov, *media[b"minf"]) if b"minf" in media else {}
    table = _children(moov, *inner[b"stbl"]) if b"stbl" in inner else {}
    missing = [name.decode() for name in (b"stsd", b"stts", b"stsz") if name not in table]
    if missing or b"mdhd" not in media or b"tkhd" not in track:
        raise ValueError(f"video track without {', '.join(missing) or 'mdhd or tkhd'}")
    width, height = struct.unpack_from(">HH", moov, table[b"stsd"][0] + 8 + 8 + 24)
    check_transfer(_transfer(moov, table[b"stsd"]))
    if width * height > limits.max_pixels:
        raise BadSample(Reason.TOO_MANY_PIXELS, f"{width}x{height} > max_pixels {limits.max_pixels}")
    if not width or not height:
        raise ValueError(f"video of {width}x{height} pixels")
    num_frames = struct.unpack_from(">I", moov, table[b"stsz"][0] + 8)[0]
    if num_frames > limits.max_frames:
        raise BadSample(Reason.TOO_MANY_FRAMES, f"{num_frames} frames > max_frames {limits.max_frames}")
    if not num_frames:
        if fragmented:
            raise FragmentedFile
        raise BadSample(Reason.NO_VIDEO_TRACK, "a video track without frames")
    _check_chunks(moov, table, size)

    scale_at = media[b"mdhd"][0] + (20 if moov[media[b"mdhd"][0]] == 1 else 12)
    scale = struct.unpack_from(">I", moov, scale_at)[0]
    runs = _runs(moov, table[b"stts"], "stts")
    if int(runs[:, 0].sum()) != num_frames:
        raise ValueError(f"stts times {int(runs[:, 0].sum())} frames, stsz sizes {num_frames}")
    ticks = int((runs[:, 0] * runs[:, 1]).sum())
    if not scale or not ticks:
        raise ValueError(f"{ticks} ticks at time scale {scale}")
    fps = num_frames * scale / ticks
    visible = _visible_frames(moov, track, table, runs, scale, movie_scale, num_frames)
    num_keyframes = num_frames
    if b"stss" in table:
        num_keyframes = struct.unpack_from(">I", moov, table[b"stss"][0] + 4)[0]
    shown = square_width(width, _pixel_aspect(moov, track[b"tkhd"][0], table[b"stsd"], width, height))
    return MediaInfo(
        width=shown,
        height=height,
        fps=fps,
        num_frames=visible,
        duration=visible / fps,
        rotation=_rotation(moov, track[b"tkhd"][0]),
        num_keyframes=min(num_keyframes, num_frames),
        header_crc=crc32(moov),
    )


def _runs(moov: bytes, box: tuple[int, int], name: str, signed: bool = False) -> np.ndarray:
    """[runs, 2] of (count, value) from stts or ctts."""
    low, high = box
    count = struct.unpack_from(">I", moov, low + 4)[0]
    if count * 8 > high - low - 8:
        raise ValueError(f"{name} claims {count} entries in {high - low} bytes")
    raw = np.frombuffer(moov, dtype=">i4" if signed else ">u4", count=2 * count, offset=low + 8)
    return raw.reshape(count, 2).astype(np.int64)


def _check_chunks(moov: bytes, table: dict[bytes, tuple[int, int]], size: int) -> None:
    for name, dtype, width in ((b"stco", ">u4", 4), (b"co64", ">u8", 8)):
        if name in table:
            low, high = table[name]
            count = struct.unpack_from(">I", moov, low + 4)[0]
            if count * width > high - low - 8:
                raise ValueError(f"{name.decode()} claims {count} entries in {high - low} bytes")
            last = int(np.frombuffer(moov, dtype=dtype, count=count, offset=low + 8).max(initial=0))
            if last >= size:
                raise BadSample(Reason.TRUNCATED_VIDEO, f"a chunk starts at {last} of {size} bytes")


def _visible_frames(
    moov: bytes,
    track: dict[bytes, tuple[int, int]],
    table: dict[bytes, tuple[int, int]],
    runs: np.ndarray,
    scale: int,
    movie_scale: int,
    num_frames: int,
) -> int:
    """Frames inside the edit list. Clips cut without re-encoding hide the frames from the keyframe to the cut."""
    if b"edts" not in track:
        return num_frames
    edits = _children(moov, *track[b"edts"]).get(b"elst")
    if edits is None:
        return num_frames
    low, high = edits
    wide = moov[low] == 1
    count, form = struct.unpack_from(">I", moov, low + 4)[0], ">Qq" if wide else ">Ii"
    step = 20 if wide else 12
    if count * step > high - low - 8:
        raise ValueError(f"elst claims {count} entries in {high - low} bytes")
    entries = [struct.unpack_from(form, moov, low + 8 + step * i) for i in range(min(count, 16))]
    shown = [(length, begin) for length, begin in entries if begin >= 0]  # begin -1 is an empty edit
    if len(shown) != 1:
        return num_frames
    length, begin = shown[0]
    times = np.cumsum(np.repeat(runs[:, 1], runs[:, 0]))
    times -= runs[0, 1]
    if b"ctts" in table:
        shifts = _runs(moov, table[b"ctts"], "ctts", signed=True)
        if shifts[:, 0].min(initial=0) < 0 or int(shifts[:, 0].sum()) != num_frames:
            raise ValueError(f"ctts shifts {int(shifts[:, 0].sum())} frames of {num_frames}")
        times = times + np.repeat(shifts[:, 1], shifts[:, 0])
    slack = scale / movie_scale  # the edit is rounded to the movie's time scale
    end = begin + length * scale / movie_scale + slack if length else np.inf
    inside = int(((times > begin - slack) & (times < end)).sum())
    return inside or num_frames


def _pixel_aspect(moov: bytes, tkhd: int, stsd: tuple[int, int], width: int, height: int) -> float:
    """Width of a pixel over its height: by the pasp box of the sample entry, else by the size in tkhd, as libav has it.
    0 if nothing says."""
    for kind, content in _boxes_of_entry(moov, stsd):
        if kind == b"pasp" and len(content) >= 8 and all(sides := struct.unpack_from(">II", content)):
            return sides[0] / sides[1]
    shown_width, shown_height = struct.unpack_from(">H2xH2x", moov, tkhd + (88 if moov[tkhd] == 1 else 76))
    return shown_width * height / (shown_height * width) if shown_height else 0.0


def _transfer(moov: bytes, stsd: tuple[int, int]) -> int:
    """How its values stand for light, by the colr box of the sample entry. 0 if nothing says."""
    for kind, content in _boxes_of_entry(moov, stsd):
        if kind == b"colr" and content[:4] in (b"nclx", b"nclc") and len(content) >= 8:
            return int.from_bytes(content[6:8], "big")
    return 0


def _boxes_of_entry(moov: bytes, stsd: tuple[int, int]) -> Iterator[tuple[bytes, bytes]]:
    """(type, payload) of the boxes in the first sample entry, up to one that does not fit."""
    entry = stsd[0] + 8
    with contextlib.suppress(ValueError, struct.error):  # QuickTime's entries may hold other things than boxes
        end = min(entry + struct.unpack_from(">I", moov, entry)[0], stsd[1])
        for kind, low, high in _boxes(moov, entry + SAMPLE_ENTRY_BYTES, end):
            yield kind, moov[low:high]


def _rotation(moov: bytes, tkhd: int) -> int:
    """Degrees clockwise to turn a frame for display, from the matrix of tkhd."""
    return rotation_of(struct.unpack_from(">9i", moov, tkhd + (52 if moov[tkhd] == 1 else 40)))


def rotation_of(matrix: Sequence[int]) -> int:
    """Degrees clockwise to turn a frame for display; 0 for any other change of it than a turn."""
    signs = tuple((value > 0) - (value < 0) for value in (matrix[0], matrix[1], matrix[3], matrix[4]))
    return ROTATIONS.get(signs, 0)  # type: ignore[arg-type]
