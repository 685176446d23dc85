"""Check every sample of a source before training: the header faults of the index, then a full decode of each clip.

Decoding runs in a process of its own, so a clip that crashes or hangs libav is named like any other fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream

from data.captions import read_caption
from data.config import LimitsConfig
from data.dataset.index import Index
from data.decode import FRAMES_SHORT_ALLOWED, decode_clip
from data.dynamic_range import check_transfer
from data.engines.child import DecodeProcess, DecoderDied, DecoderHung, decode_isolated
from data.ledger import BadSample, Ledger, Reason
from data.media_info import CONTAINERS
from data.storage import ByteRange, ReadFile
from data.types import Bucket, Clip, DecodeJob

CLIPS_PER_JOB = 16
ENTIRE = Bucket(1, 1, 1)  # the pixels of a check are thrown away
TIME_SLACK_SECONDS = 1e-3


def lint(
    indexes: Sequence[Index],
    ledger: Ledger,
    *,
    admitted: Sequence[np.ndarray] | None = None,
    decode: bool = True,
    clip_timeout_s: float = 120.0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """File one draw of every usable row into the ledger: delivered, or skipped with a reason.

    The ledger already holds the rows of the indexes. `admitted` masks those that a run's filters and buckets take, and
    says that the ledger holds them as planned. `progress(done, total)` is called after each batch.
    """
    if admitted is None:
        admitted = [index.columns("ok")["ok"] for index in indexes]
        for index in indexes:
            ledger.add_planned(index.num_ok, index.ordinal)
    if not decode:
        return
    done, total = 0, sum(int(mask.sum()) for mask in admitted)
    with DecodeProcess() as process:
        for source, job in _jobs(indexes, admitted):
            ledger.schedule(len(job.clips), source)
            try:
                batch = process.decode(job, clip_timeout_s * len(job.clips))
            except (DecoderDied, DecoderHung):
                batch = decode_isolated(job, clip_timeout_s)
            for fault in batch.faults:
                ledger.skip(fault)
            ledger.deliver(sum(batch.ok), source)
            done += len(job.clips)
            if progress:
                progress(done, total)


def count_long_captions(
    indexes: Sequence[Index], admitted: Sequence[np.ndarray], tokens: Callable[[str], int], most: int
) -> tuple[int, int]:
    """(captions longer than `most` by `tokens`, captions) of the admitted rows; unreadable ones are not counted."""
    long = total = 0
    for index, mask in zip(indexes, admitted, strict=True):
        for row in np.flatnonzero(mask):
            for reference in index.row(int(row)).captions:
                try:
                    count = tokens(read_caption(reference, index.limits))
                except (BadSample, FileNotFoundError):  # a fault of its own
                    continue
                total += 1
                long += count > most
    return long, total


def verify_clip(clip: Clip, job: DecodeJob) -> np.ndarray:
    """Decode every frame of a clip and count them, or a picture as training does. Raises BadSample; the pixel returned
    means nothing."""
    if clip.image:
        return decode_clip(clip, job)
    try:
        with ReadFile(clip.media, job.limits.retries) as file:
            frames = _count_frames(ByteRange(file, clip.offset, clip.size), clip, job.limits)
    except FileNotFoundError as error:
        raise BadSample(Reason.FILE_MISSING, f"{clip.media} is gone since it was indexed") from error
    except av.error.FFmpegError as error:
        raise BadSample(Reason.DECODE_ERROR, str(error), clip.offset) from error
    if frames < clip.frames - max(1, FRAMES_SHORT_ALLOWED * clip.frames):
        raise BadSample(Reason.TRUNCATED_VIDEO, f"{frames} frames decoded of {clip.frames}", clip.offset)
    return np.zeros((1, 1, 1, 3), np.uint8)


def _count_frames(source: ByteRange, clip: Clip, limits: LimitsConfig) -> int:
    bound = {"max_pixels": str(limits.max_pixels)}
    with av.open(source, "r", options={**bound, "format_whitelist": CONTAINERS}, metadata_errors="ignore") as container:
        if not container.streams.video:
            raise BadSample(Reason.NO_VIDEO_TRACK, "no video", clip.offset)
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise BadSample(Reason.DECODE_ERROR, "a codec that PyAV does not know", clip.offset)
        stream.codec_context.thread_count, stream.codec_context.thread_type = 1, "NONE"
        stream.codec_context.options = bound
        if stream.codec_context.width * stream.codec_context.height > limits.max_pixels:
            raise BadSample(
                Reason.TOO_MANY_PIXELS, f"{stream.codec_context.width}x{stream.codec_context.height}", clip.offset
            )
        if not clip.start_s:
            count = 0
            for frame in container.decode(stream):
                if not count:
                    check_transfer(frame.color_trc, clip.offset)
                count += 1
                if count >= clip.frames:
                    break
            return count
        return _count_after(container, stream, clip)


def _count_after(container: InputContainer, stream: VideoStream, clip: Clip) -> int:
    """Frames of a range of a longer video, from the keyframe before it."""
    unit, count = stream.time_base or Fraction(1), 0
    origin = float((stream.start_time or 0) * unit)
    container.seek(int((clip.start_s + origin) / unit), stream=stream, backward=True)
    for frame in container.decode(stream):
        if not count:
            check_transfer(frame.color_trc, clip.offset)
        count += frame.time is not None and frame.time - origin >= clip.start_s - TIME_SLACK_SECONDS
        if count >= clip.frames:
            break
    return count


def _jobs(indexes: Sequence[Index], admitted: Sequence[np.ndarray]) -> Iterator[tuple[int, DecodeJob]]:
    """Decode work with the number of its source."""
    for index, mask in zip(indexes, admitted, strict=True):
        rows = np.flatnonzero(mask)
        for start in range(0, len(rows), CLIPS_PER_JOB):
            clips = tuple(index.row(int(row)).clip() for row in rows[start : start + CLIPS_PER_JOB])
            job = DecodeJob(
                item=f"{index.name}.{start}",
                bucket=ENTIRE,
                clips=clips,
                fps=0.0,
                crop=False,
                limits=index.limits,
                decoder="data.tools.lint:verify_clip",
            )
            yield index.ordinal, job
