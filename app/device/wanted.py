"""What `heddle profile` measures, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from actors.feed.first_sizes import segments_of
from actors.plan.costs.profile import Profile
from actors.plan.types import MODULES, Module
from actors.planning.batching import TargetBatch
from app.device.measuring import Measurable
from app.device.points import LargestBatch, LongestClip, ProfiledShape, ProfilePoint, SideFigure
from app.settings.config import RunConfig
from data.buckets import planned_batch
from data.types import Bucket
from ops.degrees import MOST_DEGREE, SequenceSetting
from ops.geometry import Geometry
from ops.models.config import ModelConfig

SWEPT_TOKENS = 20_000
_LONGER = 16  # times the longest bucket: longer clips are not tried
_LARGER = 16  # times the planned batch: larger ones are not tried


def usual_degrees(model: ModelConfig, setting: SequenceSetting, wanted: Sequence[int]) -> tuple[int, ...]:
    """The degrees of a config that names none; `auto` also takes those that the command asks for."""
    asked = wanted if setting == "auto" else ()
    return tuple(sorted({*model.dit.degrees(MOST_DEGREE, setting), *asked}))


def shapes_of(config: RunConfig, geometry: Geometry, profile: Profile) -> Iterator[ProfiledShape]:
    """Every bucket of every segment at batch 1 and at its planned batch size, by this profile where it is timed; of
    long samples at the powers of two between them, too (AdaptiveLoad's throughput sweep, sec. 3.2)."""
    timed = TargetBatch(profile=profile, geometry=geometry)
    seen = set()
    for _, table, limits in segments_of(config.data, geometry):
        for bucket in table.buckets:
            size, _ = planned_batch(table, bucket, limits, geometry, timed)
            tokens = limits.text_tokens + geometry.tokens(bucket.frames, bucket.height, bucket.width)
            between = [2**n for n in range(1, size.bit_length()) if 2**n < size] if tokens >= SWEPT_TOKENS else []
            for batch in sorted({1, *between, size}):
                shape = ProfiledShape(batch=batch, bucket=bucket, text_tokens=limits.text_tokens)
                if shape not in seen:
                    seen.add(shape)
                    yield shape


def points_of(
    shapes: Sequence[ProfiledShape], bags: Sequence[int], over: Mapping[int, int] | None = None
) -> list[ProfilePoint]:
    """Every module alone, and its largest batches in bags; also in bags `over` nodes (their number by degree). There a
    single bucket of the DiT has its smallest batch, too: two sizes tell what a row takes from what a peer takes.
    Encoders have their largest cascade: what a bag of them sends is little, and one share of all stands for it.
    Captions are dealt whole: a bag has one for every member."""
    found = [ProfilePoint(module=module, shape=shape) for module in MODULES for shape in shapes]
    largest = _planned(shapes)
    inside = [
        ProfilePoint(module=module, shape=shape, degree=degree)
        for module in MODULES
        for degree in bags
        for shape in largest.values()
        if module != "text" or shape.batch >= degree
    ]
    spread = list(largest.values()) if len(largest) > 1 else [shapes[0], *shapes[1:][-1:]]
    heaviest = max(largest.values(), key=_pixels)
    most = max(largest.values(), key=lambda shape: shape.batch)
    widest: dict[Module, list[ProfiledShape]] = {"dit": spread, "vae": [heaviest], "text": [most]}
    spanning = [
        ProfilePoint(module=module, shape=shape, degree=degree, nodes=nodes)
        for degree, nodes in (over or {}).items()
        for module in MODULES
        for shape in widest[module]
        if module != "text" or shape.batch >= degree
    ]
    return found + inside + spanning


def figures_of(
    config: RunConfig, bags: Sequence[int], over: Mapping[int, int] | None = None, handoffs: Sequence[int] = ()
) -> list[SideFigure]:
    """What is measured once per degree, inside a node and `over` nodes: the end of a step by the run's engine, the
    all-to-all of a bag. And `handoffs` between workers of one node, of two."""
    inside, spanning = [(degree, 1) for degree in bags], list((over or {}).items())
    updates = [(1, 1), *inside, *spanning] if config.train.sync == "flat" else []
    return [
        *(SideFigure(kind="update", degree=degree, nodes=nodes) for degree, nodes in updates),
        *(SideFigure(kind="exchange", degree=degree, nodes=nodes) for degree, nodes in [*inside, *spanning]),
        *(SideFigure(kind="handoff", degree=2, nodes=nodes) for nodes in handoffs),
    ]


def largest_of(shapes: Sequence[ProfiledShape], bags: Sequence[int]) -> list[LargestBatch]:
    """The search for the largest batch: of every bucket alone, and in bags of the one with the longest samples, as
    memory is linear in rows. The shortest samples, whose batches cost least, first."""
    ordered = sorted(
        _planned(shapes).values(), key=lambda shape: (shape.bucket.frames * shape.bucket.area, shape.bucket)
    )
    wanted = [(shape, 1) for shape in ordered] + [(ordered[-1], degree) for degree in bags]
    return [
        LargestBatch(
            bucket=shape.bucket, text_tokens=shape.text_tokens, degree=degree, most=_LARGER * degree * shape.batch
        )
        for shape, degree in wanted
    ]


def longest_of(shapes: Sequence[ProfiledShape], bags: Sequence[int]) -> list[LongestClip]:
    """The search for the longest clip of the largest pictures, at each degree; last, as it takes the longest."""
    largest = max((shape.bucket for shape in shapes), key=lambda bucket: (bucket.area, bucket.frames))
    frames, text = max(shape.bucket.frames for shape in shapes), max(shape.text_tokens for shape in shapes)
    return [
        LongestClip(
            height=largest.height, width=largest.width, text_tokens=text, degree=degree, most_frames=_LONGER * frames
        )
        for degree in (1, *bags)
    ]


def telling_batches(shapes: Iterable[ProfiledShape], most: int) -> list[ProfiledShape]:
    """Planned batches of some buckets: the smallest, the largest, and then the middle of the widest gap."""
    planned = sorted(_planned(shapes).values(), key=_pixels)
    return [planned[number] for number in _halving(len(planned))][:most]


def by_information(points: Sequence[ProfilePoint], figures: Sequence[SideFigure] = ()) -> list[Measurable]:
    """The order in which a plan learns most: of every module and degree the smallest and the largest first, then the
    figures of each degree, then what lies in the middle of known points; one of each at a time. What has a bag over
    nodes comes after the same inside a node, one degree after the other: a bag over nodes takes its workers for
    itself."""
    ends, middles = _by_halves([point for point in points if point.nodes == 1])
    found: list[Measurable] = [*ends, *(one for one in figures if one.nodes == 1)]
    both: list[ProfilePoint | SideFigure] = [*points, *figures]
    for degree in sorted({one.degree for one in both if one.nodes > 1}):
        first, later = _by_halves([point for point in points if point.nodes > 1 and point.degree == degree])
        found += [*first, *(one for one in figures if one.nodes > 1 and one.degree == degree)]
        middles += later
    return [*found, *middles]


def _planned(shapes: Iterable[ProfiledShape]) -> dict[Bucket, ProfiledShape]:
    """The largest batch of every bucket."""
    planned: dict[Bucket, ProfiledShape] = {}
    for shape in shapes:
        if shape.bucket not in planned or planned[shape.bucket].batch < shape.batch:
            planned[shape.bucket] = shape
    return planned


def _pixels(shape: ProfiledShape) -> int:
    return shape.batch * shape.bucket.frames * shape.bucket.area


def _by_halves(points: Sequence[ProfilePoint]) -> tuple[list[ProfilePoint], list[ProfilePoint]]:
    """The ends of every module's and degree's line, and what is between them, widest gaps first."""
    lines: dict[tuple[str, int], list[ProfilePoint]] = {}
    for point in sorted(points, key=lambda one: (one.pixels, one.shape.batch)):
        lines.setdefault((point.module, point.degree), []).append(point)
    halved = [[line[n] for n in _halving(len(line))] for line in lines.values()]
    rounds = range(max(map(len, halved), default=0))
    found = [[line[number] for line in halved if number < len(line)] for number in rounds]
    return [one for of in found[:2] for one in of], [one for of in found[2:] for one in of]


def _halving(count: int) -> list[int]:
    """0, the last, and then the middle of the widest gap, again and again."""
    order = [0, count - 1] if count > 1 else list(range(count))
    gaps = [(0, count - 1)] if count > 2 else []
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle not in (low, high):
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order
