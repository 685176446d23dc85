"""Which workers run the steps: feeds the membership with what is seen of the workers and carries out what it decides.

The decisions are made in `actors.pool.membership`; the start of a generation is in `actors.run.forming`. Here a
generation ends, and single workers go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors.clock import PatientClock
from actors.config import RuntimeConfig
from actors.messages import MemoryExceeded, WorkerInfo
from actors.outcome import Events, StopRun
from actors.pool.lookout import Lookout, worker_name, worker_number
from actors.pool.membership import Membership
from actors.pool.membership_types import (
    Break,
    Death,
    Decision,
    Distrust,
    Drain,
    End,
    Event,
    Exclusion,
    Failure,
    FirstStep,
    Form,
    NodeRest,
    RecoveredWorker,
    Replacement,
    Request,
    StepDispatch,
    View,
    Wait,
)
from actors.pool.monitor import MonitorHandle
from actors.pool.workers import Pool
from actors.ray_calls import wait
from actors.records.events import (
    ClusterSeen,
    EnvironmentSeen,
    GenerationEnded,
    GenerationFormed,
    MemoryRanOut,
    NodeRests,
    RunFailed,
    StepsRecovered,
    WeightsFetched,
    WorkerDied,
    WorkerDrained,
    WorkerReplaced,
    WorkersAwaited,
    WorkersLeftOut,
    events_so_far,
)
from actors.refs import Ref
from actors.run.cluster_words import seen
from actors.run.committer import Committer
from actors.run.environment_words import environment_of
from actors.run.failures import error_of
from actors.run.forming import Forming
from actors.run.steps import StepRunner
from actors.state.survivors import Survivors
from actors.step import CollectedStep, GenerationLost, RunningStep, Seat

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class GenerationManager:
    """The generations of one run, one after the other; `runner` runs the steps of the present one."""

    config: RuntimeConfig
    events: Events
    pool: Pool
    monitor: MonitorHandle
    lookout: Lookout
    membership: Membership
    survivors: Survivors
    forming: Forming
    committer: Committer
    clock: PatientClock = field(default_factory=PatientClock)
    runner: StepRunner | None = None  # None between two generations

    def __post_init__(self) -> None:
        self.view: View = self.membership.view()
        self.events.begin(self.view.generation)
        self._broken_at: float | None = None  # monotonic seconds
        self._proven = 0  # the newest generation that has finished a step
        self._leaving: dict[str, float] = {}  # workers in no generation any more, and when they go at the latest
        self._handed_over: list[Ref[bool]] = []  # resolve when keepers hold what the last generation has left them
        self._told_of_fetching = False
        self._told_of_cluster: ClusterSeen | None = None
        self._environment: EnvironmentSeen | None = None  # as told last by this controller

    @property
    def world(self) -> tuple[Seat, ...]:
        """The workers of the running generation, in order of ranks; none between two."""
        return self.runner.world if self.runner is not None else ()

    @property
    def quiet_world(self) -> tuple[Seat, ...]:
        """The workers, where they wait between two steps; else none."""
        return self.world if self.runner is not None and not self.runner.running else ()

    # -- what is seen --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in everything that has changed with the workers, outside the running step."""
        answered: list[Event] = []
        for parted in self.survivors.poll():  # before any patience is up: they may have answered long ago
            if parted.died:
                self._remove(worker_name(parted.worker))
                answered.append(Death(worker=parted.worker, reason=f"died while leaving its groups: {parted.died}"))
            else:
                answered.append(RecoveredWorker(worker=parted.worker))
        self.observe(*answered)
        self.observe(*self.lookout.look())
        self._let_go()

    def lost(self, lost: GenerationLost) -> None:
        """The running generation cannot go on."""
        generation, failures = self.view.generation, lost.failures
        log.warning("generation %d: %s", generation, lost)
        self._broken_at = self._broken_at or time.monotonic()
        for name in failures.dead:
            self._remove(name)
            heard = self.lookout.last_heard(name)
            self.events.tell(WorkerDied(worker=name, why=heard))
            self.observe(Death(worker=worker_number(name), reason=f"died, {heard}" if heard else "died"))
        if failures.pixels_lost:
            self.committer.reopen_data("decoded batches were lost")
        if failures.failed:
            learned = [self._avoid(found) for found in dict.fromkeys(failures.exceeded)]
            reason = f"{lost}{self.lookout.late()}"
            self.observe(Break(generation=generation, reason=reason, learned=any(learned), apart=lost.apart))

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
        items = self.forming.source.items(found.step)
        tokens = {item.id: item.text_tokens for item in items or ()}
        return self.forming.planner.exceeded(found, tokens)

    def dispatched(self, running: Sequence[RunningStep]) -> None:
        """These steps are on the workers: a worker that would survive the end of the generation may be busy in any of
        them, as long as it allows."""
        self.observe(StepDispatch(limit_s=max(step.patience.limit_s for step in running)))

    def finished(self, done: CollectedStep) -> None:
        """All workers have finished a step: the run has recovered, and the generation has proven itself."""
        if self._broken_at is not None:
            seconds = round(done.collected_at - self._broken_at, 3)
            self.events.tell(StepsRecovered(step=done.running.step, seconds=seconds))
            self._broken_at = None
        if self._proven < done.running.generation:
            self._proven = done.running.generation
            for member in self.view.members:
                if member.phase == "active":
                    self.lookout.frozen.update(member.info.frozen)
            self.observe(FirstStep())

    def distrust(self, name: str) -> bool:
        """A worker's GPU seems to compute wrongly: it leaves, if the run has enough others. Returns whether it does."""
        worker, why = worker_number(name), "losses were not finite on it alone, of various clips"
        self.observe(Distrust(worker=worker, reason=why))
        leaves = all(member.leaving for member in self.view.members if member.worker == worker)
        if not leaves:
            log.warning("%s stays, as the run has no other for it, though %s", name, why)
        return leaves

    def observe(self, *events: Event) -> None:
        """Pass events of one moment to the membership and carry out its decisions. Raises StopRun when the run cannot
        go on."""
        if not events:
            return
        self.view, decisions = self.membership.observe(events, self.clock.now())
        self.events.begin(self.view.generation)
        self.pool.shunned, self.pool.at_rest = self.view.shunned, self.view.at_rest
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
                self.events.tell(WorkerDrained(worker=worker_name(decision.worker), why=decision.reason))
                until = time.monotonic() + self.config.workers.state_timeout_s
                self._leaving[worker_name(decision.worker)] = until
                self._let_go()
            case Replacement():
                self.events.tell(WorkerReplaced(worker=worker_name(decision.worker), why=decision.reason))
                self._remove(worker_name(decision.worker), frozen=True)
            case Request():
                missing = self.view.requested - len(self.pool.pending)
                if missing > 0:
                    self.pool.start(missing)
            case Wait():
                log.warning("%s", decision)
                self.events.tell(WorkersAwaited(detail=str(decision)))
            case Exclusion():
                names = tuple(worker_name(number) for number in decision.workers)
                self.events.tell(WorkersLeftOut(workers=names, why=decision.why))
                for name in names:  # it may have been in the last generation, and still write into its memory
                    self.pool.handle(name).hand_over.remote(None)
            case NodeRest():
                self.events.tell(NodeRests(host=decision.where.host, seconds=decision.seconds, why=decision.why))
            case Failure():
                self.events.tell(RunFailed(why=decision.reason, code=decision.code))
                raise StopRun(self.committer.outcome(decision.code, decision.reason))

    def _end(self, decision: End) -> None:
        """The generation is over. After a failure its survivors must leave the groups; then they can join again."""
        self.events.tell(GenerationEnded(generation=decision.generation, why=decision.reason, clean=decision.clean))
        self.lookout.try_again()
        if decision.clean:  # too few are left: until there are more, keepers hold the state
            self._handed_over = self._take_over()
            self.runner = None
            return
        self.runner, self._handed_over = None, []
        self._broken_at = self._broken_at or time.monotonic()
        self.monitor.announce.remote(decision.generation + 1)
        for member in self.view.members:
            name = worker_name(member.worker)
            if member.phase == "recovering" and name in self.pool.names:
                self.survivors.part(member.worker, self.pool.handle(name))

    def _take_over(self) -> list[Ref[bool]]:
        """The clean end of a generation: its finished steps are committed, and its workers, each of which has the
        last of them, leave it to their keepers. Returns what resolves when those hold it that take long."""
        if self.runner is None:
            return []
        self.committer.settle_all(self.world, self.config.workers.collective_timeout_s)
        late = self.committer.state.take_over(self.world, self.committer.log.newest)
        self._save_leaving()  # before any of these workers goes; the next ones may not fetch it in time
        return late

    def _save_leaving(self) -> None:
        self.committer.state.save_leaving(self.committer.committed)

    def _form(self, decision: Form) -> None:
        started = time.monotonic()
        if decision.clean:
            self._take_over()
        runner = self.runner = self.forming.form(decision)
        self.committer.account.begin(started)
        infos = decision.infos
        fetched = [info for info in infos if info.parameters == "node"]  # one is enough: all do as it does
        self.events.tell(
            GenerationFormed(
                generation=decision.generation,
                workers=tuple(seat.name for seat in runner.world),
                cluster=runner.cluster.nodes,
                why=decision.reason,
                from_step=runner.next_step,
                seconds=round(time.monotonic() - started, 3),
                gradients=infos[0].gradients,
                parameters="node" if fetched else infos[0].parameters,
            )
        )
        cluster = seen(runner.cluster, infos, self.config.cluster is not None)
        if cluster is not None and cluster != self._told_of_cluster:
            self._told_of_cluster = cluster
            self.events.tell(cluster)
        self._tell_environment(infos, runner.next_step)
        if fetched and self.config.train.memory.parameters == "auto" and not self._told_of_fetching:
            self._told_of_fetching = True
            self.events.tell(WeightsFetched(gib_per_node=max(info.host_weights_gib for info in fetched)))

    def _tell_environment(self, infos: Sequence[WorkerInfo], from_step: int) -> None:
        """What the workers compute with, once for this controller and whenever that has changed."""
        if not any(info.environment for info in infos):
            return
        before = self._environment or _last_environment(Path(self.config.run_dir))
        found = environment_of(infos, from_step, before)
        if found is not None and (self._environment is None or found.changed):
            self._environment = found
            self.events.tell(found)

    def _let_go(self) -> None:
        """End the workers that leave. Not while others may need what they hold, unless that takes too long."""
        if self.runner is None:  # what keepers hold is all that there is; with its last worker a node may go at once
            self._save_leaving()
        needed, now = bool(self._leaving) and self._is_state_awaited(), time.monotonic()
        for name in [name for name, until in self._leaving.items() if not needed or now >= until]:
            del self._leaving[name]
            self._remove(name)

    def _is_state_awaited(self) -> bool:
        """Whether workers still form the running generation, and none has failed to; where none runs, whether keepers
        still copy what the last one has left them; and whether what leaves is still being written. A node may leave
        with its last worker."""
        if self.committer.state.writes_leaving:
            return True
        awaited = self.runner.forming if self.runner is not None else self._handed_over
        if not awaited:
            return False
        done, waiting = wait([*awaited], num_returns=len(awaited), timeout=0)
        failed = self.runner is not None and any(error_of(one) is not None for one in done)
        return bool(waiting) and not failed

    def _remove(self, name: str, frozen: bool = False) -> None:
        self.pool.remove(name, frozen=frozen)
        self.monitor.remove.remote(name)


def _last_environment(run_dir: Path) -> EnvironmentSeen | None:
    """The environment that the run's events told last; None: none did, or they cannot be read."""
    try:
        return max(events_so_far(run_dir, EnvironmentSeen), key=lambda event: event.time, default=None)
    except OSError as error:
        log.warning("whether the environment has changed is not known: %s", error)
        return None
