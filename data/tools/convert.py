"""Write any source as WebDataset shards: media, caption as `.txt`, and a `.json` with what the index knows.

Media bytes are copied as they are. A clip that is a range of a longer video, or cropped, is encoded again (H.264); a
cropped picture becomes a PNG.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import av.error
import numpy as np
import webdataset
from av.video.codeccontext import VideoCodecContext
from PIL import Image

from data.captions import read_caption
from data.dataset.index import Index, IndexRow
from data.decode import DecodedFrame, decode_clip, frames_from
from data.dynamic_range import check_transfer
from data.errors import DataIOError
from data.ledger import BadSample, Fault, Ledger, Reason
from data.storage import ByteRange, ReadFile, read_range, retried
from data.types import Bucket, DecodeJob
from ops.listing import names_in

TIME_SLACK_SECONDS = 1e-3
PARTIAL = ".partial"


def convert(
    index: Index,
    folder: Path,
    ledger: Ledger,
    *,
    shard_bytes: int = 500 << 20,
    shard_count: int = 10_000,
    crf: int = 18,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write the usable rows as folder/00000.tar ...; each is a draw in the ledger, delivered or skipped.

    Raises ValueError as check_out, DataIOError when shards cannot be written.
    """
    check_out(folder)
    rows = np.flatnonzero(index.columns("ok")["ok"])
    ledger.add_planned(len(rows), index.ordinal)
    names: set[str] = set()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _shards(folder, shard_bytes, shard_count) as writer:
            for done, number in enumerate(rows, 1):
                row = index.row(int(number))
                ledger.schedule(1, index.ordinal)
                try:
                    writer.write({"__key__": _name(row, names), **_members(row, index, crf)})
                except BadSample as fault:
                    ledger.skip(Fault(fault.reason, row.shard, row.key, row.offset, fault.detail, index.ordinal))
                else:
                    ledger.deliver(1, index.ordinal)
                if progress:
                    progress(done, len(rows))
    except OSError as error:
        raise DataIOError(f"{folder}: {error}. Free space or name another folder.") from error
    return sorted(folder.glob("*.tar"))


def check_out(folder: Path) -> None:
    """Raises ValueError where shards cannot be written to this folder, which need not exist, or are there; DataIOError
    when storage fails."""
    try:
        names = retried(f"list {folder}", lambda: names_in(folder))
    except PermissionError as error:
        raise ValueError(f"{folder} cannot be listed: {error.strerror}. Name another folder.") from error
    if any(name.endswith(".tar") for name in names):
        raise ValueError(f"{folder} already holds shards. Name an empty folder.")
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ValueError(f"{folder} cannot be made: {above} is a file. Name another folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written: {above} is read-only. Name another folder.")


@contextlib.contextmanager
def _shards(folder: Path, shard_bytes: int, shard_count: int) -> Iterator[webdataset.ShardWriter]:
    """A writer whose shards get their names when they are whole; after an error or Ctrl-C the last one is gone."""
    whole = True

    def finish(name: str) -> None:
        if whole:
            os.replace(name, name.removesuffix(PARTIAL))
        else:
            os.unlink(name)

    pattern = f"{str(folder).replace('%', '%%')}/%05d.tar{PARTIAL}"
    writer = webdataset.ShardWriter(pattern, maxsize=shard_bytes, maxcount=shard_count, verbose=0, post=finish)
    try:
        yield writer
    except BaseException:
        whole = False
        raise
    finally:
        writer.close()


def _members(row: IndexRow, index: Index, crf: int) -> dict[str, bytes]:
    captions = [read_caption(ref, index.limits) for ref in row.captions]
    about: dict[str, object] = {
        "key": row.key,
        "caption": captions[0],
        "width": row.width,
        "height": row.height,
        "fps": row.fps,
        "num_frames": row.num_frames,
        "duration": row.duration,
        **row.scores,
    }
    if len(captions) > 1:
        about["captions"] = captions
    try:
        if row.crop and row.image:
            suffix, data = "png", crop_picture(row, index)
        elif row.crop or row.end_s:
            suffix, data = "mp4", cut_clip(row, index, crf)
        else:
            suffix, data = row.suffix, read_range(row.path, row.offset, row.size, index.limits.retries)
    except FileNotFoundError as error:
        raise BadSample(Reason.FILE_MISSING, f"{row.path} is gone since it was indexed") from error
    return {suffix: data, "txt": captions[0].encode(), "json": json.dumps(about).encode()}


def cut_clip(row: IndexRow, index: Index, crf: int) -> bytes:
    """The frames of [start_s, end_s), or of the whole video, as an MP4 of their own, cropped. Raises BadSample."""
    target = io.BytesIO()
    try:
        with ReadFile(row.path, index.limits.retries) as file, av.open(target, "w", format="mp4") as out:
            rate = Fraction(row.fps).limit_denominator(1001)
            stream = None
            for number, shown in enumerate(_frames(ByteRange(file, row.offset, row.size), row, index)):
                frame = shown.frame
                if stream is None:
                    stream = out.add_stream("libx264", rate=rate, options={"crf": str(crf), "threads": "1"})
                    stream.width, stream.height = frame.width // 2 * 2, frame.height // 2 * 2
                    stream.pix_fmt = "yuv420p"
                    _describe(stream.codec_context, shown)
                frame = frame.reformat(width=stream.width, height=stream.height, format="yuv420p")
                frame.pts, frame.time_base = number, 1 / rate
                out.mux(stream.encode(frame))
            if stream is None:
                raise BadSample(Reason.DECODE_ERROR, f"no frame in {row.start_s} .. {row.end_s} s", row.offset)
            out.mux(stream.encode())
    except av.error.FFmpegError as error:
        raise BadSample(Reason.DECODE_ERROR, str(error), row.offset) from error
    return target.getvalue()


def _describe(encoder: VideoCodecContext, shown: DecodedFrame) -> None:
    """Have a copy say what its numbers mean and how wide its pixels are: encoding leaves both as they are."""
    frame = shown.frame
    encoder.sample_aspect_ratio = Fraction(shown.width, frame.width)
    encoder.color_range = frame.color_range
    if not frame.format.is_rgb:  # else the matrix is that of a file that says nothing
        encoder.colorspace = frame.colorspace
        encoder.color_primaries, encoder.color_trc = frame.color_primaries, frame.color_trc


def _frames(source: ByteRange, row: IndexRow, index: Index) -> Iterator[DecodedFrame]:
    for number, (seconds, shown) in enumerate(frames_from(source, row.clip(), _job(row, index), row.start_s)):
        if not number:  # what the header did not say; a copy that is turned or cropped would not say it any more
            check_transfer(shown.frame.color_trc, row.offset)
        if row.end_s and seconds >= row.end_s - TIME_SLACK_SECONDS:
            return
        if seconds >= row.start_s - TIME_SLACK_SECONDS:
            yield _upright(shown, row)


def _upright(shown: DecodedFrame, row: IndexRow) -> DecodedFrame:
    """The used part of a frame, as displayed: an encoded copy carries no rotation and no crop of its own."""
    if not row.rotation and not row.crop:
        return shown
    frame, width = shown
    pixels = np.rot90(frame.to_ndarray(format="rgb24", width=width, height=frame.height), -row.rotation // 90)
    if row.crop:  # a box counts square pixels
        pixels = pixels[row.crop.top : row.crop.bottom, row.crop.left : row.crop.right]
    upright = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels, np.uint8), format="rgb24")
    return DecodedFrame(upright, upright.width)


def crop_picture(row: IndexRow, index: Index) -> bytes:
    """The used part of a picture as a PNG. Raises BadSample."""
    target = io.BytesIO()
    Image.fromarray(decode_clip(row.clip(), _job(row, index))[0]).save(target, "png")
    return target.getvalue()


def _job(row: IndexRow, index: Index) -> DecodeJob:
    """One frame as large as it is."""
    return DecodeJob(
        item=row.key,
        bucket=Bucket(1, row.height, row.width),
        clips=(row.clip(),),
        fps=0.0,
        crop=False,
        limits=index.limits,
        decoder="",
    )


def _name(row: IndexRow, names: set[str]) -> str:
    """A member name without dots, unique in the converted set."""
    name = base = re.sub(r"[^\w-]+", "_", row.key).strip("_") or "sample"
    count = 1
    while name in names:
        count += 1
        name = f"{base}_{count}"
    names.add(name)
    return name
