"""Clips as files a person can look at: H.264 MP4 and PNG contact sheets. Videos are uint8 [T, H, W, 3]."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import cast

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, VideoReformatter
from av.video.stream import VideoStream
from PIL import Image, ImageDraw

from app.drawing.text import LINE, font_of, lines_of
from ops.counted import counted

SHEET_CLIPS = 32  # on a contact sheet at most: the first ones
_SHEET_FRAMES = 6  # frames of a clip on a contact sheet, evenly spaced from the first to the last
_SHEET_PIXELS = 1 << 20  # of these frames together: with more, 40 clips of 480p were a sheet of 1.4 GiB and 100 s
_MIN_HEIGHT = 96  # small clips are enlarged by a whole factor, so that their pixels stay sharp
_GAP = 4
_PAPER, _INK = (250, 250, 250), (30, 30, 30)


def write_mp4(path: Path, video: np.ndarray, fps: float) -> None:
    """H.264, yuv420p, which every player opens, in BT.709, which players take colours for that say nothing, and some
    that do. An odd side loses its last row or column (4:2:0 needs even ones)."""
    _check(video)
    frames, height, width, _ = video.shape
    height, width = height - height % 2, width - width % 2
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4") as container:
        stream = cast(
            VideoStream,
            container.add_stream(
                "libx264",
                rate=Fraction(fps).limit_denominator(1001),
                options={"crf": "16", "preset": "medium", "x264-params": "log-level=none"},
            ),
        )
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1
        encoder = stream.codec_context
        encoder.colorspace, encoder.color_range = Colorspace.ITU709, ColorRange.MPEG
        encoder.color_primaries, encoder.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        in_bt709 = partial(
            VideoReformatter().reformat,
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            threads=1,
        )
        for index in range(frames):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(video[index, :height, :width]), format="rgb24")
            container.mux(stream.encode(in_bt709(picture)))
        container.mux(stream.encode())


def mp4_of(video: np.ndarray, fps: float) -> bytes:
    """The bytes of a clip's MP4 file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_mp4(path, video, fps)
        return path.read_bytes()


def read_mp4(path: Path) -> np.ndarray:
    """The frames of a clip, uint8 [T, H, W, 3]."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def sheet_frames(video: np.ndarray) -> np.ndarray:
    """The frames that a contact sheet shows of a clip, large ones made smaller: its sheet needs no others."""
    shown = sorted({round(position) for position in np.linspace(0, len(video) - 1, _SHEET_FRAMES)})
    frames = np.ascontiguousarray(video[shown])
    count, height, width, _ = frames.shape
    scale = (_SHEET_PIXELS / (count * height * width)) ** 0.5
    if scale >= 1:
        return frames
    size = max(1, int(width * scale)), max(1, int(height * scale))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)) for frame in frames])


def contact_sheet(path: Path, videos: Sequence[np.ndarray], titles: Sequence[str], columns: int = 1) -> None:
    """One PNG: each clip a strip of frames under its title, `columns` clips side by side, each as wide as the widest
    strip. Of more than `SHEET_CLIPS` the first ones, which alone need be given, and how many more titles there are."""
    strips = [_strip(video) for video in videos[:SHEET_CLIPS]]
    width = max(strip.width for strip in strips)
    cells = [_cell(strip, title, width) for strip, title in zip(strips, titles[:SHEET_CLIPS], strict=True)]
    if more := len(titles) - len(cells):
        cells.append(_cell(Image.new("RGB", (1, 1), _PAPER), f"and {counted(more, 'more clip')}", width))
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [max(cell.height for cell in row) for row in rows]
    sheet = Image.new("RGB", (columns * (width + _GAP) + _GAP, sum(heights) + _GAP * (len(rows) + 1)), _PAPER)
    top = _GAP
    for row, height in zip(rows, heights, strict=True):
        for column, cell in enumerate(row):
            sheet.paste(cell, (_GAP + column * (width + _GAP), top))
        top += height + _GAP
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _strip(video: np.ndarray) -> Image.Image:
    """Frames of a clip side by side."""
    _check(video)
    shown = sheet_frames(video)
    scale = max(1, -(-_MIN_HEIGHT // shown.shape[1]))
    frames = [np.repeat(np.repeat(frame, scale, axis=0), scale, axis=1) for frame in shown]
    height, width, _ = frames[0].shape
    strip = Image.new("RGB", (len(frames) * (width + _GAP) - _GAP, height), _PAPER)
    for index, frame in enumerate(frames):
        strip.paste(Image.fromarray(frame), (index * (width + _GAP), 0))
    return strip


def _cell(strip: Image.Image, title: str, width: int) -> Image.Image:
    font = font_of(title)
    lines = lines_of(title, width, font) or [""]
    cell = Image.new("RGB", (width, strip.height + LINE * len(lines) + _GAP), _PAPER)
    draw = ImageDraw.Draw(cell)
    for number, line in enumerate(lines):
        draw.text((2, LINE * number), line, fill=_INK, font=font)
    cell.paste(strip, (0, LINE * len(lines) + _GAP))
    return cell


def _check(video: np.ndarray) -> None:
    if video.dtype != np.uint8 or video.ndim != 4 or video.shape[3] != 3 or 0 in video.shape:
        raise ValueError(f"a clip must be uint8 [T, H, W, 3]; this one is {video.dtype} {list(video.shape)}.")
