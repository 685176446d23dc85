"""The 24 kinds of bad input: each sample ends in exactly one counted state, and the good ones stay."""

from __future__ import annotations

import functools
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import av
import pytest
from PIL import Image

from data.config import LimitsConfig
from data.errors import DataError
from data.ledger import Ledger, Reason
from data.tools.lint import lint
from tests.data.making import clip, good, hdr, index_of, notes, rejected, sample, shard, shard_faults

COUNT = 8


def indexed(tmp_path: Path, data: bytes, **options):
    path = tmp_path / "00000.tar"
    path.write_bytes(data)
    return index_of(path, tmp_path / "cache", **options)


def with_sample(i: int, **parts: bytes | None) -> bytes:
    """Eight good samples, of which i is changed."""
    return shard([member for k in range(COUNT) for member in (sample(k, **parts) if k == i else sample(k))])


def header_offset(data: bytes, name: str) -> int:
    return data.index(name.encode())


def usable_keys(index) -> list[str]:
    columns = index.columns("ok", "key")
    return list(columns["key"][columns["ok"]])


KEYS = [f"{i:06d}" for i in range(COUNT)]


def test_tar_cut_inside_a_member_keeps_what_is_whole(tmp_path):
    data = shard(good())
    index, ledger = indexed(tmp_path, data[: header_offset(data, "000004.mp4") + 512 + 100])
    assert usable_keys(index) == KEYS[:4]
    assert rejected(ledger) == {"truncated_member": 1}
    assert shard_faults(ledger) == {"truncated_tar": 1}


def test_tar_cut_on_a_member_boundary_is_noticed(tmp_path):
    data = shard(good())
    index, ledger = indexed(tmp_path, data[: header_offset(data, "000004.txt")])
    assert usable_keys(index) == KEYS[:4]
    assert rejected(ledger) == {"no_caption": 1}
    assert shard_faults(ledger) == {"truncated_tar": 1}


def test_garbage_header_names_the_bytes_that_cannot_be_reached(tmp_path):
    data = bytearray(shard(good()))
    at = header_offset(bytes(data), "000004.mp4")
    data[at : at + 512] = b"\x5a" * 512
    index, ledger = indexed(tmp_path, bytes(data))
    assert usable_keys(index) == KEYS[:4]
    assert shard_faults(ledger) == {"garbage_header": 1}
    assert f"garbage_header at {at}: {len(data) - at} bytes unreachable" in ledger.last.where


def test_zero_byte_tar_is_unreadable(tmp_path):
    index, ledger = indexed(tmp_path, b"")
    assert len(index) == 0 and shard_faults(ledger) == {"unreadable_tar": 1}


def test_zero_byte_tar_as_the_only_shard_is_an_error_that_says_why(tmp_path):
    with pytest.raises(DataError, match=r"none of its 0 samples in 1 shard can be used \(1 unreadable_tar"):
        indexed(tmp_path, b"", allow_empty=False)


def decode_faults(index) -> dict[str, int]:
    ledger = Ledger(LimitsConfig(max_bad_fraction=1.0))
    index.file_into(ledger)
    lint([index], ledger)
    ledger.check()
    assert ledger.pending == 0
    return {str(reason): count for reason, count in ledger.skipped.items()}


def test_pictures_are_checked_as_training_reads_them(tmp_path):
    moving = io.BytesIO()
    frames = [Image.new("RGB", (64, 48), color) for color in ("red", "green", "blue")]
    frames[0].save(moving, "webp", save_all=True, append_images=frames[1:])
    members = [("moving.webp", moving.getvalue()), ("moving.txt", b"its first picture is trained")]
    index, _ = indexed(tmp_path, shard([*members, *good(1)]))
    assert index.num_ok == 2 and decode_faults(index) == {}


def test_flipped_pixels_are_found_by_the_decoder(tmp_path):
    data = bytearray(clip(frames=33))
    start = data.index(b"mdat") + 4
    for at in range(start, data.index(b"moov") - 8):
        data[at] ^= 0xA5
    index, _ = indexed(tmp_path, with_sample(4, mp4=bytes(data)))
    assert usable_keys(index) == KEYS  # the header is whole
    assert decode_faults(index) == {"decode_error": 1}


def test_flipped_header_is_a_decode_error(tmp_path):
    data = bytearray(clip())
    at = data.index(b"stsz")
    data[at + 12 : at + 16] = struct.pack(">I", 7)
    index, ledger = indexed(tmp_path, with_sample(4, mp4=bytes(data)))
    assert usable_keys(index) == KEYS[:4] + KEYS[5:]
    assert rejected(ledger) == {"decode_error": 1}


@pytest.mark.parametrize("cut", ["moov gone", "inside mdat", "inside moov"])
def test_cut_video_is_truncated(tmp_path, cut):
    data = clip()
    moov = data.index(b"moov") - 4
    end = {"moov gone": moov, "inside mdat": moov - 100, "inside moov": len(data) - 20}[cut]
    index, ledger = indexed(tmp_path, with_sample(4, mp4=data[:end]))
    assert usable_keys(index) == KEYS[:4] + KEYS[5:]
    assert rejected(ledger) == {"truncated_video": 1}


def test_cut_faststart_video_is_truncated(tmp_path):
    data = bytearray(clip())
    ftyp, moov = data[: data.index(b"ftyp") - 4 + 32], data[data.index(b"moov") - 4 :]
    rest = data[len(ftyp) : len(data) - len(moov)]
    moved = bytes(ftyp + moov + rest)  # offsets are now wrong, but the cut is found first
    _, ledger = indexed(tmp_path, with_sample(4, mp4=moved[:-50]))
    assert rejected(ledger) == {"truncated_video": 1}


def test_video_for_hdr_screens_is_left_out_whether_its_header_or_its_frames_say_so(tmp_path):
    index, ledger = indexed(tmp_path, with_sample(4, mp4=hdr()))
    assert usable_keys(index) == KEYS[:4] + KEYS[5:] and rejected(ledger) == {"hdr": 1}
    index, ledger = indexed(tmp_path, with_sample(4, mp4=hdr(told=False)))
    assert usable_keys(index) == KEYS and decode_faults(index) == {"hdr": 1}


def test_web_page_instead_of_a_video(tmp_path):
    _, ledger = indexed(tmp_path, with_sample(4, mp4=b"<!DOCTYPE html><html><body>403 Forbidden</body></html>"))
    assert rejected(ledger) == {"not_mp4": 1}


def test_zero_length_video(tmp_path):
    _, ledger = indexed(tmp_path, with_sample(4, mp4=b""))
    assert rejected(ledger) == {"empty_member": 1}


def test_no_caption(tmp_path):
    _, ledger = indexed(tmp_path, with_sample(4, txt=None, json=None))
    assert rejected(ledger) == {"no_caption": 1}


def test_caption_falls_back_to_the_json_field(tmp_path):
    index, ledger = indexed(tmp_path, with_sample(4, txt=b"  \n"))
    assert not ledger.rejected and index.caption(4) == "json caption 4"


def test_failed_download_is_counted_and_is_no_fault(tmp_path):
    failed = b'{"status": "failed_to_download", "error_message": "404", "caption": "x"}'
    index, ledger = indexed(tmp_path, with_sample(4, mp4=None, json=failed))
    assert rejected(ledger) == {"no_media": 1}
    assert next(iter(index.faults())).detail == "failed_to_download: 404"
    assert index.coverage == 7 / 8
    ledger.check_limits()  # absent media never stops a run


def test_caption_that_is_not_utf8(tmp_path):
    _, ledger = indexed(tmp_path, with_sample(4, txt=b"caf\xe9 \xff"))
    assert rejected(ledger) == {"caption_not_utf8": 1}
    assert ledger.last.detail.endswith("; save the caption as UTF-8")


@pytest.mark.parametrize("text", [b'{"caption": "x"', b"[" * 100_000, b"[1]", b"\xff\xfe{}"])
def test_invalid_json(tmp_path, text):
    _, ledger = indexed(tmp_path, with_sample(4, json=text))
    assert rejected(ledger) == {"bad_json": 1}


def test_suffix_in_capitals_is_fine(tmp_path):
    index, ledger = indexed(tmp_path, with_sample(4, mp4=None, MP4=clip()))
    assert usable_keys(index) == KEYS and not ledger.rejected
    assert index.row(4).suffix == "mp4"


def test_unknown_suffix_is_no_media(tmp_path):
    _, ledger = indexed(tmp_path, with_sample(4, mp4=None, xyz=clip()))
    assert rejected(ledger) == {"no_media": 1}


def test_member_without_suffix_is_noted(tmp_path):
    index, ledger = indexed(tmp_path, shard([*good(), ("README", b"hello")]))
    assert usable_keys(index) == KEYS and notes(ledger) == {"no_suffix": 1}


@pytest.mark.parametrize("folder", ["", "./", "clips/", "a/b.c/"])
def test_what_macos_adds_beside_each_file_is_noted_and_splits_no_sample(tmp_path, folder):
    members = [
        entry
        for name, data in good()
        for entry in ((f"{folder}._{name}", b"\0\5\x16\7" + bytes(160)), (f"{folder}{name}", data))
    ]
    index, ledger = indexed(tmp_path, shard(members))
    assert usable_keys(index) == [folder + key for key in KEYS]
    assert notes(ledger) == {"no_suffix": len(members) // 2} and not ledger.rejected


def test_second_dot_in_a_name_is_accepted_if_only_one_video_is_meant(tmp_path):
    members = [*good(4), ("clip.v2.mp4", clip()), ("clip.txt", b"a clip")]
    index, ledger = indexed(tmp_path, shard(members))
    assert usable_keys(index) == [*KEYS[:4], "clip"] and not ledger.rejected
    assert index.row(4).suffix == "mp4" and index.caption(4) == "a clip"


def test_two_versions_of_one_clip_are_counted(tmp_path):
    members = [*good(4), ("clip.v1.mp4", clip()), ("clip.v2.mp4", clip()), ("clip.txt", b"a clip")]
    index, ledger = indexed(tmp_path, shard(members))
    assert usable_keys(index) == KEYS[:4] and rejected(ledger) == {"ambiguous_media": 1}


def test_duplicate_part_keeps_the_sample(tmp_path):
    members = good()
    members.insert(14, ("000004.txt", b"another caption"))
    index, ledger = indexed(tmp_path, shard(members))
    assert usable_keys(index) == KEYS and notes(ledger) == {"duplicate_part": 1}
    assert index.caption(4) == "caption 4"


def test_key_that_comes_again_is_counted_once(tmp_path):
    index, ledger = indexed(tmp_path, shard([*good(), *sample(2)]))
    assert usable_keys(index) == KEYS and len(index) == COUNT + 1
    assert rejected(ledger) == {"split_key": 1}


@pytest.mark.parametrize("name", ["../../evil", "/abs/x", "a/../../b", "c\\d"])
def test_unsafe_names_are_refused(tmp_path, name):
    index, ledger = indexed(tmp_path, shard([*good(), (f"{name}.mp4", clip()), (f"{name}.txt", b"x")]))
    assert usable_keys(index) == KEYS and rejected(ledger) == {"unsafe_name": 1}


def test_links_are_ignored_and_counted(tmp_path):
    link = tarfile.TarInfo("000009.mp4")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    pipe = tarfile.TarInfo("000010.mp4")
    pipe.type = tarfile.FIFOTYPE
    index, ledger = indexed(tmp_path, shard([*good(), ("", link), ("", pipe)]))
    assert usable_keys(index) == KEYS and notes(ledger) == {"link_member": 1, "special_member": 1}


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickle_members_are_never_opened(tmp_path):
    target = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(str(target)))
    members = [
        *sample(0),
        ("000000.pkl", bomb),
        ("000000.pth", bomb),
        *[member for i in range(1, 8) for member in sample(i)],
    ]
    index, ledger = indexed(tmp_path, shard(members))
    decode_faults(index)
    assert usable_keys(index) == KEYS and notes(ledger) == {"pickle_member": 2}
    assert not target.exists()
    pickle.loads(bomb)
    assert target.exists(), "the bomb of this test must be a live one"


def test_pipe_is_refused_and_not_executed(tmp_path):
    target = tmp_path / "executed"
    for path in (f"pipe:touch {target}", f"a.tar::pipe:touch {target}"):
        with pytest.raises((DataError, ValueError), match="pipe: runs a shell command and is refused"):
            index_of(path, tmp_path / "cache")
    assert not target.exists()


@functools.cache
def pixel_bomb() -> bytes:
    """4096x4608 pixels in a few KiB; larger ones differ only in the memory that this test would need to make them."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=8, options={"preset": "ultrafast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = 4096, 4608, "yuv420p"
        frame = av.VideoFrame(4096, 4608, "yuv420p")
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        for i in range(2):
            frame.pts = i
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return buffer.getvalue()


def test_pixel_bomb_is_refused_before_decode(tmp_path):
    assert len(pixel_bomb()) < 200_000
    _, ledger = indexed(tmp_path, with_sample(4, mp4=pixel_bomb()))
    assert rejected(ledger) == {"too_many_pixels": 1}


def patched(data: bytes, box: bytes, offset: int, value: bytes) -> bytes:
    at = data.index(box, data.index(b"moov")) + 4 + offset
    return data[:at] + value + data[at + len(value) :]


def test_pixel_bomb_behind_a_lying_header_is_refused_by_the_decoder(tmp_path):
    index, _ = indexed(tmp_path, with_sample(4, mp4=patched(pixel_bomb(), b"avc1", 24, struct.pack(">HH", 64, 64))))
    assert usable_keys(index) == KEYS
    assert index.columns("height")["height"][4] == 64
    faults = decode_faults(index)
    assert sum(faults.values()) == 1 and faults.keys() <= {"too_many_pixels", "decode_error"}


MEASURE = """
import sys
from pathlib import Path
from data.config import LimitsConfig, SourceConfig
from data.dataset.index_build import build_index
from data.ledger import BadSample, Ledger
from data.tools.lint import verify_clip
from data.types import Bucket, DecodeJob

def peak_mib():
    # of this process alone: ru_maxrss would begin with the peak of the parent
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024

def check(path):
    index = build_index(SourceConfig(path=path), Path(sys.argv[3]), Ledger(), allow_empty=True)
    for row in range(len(index)):
        if index.row(row).reject is None:
            clip = index.row(row).clip()
            try:
                verify_clip(clip, DecodeJob(item="", bucket=Bucket(1, 1, 1), clips=(clip,), fps=0, crop=False,
                                      limits=LimitsConfig(), decoder=""))
            except BadSample as fault:
                print(fault.reason)
        else:
            print(index.row(row).reject)

check(sys.argv[1])
before = peak_mib()
check(sys.argv[2])
print(peak_mib() - before)
"""


def test_pixel_bombs_cost_no_memory(tmp_path):
    """Decoding both takes 80 MiB when the limit is lifted."""
    lying = patched(pixel_bomb(), b"avc1", 24, struct.pack(">HH", 64, 64))
    (tmp_path / "good.tar").write_bytes(shard(good(2)))
    (tmp_path / "bombs.tar").write_bytes(shard([*sample(0, mp4=pixel_bomb()), *sample(1, mp4=lying)]))
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE, *(str(tmp_path / name) for name in ("good.tar", "bombs.tar", "cache"))],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.split()
    assert answer[0] == "too_many_pixels" and answer[1] in ("too_many_pixels", "decode_error")
    assert int(answer[2]) < 40, f"{answer[2]} MiB"


def test_header_that_claims_65535_pixels_squared(tmp_path):
    data = patched(clip(), b"avc1", 24, b"\xff\xff\xff\xff")
    _, ledger = indexed(tmp_path, with_sample(4, mp4=data))
    assert rejected(ledger) == {"too_many_pixels": 1}


def test_header_that_claims_four_billion_frames(tmp_path):
    data = patched(clip(), b"stsz", 8, b"\xff\xff\xff\xff")
    _, ledger = indexed(tmp_path, with_sample(4, mp4=data))
    assert rejected(ledger) == {"too_many_frames": 1}


def test_oversized_captions_and_json_are_not_read(tmp_path):
    limits = LimitsConfig(max_caption_bytes=100, max_json_bytes=200)
    _, ledger = indexed(tmp_path, with_sample(4, txt=b"x" * 101), limits=limits)
    assert rejected(ledger) == {"caption_too_large": 1}
    big = b'{"a": "' + b"x" * 300 + b'"}'
    _, ledger = indexed(tmp_path / "..", with_sample(4, json=big), limits=limits)
    assert rejected(ledger) == {"bad_json": 1}


def test_every_reason_has_a_severity():
    assert {reason.severity for reason in Reason} == {"sample", "shard", "absent", "choice", "note"}
