"""Bars on Ray's own timeline (`ray timeline`, and the dashboard's button for it), named after the step they belong to.

Ray keeps some 5 KB for every name of a call it has ever seen, in the caller and in the actor: calls named after steps
made both grow by 0.2 MiB per step. A profile event's label is data: Ray keeps a bounded number of them.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ray._private.worker import global_worker  # `ray._private.profiling` does this only under RAY_PROFILING


def bar(name: str) -> contextlib.AbstractContextManager[Any]:
    """Shows the block as a bar `name`, such as "dit 17f 64x96 b4 sp1 s12", in the row of this worker process."""
    worker: Any = global_worker  # its type leaves out what a connected one has
    if not worker.connected:
        return contextlib.nullcontext()
    return worker.core_worker.profile_event(b"cascade", {"name": name})
