"""`heddle profile`: measures what the cascades of a config cost on this device, and writes a profile for planners.

    heddle profile --config configs/runs/demo.yaml --out profile.json

Every bucket is measured with synthetic pixels, random tokens and the config's own models: text, VAE and DiT on one
device and in bags of every degree that this machine has devices for, with the process groups of a run; the end of a
step by the run's engine; all-to-alls; handoffs from one worker to another through Ray's object store. On a Ray cluster
of several nodes cascades, the end of a step, all-to-alls and handoffs are measured across nodes, too. What runs out of
memory is a limit. On a GPU, and on a CPU whose workers have a limit (`workers.memory_gib`), the largest batch and the
longest clip that fit are searched for, and what cascades take of memory is counted; with `--minutes` larger batches are
tried on any CPU. With `model.dit.compile: auto` the DiT of some buckets is timed with compiled blocks and with blocks
as written before all else, and everything is then measured the faster way. The file is written after every point, and a
file of the same setting is continued. Other batch sizes and degrees are predicted by the models fitted to these points.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.feed.first_sizes import segments_of
from actors.plan.costs.compiling import BothWays
from actors.plan.costs.exchange import exchange_speed
from actors.plan.costs.fit import POOR_RESIDUAL, RESIDUAL_POINTS, fit_form, knapformer_constants
from actors.plan.costs.handoff import Handoff, estimate_of
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.costs.spanning import OVERLAP
from actors.plan.types import MODULES, Module, PlanError
from actors.planning.batching import TargetBatch, seconds_of
from actors.planning.demand import clips_of
from actors.planning.forecasts import forecast
from actors.planning.learned import refuse_other, setting_of
from actors.planning.options import tell_updates
from app.device.bag import degrees_here
from app.device.bench import Bench
from app.device.both_ways import MOST_SHAPES, measured_both_ways
from app.device.choice import device_name, pick_device
from app.device.measuring import Measurable, Measuring, ProcessBags, is_known
from app.device.over_nodes import LentRay, MeasuredCluster
from app.device.points import LargestBatch, LongestClip, ProfiledShape, ProfilePoint, SideFigure
from app.device.write_limits import write_limits
from app.inputs.batches import with_limits
from app.inputs.compiling import as_written_because, compiling, other_torch, with_compile
from app.inputs.limits import largest_batches, longest_clips
from app.settings.config import RunConfig, from_here
from app.settings.out_files import check_writable
from data.buckets import planned_batch
from data.types import Bucket
from ops.counted import counted
from ops.degrees import MOST_DEGREE, SequenceSetting
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.models.folders import tiling_of
from ops.typed import ConfigError

if TYPE_CHECKING:
    import torch

SWEPT_TOKENS = 20_000
_LONGER = 16  # times the longest bucket: longer clips are not tried
_LARGER = 16  # times the planned batch: larger ones are not tried
_WIDE = 0.5  # a spread of runs that says that the machine did something else meanwhile
_JITTER_S = 1e-3  # unless they differ by less than this
_FIXED = 0.5  # of a batch's seconds: above this a line says what does not grow with it


def run_profile(
    path: Path,
    overrides: Sequence[str],
    out: Path,
    repeats: int = 3,
    device: str = "auto",
    write: bool = False,
    degrees: Sequence[int] = (),
    minutes: float = 0.0,
    fresh: bool = False,
    ray: LentRay | None = None,
) -> Profile:
    """Measure, print the table, write `out`; with `write` also the limits of batches into the config.

    `degrees`: of the DiT, empty for all that this machine can run. `minutes`: the most informative points first, until
    the time is over; 0 measures all. `fresh`: also what `out` has already. `ray`: for handoffs, and for bags over the
    nodes of a cluster; None leaves them out. Raises ConfigError for a device that is not there, for an `out` of another
    setting, and for a config that cannot be edited.
    """
    import torch

    from ops.models.folders import resolve

    check_writable([out])
    began, config = time.monotonic(), from_here(RunConfig.load(path, overrides))
    target = pick_device(device)
    torch.set_num_threads(config.workers.torch_threads)
    config, both_ways = with_faster_way(config, target, out, repeats, fresh)
    model, geometry = resolve(config.model)
    profile = Profile.from_flops(
        model.dit,
        model.vae,
        model.text,
        geometry,
        model.image,
        tiling_of(model.vae),
        degrees=config.planner.degrees or usual_degrees(model, config.planner.sequence, degrees),
        device=device_name(target),
    )
    profile.setting = setting_of(model, profile.device if target.type == "cuda" else "cpu", config.train)
    profile.both_ways = both_ways
    profile.source = f"measured by heddle profile, torch {torch.__version__}, median of {repeats}"
    legal = profile.degrees["dit"]
    cluster = None if ray is None else MeasuredCluster.of(ray, config, legal, degrees, target.type)
    over = {} if cluster is None else {degree: len(set(nodes)) for degree, nodes in cluster.bags.items()}
    bags = degrees_here(config, legal, degrees, target.type, over)
    sized, _ = with_limits(config, model, geometry, profile)
    shapes = list(shapes_of(sized, geometry, profile))
    handoffs = () if cluster is None else cluster.handoffs(config.workers.max, target.type)
    points = by_information(points_of(shapes, bags, over), figures_of(config, bags, over, handoffs))
    limited = target.type == "cuda" or bool(config.workers.memory_gib)  # else no limit belongs to one worker
    if limited:
        clips, cuda = clips_of(config.data, geometry), target.type == "cuda"
        profile.expect_needs(forecast(model, geometry, config.train, clips, legal, cuda).needs)
    if limited or minutes:
        points += largest_of(shapes, bags)
    if limited:
        points += longest_of(shapes, bags)
    device = "" if target.type == "cpu" else profile.device
    tell_updates(profile, config.train, model, device, config.workers.memory_gib)
    if not fresh:
        continue_from(out, profile)
    left = [point for point in points if not is_known(point, profile)]
    print(f"{counted(len(points), 'point')} on {profile.device}, degrees {_listed([1, *bags])}")
    if over:
        print(f"nodes     bags over nodes: degrees {_listed(over)}")
    else:
        print("nodes     all on one: what bags and handoffs cost across nodes is not measured")
    if len(left) < len(points):
        print(f"          {len(points) - len(left)} are known from {out} already (--fresh measures them again)")
    bench = Bench(config, model, geometry, target)
    together = ProcessBags(config=config, device=target.type, cluster=cluster)
    measuring = Measuring(bench, together, profile, out, repeats)
    try:
        measuring.run(left, began + 60 * minutes if minutes else 0.0)
    except (KeyboardInterrupt, SystemExit):
        if out.is_file():
            print(f"stopped   what was measured is in {out}; the same command without --fresh goes on from it")
        raise
    offer_residual(profile)
    measuring.save()
    _print_fits(profile, model)
    print(f"profile   {out}")
    _limits(config, path, model, geometry, profile, write)
    return profile


def with_faster_way(
    config: RunConfig, device: torch.device, out: Path, repeats: int, fresh: bool
) -> tuple[RunConfig, BothWays | None]:
    """The config with true or false for `model.dit.compile: auto`, and the seconds that say so: of `out`, or measured
    now, before all other points, which are then those of that way. A file that has begun keeps its way."""
    from ops.models.folders import resolve

    if config.model.dit.compile != "auto":
        return config, None
    model, geometry = resolve(with_compile(config, False).model)
    found = None if fresh else both_ways_of(out, model, device, config)
    why = as_written_because(config, model, device.type)
    if found is None and not why:
        found, why = _timed_both_ways(config, model, geometry, device, repeats)
    print(f"compile   model.dit.compile: auto is {'true' if found and found.compiled else 'false'}: {found or why}")
    return with_compile(config, found is not None and found.compiled), found


def both_ways_of(out: Path, model: ModelConfig, device: torch.device, config: RunConfig) -> BothWays | None:
    """What a file that is continued says, if it is of this model, device and torch. Whether the rest of it may be
    continued is asked later."""
    if not out.is_file():
        return None
    try:
        before = read_profile(out)
        if before.both_ways is None or other_torch(before.both_ways):
            return None
        here = device_name(device) if device.type == "cuda" else "cpu"
        refuse_other(before, setting_of(compiling(model, before.both_ways.compiled), here, config.train), str(out))
    except PlanError:
        return None
    return before.both_ways


def _timed_both_ways(
    config: RunConfig, model: ModelConfig, geometry: Geometry, device: torch.device, repeats: int
) -> tuple[BothWays | None, str]:
    """Some buckets' planned batches, the shortest and the longest among them; or why there are none."""
    degrees = config.planner.degrees or usual_degrees(model, config.planner.sequence, ())
    assumed = Profile.from_flops(model.dit, model.vae, model.text, geometry, model.image, degrees=degrees)
    sized, _ = with_limits(config, model, geometry, assumed)
    planned = sorted(_planned(shapes_of(sized, geometry, assumed)).values(), key=_pixels)
    shapes = [planned[number] for number in _halving(len(planned))][:MOST_SHAPES]
    from ops.packed.compiled_blocks import check_compiler

    try:
        check_compiler(device)
    except ValueError as error:
        return None, str(error)
    found = measured_both_ways(
        lambda compiled: Bench(config, compiling(model, compiled), geometry, device), shapes, repeats
    )
    return found, "" if found is not None else "no cascade fits alone on the device"


def _planned(shapes: Iterable[ProfiledShape]) -> dict[Bucket, ProfiledShape]:
    """The largest batch of every bucket."""
    planned: dict[Bucket, ProfiledShape] = {}
    for shape in shapes:
        if shape.bucket not in planned or planned[shape.bucket].batch < shape.batch:
            planned[shape.bucket] = shape
    return planned


def _pixels(shape: ProfiledShape) -> int:
    return shape.batch * shape.bucket.frames * shape.bucket.area


def offer_residual(profile: Profile) -> None:
    """Have trees explain what the fit of the VAE leaves (Arachne sec. IV-B), where points are many enough and the
    package is here. They stay where they help at points that they have not seen."""
    points = sum(key[0] == "vae" for key in profile.measured)
    if profile.residual != "none" or points < RESIDUAL_POINTS:
        return
    if importlib.util.find_spec("xgboost") is None:
        print(f"vae   {points} points are enough for trees on top of its fit: install the extra [xgboost] for them")
        return
    profile.use_residual("xgboost")
    found = profile.model_of("vae")
    if found is None or found.residual is None:
        profile.use_residual("none")


def usual_degrees(model: ModelConfig, setting: SequenceSetting, wanted: Sequence[int]) -> tuple[int, ...]:
    """The degrees of a config that names none; `auto` also takes those that the command asks for."""
    asked = wanted if setting == "auto" else ()
    return tuple(sorted({*model.dit.degrees(MOST_DEGREE, setting), *asked}))


def points_of(
    shapes: Sequence[ProfiledShape], bags: Sequence[int], over: Mapping[int, int] | None = None
) -> list[ProfilePoint]:
    """Every module alone, and its largest batches in bags; also in bags `over` nodes (their number by degree). There a
    single bucket of the DiT has its smallest batch, too: two sizes tell what a row takes from what a peer takes.
    Encoders have their largest cascade: what a bag of them sends is little, and one share of all stands for it.
    Captions are dealt whole: a bag has one for every member."""
    found = [ProfilePoint(module=module, shape=shape) for module in MODULES for shape in shapes]
    largest: dict[object, ProfiledShape] = {}
    for shape in shapes:
        known = largest.get(shape.bucket)
        largest[shape.bucket] = shape if known is None or known.batch < shape.batch else known
    inside = [
        ProfilePoint(module=module, shape=shape, degree=degree)
        for module in MODULES
        for degree in bags
        for shape in largest.values()
        if module != "text" or shape.batch >= degree
    ]
    spread = list(largest.values()) if len(largest) > 1 else [shapes[0], *shapes[1:][-1:]]
    heaviest = max(largest.values(), key=lambda shape: shape.batch * shape.bucket.frames * shape.bucket.area)
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


def continue_from(out: Path, profile: Profile) -> None:
    """Take up the points of a file that an earlier call has left. Raises ConfigError where it is of another setting."""
    if not out.is_file():
        return
    assert profile.setting is not None
    try:
        before = read_profile(out)
        refuse_other(before, profile.setting, str(out))
    except PlanError as error:
        raise ConfigError(f"{error} --out names a file that is not continued: give another, or --fresh.") from None
    for key, seconds in before.measured.items():
        profile.measure(key, seconds, before.text_tokens.get(key), before.spread.get(key))
    profile.needs.take_up(before.needs.known())
    profile.max_frames = before.max_frames
    profile.update = before.update.of_run(profile.update.kind, profile.update.weights)
    profile.exchanges = before.exchanges
    profile.count_exchange(before.exchange_s, before.exchange_calls)
    profile.count_over_nodes(before.over_nodes)
    profile.count_handoffs(before.handoffs)


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


def _limits(
    config: RunConfig, path: Path, model: ModelConfig, geometry: Geometry, profile: Profile, write: bool
) -> None:
    """Show M_mem, M_comp and p of these measurements (AdaptiveLoad sec. 3.2), and put them into the config. Raises
    ConfigError where they are to be put there and the measurements give none."""
    wanted = replace(config.data.batch, auto=True, compute=0.0, from_table=False)
    open_config = replace(config, data=replace(config.data, batch=wanted))
    if not config.data.tables_of_batch:
        told = "every segment of data.segments has a batch of its own: data.batch limits nothing"
        if write:
            raise ConfigError(f"{told}, and --write has no place for the limits. Leave it out.")
        print(f"batches   {told}")
        return
    try:
        found, fit = with_limits(open_config, model, geometry, profile)
    except ConfigError as error:
        if write:
            raise
        print(f"batches   {error}")
        return
    batch = found.data.batch
    assert fit is not None
    fixed, slope = fit.coefficients
    print(
        f"batches   seconds = {fixed:.4g} + {slope:.4g} B S^{fit.exponent:g}, {fit.quality}; M_mem "
        f"{batch.memory_tokens:,.0f} tokens, M_comp {batch.compute:.4g} for {seconds_of(batch, fit):.3g} s a batch"
        + ("; the fit is poor, and so are these limits" if fit.worst > POOR_RESIDUAL else "")
    )
    share = fixed / seconds_of(batch, fit)
    if share > _FIXED:
        print(
            f"batches   {share:.0%} of that does not grow with the batch (launches, or what else every cascade takes): "
            f"larger batches cost little more, and data.batch.target_s above {fixed:.3g} s makes them"
        )
    if write:
        write_limits(path, batch)
        print(f"written   data.batch of {path}")


def _print_fits(profile: Profile, model: ModelConfig) -> None:
    for module in MODULES:
        if fit := profile.model_of(module):
            told = fit.unseen is not None or not fit.poor
            print(f"{module:4}  missing points: {fit.source}{f', {fit.quality}' if told else ''}")
    _print_figures(profile)
    for line in [*longest_clips(profile), *largest_batches(profile)]:
        print(f"limit {line}")
    loads, seconds = profile.points("dit")
    if len(loads) > 1:
        try:
            found = fit_form("knapformer", loads, seconds, "")
            _, gamma = knapformer_constants(found, model.dit.dim)
            doubt = f"; not to be trusted, its fit is {found.worst:.0%} off" if found.worst > POOR_RESIDUAL else ""
            print(f"      gamma of KnapFormer (attention FLOPs cost so much of linear ones): {gamma:.2f}{doubt}")
        except ValueError as error:
            print(f"      gamma of KnapFormer: {error}")
    for line in need_lines(profile):
        print(line)
    wide = [key for key, spread in profile.spread.items() if spread > _WIDE]
    busy = [key for key in wide if profile.spread[key] * profile.measured.get(key, 1.0) > _JITTER_S]
    if busy:
        print(
            f"note: runs of {len(busy)} of {len(profile.spread)} points differ by more than {_WIDE:.0%} of their "
            f"median: was the machine busy? --fresh measures them again"
        )
    if len(wide) > len(busy):
        print(
            f"note: runs of {len(wide) - len(busy)} of {len(profile.spread)} points differ by more than {_WIDE:.0%} of "
            f"their median, but by less than {1e3 * _JITTER_S:g} ms: so short a cascade waits for its launches, which "
            f"vary"
        )
    for note in profile.notes:
        print(f"note: {note}")


def need_lines(profile: Profile) -> list[str]:
    """What cascades need of a worker's memory beside the states, by measured peaks: one line for each kind."""
    units = {"dit": "row", "text": "token", "vae": "clip"}
    return [
        f"needs {module} {kind}: {round(line.fixed_gib, 3) + 0.0:.3f} GiB and {1024 * line.gib_per_unit:.4g} MiB "
        f"a {units[module]}, by {len(profile.needs.measured[module, kind])} peaks"
        for (module, kind), line in sorted(profile.needs.lines().items())
    ]


def _print_figures(profile: Profile) -> None:
    for point in profile.update.points:
        each = point.seconds / max(profile.update.weights, 1) * 1e9
        print(f"update  {counted(point.workers, 'worker')}: {point.seconds:.4f} s, {each:.3g} ns a weight")
    if found := exchange_speed(profile.exchanges):
        print(f"a2a   {found[1] / 1e9:.2f} GB/s of a member after {1e6 * found[0]:.0f} us")
    if found := exchange_speed(profile.exchanges, across=True):
        print(f"a2a   across nodes {found[1] / 1e9:.2f} GB/s of a member after {1e6 * found[0]:.0f} us")
    if profile.over_nodes:
        print(f"nodes a bag over nodes takes {profile.cross_node.factor(OVERLAP):.3g} times as long as inside one")
    if profile.cross_node.by_rows:
        row_s, peer_s = (
            profile.cross_node.fall(OVERLAP) * profile.cross_node.sending(*one) for one in ((1, 0), (0, 1))
        )
        print(
            f"nodes in plans: {1e6 * row_s:.3g} us more for a row that a member sends, {1e3 * peer_s:.3g} ms for a peer"
        )
    for nodes in sorted({point.nodes for point in profile.handoffs}):
        cost = estimate_of([point for point in profile.handoffs if point.nodes == nodes]).cost(0.0)
        if cost is not None:
            print(f"handoff  {'on two nodes' if nodes > 1 else 'on one node'}: {_handoff(cost)}")
    if profile.handoffs:
        print(f"handoff  in plans: {_handoff(profile.handoff)}")


def _handoff(cost: Handoff) -> str:
    if not cost.latency_s and not cost.gib_per_s:
        return "nothing, less than a hundredth of a usual DiT cascade"
    return (f"{cost.gib_per_s:.3g} GiB/s after " if cost.gib_per_s else "") + f"{1e3 * cost.latency_s:.2f} ms"


def _listed(degrees: Iterable[int]) -> str:
    return ", ".join(map(str, degrees))
