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
MOST_DIGITS = 20  # of a size in a pax record; int() refuses 4300
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
    position, count = 0, 0
    extended: dict[str, str] = {}  # what headers before a member's own say about it
    try:
        while (header := _header_at(file, position, count)) is not None:
            content = _content_at(file, position, header)
            if header[156:157] in b"xgLK":
                size = _extended_size(file, position, header)
                extended |= _extended(header[156:157], file.pread(content, size))
            else:
                member = _member(file, position, content, header, extended)
                yield member
                if member.truncated:
                    lost = content + member.size - file.size
                    why = f"ends {lost} bytes before the end of its last member"
                    raise _Broken(_fault(file, Reason.TRUNCATED_TAR, position, why))
                size, count, extended = member.size, count + 1, {}
            position = content + _rounded(size)
    except _Broken as found:
        yield found.fault


class _Broken(Exception):
    """Nothing can be reached after here."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


def _fault(file: ReadFile, reason: Reason, at: int, why: str) -> Fault:
    """One of the whole shard."""
    return Fault(reason, file.uri, "", at, why)


def _unreachable(file: ReadFile, at: int, what: str, reason: Reason = Reason.GARBAGE_HEADER) -> _Broken:
    return _Broken(_fault(file, reason, at, f"{what} at {at}: {file.size - at} bytes unreachable"))


def _header_at(file: ReadFile, position: int, count: int) -> bytes | None:
    """The header there, after `count` members; None at the end of a whole archive. Raises _Broken."""
    header = file.pread(position, BLOCK)
    if len(header) < BLOCK:
        raise _Broken(_cut(file, position, count))
    if header == ZEROS:
        if (fault := _check_tail(file, position, count)) is not None:
            raise _Broken(fault)
        return None
    if not _checksum_holds(header):
        reason = Reason.GARBAGE_HEADER if count else Reason.UNREADABLE_TAR
        raise _unreachable(file, position, reason, reason)
    return header


def _extended_size(file: ReadFile, position: int, header: bytes) -> int:
    size = _number(header[124:136])
    if not 0 <= size <= MAX_EXTENDED_HEADER_BYTES:
        raise _unreachable(file, position, f"extended header of {size} bytes")
    return size


def _content_at(file: ReadFile, position: int, header: bytes) -> int:
    """Where the content of a header begins: that of GNU's own sparse files, of more than four pieces, has blocks with
    the places of the others before it."""
    content, goes_on = position + BLOCK, header[156:157] == b"S" and header[482]
    while goes_on and content < file.size:
        goes_on = any(file.pread(content + 504, 1))
        content += BLOCK
    return content


def _member(file: ReadFile, position: int, content: int, header: bytes, extended: dict[str, str]) -> TarMember:
    """The member of this header. Raises _Broken for a size that is none."""
    name = extended.get("path") or _name(header)
    told = extended.get("size", _number(header[124:136]))
    try:
        size = int(told) if isinstance(told, int) or len(told) <= MOST_DIGITS else -1
    except ValueError:
        size = -1
    if size < 0:
        raise _unreachable(file, position, f"member size {str(told)[: 2 * MOST_DIGITS]!r}")
    kind = _kind(header[156:157], extended, name)
    if kind in (MemberKind.LINK, MemberKind.FOLDER):
        size = 0
    return TarMember(name, kind, position, content, size, truncated=content + size > file.size)


def _cut(file: ReadFile, position: int, count: int) -> Fault:
    if not count:
        return _fault(file, Reason.UNREADABLE_TAR, 0, f"{file.size} bytes, no member")
    return _fault(file, Reason.TRUNCATED_TAR, min(position, file.size), "ends without the end-of-archive marker")


def _check_tail(file: ReadFile, position: int, count: int) -> Fault | None:
    """Everything after the first zero block must be zero; otherwise whole members may hide there."""
    start = position
    while position < file.size:
        piece = file.pread(position, 1 << 20)
        if piece.strip(b"\0"):
            at = position + len(piece) - len(piece.lstrip(b"\0"))
            why = f"bytes after the end-of-archive marker at {start}: {file.size - at} bytes unreachable"
            return _fault(file, Reason.GARBAGE_HEADER, at, why)
        position += len(piece)
    if not count:
        return _fault(file, Reason.UNREADABLE_TAR, 0, "an empty archive")
    if file.size % BLOCK:
        why = f"{file.size} bytes are not whole blocks of {BLOCK}: some were lost or added"
        return _fault(file, Reason.TRUNCATED_TAR, start, why)
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
        if not space or not digits.isdigit() or len(digits) > MOST_DIGITS:
            break
        if not len(digits) < int(digits) <= len(content):
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
