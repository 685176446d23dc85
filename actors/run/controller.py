"""The run, from its first step to its end: one loop that looks, dispatches, collects and commits.

`Controller.train` keeps two steps on the workers, takes in what has finished and commits what is held. Each of its
parts has one question: `GenerationManager` which workers run the steps, `StepRunner` what a step's calls are,
`Committer` which steps count, `AsideTurns` which workers make samples beside them, `Ending` what stays when the run is
over. All are given; they return values or raise, and none calls back.
`actors/run/assemble.py` builds them; read on in `actors/run/steps.py` (one step) and `actors/worker/worker.py` (one
cascade).
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass, field

from actors.config import RuntimeConfig
from actors.feed.step_source import DataCounts, StepSource
from actors.garbage import rare_garbage_collection
from actors.outcome import Events, Exit, Outcome, StopRun, Superseded, continues
from actors.plan.types import PlanError
from actors.planning.client import PlannerClient
from actors.pool.lookout import Lookout
from actors.pool.membership_types import Boundary, Break, Starvation, Tick
from actors.records.events import RunStarted, RunStopping, SamplesDropped, SpeedsLearned
from actors.run.asides import AsideTurns
from actors.run.committer import Committer
from actors.run.data_wait import DataPace, DataWait
from actors.run.decode_room import DecodeRoom
from actors.run.ending import Ending
from actors.run.generations import GenerationManager
from actors.run.misfits import Misfits
from actors.run.recalibrate import Recalibration
from actors.run.skips import Skips
from actors.run.speeds import Speeds
from actors.run.step_pace import StepPace
from actors.run.steps import StepRunner
from actors.state.run_state import RunState
from actors.step import CollectedStep, DataLost, GenerationLost
from data.errors import DataUnreachable

log = logging.getLogger(__name__)

_HELD_S = 0.05  # for keepers to say that they hold a step
_STEPS_AHEAD = 2  # dispatched at a time: the running one and the next; a worker that is asked to leave finishes both


@dataclass(frozen=True, kw_only=True, slots=True)
class LookPace:
    """How often the controller looks at what may have changed: outside the running step, and in it before it ends.

    On a thousand workers a look takes 0.02 s and more of this process; looks are then so far apart that they take
    `share` of the time, but no further than a death may go unnoticed.
    """

    least_s: float = 0.2
    longest_s: float = 2.0
    share: float = 0.02

    def after(self, spent_s: float) -> float:
        """Seconds from a look that took `spent_s` of the CPU to the next."""
        return max(self.least_s, min(spent_s / self.share, self.longest_s))


@dataclass(kw_only=True)
class Controller:
    """One run, from its first step (or the last committed one) to its end."""

    config: RuntimeConfig
    events: Events
    lookout: Lookout
    generations: GenerationManager
    source: StepSource
    planner: PlannerClient
    state: RunState
    committer: Committer
    skips: Skips
    ending: Ending
    asides: AsideTurns
    speeds: Speeds = field(default_factory=Speeds)
    recalibration: Recalibration | None = None
    look_pace: LookPace = field(default_factory=LookPace)
    data_pace: DataPace = field(default_factory=DataPace)
    _step_pace: StepPace = field(default_factory=StepPace, init=False)
    _stop_by: float = field(default=0.0, init=False)  # monotonic seconds; 0 while nobody has asked the run to end
    _looked_at: float = field(default=0.0, init=False)  # monotonic seconds
    _look_s: float = field(default=0.0, init=False)  # from that look to the next
    # CPU seconds of the last `collect` that found no step to have ended
    _collect_s: float = field(default=0.0, init=False)
    _data_wait: DataWait = field(init=False)
    _misfits: Misfits = field(init=False)
    _decode_room: DecodeRoom = field(init=False)

    def __post_init__(self) -> None:
        self._data_wait = DataWait(self.events.tell, self.committer.say, self.data_pace)
        self._misfits = Misfits(self.config.workers.wait_s, self.events.tell)
        self._decode_room = DecodeRoom(self.config.data.engine, self.config.workers.cpus_per_worker, self.events.tell)

    @property
    def left(self) -> str:
        """After `train`: what is not on disk, and how to go on."""
        return self.ending.left

    def train(self) -> Outcome:
        """Run to the end. Ray's errors leave the state to the controller that comes next; whatever else ends the run,
        raised or returned, its last committed step is on disk then, or `self.left` says where it is."""
        with rare_garbage_collection():
            return self._train()

    def _train(self) -> Outcome:
        try:
            self._begin()
            while self.committer.committed < self.config.train.steps - 1:
                self._look()
                self._advance()
            self.generations.pool.rest()
            self.ending.finish(self.generations.world, self._is_stopped)
            if self.asides.finish(self.generations.view.generation, self.generations.world, self._is_stopped):
                self.generations.pool.rest()
            self.ending.free_memory()
            self.planner.save_learned()
            return self.committer.outcome(Exit.OK, "all steps are committed")
        except StopRun as stop:
            self._keep_what_there_is()
            return stop.outcome
        except Superseded:  # the folder and what the keepers hold are another start's now
            raise
        except Exception as error:
            if not continues(error):
                log.exception("the run ends")
                self._keep_what_there_is()
            raise
        finally:
            self.ending.close()

    def _keep_what_there_is(self) -> None:
        """The run ends before its last step."""
        self.ending.keep_last(self.generations.quiet_world)
        self.planner.save_learned()

    def _is_stopped(self) -> bool:
        """Whether somebody has asked the run to end, after its last step."""
        if time.monotonic() - self._looked_at > self._look_s:
            self._looked_at = time.monotonic()
            self.lookout.look()  # what comes or goes matters no more
        return bool(self.lookout.stop)

    def _begin(self) -> None:
        origin = self.committer.first()
        self._look()  # workers start while the data is opened
        accounting = self._open_data(waits=origin is not None)
        first = self.committer.committed + 1
        if (dropped := SamplesDropped.of(accounting)) is not None:
            self.events.tell(dropped)
        learned = self.config.train.init_from
        new = f"new, with what {learned} has learned" if learned else "new"
        where = new if origin is None else origin.checkpoint or "keepers"
        self.events.tell(RunStarted(from_step=first, pid=os.getpid(), data=accounting, origin=where))
        self.committer.account.begin(time.monotonic())

    def _open_data(self, *, waits: bool) -> DataCounts:
        """Returns the data set's accounting. With `waits` storage that does not answer is tried again; a run that
        starts for the first time raises instead, while somebody is there to see it."""
        while True:
            committed = self.committer.committed  # a generation that forms meanwhile may go back
            try:
                accounting = self.source.open(committed + 1, self.state.data_token(committed))
            except DataUnreachable as error:
                if not waits:
                    raise
                self._data_wait.failed(committed + 1, error, time.monotonic())
                while not self._data_wait.is_due(time.monotonic()):
                    self._look()
                    time.sleep(self.look_pace.least_s)
            else:
                self._data_wait.tried()
                return accounting

    # -- one round: look, dispatch, collect, commit --------------------------------------------------------------------

    def _look(self) -> None:
        """Everything that may have changed outside the running step, as often as the pace says."""
        now, began = time.monotonic(), time.thread_time()
        if now - self._looked_at < self._look_s:
            return
        self._looked_at = now
        self.generations.look()
        self._stop_if_asked(now)
        self.state.writer.poll()  # a checkpoint is sealed when it is written, also while the next step waits for data
        self.generations.observe(Tick())
        if (runner := self.generations.runner) is not None:
            runner.relays.renew(now)
        self._look_s = self.look_pace.after(time.thread_time() - began + self._collect_s)

    def _stop_if_asked(self, now: float) -> None:
        """Raises StopRun when somebody has asked the run to end and nothing runs any more, or no worker can start."""
        if self.lookout.stop and not self._stop_by:
            self.events.tell(RunStopping(why=self.lookout.stop))
            self.state.writer.hurry()
            least = self.config.workers.collective_timeout_s
            running = self.generations.runner.running if self.generations.runner is not None else []
            self._stop_by = now + max([least, *(step.patience.limit_s for step in running)])
        # What runs is finished and committed first, if that does not take too long. Between two generations nothing is:
        # what keepers hold of finished steps counts at the end.
        runner = self.generations.runner
        settled = self.committer.awaits_storage or not self.committer.num_open
        quiet = runner is None or (not runner.running and settled)
        if self._stop_by and (quiet or now > self._stop_by):
            raise StopRun(self.committer.outcome(Exit.RESUMABLE, self.lookout.stop))
        if self.lookout.hopeless and len(self.generations.view.members) < self.config.workers.min:
            raise StopRun(self.committer.outcome(Exit.FAILURE, self.lookout.hopeless))

    def _advance(self) -> None:
        """Dispatch, collect, commit; at a step boundary let the membership change."""
        runner = self.generations.runner
        if runner is None:
            time.sleep(self.look_pace.least_s / 4)
            return
        try:
            self._dispatch(runner)
            if not runner.running:  # its first step may wait for data all the while
                runner.check_forming()
            began = time.thread_time()
            done = runner.collect(timeout_s=self._look_s) if runner.running else None
            if done is not None:
                self._collected(runner, done)
            else:
                self._collect_s = time.thread_time() - began
            # The update of the next step waits for this commit, and keepers of one node answer at once.
            held_s = _HELD_S if done is not None else 0.0
            self.committer.settle(runner.world, quiet=not runner.running, timeout_s=held_s)
            if not runner.running:
                runner.end_hanging_relays()  # a commit may wait for one, and no step does
                runner.take_up_relays()
                self._at_boundary(runner)
                self._try_data()
        except DataUnreachable as error:
            self._data_wait.failed(runner.next_step, error, time.monotonic())
        except GenerationLost as lost:
            self.generations.lost(lost)
        except DataLost as error:
            self.committer.reopen_data(str(error))
            self.generations.observe(Break(generation=self.generations.view.generation, reason=str(error)))

    def _dispatch(self, runner: StepRunner) -> None:
        """Keep two steps on the workers, as long as their data is there and nothing waits for a boundary."""
        while (
            len(runner.running) < _STEPS_AHEAD
            and not runner.at_end
            and not self.generations.view.change_pending
            and not self._stop_by
            and not self._has_unrecorded
            and not self._data_wait.closed
            and not runner.awaits_quiet
            and self.committer.num_open < _STEPS_AHEAD
        ):
            waiting_since = time.perf_counter()
            ready = self.source.has(runner.next_step, timeout_s=0.0 if runner.running else self.look_pace.least_s)
            if not runner.running:
                waited_s = time.perf_counter() - waiting_since
                self.committer.account.waited_for_data(waited_s)
                self._step_pace.waited_for_data(waited_s)
            if self._starvation_changed(is_fed=ready or bool(runner.running)) or not ready:
                return
            if self._data_wait.came(runner.next_step, time.monotonic()):
                why = "the data was opened anew"  # `learned`: however often it is, no worker is the cause
                self.generations.observe(Break(generation=runner.generation, reason=why, learned=True))
                return
            try:
                step = runner.dispatch()
            except PlanError as error:
                if self.config.planner.misfit != "wait":
                    raise
                self._await_a_fit(runner, error)
                return
            self.generations.dispatched(runner.running)
            self._misfits.planned(step.assignment.adapted)
            log.debug("step %d: %d calls dispatched in %.1f ms", step.step, step.num_calls, step.dispatch_s * 1e3)

    def _try_data(self) -> None:
        """Nothing runs, and the data could not be read: open it anew once that is due. Steps that are finished come
        first, as their data goes with the feeder."""
        if not self.committer.num_open and self._data_wait.is_due(time.monotonic()):
            self._data_wait.tried()
            self.committer.try_data()

    def _starvation_changed(self, *, is_fed: bool) -> bool:
        """Tell the membership when the next step's clips cannot be decoded any more for want of a CPU, or can again.
        Returns whether this is news. `is_fed`: no worker waits for these clips."""
        before = self._decode_room.lacks
        if is_fed:
            self._decode_room.came()
        else:
            self._decode_room.awaited(self.source.avoid, self.generations.pool.taken(), time.monotonic())
        if self._decode_room.lacks == before:
            return False
        self.generations.observe(Starvation(starves=self._decode_room.lacks))  # may end the generation
        return True

    def _await_a_fit(self, runner: StepRunner, error: PlanError) -> None:
        """These workers cannot run the next step: others may come. Raises StopRun when none have for too long."""
        try:
            self._misfits.refused(error, time.monotonic())
        except PlanError:
            reason = f"no workers that can run step {runner.next_step} (workers.wait_s): {error}"
            raise StopRun(self.committer.outcome(Exit.RESUMABLE, reason)) from None
        if not runner.running:
            time.sleep(self.look_pace.least_s / 4)

    def _collected(self, runner: StepRunner, done: CollectedStep) -> None:
        """All workers have finished a step."""
        self.generations.finished(done)
        suspect = self.skips.check(done, self.committer.committed)
        self.committer.add(done)
        if suspect and self.generations.distrust(suspect):
            self.skips.forget_where()
        tokens = {item.id: item.text_tokens for item in done.running.data.items.planned}
        called = sorted(done.running.finishes.values())  # by themselves; the others' spans are in answers of relays
        spans = [span for rank in called for span in done.reports[rank].spans]
        remainder_s, answers = self._step_pace.remainder(done), tuple(done.running.letters)
        self.planner.observe(spans, tokens, runner.cluster, runner.generation, remainder_s, answers)
        if self.state.saves(done.running.step):
            self.planner.ask_learned()
        self.planner.poll()
        self._learn_speeds(runner, done)
        rooms = runner.count_on_room(done)
        if self.recalibration is not None:
            self.recalibration.collected(done.running.step, min(rooms, default=math.inf))

    def _learn_speeds(self, runner: StepRunner, done: CollectedStep) -> None:
        """The next plan counts on the workers' measured speeds."""
        if self.config.planner.strategy == "exact":
            return
        names = [seat.name for seat in runner.world]
        self.speeds.observe(done.reports, dict(zip(names, done.running.speed, strict=False)))
        speed = self.speeds.factors(names, runner.cluster.speed)
        if speed != runner.cluster.speed:
            self.events.tell(SpeedsLearned(speed=dict(zip(names, speed, strict=False))))
            runner.count_on(speed)

    @property
    def _has_unrecorded(self) -> bool:
        """Whether there are steps that cannot be recorded now."""
        return self.committer.awaits_storage and self.committer.num_open > 0

    def _at_boundary(self, runner: StepRunner) -> None:
        """Nothing runs: either the run is over, or commits must catch up, or the pool is about to change. Not while
        there are steps that cannot be recorded: another generation would compute them again."""
        waits = runner.at_end or self._stop_by or self._has_unrecorded
        if waits or not self.generations.view.change_pending:
            self.committer.settle(runner.world, quiet=True, timeout_s=self.look_pace.least_s)
        else:
            self.generations.observe(Boundary())
