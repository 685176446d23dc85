"""`heddle bench soak`: a run under random faults against the same run undisturbed.

Faults are drawn from a seed and strike at random moments: a worker is killed, two at once, one is frozen, gets a
preemption notice, a node with all its workers is lost and another comes, keeper, planner, feeder or monitor die, the
pool is resized. At the end every step stands once in the metrics, losses equal those of the undisturbed run, parameters
are equal on all workers, and memory has not grown.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from actors.records.events import StepsLost
from app.bench.lab import OPEN_END, Lab, LabRun
from app.bench.markdown import markdown_table
from app.bench.memory import object_store_mib
from app.settings.out_files import check_writable

WORKERS = 4
FP32 = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakResult:
    """What a soak has shown. `loss_difference` is the largest relative one over all steps."""

    steps: int
    faults: dict[str, int]
    loss_difference: float
    deviating: str  # first step whose loss is not the undisturbed one's, with its weight of good samples
    equal_parameters: bool
    computed_again: int  # steps lost, then computed again from a checkpoint
    recoveries: int
    recovery_median_s: float
    recovery_worst_s: float
    rss_first_gib: float  # largest resident set of a worker in the first tenth of the steps
    rss_last_gib: float  # in the last step
    store_first_mib: float  # largest sum over all nodes after a fault, in the first quarter of the faults
    store_last_mib: float  # the same in the last quarter
    seconds: float

    @property
    def passed(self) -> bool:
        return self.loss_difference <= FP32 and self.equal_parameters


def run(
    steps: Annotated[int, typer.Option(help="Steps of the run.")] = 200,
    faults: Annotated[int, typer.Option(help="Number of faults.")] = 40,
    seed: Annotated[int, typer.Option(help="Draws kinds and moments of the faults.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON with all figures.")] = None,
) -> None:
    """Soak and print one table; exit code 1 if training was not the same."""
    check_writable([out])
    logging.getLogger("actors").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        result = soak(lab, steps, faults, seed)
    print(table(result))
    if out is not None:
        out.write_text(json.dumps(asdict(result), indent=1))
    if not result.passed:
        raise typer.Exit(1)


def soak(lab: Lab, steps: int, faults: int, seed: int) -> SoakResult:
    """Run under faults for at least `steps` steps, then as many undisturbed, and compare. Adds its own nodes."""
    started = time.time()
    for _ in range(2):
        lab.add_node(workers=WORKERS // 2)
    storm = lab.start(
        lab.config(
            f"storm{seed}",
            train={"steps": OPEN_END},
            workers={"min": 1, "max": WORKERS},
            checkpoint={"every": 20},
        )
    )
    counts, stores = _strike(lab, storm, steps, faults, random.Random(seed))
    storm.wait_for_step(steps - 1, 900)
    storm.pause()
    digests = storm.parameter_digests()
    storm.go_on()
    storm.stop()
    taken = storm.join(0).last_step + 1
    again = sum(e.lost_steps for e in storm.events if isinstance(e, StepsLost))
    if sorted(set(storm.steps())) != list(range(taken)) or len(storm.steps()) != taken + again:
        raise RuntimeError(f"steps are missing or stand twice: {storm.steps()}")
    calm = lab.start(lab.config(f"calm{seed}", train={"steps": taken}, workers={"max": 1}))
    outcome = calm.join(1800)
    if outcome.code:
        raise RuntimeError(f"the undisturbed run ended early: {outcome.reason}")
    expected = calm.losses()
    difference = max(abs(expected[m.step] - m.loss) / abs(expected[m.step]) for m in storm.metrics)
    recoveries = storm.seconds_to_recover()
    tenth, quarter = max(1, taken // 10), max(1, len(stores) // 4)
    return SoakResult(
        steps=taken,
        faults=dict(counts),
        loss_difference=difference,
        deviating=_first_deviation(storm, expected),
        equal_parameters=len(set(digests)) == 1,
        computed_again=again,
        recoveries=len(recoveries),
        recovery_median_s=statistics.median(recoveries) if recoveries else 0.0,
        recovery_worst_s=max(recoveries, default=0.0),
        rss_first_gib=max(m.rss_gib for m in storm.metrics[:tenth]),
        rss_last_gib=storm.metrics[-1].rss_gib,
        store_first_mib=max(stores[:quarter]),
        store_last_mib=max(stores[-quarter:]),
        seconds=time.time() - started,
    )


def _first_deviation(run: LabRun, expected: list[float]) -> str:
    for m in run.metrics:
        if abs(expected[m.step] - m.loss) > FP32 * abs(expected[m.step]):
            return f"step {m.step}, generation {m.generation}, good weight {m.good_weight:g}"
    return "none"


def _strike(lab: Lab, run: LabRun, steps: int, faults: int, rng: random.Random) -> tuple[Counter[str], list[float]]:
    """Inflict one fault after the other, each at a random step of its share of the run and only after recovery from the
    one before.

    Returns how many of each kind there were, and the MiB in all object stores after each.
    """
    counts: Counter[str] = Counter()
    stores: list[float] = []
    kinds = _kinds(lab, run, rng)
    for number in range(faults):
        low, high = 2 + number * (steps - 6) // faults, 2 + (number + 1) * (steps - 6) // faults
        run.wait_for_step(rng.randint(low, max(low, high - 1)), 900)
        run.wait_for(lambda: len(run.active()) >= 2, "two workers", 300)
        kind = rng.choice(list(kinds))
        generations = run.generations()
        kinds[kind]()
        counts[kind] += 1
        if kind in _ENDS_A_GENERATION:
            run.wait_for(lambda before=generations: run.generations() > before, f"answer to {kind}", 300)  # type: ignore[misc]
        stores.append(object_store_mib())
    return counts, stores


_ENDS_A_GENERATION = ("kill", "kill two", "freeze", "notice", "lose node")


def _kinds(lab: Lab, run: LabRun, rng: random.Random) -> dict[str, Callable[[], object]]:
    def some_worker() -> int:
        return rng.randrange(len(run.active()))

    def two() -> None:
        count = len(run.active())
        for index in rng.sample(range(count), min(2, count - 1)):
            run.signal_worker(index)

    def lose_node() -> None:
        homes = run.nodes_of_active()
        for node in lab.nodes:
            if node.node_id in homes and len(set(homes)) > 1:
                lab.kill_node(node)
                lab.add_node(workers=WORKERS // 2)
                return
        run.signal_worker(some_worker())  # all workers live on one node: then one of them

    return {
        "kill": lambda: run.signal_worker(some_worker()),
        "kill two": two,
        "freeze": lambda: run.signal_worker(some_worker(), signal.SIGSTOP),
        "notice": lambda: run.signal_worker(some_worker(), signal.SIGTERM),
        "lose node": lose_node,
        "planner": lambda: run.kill_actor("planner"),
        "keeper": lambda: run.kill_actor("keeper"),
        "feeder": lambda: run.kill_actor("feeder"),
        "monitor": lambda: run.kill_actor("monitor"),
        "resize": lambda: run.scale(rng.randint(2, WORKERS)),
    }


def table(result: SoakResult) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.faults.items()))
    rows = [
        ("steps, each once", str(result.steps)),
        ("faults", f"{sum(result.faults.values())}: {kinds}"),
        ("steps computed again from a checkpoint", str(result.computed_again)),
        ("largest relative difference of the loss", f"{result.loss_difference:.1e}"),
        ("first step with another loss", result.deviating),
        ("parameters equal on all workers", "yes" if result.equal_parameters else "NO"),
        (
            "seconds from a loss to the next finished step, median / worst",
            f"{result.recovery_median_s:.1f} / {result.recovery_worst_s:.1f} ({result.recoveries} recoveries)",
        ),
        (
            "largest resident set of a worker, early / late",
            f"{result.rss_first_gib:.2f} / {result.rss_last_gib:.2f} GiB",
        ),
        ("object stores of all nodes, early / late", f"{result.store_first_mib:.1f} / {result.store_last_mib:.1f} MiB"),
    ]
    return markdown_table(("soak", ""), rows)
