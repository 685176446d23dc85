"""What a run on a virtual cluster has shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.records.events import GenerationFormed
from app.bench.cluster.setups import SETTLED, Setup, workload
from app.bench.cluster.watching import Sample, Watching


@dataclass(frozen=True, kw_only=True, slots=True)
class Aftermath:
    """What followed a disturbance. Real seconds, but for the last."""

    what: str
    form_s: float  # from the disturbance until the next generation forms; of a join from when its workers are loaded
    step_s: float  # virtual seconds from the disturbance to the end of the step that it broke, or of the next one
    workers: int  # of the new generation


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFigures:
    """What a run has shown, of steps in which the workers stayed the same unless said otherwise."""

    workers: int
    nodes: int
    strategy: str
    steps: int  # committed, each once
    elapsed_s: float  # virtual seconds of all steps
    executed_s: float  # median virtual seconds of a step
    mean_step_s: float
    every_step_s: tuple[tuple[float, float], ...]  # executed and planned virtual seconds of all steps, in order
    samples_per_s: float  # in virtual seconds
    planned_s: float  # the same by the plan
    steps_per_hour: float
    planned_steps_per_hour: float
    idle: float
    planning_s: float  # real seconds that the controller waits for a plan, median
    calls: float  # of a step, without its ends
    dispatch_ms: float  # real, of a step
    controller_s: float  # CPU seconds of the controller's thread for a step
    process_s: float  # CPU seconds of its process, Ray's threads included
    share: float  # of a step of 10 s: the process's seconds, without Ray the thread's
    rss_mib: float  # at the end
    rss_growth_mib: float  # since step 10
    form_s: float  # real seconds to form the first generation
    recovered: tuple[Aftermath, ...] = ()
    threads_s: Mapping[str, float] = field(default_factory=dict)  # `process_s` by the names of threads, most first


class VirtualRunFailed(RuntimeError):
    """The run ended early or not at all, or a step was committed twice, never, or without some of its samples."""


def figures_of(setup: Setup, watching: Watching, alone: bool) -> ClusterFigures:
    """What was seen, in virtual seconds. Raises VirtualRunFailed unless every step was committed once and whole.
    `alone`: the controller's process runs nothing else."""
    check_steps([m.step for m in watching.steps], [m.good_weight for m in watching.steps], setup.steps)
    speed = setup.physics.speed
    calm = _calm_steps(setup, [m.generation for m in watching.steps])
    of = [watching.steps[n] for n in calm]
    executed = statistics.median(m.step_s for m in of) * speed
    counted_s = sum(m.step_s for m in of) * speed
    items = workload(setup)
    planned = statistics.median(m.predicted_s for m in of) * speed
    thread_s = _mean_growth([sample.thread_s for sample in watching.samples], calm)
    process_s = _mean_growth([sample.process_s for sample in watching.samples], calm)
    first = watching.steps[0]
    return ClusterFigures(
        workers=setup.nodes * setup.gpus,
        nodes=setup.nodes,
        strategy=setup.strategy,
        steps=len(watching.steps),
        elapsed_s=(watching.samples[-1].at - watching.samples[0].at + first.step_s) * speed,
        executed_s=executed,
        mean_step_s=counted_s / len(of),
        every_step_s=tuple((m.step_s * speed, m.predicted_s * speed) for m in watching.steps),
        samples_per_s=sum(item.batch for n in calm for item in items[n]) / counted_s,
        planned_s=planned,
        steps_per_hour=3600 / executed,
        planned_steps_per_hour=3600 / planned,
        idle=statistics.fmean(m.idle_ratio for m in of),
        planning_s=statistics.median(m.planning_s for m in of),
        calls=statistics.fmean(m.calls for m in of),
        dispatch_ms=1e3 * statistics.median(m.dispatch_s for m in of),
        controller_s=thread_s,
        process_s=process_s,
        share=(process_s if alone else thread_s) / 10.0,
        rss_mib=watching.samples[-1].rss_mib,
        rss_growth_mib=watching.samples[-1].rss_mib - watching.samples[min(10, setup.steps - 1)].rss_mib,
        form_s=next(event.seconds for _, event in watching.told if isinstance(event, GenerationFormed)),
        recovered=tuple(recoveries(watching, speed)),
        threads_s=_by_thread(watching.samples),
    )


def _calm_steps(setup: Setup, generations: Sequence[int]) -> list[int]:
    """Steps in which the workers stayed the same, after the first of each generation; all, if there are none."""
    disturbed = {one.step for one in setup.disturbances}
    found = [
        n for n in range(SETTLED, setup.steps) if generations[n - SETTLED] == generations[n] and n - 1 not in disturbed
    ]
    return found or list(range(setup.steps))


def _mean_growth(used_s: Sequence[float], steps: Sequence[int]) -> float:
    """What these steps took on average of seconds that add up in `used_s`; 0 of none."""
    return statistics.fmean([used_s[n] - used_s[n - 1] for n in steps if n] or [0.0])


def _by_thread(samples: Sequence[Sample]) -> dict[str, float]:
    """CPU seconds of a step by the names of threads that took some, those that took most first; {} of a short run."""
    first, last = samples[min(SETTLED, len(samples) - 1)], samples[-1]
    steps = len(samples) - 1 - SETTLED
    if steps < 1:
        return {}
    found = {name: (s - first.threads_s.get(name, 0.0)) / steps for name, s in last.threads_s.items()}
    return {name: s for name, s in sorted(found.items(), key=lambda one: -one[1]) if s > 0}


def check_steps(steps: Sequence[int], weights: Sequence[float], wanted: int) -> None:
    """Raises VirtualRunFailed unless the steps are 0 to `wanted` - 1 in order, each with all of its samples."""
    if list(steps) != list(range(wanted)):
        raise VirtualRunFailed(f"committed were steps {list(steps)}, not each of 0 to {wanted - 1} once.")
    for step, weight in zip(steps, weights, strict=True):
        if abs(weight - 1.0) > 1e-5:
            raise VirtualRunFailed(f"step {step} was committed with samples of weight {weight:g} of 1.")


def recoveries(watching: Watching, speed: float) -> list[Aftermath]:
    """What followed each disturbance: the first generation with fewer workers, or of a join with more."""
    found = []
    formed = [(at, event) for at, event in watching.told if isinstance(event, GenerationFormed)]
    sizes = [len(event.workers) for _, event in formed]
    for at, what in watching.disturbed:
        following = [
            n for n, (when, _) in enumerate(formed) if when > at and n and (sizes[n] > sizes[n - 1]) == (what == "join")
        ]
        if not following:
            continue
        when, event = formed[following[0]]
        after = [
            sample.at for sample, m in zip(watching.samples, watching.steps) if m.generation >= (event.generation or 0)
        ]
        if after:
            found.append(
                Aftermath(
                    what=what,
                    form_s=event.seconds if what == "join" else when - at,
                    step_s=(after[0] - at) * speed,
                    workers=len(event.workers),
                )
            )
    return found
