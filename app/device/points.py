"""What `heddle profile` measures, and how it is timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from actors.plan.costs.point import PointKey, Samples
from actors.plan.costs.profile import Profile
from actors.plan.types import Module
from data.types import Bucket
from ops.geometry import Geometry

if TYPE_CHECKING:
    import torch

    from ops.comm.collectives import Group

_NEAR = 0.05  # of the largest batch that ran: nearer to the smallest that did not, nothing is searched


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledShape:
    """The samples of a cascade that is timed."""

    batch: int
    bucket: Bucket
    text_tokens: int

    @property
    def samples(self) -> Samples:
        return Samples.of(self.batch, self.bucket.shape, self.text_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePoint:
    """A cascade to measure: of which module, on which samples, in which bag."""

    module: Module
    shape: ProfiledShape
    degree: int = 1
    nodes: int = 1  # over which its bag is spread

    @property
    def key(self) -> PointKey:
        """As profiles name it."""
        return self.shape.samples.key(self.module, self.degree)

    @property
    def pixels(self) -> int:
        bucket = self.shape.bucket
        return self.shape.batch * bucket.frames * bucket.area

    @property
    def name(self) -> str:
        """The point's name, for a person."""
        bucket, bag = self.shape.bucket, f" sp{self.degree}" if self.degree > 1 else ""
        bag += f" over {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.module:4}  {bucket.frames:4d}f {bucket.height}x{bucket.width}  b{self.shape.batch:<4d}{bag}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFigure:
    """What else a plan counts on, to be measured once per degree. update: the end of a step, on that number of workers.
    exchange: the all-to-all of a bag. handoff: encode results from one worker to another by the object store."""

    kind: Literal["update", "exchange", "handoff"]
    degree: int
    nodes: int = 1  # of its workers


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestClip:
    """One clip of this size in a bag of this degree, as long as memory allows."""

    height: int
    width: int
    text_tokens: int
    degree: int
    most_frames: int  # longer ones are not tried

    def next_point(self, profile: Profile) -> ProfilePoint | None:
        """The clip whose success or failure halves what is not known: twice the longest that ran until one did not.
        None when no length is left between the two, or none up to `most_frames` fails."""
        geometry = profile.geometry
        ran = [
            key[2]
            for key in profile.measured
            if key[:2] == ("dit", 1) and key[3:] == (self.height, self.width, self.degree)
        ]
        low, high = max(ran, default=0), self.most_frames + 1
        limits = [limit for limit in profile.max_frames if limit.forbids(self._key(high))]
        high = min([high, *(limit.frames + 1 for limit in limits)])
        lengths = [frames for frames in clip_lengths(geometry, high - 1) if frames > low]
        if not lengths:
            return None
        wanted = (low + high) // 2 if limits else 2 * max(low, 1)
        frames = max([length for length in lengths if length <= wanted], default=lengths[0])
        shape = ProfiledShape(batch=1, bucket=Bucket(frames, self.height, self.width), text_tokens=self.text_tokens)
        return ProfilePoint(module="dit", shape=shape, degree=self.degree)

    def _key(self, frames: int) -> PointKey:
        return "dit", 1, frames, self.height, self.width, self.degree


def clip_lengths(geometry: Geometry, most: int) -> list[int]:
    """All numbers of frames up to `most` that make whole tokens, ascending."""
    stride, patch = geometry.vae_stride[0], geometry.patch[0]
    step = stride * patch
    return list(range(step - stride + 1 if geometry.causal else step, most + 1, step))


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """As many clips of this bucket in a bag of this degree as memory allows. What runs on the way is AdaptiveLoad's
    throughput sweep (sec. 3.2)."""

    bucket: Bucket
    text_tokens: int
    degree: int
    most: int  # larger batches are not tried

    def next_point(self, profile: Profile) -> ProfilePoint | None:
        """The batch whose success or failure halves what is not known: twice the largest that ran until one did not.
        None where the two are a twentieth apart, or none up to `most` fails."""
        place = (*self.bucket.shape, self.degree)
        low = max((key[1] for key in profile.measured if key[0] == "dit" and key[2:] == place), default=0)
        failed = [one.batch for one in profile.max_frames if one.forbids(("dit", one.batch, *place))]
        high = min([self.most + 1, *failed])
        if high - low <= max(1.0, _NEAR * low):
            return None
        batch = (low + high) // 2 if high <= self.most else min(2 * low, self.most)
        shape = ProfiledShape(batch=max(batch, 1), bucket=self.bucket, text_tokens=self.text_tokens)
        return ProfilePoint(module="dit", shape=shape, degree=self.degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointTimes:
    """Seconds of the timed runs of one cascade, and the GiB that it took of a member's memory beside what was there
    before, where that is counted."""

    seconds: tuple[float, ...]
    need_gib: float | None = None
    gathered_bytes: int = 0  # encode results that a member got from the others of its bag in each run
    gathered_s: float = 0.0  # that a run took for that, median

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Longest less shortest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def timed(work: Callable[[], object], device: torch.device, group: Group) -> float:
    """Seconds of one call, which all members of the group begin together: by events on the stream of a GPU."""
    import torch

    from actors.worker.stopwatch import stopwatch_of

    watch = stopwatch_of(device)
    if group.size > 1:
        group.barrier(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = watch.mark()
    work()
    ended = watch.mark()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return watch.seconds(began, ended)
