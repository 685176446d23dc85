"""Builds a controller: `start_controller` starts its real parts, monitor and planner, and `put_together` connects them.

Workers come when the membership asks for them, the feeder when the run begins. A test puts together parts of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from actors.config import RuntimeConfig
from actors.feed.first_sizes import FirstSizes, first_sizes
from actors.feed.item_cache import KINDS
from actors.feed.step_source import FeederHandle, StepSource, feeder_of
from actors.messages import WorkerSettings
from actors.names import run_id
from actors.outcome import Events, Listener
from actors.plan.costs.flops import DiTWork
from actors.plan.costs.profile import Profile
from actors.plan.spared import NOTHING_SPARED, Spared
from actors.planning.batching import TargetBatch
from actors.planning.client import PlannerClient
from actors.planning.demand import Demand, clips_of, largest_upload
from actors.planning.forecasts import forecast, lora_files_gib, sizes_of
from actors.planning.learned import setting_of, take_up
from actors.planning.options import assumption, copies_if_fetched, profile_of, tell_updates
from actors.planning.room import GenerationRoom
from actors.pool.device import WorkersDevice, workers_device
from actors.pool.lookout import Lookout
from actors.pool.membership import Membership
from actors.pool.membership_types import Limits
from actors.pool.monitor import MonitorHandle, OperatorRequests
from actors.pool.requested_size import keep_size, kept_size
from actors.pool.workers import Pool, RayPool, start_monitor, uses_gpu, weights_bytes
from actors.ray_calls import get, gpus_of_a_node, node_address, node_id
from actors.records.events import DeviceAssumed, ProfileRefused
from actors.run.asides import AsideSource, AsideTurns, NoAsides
from actors.run.committer import Committer
from actors.run.controller import Controller, LookPace
from actors.run.data_wait import DataPace
from actors.run.ending import Ending
from actors.run.forming import Forming, Rendezvous
from actors.run.generations import GenerationManager
from actors.run.given_cluster import GivenCluster
from actors.run.recalibrate import Recalibration, stages_of
from actors.run.relay_book import Relays
from actors.run.shortage import Shortage
from actors.run.skips import Skips, skipped_before
from actors.run.speeds import Speeds
from actors.run.step_metrics import StepAccount
from actors.run.waits import StepWaits
from actors.state.assemble import assemble_state
from actors.state.run_state import RunState
from actors.state.survivors import Survivors
from actors.worker.worker import Worker
from data.cache import kept_kinds
from ops.geometry import Geometry
from ops.models.base.flops import TrainedPart
from ops.models.config import ModelConfig
from ops.models.folders import check_weights, resolve
from ops.models.load import check_factors, trained_part

_START_S = 120.0  # a small actor answers within this time also on a busy cluster


def start_controller(
    config: RuntimeConfig,
    listener: Listener,
    profile: Profile | None = None,
    worker_class: type[Worker] = Worker,
    feeder: Callable[[], FeederHandle] | None = None,
    asides: AsideSource | None = None,
) -> Controller:
    """A controller, ready to `train`. `asides` are made beside its steps.

    `profile`, `worker_class` and `feeder` replace the ones that the config describes (benchmarks, own data).
    """
    run_dir, events = Path(config.run_dir), Events(listener)
    run = run_id(run_dir)
    model, geometry = resolve(config.model)
    check_weights(model)
    check_factors(model.dit)
    monitor = start_monitor(run)
    device = WorkersDevice.kept(run_dir) or workers_device(config, run_dir)
    spared = Spared.of(config.data.cache, beside=asides.encoders if asides is not None else ())
    part = trained_part(model.dit)
    training = _Training(config=config, model=model, geometry=geometry, device=device, part=part, spared=spared)
    costs = training.costs(profile, events)
    pool = RayPool(run, training.worker_settings(costs), monitor, worker_class)
    shortage = training.shortage(costs, asides)
    timed = training.batch_sizes()
    source = StepSource(
        feeder or feeder_of(config, model, geometry, timed),
        geometry,
        config.train.loss_weight,
        config.train.steps,
        config.data.engine.stall_s,
        config.data.engine.silent_s,
        tell=events.tell,
    )
    planner = training.planner(costs.profile, events)
    recalibration = Recalibration.of(run_dir, stages_of(config.data, geometry, timed), planner, source, events)
    state = assemble_state(run, config, model, source, events)
    reported = get(monitor.begin.remote(), timeout=_START_S)
    if reported.wishes.target is None and (size := kept_size(run_dir)) is not None:
        # This monitor is a new one; the one that knew the size is lost, as is the controller before this one.
        monitor.restore.remote(reported.generation, OperatorRequests(target=size))
    start_s = config.workers.start_patience_s(weights_bytes(config.model))
    return put_together(
        config=config,
        events=events,
        pool=pool,
        monitor=monitor,
        lookout=Lookout(config.workers, pool, monitor, events.tell, start_s, partial(keep_size, run_dir)),
        membership=Membership(
            Limits.of(config.workers),
            generation=max(reported.generation, state.standing.generation),
            shortage=shortage.of,
            home=node_id(),
        ),
        source=source,
        planner=planner,
        state=state,
        new_store=_new_store,
        account=StepAccount(
            geometry=geometry,
            node_of=pool.node_of,
            work=DiTWork.of(model.dit, part),
            experts=tuple(expert.expert_name for expert in model.dit.experts),
        ),
        measured=training.is_measured or profile is not None,
        shortage=shortage,
        skips=Skips(config.train.max_skipped_steps, events.tell, skipped_before(run_dir)),
        speeds=Speeds(bags=not model.dit.spatial_temporal),
        recalibration=recalibration,
        asides=asides,
        relays=Relays(least=config.workers.relay_from),
    )


def put_together(
    *,
    config: RuntimeConfig,
    events: Events,
    pool: Pool,
    monitor: MonitorHandle,
    lookout: Lookout,
    membership: Membership,
    source: StepSource,
    planner: PlannerClient,
    state: RunState,
    new_store: Callable[[], Rendezvous],
    account: StepAccount,
    skips: Skips,
    speeds: Speeds | None = None,
    measured: bool = True,
    shortage: Shortage | None = None,
    recalibration: Recalibration | None = None,
    asides: AsideSource | None = None,
    look_pace: LookPace | None = None,
    data_pace: DataPace | None = None,
    relays: Relays | None = None,
) -> Controller:
    """A controller of these parts. Starts nothing. `measured`: the planner's costs are of this device. Without `relays`
    every worker is called by itself."""
    relays = relays or Relays()
    committer = Committer(
        state=state,
        account=account,
        listener=events.listener,
        events=events,
        source=source,
        relays=relays,
        patience_s=config.snapshot.patience_s,
        say=monitor.say.remote,
    )
    turns = AsideTurns(asides or NoAsides(), events.tell)
    speeds = speeds or Speeds()
    forming = Forming(
        config=config,
        pool=pool,
        monitor=monitor,
        source=source,
        planner=planner,
        committer=committer,
        new_store=new_store,
        waits=StepWaits(config=config.workers, measured=measured),
        asides=turns,
        relays=relays,
        given=GivenCluster(config.cluster),
        speeds=speeds,
        tell=events.tell,
        shortage=shortage,
    )
    generations = GenerationManager(
        config=config,
        events=events,
        pool=pool,
        monitor=monitor,
        lookout=lookout,
        membership=membership,
        survivors=Survivors(),
        forming=forming,
        committer=committer,
    )
    ending = Ending(
        config=config, events=events, committer=committer, monitor=monitor, parts=(relays, pool, source, planner)
    )
    return Controller(
        config=config,
        events=events,
        lookout=lookout,
        generations=generations,
        source=source,
        planner=planner,
        state=state,
        committer=committer,
        skips=skips,
        ending=ending,
        asides=turns,
        speeds=speeds,
        recalibration=recalibration,
        look_pace=look_pace or LookPace(),
        data_pace=data_pace or DataPace(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Costs:
    """What plans count on when a run begins."""

    profile: Profile
    demand: Demand | None = None  # of training; None: memory is not predicted
    least_gib: tuple[float, ...] = ()
    """GiB of a GPU that has room for training with gradients and state in each of the places that settings allow."""
    graphs_least_gib: tuple[float, ...] = ()
    """GiB of a GPU that has room for CUDA graphs, too; () without them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Training:
    """A run's settings beside what its folders and its cluster have told of them, and the parts that follow from it."""

    config: RuntimeConfig
    model: ModelConfig  # resolved, as is its geometry
    geometry: Geometry
    device: WorkersDevice
    part: TrainedPart
    spared: Spared = NOTHING_SPARED

    @property
    def is_measured(self) -> bool:
        """The config's costs are of this device."""
        return bool(self.config.planner.profile) or not self._on_gpu

    @property
    def _on_gpu(self) -> bool:
        return uses_gpu(self.config.workers)

    def costs(self, given: Profile | None, events: Events) -> _Costs:
        """Costs by the config's profile or the FLOPs of this device, with the memory that cascades will need as
        predicted, until workers have measured it. A `given` profile says all of that itself."""
        config, device = self.config, self.device
        costs = _Costs(profile=given or self._profile())
        if given is None:
            if device.assumed and not config.planner.profile:
                events.tell(DeviceAssumed(why=assumption(device.name)))
            if self._on_gpu or config.workers.memory_gib:
                costs = self._with_memory(costs)
        tell_updates(costs.profile, config.train, self.model, device.name, config.workers.memory_gib)
        return costs

    def _profile(self) -> Profile:
        config, device = self.config, self.device
        gpus = gpus_of_a_node() if self._on_gpu else 1
        return profile_of(
            config.planner,
            self.model,
            self.geometry,
            device.name,
            config.train,
            device.measured,
            gpus,
            self.part,
        )

    def _degrees(self, profile: Profile) -> tuple[int, ...]:
        """Degrees of DiT cascades that may be planned."""
        return tuple(self.config.planner.degrees or profile.degrees.get("dit", (1,)))

    def _with_memory(self, costs: _Costs) -> _Costs:
        """These costs with the predicted needs of cascades."""
        config, degrees, cuda = self.config, self._degrees(costs.profile), self._on_gpu
        demand = Demand.of(config.data, self.model, self.geometry, config.planner.bag_peers)
        predicted = forecast(self.model, demand.geometry, config.train, demand.clips, degrees, cuda, self.spared)
        costs.profile.expect_needs(predicted.needs)
        possible = predicted.possible(config.train, gpus_of_a_node()) if cuda else ()
        least_gib = tuple(demand.least_gib(places, degrees, config.workers.min) for places in possible)
        counts = (config.workers.min, config.workers.max)
        graphs = tuple(demand.graphs_least_gib(places, degrees, counts) for places in possible if places.graphs_gib)
        return replace(costs, demand=demand, least_gib=least_gib, graphs_least_gib=graphs)

    def worker_settings(self, costs: _Costs) -> WorkerSettings:
        """What every worker of the run gets."""
        config, kept = self.config, kept_kinds(self.config.data.cache)
        cached = {module for module, kind in KINDS.items() if kind in kept}
        uploads = self._on_gpu and "vae" not in self.spared.cascades
        return WorkerSettings(
            model=config.model,
            train=config.train,
            workers=config.workers,
            cache=config.data.cache,
            # Of an empty cache everything is a miss: then the encoders are loaded at once, before the first step.
            cached=tuple(sorted(cached | set(self.spared.cascades))),
            spared=self.spared.encoders,
            least_gib=costs.least_gib,
            graphs_least_gib=costs.graphs_least_gib,
            largest_upload=largest_upload(clips_of(config.data, self.geometry)) if uploads else 0,
        )

    def shortage(self, costs: _Costs, asides: AsideSource | None) -> Shortage:
        """What says whether workers have the memory to train together."""
        config = self.config
        room = GenerationRoom(
            sizes=sizes_of(self.model, config.train, self._on_gpu),
            degrees=self._degrees(costs.profile),
            bag_peers=config.planner.bag_peers,
        )
        return Shortage(
            snapshot=config.snapshot,
            room=room,
            demand=costs.demand,
            needs=costs.profile.needs,
            samples=asides is not None and asides.expected,
            lora_files_gib=lora_files_gib(config.checkpoint, self.model),
        )

    def batch_sizes(self) -> FirstSizes:
        """The first batch sizes, which the run keeps. They have a profile of their own, as the planner's takes up what
        earlier starts learned."""
        target = TargetBatch(profile=self._profile(), geometry=self.geometry)
        return first_sizes(Path(self.config.run_dir), self.config.data, self.geometry, target)

    def planner(self, profile: Profile, events: Events) -> PlannerClient:
        """A planner that goes on with what earlier starts of the run have learned of costs."""
        run_dir = Path(self.config.run_dir)
        setting = setting_of(self.model, self.device.name, self.config.train)
        if why := take_up(profile, setting, run_dir):
            events.tell(ProfileRefused(why=why))
        gpus = gpus_of_a_node() if self._on_gpu else 0
        copies = copies_if_fetched(profile, self.model, self.config.train, gpus)
        return PlannerClient(profile, self.config.planner, setting, run_dir, copies)


def _new_store() -> torch.distributed.TCPStore:
    """Where the workers of one generation meet."""
    return torch.distributed.TCPStore(
        node_address(), 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
