import errno
import io
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from data.buckets import ClipShape, last_start
from data.config import LimitsConfig
from data.decode import SCALING, covering, decode_clip, decode_job
from data.engines.blocks import to_block
from data.errors import DataIOError
from data.ledger import BadSample, Reason
from data.media import probe
from data.media_info import CropBox
from data.storage import ReadFile
from data.types import Bucket, CaptionRef, Clip, DecodeJob
from tests.data import making

RATE = 12


X264 = {"crf": "1", "bf": "2", "preset": "veryfast"}
MPEG4 = {"b": "50000000", "qmin": "1"}
AVI_KINDS = {
    "h264": ("libx264", X264),
    "pyramid": ("libx264", {**X264, "bf": "3"}),
    "open": ("libx264", {**X264, "bf": "3", "x264-params": "open-gop=1:scenecut=0:b-adapt=0"}),
    "plain": ("libx264", {**X264, "bf": "0"}),
    "mpeg4": ("mpeg4", {"bf": "2", **MPEG4}),
    "mpeg4 without B-frames": ("mpeg4", {"bf": "0", **MPEG4}),
}


def write_video(
    path: Path,
    times: list[float],
    height: int = 64,
    width: int = 96,
    gop: int = 12,
    codec: str = "libx264",
    options: dict[str, str] = X264,
    ticks: int = 1000,
) -> Path:
    """Frame k is a flat grey of 2k + 20, shown from times[k] on."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=RATE, options={"g": str(gop), **options})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, ticks)
        for index, time in enumerate(times):
            planes = np.full((height * 3 // 2, width), 128, np.uint8)
            planes[:height] = 2 * index + 20
            frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
            frame.pts, frame.time_base = round(time * ticks), Fraction(1, ticks)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_repeating_avi(path: Path, repeated: set[int], b_frames: int) -> Path:
    """72 pictures of MPEG-4 as `write_video` makes them, of which the repeated ones say "the last one again"."""
    encoder = av.CodecContext.create("mpeg4", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = 96, 64, "yuv420p", Fraction(1, RATE)
    encoder.options = {"g": "12", "bf": str(b_frames), "sc_threshold": "1000000000", "b_strategy": "0", **MPEG4}
    coded = []
    for index in sorted(set(range(72)) - repeated):
        planes = np.full((96, 96), 128, np.uint8)
        planes[:64] = 2 * index + 20
        frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
        frame.pts, frame.time_base = index, Fraction(1, RATE)
        coded += encoder.encode(frame)
    contents, since = [], 0  # the last picture that is no B-frame
    for packet in [*coded, *encoder.encode()]:
        if bytes(packet).partition(VOP)[2][0] >> 6 != 2:  # before it, as these are no B-frames either
            while since + 1 in repeated:
                contents.append(VOP + not_coded(since, since := since + 1))
            since = packet.pts
        contents.append(bytes(packet))
    assert len(contents) == 72
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for number, content in enumerate(contents):
            packet = av.Packet(content)
            packet.stream, packet.time_base, packet.pts, packet.dts = stream, Fraction(1, RATE), number, number
            packet.is_keyframe = len(content) > 20 and content.partition(VOP)[2][0] >> 6 == 0
            container.mux(packet)
    return path


VOP = b"\0\0\1\xb6"


def not_coded(since: int, number: int) -> bytes:
    """A picture without content: P, the seconds since the last one, the part of a second, and no."""
    bits = "01" + "1" * (number // RATE - since // RATE) + "0" + f"1{number % RATE:04b}1" + "0"
    bits = f"{bits}0".ljust(-(-(len(bits) + 1) // 8) * 8, "1")
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def clip(path: Path, frames: int, **changes: object) -> Clip:
    usual = Clip(
        key=path.stem,
        media=str(path),
        offset=0,
        size=-1,
        suffix="mp4",
        image=False,
        frames=frames,
        fps=float(RATE),
        start_frame=0,
        shard="shard",
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def job(*clips: Clip, bucket: Bucket, fps: float = 0.0, crop: bool = False, **limits: int) -> DecodeJob:
    return DecodeJob(
        item="s0.0",
        bucket=bucket,
        clips=clips,
        fps=fps,
        crop=crop,
        limits=LimitsConfig(**limits),
        decoder="data.decode:decode_clip",
    )


def numbers(pixels: np.ndarray) -> list[int]:
    """Which frames these are: the grey of frame k is (2k + 20 - 16) * 255 / 219."""
    grey = pixels[:, 8:-8, 8:-8].astype(float).mean(axis=(1, 2, 3))
    return [round((value * 219 / 255 + 16 - 20) / 2) for value in grey]


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "steady.mp4", [k / RATE for k in range(72)])


@pytest.mark.parametrize("start", [0, 1, 11, 23, 30, 47, 63])
def test_frames_in_a_row_are_the_wanted_ones_with_and_without_a_seek(steady: Path, start: int) -> None:
    bucket = Bucket(9, 64, 96)
    pixels = decode_clip(clip(steady, 72, start_frame=start), job(bucket=bucket))
    assert pixels.shape == (9, 64, 96, 3) and pixels.dtype == np.uint8
    assert numbers(pixels) == list(range(start, start + 9))


@pytest.mark.parametrize("kind", AVI_KINDS)
@pytest.mark.parametrize("fps", [0.0, float(RATE), RATE / 2])
def test_frames_of_an_avi_which_has_no_time_stamps_are_the_wanted_ones(tmp_path: Path, kind: str, fps: float) -> None:
    codec, options = AVI_KINDS[kind]
    times = [k / RATE for k in range(72)]
    path = write_video(tmp_path / "a.avi", times, codec=codec, options=options, ticks=RATE)
    step = round(RATE / fps) if fps else 1
    for start in (0, 1, 23, 30, 47, 63):
        pixels = decode_clip(clip(path, 72, suffix="avi", start_frame=start), job(bucket=Bucket(5, 64, 96), fps=fps))
        assert numbers(pixels) == list(range(start, start + 5 * step, step)), start


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("fps", [0.0, float(RATE), RATE / 2])
def test_pictures_of_an_avi_that_repeat_the_last_one_take_time(tmp_path: Path, b_frames: int, fps: float) -> None:
    repeated = {4, 5, 15, 31, 32, 33, 46}  # with two B-frames each after one that is none
    path = write_repeating_avi(tmp_path / "a.avi", repeated, b_frames)
    own = sorted(set(range(72)) - repeated)
    for start in (0, 1, 5, 23, 30, 47, 62):
        wanted = clip(path, 72, suffix="avi", start_frame=start)
        pixels = decode_clip(wanted, job(bucket=Bucket(5, 64, 96), fps=fps))
        if fps:
            expected = [max(k for k in own if k <= start + n * round(RATE / fps)) for n in range(5)]
        else:
            expected = [k for k in own if k >= start][:5]
        assert numbers(pixels) == expected, start


def test_an_avi_that_begins_with_b_frames_of_a_picture_before_it_does_not_drift(tmp_path: Path) -> None:
    whole, cut = write_repeating_avi(tmp_path / "whole.avi", set(), 2), tmp_path / "cut.avi"
    with av.open(str(whole)) as source, av.open(str(cut), "w") as out:
        stream = out.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        packets = [packet for packet in source.demux(video=0) if packet.size]
        begin = next(number for number, packet in enumerate(packets) if number and packet.is_keyframe)
        for number, packet in enumerate(packets[begin:]):
            packet.stream, packet.pts, packet.dts = stream, number, number
            out.mux(packet)
    for start in (2, 3, 30, 50):
        pixels = decode_clip(clip(cut, 72 - begin, suffix="avi", start_frame=start), job(bucket=Bucket(5, 64, 96)))
        assert numbers(pixels) == list(range(begin + start, begin + start + 5)), start


def test_a_seek_gives_the_same_pixels_as_decoding_from_the_start(steady: Path) -> None:
    sought = decode_clip(clip(steady, 72, start_frame=50), job(bucket=Bucket(17, 64, 96)))
    assert np.array_equal(sought, decode_clip(clip(steady, 72), job(bucket=Bucket(67, 64, 96)))[50:])


@pytest.mark.parametrize(("fps", "expected"), [(6.0, [0, 2, 4, 6, 8]), (8.0, [0, 1, 3, 4, 6]), (24.0, [0, 0, 1, 1, 2])])
def test_resampling_shows_what_is_on_screen_at_each_time(steady: Path, fps: float, expected: list[int]) -> None:
    assert numbers(decode_clip(clip(steady, 72), job(bucket=Bucket(5, 64, 96), fps=fps))) == expected


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])  # times in mkv are whole milliseconds
@pytest.mark.parametrize(
    ("rate", "fps", "step"),
    [
        (Fraction(24000, 1001), 24.0, 1),
        (Fraction(30000, 1001), 30.0, 1),
        (Fraction(60000, 1001), 30.0, 2),
        (Fraction(24000, 1001), 12.0, 2),
        (Fraction(24), 24000 / 1001, 1),
    ],
)
def test_a_rate_near_the_own_one_repeats_and_skips_nothing(
    tmp_path: Path, suffix: str, rate: Fraction, fps: float, step: int
) -> None:
    path = write_video(tmp_path / f"a.{suffix}", [float(k / rate) for k in range(104)], ticks=rate.numerator)
    for start in (0, 1, 7):
        wanted = clip(path, 104, suffix=suffix, fps=float(rate), start_frame=start)
        bucket = Bucket(96 // step, 64, 96)
        expected = list(range(start, start + 96 // step * step, step))
        assert numbers(decode_clip(wanted, job(bucket=bucket, fps=fps))) == expected, start


def test_the_frame_nearest_to_each_time_is_shown_and_of_two_as_near_the_first(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mkv", [k / 30 for k in range(104)], ticks=30)
    for fps, expected in ((24.0, [0, 1, 2, 4, 5, 6]), (20.0, [0, 1, 3, 4, 6, 7]), (60.0, [0, 0, 1, 1, 2, 2])):
        wanted = clip(path, 104, suffix="mkv", fps=30.0)
        assert numbers(decode_clip(wanted, job(bucket=Bucket(6, 64, 96), fps=fps))) == expected, fps


def test_the_frame_at_the_end_of_a_part_is_not_shown_early(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", [0.0, 0.1, 0.2, 0.4, 0.58, 0.7], ticks=1000)
    for end_s, last in ((0.58, 3), (0.0, 4)):
        part = clip(path, 4, fps=6.0, end_s=end_s)  # at 0.5 s the frame at 0.58 s is the nearest one
        assert numbers(decode_clip(part, job(bucket=Bucket(2, 64, 96), fps=2.0))) == [0, last]


def test_variable_frame_rates_are_sampled_by_time_stamps(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.2, 1.0, 1.1, 1.2, 2.0, 2.1]
    path = write_video(tmp_path / "variable.mp4", times)
    found = numbers(decode_clip(clip(path, 8, fps=8 / 2.2), job(bucket=Bucket(9, 64, 96), fps=4.0)))
    assert found == [max(k for k, time in enumerate(times) if time <= n / 4 + 1e-4) for n in range(9)]


def test_a_last_frame_that_stays_long_is_held_for_its_own_duration(tmp_path: Path) -> None:
    """As in screen recordings, whose length by the average rate counts it."""
    whole = tmp_path / "last.mp4"
    with av.open(str(whole), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=RATE, options={"crf": "1", "bf": "0", "tune": "zerolatency"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        packets = []
        for index in range(60):
            planes = np.full((96, 96), 128, np.uint8)
            planes[:64] = 2 * index + 20
            packets += stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv420p"))
        packets += stream.encode()
        packets[-1].duration = 5 * RATE
        for packet in packets:
            container.mux(packet)
    with ReadFile(str(whole)) as file:
        info = probe(file, 0, file.size, "mp4", LimitsConfig())
    shape, bucket = ClipShape(frames=info.num_frames, height=64, width=96, fps=info.fps), Bucket(17, 64, 96)
    assert info.num_frames == 60 and info.duration > 9.9
    latest = clip(whole, 60, fps=info.fps, start_frame=last_start(shape, bucket, 4.0))
    found = numbers(decode_clip(latest, job(bucket=bucket, fps=4.0)))
    assert found[-1] == 59 and found == sorted(found)
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole.read_bytes()[: int(0.9 * whole.stat().st_size)])
    wanted = clip(cut, 60, fps=info.fps, start_frame=last_start(shape, bucket, 4.0))
    assert reason_of(wanted, job(bucket=bucket, fps=4.0)) in (Reason.TRUNCATED_VIDEO, Reason.DECODE_ERROR)


# dense, then sparse: by the average rate of 6.4 frames/s the last legal start lies where too few frames follow
SLOWING = [k / RATE for k in range(48)] + [4 + k / 2 for k in range(12)]


@pytest.mark.parametrize("name", ["slowing.mp4", "slowing.mkv"])
@pytest.mark.parametrize("start", [0, 20, 39, 40, 45, 51])
def test_a_start_too_late_in_a_variable_frame_rate_gives_the_last_frames(tmp_path: Path, name: str, start: int) -> None:
    path = write_video(tmp_path / name, SLOWING)
    slowing = clip(path, 60, fps=60 / 10, start_frame=start)
    first = sum(time < start / 6 - 0.5 / 6 for time in SLOWING)
    found = decode_clip(slowing, job(bucket=Bucket(9, 64, 96)))
    assert numbers(found) == list(range(min(first, 51), min(first, 51) + 9))
    batch = decode_job(job(slowing, bucket=Bucket(9, 64, 96)))
    assert batch.ok == [True] and np.array_equal(batch.video[0], found)


def test_a_part_of_a_variable_frame_rate_may_have_fewer_frames_than_counted(tmp_path: Path) -> None:
    path = write_video(tmp_path / "slowing.mp4", SLOWING)
    part = clip(path, 36, fps=6.0, start_s=4.0, end_s=10.0, start_frame=27)
    assert numbers(decode_clip(part, job(bucket=Bucket(9, 64, 96)))) == list(range(51, 60))
    assert reason_of(part, job(bucket=Bucket(17, 64, 96))) is Reason.TRUNCATED_VIDEO


@pytest.mark.parametrize("start_s", [0.0, 1.0])
def test_a_part_of_a_variable_frame_rate_does_not_run_into_what_follows(tmp_path: Path, start_s: float) -> None:
    path = write_video(tmp_path / "slowing.mp4", SLOWING)
    end = SLOWING[54]
    part = clip(
        path,
        round((end - start_s) * 6),
        fps=6.0,
        start_s=start_s,
        end_s=end,
        start_frame=round((end - start_s) * 6) - 9,
    )
    assert numbers(decode_clip(part, job(bucket=Bucket(9, 64, 96)))) == list(range(45, 54))


def test_memory_is_taken_again_only_when_nobody_has_the_batch(steady: Path) -> None:
    work = job(clip(steady, 72), bucket=Bucket(frames=5, height=64, width=96))
    first = decode_job(work)
    where, kept = first.video.ctypes.data, first.video[0, 2:4]
    second = decode_job(work)
    assert second.video.ctypes.data != where and second.video.ctypes.data != kept.ctypes.data
    where, block = second.video.ctypes.data, to_block(second)
    del second
    assert decode_job(work).video.ctypes.data != where
    del block, first
    where = decode_job(work).video.ctypes.data
    assert decode_job(work).video.ctypes.data == where


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_a_crop_is_the_same_part_of_the_whole_decode(tmp_path: Path, rotation: int) -> None:
    path = tmp_path / "bars.mp4"
    path.write_bytes(making.clip(width=64, height=48))
    width, height = (48, 64) if rotation in (90, 270) else (64, 48)
    whole = decode_clip(clip(path, 9, fps=8.0, rotation=rotation), job(bucket=Bucket(9, height, width)))
    box = CropBox(left=9, right=41, top=5, bottom=37)
    part = clip(path, 9, fps=8.0, rotation=rotation, crop=box)
    assert np.array_equal(decode_clip(part, job(bucket=Bucket(9, 32, 32))), whole[:, 5:37, 9:41])
    resampled = job(bucket=Bucket(4, 32, 32), fps=4.0)
    assert np.array_equal(decode_clip(part, resampled), whole[0:8:2, 5:37, 9:41])


def test_a_crop_of_pixels_that_are_not_square_is_cut_as_displayed(tmp_path: Path) -> None:
    path = tmp_path / "wide.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=RATE, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(2, 1)  # shown as 96x32
        pixels = np.zeros((32, 48, 3), np.uint8)
        pixels[:, 24:] = 200
        for _ in range(4):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
    halves = [clip(path, 4, crop=CropBox(left, left + 44, 0, 32)) for left in (0, 52)]
    dark, bright = (decode_clip(half, job(bucket=Bucket(1, 32, 44))) for half in halves)
    assert dark.max() < 10 and bright.min() > 190


def test_a_crop_is_cut_out_before_it_is_scaled(tmp_path: Path) -> None:
    """Scaled first, the white outside would bleed into the black inside."""
    path = tmp_path / "frame.png"
    pixels = np.full((64, 64, 3), 255, np.uint8)
    pixels[7:57, 9:55] = 0
    Image.fromarray(pixels).save(path)
    box = CropBox(left=9, right=55, top=7, bottom=57)
    still = clip(path, 1, image=True, suffix="png", fps=0.0, crop=box)
    assert not decode_clip(still, job(bucket=Bucket(1, 16, 16))).any()
    film = tmp_path / "frame.mp4"
    with av.open(str(film), "w") as out:
        stream = out.add_stream("libx264rgb", rate=RATE, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, "rgb24"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
    assert not decode_clip(clip(film, 1, crop=box), job(bucket=Bucket(1, 16, 16))).any()


def test_a_crop_outside_the_decoded_frame_is_a_bad_sample(steady: Path) -> None:
    wrong = clip(steady, 72, crop=CropBox(left=0, right=97, top=0, bottom=64))
    assert reason_of(wrong, job(bucket=Bucket(1, 64, 96))) is Reason.RANGE_OUTSIDE_VIDEO


def test_a_part_of_a_longer_video_begins_at_its_time(steady: Path) -> None:
    part = clip(steady, 24, start_s=3.0, start_frame=2)
    assert numbers(decode_clip(part, job(bucket=Bucket(5, 64, 96)))) == [38, 39, 40, 41, 42]


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_rotated_clips_are_turned_upright(tmp_path: Path, rotation: int) -> None:
    path = tmp_path / "corner.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        planes = np.full((96, 96), 128, np.uint8)
        planes[:64] = 30
        planes[:32, :48] = 220  # the stored top left is bright
        container.mux(stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv420p")))
        container.mux(stream.encode())
    shape = (64, 96) if rotation == 180 else (96, 64)
    pixels = decode_clip(clip(path, 1, rotation=rotation), job(bucket=Bucket(1, *shape)))[0].mean(axis=2)
    height, width = shape
    corners = {
        "top left": pixels[4, 4],
        "top right": pixels[4, width - 5],
        "bottom left": pixels[height - 5, 4],
        "bottom right": pixels[height - 5, width - 5],
    }
    assert max(corners, key=corners.__getitem__) == {90: "top right", 180: "bottom right", 270: "bottom left"}[rotation]


def test_clips_are_scaled_to_cover_the_bucket_and_cut_centrally(steady: Path) -> None:
    assert covering(64, 96, 64, 64, crop=False) == (64, 96)
    assert covering(720, 1280, 96, 144, crop=False) == (96, 171)
    assert covering(100, 50, 64, 64, crop=False) == (128, 64)
    assert covering(720, 1280, 96, 144, crop=True) == (720, 1280)
    assert covering(80, 1280, 96, 144, crop=True) == (96, 1536)
    assert decode_clip(clip(steady, 72), job(bucket=Bucket(1, 32, 32))).shape == (1, 32, 32, 3)
    assert decode_clip(clip(steady, 72), job(bucket=Bucket(1, 32, 32), crop=True)).shape == (1, 32, 32, 3)


def test_colours_are_those_of_packed_rgb(tmp_path: Path) -> None:
    """Decoded by planes; swscale's packed RGB rounds now and then to the neighbouring level."""
    file = tmp_path / "bars.mp4"
    file.write_bytes(making.clip(width=96, height=64, frames=9))
    pixels = decode_clip(clip(file, 9), job(bucket=Bucket(9, 32, 40)))
    with av.open(str(file)) as container:
        packed = [
            frame.reformat(width=48, height=32, format="rgb24", interpolation=SCALING).to_ndarray()[:, 4:44]
            for frame in container.decode(video=0)
        ]
    assert pixels[..., 0].std() > 20 and np.abs(pixels[..., 0].astype(int) - pixels[..., 2]).mean() > 10, "colourful"
    assert np.abs(pixels.astype(int) - np.stack(packed)).max() <= 1


def test_images_are_upright_rgb_of_the_bucket(tmp_path: Path) -> None:
    picture = Image.new("RGBA", (120, 80), (10, 200, 30, 255))
    picture.save(tmp_path / "plain.png")
    still = clip(tmp_path / "plain.png", 1, image=True, fps=0.0, suffix="png")
    pixels = decode_clip(still, job(bucket=Bucket(1, 64, 96)))
    assert pixels.shape == (1, 64, 96, 3) and (pixels == [10, 200, 30]).all()


def still(path: Path, image: Image.Image) -> np.ndarray:
    """The middle pixel of a picture as it is trained."""
    image.save(path, icc_profile=image.info.get("icc_profile"))
    return decode_clip(clip(path, 1, image=True, fps=0.0, suffix="png"), job(bucket=Bucket(1, 16, 16)))[0, 8, 8]


@pytest.mark.parametrize("value", [0, 255, 256, 30_000, 65_535])
def test_greys_of_sixteen_bits_are_scaled_not_cut_off(tmp_path: Path, value: int) -> None:
    picture = Image.fromarray(np.full((32, 32), value, np.uint16))
    assert still(tmp_path / "a.png", picture).tolist() == [value >> 8] * 3


@pytest.mark.parametrize(
    ("mode", "pixel", "shown"),
    [
        ("RGBA", (200, 0, 0, 255), (200, 0, 0)),
        ("RGBA", (200, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (0, 0, 0, 128), (127, 127, 127)),
        ("LA", (10, 0), (255, 255, 255)),
    ],
)
def test_transparent_pictures_are_put_on_white(
    tmp_path: Path, mode: str, pixel: tuple[int, ...], shown: tuple[int, ...]
) -> None:
    assert still(tmp_path / "a.png", Image.new(mode, (32, 32), pixel)).tolist() == pytest.approx(shown, abs=1)


def test_a_palette_with_a_transparent_colour_is_put_on_white(tmp_path: Path) -> None:
    picture = Image.new("P", (32, 32), 0)
    picture.putpalette([9, 9, 9, 200, 0, 0])
    picture.info["transparency"] = 0
    assert still(tmp_path / "a.png", picture).tolist() == [255, 255, 255]


def in_profile(image: Image.Image, profile: bytes, mode: str = "RGB") -> Image.Image:
    """A picture of sRGB as a file in the colours of `profile`, which it names."""
    own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    made = ImageCms.profileToProfile(image, ImageCms.createProfile("sRGB"), own, outputMode=mode)
    assert made is not None
    made.info["icc_profile"] = profile
    return made


@pytest.mark.parametrize("colour", [(200, 30, 40), (30, 200, 40), (220, 170, 140), (250, 250, 250)])
def test_a_picture_has_the_colours_that_its_profile_says(tmp_path: Path, colour: tuple[int, ...]) -> None:
    wide = in_profile(Image.new("RGB", (32, 32), colour), making.display_p3())
    assert colour[0] == colour[1] or np.abs(np.subtract(wide.getpixel((8, 8)), colour)).max() > 5
    assert still(tmp_path / "a.png", wide).tolist() == pytest.approx(colour, abs=2)


def test_a_profile_is_followed_whatever_the_kind_of_picture(tmp_path: Path) -> None:
    profile, colour = making.display_p3(), (200, 30, 40)
    wide = in_profile(Image.new("RGB", (32, 32), colour), profile)
    for alpha, shown in ((255, colour), (0, (255, 255, 255))):
        layers = wide.convert("RGBA")
        layers.putalpha(alpha)
        assert still(tmp_path / "a.png", layers).tolist() == pytest.approx(shown, abs=2)
    assert still(tmp_path / "a.png", wide.quantize(4)).tolist() == pytest.approx(colour, abs=2)
    wide.save(tmp_path / "a.jpg", quality=100, subsampling=0, icc_profile=profile)
    photo = clip(tmp_path / "a.jpg", 1, image=True, fps=0.0, suffix="jpg")
    pixels = decode_clip(photo, job(bucket=Bucket(1, 16, 16)))
    assert pixels[0, 8, 8].tolist() == pytest.approx(colour, abs=4)


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(b"none", id="broken"),
        pytest.param(making.display_p3()[:300], id="cut off"),
        pytest.param(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), id="sRGB"),
    ],
)
def test_a_profile_that_is_broken_or_of_srgb_changes_nothing(tmp_path: Path, profile: bytes) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    for mode in ("RGB", "L"):  # of a grey picture, a profile of RGB says nothing
        plain, named = noise.convert(mode), noise.convert(mode)
        named.info["icc_profile"] = profile
        assert np.array_equal(still(tmp_path / "a.png", named), still(tmp_path / "b.png", plain))
    grey = Image.new("L", (32, 32), 100)
    grey.info["icc_profile"] = making.display_p3()
    assert still(tmp_path / "a.png", grey).tolist() == [100, 100, 100]


def test_a_bad_clip_keeps_its_slot_and_is_named(steady: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    data = bytearray(steady.read_bytes())
    data[200 : len(data) // 2] = bytes(len(data) // 2 - 200)
    broken.write_bytes(data)
    caption = (CaptionRef(text="grey"),)
    good, bad = clip(steady, 72, captions=caption), clip(broken, 72, captions=caption)
    decode_job(job(good, good, good, bucket=Bucket(9, 64, 96)))  # leaves its pixels in the memory that is taken again
    batch = decode_job(job(good, bad, good, bucket=Bucket(9, 64, 96)))
    assert batch.ok == [True, False, True]
    assert batch.keys == ["steady", "broken", "steady"]
    assert batch.captions == ["grey"] * 3
    assert not batch.video[1].any() and np.array_equal(batch.video[0], batch.video[2])
    (fault,) = batch.faults
    assert fault.key == "broken" and fault.reason in (Reason.DECODE_ERROR, Reason.TRUNCATED_VIDEO)


def reason_of(wanted: Clip, work: DecodeJob) -> Reason:
    with pytest.raises(BadSample) as caught:
        decode_clip(wanted, work)
    return caught.value.reason


def test_frames_of_hdr_are_a_fault_where_no_header_has_said_so(steady: Path, tmp_path: Path) -> None:
    (tmp_path / "hdr.mp4").write_bytes(making.hdr(told=False))
    bad = clip(tmp_path / "hdr.mp4", 9, fps=8.0)
    for fps in (0.0, 4.0):
        batch = decode_job(job(clip(steady, 72), bad, bucket=Bucket(3, 48, 64), fps=fps))
        (fault,) = batch.faults
        assert batch.ok == [True, False] and (fault.key, fault.reason) == ("hdr", Reason.HDR)
        assert "HLG; tone-map it: ffmpeg" in fault.detail


def test_a_video_shorter_than_its_header_is_truncated(steady: Path) -> None:
    late = clip(steady, 200, start_frame=66)
    assert reason_of(late, job(bucket=Bucket(9, 64, 96))) is Reason.TRUNCATED_VIDEO
    assert reason_of(late, job(bucket=Bucket(9, 64, 96), fps=6.0)) is Reason.TRUNCATED_VIDEO


def test_what_is_no_video_is_a_decode_error(tmp_path: Path) -> None:
    path = tmp_path / "page.mp4"
    path.write_bytes(b"<html>not found</html>" * 100)
    assert reason_of(clip(path, 9), job(bucket=Bucket(9, 64, 96))) is Reason.DECODE_ERROR
    assert reason_of(clip(path, 1, image=True, fps=0.0), job(bucket=Bucket(1, 64, 96))) is Reason.DECODE_ERROR


def test_too_many_pixels_are_refused_before_they_are_decoded(steady: Path, tmp_path: Path) -> None:
    work = job(bucket=Bucket(1, 64, 96), max_pixels=64 * 96 - 1)
    assert reason_of(clip(steady, 72), work) in (Reason.TOO_MANY_PIXELS, Reason.DECODE_ERROR)
    buffer = io.BytesIO()
    Image.new("1", (9000, 9000)).save(buffer, format="PNG")
    (tmp_path / "bomb.png").write_bytes(buffer.getvalue())
    bomb = clip(tmp_path / "bomb.png", 1, image=True, fps=0.0)
    assert reason_of(bomb, job(bucket=Bucket(1, 64, 96))) is Reason.TOO_MANY_PIXELS


def test_a_vanished_file_is_one_sample_and_a_vanished_shard_stops_the_run(tmp_path: Path) -> None:
    gone = tmp_path / "gone.mp4"
    assert reason_of(clip(gone, 9), job(bucket=Bucket(9, 64, 96))) is Reason.FILE_MISSING
    with pytest.raises(DataIOError, match="gone since it was indexed"):
        decode_clip(clip(gone, 9, shard=str(gone)), job(bucket=Bucket(9, 64, 96)))


@pytest.mark.parametrize(("shard", "raised"), [("shard", BadSample), ("", DataIOError)], ids=["file", "shard"])
def test_what_is_removed_while_it_is_read_is_gone(
    steady: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str, raised: type[Exception]
) -> None:
    """On another machine: the server of the files knows the open one no more."""
    copy = tmp_path / "copy.mp4"
    copy.write_bytes(steady.read_bytes())

    def stale(*given: object) -> bytes:
        copy.unlink(missing_ok=True)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "pread", stale)
    monkeypatch.setattr("data.storage.time.sleep", lambda seconds: None)
    with pytest.raises(raised, match=r"copy\.mp4 is gone since it was indexed"):
        decode_clip(clip(copy, 72, shard=shard or str(copy)), job(bucket=Bucket(9, 64, 96)))


@pytest.mark.parametrize("refused", ["c.mp4", "c.png", "c.txt", "s.tar"])
def test_a_file_that_may_not_be_read_is_named_and_is_no_fault_of_its_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    suffix, image = ("png", True) if refused == "c.png" else ("mp4", False)
    media = tmp_path / (refused if refused == "s.tar" else f"c.{suffix}")
    media.write_bytes(making.picture() if image else making.clip())
    (tmp_path / "c.txt").write_text("a circle")
    one = clip(
        media,
        1 if image else 9,
        suffix=suffix,
        image=image,
        captions=(CaptionRef(path=str(tmp_path / "c.txt"), size=8),),
    )
    one = replace(one, shard=str(media) if refused == "s.tar" else "folder")
    opened = os.open

    def denied(path: str, *how: int) -> int:
        if path.endswith(refused):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, *how)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(DataIOError, match=rf"{refused} may not be read by user \d+ \(Permission denied\). Give"):
        decode_job(job(one, bucket=Bucket(1, 64, 96)))


@pytest.mark.parametrize("other", [-1, 1], ids=["shorter", "longer"])
def test_a_file_of_another_size_is_not_the_one_that_was_indexed(steady: Path, other: int) -> None:
    """Offsets point anywhere in a shard that was written again, and a caption of it may belong to another clip."""
    size = steady.stat().st_size + other
    work = job(clip(steady, 72, file_size=size, shard=str(steady)), bucket=Bucket(9, 64, 96))
    for asked in (work, replace(work, pixels=False)):
        with pytest.raises(DataIOError, match=f"but had {size} when it was indexed. Restore it and resume"):
            decode_job(asked)
    assert reason_of(clip(steady, 72, file_size=size), work) is Reason.FILE_MISSING


def test_captions_are_chosen_and_dropped_as_the_plan_says(steady: Path) -> None:
    both = (CaptionRef(text="long"), CaptionRef(text="short"))
    picks = [
        clip(steady, 72, captions=both, caption_pick=0.1),
        clip(steady, 72, captions=both, caption_pick=0.9),
        clip(steady, 72, captions=both, caption_drop=True),
    ]
    assert decode_job(job(*picks, bucket=Bucket(1, 64, 96))).captions == ["long", "short", ""]
