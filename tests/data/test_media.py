"""What a header says of orientation and pixel aspect, the decoder does."""

from __future__ import annotations

import io
import os
import struct
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageFile

from app.sampling.pictures import read_picture
from data import media
from data.config import LimitsConfig
from data.decode import decode_clip
from data.errors import DataIOError
from data.ledger import BadSample, Reason
from data.media_info import MediaInfo, square_width
from data.storage import ReadFile
from data.tools.lint import verify_clip
from data.types import Bucket, Clip, DecodeJob
from ops.typed import ConfigError
from tests.data import making
from tests.data.making import turned

CORNERS = (
    (slice(0, 8), slice(0, 8)),
    (slice(0, 8), slice(-8, None)),  # top left, top right,
    (slice(-8, None), slice(0, 8)),
    (slice(-8, None), slice(-8, None)),
)  # bottom left, bottom right


def probe(path: Path) -> MediaInfo:
    with ReadFile(str(path)) as file:
        return media.probe(file, 0, file.size, media.suffix_of(path.name), LimitsConfig())


def decode(path: Path, info: MediaInfo, height: int, width: int, crop: bool = False) -> np.ndarray:
    """[H, W, 3] of the first frame."""
    return decode_clip(*asked(path, info, height, width, crop))[0]


def verify(path: Path, info: MediaInfo) -> None:
    """As `heddle data lint` decodes it."""
    verify_clip(*asked(path, info, info.height, info.width))


def asked(path: Path, info: MediaInfo, height: int, width: int, crop: bool = False) -> tuple[Clip, DecodeJob]:
    """A clip of one frame."""
    clip = Clip(
        key="a",
        media=str(path),
        offset=0,
        size=-1,
        suffix=media.suffix_of(path.name),
        image=info.image,
        frames=info.num_frames,
        fps=info.fps,
        start_frame=0,
        rotation=info.rotation,
        shard="shard",
    )
    job = DecodeJob(
        item="s0.0",
        bucket=Bucket(1, height, width),
        clips=(clip,),
        fps=0.0,
        crop=crop,
        limits=LimitsConfig(),
        decoder="data.decode:decode_clip",
    )
    return clip, job


def cornered(mode: str = "RGB") -> Image.Image:
    """96x64, black but for a white top left."""
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[:32, :48] = 255
    return Image.fromarray(pixels).convert(mode)


def brightest(pixels: np.ndarray) -> int:
    return int(np.argmax([pixels[corner].mean() for corner in CORNERS]))


def without_density(jpeg: bytes) -> bytes:
    """Without the JFIF header that Pillow writes: as a camera's, whose density Pillow seeks in the EXIF."""
    length = struct.unpack_from(">H", jpeg, 4)[0]
    assert jpeg[2:4] == b"\xff\xe0"
    return jpeg[:2] + jpeg[4 + length :]


@pytest.mark.parametrize(
    "exif",
    [
        *(b"Exif\0\0" + b"II*\0\x08\0\0\0"[:size] for size in range(9)),
        b"Exif\0\0no tiff header",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
    ],
)
@pytest.mark.parametrize("camera", [False, True])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_exif_that_cannot_be_read_turns_nothing(tmp_path: Path, exif: bytes, camera: bool) -> None:
    buffer = io.BytesIO()
    cornered().save(buffer, "jpeg", exif=exif, dpi=(72, 72))
    path = tmp_path / "a.jpg"
    path.write_bytes(without_density(buffer.getvalue()) if camera else buffer.getvalue())
    info = probe(path)
    assert info.shown_size == (96, 64) and info.rotation == 0
    assert brightest(decode(path, info, 64, 96)) == 0


class Failing(ImageFile.ImageFile):
    """Stands in for AVIF where Pillow is built without: its header is read, its pixels are not."""

    def _open(self) -> None:
        self._size, self._mode = (96, 64), "RGB"

    def load(self) -> None:
        raise RuntimeError("Failed to decode frame 0")


@pytest.fixture
def damaged_avif(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    """A picture whose pixels Pillow refuses by RuntimeError."""
    Image.init()
    if "AVIF" in Image.SAVE:
        buffer = io.BytesIO()
        cornered().save(buffer, "avif")
        pixels = buffer.getvalue().index(b"mdat") + 4
        yield buffer.getvalue()[:pixels] + bytes(len(buffer.getvalue()) - pixels)
        return
    monkeypatch.setitem(Image.OPEN, "DDS", (Failing, lambda head: head.startswith(b"FAILING")))
    yield b"FAILING" * 9


def test_pixels_that_pillow_refuses_by_a_runtime_error_are_a_bad_sample(tmp_path: Path, damaged_avif: bytes) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(damaged_avif)
    info = probe(path)
    assert info.shown_size == (96, 64), "its header is whole"
    with pytest.raises(BadSample, match="RuntimeError: Failed to decode frame 0") as caught:
        decode(path, info, 64, 96)
    assert caught.value.reason is Reason.DECODE_ERROR


def test_a_picture_starts_no_interpreter_of_postscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, called = tmp_path / "a.png", tmp_path / "called"
    gs = tmp_path / "bin" / "gs"
    gs.parent.mkdir()
    gs.write_text(f"#!/bin/sh\ntouch {called}\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", str(gs.parent), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 96 64\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(BadSample) as caught:
        probe(path)
    assert caught.value.reason is Reason.NOT_MEDIA
    header = MediaInfo(width=96, height=64, fps=0.0, num_frames=1, duration=0.0, image=True)
    with pytest.raises(BadSample) as caught:  # of a file that has changed since
        decode(path, header, 64, 96)
    assert caught.value.reason is Reason.DECODE_ERROR
    with pytest.raises(ConfigError, match="is no picture that Pillow reads"):
        read_picture(path, "--image", 64, 96)
    assert not called.exists()


@pytest.mark.parametrize("kind", ["jpeg", "mpo", "png", "webp", "bmp", "gif", "tiff", "ppm", "dib", "dds", "jpeg2000"])
def test_a_picture_is_what_its_bytes_are_whatever_its_suffix(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.png"
    cornered().save(path, kind)
    assert brightest(decode(path, probe(path), 64, 96)) == 0


def test_a_kind_of_picture_that_pillow_lacks_is_no_error() -> None:
    Image.init()
    assert set(media.PICTURE_FORMATS) <= Image.OPEN.keys()


def test_a_header_that_pillow_refuses_by_a_runtime_error_is_a_bad_sample(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    cornered().save(buffer, "dds")
    path = tmp_path / "a.jpg"
    path.write_bytes(buffer.getvalue()[:80] + bytes(4) + buffer.getvalue()[84:])
    with pytest.raises(BadSample, match="image header: Unknown pixel format flags 0") as caught:
        probe(path)
    assert caught.value.reason is Reason.DECODE_ERROR


@pytest.mark.parametrize("error", [DataIOError, FileNotFoundError], ids=["fails", "gone"])
def test_storage_that_fails_under_pillow_is_no_bad_sample(tmp_path: Path, error: type[Exception]) -> None:
    """A picture that was removed while its header was read counted as one that cannot be decoded."""

    class Unreachable(ReadFile):
        def pread(self, offset: int, count: int, *, alone: bool = False) -> bytes:
            raise error("the storage failed")

    path = tmp_path / "a.png"
    cornered().save(path)
    with Unreachable(str(path)) as file, pytest.raises(error, match="the storage failed"):
        media.probe(file, 0, file.size, "png", LimitsConfig())


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("orientation, corner", [(1, 0), (2, 1), (3, 3), (4, 2), (5, 0), (6, 1), (7, 3), (8, 2)])
def test_every_orientation_is_made_upright(tmp_path: Path, kind: str, orientation: int, corner: int) -> None:
    exif = Image.Exif()
    exif[media.EXIF_ORIENTATION] = orientation
    path = tmp_path / f"a.{kind}"
    cornered().save(path, kind, exif=exif)
    info = probe(path)
    width, height = info.shown_size
    assert (width, height) == ((64, 96) if orientation > 4 else (96, 64))
    assert brightest(decode(path, info, height, width)) == corner


def anamorphic(path: Path, aspect: Fraction | None, width: int = 48, height: int = 64) -> Path:
    """Stored as 48x64 with a white square, when shown with 2:1, in the middle of its left half."""
    codec = "mpeg4" if path.suffix == ".avi" else "libx264"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        planes = np.full((height * 3 // 2, width), 128, np.uint8)
        planes[:height] = 16
        planes[16:48, 4:20] = 235
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv420p")))
        container.mux(stream.encode())
    return path


def extent(pixels: np.ndarray) -> tuple[int, int]:
    """(height, width) of what is white."""
    rows, columns = np.nonzero(pixels.mean(axis=2) > 128)
    return int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1


@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.mkv", "a.avi", "fragmented.mp4"])
def test_frames_are_as_wide_as_they_are_shown(tmp_path: Path, name: str) -> None:
    path = anamorphic(tmp_path / name, Fraction(2))
    if name.startswith("fragmented"):
        whole = path.rename(tmp_path / "whole.mp4")
        with (
            av.open(str(whole)) as source,
            av.open(str(path), "w", options={"movflags": "frag_keyframe+empty_moov"}) as container,
        ):
            stream = container.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.dts is not None:
                    packet.stream = stream
                    container.mux(packet)
    info = probe(path)
    assert info.shown_size == (96, 64)
    for crop in (False, True):
        height, width = extent(decode(path, info, 64, 96, crop))
        assert abs(height - 32) <= 2 and abs(width - 32) <= 2
    height, width = extent(decode(path, info, 32, 48))
    assert abs(height - 16) <= 2 and abs(width - 16) <= 2


def test_pixels_are_made_square_before_the_frame_is_turned(tmp_path: Path) -> None:
    path = anamorphic(tmp_path / "a.mp4", Fraction(2))
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    info = probe(path)
    assert info.rotation == 90 and info.shown_size == (64, 96)
    height, width = extent(decode(path, info, 96, 64))
    assert abs(height - 32) <= 2 and abs(width - 32) <= 2


@pytest.mark.parametrize("degrees", [0, 90])
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_a_clip_that_pyav_probes_is_turned_as_it_says(tmp_path: Path, suffix: str, degrees: int) -> None:
    data = turned(making.clip(movflags="frag_keyframe+empty_moov" if suffix == "mp4" else ""), degrees)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(data if suffix == "mp4" else remuxed(data, "matroska"))
    info = probe(path)
    assert info.rotation == degrees and info.num_frames == 9
    assert info.shown_size == ((48, 64) if degrees else (64, 48))


def remuxed(data: bytes, container: str) -> bytes:
    target = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(target, "w", format=container) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    return target.getvalue()


@pytest.mark.parametrize(
    "pasp, track_size, shown",
    [
        ((2, 1), (48, 64), 96),
        ((2, 1), (96, 64), 96),
        ((1, 1), (96, 64), 48),
        ((1, 2), (48, 64), 24),
        ((0, 0), (96, 64), 96),
        ((0, 1), (96, 64), 96),
        ((0, 0), (0, 0), 48),
        ((0, 0), (48, 64), 48),
    ],
)
def test_the_pasp_box_goes_before_the_size_of_the_track_as_in_libav(
    tmp_path: Path, pasp: tuple[int, int], track_size: tuple[int, int], shown: int
) -> None:
    path = anamorphic(tmp_path / "a.mp4", Fraction(1))
    data = bytearray(path.read_bytes())
    at, size = data.index(b"pasp") + 4, data.index(b"tkhd") + 4 + 76
    data[at : at + 8] = struct.pack(">II", *pasp)
    data[size : size + 8] = struct.pack(">II", *(side << 16 for side in track_size))
    path.write_bytes(data)
    assert probe(path).shown_size == (shown, 64)
    with av.open(str(path)) as container:
        assert square_width(48, container.streams.video[0].sample_aspect_ratio) == shown


@pytest.mark.parametrize(
    "aspect, width",
    [
        (None, 1440),
        (0, 1440),
        (Fraction(4, 3), 1920),
        (Fraction(8, 9), 1280),
        (4, 5760),
        (Fraction(1, 4), 360),
        (5, 1440),
        (Fraction(1, 5), 1440),
        (1e9, 1440),
        (-1, 1440),
    ],
)
def test_absurd_pixel_aspects_are_ignored(aspect: float, width: int) -> None:
    assert square_width(1440, aspect) == width


SESSION = b"""v=0
o=- 0 0 IN IP4 127.0.0.1
s=a
c=IN IP4 127.0.0.1
t=0 0
m=video 45004 RTP/AVP 96
a=rtpmap:96 H264/90000
"""


@pytest.mark.parametrize("text", [SESSION, b"ffconcat version 1.0\nfile other.mkv\n"], ids=["sdp", "ffconcat"])
def test_the_bytes_of_a_clip_open_no_socket_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.mkv").write_bytes(making.clip(container="matroska"))
    path = tmp_path / "a.mkv"
    path.write_bytes(text)
    header = MediaInfo(width=64, height=48, fps=8.0, num_frames=9, duration=9 / 8)
    begin = time.monotonic()
    for read in (probe, lambda path: decode(path, header, 48, 64), lambda path: verify(path, header)):
        with pytest.raises(BadSample) as caught:
            read(path)
        assert caught.value.reason is Reason.DECODE_ERROR
    assert time.monotonic() - begin < 5, "a socket is listened on for 20 s"


@pytest.mark.parametrize(
    ("suffix", "container", "codec"),
    [
        ("mp4", "mp4", "mpeg4"),
        ("mov", "mov", "mpeg4"),
        ("m4v", "mp4", "mpeg4"),
        ("mkv", "matroska", "mpeg4"),
        ("webm", "webm", "libvpx"),
        ("avi", "avi", "mpeg4"),
        ("mpg", "mpeg", "mpeg2video"),
        ("mpeg", "mpeg2video", "mpeg2video"),
        ("ts", "mpegts", "mpeg2video"),
        ("flv", "flv", "flv"),
        ("wmv", "asf", "wmv2"),
        ("gif", "gif", "gif"),
        ("mkv", "nut", "mpeg4"),
        ("avi", "ogg", "libvpx"),
    ],
)
def test_a_clip_is_read_in_every_container(tmp_path: Path, suffix: str, container: str, codec: str) -> None:
    path = tmp_path / f"a.{suffix}"
    try:
        av.Codec(codec, "w")
    except av.codec.codec.UnknownCodecError:
        pytest.skip(f"this libav writes no {codec}")
    with av.open(str(path), "w", format=container) as out:
        stream = out.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "rgb8" if codec == "gif" else "yuv420p"
        for _ in range(8):
            frame = av.VideoFrame.from_image(cornered()).reformat(format=stream.pix_fmt)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    info = probe(path)
    assert info.shown_size == (96, 64) and brightest(decode(path, info, 64, 96)) == 0
    verify(path, info)
