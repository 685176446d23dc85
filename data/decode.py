"""Bytes to uint8 [T, H, W, 3]: only the wanted frames, scaled once to the bucket. Pure: same bytes, same pixels.

PyAV always runs with one thread: 18.1 dead-locks with frame threads when decoding stops before the end, as it does
here (7 of 8 runs of 200 clips hung). Parallelism comes from decode processes.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream

from data.captions import read_caption
from data.dynamic_range import check_transfer
from data.errors import DataIOError
from data.ledger import BadSample, Fault, Reason
from data.media_info import CONTAINERS, CropBox, square_width
from data.storage import ByteRange, ReadFile, is_local, kept_open, read_range
from data.types import Batch, Clip, DecodeJob

if TYPE_CHECKING:
    from PIL import Image

DECODE_VERSION = 2  # raised when the same bytes give other pixels: older cached latents are then not used
AVI_VERSION = 4  # of AVI
TURNED_VERSION = 3  # of clips whose container says that they are turned, but for MP4 and MOV (`data.cache`)
PICTURE_VERSION = 6  # of pictures
RESAMPLED_VERSION = 5  # of any clip at the rate of `data.fps`
READERS = 8  # remote captions that are read at a time
SEEK_AFTER_SECONDS = 2.0  # a start this far in is reached by a seek to the keyframe before it
WHOLE_BELOW_BYTES = 64 << 20  # larger media are read in ranges
TIME_SLACK = 1e-3  # seconds; containers round time stamps, Matroska to milliseconds
END_SLACK = 1e-6  # seconds; a part ends before the frame of its end
# of a frame's time: the next one is taken this much before it is due. Below a half, so that a time right between two
# frames (24 per second as 16) has the first of them whatever was rounded
SOON = 0.45
FRAMES_SHORT_ALLOWED = 0.02  # of those a header promises: edit lists make its count differ a little
# Without FULL_CHR_H_INT swscale's table makes RGB one to two levels too dark; with it, area averaging is as fast as the
# table's bicubic (1080p to 480p 5.2 ms). BITEXACT: the same pixels on every CPU.
SCALING = Interpolation.AREA | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND | Interpolation.BITEXACT

MediaStream = io.BytesIO | ByteRange
Decoder = Callable[[Clip, DecodeJob], np.ndarray]


class DecodedFrame(NamedTuple):
    """A decoded frame, and its width when its pixels are made square."""

    frame: av.VideoFrame
    width: int


Frames = Iterator[tuple[float, DecodedFrame]]  # seconds from the start of the video, frame


def decode_job(job: DecodeJob) -> Batch:
    """The batch of an item. A bad clip keeps its slot: black, `ok` False, its fault listed. Raises DataIOError only."""
    with kept_open():
        return _decode(job)


def _decode(job: DecodeJob) -> Batch:
    decoder = load_decoder(job.decoder)
    video = _memory.array(job.shape)
    batch = Batch(item=job.item, video=video, captions=[], ok=[], keys=[clip.key for clip in job.clips])
    faults = []
    for slot, clip in enumerate(job.clips):
        caption, fault = "", None
        if clip.media == clip.shard:  # before anything of it is read: not one of its offsets holds once it changed
            _open_media(clip, job).close()
        try:
            caption = caption_of(clip, job)
            if job.pixels and decoder is decode_clip:
                decode_clip(clip, job, into=video[slot])
            elif job.pixels:
                video[slot] = decoder(clip, job)
        except BadSample as error:
            # the caption stays: a cache of embeddings is filled by caption, whatever became of the pixels
            fault = fault_of(clip, error.reason, error.offset, error.detail)
            video[slot] = 0
            faults.append(fault)
        batch.captions.append(caption)
        batch.ok.append(fault is None)
    batch.faults = tuple(faults)
    return batch


def fault_of(clip: Clip, reason: Reason, offset: int | None, detail: str) -> Fault:
    """The fault of a draw, with the source and the shard that the clip is of."""
    return Fault(reason, clip.shard, clip.key, offset, detail, clip.source)


class _Memory(threading.local):
    """Memory of the last batch of a thread, used again as soon as that batch is gone. Fresh memory costs page faults:
    8 % of the decoding of a clip."""

    pages = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...]) -> np.ndarray:
        """uint8 of this shape, with any content."""
        size = math.prod(shape)
        if size > len(self.pages) or sys.getrefcount(self.pages) > _UNSHARED:
            self.pages = np.empty(size, np.uint8)
        return self.pages[:size].reshape(shape)


_UNSHARED = 2  # references: the attribute and the argument of getrefcount. Every view of an array holds another
_memory = _Memory()


def load_decoder(name: str) -> Decoder:
    """The function `module:function`. Raises ValueError when there is none."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"data.engine.decoder {name!r} is not an importable module:function ({error}).") from error


def caption_of(clip: Clip, job: DecodeJob) -> str:
    """The caption that chance chose for this draw; empty when it is dropped."""
    if clip.caption_drop or not clip.captions:
        return ""
    ref = clip.captions[int(clip.caption_pick * len(clip.captions))]
    try:
        return read_caption(ref, job.limits)
    except FileNotFoundError as error:
        raise _gone(ref.path, clip) from error


def captions_of(job: DecodeJob) -> list[str | None]:
    """The captions of an item's draws, in order; None of one that cannot be read. Remote ones are read several at a
    time: each takes some 40 ms, for which a feeder's one thread would wait."""
    if all(is_local(ref.path) for clip in job.clips for ref in clip.captions):
        return _captions_in_a_row(job, job.clips)
    num_each = math.ceil(len(job.clips) / READERS)
    runs = [job.clips[at : at + num_each] for at in range(0, len(job.clips), num_each)]
    with ThreadPoolExecutor(len(runs)) as pool:
        return list(itertools.chain.from_iterable(pool.map(partial(_captions_in_a_row, job), runs)))


def _captions_in_a_row(job: DecodeJob, clips: Sequence[Clip]) -> list[str | None]:
    found: list[str | None] = []
    with kept_open():
        for clip in clips:
            try:
                found.append(caption_of(clip, job))
            except BadSample:
                found.append(None)
    return found


def caption_or_empty(clip: Clip, job: DecodeJob) -> str:
    """The caption of a draw; one that cannot be read is empty."""
    try:
        return caption_of(clip, job)
    except BadSample:
        return ""


def decode_clip(clip: Clip, job: DecodeJob, into: np.ndarray | None = None) -> np.ndarray:
    """uint8 [T, H, W, 3] of the bucket's shape, in the array `into` if given. Raises BadSample for what is wrong with
    the bytes, DataIOError for storage that failed."""
    pixels = np.empty(job.shape[1:], np.uint8) if into is None else into
    if clip.image:
        pixels[0] = _decode_image(clip, job)
        return pixels
    with _open_media(clip, job) as file:
        source: MediaStream = ByteRange(file, clip.offset, clip.size)
        size = file.size if clip.size < 0 else clip.size
        try:
            if size < WHOLE_BELOW_BYTES:
                source = io.BytesIO(file.pread(clip.offset, size, alone=True))
            return decode_video(source, clip, job, pixels)
        except av.error.FFmpegError as error:
            raise BadSample(Reason.DECODE_ERROR, _short(error), clip.offset) from error
        except FileNotFoundError as error:  # removed on another machine while it was read here
            raise _gone(clip.media, clip) from error


def _open_media(clip: Clip, job: DecodeJob) -> ReadFile:
    """The clip's file. Its size is compared with the index and its time is not: nodes may have copies of their own."""
    try:
        file = ReadFile(clip.media, job.limits.retries)
    except FileNotFoundError as error:
        raise _gone(clip.media, clip) from error
    if clip.file_size and file.size != clip.file_size:
        file.close()
        raise _lost(clip.media, clip, f"has {file.size} bytes, but had {clip.file_size} when it was indexed")
    return file


def _gone(path: str, clip: Clip) -> Exception:
    return _lost(path, clip, "is gone since it was indexed")


def _lost(path: str, clip: Clip, how: str) -> Exception:
    """A lost video of a table is one lost sample; a lost shard is many, and stops the run."""
    if path == clip.shard:
        return DataIOError(f"{path} {how}. Restore it and resume, or index again for a new run.")
    return BadSample(Reason.FILE_MISSING, f"{path} {how}", clip.offset)


# video


def decode_video(source: MediaStream, clip: Clip, job: DecodeJob, into: np.ndarray) -> np.ndarray:
    """Fills `into`, uint8 [T, H, W, 3], from a seekable stream of one video, a frame at a time: copies and page faults
    of whole clips cost a tenth of their decoding. Raises BadSample and av.error.FFmpegError."""
    begin = clip.start_s + (clip.start_frame / clip.fps if clip.fps else 0.0)
    wanted = _in_a_row if job.fps <= 0 else _at_times
    scaler, cropper, given = VideoReformatter(), VideoReformatter(), 0
    for shown in wanted(source, clip, job, begin):
        if not given:  # what the header does not say, the first frame may
            check_transfer(shown.frame.color_trc, clip.offset)
        if clip.crop is None:
            _fit(shown, job, clip.rotation, scaler, into[given % len(into)])
        else:
            _fit(_cropped(shown, clip.crop, job, clip.rotation, cropper), job, 0, scaler, into[given % len(into)])
        given += 1
    if given % len(into):
        into[:] = np.roll(into, -given, axis=0)
    return into


def frames_from(source: MediaStream, clip: Clip, job: DecodeJob, begin: float) -> Frames:
    """Frames from a keyframe at or before `begin` on. Raises BadSample and av.error.FFmpegError."""
    with _container(source, job) as container:
        stream = _video_stream(container, clip, job)
        origin = float((stream.start_time or 0) * _unit(stream))
        sought = begin > SEEK_AFTER_SECONDS and not _has_unknown_order(container, stream)
        if sought:
            container.seek(int((begin + origin) / _unit(stream)), stream=stream, backward=True)
        for number, (seconds, frame) in enumerate(_decoded(container, stream, origin, clip)):
            if sought and number == 0 and seconds > begin + TIME_SLACK:
                break  # the file's seek table points past the wanted frame
            yield seconds, frame
        else:
            return
    with _container(source, job) as container:
        stream = _video_stream(container, clip, job)
        yield from _decoded(container, stream, float((stream.start_time or 0) * _unit(stream)), clip)


def _unit(stream: VideoStream) -> Fraction:
    """Seconds of one count of its time stamps."""
    return stream.time_base or Fraction(1)


def _has_unknown_order(container: InputContainer, stream: VideoStream) -> bool:
    """Whether only counting from the first frame tells which one is shown when: how many B-frames a decoder drops after
    a seek is not known, and AVI has no time stamps to tell."""
    return container.format.name == "avi" and stream.codec_context.has_b_frames


def _container(source: MediaStream, job: DecodeJob) -> InputContainer:
    source.seek(0)
    options = {"max_pixels": str(job.limits.max_pixels), "format_whitelist": CONTAINERS}
    return av.open(source, "r", options=options, metadata_errors="ignore")


def _video_stream(container: InputContainer, clip: Clip, job: DecodeJob) -> VideoStream:
    if not container.streams.video:
        raise BadSample(Reason.NO_VIDEO_TRACK, f"{len(container.streams)} streams, none of video", clip.offset)
    stream = container.streams.video[0]
    context = stream.codec_context
    if context is None:
        raise BadSample(Reason.DECODE_ERROR, "a codec that PyAV does not know", clip.offset)
    context.thread_count, context.thread_type = 1, "NONE"
    # the container may lie about the size that the codec then allocates, so both are given the limit
    context.options = {"max_pixels": str(job.limits.max_pixels)}
    _check_pixels(context.width, context.height, clip, job)
    return stream


def _decoded(container: InputContainer, stream: VideoStream, origin: float, clip: Clip) -> Frames:
    rate = float(stream.average_rate or clip.fps or 25)
    seconds, pixel_aspect = -1 / rate, stream.sample_aspect_ratio
    for at, frame in _timed(container, stream):
        seconds = at - origin if at is not None else seconds + 1 / rate
        yield seconds, DecodedFrame(frame, square_width(frame.width, pixel_aspect))


def _timed(container: InputContainer, stream: VideoStream) -> Iterator[tuple[float | None, av.VideoFrame]]:
    """Frames as displayed, with the time that the file has for them. AVI has one for each packet alone, of which libav
    makes late ones and, with B-frames, some out of order: the first frame shown has that of the first packet, the next
    one that of the second. Where a packet repeats a picture, its time is nobody's."""
    if container.format.name != "avi":
        yield from ((frame.time, frame) for frame in container.decode(stream))
        return
    times: deque[int | None] = deque()
    for packet in container.demux(stream):
        if packet.size:  # else nothing is drawn: the frame before it stays
            times.append(packet.dts)
        frames = packet.decode()
        for frame in frames:
            dts = times.popleft() if times else None
            yield None if dts is None else float(dts * _unit(stream)), frame
        if not frames and len(times) > stream.codec_context.has_b_frames:
            _forget_repeat(times, packet)


def _forget_repeat(times: deque[int | None], packet: av.Packet) -> None:
    """Takes out the time of a picture of MPEG-4 Part 2 for which libav makes no frame: "the last one again"."""
    if packet.stream.codec_context.name != "mpeg4" or packet.size <= 1:
        return  # one byte alone: its encoder had no frame ready yet, which comes later
    _, _, picture = bytes(packet).partition(b"\0\0\1\xb6")
    if picture and picture[0] >> 6 == _B:
        times.popleft()  # it would be shown at once, with the oldest time
    else:
        times.pop()  # shown after the frame that a decoder of B-frames holds back


_B = 2  # of I, P, B and S


def _in_a_row(source: MediaStream, clip: Clip, job: DecodeJob, begin: float) -> Iterator[DecodedFrame]:
    """Consecutive frames of the file, of which the last ones given count.

    The time of the first frame follows from its number and the average rate. If the rate varies, too few frames may
    follow it. The clip is then decoded from its beginning for its last frames, unless it has fewer than its header
    says.
    """
    left = least = job.bucket.frames
    for shown in _frames_since(source, clip, job, begin):
        yield shown
        left -= 1
        if not left:
            return
    if not clip.end_s:  # else its frames were counted by the average rate, too
        least = max(least, clip.frames - max(1, int(FRAMES_SHORT_ALLOWED * clip.frames)))
    count = 0
    if clip.start_frame:
        for shown in _frames_since(source, clip, job, clip.start_s):
            count += 1
            if count > least - job.bucket.frames:
                yield shown
    if count < least:
        raise BadSample(
            Reason.TRUNCATED_VIDEO,
            f"ends {left} frames early: {job.bucket.frames} wanted from {begin:.2f} s",
            clip.offset,
        )


def _frames_since(source: MediaStream, clip: Clip, job: DecodeJob, begin: float) -> Iterator[DecodedFrame]:
    half, end = 0.5 / clip.fps if clip.fps else 0.0, clip.end_s or math.inf
    frames = itertools.takewhile(lambda frame: frame[0] < end - END_SLACK, frames_from(source, clip, job, begin))
    return (shown for seconds, shown in frames if seconds >= begin - half)


def _at_times(source: MediaStream, clip: Clip, job: DecodeJob, begin: float) -> Iterator[DecodedFrame]:
    """The frame nearest to every wanted time, by time stamps: right for variable frame rates too. It is the one on
    screen then, or the next one where that is due soon: 24 times a second, frames of a clip with 23.976 come later by
    a millisecond every second, and one would soon be shown twice."""
    times = [begin + k / job.fps for k in range(job.bucket.frames)]
    shown, next_time, since, end = None, 0, 0.0, clip.end_s or math.inf
    for seconds, frame in frames_from(source, clip, job, begin):
        early = SOON * min(1 / job.fps, seconds - since) if seconds < end - END_SLACK else 0.0
        slack = max(TIME_SLACK, early)
        while next_time < len(times) and shown is not None and times[next_time] + slack < seconds:
            yield shown
            next_time += 1
        if next_time == len(times):
            return
        shown, since = frame, seconds
    for time in times[next_time:]:
        if shown is None or time > since + _hold(shown.frame, clip):
            raise BadSample(Reason.TRUNCATED_VIDEO, f"ends at {since:.2f} s, {time:.2f} s wanted", clip.offset)
        yield shown


def _hold(last: av.VideoFrame, clip: Clip) -> float:
    """Seconds for which the last frame of a clip stays: its own duration, which the clip's length counts. The last one
    of a file that was cut off is any frame."""
    own = float(last.duration * last.time_base) if last.duration and last.time_base else 0.0
    return max(own, 1.5 / clip.fps if clip.fps else 0.0)


def _fit(shown: DecodedFrame, job: DecodeJob, rotation: int, scaler: VideoReformatter, into: np.ndarray) -> None:
    """Fills `into` with RGB of the bucket's size: scaled to cover it in one step, cut centrally, turned upright.

    swscale gives planes in a third of the time of packed RGB, for which it has no vector code.
    """
    bucket, frame = job.bucket, shown.frame
    turned = rotation in (90, 270)
    height, width = (bucket.width, bucket.height) if turned else (bucket.height, bucket.width)
    scaled_height, scaled_width = covering(frame.height, shown.width, height, width, job.crop)
    for channel, plane in enumerate(_rgb_planes(frame, scaled_height, scaled_width, job, scaler)):
        into[..., channel] = np.rot90(_cut(plane, height, width), -rotation // 90)


def _cropped(
    shown: DecodedFrame, crop: CropBox, job: DecodeJob, rotation: int, scaler: VideoReformatter
) -> DecodedFrame:
    """The used part of a frame, upright. It is cut out before it is scaled, so that nothing bleeds in from outside."""
    planes = _rgb_planes(shown.frame, shown.frame.height, shown.width, job, scaler)
    upright = [np.rot90(plane, -rotation // 90) for plane in planes]
    height, width = upright[0].shape
    _check_crop(crop, width, height)
    part = np.stack([plane[crop.top : crop.bottom, crop.left : crop.right] for plane in upright], axis=-1)
    return DecodedFrame(av.VideoFrame.from_ndarray(part, format="gbrp"), crop.size[0])


def _check_crop(crop: CropBox, width: int, height: int) -> None:
    if not crop.fits(width, height):
        raise BadSample(Reason.RANGE_OUTSIDE_VIDEO, f"{crop} is not inside the frame of {width}x{height}")


def _rgb_planes(
    frame: av.VideoFrame, height: int, width: int, job: DecodeJob, scaler: VideoReformatter
) -> list[np.ndarray]:
    """Red, green and blue of a frame scaled to this size: uint8 [height, width] each, valid until the next call."""
    if frame.width * frame.height > job.limits.max_pixels:
        raise BadSample(Reason.TOO_MANY_PIXELS, f"a frame of {frame.width}x{frame.height}")
    scaled = scaler.reformat(frame, width=width, height=height, format="gbrp", interpolation=SCALING, threads=1)
    green, blue, red = scaled.planes
    rows = [
        np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)
        for plane in (red, green, blue)
    ]
    return [plane[:, :width] for plane in rows]


def covering(height: int, width: int, to_height: int, to_width: int, crop: bool) -> tuple[int, int]:
    """Smallest (height, width) of the same aspect that covers the target; the frame itself when it is to be cropped."""
    if crop and height >= to_height and width >= to_width:
        return height, width
    scale = max(to_height / height, to_width / width)
    return max(round(height * scale), to_height), max(round(width * scale), to_width)


def _cut(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def _check_pixels(width: int, height: int, clip: Clip, job: DecodeJob) -> None:
    if width * height > job.limits.max_pixels:
        raise BadSample(Reason.TOO_MANY_PIXELS, f"{width}x{height} > max_pixels {job.limits.max_pixels}", clip.offset)


# images


def _decode_image(clip: Clip, job: DecodeJob) -> np.ndarray:
    """uint8 [H, W, 3] of a JPEG, PNG, WebP, ..."""
    from PIL import Image

    from data.media import EXIF_TRANSPOSES, PILLOW_ERRORS, open_picture, orientation
    from data.pictures import as_shown

    try:
        data = read_range(clip.media, clip.offset, clip.size, job.limits.retries)
    except FileNotFoundError as error:
        raise _gone(clip.media, clip) from error
    bucket = job.bucket
    try:
        with warnings.catch_warnings(), open_picture(io.BytesIO(data)) as image:
            warnings.simplefilter("ignore")  # our own limit decides, not Pillow's warning
            _check_pixels(*image.size, clip, job)
            image.load()  # a PNG may say after its pixels how it is turned
            turn = EXIF_TRANSPOSES.get(orientation(image))
            scaled = as_shown(image if turn is None else image.transpose(turn), partial(_scaled, clip=clip, job=job))
    except (*PILLOW_ERRORS, Image.DecompressionBombError) as error:
        raise BadSample(Reason.DECODE_ERROR, _short(error), clip.offset) from error
    return _cut(np.asarray(scaled), bucket.height, bucket.width)


def _scaled(upright: Image.Image, clip: Clip, job: DecodeJob) -> Image.Image:
    """The used part of a picture, scaled to cover the bucket."""
    from PIL.Image import Resampling

    if clip.crop is not None:
        _check_crop(clip.crop, *upright.size)
        upright = upright.crop((clip.crop.left, clip.crop.top, clip.crop.right, clip.crop.bottom))
    height, width = covering(upright.height, upright.width, job.bucket.height, job.bucket.width, job.crop)
    return upright.resize((width, height), Resampling.BICUBIC)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
