"""How many workers somebody has asked a run to keep (`heddle workers scale`), in its folder: the monitor knows it, and
the controller tells a monitor that was started again; where both are lost with their node, this is what is left."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

from ops.whole_file import write_whole

log = logging.getLogger(__name__)

REQUESTED_SIZE = "requested_size.json"


def keep_size(folder: Path, workers: int) -> None:
    """Write a size. Where the disk does not take it, it is known for as long as monitor or controller live."""
    try:
        write_whole(folder / REQUESTED_SIZE, json.dumps({"workers": workers}) + "\n")
    except OSError as error:
        log.warning("a size of %d workers that was asked for is not kept: %s", workers, error)


def kept_size(folder: Path) -> int | None:
    """The size; None where nobody has asked since the run was started, or the file is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((folder / REQUESTED_SIZE).read_text(encoding="utf-8"))["workers"])
    return None


def forget_size(folder: Path) -> None:
    """Remove the size: a start by a person begins with workers.max."""
    (folder / REQUESTED_SIZE).unlink(missing_ok=True)
