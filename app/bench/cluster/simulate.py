"""One run on a virtual cluster: its controller is started, disturbed, and measured."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from actors.feed.step_source import FeederHandle, StepSource
from actors.outcome import Events, Outcome
from actors.plan.costs.flops import DiTWork
from actors.planning.client import PlannerClient, PlannerHandle
from actors.pool.membership import Membership
from actors.pool.membership_types import Limits
from actors.pool.monitor import MonitorHandle
from actors.ray_calls import get, kill
from actors.run.assemble import put_together
from actors.run.controller import Controller
from actors.run.skips import Skips
from actors.run.step_metrics import StepAccount
from app.bench.cluster.figures import ClusterFigures, VirtualRunFailed, figures_of
from app.bench.cluster.handles import HostHandle
from app.bench.cluster.parts import (
    Machines,
    VirtualDisk,
    VirtualKeepers,
    VirtualLookout,
    VirtualPool,
    VirtualRelays,
    VirtualState,
    VirtualWriter,
)
from app.bench.cluster.setups import Setup, planner_config, runtime_config, workload
from app.bench.cluster.watching import Watching
from app.bench.workload import scaled_profile
from app.run.recorder import Recorder
from ops.geometry import Geometry

_PATIENCE_S = 3600.0
_HOSTS = 16  # processes, at most


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
    keepers = VirtualKeepers(config.snapshot, machines, hosts)
    writer = VirtualWriter(config, events)
    disk = VirtualDisk(Path(config.run_dir), writer)
    state = VirtualState(
        config,
        model,
        keepers=keepers,
        standing=keepers.standing(0.0),
        writer=writer,
        disk=disk,
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
