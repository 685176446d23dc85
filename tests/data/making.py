"""Small real clips, shards and tables for the tests of the data layer."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import json
import os
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import av
import numpy as np
from PIL import Image

from data.config import LimitsConfig, SourceConfig
from data.dataset.index import Index
from data.dataset.index_build import build_index
from data.ledger import Ledger
from data.storage import ReadFile


@functools.cache
def clip(
    width: int = 64,
    height: int = 48,
    frames: int = 9,
    fps: int = 8,
    container: str = "mp4",
    seed: int = 0,
    movflags: str = "",
    codec: str = "libx264",
) -> bytes:
    """An encoded clip of noise bars. `asm=0` keeps x264's bytes equal from run to run."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options={"movflags": movflags} if movflags else {}) as out:
        x264 = {"crf": "30", "g": "4", "x264-params": "asm=0"} if codec == "libx264" else {}
        stream = out.add_stream(codec, rate=fps, options={"threads": "1", **x264})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        random = np.random.default_rng(seed)
        base = random.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.roll(base, 4 * i, 1)), format="rgb24")
            frame.pts = i
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return buffer.getvalue()


def hdr(transfer: int = 18, container: str = "mp4", movflags: str = "", told: bool = True) -> bytes:
    """A grey clip of 10 bits and nine frames, of HLG by its frames, and where it is `told` by its header, too."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options={"movflags": movflags} if movflags else {}) as out:
        stream = out.add_stream("libx264", rate=8, options={"threads": "1", "g": "4"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p10le"
        encoder = stream.codec_context
        encoder.colorspace, encoder.color_primaries, encoder.color_trc, encoder.color_range = 9, 9, transfer, 1
        for i in range(9):
            frame = av.VideoFrame(64, 48, "yuv420p10le")
            for plane in frame.planes:
                plane.update(np.full(plane.buffer_size // 2, 512, "<u2").tobytes())
            frame.pts = i
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return buffer.getvalue() if told else buffer.getvalue().replace(b"colrnclx", b"freenclx")


def turned(data: bytes, degrees: int) -> bytes:
    """An MP4 that is shown turned clockwise, 0 or 90 degrees, by the matrix of its track."""
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0)}[degrees]
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return data[:at] + matrix + data[at + len(matrix) :]


@functools.cache
def picture(width: int = 64, height: int = 48, kind: str = "png", seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    random = np.random.default_rng(seed)
    Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def sample(i: int, **parts: bytes | None) -> list[tuple[str, bytes]]:
    """Members of sample i: mp4, txt and json, with `parts` replaced, added, or left out when None."""
    key = f"{i:06d}"
    members: dict[str, bytes | None] = {
        "mp4": clip(seed=i % 3),
        "txt": f"caption {i}".encode(),
        "json": json.dumps({"caption": f"json caption {i}", "aesthetic score": 4.0 + i / 10}).encode(),
    }
    members |= parts
    return [(f"{key}.{extension}", data) for extension, data in members.items() if data is not None]


def shard(members: list[tuple[str, bytes | tarfile.TarInfo]]) -> bytes:
    """A tar of (name, content); a TarInfo as content is added as it is, without data."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def good(count: int = 8) -> list[tuple[str, bytes]]:
    return [member for i in range(count) for member in sample(i)]


def index_of(
    path: Path | str,
    cache: Path,
    kind: str = "webdataset",
    limits: LimitsConfig | None = None,
    allow_empty: bool = True,
    **source: object,
) -> tuple[Index, Ledger]:
    """The index of a path and the ledger it filled; every row is in exactly one state."""
    ledger = Ledger(limits)
    index = build_index(
        SourceConfig(path=str(path), kind=kind, **source),
        cache,
        ledger,
        limits=limits,  # type: ignore[arg-type]
        allow_empty=allow_empty,
    )
    ledger.add_planned(index.num_ok)
    ledger.check()
    return index, ledger


@contextlib.contextmanager
def gone_at(number: int, suffix: str) -> Iterator[Iterator[int]]:
    """Within it, a file of this suffix is gone at this read, and there before and after. The next number of what is
    given is that of the next read."""
    numbers, pread = itertools.count(1), ReadFile.pread

    def read(file: ReadFile, offset: int, count: int, *, alone: bool = False) -> bytes:
        if file.uri.endswith(suffix) and next(numbers) == number:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file.uri)
        return pread(file, offset, count, alone=alone)

    with mock.patch.object(ReadFile, "pread", read):
        yield numbers


def rejected(ledger: Ledger) -> dict[str, int]:
    return {str(reason): count for reason, count in ledger.rejected.items()}


def shard_faults(ledger: Ledger) -> dict[str, int]:
    return {str(reason): count for reason, count in ledger.shard_faults.items()}


def notes(ledger: Ledger) -> dict[str, int]:
    return {str(reason): count for reason, count in ledger.notes.items()}


def display_p3() -> bytes:
    """An ICC profile of Display P3, as photos of phones have it."""

    def numbers(*values: float) -> bytes:
        return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))

    curve = b"para\0\0\0\0\0\3\0\0" + numbers(2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
    axes = {"r": (0.51512, 0.2412, -0.00105), "g": (0.29198, 0.69225, 0.04189), "b": (0.1571, 0.06657, 0.78407)}
    tags = {b"desc": b"desc\0\0\0\0\0\0\0\3P3\0".ljust(96, b"\0"), b"cprt": b"text\0\0\0\0none\0"}
    tags[b"wtpt"] = b"XYZ \0\0\0\0" + numbers(0.9642, 1, 0.8249)
    for axis, values in axes.items():
        tags[f"{axis}XYZ".encode()], tags[f"{axis}TRC".encode()] = b"XYZ \0\0\0\0" + numbers(*values), curve
    table, body, begin = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for tag, value in tags.items():
        table += tag + struct.pack(">II", begin + len(body), len(value))
        body += value.ljust(-(-len(value) // 4) * 4, b"\0")
    head = struct.pack(">I4sI12s", begin + len(body), b"lcms", 0x02400000, b"mntrRGB XYZ ")
    head += struct.pack(">6H4s28x", 2024, 1, 1, 0, 0, 0, b"acsp") + numbers(0.9642, 1, 0.8249)
    return head.ljust(128, b"\0") + table + body
