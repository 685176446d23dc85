"""What the error of a call to a worker says: why the call failed, and what was lost or ran out with it."""

from __future__ import annotations

import logging

import ray

from actors.memory_kills import in_short
from actors.messages import MemoryExceeded, OutOfMemory, OutOfReach, TurnReport
from actors.ray_calls import GONE, get
from actors.refs import Ref

log = logging.getLogger(__name__)

# Ray raises the error of the lost argument itself; only these words say that the call never ran.
_LOST_ARGUMENT = "input arguments for this task could not be computed"


def error_of(call: Ref[object]) -> ray.exceptions.RayError | None:
    """What an ended call has raised, or Ray for it; None: it has ended well."""
    try:
        get(call)
    except ray.exceptions.RayError as error:
        return error
    return None


def has_failed(call: Ref[object]) -> bool:
    """Whether an ended call has raised, or its worker is gone."""
    return error_of(call) is not None


def is_out_of_reach(call: Ref[object]) -> bool:
    """Whether a call has ended since its worker's node does not reach another."""
    error = error_of(call)
    return isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, OutOfReach)


def has_lost_argument(call: Ref[object]) -> bool:
    """The same of an ended call as `lost_argument` of its error."""
    error = error_of(call)
    return error is not None and lost_argument(error)


def failure_of(call: Ref[object], exceeded: list[MemoryExceeded] | None = None) -> str:
    """The same of an ended call as `why_of` of its error; "" also where it has ended well."""
    error = error_of(call)
    return "" if error is None else why_of(error, exceeded)


def why_of(error: ray.exceptions.RayError, exceeded: list[MemoryExceeded] | None = None) -> str:
    """Why a call failed, or "" where a worker that it needs is gone, as that worker's finish says. What ran out of
    memory is added to `exceeded`."""
    if isinstance(error, ray.exceptions.RayTaskError):
        if exceeded is not None:
            exceeded += exceeded_of(error)
        return "" if isinstance(error.cause, GONE) else last_line(str(error.cause) or str(error))
    if isinstance(error, GONE):
        log.debug("a call failed: %s", error)
        return ""
    return last_line(str(error))


def exceeded_of(error: ray.exceptions.RayTaskError) -> list[MemoryExceeded]:
    """What ran out of memory, if that is why a call failed: itself, or an encode that it needs the result of."""
    return [error.cause.found] if isinstance(error.cause, OutOfMemory) else []


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
    return in_short(text).strip().rpartition("\n")[2]
