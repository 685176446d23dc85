"""Measures the points of a profile one after the other, and writes the file after each.

What runs out of memory becomes a limit; a bag in which that happened is closed, and another one made when it is needed.
On GPUs it first has to run out alone: bags stay open, and the modules of them and of this process lie side by side.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from actors.plan.costs.exchange import ExchangePoint, exchange_speed
from actors.plan.costs.flops import exchange_calls, exchange_seconds
from actors.plan.costs.handoff import HandoffPoint
from actors.plan.costs.max_frames import MaxFrames
from actors.plan.costs.needs import Footprint
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import write_profile
from actors.plan.costs.spanning import SpanningPoint
from actors.plan.costs.update import UpdatePoint
from actors.plan.types import MODULES, Module
from app.device.bag import Bag, MeasuredBag
from app.device.over_nodes import BagOverNodes, MeasuredCluster, timed_handoffs
from app.device.points import LargestBatch, LongestClip, PointTimes, ProfiledShape, ProfilePoint, SideFigure
from app.settings.config import RunConfig
from app.settings.out_files import is_no_file, out_file
from ops.counted import counted
from ops.models.config import ModelConfig
from ops.models.load import trained_part
from ops.units import MIB

if TYPE_CHECKING:
    import torch

EXCHANGES = (2**20, 2**25)  # bytes of an all-to-all: latency, and bandwidth
_HANDOFFS = 3  # timed ones of each size, at least
Measurable = ProfilePoint | SideFigure | LongestClip | LargestBatch


class SoloBench(Protocol):
    """What is measured without a bag (`app.device.bench.Bench`)."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def device(self) -> torch.device: ...
    def measure(self, module: Module, shape: ProfiledShape, repeats: int) -> PointTimes:
        """Raises MemoryError, or PyTorch's error, where it ran out of memory."""
        ...

    def update(self, repeats: int) -> PointTimes: ...
    def rest(self) -> None:
        """Take nothing of the device until the next measurement."""
        ...


class BagSource(Protocol):
    """Where bags and handoffs come from."""

    def bag(self, degree: int, nodes: int) -> MeasuredBag: ...
    def handoffs(self, nodes: int, repeats: int) -> list[HandoffPoint]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessBags:
    """Bags of processes of this machine or of actors on a cluster, and handoffs through Ray's object store."""

    config: RunConfig
    device: str
    cluster: MeasuredCluster | None = None  # None where neither handoffs nor bags over nodes are asked for

    def bag(self, degree: int, nodes: int) -> MeasuredBag:
        if nodes == 1:
            return Bag(self.config, degree, self.device)
        assert self.cluster is not None, "only a cluster has bags over nodes"
        return BagOverNodes(self.config, self.cluster.bags[degree], self.device)

    def handoffs(self, nodes: int, repeats: int) -> list[HandoffPoint]:
        assert self.cluster is not None, "only a cluster has such points"
        return timed_handoffs(self.cluster.ends(nodes), self.device, repeats)


class Measuring:
    """The bags of a `heddle profile`, and what they have found so far, in `profile` and in the file `out`."""

    def __init__(self, bench: SoloBench, together: BagSource, profile: Profile, out: Path, repeats: int) -> None:
        self._bench, self._together, self._profile, self._out, self._repeats = bench, together, profile, out, repeats
        self._device = bench.device.type
        self._bags: dict[tuple[int, int], MeasuredBag] = {}  # by degree and nodes
        self._rests = True  # this process has nothing on the device

    def run(self, points: Sequence[Measurable], until: float) -> None:
        """Measure the points but those that surely run out of memory, until the time is over (monotonic; 0: never)."""
        try:
            for number, point in enumerate(points):
                if until and time.monotonic() > until:
                    left = len(points) - number
                    print(f"          the time is over, {counted(left, 'point')} left: call again to continue")
                    break
                if isinstance(point, LongestClip | LargestBatch):
                    self._search(point, until)
                elif not is_known(point, self._profile):
                    self._measure(point)
                    self.save()
        finally:
            for bag in self._bags.values():
                bag.close()

    def save(self, *, last: bool = False) -> None:
        """Write what is known. What is no file gets the last alone: the reader of a pipe may leave after one."""
        if not self._profile.measured:
            return
        with_degrees(self._profile)
        if last or not is_no_file(self._out):
            with out_file(self._out) as part:
                write_profile(self._profile, part)

    def save_if_read(self) -> None:
        """Write what is known into a pipe. Raises OSError where nobody reads it: a named one would be waited for."""
        end = os.open(self._out, os.O_WRONLY | os.O_NONBLOCK)
        try:
            self.save(last=True)
        finally:
            os.close(end)

    def _search(self, wanted: LongestClip | LargestBatch, until: float) -> None:
        """Bisect over lengths or batches. All on the way are points or limits, so another call goes on from there."""
        self._make_room(wanted.degree, nodes=1)
        while (point := wanted.next_point(self._profile)) is not None and not (until and time.monotonic() > until):
            self._measure(point)
            self.save()

    def _measure(self, point: ProfilePoint | SideFigure) -> None:
        if self._fits(point) or (self._make_room(point.degree, point.nodes) and self._fits(point)):
            return
        if isinstance(point, ProfilePoint):
            self._limit(point)
        else:
            print(f"{point.kind} of {point.degree}: runs out of memory, and stays unknown", flush=True)

    def _fits(self, point: ProfilePoint | SideFigure) -> bool:
        """Measure it. False where it ran out of memory, and its bag is closed."""
        self._rests &= point.degree > 1
        try:
            if isinstance(point, ProfilePoint):
                self._point(point)
            elif point.kind == "update":
                self._update(point.degree, point.nodes)
            elif point.kind == "exchange":
                self._exchange(point.degree, point.nodes)
            else:
                self._handoff(point.nodes)
        except (MemoryError, RuntimeError) as error:
            refuse_other(error)
            self._close(point.degree, point.nodes)
            return False
        return True

    def _make_room(self, degree: int, nodes: int) -> bool:
        """Leave the GPUs to this bag, or to this process for degree 1, as a worker of a run has its own. Whether others
        had anything of them. On CPUs a limit counts the tensors of one process."""
        if self._device != "cuda":
            return False
        others = [place for place in self._bags if place != (degree, nodes)]
        for place in others:
            self._close(*place)
        if degree == 1 or self._rests:
            return bool(others)
        self._bench.rest()
        self._rests = True
        return True

    def _point(self, point: ProfilePoint) -> None:
        if point.degree == 1:
            times = self._bench.measure(point.module, point.shape, self._repeats)
        else:
            times = self._in_bag(point)
        if point.nodes == 1:
            self._profile.measure(point.key, times.median, point.shape.text_tokens, round(times.spread, 4))
        else:
            self._profile.count_over_nodes([spanning_point(point, times.median)])
        need = ""
        if times.need_gib is not None:
            self._profile.observe_need(footprint_of(point, self._profile), times.need_gib)
            need = f"  takes {times.need_gib:6.3f} GiB"
        print(f"{point.name} {times.median:9.4f} s  spread {100 * times.spread:.0f}%{need}{_handed(times)}", flush=True)

    def _in_bag(self, point: ProfilePoint) -> PointTimes:
        # by what is known now: a plan brings such rates, and its bags then run as this one does
        rates = self._profile.slice_rates() if self._profile.sliced is not None else None
        return self._bag(point.degree, point.nodes).measure(point.module, point.shape, self._repeats, rates)

    def _update(self, workers: int, nodes: int) -> None:
        if workers == 1:
            times = self._bench.update(self._repeats)
        else:
            times = self._bag(workers, nodes).update(self._repeats)
        point = UpdatePoint(workers=workers, nodes=nodes, seconds=times.median)
        self._profile.update = self._profile.update.with_point(point)
        bag = f"{counted(workers, 'worker')}{_over(nodes)}"
        print(f"update  end of a step on {bag} {times.median:9.4f} s  spread {100 * times.spread:.0f}%", flush=True)

    def _exchange(self, degree: int, nodes: int) -> None:
        found = []
        for size in EXCHANGES:
            seconds = self._bag(degree, nodes).exchange(size)
            found.append(ExchangePoint(workers=degree, num_bytes=size, seconds=seconds, nodes=nodes))
        self._profile.exchanges = (*self._profile.exchanges, *found)
        if line := exchange_speed(self._profile.exchanges):
            dit = self._bench.model.dit
            part = trained_part(dit)
            seconds = exchange_seconds(dit, line[1], self._profile.element_bytes, part)
            self._profile.count_exchange(seconds, exchange_calls(dit, part))
        speeds = ", ".join(
            f"{one.sent / one.seconds / 1e9:.2f} GB/s for {one.num_bytes / MIB:.0f} MiB" for one in found
        )
        print(f"a2a   all-to-all of {degree}{_over(nodes)}: {speeds} of a member", flush=True)

    def _handoff(self, nodes: int) -> None:
        self._free_nodes()
        found = self._together.handoffs(nodes, max(self._repeats, _HANDOFFS))
        self._profile.count_handoffs(found)
        sizes = sorted({point.num_bytes for point in found})
        middle = {size: statistics.median(p.seconds for p in found if p.num_bytes == size) for size in sizes}
        told = ", ".join(f"{1e3 * middle[size]:.1f} ms for {size / MIB:.3g} MiB" for size in sizes)
        where = "on two nodes" if nodes > 1 else "on one node"
        print(f"handoff  by the object store to another worker {where}: {told}", flush=True)

    def _bag(self, degree: int, nodes: int) -> MeasuredBag:
        if (degree, nodes) not in self._bags:
            if nodes > 1:
                self._free_nodes()
            self._bags[degree, nodes] = self._together.bag(degree, nodes)
        return self._bags[degree, nodes]

    def _free_nodes(self) -> None:
        """A bag over nodes has its GPUs and CPUs for itself, as Ray counts them."""
        for degree, nodes in [place for place in self._bags if place[1] > 1]:
            self._close(degree, nodes)

    def _close(self, degree: int, nodes: int) -> None:
        if (bag := self._bags.pop((degree, nodes), None)) is not None:
            bag.close()

    def _limit(self, point: ProfilePoint) -> None:
        bucket = point.shape.bucket
        limit = MaxFrames(
            module=point.module,
            degree=point.degree,
            height=bucket.height,
            width=bucket.width,
            batch=point.shape.batch,
            frames=bucket.frames - 1,
        )
        self._profile.max_frames = (*self._profile.max_frames, limit)
        print(f"{point.name} runs out of memory: no plan has it", flush=True)


def spanning_point(point: ProfilePoint, seconds: float) -> SpanningPoint:
    """A measured point over nodes, as profiles keep it."""
    bucket = point.shape.bucket
    return SpanningPoint(
        module=point.module,
        batch=point.shape.batch,
        frames=bucket.frames,
        height=bucket.height,
        width=bucket.width,
        degree=point.degree,
        nodes=point.nodes,
        seconds=seconds,
        text_tokens=point.shape.text_tokens,
    )


def footprint_of(point: ProfilePoint, profile: Profile) -> Footprint:
    """The size of a measured cascade, as its need of memory sees it."""
    return profile.footprint(point.module, [point.shape.samples], point.degree)


def _over(nodes: int) -> str:
    return f" over {nodes} nodes" if nodes > 1 else ""


def _handed(times: PointTimes) -> str:
    """What members of a bag have handed each other first."""
    if not times.gathered_bytes:
        return ""
    mib = times.gathered_bytes / MIB
    return f"  {1e3 * times.gathered_s:.1f} ms of it for {mib:.3g} MiB from the others"


def refuse_other(error: Exception) -> None:
    """Raises what is no lack of memory, and lets go of what the error holds."""
    from actors.worker.meter import ran_out, release

    if not (isinstance(error, MemoryError) or ran_out(error)):
        raise error
    release(error)


def with_degrees(profile: Profile) -> None:
    """Encoders may run at the degrees at which they were measured: any is legal for them, and only these are priced."""
    for module in MODULES:
        if module != "dit":
            measured = {degree for name, *_, degree in profile.measured if name == module}
            profile.degrees[module] = tuple(sorted({1} | measured))


def is_known(point: Measurable, profile: Profile) -> bool:
    """Whether a profile has it already, or a point as large as it ran out of memory."""
    if isinstance(point, ProfilePoint):
        found = {one.key for one in profile.over_nodes} if point.nodes > 1 else profile.measured
        return point.key in found or any(limit.forbids(point.key) for limit in profile.max_frames)
    if isinstance(point, LongestClip | LargestBatch):
        return point.next_point(profile) is None
    place = (point.degree, point.nodes)
    if point.kind == "update":
        return any((one.workers, one.nodes) == place for one in profile.update.points)
    if point.kind == "exchange":
        return any((one.workers, one.nodes) == place for one in profile.exchanges)
    return any(one.nodes == point.nodes for one in profile.handoffs)
