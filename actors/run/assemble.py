"""Builds a controller: `start_controller` starts its real parts, monitor and planner, and `put_together` connects them.

Workers come when the membership asks for them, the feeder when the run begins. A test puts together parts of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from actors.config import RuntimeConfig
from actors.feed.step_source import FeederHandle, StepSource, feeder_of
from actors.messages import WorkerSettings
from actors.names import run_id
from actors.outcome import Events, Listener
from actors.plan.costs.profile import Profile
from actors.planning.client import PlannerClient
from actors.planning.options import profile_of
from actors.pool.lookout import Lookout
from actors.pool.membership import Membership
from actors.pool.membership_types import Limits
from actors.pool.monitor import MonitorHandle
from actors.pool.workers import Pool, start_monitor, weights_bytes
from actors.ray_calls import get, node_address
from actors.run.committer import Committer
from actors.run.controller import Controller
from actors.run.ending import Ending
from actors.run.forming import Forming, Rendezvous
from actors.run.generations import GenerationManager
from actors.run.skips import Skips, skipped_before
from actors.run.step_metrics import StepAccount
from actors.state.assemble import assemble_state
from actors.state.commit_log import CommitLog
from actors.state.run_state import RunState
from actors.state.survivors import Survivors
from actors.worker.worker import Worker
from ops.models.folders import resolve

_START_S = 120.0  # a small actor answers within this time also on a busy cluster


def start_controller(
    config: RuntimeConfig,
    listener: Listener,
    profile: Profile | None = None,
    worker_class: type[Worker] = Worker,
    feeder: Callable[[], FeederHandle] | None = None,
) -> Controller:
    """A controller, ready to `train`.

    `profile`, `worker_class` and `feeder` replace the ones that the config describes (benchmarks, own data).
    """
    run_dir, events = Path(config.run_dir), Events(listener)
    run = run_id(run_dir)
    model, geometry = resolve(config.model)
    monitor = start_monitor(run)
    settings = WorkerSettings(model=config.model, train=config.train, workers=config.workers, cache=config.data.cache)
    pool = Pool(run, settings, monitor, worker_class)
    source = StepSource(
        feeder or feeder_of(config, model, geometry),
        geometry,
        config.train.loss_weight,
        config.train.steps,
        config.data.engine.stall_s,
        config.data.engine.silent_s,
    )
    planner = PlannerClient(profile or profile_of(config.planner, model, geometry), config.planner)
    commits = CommitLog(committed=-1, patience_s=config.snapshot.patience_s, tell=events.tell)
    survivors = Survivors()
    state = assemble_state(run, config, model, commits, source, survivors, events)
    reported = get(monitor.begin.remote(), timeout=_START_S)
    generation = max(reported.generation, state.standing.generation)
    start_s = config.workers.start_patience_s(weights_bytes(config.model))
    return put_together(
        config=config,
        listener=listener,
        events=events,
        pool=pool,
        monitor=monitor,
        lookout=Lookout(config.workers, pool, monitor, events.tell, start_s),
        membership=Membership(Limits.of(config.workers), generation=generation),
        source=source,
        planner=planner,
        commits=commits,
        survivors=survivors,
        state=state,
        new_store=_new_store,
        account=StepAccount(geometry=geometry, node_of=pool.node_of),
        skips=Skips(config.train.max_skipped_steps, events.tell, skipped_before(run_dir)),
    )


def put_together(
    *,
    config: RuntimeConfig,
    listener: Listener,
    events: Events,
    pool: Pool,
    monitor: MonitorHandle,
    lookout: Lookout,
    membership: Membership,
    source: StepSource,
    planner: PlannerClient,
    commits: CommitLog,
    survivors: Survivors,
    state: RunState,
    new_store: Callable[[], Rendezvous],
    account: StepAccount,
    skips: Skips,
) -> Controller:
    """A controller of these parts. Starts nothing."""
    committer = Committer(log=commits, state=state, account=account, listener=listener, events=events, source=source)
    forming = Forming(
        config=config,
        pool=pool,
        monitor=monitor,
        source=source,
        planner=planner,
        committer=committer,
        new_store=new_store,
    )
    generations = GenerationManager(
        config=config,
        events=events,
        pool=pool,
        monitor=monitor,
        lookout=lookout,
        membership=membership,
        survivors=survivors,
        forming=forming,
        committer=committer,
    )
    ending = Ending(config=config, events=events, committer=committer, monitor=monitor, parts=(pool, source, planner))
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
    )


def _new_store() -> torch.distributed.TCPStore:
    """Where the workers of one generation meet."""
    return torch.distributed.TCPStore(
        node_address(), 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
