"""The run: forms generations of workers, runs their steps, commits them, and goes on whatever happens to the workers.

One loop looks (heartbeats, new and lost workers), feeds what it saw to the membership state machine, applies its
decisions, and keeps two steps on the workers. Everything that can be decided is decided elsewhere: plans in
`actors.plan`, membership in `actors.pool.membership`, calls in `actors.run.dispatch`. Read on in `actors/run/steps.py`
(one step) and `actors/worker/worker.py` (one cascade).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch

from actors.config import RuntimeConfig
from actors.feed.step_source import StepSource, feeder_of, profile_of
from actors.messages import FormTask, WorkerSettings
from actors.names import run_id
from actors.outcome import Listener, Outcome, StopRun, Superseded, continues, only_in_memory
from actors.plan.costs.profile import Profile
from actors.plan.types import Cluster
from actors.planning.client import PlannerClient
from actors.pool.lookout import Lookout, worker_name, worker_number
from actors.pool.membership import Membership
from actors.pool.membership_types import (
    Boundary,
    Broken,
    Dead,
    Decision,
    Drain,
    End,
    Event,
    Fail,
    Finished,
    Form,
    Limits,
    Ready,
    Replace,
    Request,
    Tick,
    View,
    Wait,
)
from actors.pool.weights import weights_bytes
from actors.pool.workers import Pool, start_monitor
from actors.records.events import (
    CheckpointWritten,
    CommitSlow,
    FeederLost,
    GenerationEnded,
    GenerationFormed,
    RunEvent,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopping,
    SpeedsLearned,
    StepsRecovered,
    WorkerDied,
    WorkerDrained,
    WorkerReplaced,
    WorkersAwaited,
)
from actors.run.frozen import disagreement
from actors.run.skips import Skips, skipped_before
from actors.run.speeds import Speeds
from actors.run.step_metrics import StepFacts, step_metrics, timeline_records
from actors.run.steps import StepRunner
from actors.state.commit_log import CommitLog
from actors.state.run_state import RunState, exports_of
from actors.step import CollectedStep, DataLost, GenerationLost, Seat
from actors.worker.worker import Worker
from ops.models.folders import resolve

log = logging.getLogger(__name__)

_STEPS_AHEAD = 2  # dispatched at a time: the running one and the next; a worker that is asked to leave finishes both
_LOOK_S = 0.2
_UNWATCHED_S = 5.0  # a longer time without a look is not held against those who were not looked at
_START_S = 120.0  # a small actor answers within this time also on a busy cluster
_FIRST_PLAN_S = 0.05  # after a change of the cluster a plan must come at once; better ones follow


class Controller:
    """One run, from its first step (or the last committed one) to its end."""

    def __init__(
        self,
        config: RuntimeConfig,
        listener: Listener,
        profile: Profile | None = None,
        worker_class: type[Worker] = Worker,
        feeder: Callable[[], Any] | None = None,
    ) -> None:
        """`profile`, `worker_class` and `feeder` replace the ones that the config describes (benchmarks, own data)."""
        self.config, self.listener = config, listener
        self.left = ""  # after `train`: what is not on disk, and how to go on
        self._ending = False
        self.run_dir = Path(config.run_dir)
        self.run = run_id(self.run_dir)
        self.model, self.geometry = resolve(config.model)
        self.monitor = start_monitor(self.run)
        settings = WorkerSettings(
            model=config.model, train=config.train, workers=config.workers, cache=config.data.cache
        )
        self.pool = Pool(self.run, settings, self.monitor, worker_class)
        self.source = StepSource(
            feeder or feeder_of(config, self.model, self.geometry),
            self.geometry,
            config.train.loss_weight,
            config.train.steps,
            config.data.engine.stall_s,
        )
        self.planner = PlannerClient(profile or profile_of(config, self.model), config.planner)
        self.store = torch.distributed.TCPStore(
            ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.commits = CommitLog(
            commit=self._commit,
            committed=-1,
            patience_s=config.snapshot.patience_s,
            slow=lambda step, waited: self._event(CommitSlow(step=step, seconds=round(waited, 1))),
        )
        self.state = RunState(self.run, config, self.model, self.commits, self.source.token, self._sealed, self._event)
        reported = ray.get(self.monitor.begin.remote(), timeout=_START_S)
        generation = max(reported.generation, self.state.standing.generation)
        self.membership = Membership(Limits.of(config.workers), generation=generation)
        start_s = config.workers.start_patience_s(weights_bytes(config.model))
        self.lookout = Lookout(config.workers, self.pool, self.monitor, self._event, start_s)
        self.runner: StepRunner | None = None
        self.view: View = self.membership.view()
        self._retiring: dict[Any, int] = {}
        self._next_step = 0
        self._speeds = Speeds()
        self._skips = Skips(config.train.max_skipped_steps, self._event, skipped_before(self.run_dir))
        self._stop_by = 0.0  # monotonic seconds; 0 while nobody has asked the run to end
        self._last_look = 0.0
        self._watched_at = time.monotonic()
        self._unwatched_s = 0.0
        self._step_ended_at = 0.0
        self._data_wait_s = 0.0  # since the last committed step
        self._broken_at: float | None = None
        self._proven = 0  # the newest generation that has finished a step

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Run to the end. Ray's errors leave the state to the controller that comes next; whatever else ends the run,
        raised or returned, its last committed step is on disk then, or `self.left` says where it is."""
        total = self.config.train.steps
        try:
            self._begin()
            while self.commits.committed < total - 1:
                self._look()
                self._advance()
            self._finish_checkpoint()
            self._let_go()
            return Outcome(code=0, reason="all steps are committed", last_step=self.commits.committed)
        except StopRun as stop:
            self._keep_last()
            return stop.outcome
        except Superseded:  # the folder and what the keepers hold are another start's now
            raise
        except Exception as error:
            if not continues(error):
                log.exception("the run ends")
                self._keep_last()
            raise
        finally:
            self._close()

    def _begin(self) -> None:
        origin = self.state.first()
        self.commits.committed = origin.step if origin is not None else -1
        self._look()  # workers start while the data is opened
        self._next_step = self.commits.committed + 1
        accounting = self.source.open(self._next_step, self.state.data_token())
        where = "new" if origin is None else origin.checkpoint or "keepers"
        self._event(RunStarted(from_step=self._next_step, pid=os.getpid(), data=accounting, origin=where))
        self._step_ended_at = time.time()

    def _look(self) -> None:
        """Everything that may have changed outside the running step, at most every _LOOK_S seconds."""
        now = time.monotonic()
        if now - self._last_look < _LOOK_S:
            return
        self._last_look = now
        self._look_at_retiring()  # before anybody's patience is up: they may have answered long ago
        for event in self.lookout.look():
            self._observe(event)
        if self.lookout.stop and not self._stop_by:
            self._event(RunStopping(why=self.lookout.stop))
            self._stop_by = now + self.config.workers.collective_timeout_s
        if self._stop_by:
            self._stop_when_quiet(now)
        if self.lookout.hopeless and len(self.view.members) < self.config.workers.min:
            raise StopRun(Outcome(code=1, reason=self.lookout.hopeless, last_step=self.commits.committed))
        self.state.writer.poll()  # a checkpoint is sealed when it is written, also while the next step waits for data
        self._observe(Tick())

    def _stop_when_quiet(self, now: float) -> None:
        """Somebody asked the run to end: what runs is finished and committed first, if that does not take too long."""
        quiet = (self.runner is None or not self.runner.running) and not len(self.commits)
        if quiet or now > self._stop_by:
            raise StopRun(Outcome(code=75, reason=self.lookout.stop, last_step=self.commits.committed))

    def _advance(self) -> None:
        """Dispatch, collect, commit; at a step boundary let the membership change."""
        runner = self.runner
        if runner is None:
            time.sleep(_LOOK_S / 4)
            return
        try:
            self._fill(runner)
            if runner.running and (done := runner.collect(timeout_s=_LOOK_S)) is not None:
                self._collected(done)
            if not self.commits.settle():
                self.state.repair_keepers(runner.world, quiet=not runner.running)
            if not runner.running:
                self._at_boundary(runner)
        except GenerationLost as lost:
            self._lost(lost)
        except DataLost as error:
            self._reopen_data(str(error))
            self._observe(Broken(generation=self.view.generation, reason=str(error)))

    def _fill(self, runner: StepRunner) -> None:
        total = self.config.train.steps
        while (
            len(runner.running) < _STEPS_AHEAD
            and self._next_step < total
            and not self._change_pending()
            and not self._stop_by
            and len(self.commits) < _STEPS_AHEAD
        ):
            waiting_since = time.perf_counter()
            ready = self.source.has(self._next_step, timeout_s=0.0 if runner.running else _LOOK_S)
            if not runner.running:
                self._data_wait_s += time.perf_counter() - waiting_since
            if not ready:
                return
            running = runner.dispatch(self._next_step)
            log.debug(
                "step %d: %d calls dispatched in %.1f ms", running.step, running.num_calls, running.dispatch_s * 1e3
            )
            runner.budget_s = self.config.planner.budget_s
            self._next_step += 1

    def _at_boundary(self, runner: StepRunner) -> None:
        """Nothing runs: either the run is over, or commits must catch up, or the pool is about to change."""
        if self._next_step >= self.config.train.steps or self._stop_by or not self._change_pending():
            if not self.commits.settle(timeout_s=_LOOK_S):
                self.state.repair_keepers(runner.world, quiet=True)
            return
        self._observe(Boundary(step=self._next_step - 1))

    def _change_pending(self) -> bool:
        """Whether the membership wants another set of workers than the running generation's."""
        members = self.view.members
        return any(m.leaving and m.phase == "active" for m in members) or any(
            m.phase == "ready" and not m.leaving for m in members
        )

    # -- what was seen -------------------------------------------------------------------------------------------------

    def _look_at_retiring(self) -> None:
        if not self._retiring:
            return
        done, _ = ray.wait(list(self._retiring), num_returns=len(self._retiring), timeout=0)
        for reference in done:
            number = self._retiring.pop(reference)
            try:
                self.state.survivors.extend(ray.get(reference, timeout=_START_S).exports)
            except ray.exceptions.RayError as error:
                self._remove(worker_name(number))
                self._observe(Dead(worker=number, reason=f"died while leaving its groups: {type(error).__name__}"))
            else:
                self._observe(Ready(worker=number))

    def _lost(self, lost: GenerationLost) -> None:
        log.warning("generation %d: %s", self.view.generation, lost)
        self._broken_at = self._broken_at or time.time()
        generation = self.view.generation
        for name in lost.dead:
            self._remove(name)
            where = self.lookout.doing(name)
            self._event(WorkerDied(worker=name, why=where.strip()))
            self._observe(Dead(worker=worker_number(name), reason=f"died{where}"))
        if lost.pixels_lost:
            self._reopen_data("decoded batches were lost")
        if lost.failed:
            self._observe(Broken(generation=generation, reason=f"{lost}{self.lookout.late()}"))

    def _reopen_data(self, why: str) -> None:
        """What is not committed is decoded again, by a new feeder."""
        self._event(FeederLost(why=why))
        self.source.open(self.commits.committed + 1, self.state.data_token())

    def _now(self) -> float:
        """Seconds by which others are judged. They stand still while this process waits for something itself, such as
        data that is being opened: answers that come meanwhile are read late."""
        now = time.monotonic()
        self._unwatched_s += max(0.0, now - self._watched_at - _UNWATCHED_S)
        self._watched_at = now
        return now - self._unwatched_s

    def _observe(self, event: Event) -> None:
        self.view, decisions = self.membership.observe(event, self._now())
        for decision in decisions:
            self._apply(decision)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Form():
                self._form(decision)
            case End():
                self._end(decision)
            case Drain():
                self._event(WorkerDrained(worker=worker_name(decision.worker), why=decision.reason))
                self._await_formed()  # it may hold state that the others still fetch
                self._remove(worker_name(decision.worker))
            case Replace():
                self._event(WorkerReplaced(worker=worker_name(decision.worker), why=decision.reason))
                self._remove(worker_name(decision.worker), frozen=True)
            case Request():
                missing = self.view.requested - len(self.pool.pending)
                if missing > 0:
                    self.pool.start(missing)
            case Wait():
                log.warning("%s", decision)
                self._event(WorkersAwaited(detail=str(decision)))
            case Fail():
                self._fail(decision)

    def _end(self, decision: End) -> None:
        """The generation is over. After a failure its survivors must leave the groups; then they report ready."""
        self._event(GenerationEnded(generation=decision.generation, why=decision.reason, clean=decision.clean))
        self.state.survivors = []
        self.lookout.try_again()
        if decision.clean:  # too few are left: until there are more, these hold the state besides the keepers
            self._settle_all()
            if self.runner is not None:
                self.state.survivors = exports_of(self.runner.world, self.commits.newest)
            self.runner = None
            return
        self.runner = None
        self._broken_at = self._broken_at or time.time()
        self.monitor.announce.remote(decision.generation + 1)
        for member in self.view.members:
            if member.phase == "recovering" and worker_name(member.worker) in self.pool.names:
                self._retiring[self.pool.handle(worker_name(member.worker)).retire.remote()] = member.worker

    def _form(self, decision: Form) -> None:
        """Seat the workers, hand out the state, begin. A worker lost meanwhile breaks the generation like any other."""
        started = time.time()
        if decision.clean and self.runner is not None:
            self._settle_all()
        infos = [self.pool.info(worker_name(n)) for n in decision.workers]
        if why := disagreement(infos):
            raise StopRun(Outcome(code=1, reason=why, last_step=self.commits.committed))
        world = tuple(
            Seat(
                name=info.worker,
                node=info.node,
                handle=self.pool.handle(info.worker),
                publishes_later=info.publishes_later,
            )
            for info in infos
        )
        self.monitor.announce.remote(decision.generation)
        before = self.commits.committed
        holders = self.runner.world if self.runner is not None else ()  # a clean change: everyone holds the last step
        origin = self.state.choose(decision.generation, holders)
        held = origin.step if origin is not None else -1
        if held != self.commits.committed:  # training on from another state would go unnoticed
            raise RuntimeError(f"step {self.commits.committed} is committed, but the state is of step {held}")
        if self.commits.committed < before:
            self.source.open(self.commits.committed + 1, self.state.data_token())
        keepers = self.state.keepers
        keepers.prepare([seat.node for seat in world])
        address = (ray.util.get_node_ip_address(), self.store.port)
        forms = [
            seat.handle.form.options(name=f"form g{decision.generation}").remote(
                FormTask(
                    generation=decision.generation,
                    rank=rank,
                    world=len(world),
                    store=address,
                    origin=origin,
                    snapshot_to=keepers.of(rank),
                )
            )
            for rank, seat in enumerate(world)
        ]
        nodes = [seat.node for seat in world]
        cluster = Cluster(nodes=tuple(nodes.count(n) for n in dict.fromkeys(nodes)))
        self.runner = StepRunner(
            generation=decision.generation,
            world=world,
            cluster=cluster,
            source=self.source,
            planner=self.planner,
            budget_s=min(_FIRST_PLAN_S, self.config.planner.budget_s),
            lookahead=self.config.planner.lookahead,
            exports=self.state.is_exported,
            last_step=self.config.train.steps,
            forming=forms,
        )
        self._next_step = self.commits.committed + 1
        self._step_ended_at = started
        self._event(
            GenerationFormed(
                generation=decision.generation,
                workers=tuple(s.name for s in world),
                cluster=cluster.nodes,
                why=decision.reason,
                from_step=self._next_step,
                seconds=round(time.time() - started, 3),
            )
        )

    def _await_formed(self) -> None:
        """Returns when every worker has formed the generation, or one has failed to, or time is up."""
        forming = self.runner.forming if self.runner is not None else []
        if forming:
            ray.wait(forming, num_returns=len(forming), timeout=self.config.workers.collective_timeout_s)

    def _settle_all(self) -> None:
        """Wait for the commits of a clean boundary, so that the next generation starts from the last finished step."""
        deadline = time.monotonic() + self.config.workers.collective_timeout_s
        try:
            while len(self.commits) and time.monotonic() < deadline:
                if not self.commits.settle(timeout_s=_LOOK_S) and self.runner is not None:
                    self.state.repair_keepers(self.runner.world, quiet=True)
        except GenerationLost as lost:
            log.warning("uncommitted steps are left to what others hold: %s", lost)

    def _remove(self, name: str, frozen: bool = False) -> None:
        self.pool.discard(name, frozen=frozen)
        self.monitor.forget.remote(name)

    def _fail(self, decision: Fail) -> None:
        """The run cannot go on."""
        self._event(RunFailed(why=decision.reason, code=decision.code))
        raise StopRun(Outcome(code=decision.code, reason=decision.reason, last_step=self.commits.committed))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _collected(self, done: CollectedStep) -> None:
        if self._broken_at is not None:
            self._event(StepsRecovered(step=done.running.step, seconds=round(done.collected_at - self._broken_at, 3)))
            self._broken_at = None
        if self._proven < done.running.generation:
            self._proven = done.running.generation
            self._observe(Finished())
        self._skips.check(done, self.commits.committed)
        self.state.finished(done)
        tokens = {item.id: item.text_tokens for item in done.running.data.items.items}
        self.planner.observe([s for r in done.reports for s in r.spans], tokens)
        self._learn_speeds(done)

    def _learn_speeds(self, done: CollectedStep) -> None:
        """The next plan counts on the workers' measured speeds."""
        runner = self.runner
        if runner is None or self.config.planner.strategy == "exact":
            return
        names = [seat.name for seat in runner.world]
        self._speeds.observe(done.reports, dict(zip(names, runner.cluster.speed, strict=False)))
        speed = self._speeds.factors(names)
        if speed != runner.cluster.speed:
            self._event(SpeedsLearned(speed=dict(zip(names, speed, strict=False))))
            runner.cluster = replace(runner.cluster, speed=speed)

    def _commit(self, done: CollectedStep) -> None:
        """Called by the commit log, once per step and in order."""
        running = done.running
        started, self._step_ended_at = self._step_ended_at, done.collected_at
        waited, self._data_wait_s = self._data_wait_s, 0.0
        samples = running.data.samples
        facts = StepFacts(
            step=running.step,
            generation=running.generation,
            plan=running.assignment.step,
            planning_s=running.plan_s,
            step_s=done.collected_at - started,
            data_wait_s=waited,
            finished_at=done.collected_at,
            num_samples=sum(len(s) for s in samples.samples.values()),
            dispatch_s=running.dispatch_s,
            num_calls=running.num_calls,
            num_tokens=sum(len(s) * self.geometry.tokens(*samples.buckets[i]) for i, s in samples.samples.items()),
        )
        metrics = step_metrics(facts, done.reports, self.geometry)
        begin = min((s.start for r in done.reports for s in r.spans if s.module != "finish"), default=started)
        timeline = [
            record for r in done.reports for record in timeline_records(facts, r, self._node_of(r.worker), begin)
        ]
        try:
            self.listener.on_step(metrics, timeline, running.assignment)
        except Exception:
            self.commits.keep_until(running.step - 1)  # without its line it is computed again; keepers hold that one
            raise
        self.state.committed(done, self.source.release(running.step))

    def _node_of(self, worker: str) -> str:
        return self.pool.info(worker).node[:8] if worker in self.pool.names else ""

    # -- checkpoints and small parts -----------------------------------------------------------------------------------

    def _sealed(self, folder: Path, step: int) -> None:
        self._event(CheckpointWritten(step=step, folder=folder.name))
        self.listener.on_checkpoint(folder, step)

    def _keep_last(self) -> None:
        """The run ends before its last step: what can be resumed goes to disk, nothing stays behind. Never raises."""
        self._ending = True
        runner = self.runner
        try:
            self.state.keep_last(runner.world if runner is not None and not runner.running else ())
        except Exception:  # whatever it is, the rest of the end must come
            log.exception("the last committed step was not written")
        try:
            self._let_go()
        except Exception:
            log.exception("keepers and monitor could not be ended")

    def _let_go(self) -> None:
        if self.state.let_go():
            ray.kill(self.monitor)
            return
        self.monitor.stopped.remote()
        on_disk = self.state.on_disk()
        self.left = only_in_memory(self.commits.committed, on_disk[0] if on_disk is not None else -1, self.run_dir)

    def _finish_checkpoint(self) -> None:
        """Returns when the last step is on disk: an attempt may have lost its shards with their workers."""
        self.state.writer.wait()
        last = self.config.train.steps - 1
        if (self.state.on_disk() or (-1,))[0] < last:
            self.state.keep_last(self.runner.world if self.runner is not None else ())
        if (self.state.on_disk() or (-1,))[0] < last:
            raise StopRun(
                Outcome(
                    code=1,
                    last_step=self.commits.committed,
                    reason=f"all steps are done, but the checkpoint of step {last} was not written (see "
                    f"{self.run_dir}/events.jsonl). Make room in {self.run_dir} and continue with --resume.",
                )
            )
        self._event(RunFinished(step=self.commits.committed, ledger=self.source.ledger()))

    def _event(self, event: RunEvent) -> None:
        try:
            self.listener.on_event(event.stamped(self.view.generation if hasattr(self, "view") else 0))
        except Exception:
            if not self._ending:
                raise
            log.warning("not written: %s", event)  # on a full disk the state still comes first

    def _close(self) -> None:
        """End the run's workers and helpers. Keepers and monitor are ended by `_let_go`: after an error that Ray Train
        answers with another controller they are what it continues from."""
        for part in (self.pool, self.source, self.planner):
            try:
                part.close()
            except Exception:  # Ray may be gone: the others are ended all the same, and the first error is the one told
                log.warning("%s could not be ended", type(part).__name__, exc_info=True)
