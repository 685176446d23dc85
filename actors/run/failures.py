"""What the error of a call to a worker says: why the call failed, and what was lost or ran out with it."""

from __future__ import annotations

import logging

import ray

from actors.aside_turns import TurnReport
from actors.memory_kills import in_short
from actors.messages import MemoryExceeded, OutOfMemory, OutOfReach
from actors.ray_calls import GONE, get
from actors.refs import Ref

log = logging.getLogger(__name__)

# Ray raises the error of the lost argument itself; only these words say that the call never ran.
_LOST_ARGUMENT = "input arguments for this task could not be computed"


def error_of(call: Ref[object]) -> ray.exceptions.RayError | None:
    """The error of an ended call, its own or Ray's; None where it has succeeded."""
    try:
        get(call)
    except ray.exceptions.RayError as error:
        return error
    return None


def is_out_of_reach(call: Ref[object]) -> bool:
    """Whether an ended call has failed because its worker's node does not reach another node."""
    error = error_of(call)
    return isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, OutOfReach)


def has_lost_argument(call: Ref[object]) -> bool:
    """Whether an ended call has failed for want of its pixels (`lost_argument`)."""
    error = error_of(call)
    return error is not None and lost_argument(error)


def why_of(error: ray.exceptions.RayError) -> str:
    """Why a call failed, in one line; "" where a worker that it depends on is gone: the call that ends the step on that
    worker says so."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return "" if isinstance(error.cause, GONE) else last_line(str(error.cause) or str(error))
    if isinstance(error, GONE):
        log.debug("a call failed: %s", error)
        return ""
    return last_line(str(error))


def exceeded_of(error: ray.exceptions.RayError) -> list[MemoryExceeded]:
    """The cascade that ran out of memory, if that is why a call failed: its own, or an encode whose result it needs."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    return [cause.found] if isinstance(cause, OutOfMemory) else []


def lost_argument(error: ray.exceptions.RayError) -> bool:
    """Whether a call of a worker never ran because its pixels were lost, or could not be decoded again."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return isinstance(error.cause, ray.exceptions.ObjectLostError) or _LOST_ARGUMENT in str(error)
    if isinstance(error, GONE):
        log.debug("an encode call failed: %s", error)
        return False
    return True


def failed_turn(aside: str, error: ray.exceptions.RayError) -> TurnReport:
    """What becomes of an aside whose turn has raised."""
    return TurnReport(aside=aside, ended=True, failed=" ".join(str(error).split())[-300:])


def last_line(text: str) -> str:
    """The line of an error's text that names the error."""
    return in_short(text).strip().rpartition("\n")[2]
