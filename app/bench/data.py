"""`heddle bench data`: indexing and decoding against other loaders, on the same clips and the same plan, in one run.

Every way of loading runs in a process of its own, in turns; each is judged by clips per CPU-second of its whole process
tree (wall clock is given too), as the median over rounds, and by its ratio to the plain PyAV loop, which runs before
and after every other way: what a CPU-second is worth on a shared machine changes within a minute. All decode the same
frames of the same clips to the same sizes, by the same filter, in two processes at a time (two that share a core are
slower per CPU-second than one), save the way that decodes everything, as Open-Sora does. Engines decode ahead: they are
measured from full look-ahead to full look-ahead, after an epoch in which their processes have come up. The CPU of the
Ray engine is that of everything the session started: feeder, decode workers, Ray Data's actors, raylet, GCS, agents;
the ratio is also given without those services that take CPU by the second, whatever the cluster does.

The clips are H.264 of the bit rate of real footage (2.2 Mbit/s at 720p), six seconds long, and the bucket is the one
that Wan2.1 is trained with at 480p: 81 frames at 16 per second. The first batch, whose wait is that of a start, has
fewer (`--first-bucket`); it is taken from a shard of `--first-mib`, on a Ray that has run a dataset before, without an
index at hand.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from app.settings.out_files import check_writable
from ops.code_path import ROOT

PLAIN = "plain PyAV loop"
DECODERS = (
    PLAIN,
    "decode everything",
    "webdataset loader",
    "torch DataLoader, same plan",
    "Heddle, process pool",
    "Heddle, Ray Data",
)
INDEXERS = ("index, headers only", "av.open probe")
FIRST = ("first batch, Heddle on Ray", "first batch, ray.data.read_webdataset")
MEMORY = "memory over many clips"
SMALL = (96, 128, 24)  # height, width and frames of the clips of the memory test, which are many


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One way of loading in one round."""

    way: str = ""
    clips: int
    wall_s: float
    cpu_s: float  # of the process and all its descendants
    memory_mib: float  # largest private memory of one process of the tree
    services_s: float = 0.0  # part of cpu_s: services of a Ray cluster, which run in any case
    course_mib: tuple[float, ...] = ()  # largest private memory at equal intervals

    @property
    def rate(self) -> float:
        return self.clips / max(self.cpu_s, 1e-9)


def run(
    clips: Annotated[int, typer.Option(help="Made, in two shards.", min=1)] = 48,
    rounds: Annotated[int, typer.Option(help="Measured turns of every way.", min=1)] = 3,
    height: Annotated[int, typer.Option(help="Pixels of a clip.", min=16)] = 720,
    width: Annotated[int, typer.Option(help="Pixels of a clip.", min=16)] = 1280,
    frames: Annotated[int, typer.Option(help="Of a clip.", min=1)] = 144,
    bucket: Annotated[str, typer.Option(help="What clips are cut to, FRAMESxHEIGHTxWIDTH.")] = "81x480x832",
    batch: Annotated[int, typer.Option(help="Clips of a batch.", min=1)] = 2,
    first_mib: Annotated[int, typer.Option(help="Size of a set whose first batch is timed; 0: none.", min=0)] = 1024,
    first_bucket: Annotated[str, typer.Option(help="What its clips are cut to.")] = "33x480x832",
    long: Annotated[int, typer.Option(help="Clips of the memory test; 0: none.", min=0)] = 10_000,
    folder: Annotated[str, typer.Option(help="Keeps the sets for the next time.")] = "",
    out: Annotated[Path | None, typer.Option(help="Markdown to write.")] = None,
    decoding: Annotated[bool, typer.Option(help="Whether decoders are compared.")] = True,
) -> None:
    """Indexing and decoding against other loaders on the same plan; prints Markdown."""
    check_writable([out])
    from app.bench.data_set import make_set

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(folder or scratch)
        make_set(root / "clips", clips, height, width, frames)
        turns = [PLAIN, *(one for way in DECODERS[1:] for one in (way, PLAIN))] if decoding else []
        costs = [_measure(way, root / "clips", bucket, batch) for _ in range(rounds) for way in turns]
        if first_mib:
            make_set(root / "large", 0, height, width, frames, shards=1, mib=first_mib)
            costs += [
                _measure(way, root / "large", first_bucket, batch) for _ in range(rounds) for way in (*INDEXERS, *FIRST)
            ]
        if long:
            make_set(root / "small", min(long, 1000), *SMALL)
            costs.append(_measure(MEMORY, root / "small", "9x64x96", 16, long))
    text = table(
        costs,
        f"{clips} clips of {height}x{width}, {frames} frames, H.264; bucket {bucket}, batch {batch}; "
        f"{rounds} rounds; index and first batch ({first_bucket}) of a shard of {first_mib} MiB",
    )
    print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")


def table(costs: list[Cost], title: str) -> str:
    """Markdown: medians over rounds, and the median ratio to the plain loops before and after, or to the rival of the
    same round."""
    return "\n".join([title, *_decoding(costs), *_indexing(costs), *_first(costs), *_memory(costs)])


def _decoding(costs: list[Cost]) -> list[str]:
    if not _of(costs, PLAIN):
        return []
    lines = ["", "| way | clips per CPU-s | wall clips/s | x plain loop (CPU) |", "|---|---|---|---|"]
    for way in DECODERS:
        mine = _of(costs, way)
        wall = statistics.median(m.clips / m.wall_s for m in mine)
        beside = "1" if way == PLAIN else f"{_beside_plain(costs, way, lambda cost: cost.rate):.2f}"
        lines.append(f"| {way} | {statistics.median(m.rate for m in mine):.2f} | {wall:.2f} | {beside} |")
    ours, everything = _of(costs, DECODERS[-1]), _of(costs, DECODERS[1])
    bare = _beside_plain(costs, DECODERS[-1], lambda cost: cost.clips / (cost.cpu_s - cost.services_s))
    return [
        *lines,
        "",
        f"{DECODERS[-1]}: {_median_ratio(ours, everything, lambda cost: cost.rate):.1f} x decoding "
        f"everything; {bare:.2f} x the plain loop without GCS, agents and log monitor, which take CPU "
        f"by the second",
    ]


def _indexing(costs: list[Cost]) -> list[str]:
    ours, peer = (_of(costs, way) for way in INDEXERS)
    if not ours:
        return []
    return [
        "",
        f"index: {statistics.median(c.rate for c in ours):.0f} clips per CPU-s, "
        f"{_median_ratio(ours, peer, lambda cost: cost.rate):.0f} x an av.open probe",
    ]


def _first(costs: list[Cost]) -> list[str]:
    ours, peer = (_of(costs, way) for way in FIRST)
    if not ours:
        return []
    return [
        f"first batch: {statistics.median(c.wall_s for c in ours):.2f} s, "
        f"{_median_ratio(ours, peer, lambda cost: cost.wall_s):.2f} of read_webdataset's; memory "
        f"{statistics.median(c.memory_mib for c in ours):.0f} MiB, "
        f"{_median_ratio(ours, peer, lambda cost: cost.memory_mib):.2f} of its"
    ]


def _memory(costs: list[Cost]) -> list[str]:
    return [
        f"memory of the largest process over {cost.clips} clips: "
        f"{', '.join(f'{mib:.0f}' for mib in cost.course_mib)} MiB"
        for cost in _of(costs, MEMORY)
    ]


def _of(costs: list[Cost], way: str) -> list[Cost]:
    return [cost for cost in costs if cost.way == way]


def _median_ratio(mine: list[Cost], theirs: list[Cost], figure: Callable[[Cost], float]) -> float:
    return statistics.median(figure(m) / figure(t) for m, t in zip(mine, theirs))


def _beside_plain(costs: list[Cost], way: str, figure: Callable[[Cost], float]) -> float:
    """Median of its figure over the mean of the plain loops right before and right after it."""
    ratios = []
    for number, cost in enumerate(costs):
        if cost.way == way:
            beside = [costs[n] for n in (number - 1, number + 1) if 0 <= n < len(costs) and costs[n].way == PLAIN]
            ratios.append(figure(cost) / statistics.fmean(figure(plain) for plain in beside))
    return statistics.median(ratios)


def _measure(way: str, root: Path, bucket: str, batch: int, clips: int = 0) -> Cost:
    """Run one way in a fresh process. What it prints last is its cost."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    arguments = [way, str(root), bucket, str(batch), str(clips)]
    done = subprocess.run(
        [sys.executable, "-m", "app.bench.data_ways", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"bench data: {way!r} failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    cost = Cost(**json.loads(done.stdout.strip().splitlines()[-1]))
    print(
        f"{way}: {cost.clips} clips, {cost.cpu_s:.2f} CPU-s, {cost.wall_s:.2f} s, {cost.memory_mib:.0f} MiB",
        file=sys.stderr,
        flush=True,
    )
    return cost


def timed(work: Callable[[], int], look_s: float = 0.25) -> Cost:
    """The cost of `work` in this process and its descendants, read every `look_s` seconds. `work` returns the number of
    clips."""
    from app.bench.tree import Tree

    tree = Tree(look_s)
    start = time.perf_counter()
    with tree:
        clips = work()
    return Cost(
        clips=clips,
        wall_s=time.perf_counter() - start,
        cpu_s=tree.cpu_s,
        services_s=tree.services_s,
        memory_mib=tree.memory_mib,
    )
