"""Files that appear whole: who reads one finds all that was there before, or all that is there now."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path, *, synced: bool = False) -> Iterator[Path]:
    """Where to write what shall stand at `path`: a hidden name beside it, which no other process has. It is renamed
    when the block ends, with `synced` once it is on disk, and removed when the block raises."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        yield part
        if synced:
            with part.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):  # the disk may be why
            part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes, *, synced: bool = False) -> None:
    """Write all of a file, text as UTF-8, as `whole_file`. Raises OSError, and then leaves `path` as it was."""
    with whole_file(path, synced=synced) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
