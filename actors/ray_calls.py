"""Calls to Ray: its errors for an actor that is gone, and the cause of a task that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, NodeDiedError, OutOfMemoryError, RayActorError

from actors.plan.types import PlanError
from data.errors import DataError, DataIOError

FOR_GOOD = (ActorDiedError, ActorUnschedulableError, NodeDiedError, OutOfMemoryError)
GONE = (RayActorError, *FOR_GOOD)  # also one that is out of reach, and may answer again


def unwrap(call: Callable[[], Any]) -> Any:
    """Run `ray.get` and raise a known cause of a task's failure as itself, so that callers can answer it."""
    try:
        return call()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError | DataIOError | PlanError):
            raise error.cause from None
        raise
