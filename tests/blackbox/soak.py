"""Many episodes one after the other:  python -m tests.blackbox.soak --faults 200 --seed 0 --minutes 40 --out soak.json

Prints what struck, what deviated and how long a recovery took. Exit code 1 if anything deviated. The folder of a run
that deviated is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.blackbox.compare import Truth
from tests.blackbox.episode import Episode, Result, reference
from tests.blackbox.place import Place

STEPS = 110
PER_EPISODE = 30


def soak(
    place: Place, truth: Truth, faults: int, seed: int, minutes: float = 1e9, only: Sequence[str] = ()
) -> list[Result]:
    """Episodes with seeds from `seed` on until `faults` faults struck, or the time is up."""
    deadline = time.monotonic() + minutes * 60
    found: list[Result] = []
    while (left := faults - sum(len(r.struck) for r in found)) > 0 and time.monotonic() < deadline:
        found.append(Episode(place, truth, seed + len(found), min(left, PER_EPISODE), only, deadline).play())
    return found


def table(results: Sequence[Result]) -> str:
    kinds: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {}
    for struck in (s for r in results for s in r.struck):
        kinds[struck.name] += 1
        if struck.seconds is not None:
            seconds.setdefault(struck.name, []).append(struck.seconds)
    rows = ["| fault | number | seconds to the next new step, median / worst |", "|---|---|---|"]
    for name, count in sorted(kinds.items()):
        times = seconds.get(name, [])
        took = f"{statistics.median(times):.1f} / {max(times):.1f}" if times else ""
        rows.append(f"| {name} | {count} | {took} |")
    deviations = sum(len(r.deviations) for r in results)
    worst = max((r.loss_difference for r in results), default=0.0)
    starts, took = sum(r.starts for r in results), sum(r.seconds for r in results)
    total = (
        f"{sum(kinds.values())} faults in {len(results)} runs and {starts} starts, {took:.0f} s; largest relative "
        f"difference of a loss {worst:.1e}; {deviations} deviations"
    )
    return "\n".join([*rows, "", total])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="no new fault after this time")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults to draw from")
    parser.add_argument("--folder", type=Path, help="kept; a temporary one is removed when nothing deviated")
    parser.add_argument("--out", type=Path, help="JSON with everything")
    given = parser.parse_args(arguments)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="heddle-soak-"))
    place = Place(folder, given.steps)
    try:
        results = soak(place, reference(place), given.faults, given.seed, given.minutes, given.only)
    finally:
        place.close()
    print(table(results))
    for result in results:
        for words in result.deviations:
            print(f"DEVIATION (seed {result.seed}): {words}")
    if given.out is not None:
        given.out.write_text(json.dumps([asdict(r) for r in results], indent=1), encoding="utf-8")
    deviated = any(r.deviations for r in results)
    if given.folder is None and not deviated:
        shutil.rmtree(folder, ignore_errors=True)
    elif deviated:
        print(f"kept: {folder}")
    return int(deviated)


if __name__ == "__main__":
    sys.exit(main())
