"""Times cascades of the DiT with blocks as written and compiled, for `model.dit.compile: auto`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

from actors.plan.costs.compiling import BothWays, CompilingPoint
from app.device.measuring import SoloBench, refuse_other
from app.device.points import ProfiledShape

MOST_SHAPES = 4
_REPEATS = 3  # timed runs of each, at least


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
