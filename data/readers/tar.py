"""Members of a tar from their headers alone. Finds what Python's tarfile passes over: garbage and cut archives.

tarfile takes a broken header for the end of the archive, so the rest of the shard is lost without a word. Here a header
with a wrong checksum, an end without its marker and bytes after the marker are faults that name the lost bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from data.ledger import Fault, Reason
from data.storage import ReadFile

BLOCK = 512
ZEROS = bytes(BLOCK)
MAX_EXTENDED_HEADER_BYTES = 1 << 20  # of a long name or pax record


class MemberKind(Enum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    SPECIAL = "special"  # devices, fifos, sparse files


@dataclass(frozen=True, slots=True)
class TarMember:
    """One archive member: where its bytes lie in the file."""

    name: str
    kind: MemberKind
    header: int  # offset of its header
    offset: int  # of its content
    size: int
    truncated: bool = False

    @property
    def unsafe(self) -> bool:
        """Would escape a folder or confuse a log when used as a path."""
        return is_unsafe(self.name)


def is_unsafe(name: str) -> bool:
    return (
        name.startswith("/")
        or "\\" in name
        or ".." in name.split("/")
        or any(ord(sign) < 32 or 0xD800 <= ord(sign) < 0xE000 for sign in name)
    )


def read_members(file: ReadFile) -> Iterator[TarMember | Fault]:
    """Members in archive order; a Fault of the whole shard may follow the last one that can be reached."""
    position, count, end = 0, 0, file.size
    extended: dict[str, str] = {}
    while True:
        header = file.pread(position, BLOCK)
        if len(header) < BLOCK:
            yield _cut(file, position, count)
            return
        if header == ZEROS:
            fault = _check_tail(file, position, count)
            if fault:
                yield fault
            return
        if not _checksum_holds(header):
            reason = Reason.GARBAGE_HEADER if count else Reason.UNREADABLE_TAR
            yield Fault(reason, file.uri, "", position, f"{reason} at {position}: {end - position} bytes unreachable")
            return
        kind, size = header[156:157], _number(header[124:136])
        if kind in b"xgLK" and not 0 <= size <= MAX_EXTENDED_HEADER_BYTES:
            yield Fault(
                Reason.GARBAGE_HEADER,
                file.uri,
                "",
                position,
                f"extended header of {size} bytes at {position}: {end - position} bytes unreachable",
            )
            return
        content = position + BLOCK
        if kind in b"xgLK":
            extended |= _extended(kind, file.pread(content, size))
            position = content + _rounded(size)
            continue
        name = extended.get("path") or _name(header)
        try:
            size = int(extended.get("size", size))
        except ValueError:
            size = -1
        if size < 0:
            yield Fault(
                Reason.GARBAGE_HEADER,
                file.uri,
                "",
                position,
                f"member size {extended.get('size', size)!r} at {position}: {end - position} bytes unreachable",
            )
            return
        member_kind = _kind(kind, extended, name)
        if member_kind in (MemberKind.LINK, MemberKind.FOLDER):
            size = 0
        truncated = content + size > end
        yield TarMember(name, member_kind, position, content, size, truncated)
        count, extended = count + 1, {}
        if truncated:
            yield Fault(
                Reason.TRUNCATED_TAR,
                file.uri,
                "",
                position,
                f"ends {content + size - end} bytes before the end of its last member",
            )
            return
        position = content + _rounded(size)


def _cut(file: ReadFile, position: int, count: int) -> Fault:
    if not count:
        return Fault(Reason.UNREADABLE_TAR, file.uri, "", 0, f"{file.size} bytes, no member")
    return Fault(Reason.TRUNCATED_TAR, file.uri, "", min(position, file.size), "ends without the end-of-archive marker")


def _check_tail(file: ReadFile, position: int, count: int) -> Fault | None:
    """Everything after the first zero block must be zero; otherwise whole members may hide there."""
    start = position
    while position < file.size:
        piece = file.pread(position, 1 << 20)
        if piece.strip(b"\0"):
            at = position + len(piece) - len(piece.lstrip(b"\0"))
            return Fault(
                Reason.GARBAGE_HEADER,
                file.uri,
                "",
                at,
                f"bytes after the end-of-archive marker at {start}: {file.size - at} bytes unreachable",
            )
        position += len(piece)
    if not count:
        return Fault(Reason.UNREADABLE_TAR, file.uri, "", 0, "an empty archive")
    if file.size % BLOCK:
        return Fault(
            Reason.TRUNCATED_TAR,
            file.uri,
            "",
            start,
            f"{file.size} bytes are not whole blocks of {BLOCK}: some were lost or added",
        )
    return None


def _checksum_holds(header: bytes) -> bool:
    digits = header[148:156].strip(b" \0")
    try:
        return sum(header) - sum(header[148:156]) + 8 * 32 == int(digits, 8)
    except ValueError:
        return False


def _number(field: bytes) -> int:
    """Octal text, or base 256 after a set high bit. -1 if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return -1


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _extended(kind: bytes, content: bytes) -> dict[str, str]:
    """What a long-name or pax header says about the next member. Global pax headers say nothing we use."""
    if kind == b"L":
        return {"path": content.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")}
    if kind != b"x":
        return {}
    found: dict[str, str] = {}
    while content:
        digits, space, _ = content.partition(b" ")
        if not space or not digits.isdigit() or not len(digits) < int(digits) <= len(content):
            break
        name, _, value = content[len(digits) + 1 : int(digits)].rstrip(b"\n").partition(b"=")
        found[name.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        content = content[int(digits) :]
    return {name: value for name, value in found.items() if name in ("path", "size") or name.startswith("GNU.sparse")}


def _kind(flag: bytes, extended: dict[str, str], name: str) -> MemberKind:
    if flag in b"12" and flag:
        return MemberKind.LINK
    if flag == b"5" or (flag in (b"0", b"\0") and name.endswith("/")):
        return MemberKind.FOLDER
    if flag in (b"0", b"\0", b"7") and not any(name.startswith("GNU.sparse") for name in extended):
        return MemberKind.FILE
    return MemberKind.SPECIAL


def _rounded(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK * BLOCK
