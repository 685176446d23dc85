"""The run: forms generations of workers, runs their steps, commits them, and goes on whatever happens to the workers.

One loop (`Controller.train`): look at the workers, let the membership decide, keep two steps on the workers, take in
what has finished, commit what is held. Everything that can be decided is decided elsewhere: plans in `actors.plan`,
membership in `actors.pool.membership`, calls in `actors.run.dispatch`, where to go on from in `actors.state.recovery`.
Read on in `actors/run/steps.py` (one step) and `actors/worker/worker.py` (one cascade); `actors/run/assemble.py` builds
the parts.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from actors.clock import PatientClock
from actors.config import RuntimeConfig
from actors.feed.step_source import StepSource
from actors.messages import MemoryExceeded
from actors.outcome import Events, Exit, Listener, Outcome, StopRun, Superseded, continues, only_in_memory
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
    HandedOver,
    Replace,
    Request,
    Tick,
    View,
    Wait,
)
from actors.pool.monitor import MonitorHandle
from actors.pool.workers import Pool
from actors.ray_calls import kill, wait
from actors.records.events import (
    FeederLost,
    GenerationEnded,
    GenerationFormed,
    MemoryRanOut,
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
from actors.run.account import StepAccount
from actors.run.forming import cluster_of, form_tasks, seats_of
from actors.run.frozen import disagreement, first_disagreement
from actors.run.skips import Skips
from actors.run.speeds import Speeds
from actors.run.steps import StepRunner
from actors.state.commit_log import CommitLog
from actors.state.run_state import RunState
from actors.state.survivors import Survivors
from actors.step import CollectedStep, DataLost, GenerationLost, Seat

log = logging.getLogger(__name__)

_STEPS_AHEAD = 2  # dispatched at a time: the running one and the next; a worker that is asked to leave finishes both
_LOOK_S = 0.2
_FIRST_PLAN_S = 0.05  # after a change of the cluster a plan must come at once; better ones follow


class Rendezvous(Protocol):
    """Where the workers of a generation meet: torch.distributed's TCPStore."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


@dataclass(kw_only=True)
class Controller:
    """One run, from its first step (or the last committed one) to its end. All parts are given; none calls back."""

    config: RuntimeConfig
    listener: Listener
    events: Events
    pool: Pool
    monitor: MonitorHandle
    lookout: Lookout
    membership: Membership
    source: StepSource
    planner: PlannerClient
    commits: CommitLog
    survivors: Survivors
    state: RunState
    new_store: Callable[[], Rendezvous]  # one for each generation: what torch leaves in it must not reach the next
    account: StepAccount
    skips: Skips
    state_gib: float = 0.0  # of the training state that the workers of a generation share
    clock: PatientClock = field(default_factory=PatientClock)

    left: str = ""  # after `train`: what is not on disk, and how to go on
    runner: StepRunner | None = None  # of the running generation

    def __post_init__(self) -> None:
        self.view: View = self.membership.view()
        self.events.begin(self.view.generation)
        self._speeds = Speeds()
        self._next_step = 0
        self._stop_by = 0.0  # monotonic seconds; 0 while nobody has asked the run to end
        self._last_look = 0.0
        self._broken_at: float | None = None
        self._stores: deque[Rendezvous] = deque(maxlen=2)  # workers of the last generation may still be leaving
        self._proven = 0  # the newest generation that has finished a step

    def train(self) -> Outcome:
        """Run to the end. Ray's errors leave the state to the controller that comes next; whatever else ends the run,
        raised or returned, its last committed step is on disk then, or `self.left` says where it is."""
        try:
            self._begin()
            while self.commits.committed < self.config.train.steps - 1:
                self._look()
                self._advance()
            self._finish_checkpoint()
            self._free_memory()
            return self._outcome(Exit.OK, "all steps are committed")
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
        self.commits.restart(origin.step if origin is not None else -1)
        self._look()  # workers start while the data is opened
        self._next_step = self.commits.committed + 1
        accounting = self.source.open(self._next_step, self.state.data_token())
        where = "new" if origin is None else origin.checkpoint or "keepers"
        self.events.tell(RunStarted(from_step=self._next_step, pid=os.getpid(), data=accounting, origin=where))
        self.account.last_ended_at = time.time()

    # -- one round: look, dispatch, collect, commit --------------------------------------------------------------------

    def _look(self) -> None:
        """Everything that may have changed outside the running step, at most every _LOOK_S seconds."""
        now = time.monotonic()
        if now - self._last_look < _LOOK_S:
            return
        self._last_look = now
        self._look_at_survivors()  # before anybody's patience is up: they may have answered long ago
        for event in self.lookout.look():
            self._observe(event)
        self._look_for_the_end(now)
        self.state.writer.poll()  # a checkpoint is sealed when it is written, also while the next step waits for data
        self._observe(Tick())

    def _advance(self) -> None:
        """Dispatch, collect, commit; at a step boundary let the membership change."""
        runner = self.runner
        if runner is None:
            time.sleep(_LOOK_S / 4)
            return
        try:
            self._dispatch(runner)
            if runner.running and (done := runner.collect(timeout_s=_LOOK_S)) is not None:
                self._collected(runner, done)
            self._settle(runner, quiet=not runner.running)
            if not runner.running:
                self._at_boundary(runner)
        except GenerationLost as lost:
            self._lost(lost)
        except DataLost as error:
            self._reopen_data(str(error))
            self._observe(Broken(generation=self.view.generation, reason=str(error)))

    def _dispatch(self, runner: StepRunner) -> None:
        """Keep two steps on the workers, as long as their data is there and nobody waits for a boundary."""
        while (
            len(runner.running) < _STEPS_AHEAD
            and self._next_step < self.config.train.steps
            and not self.view.change_pending
            and not self._stop_by
            and len(self.commits) < _STEPS_AHEAD
        ):
            waiting_since = time.perf_counter()
            ready = self.source.has(self._next_step, timeout_s=0.0 if runner.running else _LOOK_S)
            if not runner.running:
                self.account.data_wait_s += time.perf_counter() - waiting_since
            if not ready:
                return
            step = runner.dispatch(self._next_step)
            log.debug("step %d: %d calls dispatched in %.1f ms", step.step, step.num_calls, step.dispatch_s * 1e3)
            self._next_step += 1

    def _collected(self, runner: StepRunner, done: CollectedStep) -> None:
        """All workers have finished a step."""
        if self._broken_at is not None:
            seconds = round(done.collected_at - self._broken_at, 3)
            self.events.tell(StepsRecovered(step=done.running.step, seconds=seconds))
            self._broken_at = None
        if self._proven < done.running.generation:
            self._proven = done.running.generation
            self._observe(Finished())
        self.skips.check(done, self.commits.committed)
        self.commits.add(done)
        self.state.finished(done)
        tokens = {item.id: item.text_tokens for item in done.running.data.items.items}
        self.planner.observe([s for r in done.reports for s in r.spans], tokens)
        self._learn_speeds(runner, done)
        runner.count_on_room(done.reports)

    def _settle(self, runner: StepRunner | None, quiet: bool, timeout_s: float = 0.0) -> None:
        """Commit what has become safe; where keepers are gone or silent, have others hold it."""
        for done in self.commits.settle(timeout_s):
            self._commit(done)
        if self.commits.stuck is not None and runner is not None:
            held = self.state.repair_keepers(self.commits.stuck, runner.world, quiet)
            if held is not None:
                self.commits.replace_acknowledgements(held)

    def _commit(self, done: CollectedStep) -> None:
        """The oldest finished step is safe: it counts once its metrics are written. Once per step and in order."""
        step = done.running.step
        metrics, timeline = self.account.records(done)
        try:
            self.listener.on_step(metrics, timeline, done.running.assignment)
        except Exception:
            self.commits.restart(step - 1)  # without its line it is computed again; keepers hold that one
            raise
        self.commits.commit(step)
        self.state.committed(done, self.source.release(step))

    def _at_boundary(self, runner: StepRunner) -> None:
        """Nothing runs: either the run is over, or commits must catch up, or the pool is about to change."""
        if self._next_step >= self.config.train.steps or self._stop_by or not self.view.change_pending:
            self._settle(runner, quiet=True, timeout_s=_LOOK_S)
        else:
            self._observe(Boundary(step=self._next_step - 1))

    def _learn_speeds(self, runner: StepRunner, done: CollectedStep) -> None:
        """The next plan counts on the workers' measured speeds."""
        if self.config.planner.strategy == "exact":
            return
        names = [seat.name for seat in runner.world]
        self._speeds.observe(done.reports, dict(zip(names, runner.cluster.speed, strict=False)))
        speed = self._speeds.factors(names)
        if speed != runner.cluster.speed:
            self.events.tell(SpeedsLearned(speed=dict(zip(names, speed, strict=False))))
            runner.count_on(speed)

    # -- what was seen -------------------------------------------------------------------------------------------------

    def _observe(self, event: Event) -> None:
        self.view, decisions = self.membership.observe(event, self.clock.now())
        self.events.begin(self.view.generation)
        for decision in decisions:
            self._apply(decision)

    def _look_at_survivors(self) -> None:
        for parted in self.survivors.poll():
            if parted.died:
                self._remove(worker_name(parted.worker))
                self._observe(Dead(worker=parted.worker, reason=f"died while leaving its groups: {parted.died}"))
            else:
                self._observe(HandedOver(worker=parted.worker))

    def _look_for_the_end(self, now: float) -> None:
        """Raises StopRun when somebody has asked the run to end, or no worker can start."""
        if self.lookout.stop and not self._stop_by:
            self.events.tell(RunStopping(why=self.lookout.stop))
            self._stop_by = now + self.config.workers.collective_timeout_s
        # What runs is finished and committed first, if that does not take too long.
        quiet = (self.runner is None or not self.runner.running) and not len(self.commits)
        if self._stop_by and (quiet or now > self._stop_by):
            raise self._stop(Exit.RESUMABLE, self.lookout.stop)
        if self.lookout.hopeless and len(self.view.members) < self.config.workers.min:
            raise self._stop(Exit.FAILURE, self.lookout.hopeless)

    def _lost(self, lost: GenerationLost) -> None:
        log.warning("generation %d: %s", self.view.generation, lost)
        self._broken_at = self._broken_at or time.time()
        generation = self.view.generation
        for name in lost.dead:
            self._remove(name)
            where = self.lookout.doing(name)
            self.events.tell(WorkerDied(worker=name, why=where.strip()))
            self._observe(Dead(worker=worker_number(name), reason=f"died{where}"))
        if lost.pixels_lost:
            self._reopen_data("decoded batches were lost")
        if lost.failed:
            learned = [self._avoid(found) for found in lost.exceeded]
            reason = f"{lost}{self.lookout.late()}"
            self._observe(Broken(generation=generation, reason=reason, learned=any(learned)))

    def _avoid(self, found: MemoryExceeded) -> bool:
        """The next plans do without what ran out of memory. Whether that is news to the planner."""
        self.events.tell(
            MemoryRanOut(
                worker=found.worker,
                step=found.step,
                cascade=found.name,
                degree=found.degree,
                peak_gib=round(found.peak_gib, 3),
                room_gib=round(found.room_gib, 3),
            )
        )
        items = self.source.items(found.step)
        return self.planner.exceeded(found, {item.id: item.text_tokens for item in items.items} if items else {})

    def _reopen_data(self, why: str) -> None:
        """What is not committed is decoded again, by a new feeder."""
        self.events.tell(FeederLost(why=why))
        self.source.open(self.commits.committed + 1, self.state.data_token())

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Form():
                self._form(decision)
            case End():
                self._end(decision)
            case Drain():
                self.events.tell(WorkerDrained(worker=worker_name(decision.worker), why=decision.reason))
                self._await_formed()  # it may hold state that the others still fetch
                self._remove(worker_name(decision.worker))
            case Replace():
                self.events.tell(WorkerReplaced(worker=worker_name(decision.worker), why=decision.reason))
                self._remove(worker_name(decision.worker), frozen=True)
            case Request():
                missing = self.view.requested - len(self.pool.pending)
                if missing > 0:
                    self.pool.start(missing)
            case Wait():
                log.warning("%s", decision)
                self.events.tell(WorkersAwaited(detail=str(decision)))
            case Fail():
                self.events.tell(RunFailed(why=decision.reason, code=decision.code))
                raise self._stop(decision.code, decision.reason)

    def _end(self, decision: End) -> None:
        """The generation is over. After a failure its survivors must leave the groups; then they can join again."""
        self.events.tell(GenerationEnded(generation=decision.generation, why=decision.reason, clean=decision.clean))
        self.survivors.ended(decision.generation)
        self.lookout.try_again()
        if decision.clean:  # too few are left: until there are more, these hold the state besides the keepers
            self._settle_all()
            if self.runner is not None:
                self.survivors.take(self.runner.world, self.commits.newest)
            self.runner = None
            return
        self.runner = None
        self._broken_at = self._broken_at or time.time()
        self.monitor.announce.remote(decision.generation + 1)
        for member in self.view.members:
            name = worker_name(member.worker)
            if member.phase == "recovering" and name in self.pool.names:
                self.survivors.part(member.worker, self.pool.handle(name))

    def _form(self, decision: Form) -> None:
        """Seat the workers, hand out the state, begin. A worker lost meanwhile breaks the generation like any other."""
        started = time.time()
        if decision.clean and self.runner is not None:
            self._settle_all()
        infos = [self.pool.info(worker_name(n)) for n in decision.workers]
        if why := disagreement(infos):
            raise self._stop(Exit.FAILURE, why)
        self.monitor.announce.remote(decision.generation)
        before = self.commits.committed
        holders = self.runner.world if self.runner is not None else ()  # a clean change: everyone holds the last step
        recovery = self.state.recover(decision.generation, holders)
        if recovery.origin is None and (why := first_disagreement(infos)):
            raise self._stop(Exit.FAILURE, why)
        for done in recovery.newly_safe:
            self._commit(done)
        self.commits.restart(recovery.step)
        self.state.begin(recovery)
        if self.commits.committed < before:
            self.source.open(self.commits.committed + 1, self.state.data_token())
        world = seats_of(infos, self.pool.handle, self.state_gib)
        self.state.place_keepers([seat.node for seat in world])
        self._stores.append(self.new_store())
        address = (self._stores[-1].host, self._stores[-1].port)
        tasks = form_tasks(decision.generation, world, address, recovery.origin, self.state.keepers.of)
        self.runner = StepRunner(
            generation=decision.generation,
            world=world,
            cluster=cluster_of(world),
            source=self.source,
            planner=self.planner,
            budget_s=self.config.planner.budget_s,
            first_budget_s=min(_FIRST_PLAN_S, self.config.planner.budget_s),
            lookahead=self.config.planner.lookahead,
            exports=self.state.is_exported,
            last_step=self.config.train.steps,
            forming=[
                seat.handle.form.options(name=f"form g{task.generation}").remote(task)
                for seat, task in zip(world, tasks, strict=True)
            ],
        )
        self._next_step = self.commits.committed + 1
        self.account.last_ended_at = started
        self._tell_generation(decision, self.runner, started)

    def _tell_generation(self, decision: Form, runner: StepRunner, started: float) -> None:
        self.events.tell(
            GenerationFormed(
                generation=decision.generation,
                workers=tuple(seat.name for seat in runner.world),
                cluster=runner.cluster.nodes,
                why=decision.reason,
                from_step=self._next_step,
                seconds=round(time.time() - started, 3),
            )
        )

    def _await_formed(self) -> None:
        """Returns when every worker has formed the generation, or one has failed to, or time is up."""
        forming = self.runner.forming if self.runner is not None else []
        if forming:
            wait(forming, num_returns=len(forming), timeout=self.config.workers.collective_timeout_s)

    def _settle_all(self) -> None:
        """Wait for the commits of a clean boundary, so that the next generation starts from the last finished step."""
        deadline = time.monotonic() + self.config.workers.collective_timeout_s
        try:
            while len(self.commits) and time.monotonic() < deadline:
                self._settle(self.runner, quiet=True, timeout_s=_LOOK_S)
        except GenerationLost as lost:
            log.warning("uncommitted steps are left to what others hold: %s", lost)

    def _remove(self, name: str, frozen: bool = False) -> None:
        self.pool.remove(name, frozen=frozen)
        self.monitor.remove.remote(name)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish_checkpoint(self) -> None:
        """Returns when the last step is on disk: an attempt may have lost its shards with their workers."""
        self.state.writer.wait()
        last = self.config.train.steps - 1
        if self.state.step_on_disk() < last:
            self.state.keep_last(self.runner.world if self.runner is not None else ())
        if self.state.step_on_disk() < last:
            raise self._stop(
                Exit.FAILURE,
                f"all steps are done, but the checkpoint of step {last} was not written (see "
                f"{self._run_dir}/events.jsonl). Make room in {self._run_dir} and continue with --resume.",
            )
        self.events.tell(RunFinished(step=self.commits.committed, ledger=self.source.ledger()))

    def _keep_last(self) -> None:
        """The run ends before its last step: what can be resumed goes to disk, nothing stays behind. Never raises."""
        self.events.end()
        try:
            saved = self.state.keep_last(self._quiet_world())
            for done in self.commits.finished_until(saved):
                self._commit(done)
            if saved > self.commits.committed:
                self.commits.restart(saved)
        except Exception:  # whatever it is, the rest of the end must come
            log.exception("the last committed step was not written")
        try:
            self._free_memory()
        except Exception:
            log.exception("keepers and monitor could not be ended")

    def _quiet_world(self) -> Sequence[Seat]:
        """The workers, where they wait between two steps."""
        return self.runner.world if self.runner is not None and not self.runner.running else ()

    def _free_memory(self) -> None:
        if self.state.free_memory():
            kill(self.monitor)
            return
        self.monitor.stopped.remote()
        self.left = only_in_memory(self.commits.committed, self.state.step_on_disk(), self._run_dir)

    def _close(self) -> None:
        """End the run's workers and helpers. Keepers and monitor are ended by `_free_memory`: after an error that Ray
        Train answers with another controller they are what it continues from."""
        for part in (self.pool, self.source, self.planner):
            try:
                part.close()
            except Exception:  # Ray may be gone: the others are ended all the same, and the first error is the one told
                log.warning("%s could not be ended", type(part).__name__, exc_info=True)

    @property
    def _run_dir(self) -> Path:
        return Path(self.config.run_dir)

    def _outcome(self, code: int, reason: str) -> Outcome:
        return Outcome(code=code, reason=reason, last_step=self.commits.committed)

    def _stop(self, code: int, reason: str) -> StopRun:
        return StopRun(self._outcome(code, reason))
