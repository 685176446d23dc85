"""What heartbeats carry: what a worker does now, and what the monitor answers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from actors.plan.types import UNKNOWN_PLACE, GpuPlace
from ops.sending import sent_often

LOADING = "loading"  # activity of a worker until its modules are there
ASIDE = "aside"  # phase of a worker in a turn of an aside


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class LinkUse:
    """What a worker has sent to another host in a while (`ops.comm.links`)."""

    host: str  # the worker's
    other: str
    num_bytes: int
    busy_s: float  # for which some of it was on its way
    rate: float  # bytes per second that the network gives, at least
    fills: bool  # whether the worker took all that the network gives
    over_s: float


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Sent with every heartbeat: what the worker is doing and since when."""

    worker: str
    generation: int
    step: int
    activity: str  # name of the running cascade, or idle
    phase: str
    since: float  # unix seconds
    predicted_s: float
    collectives: int  # collectives finished so far in this generation; the lowest count is the late worker
    waiting_in: str  # name of the collective it waits in, or ""
    leaving: bool = False
    limit_s: float = 0.0  # after which others do not wait for this activity any more; 0: unknown
    place: GpuPlace = UNKNOWN_PLACE  # of its GPU
    host: str = ""  # name of its machine
    node: str = ""  # Ray's id of its node
    links: tuple[LinkUse, ...] = ()  # those that were busy the longest in the last while

    @classmethod
    def of_start(cls, worker: str, host: str = "", node: str = "") -> Progress:
        """The progress of a worker that loads its models and is in no generation yet."""
        return cls(
            worker=worker,
            generation=-1,
            step=-1,
            activity=LOADING,
            phase="",
            since=time.time(),
            predicted_s=0.0,
            collectives=0,
            waiting_in="",
            host=host,
            node=node,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """The monitor's answer to a heartbeat."""

    generation: int  # tasks and collectives of older generations must end now
    dump_stack: bool = False
    at: float = 0.0  # unix seconds on the monitor's host; 0: it does not say
