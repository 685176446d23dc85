"""Headers read by boxes agree with PyAV, and hostile ones end in a reason."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from data import media, mp4
from data.config import LimitsConfig
from data.ledger import BadSample, Reason
from data.media_info import MAX_PIXEL_ASPECT
from data.storage import ReadFile
from tests.data.making import clip, hdr, picture

LIMITS = LimitsConfig()


def probe(data: bytes):
    return mp4.probe(lambda at, count: data[at : at + count], len(data), LIMITS)


def probe_file(tmp_path, data: bytes, suffix: str):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"front" + data + b"back")
    with ReadFile(str(path)) as file:
        return media.probe(file, 5, len(data), suffix, LIMITS)


def decoded(data: bytes) -> list[av.VideoFrame]:
    with av.open(io.BytesIO(data)) as container:
        container.streams.video[0].codec_context.thread_type = "NONE"
        return list(container.decode(video=0))


@pytest.mark.parametrize("shape", [(64, 48, 9, 8), (48, 64, 1, 24), (96, 64, 33, 30), (130, 66, 17, 25)])
@pytest.mark.parametrize("moov", ["behind", "in front"])
def test_header_agrees_with_a_full_decode(tmp_path, shape, moov):
    _, _, frames, fps = shape
    data = clip(*shape) if moov == "behind" else faststart(tmp_path, shape)
    info = probe(data)
    shown = decoded(data)
    assert (info.width, info.height, info.num_frames) == (shown[0].width, shown[0].height, len(shown))
    assert info.fps == pytest.approx(fps, rel=0.02) and info.duration == pytest.approx(frames / fps, rel=0.02)
    assert info.num_keyframes == sum(frame.key_frame for frame in shown)


def faststart(tmp_path, shape) -> bytes:
    """The moov in front: ffmpeg can move it only in a file."""
    path = str(tmp_path / "fast.mp4")
    with av.open(io.BytesIO(clip(*shape))) as source, av.open(path, "w", options={"movflags": "faststart"}) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    data = (tmp_path / "fast.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    return data


def test_little_is_read():
    data, read = clip(96, 64, 33, 30), []
    mp4.probe(lambda at, count: read.append(count) or data[at : at + count], len(data), LIMITS)
    assert sum(read) <= 4096 and len(read) <= 4


def test_box_of_64_bit_size():
    data = clip()
    at = data.index(b"mdat") - 4
    size = struct.unpack(">I", data[at : at + 4])[0]
    wide = data[:at] + struct.pack(">I4sQ", 1, b"mdat", size + 8) + data[at + 8 :]
    assert probe(wide).num_frames == probe(data).num_frames == 9


def test_a_box_of_an_unknown_kind_may_come_before_moov():
    data = clip()
    at = data.index(b"moov") - 4
    for size, kind, found in ((16, b"ainf", True), (16, b"\0\xff\1\2", False), (1 << 30, b"ainf", False)):
        own = data[:at] + struct.pack(">I4s", size, kind) + bytes(8) + data[at:]
        if found:
            assert probe(own).num_frames == probe(data).num_frames == 9
        else:
            with pytest.raises(BadSample, match="no moov box"):
                probe(own)
    assert probe(data + struct.pack(">I4s", 1 << 30, b"ainf")).num_frames == 9, "what follows moov does no harm"


def matrix_of(data: bytes, values: tuple[int, int, int, int]) -> bytes:
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (value * 65536 for value in values)
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]


@pytest.mark.parametrize(
    "matrix, degrees", [((1, 0, 0, 1), 0), ((0, 1, -1, 0), 90), ((-1, 0, 0, -1), 180), ((0, -1, 1, 0), 270)]
)
def test_rotation_is_clockwise_as_the_decoder_says(matrix, degrees):
    data = matrix_of(clip(), matrix)
    info = probe(data)
    assert info.rotation == degrees
    assert decoded(data)[0].rotation % 360 == -degrees % 360  # PyAV counts against the clock
    assert info.shown_size == ((48, 64) if degrees in (90, 270) else (64, 48))


@pytest.mark.parametrize("hidden", [0, 1, 3, 6])
def test_frames_hidden_by_an_edit_list_are_not_counted(hidden):
    data = clip(64, 48, 13, 8)
    at = data.index(b"elst") + 8 + 4
    length, begin = struct.unpack(">Ii", data[at - 4 + 4 : at + 8])
    scale_at = data.index(b"mdhd") + 4 + 12
    tick = struct.unpack(">I", data[scale_at : scale_at + 4])[0] // 8
    cut = data[:at] + struct.pack(">Ii", length - hidden * 125, begin + hidden * tick) + data[at + 8 :]
    assert probe(cut).num_frames == len(decoded(cut)) == 13 - hidden


@pytest.mark.parametrize(
    "container, codec", [("matroska", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4"), ("mov", "libx264")]
)
def test_other_containers(tmp_path, container, codec):
    data = clip(64, 48, 9, 8, container=container, codec=codec)
    info = probe_file(tmp_path, data, {"matroska": "mkv"}.get(container, container))
    assert (info.width, info.height, info.num_frames, info.image) == (64, 48, 9, False)
    assert info.fps == pytest.approx(8, rel=0.02)


def test_codec_that_nobody_knows(tmp_path):
    data = clip(container="matroska").replace(b"V_MPEG4/ISO/AVC", b"V_XXXXX/ISO/AVC")
    with pytest.raises(BadSample) as caught:
        probe_file(tmp_path, data, "mkv")
    assert caught.value.reason is Reason.DECODE_ERROR


@pytest.mark.parametrize("suffix", ["mkv", "webm", "avi", "jpg", "webp", "bmp"])
def test_any_damage_of_other_media_ends_in_a_reason(tmp_path, suffix):
    whole = {
        "mkv": lambda: clip(container="matroska"),
        "webm": lambda: clip(container="webm", codec="libvpx"),
        "avi": lambda: clip(container="avi", codec="mpeg4"),
        "jpg": lambda: picture(kind="jpeg"),
        "webp": lambda: picture(kind="webp"),
        "bmp": lambda: picture(kind="bmp"),
    }[suffix]()
    random, refused = np.random.default_rng(5), 0
    for _ in range(60):
        data = bytearray(whole)
        for at in random.integers(0, min(len(data), 500), random.integers(1, 20)):
            data[at] ^= int(random.integers(1, 256))
        try:
            info = probe_file(tmp_path, bytes(data), suffix)
        except BadSample:
            refused += 1
            continue
        assert 0 < info.width * info.height <= MAX_PIXEL_ASPECT * LIMITS.max_pixels and info.num_frames > 0
    assert refused > 0, "the damage must be seen"


def test_fragmented_mp4_is_counted_by_its_packets(tmp_path):
    data = clip(64, 48, 9, 8, movflags="frag_keyframe+empty_moov")
    with pytest.raises(mp4.FragmentedFile):
        probe(data)
    info = probe_file(tmp_path, data, "mp4")
    assert (info.width, info.height, info.num_frames) == (64, 48, 9)


@pytest.mark.parametrize(
    "made",
    [
        {},
        {"transfer": 16},
        {"container": "mov"},
        {"container": "matroska"},
        {"movflags": "frag_keyframe+empty_moov"},
    ],
    ids=str,
)
def test_a_header_of_hdr_is_a_reason_of_its_own(tmp_path, made):
    suffix = "mkv" if made.get("container") == "matroska" else "mp4"
    with pytest.raises(BadSample, match="tone-map it: ffmpeg -i IN") as caught:
        probe_file(tmp_path, hdr(**made), suffix)
    assert caught.value.reason is Reason.HDR
    assert probe_file(tmp_path, hdr(**{**made, "transfer": 1}), suffix).num_frames == 9


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_still_images(tmp_path, kind):
    info = probe_file(tmp_path, picture(48, 32, kind), kind)
    assert (info.width, info.height, info.num_frames, info.fps, info.image) == (48, 32, 1, 0.0, True)


def test_image_turned_by_its_exif_orientation(tmp_path):
    image, exif, buffer = Image.new("RGB", (40, 20)), Image.Exif(), io.BytesIO()
    exif[274] = 6
    image.save(buffer, "jpeg", exif=exif)
    info = probe_file(tmp_path, buffer.getvalue(), "jpg")
    assert info.rotation == 90 and info.shown_size == (20, 40)


@pytest.mark.parametrize(
    "data, reason",
    [(b"not an image at all", Reason.NOT_MEDIA), (b"", Reason.EMPTY_MEMBER), (picture(8, 8)[:20], Reason.NOT_MEDIA)],
)
def test_broken_images(tmp_path, data, reason):
    with pytest.raises(BadSample) as caught:
        probe_file(tmp_path, data, "png")
    assert caught.value.reason in (reason, Reason.DECODE_ERROR)


@pytest.mark.parametrize("side", [5_000, 13_500])  # beyond our limit, and beyond Pillow's own
def test_image_bomb_is_refused_before_decode(tmp_path, side, monkeypatch):
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "png")
    assert len(buffer.getvalue()) < 200_000
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(BadSample) as caught:
        probe_file(tmp_path, buffer.getvalue(), "png")
    assert caught.value.reason is Reason.TOO_MANY_PIXELS


def test_audio_only(tmp_path):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    with pytest.raises(BadSample) as caught:
        probe(buffer.getvalue())
    assert caught.value.reason is Reason.NO_VIDEO_TRACK


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=12), st.integers(0, 3000))
def test_any_damage_of_the_header_ends_in_a_reason(damage, cut):
    data = bytearray(clip())
    moov = data.index(b"moov") - 4
    for at, value in damage:
        data[moov + at % (len(data) - moov)] = value
    data = bytes(data[: len(data) - cut]) if cut < 40 else bytes(data)
    try:
        info = probe(data)
    except (BadSample, mp4.FragmentedFile):
        return
    assert 0 < info.width * info.height <= MAX_PIXEL_ASPECT * LIMITS.max_pixels
    assert 0 < info.num_frames <= LIMITS.max_frames and info.fps > 0 and np.isfinite(info.duration)
