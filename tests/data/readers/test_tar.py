"""Members are found as tarfile finds them; damage that tarfile passes over is named."""

from __future__ import annotations

import io
import itertools
import tarfile

import pytest

from data.ledger import Fault, Reason
from data.readers.tar import MemberKind, TarMember, is_unsafe, read_members
from data.storage import ReadFile
from tests.data.making import shard


def members_of(tmp_path, data: bytes) -> list[TarMember | Fault]:
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with ReadFile(str(path)) as file:
        return list(read_members(file))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_same_members_as_tarfile(tmp_path, form):
    buffer = io.BytesIO()
    names = ["a.mp4", "b/c.txt", "é" * 30 + ".json", "d/" * 40 + "e.mp4", "f" * 90 + ".txt", "g" * 99]
    if form != tarfile.USTAR_FORMAT:
        names += ["h" * 300 + ".mp4", "i/" * 200 + "j.txt"]
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for i, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = i * 300, 12.5 if form == tarfile.PAX_FORMAT else 12
            tar.addfile(info, io.BytesIO(bytes([i]) * info.size))
    found = members_of(tmp_path, buffer.getvalue())
    with tarfile.open(fileobj=io.BytesIO(buffer.getvalue())) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar]
    assert [(member.name, member.offset, member.size) for member in found] == expected
    assert all(member.kind is MemberKind.FILE and not member.truncated for member in found)


def test_sizes_beyond_eight_octal_digits_and_in_base_256(tmp_path):
    info = tarfile.TarInfo("big.mp4")
    info.size = 20 << 30
    header = info.tobuf(tarfile.GNU_FORMAT)
    member, fault = members_of(tmp_path, header + b"x" * 512)
    assert member.size == 20 << 30 and member.truncated
    assert fault.reason is Reason.TRUNCATED_TAR


def after_record(record: bytes) -> bytes:
    """A shard of one member, with this pax record before it."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    padding = bytes(-len(record) % tarfile.BLOCKSIZE)
    return info.tobuf(tarfile.USTAR_FORMAT) + record + padding + shard([("a.txt", b"x")])


def test_a_size_of_more_digits_than_python_converts_is_no_size(tmp_path):
    text = b" size=" + b"9" * 5000 + b"\n"
    (fault,) = members_of(tmp_path, after_record(b"%d%s" % (len(text) + 4, text)))
    assert fault.reason is Reason.GARBAGE_HEADER and "member size '999" in fault.detail and len(fault.detail) < 120


def test_a_record_that_is_longer_than_any_number_says_nothing(tmp_path):
    (member,) = members_of(tmp_path, after_record(b"9" * 5000 + b" path=b.txt\n"))
    assert (member.name, member.size) == ("a.txt", 1)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_what_follows_a_sparse_file_of_many_pieces_is_found(tmp_path, blocks):
    """As `tar -S` writes it: blocks with more places stand between its header and its content."""
    info = tarfile.TarInfo("holes.mp4")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 700
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[482] = blocks > 0
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
    places = b"".join(bytes(504) + bytes([number < blocks - 1]) + bytes(7) for number in range(blocks))
    found = members_of(tmp_path, bytes(header) + places + b"x" * 700 + bytes(324) + shard([("a.txt", b"text")]))
    assert [(member.name, member.kind) for member in found] == [
        ("holes.mp4", MemberKind.SPECIAL),
        ("a.txt", MemberKind.FILE),
    ]
    assert found[0].offset == 512 * (1 + blocks) and found[0].size == 700


def test_end_marker_is_required(tmp_path):
    data = shard([("a.txt", b"x" * 100)])
    assert len(members_of(tmp_path, data)) == 1
    assert members_of(tmp_path, data[:1024])[-1].reason is Reason.TRUNCATED_TAR


def test_concatenated_archives_are_named(tmp_path):
    data = shard([("a.txt", b"x")])
    member, fault = members_of(tmp_path, data + shard([("b.txt", b"y")]))
    assert member.name == "a.txt"
    assert fault.reason is Reason.GARBAGE_HEADER and "after the end-of-archive marker" in fault.detail


def test_gzipped_shard_is_unreadable(tmp_path):
    import gzip

    (fault,) = members_of(tmp_path, gzip.compress(shard([("a.txt", b"x" * 5000)]), mtime=0) + bytes(2048))
    assert fault.reason is Reason.UNREADABLE_TAR


def test_hostile_extended_header_is_not_read(tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    (fault,) = members_of(tmp_path, info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert fault.reason is Reason.GARBAGE_HEADER


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
@pytest.mark.parametrize("size", [b"-1000", b"-3000", b"-1", b"what"])
def test_extended_header_of_negative_size_ends_the_archive(tmp_path, kind, size):
    info, first = tarfile.TarInfo("x"), shard([("a.txt", b"x" * 1000)])[:1536]
    info.type = kind
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = size.rjust(12, b"0") if size == b"what" else size.ljust(11) + b"\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = tmp_path / "a.tar"
    path.write_bytes(first + header + bytes(1024))
    with ReadFile(str(path)) as file:
        member, fault = itertools.islice(read_members(file), 3)
    assert member.name == "a.txt"
    assert fault.reason is Reason.GARBAGE_HEADER and fault.offset == 1536 and "1536 bytes unreachable" in fault.detail


@pytest.mark.parametrize("size", ["-5", "abc"])
def test_hostile_pax_size(tmp_path, size):
    record = f" size={size}\n".encode()
    record = str(len(record) + 2).encode() + record
    extended, plain = tarfile.TarInfo("x"), tarfile.TarInfo("a.txt")
    extended.type, extended.size = tarfile.XHDTYPE, len(record)
    data = extended.tobuf() + record.ljust(512, b"\0") + plain.tobuf() + bytes(1024)
    assert members_of(tmp_path, data)[-1].reason is Reason.GARBAGE_HEADER


@pytest.mark.parametrize(
    "name, unsafe",
    [
        ("a/b.mp4", False),
        ("./a.mp4", False),
        ("a..b/c.mp4", False),
        ("../a.mp4", True),
        ("a/../b.mp4", True),
        ("/a.mp4", True),
        ("a\nb.mp4", True),
        ("a\\b.mp4", True),
        ("caf\udce9.mp4", True),
    ],
)
def test_unsafe_names(name, unsafe):
    assert is_unsafe(name) is unsafe
