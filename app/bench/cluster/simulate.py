"""One run on a virtual cluster: its controller is started, disturbed, and measured."""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actors.config import (
    CheckpointConfig,
    PlannerConfig,
    RuntimeConfig,
    SnapshotConfig,
    TrainConfig,
    WorkersConfig,
)
from actors.feed.step_source import FeederHandle, StepSource
from actors.outcome import Events, Outcome
from actors.plan.costs.flops import DiTWork
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.types import Cluster, Item
from actors.planning.client import PlannerClient, PlannerHandle
from actors.pool.membership import Membership
from actors.pool.membership_types import Limits
from actors.pool.monitor import MonitorHandle
from actors.ray_calls import get, kill
from actors.records.events import GenerationFormed, RunEvent
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from actors.run.assemble import put_together
from actors.run.controller import Controller
from actors.run.skips import Skips
from actors.run.step_metrics import StepAccount
from actors.step import StepAssignment
from app.bench.cluster.ddp import DdpFigures, ddp_figures
from app.bench.cluster.handles import HostHandle
from app.bench.cluster.parts import (
    Machines,
    VirtualKeepers,
    VirtualLookout,
    VirtualPool,
    VirtualRelays,
    VirtualState,
    VirtualWriter,
)
from app.bench.cluster.physics import Physics
from app.inputs.workload import read_workload
from app.run.recorder import Recorder
from data.config import DataConfig, SourceConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.typed import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PROFILE = CONFIGS / "profiles/hunyuan-13b-720p-h100.json"
WORKLOAD = CONFIGS / "bench/A-16gpu.json"
RELAY_FROM = 128
TEXT_S = 0.2  # of a text encode, which the profile does not have
GPUS_OF_AN_ITEM = 4  # the workload has four items for 16 GPUs
_PATIENCE_S = 3600.0
SETTLED = 2  # the first step that counts
_HOSTS = 16  # processes, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """What happens to the machines when `step` has been committed."""

    step: int
    what: str  # worker: one dies, and its place is free; node: one is lost; join: a new node comes


@dataclass(frozen=True, kw_only=True, slots=True)
class Aftermath:
    """What followed a disturbance. Real seconds, but for the last."""

    what: str
    form_s: float  # from the disturbance until the next generation forms; of a join from when its workers are loaded
    step_s: float  # virtual seconds from the disturbance to the end of the step that it broke, or of the next one
    workers: int  # of the new generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What the controller has used when a step was committed."""

    at: float  # unix seconds
    thread_s: float  # CPU seconds of the controller's own thread
    process_s: float  # of its whole process, with Ray's threads
    rss_mib: float
    threads_s: Mapping[str, float]  # of it by the names of its threads


@dataclass
class Watching:
    """The listener of a run: keeps what it hears, as the real one writes it, and disturbs the machines in time."""

    recorder: Recorder
    disturbances: Sequence[Disturbance] = ()
    disturb: Callable[[str], None] = lambda what: None
    steps: list[StepMetrics] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    told: list[tuple[float, RunEvent]] = field(default_factory=list)
    disturbed: list[tuple[float, str]] = field(default_factory=list)

    def on_step(self, metrics: StepMetrics, timeline: Sequence[SpanRecord], plan: StepAssignment) -> None:
        """Called by the controller's thread."""
        self.recorder.on_step(metrics, timeline, plan)
        self.steps.append(metrics)
        self.samples.append(
            Sample(
                at=time.time(),
                thread_s=time.thread_time(),
                process_s=time.process_time(),
                rss_mib=resident_mib(),
                threads_s=seconds_of_threads(),
            )
        )
        for one in self.disturbances:
            if one.step == metrics.step:
                self.disturbed.append((time.time(), one.what))
                self.disturb(one.what)

    def on_event(self, event: RunEvent) -> None:
        self.recorder.on_event(event)
        self.told.append((time.time(), event))

    def on_checkpoint(self, folder: Path, step: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A run on a virtual cluster, with items of the `workload`, or with its very steps (`published`)."""

    nodes: int
    gpus: int = 8
    steps: int = 50
    strategy: str = "cascade"
    static_degree: int = 4
    budget_s: float = 0.2  # real seconds of planning
    physics: Physics = field(default_factory=Physics)
    workload: Path = WORKLOAD
    lookahead: int = PlannerConfig().lookahead
    published: bool = False  # the workload's steps as they are, of items that need no text encode, as it has none
    disturbances: tuple[Disturbance, ...] = ()
    relay_from: int = RELAY_FROM  # workers.relay_from; 0: every worker is called by itself

    @classmethod
    def of_published(cls, path: Path, physics: Physics) -> Setup:
        """All steps of a published workload on its own cluster. Raises ConfigError, and PlanError for a cluster that is
        none."""
        known = read_workload(path)
        if not known.cluster:
            raise ConfigError(f"workload {path} must name its cluster, such as 2x8.")
        sizes = Cluster.parse(known.cluster).nodes
        return cls(
            nodes=len(sizes),
            gpus=sizes[0],
            steps=len(known.steps),
            physics=physics,
            workload=path,
            published=True,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFigures:
    """What a run has shown. Of steps in which the workers stayed the same, but for `elapsed_s`."""

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
    rss_growth_mib: float  # since the tenth step
    form_s: float  # real seconds to form the first generation
    recovered: tuple[Aftermath, ...] = ()
    threads_s: Mapping[str, float] = field(default_factory=dict)  # `process_s` by the names of threads, most first


class VirtualRunFailed(RuntimeError):
    """The run ended early or not at all, or a step was committed twice, never, or without some of its samples."""


def run_here(setup: Setup, timeout_s: float = 3000.0) -> ClusterFigures:
    """A run inside this process, without Ray."""
    from actors.feed.pulse import ProcessId
    from actors.planning.actor import Planner
    from actors.pool.monitor import Monitor
    from app.bench.cluster.here import calls_here
    from app.bench.cluster.host import Host
    from app.bench.cluster.parts import VirtualFeeder

    class FeederHere(VirtualFeeder):
        """A feeder whose process is this one."""

        def pulse(self) -> ProcessId:
            return ProcessId(node="", pid=os.getpid(), born="")

    with calls_here() as here:

        class ClientHere(PlannerClient):
            """The real client, whose planner is a thread."""

            def _start(self) -> PlannerHandle:
                handle: PlannerHandle = here.actor(Planner(self._profile, self._config))
                return handle

        profile = scaled_profile(setup.physics.speed)
        monitor = here.actor(Monitor())
        hosts = [here.actor(Host(0, scaled_profile(setup.physics.speed), setup.physics, monitor))]
        planner = ClientHere(profile, planner_config(setup))
        return _run(setup, hosts, monitor, planner, lambda: here.actor(FeederHere(workload(setup))), timeout_s, False)


def run_on_ray(setup: Setup, timeout_s: float = 3000.0) -> ClusterFigures:
    """A run whose hosts, planner, monitor and feeder are actors of the Ray cluster of this process."""
    from actors.feed.step_source import actor_factory
    from actors.pool.workers import start_monitor
    from actors.ray_calls import remote_of
    from app.bench.cluster.host import Host
    from app.bench.cluster.parts import VirtualFeeder

    monitor = start_monitor(f"cluster-{time.time_ns()}")
    profile = scaled_profile(setup.physics.speed)
    made = remote_of(Host).options(num_cpus=0, max_concurrency=1_000_000)
    count = max(1, min(_HOSTS, setup.nodes * setup.gpus // 64))
    hosts = [made.remote(n, profile, setup.physics, monitor) for n in range(count)]
    planner = PlannerClient(scaled_profile(setup.physics.speed), planner_config(setup))
    return _run(setup, hosts, monitor, planner, actor_factory(VirtualFeeder, workload(setup)), timeout_s, True)


def _run(
    setup: Setup,
    hosts: Sequence[HostHandle],
    monitor: MonitorHandle,
    planner: PlannerClient,
    feeder: Callable[[], FeederHandle],
    timeout_s: float,
    alone: bool,
) -> ClusterFigures:
    try:
        for told in [host.know.remote(hosts) for host in hosts]:
            get(told)
        with TemporaryDirectory() as folder, Recorder(Path(folder)) as recorder:
            watching = Watching(recorder=recorder, disturbances=setup.disturbances)
            controller, machines = controller_of_virtual(setup, hosts, monitor, planner, feeder, watching)
            watching.disturb = lambda what: disturb(what, controller, machines, hosts)
            outcome = _train(controller, timeout_s)
        if outcome.code:
            raise VirtualRunFailed(f"the run on {setup.nodes} nodes ended early: {outcome.reason}")
        return figures_of(setup, watching, alone)
    finally:
        for one in hosts:
            kill(one)


def _train(controller: Controller, timeout_s: float) -> Outcome:
    """Train in a thread, so that a controller that hangs is noticed."""
    ended: list[Outcome | BaseException] = []

    def train() -> None:
        try:
            ended.append(controller.train())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=train, name="controller", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not ended:
        raise VirtualRunFailed(f"the virtual run has not ended within {timeout_s:g} s.")
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


def controller_of_virtual(
    setup: Setup,
    hosts: Sequence[HostHandle],
    monitor: MonitorHandle,
    planner: PlannerClient,
    feeder: Callable[[], FeederHandle],
    watching: Watching,
) -> tuple[Controller, Machines]:
    """The real controller on virtual machines."""
    config = runtime_config(setup)
    model, geometry = config.model, Geometry()
    machines = Machines(gpus=setup.gpus)
    machines.add(setup.nodes)
    pool = VirtualPool(machines, hosts)
    events = Events(watching)
    source = StepSource(feeder, geometry, "sample", setup.steps, _PATIENCE_S, _PATIENCE_S, list)
    keepers: Any = VirtualKeepers(machines, hosts, config.snapshot.copies)  # what a run's state asks of Keepers
    writer: Any = VirtualWriter()  # and of Writer
    state = VirtualState(
        config,
        model,
        keepers=keepers,
        standing=keepers.standing(0.0),
        writer=writer,
        positions=source,
        tell=events.tell,
    )
    controller = put_together(
        config=config,
        events=events,
        pool=pool,
        monitor=monitor,
        lookout=VirtualLookout(config, pool, monitor, events.tell, machines),
        membership=Membership(replace(Limits.of(config.workers), gather_s=120.0), generation=0),
        source=source,
        planner=planner,
        state=state,
        new_store=_NoStore,
        account=StepAccount(geometry=geometry, node_of=pool.node_of, work=DiTWork.of(model.dit)),
        skips=Skips(10, events.tell),
        relays=VirtualRelays(least=config.workers.relay_from, start=pool.relay_of),
    )
    return controller, machines


class _NoStore:
    """Virtual workers meet on their hosts."""

    host, port = "", 0


def disturb(what: str, controller: Controller, machines: Machines, hosts: Sequence[HostHandle]) -> None:
    """Called by the controller's thread; the controller does not hear what happens."""
    if what == "join":
        machines.add()
        return
    manager = controller.generations
    seats = manager.world
    victim = seats[len(seats) // 2]
    dead = machines.lose(victim.node) if what == "node" else [victim.name]
    for host in hosts:
        host.end.remote(dead)
        if what == "node":
            host.end_relay.remote(victim.node)
        host.closed.remote(manager.view.generation)


def runtime_config(setup: Setup) -> RuntimeConfig:
    """As a run of the config would have it."""
    most = setup.nodes * setup.gpus
    return RuntimeConfig(
        run_dir="runs/virtual",
        model=ModelConfig(),
        data=DataConfig(sources=(SourceConfig(path="nowhere"),)),
        train=TrainConfig(steps=setup.steps),
        workers=WorkersConfig(
            min=max(1, most // 2),
            max=most,
            device="cpu",
            suspect_s=120.0,
            collective_timeout_s=600.0,
            relay_from=setup.relay_from,
        ),
        planner=planner_config(setup),
        snapshot=SnapshotConfig(every=1),
        checkpoint=CheckpointConfig(every=0),
    )


def planner_config(setup: Setup) -> PlannerConfig:
    return PlannerConfig(
        strategy=setup.strategy,
        budget_s=setup.budget_s,
        static_degree=setup.static_degree,
        lookahead=setup.lookahead,
    )


def scaled_profile(speed: float) -> Profile:
    """The published latencies in real seconds, and a text encode for every batch."""
    told = json.loads(PROFILE.read_text())
    texts = [
        {"module": "text", "batch": b, "frames": 0, "height": 0, "width": 0, "degree": 1, "seconds": TEXT_S}
        for b in range(1, 17)
    ]
    latency = [point | {"seconds": point["seconds"] / speed} for point in [*told["latency"], *texts]]
    return read_profile({**told, "latency": latency, "degrees": {**told["degrees"], "text": [1]}})


def workload(setup: Setup) -> list[list[Item]]:
    """Items of every step: those of the published workload, or as many for four GPUs as it has, drawn from all of its
    steps."""
    if setup.published:
        return [
            [replace(item, id=f"s{step}.{item.id}", cached=("text",)) for item in items]
            for step, items in enumerate(read_workload(setup.workload).steps)
        ]
    known = [item for step in json.loads(setup.workload.read_text())["steps"] for item in step]
    luck = random.Random(setup.physics.seed)
    fields = ("batch", "frames", "height", "width")
    return [
        [
            Item(
                id=f"s{step}.{n}",
                text_tokens=setup.physics.text_tokens,
                **{name: item[name] for name in fields},
            )
            for n, item in enumerate(luck.choices(known, k=max(1, setup.nodes * setup.gpus // GPUS_OF_AN_ITEM)))
        ]
        for step in range(setup.steps)
    ]


def figures_of(setup: Setup, watching: Watching, alone: bool) -> ClusterFigures:
    """What was seen, in virtual seconds. Raises VirtualRunFailed unless every step was committed once and whole.
    `alone`: the controller's process runs nothing else."""
    check_steps([m.step for m in watching.steps], [m.good_weight for m in watching.steps], setup.steps)
    speed = setup.physics.speed
    generations = [m.generation for m in watching.steps]
    calm = [
        n
        for n in range(SETTLED, setup.steps)
        if generations[n - SETTLED] == generations[n] and n - 1 not in _steps_of(setup)
    ] or list(range(setup.steps))
    of = [watching.steps[n] for n in calm]
    used = [
        (
            watching.samples[n].thread_s - watching.samples[n - 1].thread_s,
            watching.samples[n].process_s - watching.samples[n - 1].process_s,
        )
        for n in calm
        if n
    ]
    executed = statistics.median(m.step_s for m in of) * speed
    counted_s = sum(m.step_s for m in of) * speed
    items = workload(setup)
    planned = statistics.median(m.predicted_s for m in of) * speed
    thread_s = statistics.fmean(thread for thread, _ in used) if used else 0.0
    process_s = statistics.fmean(process for _, process in used) if used else 0.0
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


def _by_thread(samples: Sequence[Sample]) -> dict[str, float]:
    """CPU seconds of a step by the names of threads that took some, those that took most first; {} of a short run."""
    first, last = samples[min(SETTLED, len(samples) - 1)], samples[-1]
    steps = len(samples) - 1 - SETTLED
    if steps < 1:
        return {}
    found = {name: (s - first.threads_s.get(name, 0.0)) / steps for name, s in last.threads_s.items()}
    return {name: s for name, s in sorted(found.items(), key=lambda one: -one[1]) if s > 0}


def seconds_of_threads() -> dict[str, float]:
    """CPU seconds of the threads of this process by their names, of which Ray's come in groups."""
    found: dict[str, float] = {}
    for folder in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        user, system = rest.split()[11:13]
        found[name] = found.get(name, 0.0) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


def ddp_of(setup: Setup) -> list[DdpFigures]:
    """What DDP makes of the items of the steps that count of an undisturbed run. Raises NoDegree."""
    items = workload(setup)
    cluster = Cluster(nodes=(setup.gpus,) * setup.nodes)
    return ddp_figures(items[SETTLED:] or items, scaled_profile(1.0), setup.physics, cluster)


def _steps_of(setup: Setup) -> set[int]:
    return {one.step for one in setup.disturbances}


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


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
