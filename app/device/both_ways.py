"""`model.dit.compile: auto` of `heddle profile`: times cascades of the DiT with blocks as written and compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from actors.plan.costs.compiling import BothWays, CompilingPoint
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.types import PlanError
from actors.planning.learned import refuse_other as refuse_other_setting
from actors.planning.learned import setting_of
from app.device.bench import Bench
from app.device.choice import device_name
from app.device.measuring import SoloBench, refuse_other
from app.device.points import ProfiledShape
from app.device.wanted import shapes_of, telling_batches, usual_degrees
from app.inputs.batches import with_limits
from app.inputs.compiling import as_written_because, compiling, other_torch, with_compile
from app.settings.config import RunConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

MOST_SHAPES = 4
_REPEATS = 3  # timed runs of each, at least


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
        refuse_other_setting(
            before, setting_of(compiling(model, before.both_ways.compiled), here, config.train), str(out)
        )
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
    shapes = telling_batches(shapes_of(sized, geometry, assumed), MOST_SHAPES)
    from ops.packed.compiled_blocks import check_compiler

    try:
        check_compiler(device)
    except ValueError as error:
        return None, str(error)
    found = measured_both_ways(
        lambda compiled: Bench(config, compiling(model, compiled), geometry, device), shapes, repeats
    )
    return found, "" if found is not None else "no cascade fits alone on the device"


def measured_both_ways(
    bench_of: Callable[[bool], SoloBench], shapes: Sequence[ProfiledShape], repeats: int
) -> BothWays | None:
    """The shapes alone on the device, first all as written, then all compiled: one model at a time. `bench_of` makes
    a bench with compiled blocks or without. None where every shape ran out of memory."""
    found: list[dict[ProfiledShape, tuple[float, float]]] = []
    for compiled in (False, True):
        bench = bench_of(compiled)
        found.append({})
        for shape in shapes:
            if compiled and shape not in found[0]:
                continue
            began = time.perf_counter()
            try:
                times = bench.measure("dit", shape, max(repeats, _REPEATS))
            except (MemoryError, RuntimeError) as error:
                refuse_other(error)
                print(f"both  {_name(shape)} runs out of memory {'compiled' if compiled else 'as written'}", flush=True)
                continue
            before = time.perf_counter() - began - sum(times.seconds)
            found[-1][shape] = min(times.seconds), before  # what else the machine does only adds
        bench.rest()
    points = [_point(shape, found[0][shape], took) for shape, took in found[1].items()]
    for shape, point in zip(found[1], points, strict=True):
        print(
            f"both  {_name(shape)} {point.as_written_s:9.4f} s as written, {point.compiled_s:9.4f} s compiled, after "
            f"{point.compiling_s:.1f} s of compiling",
            flush=True,
        )
    return BothWays(torch=version("torch").partition("+")[0], points=tuple(points)) if points else None


def _point(shape: ProfiledShape, as_written: tuple[float, float], compiled: tuple[float, float]) -> CompilingPoint:
    return CompilingPoint(
        batch=shape.batch,
        frames=shape.bucket.frames,
        height=shape.bucket.height,
        width=shape.bucket.width,
        as_written_s=as_written[0],
        compiled_s=compiled[0],
        compiling_s=round(max(compiled[1] - as_written[1], 0.0), 2),
    )


def _name(shape: ProfiledShape) -> str:
    bucket = shape.bucket
    return f"{bucket.frames:4d}f {bucket.height}x{bucket.width}  b{shape.batch:<4d}"
