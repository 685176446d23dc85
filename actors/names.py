"""Names of a run's actors, so that the command line and a restarted controller find them.

`run_id` is the content of RUN_DIR/run_id: a new run in an old folder never finds the actors of its predecessor.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from ops.whole_file import write_whole

NAMESPACE = "heddle"
RUN_ID = "run_id"  # in the run's folder


def run_id(run_dir: Path) -> str:
    """Read, or on the first call make, the id of the run in this folder."""
    path = run_dir / RUN_ID
    if not id_in(path):
        name = run_dir.name.encode("utf-8", "replace").decode()  # a folder's may have any bytes, an actor's may not
        write_whole(path, f"{name}-{uuid.uuid4().hex[:8]}\n")
    return id_in(path)


def known_id(run_dir: Path) -> str:
    """The id of the run that is or was in this folder, which is not made; "" without one, and where it may not be
    read."""
    with suppress(OSError):
        return id_in(run_dir / RUN_ID)
    return ""


def id_in(path: Path) -> str:
    """The id in this file; "" without one, and of an empty one, which is none: a full disk leaves such files."""
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def label_of(name: str) -> str:
    """A run's name as Ray takes it in labels of metrics, which are ASCII: other characters as '_'."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "_" for letter in name)


_MONITOR = "/monitor"


def monitor_name(run: str) -> str:
    return f"{run}{_MONITOR}"


def is_monitor(actor: str) -> bool:
    """Whether an actor of this name is the monitor of some run."""
    return actor.endswith(_MONITOR)


def keeper_name(run: str, node: str) -> str:
    """What the names of keepers of this node begin with; "" as node: of all nodes."""
    return f"{run}/keeper/{node[:12]}"


def find_monitor(run_dir: Path) -> Any:  # the caller names its protocol
    """Handle of the monitor of a live run; without a type, as the protocols that it follows are in `actors.pool` and in
    the command line. Raises LookupError when the run is not alive on this cluster."""
    import ray

    try:
        return ray.get_actor(monitor_name(run_id(run_dir)), namespace=NAMESPACE)
    except ValueError:
        raise LookupError(
            f"run {run_dir} is not alive on this cluster. Start it with `heddle train`, "
            f"or connect to its cluster with RAY_ADDRESS."
        ) from None
