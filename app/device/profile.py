"""`heddle profile`: measures what the cascades of a config cost on this device, and writes a profile for planners.

    heddle profile --config configs/runs/demo.yaml --out profile.json

Every bucket is measured with synthetic pixels, random tokens and the config's own models: text, VAE and DiT on one
device and in bags of every degree that this machine has devices for, with the process groups of a run. What
runs out of memory is a limit. The file is written after every point, and a file of the same setting is continued.
Other batch sizes and degrees are predicted by the models fitted to these points.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actors.plan.costs.fit import fit_form, knapformer_constants
from actors.plan.costs.profile import MaxFrames, Profile
from actors.plan.costs.profile_json import read_profile, write_profile
from actors.plan.types import MODULES, Module, PlanError
from actors.planning.batching import TargetBatch, seconds_of
from actors.planning.learned import refuse_other, setting_of
from app.device.bag import Bag, degrees_here
from app.device.bench import Bench
from app.device.choice import device_name, memory_gib, pick_device
from app.device.points import PointTimes, ProfiledShape
from app.device.write_limits import write_limits
from app.inputs.batches import with_limits
from app.settings.config import RunConfig, from_here
from data.buckets import BucketTable, planned_batch
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.typed import ConfigError

SWEPT_TOKENS = 20_000
_EXCHANGES = (2**20, 2**25)  # bytes of an all-to-all: latency, and bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePoint:
    """A cascade to measure."""

    module: Module
    shape: ProfiledShape
    degree: int = 1

    @property
    def key(self) -> tuple[str, int, int, int, int, int]:
        """As profiles name it."""
        bucket = self.shape.bucket
        return self.module, self.shape.batch, bucket.frames, bucket.height, bucket.width, self.degree

    @property
    def pixels(self) -> int:
        bucket = self.shape.bucket
        return self.shape.batch * bucket.frames * bucket.area


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
) -> Profile:
    """Measure, print the table, write `out`; with `write` also the limits of batches into the config.

    `degrees`: of the DiT, empty for all that this machine can run. `minutes`: the most informative points first, until
    the time is over; 0 measures all. `fresh`: also what `out` has already. Raises ConfigError for a device that is not
    there, for an `out` of another setting, and for a config that cannot be edited.
    """
    import torch

    from ops.models.folders import resolve

    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out} cannot be written; give a file in a folder that exists.")
    config = from_here(RunConfig.load(path, overrides))
    model, geometry = resolve(config.model)
    target = pick_device(device)
    torch.set_num_threads(config.workers.torch_threads)
    profile = Profile.from_flops(
        model.dit,
        model.vae,
        model.text,
        geometry,
        model.image,
        gpu_memory_gib=memory_gib(target),
        degrees=config.planner.degrees,
        device=device_name(target),
    )
    profile.setting = setting_of(model, profile.device if target.type == "cuda" else "cpu")
    profile.source = f"measured by heddle profile, torch {torch.__version__}, median of {repeats}"
    bags = degrees_here(config, profile.degrees["dit"], degrees, target.type)
    sized, _ = with_limits(config, model, geometry, profile)
    points = by_information(points_of(list(shapes_of(sized, geometry, profile)), bags))
    if not fresh:
        continue_from(out, profile)
    left = [point for point in points if point.key not in profile.measured and not is_beyond(point, profile)]
    print(f"{len(points)} points on {profile.device}, degrees 1{''.join(f', {k}' for k in bags)}")
    if len(left) < len(points):
        print(f"          {len(points) - len(left)} are known from {out} already (--fresh measures them again)")
    bench = Bench(config, model, geometry, target)
    _measure(
        left, config, bench, profile, out, repeats, target.type, time.monotonic() + 60 * minutes if minutes else 0.0
    )
    _save(profile, out)
    _print_fits(profile, model)
    print(f"profile   {out}")
    _limits(config, path, model, geometry, profile, write)
    return profile


def points_of(shapes: Sequence[ProfiledShape], bags: Sequence[int]) -> list[ProfilePoint]:
    """Every module alone, and its largest batches in bags. Captions are dealt whole: a bag has one for every member."""
    found = [ProfilePoint(module=module, shape=shape) for module in MODULES for shape in shapes]
    largest: dict[object, ProfiledShape] = {}
    for shape in shapes:
        known = largest.get(shape.bucket)
        largest[shape.bucket] = shape if known is None or known.batch < shape.batch else known
    return found + [
        ProfilePoint(module=module, shape=shape, degree=degree)
        for module in MODULES
        for degree in bags
        for shape in largest.values()
        if module != "text" or shape.batch >= degree
    ]


def with_degrees(profile: Profile) -> None:
    """Encoders may run at the degrees at which they were measured: any is legal for them, and only these are priced."""
    for module in MODULES:
        if module != "dit":
            measured = {degree for name, *_, degree in profile.measured if name == module}
            profile.degrees[module] = tuple(sorted({1} | measured))


def by_information(points: Sequence[ProfilePoint]) -> list[ProfilePoint]:
    """The order in which a fit learns most: of every module and degree the smallest and the largest first, then what
    lies in the middle of known ones; one of each at a time."""
    lines: dict[tuple[str, int], list[ProfilePoint]] = {}
    for point in sorted(points, key=lambda one: (one.pixels, one.shape.batch)):
        lines.setdefault((point.module, point.degree), []).append(point)
    halved = [[line[n] for n in _halving(len(line))] for line in lines.values()]
    rounds = range(max(map(len, halved), default=0))
    return [line[number] for number in rounds for line in halved if number < len(line)]


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
        profile.measure(key, seconds, before.peak_gib.get(key))
    profile.max_frames = before.max_frames


def _measure(
    points: Sequence[ProfilePoint],
    config: RunConfig,
    bench: Bench,
    profile: Profile,
    out: Path,
    repeats: int,
    device: str,
    until: float,
) -> None:
    """Measure the points but those that surely run out of memory, until the time is over (monotonic; 0: never)."""
    bags: dict[int, Bag] = {}

    def found_in_bag(point: ProfilePoint) -> PointTimes:
        if point.degree not in bags:
            bags[point.degree] = Bag(config, point.degree, device)
            _print_exchange(bags[point.degree])
        return bags[point.degree].measure(point.module, point.shape, repeats)

    def found(point: ProfilePoint) -> PointTimes:
        if point.degree == 1:
            return bench.measure(point.module, point.shape, repeats)
        try:
            return found_in_bag(point)
        except MemoryError:
            _close(bags, point.degree)
            if device != "cuda":
                raise
        bench.rest()  # its modules lie on the first GPU beside those of a member
        return found_in_bag(point)

    try:
        for number, point in enumerate(points):
            if until and time.monotonic() > until:
                print(f"          the time is over: {len(points) - number} points are left; call again to continue")
                break
            if is_beyond(point, profile):
                continue
            try:
                times = found(point)
            except (MemoryError, RuntimeError) as error:
                _ran_out(point, error, profile)
                _close(bags, point.degree)
            else:
                profile.measure(point.key, times.median, times.peak_gib)
                _print_point(point, times)
            _save(profile, out)
    finally:
        for bag in bags.values():
            bag.close()


def _close(bags: dict[int, Bag], degree: int) -> None:
    if (bag := bags.pop(degree, None)) is not None:
        bag.close()


def is_beyond(point: ProfilePoint, profile: Profile) -> bool:
    """Whether it is as large as one that ran out of memory."""
    return any(limit.forbids(*point.key) for limit in profile.max_frames)


def _ran_out(point: ProfilePoint, error: Exception, profile: Profile) -> None:
    """A limit of the profile. Raises what is no lack of memory."""
    from actors.worker.meter import ran_out, release

    if not (isinstance(error, MemoryError) or ran_out(error)):
        raise error
    release(error)
    bucket = point.shape.bucket
    limit = MaxFrames(
        module=point.module,
        degree=point.degree,
        height=bucket.height,
        width=bucket.width,
        batch=point.shape.batch,
        frames=bucket.frames - 1,
    )
    profile.max_frames = (*profile.max_frames, limit)
    print(f"{_name(point)} runs out of memory: no plan has it", flush=True)


def _save(profile: Profile, out: Path) -> None:
    if not profile.measured:
        return
    with_degrees(profile)
    torn = out.with_name(f"{out.name}.torn")
    write_profile(profile, torn)
    os.replace(torn, out)


def _name(point: ProfilePoint) -> str:
    bucket, bag = point.shape.bucket, f" sp{point.degree}" if point.degree > 1 else ""
    return f"{point.module:4}  {bucket.frames:4d}f {bucket.height}x{bucket.width}  b{point.shape.batch:<4d}{bag}"


def _print_point(point: ProfilePoint, found: PointTimes) -> None:
    peak = f"  {found.peak_gib:6.2f} GiB" if found.peak_gib else ""
    print(f"{_name(point)} {found.median:9.4f} s  spread {100 * found.spread:.0f}%{peak}", flush=True)


def _print_exchange(bag: Bag) -> None:
    speeds = ", ".join(f"{bag.exchange(size) / 1e9:.2f} GB/s for {size / 2**20:.0f} MiB" for size in _EXCHANGES)
    print(f"a2a   all-to-all of {bag.degree}: {speeds} of a member", flush=True)


def shapes_of(config: RunConfig, geometry: Geometry, profile: Profile) -> Iterator[ProfiledShape]:
    """Every bucket of every segment at batch 1 and at its planned batch size, by this profile where it is timed; of
    long samples at the powers of two between them, too (AdaptiveLoad's throughput sweep, sec. 3.2)."""
    timed = TargetBatch(profile=profile, geometry=geometry)
    stages = [(config.data.buckets, config.data.batch)]
    stages += [(s.buckets or config.data.buckets, s.batch or config.data.batch) for s in config.data.segments]
    seen = set()
    for buckets, limits in stages:
        table = BucketTable.build(buckets, geometry)
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
    open_config = replace(config, data=replace(config.data, batch=wanted, segments=()))
    try:
        found, fit = with_limits(open_config, model, geometry, profile)
    except ConfigError as error:
        if write:
            raise
        print(f"batches   {error}")
        return
    batch = found.data.batch
    assert fit is not None
    print(
        f"batches   seconds = {fit.coefficients[0]:.4g} + {fit.coefficients[1]:.4g} B S^{fit.exponent:g}, R^2 "
        f"{fit.r2:.3f}, worst residual {100 * fit.worst:.0f}%; M_mem {batch.memory_tokens:,.0f} tokens, M_comp "
        f"{batch.compute:.4g} for {seconds_of(batch, fit):.3g} s a batch"
        + ("; the fit is poor, and so are these limits" if fit.poor else "")
    )
    if write:
        write_limits(path, batch)
        print(f"written   data.batch of {path}")


def _print_fits(profile: Profile, model: ModelConfig) -> None:
    for module in MODULES:
        if fit := profile.model_of(module):
            quality = f"R^2 {fit.r2:.3f}, worst residual {100 * fit.worst:.0f}%"
            print(f"{module:4}  missing points: {fit.source}{'' if fit.poor else f', {quality}'}")
    loads, seconds = profile.points("dit")
    if len(loads) > 1:
        try:
            _, gamma = knapformer_constants(fit_form("knapformer", loads, seconds, ""), model.dit.dim)
            print(f"      gamma of KnapFormer (attention FLOPs cost so much of linear ones): {gamma:.2f}")
        except ValueError as error:
            print(f"      gamma of KnapFormer: {error}")
    for note in profile.notes:
        print(f"note: {note}")
